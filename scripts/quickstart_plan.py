"""Plan the quickstart's changes, and check at the end that the promises held. Pure."""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from job_server.api.wire import JobEvent, JobState, JobStatus, StageRecord, Way

TRAIN_IMAGES, TEST_IMAGES = 1437, 360
EVALUATION_COST = 1 / 3  # of an image, against training it: forward only


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one of the two models is shown."""

    batch_size: int
    lr: float
    gap_s: float  # that a stage trains before the next change
    trial_images: int  # per epoch of the trial alone
    floor: float  # accuracy that the run must reach; 0: too short a training to judge


RECIPES = {
    "lenet": Recipe(batch_size=64, lr=0.02, gap_s=4.5, trial_images=TRAIN_IMAGES, floor=0.95),
    # 16 images to a shard: with 5, batch norm learns next to nothing, with or without EDL.
    "resnet50": Recipe(batch_size=48, lr=0.005, gap_s=12.0, trial_images=96, floor=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What is done to the job next: another number of pods, or SIGKILL to a trainer."""

    pods: int | None = None  # None: this act is a kill
    kill_rank: int | None = None  # None: this act is a resize


def plan_acts(pods: int) -> tuple[Act, ...]:
    """Return six acts for a job that starts with `pods` - 1 pods: seven stages in all.

    Raises:
        ValueError: with fewer than two pods nothing can leave and come.
    """
    if pods < 2:
        raise ValueError(f"--pods: must be at least 2, so that one can leave; got {pods}")
    return (
        Act(pods=pods),
        Act(pods=1),  # a world of one
        Act(pods=pods),
        Act(kill_rank=pods - 1),
        Act(pods=pods - 1),
        Act(pods=pods),
    )


class Director:
    """Decides when the next act is due, by how the job goes on. Knows no clock.

    Each stage trains for `gap_s` from its first step on, however long the machine took to get
    there. So a busy machine takes longer, but by no more than its trainers need to start.
    """

    def __init__(self, acts: tuple[Act, ...], gap_s: float) -> None:
        self._acts = deque(acts)
        self._gap_s = gap_s
        self._stage = 0  # in force when looked at last, with a step made
        self._still_since = 0.0  # since when it trains, and nothing was asked

    def next_act(self, status: JobStatus, now: float) -> Act | None:
        """Return what to do now, each act once; `now` is monotonic, in seconds."""
        if not self._acts:
            return None
        if not self._is_quiet(status, now, self._gap_s):
            return None
        self._still_since = now
        act = self._acts.popleft()
        if act.kill_rank is None:
            return act
        # On a very busy machine the change before may have been given up: then there are fewer.
        return Act(kill_rank=min(act.kill_rank, committed(status.stages)[-1].trainers - 1))

    def is_over(self, status: JobStatus, now: float) -> bool:
        """Return whether all acts were made, and their last stage has trained for a gap."""
        return not self._acts and self._is_quiet(status, now, self._gap_s)

    def _is_quiet(self, status: JobStatus, now: float, for_s: float) -> bool:
        stages = committed(status.stages)
        if status.state is not JobState.RUNNING or not stages or stages[-1].first_step_at is None:
            self._still_since = now
            return False
        if stages[-1].stage != self._stage:
            self._stage, self._still_since = stages[-1].stage, now
        return now - self._still_since >= for_s


def images_per_second(trial_images: int, epoch_s: float) -> float:
    """Return the speed of training, from an epoch (its evaluation included) of one trainer."""
    return (trial_images + TEST_IMAGES * EVALUATION_COST) / epoch_s


