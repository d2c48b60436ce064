"""Have jobs leave a node, and do on purpose what a preemption would do."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError, NotFound, Retryable
from job_server.api.text import counted, pause
from job_server.api.wire import JobKind, JobState, JobStatus, Way

LOOK_S = 0.2
AWAY_S = 30.0  # for which a server is waited for that is to end the drain of a drill
STAYS_S = 5.0  # a job that cannot leave for so long stays; until then a node may only be silent


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt within the block, unless they are ignored.

    A drill that they ended at once would leave its node drained. For the main thread.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    try:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def wait_until_left(api: ApiClient, node_id: str, wait_s: float, otherwise: str) -> None:
    """Wait until no job has a pod on a node.

    Args:
        otherwise: what the user is told of the node where one has still.

    Raises:
        JobServerError: one has still; names it and why.
    """
    now = time.monotonic()
    deadline, moved_at = now + wait_s, now
    while here := _jobs_on(api, node_id):
        stuck = [text for job in here for text in [why_it_stays(job, node_id)] if text]
        now = time.monotonic()
        if len(stuck) < len(here):
            moved_at = now
        if now >= min(deadline, moved_at + STAYS_S):
            names = ", ".join(job.job_id for job in here)
            why = "; ".join(stuck) or f"not within {wait_s:g} s"
            raise JobServerError(
                f"{node_id}: {names} {'is' if len(here) == 1 else 'are'} still there: {why}; "
                f"{otherwise}"
            )
        time.sleep(LOOK_S)


def why_it_stays(job: JobStatus, node_id: str) -> str:
    """Return why a job does not leave a node that is drained; "": it does."""
    marks = f"node {node_id} is drained"
    found = next((text for text in job.warnings if text.startswith(marks)), "")
    return found.rpartition("; ")[2]


def limit_unless_drained(api: ApiClient, node_id: str, otherwise: str) -> int | None:
    """Return how many slots of a node shared jobs may have; None: all, or it is not registered.

    Args:
        otherwise: what the user is told of a node that is drained.

    Raises:
        JobServerError: the node is drained, which a limit would end without a word.
    """
    known = next((each for each in api.nodes() if each.node.node_id == node_id), None)
    if known is not None and known.draining:
        raise JobServerError(
            f"{node_id} is drained already: {known.draining}; {otherwise} "
            f"(`edl capacity {node_id} --slots all` ends an `edl drain`)"
        )
    return None if known is None else known.limit


def drill_node(api: ApiClient, node_id: str, wait_s: float) -> list[str]:
    """Have all jobs leave a node, as before a preemption that is announced; return what it cost.

    The node is used again afterwards, unless somebody else has drained it meanwhile.

    Raises:
        JobServerError: a job cannot leave, or does not in time; or the node is drained already.
    """
    before = _jobs_on(api, node_id)
    limit = limit_unless_drained(api, node_id, "a drill needs a node that jobs may use")
    drains: int | None = None  # it may be drained although no answer comes
    try:
        drains = api.limit_node(node_id, 0, drain=True).drains
        wait_until_left(api, node_id, wait_s, "the drill is over, and jobs may use the node again")
        if any(_waits_for_node(api, job, node_id) for job in before):
            _use_again(api, node_id, limit, drains)
        after = [_settled(api, job, wait_s, lambda job: True) for job in before]
    finally:
        is_used = _use_again(api, node_id, limit, drains)
    lines = [f"{old.job_id}: {cost(old, job)}" for old, job in zip(before, after, strict=True)]
    if not before:
        lines = [f"no job has a pod on {node_id}: it would cost nothing"]
    if not is_used:
        lines.append(f"{node_id} stays drained, as somebody has drained it meanwhile (`edl drain`)")
    return lines


def _waits_for_node(api: ApiClient, job: JobStatus, node_id: str) -> bool:
    """Say whether a job has left the node with its state, and can go on nowhere else."""
    now = _status(api, job)
    if now is None or now.state is not JobState.WAITING:
        return False
    return now.saved is not None and now.saved.node_id == node_id


def _use_again(api: ApiClient, node_id: str, limit: int | None, drains: int | None) -> bool:
    """End the drain of a drill, also where the server is away for a moment.

    Args:
        drains: how often the node had been drained, that of the drill included; None: not known.

    Returns:
        False: somebody else has drained it since, so it stays drained.

    Raises:
        JobServerError: the node is drained for good; says how to end that.
    """
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            now = next((each for each in api.nodes() if each.node.node_id == node_id), None)
            if now is not None and drains is not None and now.drains > drains:
                return False
            api.limit_node(node_id, limit)
        except Retryable as error:
            if time.monotonic() >= deadline:
                raise JobServerError(
                    f"{node_id} is still drained, as the server does not answer; `edl capacity "
                    f"{node_id} --slots {'all' if limit is None else limit}` ends that: {error}"
                ) from error
            time.sleep(LOOK_S)
        else:
            return True


def drill_job(api: ApiClient, job_id: str, wait_s: float) -> list[str]:
    """Kill a job's last pod, as a preemption does that nothing announces; return what it cost.

    Raises:
        JobServerError: it does not train, or does not train again in time.
    """
    before = api.status(job_id)
    pods = [pod for pod in before.pods if pod.phase == "running"]
    if before.state is not JobState.RUNNING or not pods or before.spec.kind is JobKind.TEACHER:
        raise JobServerError(
            f"{job_id} is {before.state.value}: only a training that runs can lose a pod"
        )
    lost = pods[-1].pod_id
    api.kill(job_id, pod_id=lost)
    after = _settled(api, before, wait_s, lambda job: job.stage > before.stage)
    return [f"{job_id} without {lost}: {cost(before, after)}"]


def cost(before: JobStatus, after: JobStatus | None) -> str:
    """Return in words what happened to a job between two looks cost it, beside what was usual.

    Args:
        after: None: it was deleted.
    """
    if after is None:
        return "it was deleted meanwhile"
    known = {record.stage for record in before.stages if record.committed_at is not None}
    made = [r for r in after.stages if r.stage not in known and r.committed_at is not None]
    pauses = [record.pause_s for record in made if record.pause_s is not None]
    redone = after.redone_steps - before.redone_steps
    if after.state.ended:
        return f"it has ended meanwhile ({after.state.value})"
    if not made:
        return "it goes on as it was"
    text = f"{counted(redone, 'step')} redone, "
    text += f"{pause(sum(pauses))} of pause" if pauses else "its pause is not known"
    starts = any(record.way is Way.START for record in made)
    usual = [
        record.pause_s
        for record in before.stages[1:]
        if record.pause_s is not None and (record.way is Way.START) == starts
    ]
    kind = "recovery" if starts else "planned change"
    if not usual:
        return f"{text}, by {kind}; this was its first, so nothing could be predicted"
    mean_s = sum(usual) / len(usual)
    return f"{text}, by {kind}; the {len(usual)} before it took {pause(mean_s)} on average"


def _jobs_on(api: ApiClient, node_id: str) -> list[JobStatus]:
    return [
        job
        for job in api.jobs()
        if not job.state.ended and any(pod.node_id == node_id for pod in job.pods)
    ]


def _status(api: ApiClient, job: JobStatus) -> JobStatus | None:
    """Return a job's status now; None: it was deleted."""
    try:
        return api.status(job.job_id)
    except NotFound:
        return None


def _settled(
    api: ApiClient, before: JobStatus, wait_s: float, done: Callable[[JobStatus], bool]
) -> JobStatus | None:
    """Return a job's status once it trains as `done` says, or has ended; None: it was deleted."""
    deadline = time.monotonic() + wait_s
    while True:
        job = _status(api, before)
        if job is None or job.state.ended or (done(job) and _trains(job)):
            return job
        if time.monotonic() >= deadline:
            raise JobServerError(
                f"{job.job_id}: it does not train again within {wait_s:g} s: {job.state.value}, "
                f"{job.reason}"
            )
        time.sleep(LOOK_S)


def _trains(job: JobStatus) -> bool:
    if job.spec.kind is JobKind.TEACHER:
        return job.state is JobState.RUNNING
    made: Sequence[object] = [r for r in job.stages if r.ended_at is None and r.first_step_at]
    return job.state is JobState.RUNNING and bool(made)
