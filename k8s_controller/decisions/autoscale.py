"""Decide how many pods the TrainingJobs with `autoscale` have, all of them together. Pure.

The policies and the allocator are the job server's. A job whose pods come or go just now is left
alone, and so is its room; so is that of all pods that are not such a job's. A job that has begun
keeps its least: it gives way to others, and is stopped for none.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from job_server.sharing.allocate import JobView, Policy, allocate
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import fit
from k8s_controller.decisions.capacity import Claim, add, requests_of, rooms, times, usable_nodes
from k8s_controller.decisions.observed import (
    JOB_LABEL,
    ROLE_LABEL,
    UNSCHEDULABLE,
    ListedPod,
    pod_view,
    seconds,
)
from k8s_controller.decisions.spec import Object, SpecError, TrainingJobSpec, parse
from k8s_controller.decisions.status import Autoscale, Phase, TrainingJobStatus

UNPLACED_S = 60.0  # for so long the scheduler may look for a node
RETRY_S = 600.0  # after which a job may have more pods than it has found nodes for
LATE_CHANGES = 3  # times prepareTimeoutSeconds: a change that takes longer holds up nothing

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # the API server checks none of it

Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The cluster, as the allocator is to see it."""

    views: Mapping[str, JobView]  # by "namespace/name"; without those that change just now
    nodes: Sequence[NodeRoom]
    changing: frozenset[str]
    now_have: Mapping[str, Autoscale]  # what was decided; of a job that is new here: what it has
    suspended: frozenset[str]
    may_grow: bool  # False: what is freed just now may be for others, who wait
    unreadable: Mapping[str, str]  # jobs of whose template nothing can be reckoned -> why
    unplaced: Mapping[str, str]  # jobs for whose pods there is no node -> what the scheduler says


@dataclass(slots=True)
class _Candidate:
    name: str
    spec: TrainingJobSpec
    status: TrainingJobStatus
    submitted_at: float
    priority: int
    pods: list[tuple[ListedPod, Object]]  # alive

    @property
    def has(self) -> Autoscale:
        known = self.status.autoscale or Autoscale()
        if known.since is not None or self.spec.suspend:
            return (
                known  # pods of one that was suspended may be there still: they count for nothing
            )
        return replace(known, replicas=len(self.pods))


