"""Decide what to do for one TrainingJob, from what is there. Pure.

Each pass looks at everything anew: the spec, the status, the pods, the job server's answer. It
may be cut off after any action and run again, by this controller or the next one.

A pod that comes is used when all that are wanted have registered with the job server: one planned
change, not one for each. A pod that is to go is first closed to the training (a limit of 0 slots);
it is deleted when the training has no pod on it, and is to have none.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from job_server.api.wire import JobState, Saved
from k8s_controller.decisions import status as states
from k8s_controller.decisions.objects import selector, server_name
from k8s_controller.decisions.observed import (
    INITIALIZING,
    UNSCHEDULABLE,
    ListedPod,
    Observed,
    ServerView,
    change_seconds,
    step_seconds,
)
from k8s_controller.decisions.spec import TrainingJobSpec
from k8s_controller.decisions.status import Phase, TrainingJobStatus

GATHER_S = 30.0  # how long a start or a growth waits for the last of its pods
PAUSE_AGAIN_S = 60.0  # a pause that was called off is asked for again
REFUSED = "Refused"  # of a condition: Kubernetes makes no such pod
NOT_DURABLE = "NotDurable"  # of a condition and an event: the newest state is in pods alone
WAITS = "WaitsForRoom"  # of a condition and an event, with `autoscale`
HEALTHY_S = 60.0  # a training that tells of no step has made some when it has run for so long
BACKOFF_S = (1.0, 60.0)  # after pods that ended by themselves: doubled each time, up to that
_WARNS = "warning: "  # begins the words of a condition
_RUNS = (JobState.RUNNING, JobState.PREPARING, JobState.CUTTING_OVER)
_HALTS = (JobState.PAUSING, JobState.STOPPING)


# --- what may be done; all of it may be done twice


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make Secret, Service and what else a job has beside its pods."""


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Write how many of the pods may not be evicted now."""

    needed: int


@dataclass(frozen=True, slots=True)
class MakeServer:
    """Make the job server's pod."""


@dataclass(frozen=True, slots=True)
class MakeTrainer:
    index: int


@dataclass(frozen=True, slots=True)
class RemovePod:
    name: str
    uid: str  # another pod of that name stays


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Tell the job server of the training."""


@dataclass(frozen=True, slots=True)
class SetPods:
    """Tell the job server how many pods the training may have."""

    pods: int


@dataclass(frozen=True, slots=True)
class GiveUpDead:
    """Tell the job server that the pods that it cannot reach run no more.

    Args:
        pods: that the training may have, as before.
    """

    pods: int


@dataclass(frozen=True, slots=True)
class CloseNodes:
    """Have the training leave these pods, by one planned change."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenNodes:
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PauseJob:
    """Have the newest state written, and all pods freed."""


@dataclass(frozen=True, slots=True)
class ResumeJob:
    pass


@dataclass(frozen=True, slots=True)
class StopJob:
    """Have the newest state written, and the job ended."""


@dataclass(frozen=True, slots=True)
class RemoveTrainingJob:
    """Delete the TrainingJob: its time after the end is over."""


Step = (
    Prepare
    | SetBudget
    | MakeServer
    | MakeTrainer
    | RemovePod
    | SubmitJob
    | SetPods
    | GiveUpDead
    | CloseNodes
    | OpenNodes
    | PauseJob
    | ResumeJob
    | StopJob
    | RemoveTrainingJob
)


