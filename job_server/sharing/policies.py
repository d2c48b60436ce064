"""The policies that share a cluster; `allocate` says what they decide. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from job_server.sharing.allocate import JobView, Policy

_UNKNOWN_S = 3600.0  # of work, of a job that has made no step yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fulfilment:
    """The original's: who has the smallest part of its range between min and max gets the next.

    Trainers move only for a job that waits. (EDL's controller of 2018; its thresholds for growing
    and shrinking differed, which made some clusters grow and shrink for ever. Here they are one.)
    """

    max_load: float = 1.0
    patience_s: float = 600.0
    margin: float | None = None

    def waiting_key(self, job: JobView) -> float:
        return job.submitted_at

    def gain(self, job: JobView, trainers: int) -> float:
        return 1.0 - _fulfilment(job, trainers)

    def loss(self, job: JobView, trainers: int) -> float:
        return 1.0 - _fulfilment(job, trainers)

    def may_move(self, job: JobView, trainers: int, now: float) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Speed where it ends jobs soonest: a trainer's speed-up divided by the work that is left.

    That is the rule of the shortest remaining time, for work that can be divided: of two jobs the
    one that a trainer brings more of its end nearer gets it. Trainers move where that pays by
    `margin`, not sooner than `settle_s` after a job's last change, and not in its last `last_s`.
    A job whose changes take long has them so rarely that they cost `lost` of its time at most.
    """

    max_load: float = 1.0
    patience_s: float = 600.0
    margin: float | None = 1.3
    settle_s: float = 30.0
    last_s: float = 30.0
    lost: float = 0.02

    def waiting_key(self, job: JobView) -> float:
        return job.submitted_at

    def gain(self, job: JobView, trainers: int) -> float:
        time = job.step_time
        return (time.speedup(trainers + 1) - time.speedup(trainers)) / _left(job)

    def loss(self, job: JobView, trainers: int) -> float:
        time = job.step_time
        return (time.speedup(trainers) - time.speedup(trainers - 1)) / _left(job)

    def may_move(self, job: JobView, trainers: int, now: float) -> bool:
        settle_s = max(self.settle_s, job.change_s / self.lost)
        is_settled = now - job.changed_at >= settle_s
        return is_settled and _left(job) > self.last_s * job.step_time.speedup(trainers)


POLICIES: Mapping[str, Policy] = {"fulfilment": Fulfilment(), "goodput": Goodput()}


def _fulfilment(job: JobView, trainers: int) -> float:
    if job.min_trainers == job.max_trainers:
        return 1.0
    return (trainers - job.min_trainers) / (job.max_trainers - job.min_trainers)


def _left(job: JobView) -> float:
    return _UNKNOWN_S if job.remaining_s is None else max(job.remaining_s, 1.0)
