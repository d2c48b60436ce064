"""What the quickstart asks of EDL, and what must have held at its end. Pure."""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from job_server.wire import JobEvent, JobState, JobStatus, StageRecord, Way

TRAIN_IMAGES, TEST_IMAGES = 1437, 360
EVALUATION_COST = 1 / 3  # of an image, against training it: forward only


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one of the two models is shown."""

    batch_size: int
    lr: float
    gap_s: float  # between changes, at least
    trial_images: int  # per epoch of the trial alone
    floor: float  # accuracy that the run must reach; 0: too short a training to judge


RECIPES = {
    "lenet": Recipe(batch_size=64, lr=0.02, gap_s=7.0, trial_images=TRAIN_IMAGES, floor=0.95),
    # 16 images to a shard: with 5, batch norm learns next to nothing, with or without EDL.
    "resnet50": Recipe(batch_size=48, lr=0.005, gap_s=20.0, trial_images=96, floor=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    at_s: float
    key: str  # as in a timeline: pods, add, remove or kill
    value: int


def gap_for(recipe: Recipe, startup_s: float) -> float:
    """Return the seconds between changes, so that there is training between them.

    On a machine that is busy with other things a change may fall due before the last one is
    through. It waits its turn, so that nothing is gained by waiting for much longer.

    Args:
        startup_s: from the start of one trainer to its first step. Those of a stage start at once
            and share the cores, and then form their group.
    """
    return min(max(recipe.gap_s, 2 * startup_s + 3), 1.5 * recipe.gap_s)


def plan_changes(pods: int, gap_s: float) -> tuple[Change, ...]:
    """Return six changes of a job that starts with `pods` - 1 pods: seven stages in all.

    After the kill there is more time than between the others: where the next change is under way
    already, a recovery becomes part of it instead of a stage of its own.

    Raises:
        ValueError: with fewer than two pods nothing can leave and come.
    """
    if pods < 2:
        raise ValueError(f"--pods: must be at least 2, so that one can leave; got {pods}")
    wanted = (
        (1.0, "add", 1),
        (2.0, "remove", pods - 1),  # down to a world of one
        (3.0, "pods", pods),
        (4.0, "kill", pods - 1),
        (5.25, "remove", 1),
        (6.25, "add", 1),
    )
    return tuple(
        Change(at_s=round(gap_s * turn, 1), key=key, value=value) for turn, key, value in wanted
    )


def timeline_yaml(changes: tuple[Change, ...]) -> str:
    """Return the changes as the YAML that `edl submit --timeline` takes."""
    lines = []
    for change in changes:
        comment = "   # a rank: its trainer gets SIGKILL" if change.key == "kill" else ""
        lines.append(f"- {{at: {change.at_s:g}s, {change.key}: {change.value}}}{comment}\n")
    return "".join(lines)


def images_per_second(trial_images: int, epoch_s: float) -> float:
    """Return the speed of training, from an epoch (its evaluation included) of one trainer."""
    return (trial_images + TEST_IMAGES * EVALUATION_COST) / epoch_s


def epochs_for(
    changes: tuple[Change, ...],
    alone_per_s: float,
    startup_s: float,
    trainers: int,
    cores: int | None,
) -> int:
    """Return enough epochs that training outlasts the changes, with a tail of half a gap.

    The kill pauses the training for the start of a trainer or so, and what the changes prepare
    takes about as much from it; that time comes on top.

    Args:
        alone_per_s: images per second of one trainer.
        startup_s: as in gap_for.
        cores: that the trainers share; None: each has a device of its own.
    """
    at_once = trainers if cores is None else min(trainers, cores)
    # Measured: three trainers on two cores, that take turns, are no faster than one alone.
    speed = alone_per_s * max(0.8, 0.6 * at_once - 0.3)
    last_s = changes[-1].at_s
    seconds = max(last_s / 2, last_s + changes[0].at_s / 2 - 2 * startup_s)
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
    verified: bool,
    verdict: str,
    floor: float,
    leftovers: tuple[str, ...],
) -> list[Check]:
    """Return what the quickstart promises and whether it held; all must, for exit code 0.

    Args:
        killed: trainers that died of SIGKILL, by the job's events.
        verdict: what `pod_runtime.verify` said, in one line.
        leftovers: processes of this run that were still there after its end.
    """
    stages = committed(status.stages)
    planned = [stage for stage in stages[1:] if stage.way is not Way.START]
    grown = sum(after.pods > before.pods for before, after in itertools.pairwise(stages))
    shrunk = sum(after.pods < before.pods for before, after in itertools.pairwise(stages))
    redone = sum(stage.redone_steps for stage in planned)
    accuracy = status.metrics.get("accuracy", 0.0)
    return [
        Check(
            holds=status.state is JobState.SUCCEEDED,
            text=f"the job ended as {status.state.value} after {status.step:,} steps"
            + (f": {status.reason}" if status.state is not JobState.SUCCEEDED else ""),
        ),
        Check(
            # Of seven: on a machine that is busy with other things the kill may fall into the
            # preparation of a change, which is then given up, and the one after it needless.
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
