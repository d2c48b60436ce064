"""Explain in words why a shared job has so many pods, or waits, and what will change that. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from job_server.api.text import counted, listed, roughly
from job_server.api.wire import JobState, SharedJob, SharedNode, Sharing
from job_server.sharing.forecast import (
    Outlook,
    decide,
    fits_now,
    foresee,
    need_of,
    nodes_for,
    rooms_of,
)
from job_server.sharing.resources import Resources
from job_server.sharing.speedup import fit

_HALTED = {
    JobState.PAUSING: "{0} is being paused: its newest state is written",
    JobState.PAUSED: "{0} is paused; `edl resume {0}` puts it into the queue again",
    JobState.STOPPING: "{0} is being stopped: its newest state is written",
}
_UNSUCCESSFUL = (JobState.FAILED, JobState.STOPPED)

Facts = tuple[tuple[str, str], ...]  # name, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job is as it is: a sentence, and what stands behind it."""

    summary: str
    facts: Facts
    outlook: Outlook


def explain(
    sharing: Sharing, job_id: str, states: Mapping[str, JobState] | None = None
) -> Explanation:
    """Return why a shared job that has not ended has so many pods, or waits.

    Args:
        states: of all jobs of the server, for those that it is to start after.

    Raises:
        KeyError: there is no such job in `sharing`.
    """
    job = {each.job_id: each for each in sharing.jobs}[job_id]
    outlook = foresee(sharing, until=job_id)[job_id]
    facts = _wants(job)
    if job.state not in _HALTED:
        facts += (_facts_running if job.nodes else _facts_waiting)(sharing, job, outlook)
    summary = summarize(sharing, job, outlook, states)
    return Explanation(summary=summary, facts=facts, outlook=outlook)


def summarize(
    sharing: Sharing,
    job: SharedJob,
    outlook: Outlook,
    states: Mapping[str, JobState] | None = None,
) -> str:
    """Return the sentence of an explanation; `states` as of `explain`."""
    if job.state in _HALTED:
        return _HALTED[job.state].format(job.job_id)
    if job.nodes:
        return _running(sharing, job, outlook)
    known = {other.job_id: other.state for other in sharing.jobs} | dict(states or {})
    return _waiting(sharing, job, outlook, known)


def outlook_text(job: SharedJob, outlook: Outlook) -> str:
    """Return what comes next of a job, in a few words: `starts in 12 min`."""
    if job.nodes or job.state in _HALTED:
        return "" if outlook.ends_in_s is None else f"ends {_in(outlook).replace('about ', '')}"
    if outlook.starts_in_s is None:
        return ""
    return "starts now" if outlook.starts_in_s < 1 else f"starts in {roughly(outlook.starts_in_s)}"


def range_text(job: SharedJob) -> str:
    """Return e.g. `2 to 8`."""
    return (
        f"{job.min_pods}" if job.min_pods == job.max_pods else f"{job.min_pods} to {job.max_pods}"
    )


# --- a job that waits -----------------------------------------------------------------------------


def _waiting(
    sharing: Sharing, job: SharedJob, outlook: Outlook, states: Mapping[str, JobState]
) -> str:
    why = _dependencies(job, states) if job.after else _missing(sharing, job)
    when = _when(sharing, job, outlook, states)
    again = " again" if job.started_at is not None else ""
    text = f"{job.job_id} waits{again} since {roughly(sharing.now - job.since)}: {why}"
    return f"{text}; {when}" if when else text


def _facts_waiting(sharing: Sharing, job: SharedJob, outlook: Outlook) -> Facts:
    facts = []
    if _queues(job) and len({other.user for other in sharing.jobs}) == 1:
        waiting = sum(_queues(other) for other in sharing.jobs)
        facts.append(("place", f"{len(_before(sharing, job)) + 1} of {waiting} that wait"))
    if outlook.starts_in_s is not None and outlook.ends_in_s is not None:
        facts.append(("ends", _in(outlook)))
    if job.started_at is not None:
        facts.append(("its state", "is kept: it goes on after its last step"))
    facts += [("sooner", text) for text in _sooner(sharing, job)]
    return tuple(facts)


def _dependencies(job: SharedJob, states: Mapping[str, JobState]) -> str:
    named = [
        f"{other} ({states[other].value if other in states else 'no job of this server'})"
        for other in job.after
    ]
    return f"it is to start once {listed(named)} {'has' if len(named) == 1 else 'have'} succeeded"


