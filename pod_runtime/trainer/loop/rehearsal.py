"""Rehearse a script's loop alone: what would fail or differ once its batches are cut.

The loop's body runs over one batch as a whole, twice, then over the same batch in shards, then over
one whose last shard has a single sample. Nothing of these steps counts. The last batch of the epoch
follows as a real step, with an update, and what the script does after an epoch. Then it ends.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pod_runtime.trainer.data.readers import ShardRange
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.plain_values import to_float
from pod_runtime.trainer.loop.measure import smallest_shard
from pod_runtime.trainer.loop.warmup import WarmupStep
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor

_TOLERANCE = 0.01  # of gradients, relative; half precision and sums in another order stay below
_LARGE = 0.2  # a difference of them that no mean over unlike samples explains
_FACTOR = 0.2  # a loss that is off by a factor is that of a sum, or of a mean, within this
_EVALUATED = 64  # samples of a test set

Gradients = dict[str, npt.NDArray[np.float64]]


class RehearsalOver(BaseException):
    """Leaves the script: all that could be rehearsed was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What a body has made of a batch."""

    loss: float
    gradients: Gradients  # by the parameter's name; absent where there is none


class Rehearsal:
    """What one loop is asked to do, and what was found."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.has_begun = False  # the script has made a loop
        self.where = ""  # FILE:LINE of that
        self.doing = ""  # what is rehearsed now, for errors; "": nothing of its own
        self.done: list[str] = []
        self.findings: list[str] = []
        self.notes: list[str] = []

    def begin(self) -> None:
        """The script makes its loop."""
        frame = sys._getframe(2)
        self.has_begun, self.where = True, f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}"

    def settings(self, given: LoopSettings) -> dict[str, Any]:
        """Return what the loop shall use in place of what it was given."""
        shards = max(given.shards or 0, self.shards)
        self.shards = shards * given.accumulation_steps
        return {"promise": "rounding", "shards": shards}

    def few(self, source: DataSource) -> DataSource:
        """Return a small part of a test set; a sampler's is evaluated as it is."""
        if source.length is None or source.length <= _EVALUATED or source.sampling is not None:
            return source
        return replace(source, dataset=_First(source.dataset, _EVALUATED), length=_EVALUATED)

    def steps(
        self, framework: Framework, source: DataSource, models: list[Any], *, seed: int, loss: str
    ) -> Iterator["RehearsalStep"]:
        """Yield steps that do not count; each is updated by the script before the next."""
        assert source.length is not None
        size = min(source.length, source.batch_size)
        smallest = smallest_shard(models)

        def step(samples: int, shards: int, what: str, *, salt: int = 0) -> RehearsalStep:
            self.doing = what
            plan = BatchPlan(batch_size=size, shards=shards, dataset_length=source.length)
            pieces = [plan.shard(samples, shard) for shard in range(shards)]
            return RehearsalStep(
                framework, source, models, [piece for piece in pieces if piece[1] > piece[0]],
                samples=samples, seed=seed, loss=loss, salt=salt,
            )  # fmt: skip

        self._note_sizes(source, size, smallest)
        whole = step(size, 1, f"the whole batch of {size}")
        yield whole
        other = step(size, 1, f"the whole batch of {size} once more", salt=1)
        yield other
        cut = step(size, self.shards, f"the batch of {size}, cut into {self.shards} shards")
        yield cut
        self.done.append(self.doing)
        is_random = distance(whole.computed, other.computed) > _TOLERANCE
        self._compare(whole, cut, loss, is_random=is_random, has_norm=smallest > 1)
        full = -(-size // self.shards)
        has_short = source.sampling is not None or source.length % source.batch_size > 0
        short = full * (self.shards - 1) + 1
        if has_short and not source.drop_last and full > 1 and short <= source.length:
            yield step(short, self.shards, f"a short batch of {short}, whose last shard has one")
            self.done.append(self.doing)
        self.doing = ""

    def last_batch(self, batches: BatchPlan) -> Cursor:
        """Return where the last batch of the first epoch begins."""
        cursor = Cursor()
        for _ in range(batches.steps_left(0) - 1):
            cursor = batches.advance(cursor)
        return cursor

    def _note_sizes(self, source: DataSource, size: int, smallest: int) -> None:
        length, shard = source.length or 0, -(-size // self.shards)
        if size < self.shards:
            self.findings.append(
                f"batch_size: {size} samples are fewer than {self.shards} shards: trainers would "
                f"have nothing to do; use a larger batch_size, or fewer trainers (edl run --max)"
            )
        if source.drop_last and (left := length % source.batch_size):
            self.notes.append(f"drop_last leaves {left} of {length} samples out of every epoch")
        if shard < smallest:
            self.notes.append(
                f"batch norm sees a shard, here of {shard} samples; keep it at {smallest} or more "
                f"by a larger batch_size or fewer shards"
            )

    def _compare(
        self, whole: "RehearsalStep", cut: "RehearsalStep", loss: str, *, is_random: bool,
        has_norm: bool,
    ) -> None:  # fmt: skip
        one, many = whole.computed, cut.computed
        factor = many.loss / one.loss if one.loss else 1.0
        parts = [each.samples / cut.samples for each in cut.ranges]
        of_sums = sum(part * part for part in parts)  # what is left of a sum, weighed as a mean
        if loss == "mean" and len(parts) > 1 and abs(factor / of_sums - 1) < _FACTOR:
            self.findings.append(
                f"loss: in {len(parts)} shards it is {factor:.2f} times that of the whole batch: "
                f"the body gives a sum over the samples; take the mean, or say Loop(loss='sum'), "
                f"which divides it by the size of the global batch: multiply a learning rate that "
                f"was found for sums by that"
            )
        elif loss == "sum" and len(parts) > 1 and abs(factor / len(parts) - 1) < _FACTOR:
            self.findings.append(
                f"loss: in {len(parts)} shards it is {factor:.2f} times that of the whole batch: "
                f"the body gives a mean over the samples; leave out Loop(loss='sum')"
            )
        elif is_random or has_norm:
            why = "random numbers (dropout)" if is_random else "batch norm"
            self.notes.append(
                f"the gradients of the whole batch and of its shards are not compared: the model "
                f"has {why}"
            )
        elif (apart := distance(one, many)) > _TOLERANCE:
            (self.findings if apart > _LARGE else self.notes).append(
                f"gradients: those of {len(parts)} shards differ from those of the whole batch by "
                f"{100 * apart:.0f} %: something in the body depends on which samples are computed "
                f"together (a mean over tokens or by class weights, a product over the batch); "
                f"make it one of each sample, or expect it of a shard"
            )


class RehearsalStep(WarmupStep):
    """A step over given pieces of the first samples, which changes nothing."""

    is_warmup = False  # the script shall do all that it does in a step
    _sees_buffers = True

    def __init__(
        self, framework: Framework, source: DataSource, models: list[Any],
        pieces: list[tuple[int, int]], *, samples: int, seed: int, loss: str, salt: int,
    ) -> None:  # fmt: skip
        """
        Args:
            pieces: [start, stop) of each shard.
            salt: another one gives the model other random numbers.
        """
        super().__init__(
            framework, source, shards=1, seed=seed, loss=loss, enter=Cursor, is_over=lambda: True
        )
        self.samples = samples
        self.ranges = self._ranges = [
            ShardRange(epoch=0, step=0, shard=shard, start=start, stop=stop)
            for shard, (start, stop) in enumerate(pieces)
        ]
        self._models, self._salt = models, salt
        self._is_watched = len(pieces) > 1
        self._computed: Computed | None = None  # None: no update was made

    @property
    def computed(self) -> Computed:
        assert self._computed is not None
        return self._computed

    @property
    def sample_ids(self) -> list[int]:
        return list(range(self.samples))

    def _read(self, shard_range: ShardRange) -> Any:
        batch = super()._read(shard_range)
        self._framework.data.seed(self._salt)
        return batch

    def _finish(self, of: tuple[int, ...]) -> Any:
        loss = self._framework.step.loss(of)
        before = self._computed or Computed(loss=0.0, gradients={})  # of other optimizers
        gradients = {**gradients_of(self._models), **before.gradients}
        self._computed = Computed(loss=before.loss + to_float(loss), gradients=gradients)
        self._framework.step.drop()
        return loss


class _First:
    """The first samples of a dataset."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def relative(path: str) -> str:
    """Return a path as it is written from here."""
    return path.removeprefix(os.getcwd().rstrip("/") + "/")


def gradients_of(models: list[Any]) -> Gradients:
    """Return the gradients of models of either framework."""
    found = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if (grad := parameter.grad) is not None:
                grad = grad.detach().cpu()
                grad = grad.double() if hasattr(grad, "double") else grad.astype("float64")
                found[f"{number}.{name}"] = np.asarray(grad.numpy(), np.float64)
    return found


def distance(one: Computed, other: Computed) -> float:
    """Return how far gradients are apart, relative to the first ones."""
    names = one.gradients.keys() | other.gradients.keys()
    zero = np.zeros(())
    pairs = [(one.gradients.get(each, zero), other.gradients.get(each, zero)) for each in names]
    apart = sum(float(((left - right) ** 2).sum()) for left, right in pairs)
    size = sum(float((left**2).sum()) for left, _right in pairs)
    return float(np.sqrt(apart / size)) if size else float(apart > 0)
