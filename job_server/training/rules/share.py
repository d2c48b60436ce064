"""Follow what the server has allotted to a shared job: how many pods, and on which nodes. Pure.

An allotment is a target like any other. A start waits until what was allotted is free, as others
may still be giving way; a stage that runs is changed by the ways of all changes. Without pods a job
that runs is cut and its newest state written, as for a pause; then it waits, and goes on by itself.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from job_server.api.text import duration
from job_server.api.wire import Allotment, Order, Way
from job_server.cluster.placement import Site, find_node, slots_to_leave
from job_server.jobs.events import Allotted
from job_server.jobs.work import Goal
from job_server.training.core.accounting import CLOCK_RUNS
from job_server.training.core.allocation import (
    able_to_train,
    find_sites_on,
    is_local,
    make_pods,
    unheard,
    unsaved,
)
from job_server.training.core.changes import check_resize, choose_way, may_change
from job_server.training.core.job import Job, TrainingPod
from job_server.training.core.moves import abandon, begin, dismiss_standby
from job_server.training.core.work import Work, is_silent

PATIENCE_S = 60.0  # how long a start or a growth waits for all that was allotted
REFUSED_S = 600.0  # a job that could not be stopped is not asked again sooner
CALM_S = 5.0  # ... nor before this, whatever it may lose: rules that disagree do not spin


def allot(work: Work, event: Allotted) -> None:
    """Enter what the server has decided; that a job which waits goes on waiting is no news."""
    job = work.job
    if not job.spec.share or job.goal.ends_as is not None or job.goal is Goal.PAUSE:
        return
    nodes = {node_id: pods for node_id, pods in event.nodes.items() if pods}
    if event.met != job.share.met:
        work.set(share=replace(job.share, met=event.met))
    known = work.job.share.allotment
    if known is not None and known.nodes == nodes:
        if not nodes and job.progress.queue_reason != event.reason:
            work.progress(queue_reason=event.reason)
        return
    allotment = Allotment(
        pods=sum(nodes.values()), reason=event.reason, since=work.now, nodes=nodes
    )
    work.set(share=replace(work.job.share, allotment=allotment))
    work.progress(queue_reason=event.reason)
    if allotment.pods:
        work.set(target=allotment.pods)
    if allotment.pods or known is not None:
        pods = "1 pod" if allotment.pods == 1 else f"{allotment.pods or 'no'} pods"
        work.note(f"allotted {pods}: {event.reason}")
    _drop_outgrown(work, allotment)


def note_met(work: Work, job_id: str) -> None:
    """Enter that one of `after` has succeeded: a job that pauses hears of no decision."""
    share = work.job.share
    met = tuple(each for each in work.job.spec.after if each in share.met or each == job_id)
    work.set(share=replace(share, met=met))


def _drop_outgrown(work: Work, allotment: Allotment) -> None:
    """Drop a change that takes slots which are no longer allotted, while that costs nothing."""
    stage, growth = work.job.preparing, work.job.growth
    if stage is None or stage.standby or stage.way is Way.START:
        return
    if stage.phase is Order.PREPARE and allotment.pods:
        planned = count_by_node(member.pod.node_id for member in stage.members)
        if any(pods > allotment.nodes.get(node_id, 0) for node_id, pods in planned.items()):
            abandon(work, "fewer pods are allotted now")
            work.set(growth=growth)  # nothing has failed


def finishes(job: Job) -> bool:
    """Whether the training is complete, and its pods are about to exit."""
    stage = job.active
    return stage is not None and stage.over is None and (job.done or stage.finishing)


def home_of(job: Job) -> str:
    """Return the node on which a start has to begin, as only it may see the state. "": any."""
    saved = job.ending.saved
    if saved is None or not is_local(saved.path) or unsaved(job) is not None:
        return ""
    return saved.node_id


def count_by_node(node_ids: Iterable[str]) -> dict[str, int]:
    """Return node -> how often it is named."""
    found: dict[str, int] = {}
    for node_id in node_ids:
        found[node_id] = found.get(node_id, 0) + 1
    return found


def waiting_reason(job: Job) -> str:
    """Return why a shared job may not start; "": it may."""
    allotment = job.share.allotment
    return "" if allotment is not None and allotment.pods else "waits for its turn"


def patience_deadline(job: Job) -> float:
    """Return until when a start or a growth waits for all that was allotted."""
    allotment = job.share.allotment
    return 0.0 if allotment is None else allotment.since + PATIENCE_S


def split(
    pods: tuple[TrainingPod, ...], nodes: Mapping[str, int]
) -> tuple[tuple[TrainingPod, ...], dict[str, int]]:
    """Return the pods that stay with an allotment, in their order, and node -> pods to add."""
    missing = dict(nodes)
    stay = []
    for pod in pods:
        if missing.get(pod.site.node_id, 0) > 0:
            missing[pod.site.node_id] -= 1
            stay.append(pod)
    return tuple(stay), {node_id: count for node_id, count in missing.items() if count}


def follow(work: Work) -> None:
    """Begin the change of a stage that runs to what is allotted, as soon as that can be."""
    job, stage = work.job, work.job.active
    allotment = job.share.allotment
    if allotment is None or not allotment.pods or stage is None:
        return
    if not may_change(job, work.now) or work.now < job.growth.retry_at:
        return
    pods = job.known_pods(stage.pod_ids)
    fit = tuple(pod for pod in pods if not slots_to_leave(work.cluster, pod.site))
    stay, missing = split(fit, allotment.nodes)
    leave = len(stage.members) - len(stay)
    if not job.elastic and (leave or missing):  # it was allotted as the job began
        _stay(work, "its trainers have not called the elastic loop: a change starts them afresh")
        return
    sites = find_sites_on(work, missing)
    if len(sites) < sum(missing.values()) and work.now < patience_deadline(job):
        sites = ()  # others are still giving way: it grows once, not by one pod after the other
    if not stay:  # no trainer that stays could hand the state on
        if not sites and job.spec.max_pods > 1 and work.now < patience_deadline(job):
            return
        stay, sites = _bridge(work, pods, sites)
        leave -= len(stay)
    if not stay:
        if not is_refused(job, work.now):
            stop_for_now(work, f"its pods are on nodes that it is to leave: {allotment.reason}")
        return
    if (not sites and not leave) or len(stay) + len(sites) < job.spec.min_pods:
        return
    stood_by = job.preparing is not None and job.preparing.standby
    dismiss_standby(work)
    new = make_pods(work, sites, len(stay))
    way = choose_way(work.job, work.cluster, stood_by=stood_by)
    begin(work, (*stay, *new), way=way, reason=allotment.reason, target=allotment.pods)


def _bridge(
    work: Work, pods: tuple[TrainingPod, ...], sites: tuple[Site, ...]
) -> tuple[tuple[TrainingPod, ...], tuple[Site, ...]]:
    """Return one of the pods that are to leave, which stays for one more stage and hands the state
    on, and the sites of the pods beside it; without pods: there is no room for both.
    """
    stay, sites = able_to_train(work, pods)[:1], sites[: work.job.spec.max_pods - 1]
    enough = sites and len(stay) + len(sites) >= work.job.spec.min_pods
    return (stay, sites) if enough else ((), ())


def give_way(work: Work) -> None:
    """Have a job that runs, and has no pods allotted, write its state and wait."""
    job, allotment = work.job, work.job.share.allotment
    if allotment is None or allotment.pods or job.goal is not Goal.RUN:
        return
    if job.cut_off or finishes(job):
        return
    # What a silent node holds is let go of no sooner than a later state is known.
    if all(pod.released or is_silent(work, pod) for pod in job.pods):
        return
    stop_for_now(work, f"its pods are for others: {allotment.reason}")


def stop_for_now(work: Work, why: str) -> None:
    """Begin to write the job's state and to free its slots, unless no client could write it."""
    pods = [pod for pod in work.job.pods if not pod.released]  # one that has left may hold it
    views = [find_node(work.cluster, pod.site.node_id) for pod in pods]
    known = [view.node.saves for view in views if view is not None]
    if _may_lose(work.job) and known and not any(known):
        text = "the job clients of its nodes are of a version that writes no states"
        stays_after_all(work, text)
        work.note(f"not stopped: {text}")
        return
    work.set(goal=Goal.YIELD, halt=None)
    work.note(why)


