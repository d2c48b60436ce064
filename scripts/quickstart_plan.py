"""What the quickstart asks of EDL, and what must have held at its end. Pure."""

import itertools
from dataclasses import dataclass

from job_server.wire import JobState, JobStatus, StageRecord, Way

TRAIN_IMAGES, TEST_IMAGES = 1437, 360
EVALUATION_COST = 1 / 3  # of an image, against training it: forward only


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one of the two models is shown."""

    batch_size: int
    gap_s: float  # between changes: longer than a change takes on two slow cores
    trial_images: int  # per epoch of the trial alone
    floor: float  # accuracy that the run must reach; 0: too short a training to judge


RECIPES = {
    "lenet": Recipe(batch_size=64, gap_s=7.0, trial_images=TRAIN_IMAGES, floor=0.95),
    "resnet50": Recipe(batch_size=16, gap_s=20.0, trial_images=64, floor=0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    at_s: float
    key: str  # as in a timeline: pods, add, remove or kill
    value: int


def plan_changes(pods: int, gap_s: float) -> tuple[Change, ...]:
    """Return six changes of a job that starts with `pods` - 1 pods: seven stages in all.

    Raises:
        ValueError: with fewer than two pods nothing can leave and come.
    """
    if pods < 2:
        raise ValueError(f"--pods: must be at least 2, so that one can leave; got {pods}")
    wanted = (
        ("add", 1),
        ("remove", pods - 1),  # down to a world of one
        ("pods", pods),
        ("kill", pods - 1),
        ("remove", 1),
        ("add", 1),
    )
    return tuple(
        Change(at_s=gap_s * (turn + 1), key=key, value=value)
        for turn, (key, value) in enumerate(wanted)
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
    changes: tuple[Change, ...], alone_per_s: float, trainers: int, cores: int | None
) -> int:
    """Return enough epochs that training outlasts the changes, with a tail of one more gap.

    The time of the pauses comes on top of it; so training ends too early only where it is much
    faster than was foreseen.

    Args:
        alone_per_s: images per second of one trainer.
        cores: that the trainers share; None: each has a device of its own.
    """
    at_once = trainers if cores is None else min(trainers, cores)
    speed = alone_per_s * max(1.0, 0.7 * at_once)
    seconds = changes[-1].at_s + changes[0].at_s
    return max(2, round(seconds * speed / (TRAIN_IMAGES + TEST_IMAGES * EVALUATION_COST)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    holds: bool
    text: str


def committed(stages: tuple[StageRecord, ...]) -> list[StageRecord]:
    return [stage for stage in stages if stage.committed_at is not None]


def checks(
    status: JobStatus, *, verified: bool, verdict: str, floor: float, leftovers: tuple[str, ...]
) -> list[Check]:
    """Return what the quickstart promises and whether it held; all must, for exit code 0.

    Args:
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
            holds=len(stages) >= 6 and grown > 0 and shrunk > 0,
            text=f"{len(stages)} stages: grown {_times(grown)}, shrunk {_times(shrunk)}",
        ),
        Check(
            holds=redone == 0,
            text=f"{len(planned)} planned changes redid {redone} steps",
        ),
        Check(
            holds=status.failures > 0 and any(_is_recovery(stage) for stage in stages[1:]),
            text=f"kill -9 of a trainer: {_times(status.failures)}, recovered, "
            f"{status.redone_steps} steps redone",
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


def _is_recovery(stage: StageRecord) -> bool:
    return stage.way is Way.START


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