def _missing(sharing: Sharing, job: SharedJob) -> str:
    """Return what it needs, what is free, and who has the rest."""
    nodes = nodes_for(sharing, job)
    if not nodes:
        if job.folder is None:
            return "no node that can be reached serves it, start its `edl client`"
        return (
            f"no node that can be reached has a folder {job.folder!r} for it, start an "
            "`edl client` whose --jobs_dir has one"
        )
    least = job.min_pods * job.slots_per_pod
    most = sum(_allowed(node) for node in nodes)
    if least > most:
        return f"needs {counted(least, 'slot')}, its nodes have {most} for it{_bounds(nodes)}"
    if fits_now(sharing, job.job_id):
        return "there is room for it now"
    if job.home and fits_now(_with(sharing, replace(job, home="")), job.job_id):
        return _no_room_at_home(sharing, job)
    need = counted(least, "slot")
    if job.slots_per_pod > 1:
        need += f" ({counted(job.min_pods, 'pod')} of {job.slots_per_pod}, each on one node)"
    left = _left(sharing, nodes)
    free = sum(each.slots for each in left)
    text = f"needs {need}, {free} {'is' if free == 1 else 'are'} free{_bounds(nodes)}"
    if free >= least and max(each.slots for each in left) < job.slots_per_pod:
        text += ", but no node has enough of them for a pod"
    text += _lacking(sharing, job) + _first_for(sharing, job)
    holders = _holders(sharing, job, nodes)
    return f"{text}; {holders}" if holders else text


def _no_room_at_home(sharing: Sharing, job: SharedJob) -> str:
    text = f"its first pod is to be on {job.home}, which has its state"
    node = next((each for each in sharing.nodes if each.node_id == job.home), None)
    if node is None or not node.alive:
        return f"{text} and cannot be reached"
    if node.limit is not None and node.limit < job.slots_per_pod:
        return f"{text}; `edl capacity {job.home} --slots all` gives that to jobs again"
    return f"{text} and has no room{_bounds([node])}"


def _lacking(sharing: Sharing, job: SharedJob) -> str:
    """Say of what else than slots there is too little, if it is that for which it does not run."""
    each, left = need_of(job), _left(sharing, nodes_for(sharing, job))
    memory, cpu = max(one.memory_mb for one in left), max(one.cpu_milli for one in left)
    of_memory = f"{_gb(each.memory_mb)} of memory, of which {_gb(memory)} are left"
    of_cpu = (
        f"{_cores(each.cpu_milli)}, of which {_cores(cpu)} {'is' if cpu == 1000 else 'are'} left"
    )
    for spared, text in (
        (replace(job, memory_mb=0), of_memory),
        (replace(job, cpu_milli=0), of_cpu),
        (replace(job, memory_mb=0, cpu_milli=0), f"{of_memory}, and {of_cpu}"),
    ):
        if spared != job and fits_now(_with(sharing, spared), job.job_id):
            return f", but a pod needs {text}"
    return ""


def _own(sharing: Sharing, job: SharedJob) -> bool:
    """Say whether shared jobs use any of what it counts, beside slots."""
    each = need_of(job)
    return any(
        (each.memory_mb and other.memory_mb) or (each.cpu_milli and other.cpu_milli)
        for other in _running_jobs(sharing)
    )


def _first_for(sharing: Sharing, job: SharedJob) -> str:
    """Name who waits as well and is to start before it, if it could start without them."""
    names = _before(sharing, job)
    rest = tuple(other for other in sharing.jobs if other.job_id not in names)
    if not names or not fits_now(replace(sharing, jobs=rest), job.job_id):
        return ""
    return f", which {listed(names)} {'is' if len(names) == 1 else 'are'} to have first"


def _before(sharing: Sharing, job: SharedJob) -> list[str]:
    """Return who waits for room as well and comes before it."""
    place = (-job.priority, job.submitted_at)
    return [
        other.job_id
        for other in sharing.jobs
        if _queues(other) and (-other.priority, other.submitted_at) < place
    ]


def _holders(sharing: Sharing, job: SharedJob, nodes: Sequence[SharedNode]) -> str:
    """Say who has the slots, and why they do not give way."""
    here = {node.node_id for node in nodes}
    holding = [other for other in _running_jobs(sharing) if here.intersection(other.nodes)]
    least = [other for other in holding if other.allotted <= other.min_pods]
    above = [other for other in holding if other.allotted > other.min_pods]
    firm = [other for other in above if other.priority > job.priority]
    soft = [other for other in above if other.priority <= job.priority]
    kept = sum(other.min_pods * other.slots_per_pod for other in soft)
    parts = [
        f"{_named(others, job)} {'holds' if len(others) == 1 else 'hold'} {_slots_of(others)} {why}"
        for others, why in (
            (least, "and is at its least" if len(least) == 1 else "and are at their least"),
            (firm, "at a higher priority"),
            (soft, f"and may keep {kept}"),
        )
        if others
    ]
    foreign = sum(node.used_others for node in nodes)
    if foreign:
        parts.append(f"{foreign} {'is' if foreign == 1 else 'are'} used by what does not share")
    return ", ".join(parts)