def stays_after_all(work: Work, why: str) -> None:
    """Enter that a job could not be stopped: it has what it has, for a while."""
    _stay(work, f"cannot be stopped: {why}")
    work.set(share=replace(work.job.share, refused_at=work.now))


def _stay(work: Work, reason: str) -> None:
    """Enter that a job is allotted what it has."""
    stage, pods = work.job.active, work.job.pods
    nodes = count_by_node(pod.site.node_id for pod in pods if not pod.released)
    if stage is not None:
        nodes = count_by_node(member.pod.node_id for member in stage.members)
    count = sum(nodes.values())
    held = Allotment(pods=count, reason=reason, since=work.now, nodes=nodes)
    work.set(share=replace(work.job.share, allotment=held), target=count)
    work.progress(queue_reason=reason)


def is_refused(job: Job, now: float) -> bool:
    """Whether the job could not be stopped just now, and would still lose steps by it.

    In the first moments whatever it may lose.
    """
    since = job.share.refused_at
    if since <= 0 or now >= since + REFUSED_S:
        return False
    return now < since + CALM_S or _may_lose(job)


def _may_lose(job: Job) -> bool:
    """Whether it trains, or its newest state is, or may be, in memory only.

    It holds for each reason for which a halt is called off: otherwise the job would be told to give
    way again at once.
    """
    stage = job.active
    trains = stage is not None and stage.committed and stage.over is None
    return trains or unsaved(job) is not None or bool(unheard(job))


