"""The part of a state that describes progress, and what decided the batches so far."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from job_server.api.wire import WireError, decode, encode
from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.progress.batches import Cursor
from pod_runtime.trainer.progress.best import BestCheckpoint
from pod_runtime.trainer.progress.epoch_order import OrderRecord
from pod_runtime.trainer.progress.ledger import RunInfo, StageEntry
from pod_runtime.trainer.progress.promises import PROMISES
from pod_runtime.trainer.progress.scaling import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOrigin:
    """Which of the loops that a script makes, one after the other, a state belongs to."""

    number: int = 0  # of the loops that the process had made before
    checkpoint: str = ""  # the loop's argument; "": none, or of an older version
    folder: str = ""  # where that was in the process that made the state; "": likewise

    def is_of(self, other: Self, *, is_finished: bool) -> bool:
        """Whether a state of `self` is one of the loop `other`, in another process.

        The path says it where a script leaves out what it has done. Of a script's only loop it may
        differ from node to node.

        Args:
            is_finished: the state is that of a training which is complete.
        """
        if self.checkpoint and other.checkpoint and self.checkpoint != other.checkpoint:
            return self.number == other.number == 0 and not is_finished
        return self.number == other.number or bool(self.checkpoint and other.checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopsBefore:
    """The loops that a script has made so far in this process."""

    number: int = 0
    steps: int = 0  # global steps of those that are complete, as a job counts them; 0: no job
    are_kept: bool = True  # by checkpoints: the next process trains none of them again


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatus:
    """Travels in every snapshot, broadcast and checkpoint."""

    stage: int  # that committed the newest step
    cursor: Cursor  # counts this loop's steps only
    steps_before: int = 0  # of the script's loops before this one
    samples_seen: int  # committed, over all epochs
    shards: int  # V: fixed for the run; with `statistics` that of the first stage
    batch_size: int  # at the reference world
    run: RunInfo
    scaling: Scaling
    ledger: tuple[StageEntry, ...] = ()  # the lineage
    orders: tuple[OrderRecord, ...] = ()  # of a sampler's epochs so far
    stopped: bool = False  # the script ended the training before its last epoch
    stops: bool = False  # the script ends it after the epoch at the cursor
    run_id: str = ""  # kept through all continuations; "": of an older version
    promise: str = "rounding"  # one of promises.PROMISES
    best: tuple[BestCheckpoint, ...] = ()  # by metric
    terms: str = ""  # the trainers' arguments, by `terms.to_text`; "": of an older version
    origin: LoopOrigin = LoopOrigin()
    arrays: str = "{}"  # of the script: checksums by name, as JSON

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    @property
    def step(self) -> int:
        """Global steps committed since the job began, in all of the script's loops."""
        return self.steps_before + self.cursor.global_step

    @property
    def world_size(self) -> int:
        return self.scaling.world_size

    @property
    def is_finished(self) -> bool:
        """Nothing is left to train, by the number of epochs in `run`."""
        return self.stopped or self.epoch >= self.run.epochs

    @property
    def order(self) -> OrderRecord | None:
        """What the sampler drew for the epoch at the cursor; None: not known, or no sampler."""
        return next((each for each in self.orders if each.epoch == self.epoch), None)

    def for_run(self, run: RunInfo) -> Self:
        """Return the same progress for a script that may ask for another number of epochs.

        A training that was stopped early stays so until a script asks for more epochs than then.
        """
        is_kept = run.epochs <= self.run.epochs
        return replace(
            self, run=run, stopped=self.stopped and is_kept, stops=self.stops and is_kept
        )

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = encode(self)
        return value

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from decoded JSON.

        Raises:
            StateError: a field is missing or malformed; the text names it.
        """
        try:
            return decode(cls, data)
        except (WireError, ValueError) as error:
            raise StateError(f"train status: {error}") from error


def continued_promise(stored: LoopStatus, promise: str, where: str) -> str:
    """Return the promise under which the training of `stored` goes on.

    The weaker one may follow the stronger one, from now on. Not the other way round: what was
    trained depends on when there were how many trainers, and nothing takes that out again.

    Raises:
        StateError: the script wants the stronger one.
    """
    if PROMISES.index(promise) > PROMISES.index(stored.promise):
        raise StateError(
            f"promise: {where} was made with {stored.promise!r}, this script says {promise!r}, "
            f"which what was trained so far does not keep; continue with "
            f"promise={stored.promise!r}, or start afresh with another checkpoint path"
        )
    return promise


def check_same_run(
    stored: LoopStatus,
    *,
    run: RunInfo,
    batch_size: int,
    where: str,
    seeding: str,
    accumulation_steps: int,
) -> None:
    """Refuse to continue a training with other data, or with batches cut in another way.

    Args:
        batch_size: samples of an update, which takes `accumulation_steps` of the script's batches.
        seeding: how a script seeds the framework's generators.

    Raises:
        StateError: names the first setting that differs, both values and the remedy.
    """
    pairs: list[tuple[str, object, object]] = [("batch_size", stored.batch_size, batch_size)]
    for name in ("seed", "dataset_length", "shuffle", "drop_last"):
        pairs.append((name, getattr(stored.run, name), getattr(run, name)))
    for name, before, now in pairs:
        if before != now:
            was, says, remedy = repr(before), repr(now), f"continue with {name}={before!r}"
            if name == "batch_size":
                times = json.loads(stored.terms or "{}").get("accumulation_steps", 1)
                if max(times, accumulation_steps) > 1:
                    size = stored.batch_size // times
                    was = f"{size} in accumulation_steps={times}"
                    says = f"{batch_size // accumulation_steps} in {accumulation_steps=}"
                    remedy = f"continue with batch_size={size} and accumulation_steps={times}"
            if name == "dataset_length":  # which no argument says
                remedy = (
                    "give it the same samples (where files come and go while it trains, have a "
                    "list of them in a file)"
                )
            raise StateError(
                f"{name}: {where} was made with {was}, this script says {says}; "
                f"{remedy}, or start afresh with another checkpoint path"
            )
    if stored.run.sampler != run.sampler:
        before, now = (each or "no sampler" for each in (stored.run.sampler, run.sampler))
        raise StateError(
            f"train_set: {where} was made with {before}, this script has {now}; continue with "
            f"that, or start afresh with another checkpoint path"
        )
    for name, than, remedy in (
        (
            "subset",
            "this script's Subset holds",
            f"random_split draws others in every process: call {seeding} before it",
        ),
        (
            "values",
            "this script's dataset has in memory, or with another order of them",
            f"a split or a shuffle without a seed differs in every process: give it one "
            f"(random_state=..., random.seed(...), {seeding} before it), and sort files that are "
            f"found",
        ),
    ):
        before, now = getattr(stored.run, name), getattr(run, name)
        if None not in (before, now) and before != now:
            raise StateError(
                f"train_set: {where} was made with other samples than {than}; {remedy}, or start "
                f"afresh with another checkpoint path"
            )