def job_name(job: Object) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def look(
    jobs: Iterable[Object],
    pods: Iterable[Object],
    nodes: Sequence[Object],
    priority_classes: Iterable[Object],
    now: float,
) -> Picture:
    """Return what follows from what the API server lists.

    Raises:
        ValueError: a node's or pod's quantity is none.
    """
    classes = {each["metadata"]["name"]: each for each in priority_classes}
    usual = next((int(each["value"]) for each in classes.values() if each.get("globalDefault")), 0)
    known: dict[str, _Candidate] = {}
    for each_job in jobs:
        if (found := _candidate(each_job, classes, usual, now)) is not None:
            known[found.name] = found
    others: list[Object] = []
    for pod in pods:
        labels, phase = pod["metadata"].get("labels") or {}, (pod.get("status") or {}).get("phase")
        if phase in ("Succeeded", "Failed"):
            continue
        owner = known.get(f"{pod['metadata']['namespace']}/{labels.get(JOB_LABEL)}")
        if owner is None or labels.get(ROLE_LABEL) != "trainer":
            others.append(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            others.append(pod)  # its room is free when it has gone
        else:
            owner.pods.append((pod_view(pod), pod))
    names = {str(node["metadata"]["name"]) for node in nodes}
    claims = [claim for pod in others for claim in _claims(pod, nodes)]
    views, changing, unplaced = {}, set[str](), dict[str, str]()
    unreadable: dict[str, str] = {}
    held: dict[str, Resources] = {}
    givable: dict[str, Resources] = {}
    for name, job in known.items():
        try:
            each, there = _needs(job), usable_nodes(job.spec.template["spec"], nodes)
        except _UNREADABLE as error:
            unreadable[name] = f"spec.template.spec cannot be read: {error!r}; correct it"
            claims += [claim for _, pod in job.pods for claim in _claims(pod, nodes)]
            continue
        bound = Counter(pod.node for pod, _ in job.pods if pod.node in names)
        if job.spec.suspend or _is_changing(job, bound.total(), now):
            if not job.spec.suspend:
                changing.add(name)
                missing = job.has.replicas - len(job.pods)
                claims += [Claim(needs=each, nodes=there)] * missing
            for pod, is_surplus in _surplus(job):
                claims += _claims(pod, nodes, going=is_surplus and not job.spec.suspend)
            continue
        if bound.total() < len(job.pods):
            unplaced[name] = next(
                (pod.message for pod, _ in job.pods if pod.node not in names and pod.message),
                "its pods are on no node",
            )
        views[name] = _view(job, each, bound, there, name in unplaced, now)
        spare = bound.total() - job.spec.min_replicas
        for node, count in bound.items():
            held[node] = add(held.get(node, Resources()), times(count, each))
            amount = times(max(min(count, spare), 0), each)
            givable[node] = add(givable.get(node, Resources()), amount)
    found_rooms, complete = rooms(nodes, claims, held, givable)
    return Picture(
        views=views,
        nodes=found_rooms,
        may_grow=complete or not changing,
        changing=frozenset(changing),
        now_have={name: job.has for name, job in known.items()},
        suspended=frozenset(name for name, job in known.items() if job.spec.suspend),
        unreadable=unreadable,
        unplaced=unplaced,
    )


def decide(policy: Policy, seen: Picture, now: float) -> dict[str, Autoscale]:
    """Return what is to be written into the jobs' statuses, by "namespace/name"; only changes."""
    news: dict[str, Autoscale] = {}
    for name in seen.suspended:
        if seen.now_have[name].replicas:
            news[name] = Autoscale(replicas=0, reason="spec.suspend is true", since=now)
    for name, why in seen.unreadable.items():
        has = seen.now_have[name]
        if name not in seen.suspended and has.reason != why:
            news[name] = replace(has, reason=why, since=now)
    found = allocate(policy, list(seen.views.values()), seen.nodes, now)
    for name, allocation in found.items():
        has, view = seen.now_have[name], seen.views[name]
        count, reason = allocation.trainers, allocation.reason
        if not seen.may_grow and count > has.replicas > 0 and has.since is not None:
            continue
        stay = sum(min(pods, view.placed.get(on, 0)) for on, pods in allocation.placed.items())
        if count == has.replicas and stay < count and view.placed:  # no pod moves by itself
            count = max(stay, view.min_trainers)
            reason = "others need room where it has pods; it may have them elsewhere"
        limit, until = has.limit, has.limit_until
        if name in seen.unplaced:
            limit, until = view.max_trainers, now + RETRY_S
            if count == limit:
                reason = f"there is no node for more: {seen.unplaced[name]}"
        elif until is not None and not _holds(until, now):
            limit, until = None, None
        is_new = has.since is None or count != has.replicas
        if is_new or (not count and reason != has.reason) or limit != has.limit:
            news[name] = Autoscale(
                replicas=count,
                reason=reason if is_new or not count else has.reason,
                since=now if is_new else has.since,
                nodes=dict(allocation.placed),
                limit=limit,
                limit_until=until,
            )
    return news


def is_scaled(job: Object) -> bool:
    """Whether a TrainingJob, as it is listed, wants a number from here."""
    return (job.get("spec") or {}).get("autoscale") is True


def _candidate(
    job: Object, classes: Mapping[str, Object], usual: int, now: float
) -> _Candidate | None:
    """Return a job that is to be scaled; None: this one is not."""
    meta = job["metadata"]
    status = TrainingJobStatus.read(job.get("status")).no_later_than(now)
    if not is_scaled(job) or status.ended or "deletionTimestamp" in meta:
        return None
    try:
        spec = parse(job)
    except SpecError:  # the job's own pass says so
        return None
    named = classes.get(str(spec.template["spec"].get("priorityClassName")))
    return _Candidate(
        name=job_name(job),
        spec=spec,
        status=status,
        submitted_at=seconds(meta.get("creationTimestamp")) or 0.0,
        priority=usual if named is None else int(named["value"]),
        pods=[],
    )


def _surplus(job: _Candidate) -> Iterator[tuple[Object, bool]]:
    """Yield a job's pods, and whether it is about to give them up, as it was reckoned."""
    stay, more = Counter(job.has.nodes), len(job.pods) - job.has.replicas
    for pod, listed in job.pods:
        is_surplus = more > 0 and not stay[pod.node]
        more -= is_surplus
        stay[pod.node] -= not is_surplus
        yield listed, is_surplus


def _claims(pod: Object, nodes: Sequence[Object], *, going: bool = False) -> list[Claim]:
    """Return what a pod has, or waits for; nothing if the scheduler is not to look at it.

    Args:
        going: it is about to be deleted, if it is not already.
    """
    spec, needs = pod["spec"], requests_of(pod["spec"])
    going |= "deletionTimestamp" in pod["metadata"]
    if spec.get("nodeName"):
        return [Claim(needs=needs, node=str(spec["nodeName"]), going=going)]
    if spec.get("schedulingGates") or going:
        return []
    return [Claim(needs=needs, nodes=usable_nodes(spec, nodes))]


def _needs(job: _Candidate) -> Resources:
    """Return what a pod of the job needs: as the template has it, or a pod that is there."""
    found = [requests_of(job.spec.template["spec"])]
    found += [requests_of(pod["spec"]) for _, pod in job.pods]
    return Resources(*(max(amounts) for amounts in zip(*found, strict=True)))


def _holds(until: float, now: float) -> bool:
    """Whether a limit holds; one that is further ahead was set by another clock."""
    return now < until <= now + RETRY_S


def _is_changing(job: _Candidate, bound: int, now: float) -> bool:
    """Whether the job's pods come or go, so that it is left alone."""
    count, status = job.has.replicas, job.status
    if not count:
        return False
    settled = status.phase is Phase.RUNNING and status.training == bound
    if settled and bound == len(job.pods) == count:
        return False
    if bound < job.spec.min_replicas:
        return True  # Kubernetes finds a place for its least
    since = max(status.scaled_at or 0.0, job.has.since or 0.0)
    if now >= since + LATE_CHANGES * job.spec.prepare_timeout_s:
        return False
    waiting = [pod for pod, _ in job.pods if not pod.node]
    return not waiting or any(
        pod.trouble != UNSCHEDULABLE or now < pod.created_at + UNPLACED_S for pod in waiting
    )


def _view(
    job: _Candidate,
    each: Resources,
    bound: Mapping[str, int],
    nodes: frozenset[str],
    is_unplaced: bool,
    now: float,
) -> JobView:
    spec, status, has = job.spec, job.status, job.has
    most = spec.max_replicas
    if is_unplaced:
        most = sum(bound.values())
    elif has.limit is not None and has.limit_until is not None and _holds(has.limit_until, now):
        most = has.limit
    step_time = fit({int(pods): each_s for pods, each_s in status.step_s.items()})
    remaining_s = None
    if status.total_steps is not None and status.step_s:
        work = max(status.training, 1) if spec.policy == "linear" else 1
        left = max(status.total_steps - status.step, 0)
        remaining_s = left * work * step_time.seconds(1)
    return JobView(
        job_id=job.name,
        min_trainers=spec.min_replicas,
        max_trainers=min(max(most, spec.min_replicas), spec.max_replicas),
        each=each,
        placed=dict(bound),
        nodes=nodes,
        priority=job.priority,
        stoppable=False,
        submitted_at=job.submitted_at,
        changed_at=max(status.scaled_at or 0.0, has.since or 0.0) if has.replicas else 0.0,
        change_s=status.change_s,
        step_time=step_time,
        remaining_s=remaining_s,
    )