def limit_pods(work: Work, pods: int) -> None:
    """Enter a user's resize of a shared job: it has no more pods than that from now on.

    Raises:
        RequestRefused: the job may never have so many pods.
    """
    check_resize(work.job, pods)
    work.set(share=replace(work.job.share, most=pods))
    work.note(
        f"at most {pods} {'pod' if pods == 1 else 'pods'} from now on, on request; the server "
        f"chooses how many up to that, as the job is shared",
        lasting=False,
    )


def run_time_s(job: Job) -> float:
    """Return how long the job has run until its last step, without the time that it waited.

    Time in which its trainers made no progress (they hung, or waited for data) counts.
    """
    spent = job.progress.account
    return spent.total_s - spent.waiting_s - spent.paused_s


def run_time_deadline(job: Job) -> float | None:
    """Return when a job that runs on has used up its time; None: it has no limit."""
    limit_s = job.spec.max_run_time_s
    if limit_s is None or job.state not in CLOCK_RUNS:
        return None
    return job.progress.accrued_at + max(limit_s - run_time_s(job), 0.0)


def stop_overdue(work: Work) -> None:
    """Stop a job that has run for its `max_run_time_s`, as a user would."""
    job, limit_s = work.job, work.job.spec.max_run_time_s
    if limit_s is None or job.goal not in (Goal.RUN, Goal.YIELD) or run_time_s(job) < limit_s:
        return
    if finishes(job) or work.now < job.grace_from + work.cluster.silence_s:
        return  # ... or may have, while the server was away: launchers say so within that time
    text = f"it has run for its max_run_time_s of {duration(limit_s)}"
    work.set(goal=Goal.STOP, ending=replace(job.ending, stopped=text))
    work.note(f"stopping: {text}")