def epochs_for(
    acts: tuple[Act, ...],
    gap_s: float,
    alone_per_s: float,
    startup_s: float,
    trainers: int,
    cores: int | None,
) -> int:
    """Return enough epochs that training outlasts the acts where nothing else runs.

    On a busy machine it would go on for long behind them: then it is stopped.

    Args:
        acts: each waits for a gap. Those that start pods, and on GPUs all, wait for trainers to
            import their framework; elsewhere a warm spare forks them at once.
        alone_per_s: images per second of one trainer.
        startup_s: from the start of one trainer to its first step, alone.
        cores: that the trainers share; None: each has a device of its own.
    """
    at_once = trainers if cores is None else min(trainers, cores)
    # Measured: three trainers on two cores, that take turns, are no faster than one alone.
    speed = alone_per_s * max(0.8, 0.6 * at_once - 0.3)
    grows = [act for act in acts if act.pods == trainers]
    imports = len(acts if cores is None else grows)
    seconds = (len(acts) + 3) * gap_s + imports * 1.5 * startup_s
    return max(2, round(seconds * speed / (TRAIN_IMAGES + TEST_IMAGES * EVALUATION_COST)))


class Pace:
    """How fast a job goes on, from what was seen of it."""

    def __init__(self) -> None:
        self.still_s = 0.0  # since a new step or a new stage was seen
        self._seen: deque[tuple[float, int]] = deque(maxlen=16)  # (when, step), of this stage
        self._stage: int | None = None  # None: nothing seen yet
        self._moved_at = 0.0

    def see(self, stage: int, step: int, now: float) -> None:
        """Take note of the job; `now` is monotonic, in seconds."""
        if stage != self._stage or (self._seen and step < self._seen[-1][1]):
            self._seen.clear()
            self._stage = stage
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now, step))
            self._moved_at = now
        self.still_s = now - self._moved_at

    @property
    def steps_per_s(self) -> float | None:
        """Over the last seconds of this stage; None: too little was seen of it."""
        if len(self._seen) < 3:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    holds: bool
    text: str


def committed(stages: tuple[StageRecord, ...]) -> list[StageRecord]:
    return [stage for stage in stages if stage.committed_at is not None]


def deaths(events: Iterable[JobEvent]) -> list[str]:
    """Return what the job's events say about trainers that were killed, one line each."""
    return [
        (event.text.partition(" is over: ")[2] or event.text).partition("; last lines: ")[0]
        for event in events
        if "was killed by SIGKILL" in event.text and "recovery: " not in event.text
    ]


def checks(
    status: JobStatus,
    *,
    killed: int,
    stopped: bool,
    verified: bool,
    verdict: str,
    floor: float,
    leftovers: tuple[str, ...],
) -> list[Check]:
    """Return what the quickstart promises and whether it held; all must, for exit code 0.

    Args:
        killed: trainers that died of SIGKILL, by the job's events.
        stopped: the quickstart itself has stopped the job behind its last act.
        verdict: what `pod_runtime.verify` said, in one line.
        leftovers: processes of this run that were still there after its end.
    """
    stages = committed(status.stages)
    planned = [stage for stage in stages[1:] if stage.way is not Way.START]
    grown = sum(after.pods > before.pods for before, after in itertools.pairwise(stages))
    shrunk = sum(after.pods < before.pods for before, after in itertools.pairwise(stages))
    redone = sum(stage.redone_steps for stage in planned)
    accuracy = status.metrics.get("accuracy", 0.0)
    wanted = JobState.STOPPED if stopped else JobState.SUCCEEDED
    return [
        Check(
            holds=status.state is wanted,
            text=f"the job ended as {status.state.value} after {status.step:,} steps"
            + (f": {status.reason}" if status.state is not wanted else ""),
        ),
        Check(
            # Of seven: on a very busy machine a change may be given up.
            holds=len(stages) >= 5 and grown > 0 and shrunk > 0,
            text=f"{len(stages)} stages: grown {_times(grown)}, shrunk {_times(shrunk)}",
        ),
        Check(
            holds=redone == 0,
            text=f"{len(planned)} planned changes redid {redone} steps",
        ),
        Check(
            holds=killed > 0,
            text=f"kill -9 of a trainer: {_times(killed)}; {status.redone_steps} steps redone",
        ),
        Check(holds=verified, text=verdict),
        Check(
            holds=accuracy >= floor,
            text=f"accuracy {accuracy:.1%} on {TEST_IMAGES} images it never trained on"
            + ("" if floor else " (too few epochs to judge by)"),
        ),
        Check(
            holds=not leftovers,
            text="no process is left"
            if not leftovers
            else "processes were left, and killed: " + "; ".join(leftovers),
        ),
    ]


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
