"""What the policies are compared with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from job_server.sharing.allocate import JobView, Policy
from job_server.sharing.policies import Fulfilment, Goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestFirst(Fulfilment):
    """The job with the least work starts next; one that finds no room is passed by."""

    patience_s: float = float("inf")

    def waiting_key(self, job: JobView) -> float:
        return float("inf") if job.remaining_s is None else job.remaining_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FairSpeed(Goodput):
    """As Pollux shares a cluster: the harmonic mean of all jobs' speed-ups is to be large.

    (Qiao et al., OSDI 2021, its fitness with p = -1, for jobs of one fixed batch size: without its
    statistical efficiency. It does not look at how much work is left.)
    """

    margin: float | None = 1.1
    last_s: float = 0.0

    def gain(self, job: JobView, trainers: int) -> float:
        time = job.step_time
        return 1 / time.speedup(trainers) - 1 / time.speedup(trainers + 1)

    def loss(self, job: JobView, trainers: int) -> float:
        if trainers < 2:
            return float("inf")
        time = job.step_time
        return 1 / time.speedup(trainers - 1) - 1 / time.speedup(trainers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy, and whether its jobs run with the trainers that their users asked for."""

    policy: Policy
    rigid: bool = False


CONTENDERS: Mapping[str, Contender] = {
    "fifo": Contender(policy=Fulfilment(patience_s=0.0), rigid=True),  # strictly in order
    "shortest": Contender(policy=ShortestFirst(), rigid=True),
    "fair-speed": Contender(policy=FairSpeed()),
    "fulfilment": Contender(policy=Fulfilment()),
    "goodput": Contender(policy=Goodput()),
}
