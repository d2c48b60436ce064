"""Sum gradients and buffers of a PyTorch model over the ranks of one step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.buffers import OwnBuffers, is_written_in_part
from pod_runtime.trainer.frameworks.torch.tensors import of_model


def sum_dtype(dtype: Any) -> Any:
    """Return the type in which values of type `dtype` are summed.

    Half precision is summed in float32: sums over ranks must not depend on their number more than
    rounding does. Whole numbers (counters among the buffers) are summed as int64.

    Raises:
        UsageError: there is none, as for complex numbers.
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if not (dtype.is_complex or dtype.is_floating_point):
        return torch.int64
    raise UsageError(f"tensors of type {dtype} cannot be summed over trainers")


class _Flat:
    """A flat tensor of one type, and a view of it for each of some tensors, after a front."""

    def __init__(self, tensors: Sequence[Any], dtype: Any, device: Any, front: int = 0) -> None:
        size = front + sum(tensor.numel() for tensor in tensors)
        self.tensor = torch.zeros(max(size, 1), dtype=dtype, device=device)
        self.views = []
        for tensor in tensors:
            self.views.append(self.tensor[front : front + tensor.numel()].view(tensor.shape))
            front += tensor.numel()


@dataclass(slots=True)
class _Buffers:
    """The buffers of one type in a step."""

    tensors: list[Any]
    start: _Flat  # as every shard finds them
    base: Any  # from which changes are counted: `start`, or, where that may be infinite, a copy
    now: _Flat  # as the newest shard has left them
    changes: Any  # sum over this rank's shards, like `now.tensor`


class TorchShardBuffers:
    """Keeps the loss, batch-norm statistics and other buffers of a step's shards.

    Every shard begins with the buffers of the step.

    After the step a buffer is its old value plus the mean, over the shards that are not empty, of
    the change that each made to it; so it does not matter which rank computed which shard.
    """

    def __init__(self, model: Any) -> None:
        kept = {id(each) for each in of_model(model).values()}
        self.own = OwnBuffers(model.named_modules(), kept, _copy)
        self.loss = TorchStepLoss(next(iter(model.parameters())).device)
        by_type: dict[Any, list[Any]] = {}
        for each in self.own.tensors:
            by_type.setdefault(sum_dtype(each.dtype), []).append(each)
        self._groups = {}
        for dtype, mine in by_type.items():
            start, now = (_Flat(mine, dtype, mine[0].device) for _ in range(2))
            # Of an infinite value (a mask's, or a limit's that is not found yet) no change can be
            # told, but what the shards have made of it can: as the change from zero.
            is_finite = all(bool(each.isfinite().all()) for each in mine)
            base = start.tensor if is_finite else torch.zeros_like(start.tensor)
            changes = torch.zeros_like(now.tensor)
            self._groups[dtype] = _Buffers(mine, start, base, now, changes)
        self._infinite = [g for g in self._groups.values() if g.base is not g.start.tensor]
        groups = list(self._groups.values())
        # What is copied by one call: on the host all, on a device what has one type.
        on_host = all(each.device.type == "cpu" for each in self.own.tensors)
        self._copied = [
            [
                [tensor for group in part for tensor in group.tensors],
                [view for group in part for view in group.start.views],
                [view for group in part for view in group.now.views],
            ]
            for part in ([groups] if on_host else [[group] for group in groups])
            if part
        ]
        self.shards = self._counted = 0  # of this rank since the last update; in `changes`
        self._had_shards = False  # before that, in this step

    def begin_step(self) -> None:
        self.loss.begin_step()
        self.own.take_back()
        self.shards = self._counted = 0
        self._had_shards = False
        with torch.no_grad():
            for tensors, start, _now in self._copied:
                self._copy_all(start, tensors)
            for each in self._infinite:
                torch.nan_to_num(each.start.tensor, 0.0, 0.0, 0.0, out=each.base)

    def begin_update(self) -> None:
        """Begin anew within a step: the next update may have shards, or none."""
        had_shards = self._had_shards or self.shards > 0
        self.begin_step()
        self._had_shards = had_shards

    def end_shard(self) -> None:
        self.own.take_back()
        if self.shards:
            self._count_newest()
        self.shards += 1
        with torch.no_grad():
            for tensors, start, now in self._copied:
                self._copy_all(now, tensors)
                torch._foreach_copy_(tensors, start)

    def changed_since_shard(self) -> set[int]:
        """Return the ids of the buffers that are not as `end_shard` has put them back."""
        self.own.take_back()
        return {
            id(tensor)
            for group in self._groups.values()
            for tensor, view in zip(group.tensors, group.start.views, strict=True)
            if not torch.allclose(tensor.to(view.dtype), view, 0.0, 0.0, equal_nan=True)
        }

    def _copy_all(self, views: Sequence[Any], tensors: Sequence[Any]) -> None:
        try:
            torch._foreach_copy_(views, tensors)
        except RuntimeError:
            for view, tensor in zip(views, tensors, strict=True):
                if view.shape != tensor.shape:
                    self.own.refuse_resized(tensor, view.shape)
            raise

    def written_in_part(self) -> set[int]:
        """Return the ids of the buffers into a part of which the newest shard has written."""
        return {
            id(tensor)
            for group in self._groups.values()
            for tensor, start, now in zip(
                group.tensors, group.start.views, group.now.views, strict=True
            )
            if is_written_in_part(
                int((start != now).sum()), tensor.shape, is_float=tensor.is_floating_point()
            )
        }

    def _count_newest(self) -> None:
        """Add what the newest shard has changed; there may be none."""
        for each in self._groups.values():
            if not self.shards:
                each.changes.zero_()
                if self._had_shards and each.base is not each.start.tensor:
                    each.changes += each.start.tensor - each.base  # it stays as it is
            elif self._counted == 0:
                torch.sub(each.now.tensor, each.base, out=each.changes)
            elif self._counted < self.shards:
                each.changes += each.now.tensor - each.base
        self._counted = self.shards

    def changes(self, contribute: bool = True) -> dict[Any, Any]:
        """Return the sums of the changes of this rank's shards, by type; or zeros."""
        if not contribute:
            return {dtype: torch.zeros_like(each.changes) for dtype, each in self._groups.items()}
        self._count_newest()
        return {dtype: each.changes for dtype, each in self._groups.items()}

    def apply_alone(self, filled_shards: int) -> None:
        """Move the buffers by what this rank's shards, which are all there are, have changed."""
        if filled_shards > 1:
            self.apply({key: _mean(each, filled_shards) for key, each in self.changes().items()})
            return
        self._put_now()  # to the bit as the only shard has left them

    def apply(self, moves: Mapping[Any, Any]) -> None:
        """Move the buffers by the mean over all shards of what they have changed."""
        for dtype, each in self._groups.items():
            torch.add(each.base, moves[dtype], out=each.now.tensor)
        self._put_now()

    def _put_now(self) -> None:
        with torch.no_grad():
            for tensors, _start, now in self._copied:
                torch._foreach_copy_(tensors, now)


