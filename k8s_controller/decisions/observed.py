"""What is there: pods as the API server lists them, the training as its job server has it. Pure.

Nothing else is decided from. What the controller has to remember is in the TrainingJob's status.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from job_server.api.wire import JobStatus, Sharing, Way
from k8s_controller.decisions.spec import TRAINER

Object = Mapping[str, Any]

JOB_LABEL = "paddlepaddle.org/job-name"
ROLE_LABEL = "paddlepaddle.org/role"
INDEX_LABEL = "paddlepaddle.org/index"
GPUS_LABEL = "paddlepaddle.org/gpus"  # as its template had it: a webhook may ask for them otherwise
UNSCHEDULABLE = "Unschedulable"
INITIALIZING = "Initializing"
# Reasons of a pod that its node does not begin; the last two, as its GPUs or their plugin fail.
_NOT_TAKEN = ("Evicted", "NodeShutdown", "Terminated", "UnexpectedAdmissionError", "OutOf")
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
SEEN_STAGES = 50  # the newest, whose times count
MIN_STEPS = 5  # of a stage, for its times to count
UID_CHARS = 8  # of a pod's uid, in the name of its node at the job server


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPod:
    """A pod of a TrainingJob."""

    name: str
    uid: str
    index: int = -1  # of a trainer
    phase: str = "Pending"  # Pending, Running, Succeeded, Failed or Unknown
    leaving: bool = False  # it is deleted: its grace runs
    gone_by: float = 0.0  # seconds since 1970, when that is over
    ready: bool = False
    address: str = ""  # "": not known yet
    created_at: float = 0.0  # seconds since 1970
    placed_at: float = 0.0  # ... when it was given a node; 0: not yet
    initialized_at: float = 0.0  # ... when its init containers had ended, if it has any
    node: str = ""  # of Kubernetes; "": not scheduled
    trouble: str = ""  # one word, as of a condition's reason; "": none
    message: str = ""  # ... in words
    gpus: int | None = None  # that its trainers have; None: not known
    disrupted: bool = False  # it was ended for the sake of its node, or of other pods

    @property
    def node_id(self) -> str:
        """Return the name of its node at the job server: a pod of the same name is another one."""
        return node_id(self.name, self.uid)

    @property
    def over(self) -> bool:
        """Whether its containers have ended."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNode:
    """A trainer pod as the job server knows it."""

    alive: bool
    limit: int | None  # of slots; None: all. With 0 the training leaves it
    sick: str = ""  # why a slot of it is in quarantine, and so none of its pods can train; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What a job server that answers has said."""

    job: JobStatus | None  # None: it does not know the job
    nodes: Mapping[str, TrainingNode]
    most: int | None = None  # pods that the training may have; None: it has not begun, or is over
    now: float = 0.0  # by its clock, of which are all times that it says; 0: it has said none

    def uses(self, node_id: str) -> bool:
        """Whether the training has a pod on a node, or is to have one."""
        if self.job is None:
            return False
        allotment = self.job.allotment
        if any(pod.node_id == node_id for pod in self.job.pods):
            return True
        return allotment is not None and allotment.nodes.get(node_id, 0) > 0

    def answers(self, node_id: str) -> bool:
        """Whether the server hears a node."""
        node = self.nodes.get(node_id)
        return node is not None and node.alive

    @property
    def training_pods(self) -> int:
        """Return how many pods train now."""
        pods = () if self.job is None else self.job.pods
        return sum(pod.phase == "running" for pod in pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that a decision about one TrainingJob follows from, beside its spec and status."""

    trainers: tuple[ListedPod, ...] = ()
    server_pod: ListedPod | None = None
    server: ServerView | None = None  # None: it does not answer
    prepared: bool = False  # Secret, Service and so on were made in this life of the controller
    budget: int | None = None  # pods that may not be evicted, as it was written in this life
    closed: frozenset[str] = frozenset()  # nodes that the controller has closed, in this life


def node_id(name: str, uid: str) -> str:
    """Return the node id of a trainer pod's job client."""
    return f"{name}.{uid[:UID_CHARS]}"


def server_view(job: JobStatus | None, sharing: Sharing) -> ServerView:
    """Return what the answers of a job server say of its only job."""
    nodes = {
        node.node_id: TrainingNode(alive=node.alive, limit=node.limit, sick=node.quarantine)
        for node in sharing.nodes
    }
    most = next((each.max_pods for each in sharing.jobs), None)
    return ServerView(job=job, nodes=nodes, most=most, now=sharing.now)


def belongs_to(thing: Object, uid: str) -> bool:
    """Whether an object was made for the TrainingJob of that uid."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)


def step_seconds(job: JobStatus, now: float) -> dict[str, float]:
    """Return pods -> seconds of a step, as the job's newest stages had them.

    With `policy` linear a step of more pods is more work; then it is for the work of one pod.

    Args:
        now: by the job server's clock.
    """
    spent: dict[int, float] = {}
    made: dict[int, int] = {}
    for stage in job.stages[-SEEN_STAGES:]:
        runs = stage.stage == job.stage and stage.ended_at is None
        last, until = (job.step, now) if runs else (stage.last_step, stage.ended_at)
        first, since = stage.first_step, stage.first_step_at
        if first is None or since is None or last is None or until is None:
            continue
        if last - first >= MIN_STEPS and until > since:
            work = stage.pods if job.spec.policy == "linear" else 1
            spent[stage.pods] = spent.get(stage.pods, 0.0) + until - since
            made[stage.pods] = made.get(stage.pods, 0) + (last - first) * work
    return {str(pods): float(f"{spent[pods] / made[pods]:.3g}") for pods in sorted(spent)}


def change_seconds(job: JobStatus) -> float:
    """Return the mean pause of the job's newest changes, in seconds; 0: it had none."""
    pauses = [
        stage.pause_s
        for stage in job.stages[-SEEN_STAGES:]
        if stage.pause_s is not None and stage.way is not Way.START  # which may have waited
    ]
    return float(f"{sum(pauses) / len(pauses):.3g}") if pauses else 0.0


def observe_pods(
    pods: Iterable[Object], uid: str
) -> tuple[tuple[ListedPod, ...], ListedPod | None]:
    """Return the trainers in the order of their indexes, and the job server's pod.

    Pods of an earlier TrainingJob of the same name count as leaving: they only take names.
    """
    trainers, server = [], None
    for pod in pods:
        view = pod_view(pod)
        if not belongs_to(pod, uid):
            words = "a pod of another TrainingJob has this name; it is waited for until it is gone"
            view = replace(view, leaving=True, address="", trouble="NameTaken", message=words)
        role = pod["metadata"].get("labels", {}).get(ROLE_LABEL)
        if role == "trainer":
            trainers.append(view)
        elif role == "server":
            server = view
    return tuple(sorted(trainers, key=lambda pod: (pod.index, pod.name))), server


def pod_view(pod: Object) -> ListedPod:
    meta, status = pod["metadata"], pod.get("status") or {}
    index = str(meta.get("labels", {}).get(INDEX_LABEL, ""))
    gpus = str(meta.get("labels", {}).get(GPUS_LABEL, ""))
    trouble, message = _trouble(status)
    if not trouble and (first := _initializing(pod)):
        trouble, message = INITIALIZING, f"init container {first} runs"
    phase = str(status.get("phase", "Pending"))
    return ListedPod(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        index=int(index) if index.isdecimal() else -1,
        phase=_end_of_trainer(status) or phase,
        leaving="deletionTimestamp" in meta,
        gone_by=seconds(meta.get("deletionTimestamp")) or 0.0,
        ready=_is(status, "Ready"),
        address=str(status.get("podIP", "")),
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        placed_at=_placed_at(status),
        initialized_at=_initialized_at(status),
        node=str(pod.get("spec", {}).get("nodeName") or ""),
        trouble=trouble,
        message=message,
        gpus=int(gpus) if gpus.isdecimal() else None,
        disrupted=_is(status, "DisruptionTarget") or _is_not_taken(status),
    )


def _is_not_taken(status: Object) -> bool:
    reason = str(status.get("reason") or "")
    never_began = status.get("phase") == "Failed" and not status.get("podIP")
    return never_began and reason.startswith(_NOT_TAKEN)


def _is(status: Object, kind: str) -> bool:
    return any(
        each.get("type") == kind and each.get("status") == "True"
        for each in status.get("conditions") or ()
    )


def _placed_at(status: Object) -> float:
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "True":
            return seconds(each.get("lastTransitionTime")) or 0.0
    return 0.0


def _initializing(pod: Object) -> str:
    """Return the init container that runs and is waited for; "": none is."""
    stay = {
        each.get("name")
        for each in (pod.get("spec") or {}).get("initContainers") or ()
        if each.get("restartPolicy") == "Always"
    }
    for each in (pod.get("status") or {}).get("initContainerStatuses") or ():
        if "running" in (each.get("state") or {}) and each.get("name") not in stay:
            return str(each["name"])
    return ""


def _initialized_at(status: Object) -> float:
    ends = [
        ((each.get("state") or {}).get("terminated") or {}).get("finishedAt")
        for each in status.get("initContainerStatuses") or ()
    ]
    return max((seconds(end) or 0.0 for end in ends), default=0.0)


def _end_of_trainer(status: Object) -> str:
    """Return the phase that a pod has for us once its trainer container has ended; "": it has not.

    It is not started again; other containers of the pod may run on.
    """
    for each in status.get("containerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated")
        if each.get("name") == TRAINER and ended is not None:
            return "Failed" if ended.get("exitCode") else "Succeeded"
    return ""


def _trouble(status: Object) -> tuple[str, str]:
    """Return what keeps a pod from running: a reason of one word, and the words for people."""
    if status.get("phase") == "Failed" and status.get("reason"):  # by its node: codes say nothing
        return str(status["reason"]), str(status.get("message") or "it has failed").strip()
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return UNSCHEDULABLE, str(each.get("message", "")) or "no node has room for it"
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for each in statuses:
        state = each.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        reason, text = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if reason in _IMAGE_REASONS:
            said = text or "it cannot be pulled"
            return "ImagePull", f"image {each.get('image', '')}: {said}"
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return reason, text or f"container {each.get('name')} waits: {reason}"
        if ended and (ended.get("exitCode") or status.get("phase") == "Failed"):
            said = f"container {each.get('name')} ended with code {ended.get('exitCode')}"
            why = ended.get("message") or ended.get("reason") or ""
            return "Ended", f"{said}: {why}" if why else said
    if status.get("phase") == "Failed":
        return "Ended", str(status.get("message") or "it has failed")
    return "", ""


def seconds(text: Any) -> float | None:
    """Return a time of Kubernetes as seconds since 1970; None: there is none."""
    if not text:
        return None
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()


def time_text(at: float) -> str:
    """Return seconds since 1970 as Kubernetes writes times that need parts of a second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
