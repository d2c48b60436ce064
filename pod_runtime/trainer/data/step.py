"""The epoch and the step that a training script iterates over."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pod_runtime.trainer.data.readers import ShardRange
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.plain_values import as_list, differ

WEIGHTS = ("mean", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPosition:
    number: int
    first_step: int
    steps: int


class Epoch:
    """One pass over the data. Iterate over it once: `for step in epoch:`."""

    def __init__(self, find: Callable[[], EpochPosition], run: Callable[[], Any]) -> None:
        """`find` is called at the script's first question, and may have to wait for the answer."""
        self._find = find
        self._position: EpochPosition | None = None  # None: the script has not asked
        self._run = run

    def find(self) -> EpochPosition:
        """Find out which epoch this is, and how much of it is left."""
        if self._position is None:
            self._position = self._find()
        return self._position

    def moved(self, position: EpochPosition) -> None:
        """Note that the next stage may cut batches of another size."""
        if self._position is not None:
            self._position = replace(self._position, steps=position.steps)

    @property
    def number(self) -> int:
        """Of this epoch, from 0 on; the same in every process."""
        return self.find().number

    @property
    def first_step(self) -> int:
        """Index of the first step that is left: above 0 where a training goes on amid an epoch."""
        return self.find().first_step

    @property
    def steps(self) -> int:
        """Steps of the whole epoch, those before `first_step` included."""
        return self.find().steps

    def __iter__(self) -> Iterator["Step"]:
        """Yield the steps that are left of this epoch.

        Raises:
            UsageError: a step was left without `step.update()`.
        """
        steps: Iterator[Step] = self._run()
        return steps

    def __len__(self) -> int:
        """Return how many steps are left: `steps` less `first_step`."""
        return self.steps - self.first_step