def _slots_of(jobs: Sequence[SharedJob]) -> int:
    return sum(job.allotted * job.slots_per_pod for job in jobs)


def _named(jobs: Sequence[SharedJob], than: SharedJob) -> str:
    """Name jobs, the largest first; with their priorities where these are not `than`'s."""
    jobs = sorted(jobs, key=lambda each: (-each.allotted * each.slots_per_pod, each.job_id))
    return listed(
        [
            each.job_id
            if each.priority == than.priority
            else f"{each.job_id} (priority {each.priority})"
            for each in jobs
        ]
    )


def _when(
    sharing: Sharing, job: SharedJob, outlook: Outlook, states: Mapping[str, JobState]
) -> str:
    lost = [other for other in job.after if states.get(other, JobState.FAILED) in _UNSUCCESSFUL]
    if lost:
        return f"it never starts by itself: run {listed(lost)} again, or delete {job.job_id}"
    if not nodes_for(sharing, job):
        return ""
    behind = [other for other in sharing.jobs if other.job_id in job.after]
    unknown = [o.job_id for o in behind or _running_jobs(sharing) if _is_endless(o)]
    if outlook.starts_in_s is None:
        if not job.after and _lacking(sharing, job) and not _own(sharing, job):
            return "it starts when other programs use less of that"
        if unknown:
            take = "takes" if len(unknown) == 1 else "take"
            return f"when it starts is not known, as how long {listed(unknown)} {take} is not yet"
        before = len(_before(sharing, job))
        if before:
            verb = "is" if before == 1 else "are"
            return f"when it starts is not known, as {counted(before, 'job')} {verb} before it"
        return "when it starts is not known"
    if outlook.starts_in_s < 1:
        return "it starts now"
    when = f"in about {roughly(outlook.starts_in_s)}"
    if job.after:
        return f"it starts then, {when}"
    running = [other.job_id for other in _running_jobs(sharing)]
    once = [job_id for job_id in outlook.once if job_id in running]
    if not once:
        return f"it starts {when}"
    if len(once) > 3:
        after = f"when {len(once)} of them have ended, {once[-1]} as the last"
    elif len(once) > 1:
        after = f"when {listed(once)} have ended"
    elif len(running) > 1:
        after = f"when one of them ends, {once[0]} first"
    else:
        after = f"when {once[0]} ends"
    return f"it starts {after}, {when}"


def _sooner(sharing: Sharing, job: SharedJob) -> list[str]:
    """Return what would let it start now. Each is tried with the server's own policy."""
    nodes, found = nodes_for(sharing, job), list[str]()
    if job.after or not nodes or fits_now(sharing, job.job_id):
        return found
    for least in range(job.min_pods - 1, 0, -1):
        if fits_now(_with(sharing, replace(job, min_pods=least)), job.job_id):
            found.append(f"with --min {least} it would start now")
            break
    priorities = {each.priority + 1 for each in sharing.jobs if each.job_id != job.job_id}
    for priority in sorted(each for each in priorities if each > job.priority):
        raised = _with(sharing, replace(job, priority=priority))
        decided = decide(raised)
        if decided[job.job_id].trainers:
            running = [o.job_id for o in _running_jobs(sharing) if o.job_id in decided]
            stopped = [other for other in running if not decided[other].trainers]
            price = f"; {listed(stopped)} would wait meanwhile, and lose no step" if stopped else ""
            found.append(f"with --priority {priority} it would start now{price}")
            break
    if any(node.limit is not None for node in nodes):
        free = replace(sharing, nodes=tuple(replace(node, limit=None) for node in sharing.nodes))
        if fits_now(free, job.job_id):
            found.append("without the limits of `edl capacity` it would start now")
    return found


# --- a job that runs ------------------------------------------------------------------------------


def _running(sharing: Sharing, job: SharedJob, outlook: Outlook) -> str:
    many = counted(job.allotted, "pod")
    if job.min_pods != job.max_pods:
        many += f" ({range_text(job)})"
    since = f"since {roughly(sharing.now - job.since)}"
    if not job.pods:
        has = f"{job.job_id} is about to start with {many}, {since}"
    elif job.pods != job.allotted:
        has = f"{job.job_id} goes from {job.pods} to {many}, {since}"
    else:
        has = f"{job.job_id} runs with {many} {since}"
    parts = [f"{has}: {job.reason}" if job.reason else has, _why_not_more(sharing, job)]
    if outlook.ends_in_s is not None:
        parts.append(f"it ends {_in(outlook)}")
    return "; ".join(part for part in parts if part)


