"""Run a policy over many jobs in virtual time. Pure."""

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from job_server.sharing.allocate import Allocation, JobView, Policy, allocate
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import USUAL, StepTime, fit
from job_server.simulation.workload import SimulatedJob, WorkloadError

_ONE_SLOT = Resources(slots=1)
_NOISE = 0.03  # of a measured step time, as a standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What changes cost a job, in seconds without progress."""

    start_s: float = 5.0  # from its pods' start to its first step
    change_s: float = 1.0  # a planned change, with what its preparation slows the training
    end_s: float = 0.0  # from its last step until its slots are free


USUAL_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """What became of a job."""

    job: SimulatedJob
    started_s: float  # its first step's trainers
    ended_s: float
    changes: int  # after its start
    fair_s: float  # how long it would have taken with an equal share of the cluster

    @property
    def completion_s(self) -> float:
        """From its submission to its end."""
        return self.ended_s - self.job.submitted_s

    @property
    def waiting_s(self) -> float:
        return self.started_s - self.job.submitted_s

    @property
    def unfairness(self) -> float:
        """Its finish-time ratio (Themis, Mahajan et al., NSDI 2020): above 1 is worse than fair."""
        return self.completion_s / self.fair_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    outcomes: tuple[JobOutcome, ...]  # in the order of their ends
    busy: tuple[tuple[float, int], ...]  # (second, slots in use from then on)
    slots: int
    decisions: int


class _What(IntEnum):
    END = 0  # before others of the same moment: what it leaves is free
    ARRIVAL = 1
    DECISION = 2


@dataclass(slots=True)
class _Live:
    """A job that has been submitted and has not ended."""

    job: SimulatedJob
    left_s: float  # of work for one trainer
    placed: Mapping[str, int] = field(default_factory=dict)
    trainers: int = 0
    counted_at: float = 0.0  # progress is counted up to here; later: a change is not over
    changed_at: float = float("-inf")
    started_at: float | None = None
    version: int = 0  # of its end's event
    changes: int = 0
    measured: dict[int, float] = field(default_factory=dict)  # trainers -> seconds of a step
    fitted: StepTime = USUAL
    company: float = 0.0  # integral of the number of live jobs, since it came

    def advance(self, now: float) -> None:
        if now > self.counted_at:
            self.left_s -= (now - self.counted_at) * self.job.step_time.speedup(self.trainers)
            self.counted_at = now


def simulate(
    policy: Policy,
    jobs: Sequence[SimulatedJob],
    nodes: Sequence[NodeRoom],
    *,
    costs: Costs = USUAL_COSTS,
    rigid: bool = False,
    round_s: float = 10.0,
    look_s: float = 60.0,
    seed: int = 0,
) -> SimulationResult:
    """Return what becomes of the jobs.

    A policy knows of a job what a server would: its step times at the world sizes that it has had,
    and how much is left once it has begun.

    Args:
        rigid: each job runs with the trainers that its user asked for, as without elasticity; what
            is left is known from the start.
        round_s: the policy decides when a job has come or gone, and at most once in so long.
        look_s: after so long a policy that moves trainers decides again, though nothing happened.
        seed: of the noise of measured step times.

    Raises:
        WorkloadError: a job can never run on these nodes.
    """
    return _Simulation(policy, jobs, nodes, costs, rigid, (round_s, look_s), seed).run()