@dataclass(frozen=True, slots=True)
class Notice:
    """An event of Kubernetes, about the TrainingJob."""

    reason: str  # one word
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What to do, in this order, and what to write after it."""

    steps: tuple[Step, ...]
    notices: tuple[Notice, ...]
    status: TrainingJobStatus


def refuse(name: str, generation: int, status: TrainingJobStatus, why: str, now: float) -> Outcome:
    """Return what becomes of a job whose spec cannot run: the end, unless it was right before.

    Such a job goes on as it is; nothing is done for it until its spec is corrected.
    """
    known = status.conditions.get(states.SPEC_VALID)
    was_right = status.observed_generation > 0
    new = replace(status, observed_generation=generation, selector=selector(name))
    if status.ended:
        return Outcome(steps=(), notices=(), status=new)
    new = replace(new, reason=why).with_condition(states.SPEC_VALID, False, "InvalidSpec", why, now)
    if not was_right:
        new = replace(new, phase=Phase.FAILED, completed_at=now)
        new = new.with_condition(states.FAILED, True, "InvalidSpec", why, now)
    is_told = known is not None and not known.status and known.message == why
    notices = () if is_told else (Notice("InvalidSpec", why, warning=True),)
    return Outcome(steps=(), notices=notices, status=new)


def reconcile(
    name: str,
    generation: int,
    spec: TrainingJobSpec,
    status: TrainingJobStatus,
    seen: Observed,
    now: float,
) -> Outcome:
    """Return what to do now for a TrainingJob that is not being deleted.

    Args:
        generation: of the object whose spec this is.
        now: seconds since 1970.
    """
    job = None if seen.server is None else seen.server.job
    if job is not None and not job.state.ended and job.spec.slots_per_pod != spec.slots_per_pod:
        why = (
            f"spec.template: its pods have {_trainers(spec.slots_per_pod)} each, and the training "
            f"was begun with {job.spec.slots_per_pod}; change that back, or make a new TrainingJob"
        )
        return refuse(name, generation, status, why, now)
    if job is not None and not job.state.ended and (why := _other_gpus(spec, seen)):
        return refuse(name, generation, status, why, now)
    is_new = status.observed_generation != generation
    status = replace(status.no_later_than(now), observed_generation=generation)
    if states.SPEC_VALID in status.conditions:
        status = status.with_condition(states.SPEC_VALID, True, "Corrected", "", now)
    work = _Pass(name, spec, status, seen, now, is_new)
    if work.status.ended:
        work.clean_up()
    else:
        work.live()
    return Outcome(steps=tuple(work.steps), notices=tuple(work.notices), status=work.status)


def _other_gpus(spec: TrainingJobSpec, seen: Observed) -> str:
    """Return what is wrong where new pods would have other GPUs than those that train.

    Both may have one trainer, so the job's slots say nothing of it.
    """
    for pod in seen.trainers:
        is_used = seen.server is not None and seen.server.uses(pod.node_id)
        if is_used and pod.gpus is not None and pod.gpus != spec.gpus:
            return (
                f"spec.template: its pods have {_gpus(spec.gpus)} each, and the training has pods "
                f"with {_gpus(pod.gpus)}; change that back, or make a new TrainingJob"
            )
    return ""


def refused(outcome: Outcome, before: TrainingJobStatus, why: str, now: float) -> Outcome:
    """Return an outcome of which all was done, but that Kubernetes makes no further pod."""
    status = outcome.status.with_condition(states.PODS_READY, False, REFUSED, why, now)
    notices = tuple(each for each in outcome.notices if each.reason != "PodsMade")
    if not _is_refused(before):
        notices += (Notice("PodsRefused", why, warning=True),)
    return replace(outcome, notices=notices, status=status)


def _is_refused(status: TrainingJobStatus) -> bool:
    known = status.conditions.get(states.PODS_READY)
    return known is not None and known.reason == REFUSED


class _Pass:
    """One look at one job."""

    def __init__(
        self,
        name: str,
        spec: TrainingJobSpec,
        status: TrainingJobStatus,
        seen: Observed,
        now: float,
        is_new: bool,  # the spec, to the status
    ) -> None:
        self.name, self.spec, self.status, self.seen, self.now = name, spec, status, seen, now
        self._is_new = is_new
        self.steps: list[Step] = []
        self.notices: list[Notice] = []
        self._alive = [pod for pod in seen.trainers if not pod.leaving and not pod.over]
        self._kept = ""  # why a pod stays that cannot train

    # --- the life of a job

    def live(self) -> None:
        self._set(
            selector=selector(self.name),
            started_at=self.status.started_at or (None if self._waits() else self.now),
        )
        self._decide_number()
        self._read_server()
        if self.status.ended:
            return
        self._give_up_dead()
        if self.spec.suspend:
            self._suspend()
        else:
            self._go_on()
        if not self.status.ended:
            self._keep_deadline()
        self._summarize()

    def _waits(self) -> bool:
        """Whether it is to have no pods now."""
        given = self.status.autoscale
        has_none = self.spec.autoscale and (given is None or not given.replicas)
        return self.spec.suspend or has_none

    def clean_up(self) -> None:
        """Delete what a job that has ended leaves, and at last the job."""
        if self.spec.clean_pods:
            for pod in self.seen.trainers:
                if not pod.leaving:
                    self.steps.append(RemovePod(pod.name, pod.uid))
            server = self.seen.server_pod
            # Pods that leave wait for a server that keeps its database.
            is_needed = self.spec.storage is not None and any(
                not pod.leaving or self.now < pod.gone_by for pod in self.seen.trainers
            )
            if server is not None and not server.leaving and not is_needed:
                self.steps.append(RemovePod(server.name, server.uid))
        elif self._alive and self.seen.budget != 0:
            self.steps.append(SetBudget(0))  # none that goes now is replaced, so all may go
        left = len([pod for pod in self._alive]) if not self.spec.clean_pods else 0
        self._set(replicas=left, ready=0, training=0)
        ended_at, ttl_s = self.status.completed_at, self.spec.ttl_s
        if ttl_s is not None and ended_at is not None and self.now >= ended_at + ttl_s:
            self.steps.append(RemoveTrainingJob())

    def _decide_number(self) -> None:
        """Set `desired`: the user's number, within what the training was begun with.

        With `autoscale` it is what was decided for all jobs together; 0: it waits.
        """
        before, wanted, server = self.status.desired, self.spec.replicas, self.seen.server
        why = f"spec.replicas is {wanted}"
        if self.spec.autoscale:
            given = self.status.autoscale
            wanted = (before or 0) if given is None else given.replicas
            why = "" if given is None else given.reason
            self._tell_waiting(wanted, why)
        if server is not None and server.job is not None:
            most = server.job.spec.max_pods
            if wanted > most:
                why += f", but the training was begun with at most {most}: give maxReplicas then"
                if self._is_new and before == most:
                    self._say("Scaling", f"stays with {_pods(most)}: {why}", warning=True)
                wanted = most
        if before == wanted and self.status.scaled_at is not None:
            return
        self._set(desired=wanted, scaled_at=self.now)
        if before != wanted and (before is not None or self.spec.autoscale) and wanted:
            self._say("Scaling", f"from {before or 0} to {_pods(wanted)}: {why}")

    def _tell_waiting(self, wanted: int, why: str) -> None:
        if not wanted and why and not self.spec.suspend:
            known = self.status.conditions.get(states.PODS_READY)
            if known is None or (known.reason, known.message) != (WAITS, why):
                self._say(WAITS, why)

    def _read_server(self) -> None:
        """Enter what the job server says; end when its job has."""
        server, pod = self.seen.server, self.seen.server_pod
        if server is None:
            words = "the job server's pod is not there yet"
            if pod is not None:
                words = pod.message or "the job server does not answer yet"
            reason = pod.trouble if pod is not None and pod.trouble else "NotReady"
            self._condition(states.SERVER_READY, False, reason, words)
            return
        self._condition(states.SERVER_READY, True, "Answers", "")
        job = server.job
        if job is None:
            return
        self._set(
            step=job.step,
            epoch=job.epoch,
            total_steps=job.total_steps,
            stage=job.stage,
            failures=job.failures,
            job_state=job.state.value,
            reason=job.reason,
            training=server.training_pods,
            saved_path=self.status.saved_path if job.saved is None else job.saved.path,
            step_s={**self.status.step_s, **step_seconds(job, server.now)},
            change_s=change_seconds(job),
        )
        runs = self.status.conditions.get(states.RUNNING)
        lasts = runs is not None and runs.status and self.now >= runs.since + HEALTHY_S
        # A script with the original's calls tells of no step.
        if job.step > self.status.pod_failed_step or (not job.step and lasts):
            self._set(pod_failures=0)
        if server.training_pods >= (self.status.desired or 0):
            self._set(pod_retries=0)
        if job.state is JobState.SUCCEEDED:
            self._end(states.COMPLETE, Phase.SUCCEEDED, "Succeeded", job.reason)
        elif job.state is JobState.FAILED:
            words = job.reason + self._goes_with_pods(job.saved)
            self._end(states.FAILED, Phase.FAILED, "TrainingFailed", words)
        elif job.state is JobState.STOPPED:
            reason, words = "Stopped", job.reason  # by `edl stop` in a pod
            if self._is_late():
                reason, words = "DeadlineExceeded", self._deadline_text()
            self._end(states.FAILED, Phase.FAILED, reason, words + self._goes_with_pods(job.saved))

    def _give_up_dead(self) -> None:
        """Say so where all pods that the training waits for have ended, or are gone.

        It waits for those that may still train, and for the one whose folder has its newest state.

        Nobody else can: their clients ended with them, and pods that replace them are other nodes.
        """
        server = self.seen.server
        if server is None or server.job is None:
            return
        awaited, saved = set[str](), server.job.saved
        if server.job.unreachable:
            awaited |= {pod.node_id for pod in server.job.pods}
        waits = server.job.state is JobState.WAITING
        if waits and saved is not None and (saved.spare or saved.alone):
            awaited.add(saved.node_id)
        silent = {node_id for node_id in awaited if not server.answers(node_id)}
        if silent and silent.isdisjoint(pod.node_id for pod in self.seen.trainers if not pod.over):
            self.steps.append(GiveUpDead(server.most or self.spec.replicas))
            words = "the training waited for pods that have ended; it goes on without them"
            self._say("PodsLost", words, warning=True)

    def _goes_with_pods(self, saved: Saved | None) -> str:
        """Return what is said of a state that was written nowhere but to a pod that is deleted."""
        if saved is None or not self._dies_with_pod(saved) or not self.spec.clean_pods:
            return ""
        return (
            f"; step {saved.step} was written to a pod's own folder alone, which is deleted with "
            "it: cleanPodPolicy None keeps pods, a checkpoint path that can be written the state"
        )

    def _dies_with_pod(self, saved: Saved) -> bool:
        """Whether a state is in a folder that a pod has to itself."""
        return saved.spare or ("://" not in saved.path and not self.spec.outlives_pods(saved.path))

    def _end(self, kind: str, phase: Phase, reason: str, message: str) -> None:
        self._set(phase=phase, completed_at=self.now, reason=message)
        self._condition(kind, True, reason, message)
        self._condition(states.RUNNING, False, reason, message)
        self._say(reason, message or reason, warning=kind == states.FAILED)

    # --- suspended or not

    def _suspend(self) -> None:
        """Pause the training, durably; then delete its pods."""
        if self._lets_pods_save():
            return
        server, is_kept = self.seen.server, self._is_kept_by_pods()
        begun = "its server has lost it; it goes on from its newest checkpoint"
        idle = begun if self.status.stage else "it has not begun"
        if self.seen.server_pod is None and not self._known_to_run() and not is_kept:
            self._is_suspended(idle, anew=False)
            self._remove_idle()
            return
        self._keep_server()
        if server is None:
            return  # nobody knows what the training does
        if server.job is None:
            if not is_kept:
                self._is_suspended(idle, anew=False)
                self._remove_idle()
        elif server.job.state is JobState.PAUSED:
            saved = server.job.saved
            if saved is not None and self._dies_with_pod(saved):
                words = (
                    f"it is paused, but its state is in a pod's own folder, {saved.path}, which "
                    "goes with the pod; so the pods stay. Give the training a checkpoint path on "
                    "a volume, or a URL"
                )
                if not is_kept:
                    self._say(NOT_DURABLE, words, warning=True)
                self._condition(states.SUSPENDED, False, NOT_DURABLE, words)
                return
            words = server.job.reason or "paused"  # of a plain script: it may have saved nothing
            if saved is not None:
                words = f"paused at step {saved.step}, written to {saved.path}"
            self._is_suspended(words)
            self._remove_idle()
        elif self.status.pause_asked_at is not None and self._none_may_run():
            self._is_suspended("its pods have ended; it goes on from its newest checkpoint")
            self._remove_idle()
        elif server.job.state not in _HALTS:
            asked_at = self.status.pause_asked_at
            if asked_at is None or self.now >= asked_at + PAUSE_AGAIN_S:
                self.steps.append(PauseJob())
                self._set(pause_asked_at=self.now)
                self._say("Suspending", "spec.suspend is true: it is paused")
            else:
                words = f"the training goes on: {server.job.reason}"
                self._condition(states.SUSPENDED, False, "NotPaused", words)

    def _none_may_run(self) -> bool:
        """Whether no pod is left that could write a state."""
        return all(pod.over for pod in self.seen.trainers)

    def _is_kept_by_pods(self) -> bool:
        """Whether the newest state is in pods alone, as was seen when it was paused."""
        known = self.status.conditions.get(states.SUSPENDED)
        return known is not None and known.reason == NOT_DURABLE

    def _known_to_run(self) -> bool:
        return self.status.job_state not in ("", JobState.PAUSED.value)

    def _is_suspended(self, words: str, *, anew: bool = True) -> None:
        """Enter that it is; with `anew` also other words than it has."""
        if not self.status.holds(states.SUSPENDED):
            self._set(suspended_at=self.status.suspended_at or self.now)
            self._say("Suspended", words)
        elif not anew:
            return
        self._condition(states.SUSPENDED, True, "Suspended", words)

    def _remove_idle(self) -> None:
        for pod in self.seen.trainers:
            if not pod.leaving:
                self.steps.append(RemovePod(pod.name, pod.uid))

    def _go_on(self) -> None:
        if states.SUSPENDED in self.status.conditions or self.status.pause_asked_at is not None:
            if self.status.holds(states.SUSPENDED):
                self._set(scaled_at=self.now)
                self._say("Resumed", "spec.suspend is false")
            self._set(pause_asked_at=None)
            self._condition(states.SUSPENDED, False, "Resumed", "")
        since = self.status.suspended_at
        if since is not None and not self._waits():
            spent_s = self.status.suspended_s + self.now - since
            self._set(suspended_s=spent_s, suspended_at=None)
        if self._lets_pods_save():
            return
        self._keep_server()
        self._scale()
        self._keep_budget()

    def _lets_pods_save(self) -> bool:
        """Whether pods end before the server is made again, as its database went with its pod.

        It will know nothing of the training, end all that runs, and begin at the newest checkpoint.
        A pod that ends while there is no server writes the newest state there before.
        """
        is_lost = self.seen.server_pod is None and self.spec.storage is None
        if not is_lost or not self._known_to_run():
            return False
        words = (
            f"pod {server_name(self.name)} is gone, and its database with it, as there is no "
            "spec.server.storage; so all pods end and write the newest state, and the training "
            "goes on from its newest checkpoint"
        )
        staying = [pod for pod in self.seen.trainers if not pod.leaving]
        if staying:
            self._remove_idle()
            self._say("ServerLost", words, warning=True)
        if staying or any(self.now < pod.gone_by for pod in self.seen.trainers):
            self._set(phase=Phase.STARTING)
            return True
        self._set(job_state="", training=0, phase=Phase.PENDING, reason=words)
        self._condition(states.RUNNING, False, "ServerLost", words)
        return False

    def _keep_server(self) -> None:
        if not self.seen.prepared:
            self.steps.append(Prepare())
        pod = self.seen.server_pod
        if pod is None:
            if not self._backs_off():
                self.steps.append(MakeServer())
        elif pod.over and not pod.leaving:  # evicted, or its node was shut down, or rejects it
            self.steps.append(RemovePod(pod.name, pod.uid))
            self._set(pod_retries=self.status.pod_retries + 1, pod_failed_at=self.now)
            self._say("ServerLost", f"pod {pod.name}: {pod.message}; it is made again", True)

    def _keep_budget(self) -> None:
        """Let one pod be evicted at a time: the next one when the last one has gone.

        A pod that has no node, and may never get one, keeps no other from being evicted. Nor does
        one on a lost node, which may never go: its grace is over.
        """
        there = sum(
            bool(pod.node) and not pod.over and (pod.ready or not 0 < pod.gone_by <= self.now)
            for pod in self.seen.trainers
        )
        needed = max(there - 1, 0)
        if self.seen.prepared and self.seen.budget != needed:
            self.steps.append(SetBudget(needed))

    # --- how many pods

    def _scale(self) -> None:
        wanted = self.status.desired or 0
        if not wanted:
            return  # it waits for room
        self._replace_broken()
        sick = [pod for pod in self._alive if self._sickness(pod)]
        ending = [pod for pod in self._alive if pod not in sick and self._is_ending(pod)]
        self._alive = [pod for pod in self._alive if pod not in sick + ending]
        surplus = sick + ending + self._surplus(wanted)
        self._add(wanted)
        server = self.seen.server
        if server is None:
            return
        closing, opening = list[str](), list[str]()
        for pod in self.seen.trainers:
            node = server.nodes.get(pod.node_id)
            if node is None or not node.alive:
                continue
            if pod in surplus or pod.leaving:
                if node.limit != 0:
                    closing.append(pod.node_id)
            elif node.limit is not None and pod in self._alive:
                opening.append(pod.node_id)
        if closing:
            self.steps.append(CloseNodes(tuple(closing)))
        if opening:
            self.steps.append(OpenNodes(tuple(opening)))
        self._admit(server, wanted)
        for pod in surplus:
            node = server.nodes.get(pod.node_id)
            is_closed = node is None or not node.alive or node.limit == 0
            if is_closed and not server.uses(pod.node_id):
                if pod in sick and self._has_last_state(pod):
                    self._tell_kept(pod)
                    continue
                self.steps.append(RemovePod(pod.name, pod.uid))
                if pod in sick:  # another one may have a GPU that is well, or the same again
                    self._set(pod_retries=self.status.pod_retries + 1, pod_failed_at=self.now)
                    self._say("PodReplaced", f"{pod.name}: {self._sickness(pod)}", warning=True)
                    continue
                why = f"{_pods(wanted)} wanted"
                if pod in ending:
                    why = "its node ends it, or it was closed by hand"
                self._say("PodRemoved", f"{pod.name}: {why}; the training left it")

    def _has_last_state(self, pod: ListedPod) -> bool:
        """Whether the state with which the training is to go on is in a pod's own folder alone."""
        server = self.seen.server
        job = None if server is None else server.job
        if job is None or job.saved is None or job.state in _RUNS:
            return False
        return job.saved.node_id == pod.node_id and self._dies_with_pod(job.saved)

    def _tell_kept(self, pod: ListedPod) -> None:
        """Say, once, why a pod stays that cannot train."""
        words = (
            f"{pod.name}: {self._sickness(pod)}; it stays, as the newest state is "
            "in its own folder alone; delete it to go on from the newest checkpoint, if any"
        )
        known = self.status.conditions.get(states.PODS_READY)
        if known is None or (known.reason, known.message) != (NOT_DURABLE, words):
            self._say(NOT_DURABLE, words, warning=True)
        self._kept = words

    def _sickness(self, pod: ListedPod) -> str:
        """Return why a pod can train no more; "": it can."""
        server = self.seen.server
        node = None if server is None else server.nodes.get(pod.node_id)
        return "" if node is None or not node.alive else node.sick

    def _is_ending(self, pod: ListedPod) -> bool:
        """Whether somebody else has closed a pod to the training: it is about to end.

        Its hook does so where its kubelet ends it, as its node shuts down: nobody deletes it then.
        """
        server = self.seen.server
        node = None if server is None else server.nodes.get(pod.node_id)
        is_closed = node is not None and node.alive and node.limit == 0
        return is_closed and pod.node_id not in self.seen.closed and not self._has_last_state(pod)

    def _surplus(self, wanted: int) -> list[ListedPod]:
        """Return the pods to give up: unusable ones first, then the highest indexes.

        With `autoscale` those go first that are where others are to have the room.
        """
        given, left = self.status.autoscale, list(self._alive)
        excess = Counter(pod.node for pod in left)
        if self.spec.autoscale and given is not None:
            excess -= Counter(given.nodes)
        found: list[ListedPod] = []
        while len(left) > wanted:
            pod = min(
                left, key=lambda pod: (self._usefulness(pod), not excess[pod.node], -pod.index)
            )
            left.remove(pod)
            found.append(pod)
            excess[pod.node] -= bool(excess[pod.node])
        return found

    def _usefulness(self, pod: ListedPod) -> int:
        server = self.seen.server
        if self._has_last_state(pod):
            return 3
        if pod.trouble:
            return 0
        node = None if server is None else server.nodes.get(pod.node_id)
        if server is not None and (node is None or not node.alive):
            return 0 if not server.uses(pod.node_id) else 1
        return 2

    def _replace_broken(self) -> None:
        """Delete pods that have ended, and those that do not get ready in time."""
        failed = rejected = 0
        for pod in self.seen.trainers:
            if pod.leaving:
                continue
            if pod.over:
                self.steps.append(RemovePod(pod.name, pod.uid))
                failed += not pod.disrupted
                rejected += pod.disrupted and not pod.address  # its node has not even begun it
                self._say("PodEnded", f"{pod.name}: {pod.message or 'it has ended'}", warning=True)
            elif self._is_overdue(pod):
                self.steps.append(RemovePod(pod.name, pod.uid))
                self._alive.remove(pod)
                self._say("PodReplaced", f"{pod.name}: {self._why_overdue(pod)}", warning=True)
        if failed or rejected:  # one that always ends does so though the others make steps
            retries = self.status.pod_retries + failed + rejected
            self._set(pod_retries=retries, pod_failed_at=self.now)
        if not failed:
            return
        count = self.status.pod_failures + failed
        step = max(self.status.pod_failed_step, self.status.step)
        self._set(pod_failures=count, pod_failed_step=step)
        if count > self.spec.restart_limit + self.spec.max_replicas:
            words = next(pod.message for pod in self.seen.trainers if pod.over)
            job = None if self.seen.server is None else self.seen.server.job
            lost = "" if job is None else self._goes_with_pods(job.saved)
            self._end(
                states.FAILED,
                Phase.FAILED,
                "PodsFailed",
                f"{count} pods have ended without a new step between them; the last one: {words}"
                f"{lost}",
            )

    def _why_overdue(self, pod: ListedPod) -> str:
        if self.seen.server is not None and pod.node_id in self.seen.server.nodes:
            return "the job server hears nothing of it any more, and the training has left it"
        words = pod.message or "it has not registered with the job server"
        limit = f"{self.spec.pod_ready_timeout_s:g} s, spec.podReadyTimeoutSeconds"
        return f"not ready after {limit}: {words}"

    def _is_overdue(self, pod: ListedPod) -> bool:
        server = self.seen.server
        waits = pod.trouble in (UNSCHEDULABLE, INITIALIZING)  # for others, or for the user's own
        if server is None or waits or server.uses(pod.node_id):
            return False
        node = server.nodes.get(pod.node_id)
        if node is not None and node.alive:
            return False
        answers = self.status.conditions[states.SERVER_READY].since  # one made again knows nobody
        since = max(pod.created_at, pod.placed_at, pod.initialized_at, answers)
        return self.now >= since + self.spec.pod_ready_timeout_s

    def _add(self, wanted: int) -> None:
        missing = wanted - len(self._alive)
        if missing <= 0 or self.status.ended or self._backs_off():
            return
        indexes = list(self._free_indexes(missing))
        for index in indexes:
            self.steps.append(MakeTrainer(index))
        names = ", ".join(f"{self.name}-{index}" for index in indexes)
        self._say("PodsMade", f"{names}: {_pods(wanted)} wanted, {len(self._alive)} there")
        if not _is_refused(self.status):  # whoever is there does not wait for those
            self._set(scaled_at=self.now)

    def _backs_off(self) -> bool:
        """Whether pods end so often by themselves, or are rejected, that the next is not due."""
        failures = max(self.status.pod_failures, self.status.pod_retries)
        failed_at = self.status.pod_failed_at
        if not failures or failed_at is None:
            return False
        wait_s: float = min(BACKOFF_S[0] * 2 ** min(failures - 1, 30), BACKOFF_S[1])
        return self.now < failed_at + wait_s

    def _free_indexes(self, count: int) -> Iterator[int]:
        taken = {pod.index for pod in self.seen.trainers}
        index = 0
        while count:
            if index not in taken:
                yield index
                count -= 1
            index += 1

    def _admit(self, server: ServerView, wanted: int) -> None:
        """Let the training begin, go on, or have more or fewer pods."""
        ready = [
            pod
            for pod in self._alive
            if (node := server.nodes.get(pod.node_id)) is not None and node.alive
        ]
        gathered = self.now >= (self.status.scaled_at or 0.0) + GATHER_S
        enough = len(ready) >= wanted or (gathered and len(ready) >= self.spec.min_replicas)
        if server.job is None:
            if enough:
                self.steps.append(SubmitJob())
                if wanted != self.spec.max_replicas:
                    self.steps.append(SetPods(wanted))
                words = f"the training begins with {_pods(min(len(ready), wanted))}"
                if self.status.job_state:
                    words += ", at its newest checkpoint: its server knows it no more"
                self._say("Submitted", words)
            return
        if server.job.state is JobState.PAUSED:
            if enough:
                self.steps.append(ResumeJob())
                self._set(job_state=JobState.STARTING.value)  # also if the server is lost just then
            return
        if server.most is None or server.most == wanted or server.job.state in _HALTS:
            return
        if wanted < server.most or enough or gathered:
            self.steps.append(SetPods(wanted))

    # --- time, and words

    def _is_late(self) -> bool:
        limit_s, began = self.spec.active_deadline_s, self.status.started_at
        if limit_s is None or began is None:
            return False
        waited_s = self.status.suspended_s
        if self.status.suspended_at is not None:
            waited_s += self.now - self.status.suspended_at
        return self.now - began - waited_s >= limit_s

    def _deadline_text(self) -> str:
        return f"it ran for {self.spec.active_deadline_s:g} s, its activeDeadlineSeconds"

    def _keep_deadline(self) -> None:
        if not self._is_late() or self.spec.active_deadline_s is None:
            return
        server = self.seen.server
        if server is None and (self.spec.suspend or self._known_to_run()):
            return  # once its server answers, its newest state is written
        if server is None or server.job is None:
            words = self._deadline_text()
            if server is None:  # it may never: its image cannot be pulled, or no node has room
                words = f"{self.spec.active_deadline_s:g} s, its activeDeadlineSeconds, are over"
                words += f"; {self.status.conditions[states.SERVER_READY].message}"
            self._end(states.FAILED, Phase.FAILED, "DeadlineExceeded", words)
        elif server.job.state is not JobState.STOPPING:
            self.steps.append(StopJob())

    def _summarize(self) -> None:
        """Set the numbers, `phase` and the conditions that follow from all this."""
        server, wanted = self.seen.server, self.status.desired or 0
        known = {} if server is None else server.nodes
        ready = sum(
            (node := known.get(pod.node_id)) is not None and node.alive for pod in self._alive
        )
        self._set(replicas=len(self._alive), ready=ready)
        if self.status.ended:
            return
        troubles = [pod for pod in self._alive if pod.trouble]
        if troubles:
            first = troubles[0]
            more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
            words = f"{first.name}{more}: {first.message}"
            self._condition(states.PODS_READY, False, first.trouble, words)
        elif self.status.holds(states.SUSPENDED):
            self._condition(states.PODS_READY, False, "Suspended", "")
        elif not wanted:
            given = self.status.autoscale
            words = "nothing is decided yet" if given is None else given.reason
            self._condition(states.PODS_READY, False, WAITS, words)
        elif self._kept:
            self._condition(states.PODS_READY, False, NOT_DURABLE, self._kept)
        elif ready < wanted:
            words = f"{ready} of {_pods(wanted)} have registered with the job server"
            self._condition(states.PODS_READY, False, "NotReady", words)
        else:
            self._condition(states.PODS_READY, True, "Registered", "")
        job = None if server is None else server.job
        runs = job is not None and job.state in _RUNS and self.status.training > 0
        if job is not None:
            words = self._tell_warnings(job.warnings)
            words = "; ".join(filter(None, (words, job.reason)))
            self._condition(states.RUNNING, runs, job.state.value.title(), words)
        is_paused = self.spec.suspend and job is not None and job.state is JobState.PAUSED
        if self.status.holds(states.SUSPENDED) or is_paused or self._is_kept_by_pods():
            phase = Phase.SUSPENDED
        elif server is None:  # as it was: the training does not need the server to go on
            phase = self.status.phase
        elif job is None or not (wanted or runs):
            phase = Phase.PENDING
        elif runs:
            settled = self.status.training == wanted == len(self._alive)
            phase = Phase.RUNNING if settled else Phase.SCALING
        else:
            phase = Phase.STARTING if job.state is not JobState.WAITING else Phase.PENDING
        self._set(phase=phase)

    def _tell_warnings(self, warnings: Sequence[str]) -> str:
        """Return what the job server warns of; say so once while it does, whatever the words."""
        if not warnings:
            return ""
        words = _WARNS + "; ".join(warnings)
        known = self.status.conditions.get(states.RUNNING)
        if known is None or not known.message.startswith(_WARNS):
            self._say("TrainingWarns", words, warning=True)
        return words

    def _set(self, **values: object) -> None:
        self.status = replace(self.status, **values)  # type: ignore[arg-type]  # named by callers

    def _condition(self, kind: str, status: bool, reason: str, message: str) -> None:
        self.status = self.status.with_condition(kind, status, reason, message, self.now)

    def _say(self, reason: str, message: str, warning: bool = False) -> None:
        self.notices.append(Notice(reason, message, warning))


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _gpus(count: int) -> str:
    return "no GPU" if not count else "1 GPU" if count == 1 else f"{count} GPUs"


def _trainers(count: int) -> str:
    return "1 trainer" if count == 1 else f"{count} trainers"