def _mean(sums: Any, count: int) -> Any:
    if sums.is_floating_point():
        return sums / count
    return (sums.to(torch.float64) / count).round().to(sums.dtype)


def _copy(source: Any, target: Any) -> None:
    with torch.no_grad():
        target.copy_(source)


class TorchStepLoss:
    """The weighed losses of a step's shards, added up on their device: nobody waits for them."""

    def __init__(self, device: Any) -> None:
        self._zero = torch.zeros((), device=device)
        self._mine = self._zero
        self.value = self._zero  # over all ranks, once they have exchanged

    def begin_step(self) -> None:
        self.value = self._mine = self._zero

    def add(self, loss: Any, weight: float) -> None:
        """Add a shard's; a loss of several elements counts by their sum, as its gradient does."""
        loss = loss.detach()
        loss = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        loss = loss.sum() if loss.dim() else loss
        part = loss if weight == 1.0 else loss * weight
        self.value = self._mine = part if self._mine is self._zero else self._mine + part

    def fresh(self) -> "TorchStepLoss":
        """Return another one, of nothing yet."""
        return TorchStepLoss(self._zero.device)

    def replace(self, parts: "Sequence[TorchStepLoss]") -> None:
        """Be the sum of these."""
        self.begin_step()
        for each in parts:
            self.add(each._mine, 1.0)

    def mine(self, contribute: bool) -> Any:
        """Return what this rank adds to the sum over all."""
        return self._mine if contribute else self._zero


@dataclass(slots=True)
class _Gradients:
    """The gradients and buffers that are summed in one type."""

    indices: list[int]  # of the parameters
    flat: _Flat
    changes: Any  # its part for the buffers' changes

    def gather(self, grads: Sequence[Any | None]) -> None:
        """Copy each gradient to its place; None leaves zeros."""
        views, there = self._pairs(grads)
        if len(there) < len(grads):
            torch._foreach_zero_(self.flat.views)
        if there:
            torch._foreach_copy_(views, there)  # one call costs less than one for each

    def scatter(self, grads: Sequence[Any | None]) -> None:
        """Copy each place back into its gradient; None is left out."""
        views, there = self._pairs(grads)
        if there:
            torch._foreach_copy_(there, views)

    def _pairs(self, grads: Sequence[Any | None]) -> tuple[list[Any], list[Any]]:
        there = [each for each in grads if each is not None]
        if len(there) == len(grads):
            return self.flat.views, there
        found = zip(self.flat.views, grads, strict=True)
        return [view for view, each in found if each is not None], there