class _Simulation:
    def __init__(
        self,
        policy: Policy,
        jobs: Sequence[SimulatedJob],
        nodes: Sequence[NodeRoom],
        costs: Costs,
        rigid: bool,
        rounds: tuple[float, float],
        seed: int,
    ) -> None:
        self._policy, self._nodes, self._costs = policy, nodes, costs
        self._rigid, (self._round_s, self._look_s) = rigid, rounds
        self._noise = random.Random(seed)
        self._slots = sum(node.capacity.slots - node.foreign.slots for node in nodes)
        for job in jobs:
            least = job.trainers if rigid else job.min_trainers
            if least > int(self._slots * policy.max_load):
                raise WorkloadError(
                    f"{job.job_id}: it needs {least} trainers at least, the cluster has room for "
                    f"{int(self._slots * policy.max_load)}"
                )
        self._events: list[tuple[float, _What, int, str, int]] = []
        self._count = 0
        self._jobs = {job.job_id: job for job in jobs}
        for job in jobs:
            self._push(job.submitted_s, _What.ARRIVAL, job.job_id)
        self._live: dict[str, _Live] = {}
        self._now = 0.0
        self._decided_at = float("-inf")
        self._next_decision = float("inf")
        self._decisions = 0
        self._company = 0.0
        self._busy: list[tuple[float, int]] = [(0.0, 0)]
        self._outcomes: list[JobOutcome] = []

    def run(self) -> SimulationResult:
        while self._events:
            at, what, _, job_id, version = heapq.heappop(self._events)
            self._company += len(self._live) * (at - self._now)
            self._now = at
            if what is _What.ARRIVAL:
                job = self._jobs[job_id]
                self._live[job_id] = _Live(job, job.work_s, company=-self._company)
                self._decide_soon()
            elif what is _What.END:
                live = self._live.get(job_id)
                if live is not None and live.version == version:
                    self._end(live)
                    self._decide_soon()
            elif at == self._next_decision:
                self._next_decision = float("inf")
                self._decide()
        return SimulationResult(
            outcomes=tuple(self._outcomes),
            busy=tuple(self._busy),
            slots=self._slots,
            decisions=self._decisions,
        )

    def _push(self, at: float, what: _What, job_id: str = "", version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, what, self._count, job_id, version))

    def _decide_at(self, at: float) -> None:
        if at < self._next_decision:
            self._next_decision = at
            self._push(at, _What.DECISION)

    def _decide_soon(self) -> None:
        self._decide_at(max(self._now, self._decided_at + self._round_s))

    def _end(self, live: _Live) -> None:
        job = live.job
        del self._live[job.job_id]
        self._note_busy()
        assert live.started_at is not None
        lasted = self._now - job.submitted_s
        company = (live.company + self._company) / lasted if lasted > 0 else 1.0
        share = max(1.0, self._slots) / max(1.0, company)
        fair = min(share, float(job.max_trainers))
        speed = job.step_time.speedup(max(1, round(fair))) * min(1.0, fair)
        self._outcomes.append(
            JobOutcome(
                job=job,
                started_s=live.started_at,
                ended_s=self._now,
                changes=live.changes,
                fair_s=self._costs.start_s + job.work_s / speed,
            )
        )

    def _decide(self) -> None:
        self._decided_at = self._now
        self._decisions += 1
        for live in self._live.values():
            live.advance(self._now)
        views = [self._view(live) for live in self._live.values()]
        found = allocate(self._policy, views, self._nodes, self._now)
        for job_id, allocation in found.items():
            self._apply(self._live[job_id], allocation)
        self._note_busy()
        if self._live and self._policy.margin is not None:  # it may move trainers at any time
            self._decide_at(self._now + self._look_s)

    def _view(self, live: _Live) -> JobView:
        job = live.job
        known = self._rigid or live.started_at is not None
        return JobView(
            job_id=job.job_id,
            min_trainers=job.trainers if self._rigid else job.min_trainers,
            max_trainers=job.trainers if self._rigid else job.max_trainers,
            each=_ONE_SLOT,
            placed=live.placed,
            priority=job.priority,
            submitted_at=job.submitted_s,
            changed_at=live.changed_at,
            step_time=live.fitted,
            remaining_s=max(0.0, live.left_s) if known else None,
        )

    def _apply(self, live: _Live, allocation: Allocation) -> None:
        if dict(allocation.placed) == dict(live.placed):
            return
        before, after = live.trainers, allocation.trainers
        live.placed, live.trainers = allocation.placed, after
        live.changed_at = self._now
        live.version += 1
        if before and after:
            live.counted_at = max(live.counted_at, self._now) + self._costs.change_s
        else:
            live.counted_at = self._now + self._costs.start_s
        live.changes += live.started_at is not None
        if not after:
            return
        if live.started_at is None:
            live.started_at = self._now
        time = live.job.step_time
        if after not in live.measured:
            live.measured[after] = time.seconds(after) * self._noise.gauss(1.0, _NOISE)
            live.fitted = fit(live.measured)
        ends = live.counted_at + max(0.0, live.left_s) / time.speedup(after) + self._costs.end_s
        self._push(ends, _What.END, live.job.job_id, live.version)

    def _note_busy(self) -> None:
        busy = sum(live.trainers for live in self._live.values())
        if busy != self._busy[-1][1]:
            self._busy.append((self._now, busy))