class Step(ABC):
    """One update, from one global batch: `for batch in step:`, then `step.update()`.

    The global batch is cut into shards, and a trainer goes through those that are its own: all of
    them where it is alone, none at times of a short last batch. `step.samples` is the size of the
    global batch, `step.is_warmup` whether the step does not count: it is made once by a new
    trainer before it takes over, so that all is ready.
    """

    is_warmup = False  # True: it does not count, see docs/training-scripts.md
    _is_watched = False  # True: see that the script sets nothing while it goes through the shards
    _sees_buffers = False  # True: see that it sets no buffer between them and the update

    def __init__(
        self, framework: Framework, ranges: Sequence[ShardRange], *, samples: int, loss: str
    ) -> None:
        """Begin a step.

        Args:
            ranges: this rank's shards.
            samples: of the global batch.
            loss: one of WEIGHTS.
        """
        self.samples = samples
        self.is_updated = False
        self.max_norm: float | None = None  # None: gradients are not clipped
        self.samples_done = 0  # by this rank
        self._framework = framework
        self._ranges = ranges
        self._loss = loss
        self._at = 0  # shards that were handed out
        self._open = False  # the newest of them is being computed
        self._calls = 0  # collectives before it
        self._shard_samples = 0
        self._all = tuple(range(len(framework.step.optimizers)))
        # By optimizer: of how many shards a loss went through `backward`, since its update.
        self._weighed: dict[int, int] = {}
        self._of_shard: set[int] = set()  # optimizers that the shard which is computed counts for
        self._again = 0  # how often the shards were gone through before
        self._may_go_again = False  # there was an update since
        self._before: dict[str, float] = {}  # fingerprints of the state before the first shard
        self._kept: list[Any] = []  # batches, where several optimizers go through them in turn
        self._is_begun = False

    @property
    @abstractmethod
    def number(self) -> int:
        """Steps of the training before this one, over all epochs; the same in every process."""

    @property
    @abstractmethod
    def index(self) -> int:
        """Steps of this epoch before this one, those of earlier processes included."""

    @property
    @abstractmethod
    def sample_ids(self) -> list[int]:
        """Ids of this rank's samples of the global batch, in order."""

    @abstractmethod
    def _read(self, shard_range: ShardRange) -> Any:
        """Return a shard's batch as tensors."""

    @abstractmethod
    def _finish(self, of: tuple[int, ...]) -> Any:
        """Sum the gradients, let these optimizers step, and return the loss."""

    @property
    def is_rehearsal(self) -> bool:
        """The old name of `is_warmup`."""
        return self.is_warmup

    @property
    def shard_samples(self) -> int | None:
        """Samples of the shard that is being computed; None: none is."""
        return self._shard_samples if self._open else None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch of each shard of this trainer, as tensors on the model's device.

        It has the form that the dataset's samples get when they are collated: `for images, labels
        in step:` for samples that are pairs. Call `step.backward(loss)` for each.

        With several optimizers it may be gone through again after an update, over the same batches
        and with other random numbers.

        Raises:
            UsageError: it is gone through again without an update, or with one optimizer.
        """
        if self._ranges and self._at == len(self._ranges):
            if len(self._all) == 1:
                raise UsageError(
                    "step: `for batch in step:` begins again, and with one optimizer a step is one "
                    "pass and one update; compute all losses in one loop over the batch"
                )
            if not self._may_go_again:
                raise UsageError(
                    "step: `for batch in step:` begins again without an update; call "
                    "step.update(optimizer) before, or compute both losses in one loop"
                )
            self._at, self._may_go_again = 0, False
            self._again += 1
        self._begin()
        if self._is_watched and not self._at:
            self._before = self._framework.state.fingerprints(of_model=True)
            self._watch_shards()
        while self._at < len(self._ranges):
            shard_range = self._ranges[self._at]
            batch = self._read(shard_range)
            self._at += 1
            self._shard_samples = shard_range.samples
            self._open, self._of_shard = True, set()
            self._calls = self._framework.group.calls()
            yield batch
            self._close_shard()
        self._close_shard()
        self._end_shards()

    def _watch_shards(self) -> None:  # noqa: B027
        """Note that the shards of a step begin that is watched."""

    def _watch_shard(self) -> None:  # noqa: B027
        """Note that one of them was computed."""

    def _end_shards(self) -> None:  # noqa: B027
        """Note that the script has gone through all shards of this rank; most need nothing."""

    def _check_calls(self) -> None:
        """See that the script waits for no other rank inside of the loop over the shards.

        Raises:
            UsageError: it does.
        """
        raise UsageError(
            "a collective (all_reduce, all_gather) inside of `for batch in step:`, through which a "
            "trainer goes once for each of its shards, however many it has: one waits for the "
            "others in vain. step.update() returns the loss of the whole batch, over all trainers. "
            "A loss that needs what the others have computed takes Loop(promise='statistics', "
            "drop_last=True), with which each of them has one shard"
        )

    def _begin(self) -> None:
        """Take the buffers as they are: a script may set one before it goes through the shards."""
        if not self._is_begun:
            self._is_begun = True
            self._framework.step.begin()

    def _read_once(self, read: Callable[[], Any]) -> Any:
        """Return the batch at hand: read, or as it was read when it was gone through before."""
        if len(self._all) == 1:
            return read()
        if not self._again:
            self._kept.append(read())
        return copy.deepcopy(self._kept[self._at])  # a script may change its batch in place

    def _chosen(self, optimizers: Sequence[Any]) -> tuple[int, ...]:
        """Return the indices of these optimizers; of all where none is given."""
        if not optimizers:
            return self._all
        known = {id(each): index for index, each in enumerate(self._framework.step.optimizers)}
        unknown = [each for each in optimizers if id(each) not in known]
        if unknown:
            raise UsageError(
                f"optimizer: this {type(unknown[0]).__name__} is not one of the loop's; pass it "
                f"there: Loop(models, [optimizer_a, optimizer_b])"
            )
        return tuple(sorted({known[id(each)] for each in optimizers}))

    def backward(self, loss: Any, optimizer: Any = None) -> None:
        """Accumulate the gradient of this shard's loss, weighed by its share of the global batch.

        The loss is the mean over the shard, or the sum with `Loop(loss="sum")`. The gradients of a
        step are those of the mean over the global batch in both cases.

        Args:
            loss: of this shard, one number, as a tensor with a gradient.
            optimizer: whose parameters get gradients of this loss, no others: one of the loop's
                optimizers, or a list of them. None: all of them.

        Raises:
            UsageError: no shard is being computed, the loss is not one number, or the optimizer is
                not one of the loop's.
        """
        if not self._open:
            raise UsageError(
                "step.backward(loss): call it inside `for batch in step:`, once per shard or more"
            )
        shape = getattr(loss, "shape", None)
        if shape is None or math.prod(shape) != 1:
            got = type(loss).__name__ if shape is None else f"a tensor of shape {[*shape]}"
            raise UsageError(
                f"step.backward(loss): expected a tensor with one number, the {self._loss} over "
                f"the shard, got {got}; write step.backward(loss.{self._loss}()) for the losses of "
                f"its samples"
            )
        samples = self._shard_samples if self._loss == "mean" else 1
        is_last = self._at == len(self._ranges) and not self.is_warmup
        of = self._all if optimizer is None else self._chosen(as_list(optimizer))
        self._framework.step.backward(loss, samples / self.samples, is_last, of)
        for index in set(of) - self._of_shard:
            self._weighed[index] = self._weighed.get(index, 0) + 1
        self._of_shard.update(of)

    def update(self, *optimizers: Any) -> Any:
        """Sum the gradients over all ranks, let the optimizer step, clear the gradients.

        With several optimizers: those that are given, else all. They may be updated in any order,
        and some of them not at all. The step is committed as a whole after the last update.

        Returns:
            The training loss: its mean over the samples of the global batch, over all trainers.
            Where a shard has several calls of `backward`, their sum. A tensor without dimensions
            and without a gradient, on the model's device, which is only waited for where the
            script reads it (`float(loss)`). In the warm-up step it is this trainer's alone. With
            several optimizers it is that of the losses since the updates of these.

        Raises:
            UsageError: it was called before, or before all shards were computed.
        """
        of = self._chosen(optimizers)
        if self.is_updated and len(self._all) == 1:
            raise UsageError("step.update(): called twice in one step")
        if self._at < len(self._ranges):
            raise UsageError(
                f"step.update(): {self._at} of this rank's {len(self._ranges)} shards were "
                f"computed; finish `for batch in step:` before it, without break"
            )
        self._close_shard()
        fewest = min(self._weighed.get(index, 0) for index in of)
        if fewest < self._at:
            raise UsageError(
                f"step.update(): no gradient came from {self._at - fewest} of this rank's "
                f"{self._at} shards; write step.backward(loss) instead of loss.backward(), also "
                f"for a shard that shall count nothing: with 0 * the sum of the model's output"
                + ", and step.update(optimizer) for the one whose turn it is"
                * (len(self._all) > 1)
            )
        self._begin()  # a trainer without a shard may leave out the loop over them
        if self._sees_buffers:
            self._framework.step.check_buffers()
        loss = self._finish(of)
        self.is_updated = self._may_go_again = True
        self._weighed = {each: at for each, at in self._weighed.items() if each not in of}
        if len(self._all) > 1:
            self.max_norm = None
        return loss

    def check_complete(self) -> None:
        """See that the script has made all of the step.

        Raises:
            UsageError: an update is missing, or the loop over the shards was left.
        """
        if not self.is_updated:
            raise UsageError(
                f"step {self.number}: step.update() is missing; call it once per step, after "
                f"`for batch in step:`. If an update shall take several batches, say so by "
                f"Loop(accumulation_steps=N), and call it in each step"
            )
        if self._at < len(self._ranges):
            raise UsageError(
                f"step {self.number}: {self._at} of this rank's {len(self._ranges)} shards were "
                f"computed; finish `for batch in step:`, without break"
            )
        if self._weighed:
            raise UsageError(
                f"step {self.number}: step.backward gave a gradient to an optimizer that was not "
                f"updated after it; call step.update(optimizer), or say whose gradient it is: "
                f"step.backward(loss, optimizer=...)"
            )
        if len(self._all) > 1 and self.max_norm is not None:
            raise UsageError("step.clip(max_norm): call it before the update that it is for")

    def clip(self, max_norm: float) -> None:
        """Clip the summed gradients at this global norm before the optimizer steps.

        The norm is that of all of the optimizer's gradients of the whole batch, over all trainers;
        so the update does not depend on their number. With several optimizers it counts for the
        next update.

        Raises:
            UsageError: the norm is not above 0, or the update was made.
        """
        try:
            norm = float(max_norm)
        except (TypeError, ValueError):
            norm = math.nan
        if not norm > 0:
            raise UsageError(f"step.clip(max_norm): expected a number above 0, got {max_norm!r}")
        if self.is_updated and len(self._all) == 1:
            raise UsageError("step.clip(max_norm): call it before step.update()")
        self.max_norm = norm

    def _close_shard(self) -> None:
        if self._open:
            self._open = False
            if self._framework.group.calls() != self._calls:
                self._check_calls()
            if not self._again:
                self.samples_done += self._shard_samples
            self._framework.step.end_shard()
            if self._is_watched:
                self._framework.step.check_shard()
                self._watch_shard()
            if self._before and self._at == len(self._ranges):
                self._check_unchanged()

    def _check_unchanged(self) -> None:
        now = self._framework.state.fingerprints(of_model=True)
        changed = [name for name, each in self._before.items() if differ(now[name], each)]
        if changed:
            raise UsageError(
                f"{changed[0]}: set inside of `for batch in step:`, through which a trainer goes "
                f"once for each of its shards, however many it has; set it once in a step, after "
                f"step.update()"
                + "; a model there that predicts (a teacher) is put into evaluation mode, in which "
                "its batch norm counts nothing"
                * changed[0].startswith("an object in extra=")
                + "; what a layer counts in a forward pass belongs in a buffer of it "
                "(register_buffer), which is the mean of what the shards make of it"
                * changed[0].startswith("model/")
            )