class TorchGradientExchange:
    """One flat tensor per type: header, loss, presence of each gradient, buffer changes, gradients.

    Whole numbers among the buffers (batch norm's counters, tables of constants) are summed by
    themselves, which float32 could not, and only where a rank's shards have changed them otherwise
    than usual: what a shard did on average, when they were summed last. The loss goes from the
    device to the flat tensor there: no number is waited for.
    """

    def __init__(
        self, parameters: Sequence[Any], buffers: TorchShardBuffers, header_size: int
    ) -> None:
        self._parameters = list(parameters)
        self._buffers = buffers
        self._header_size = header_size
        self._presence: list[float] = []
        sizes = {dtype: each.numel() for dtype, each in buffers.changes().items()}
        self._counts = sizes.pop(torch.int64, 0) > 0
        self._sums: Any | None = None  # of whole numbers' changes; None: all are as usual
        self._usual: Any | None = None  # change by a shard, as all ranks know it; None: none is
        self._shards = 0  # that have changed them, over all ranks
        dtypes = {sum_dtype(each.dtype) for each in self._parameters} | set(sizes)
        device = self._parameters[0].device
        self._groups: dict[Any, _Gradients] = {}
        front = front_size = header_size + 1 + 2 * self._counts + len(self._parameters)
        # float64, where there is one, carries the header: its numbers are exact there.
        for dtype in sorted(dtypes, key=str, reverse=True):
            mine = [i for i, each in enumerate(self._parameters) if sum_dtype(each.dtype) == dtype]
            changes = front + sizes.get(dtype, 0)
            flat = _Flat([self._parameters[i] for i in mine], dtype, device, changes)
            self._groups[dtype] = _Gradients(mine, flat, flat.tensor[front:changes])
            front = 0
        first = next(iter(self._groups.values())).flat.tensor
        self._front = first[:front_size]
        self._loss, self._unusual = first[header_size], first[header_size + 1]
        # On the host the front is written in place: every small operation on tensors costs as much
        # as all of this, right after a backward pass has emptied the caches.
        self._on_host = device.type == "cpu"
        self._written = (
            self._front if self._on_host else torch.zeros(front_size, dtype=torch.float64)
        )
        self._numbers = self._written.numpy()

    def run(
        self, header: Sequence[float], contribute: bool, reduce: Callable[[Any], None]
    ) -> list[float]:
        """Sum over all ranks; return the header's sums. The local gradients stay as they are."""
        grads = [each.grad if contribute else None for each in self._parameters]
        shards = self._buffers.shards if contribute else 0
        loss, changes = self._buffers.loss.mine(contribute), self._buffers.changes(contribute)
        usual = self._usual
        if usual is not None and shards != 1:
            usual = usual * shards
        is_usual = self._on_host and usual is not None and torch.equal(changes[torch.int64], usual)
        self._numbers[:] = [
            *header,
            float(loss) if self._on_host else 0.0,
            *([float(not is_usual), shards] if self._counts else ()),
            *[float(grad is not None) for grad in grads],
        ]
        if not self._on_host:
            self._front.copy_(self._written)
            self._loss.copy_(loss)
            if usual is not None:
                self._unusual.copy_((changes[torch.int64] != usual).any())
        with torch.no_grad():
            for dtype, each in self._groups.items():
                if each.changes.numel():
                    each.changes.copy_(changes[dtype])
                each.gather([grads[index] for index in each.indices])
        for each in self._groups.values():
            reduce(each.flat.tensor)
        self._buffers.loss.value = self._loss.clone()
        found: list[float] = (self._numbers if self._on_host else self._front).tolist()
        after = self._header_size + 1
        self._sums = None
        if self._counts:
            unusual, self._shards = map(round, found[after : after + 2])
            after += 2
            if unusual:
                self._sums = changes[torch.int64].clone()
                reduce(self._sums)
        self._presence = found[after:]
        return found[: self._header_size]

    def put_back(self, filled_shards: int) -> None:
        """Replace gradients and buffers by what was summed."""
        moves = {}
        for dtype, each in self._groups.items():
            with torch.no_grad():
                each.scatter([self._target(index) for index in each.indices])
            if each.changes.numel():
                moves[dtype] = _mean(each.changes, filled_shards)
        if self._sums is not None:
            moves[torch.int64] = _mean(self._sums, filled_shards)
            by_shard = _mean(self._sums, max(1, self._shards))
            is_usual = torch.equal(by_shard * self._shards, self._sums)
            self._usual = by_shard if is_usual else None
        elif self._usual is not None:
            moves[torch.int64] = self._usual
            if self._shards != filled_shards:  # some did nothing: it is a further update
                moves[torch.int64] = _mean(self._usual * self._shards, filled_shards)
        self._buffers.apply(moves)

    def _target(self, index: int) -> Any | None:
        """Return the gradient to overwrite; None: no rank's shard used the parameter."""
        parameter = self._parameters[index]
        if self._presence[index] == 0:
            return None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