def _facts_running(sharing: Sharing, job: SharedJob, outlook: Outlook) -> Facts:
    others = [other for other in _running_jobs(sharing) if other.job_id != job.job_id]
    facts = [
        ("where", listed([f"{pods} on {node}" for node, pods in sorted(job.nodes.items())], 8)),
        ("speed", _speed(job)),
        ("beside", listed([f"{other.job_id} {other.allotted}" for other in others], 8)),
        ("waited", roughly(job.waited_s)),
    ]
    if outlook.ends_in_s is None:
        facts.append(("ends", "not known: it has made too few steps, or does not say how many"))
    elif outlook.by_run_time:
        facts.append(("ends", "by its max_run_time then, if its training does not before"))
    return tuple(fact for fact in facts if fact[1])


def _why_not_more(sharing: Sharing, job: SharedJob) -> str:
    if job.allotted >= job.max_pods:
        return "that is its most" if job.min_pods < job.max_pods else ""
    nodes = nodes_for(sharing, job)
    if not nodes:
        return "none of its nodes can be reached"
    decided = decide(sharing).get(job.job_id)
    if decided is not None and decided.trainers > job.allotted:
        return f"it is about to have {decided.trainers}"
    left = _left(sharing, nodes)
    free = sum(each.slots for each in left)
    if free >= job.slots_per_pod:
        return f"{counted(free, 'slot')} {'is' if free == 1 else 'are'} free, but not for it"
    return f"no slot is free for more{_bounds(nodes)}"


def _speed(job: SharedJob) -> str:
    if not job.step_s:
        return "not measured yet"
    text = listed([f"{seconds:.3g} s a step with {pods}" for pods, seconds in job.step_s.items()])
    if job.allotted < job.max_pods:
        time = fit(job.step_s)
        factor = time.seconds(job.allotted) / time.seconds(job.max_pods)
        text += f"; {job.max_pods} would be about {factor:.1f} times as fast as {job.allotted}"
    return text


def _in(outlook: Outlook) -> str:
    assert outlook.ends_in_s is not None
    return f"{'within' if outlook.by_run_time else 'in about'} {roughly(outlook.ends_in_s)}"


# --- of both --------------------------------------------------------------------------------------


def _wants(job: SharedJob) -> Facts:
    each = [
        *([counted(job.slots_per_pod, "slot")] if job.slots_per_pod > 1 else []),
        *([_cores(job.cpu_milli * job.slots_per_pod)] if job.cpu_milli else []),
        *([_gb(job.memory_mb * job.slots_per_pod)] if job.memory_mb else []),
    ]
    wants = f"{range_text(job)} pod{'s' if job.max_pods > 1 else ''}"
    if each:
        wants += f" of {listed(each)}"
    wants += f", priority {job.priority}"
    return (("wants", f"{wants}, for {job.user}" if job.user else wants),)


def _running_jobs(sharing: Sharing) -> list[SharedJob]:
    return [job for job in sharing.jobs if job.nodes]


def _queues(job: SharedJob) -> bool:
    return not job.nodes and not job.after and job.state not in _HALTED


def _is_endless(job: SharedJob) -> bool:
    return job.remaining_s is None and job.run_time_left_s is None


def _with(sharing: Sharing, changed: SharedJob) -> Sharing:
    jobs = (changed if job.job_id == changed.job_id else job for job in sharing.jobs)
    return replace(sharing, jobs=tuple(jobs))


def _allowed(node: SharedNode) -> int:
    return node.slots if node.limit is None else min(node.slots, node.limit)


def _bounds(nodes: Sequence[SharedNode]) -> str:
    """Say which nodes have fewer slots for shared jobs than they could, and why."""
    limited = [
        f"{node.node_id} to {node.limit}"
        for node in nodes
        if node.limit is not None and node.limit < node.slots
    ]
    barred = [f"{node.node_id}: {node.barred}" for node in nodes if node.barred]
    text = f" (`edl capacity` limits {listed(limited)})" if limited else ""
    return f"{text}, as slots get no pods ({listed(barred)})" if barred else text


def _left(sharing: Sharing, nodes: Sequence[SharedNode]) -> list[Resources]:
    """Return what each node has left for shared jobs."""
    here, found = {node.node_id for node in nodes}, []
    for room in rooms_of(sharing):
        if room.node_id in here:
            left = [have - taken for have, taken in zip(room.capacity, room.foreign, strict=True)]
            for job in sharing.jobs:
                pods = job.nodes.get(room.node_id, 0)
                left = [have - pods * each for have, each in zip(left, need_of(job), strict=True)]
            found.append(Resources(*(max(amount, 0) for amount in left)))
    return found


def _gb(megabytes: int) -> str:
    return f"{megabytes / 1000:.3g} GB"


def _cores(milli: int) -> str:
    return f"{milli / 1000:.3g} CPU{'' if milli == 1000 else 's'}"
