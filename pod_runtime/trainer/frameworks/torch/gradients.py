"""Sum gradients and buffers of a PyTorch model over the ranks of one step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.buffers import OwnBuffers, is_written_in_part
from pod_runtime.trainer.frameworks.torch.tensors import of_model

# A script may have set another type, and another device, for tensors that it makes.
_PROBE = torch.zeros(1, dtype=torch.float32, device="cpu")
# `numpy()` would do, but such a tensor cannot be resized again, as some scripts do with buffers.
_SHARES = bool(np.from_dlpack(_PROBE).flags.writeable)  # False: numpy before 2.1


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
    """A flat tensor of one type, and a view of it for each of some tensors, after a front.

    `values` are its elements, to compute with: on the host an array of numpy, since there an
    operation on a small tensor costs ten times as much.
    """

    def __init__(self, tensors: Sequence[Any], dtype: Any, device: Any, front: int = 0) -> None:
        size = front + sum(tensor.numel() for tensor in tensors)
        self.tensor = torch.zeros(max(size, 1), dtype=dtype, device=device)
        self.views = []
        for tensor in tensors:
            self.views.append(self.tensor[front : front + tensor.numel()].view(tensor.shape))
            front += tensor.numel()
        on_host = self.tensor.device.type == "cpu"
        self.values = self.tensor.numpy() if on_host else self.tensor
        self.arrays = [each.numpy() for each in self.views] if on_host else []  # of the views


class _Buffers:
    """The buffers of one type in a step."""

    def __init__(self, tensors: list[Any], dtype: Any, own: OwnBuffers) -> None:
        device = tensors[0].device
        self.tensors = tensors
        self.start = _Flat(tensors, dtype, device)  # as every shard finds them
        self.now = _Flat(tensors, dtype, device)  # as the newest shard has left them
        self.changes = _Flat(tensors, dtype, device).values  # sum over this rank's shards
        self.base = self.start.values  # from which changes are counted
        self._may_be_infinite = dtype.is_floating_point
        self._own = own
        self._is_on_host = (
            _SHARES and device.type == "cpu" and all(each.dtype == dtype for each in tensors)
        )
        self._places: list[Any] = []
        self._arrays: list[Any] = []  # which share the tensors' memory

    def begin(self) -> None:
        """Copy the buffers to `start`."""
        self._keep(self.start)
        # Of an infinite value (a mask's, or a limit's that is not found yet) no change can be told,
        # but what the shards have made of it can: as the change from zero.
        if self._may_be_infinite:
            self.base = _finite(self.start.values)

    def swap(self) -> None:
        """Copy the buffers to `now`, and `start` to the buffers."""
        if self._is_on_host:
            pieces = zip(self._shared(), self.now.arrays, self.start.arrays, strict=True)
            for array, now, start in pieces:
                now[...] = array
                array[...] = start
        else:
            self._keep(self.now)
            self._put(self.start)

    def end(self) -> None:
        """Copy `now` to the buffers."""
        self._put(self.now)

    def _keep(self, flat: _Flat) -> None:
        if self._is_on_host:
            for array, piece in zip(self._shared(), flat.arrays, strict=True):
                piece[...] = array
            return
        with torch.no_grad():
            try:
                torch._foreach_copy_(flat.views, self.tensors)
            except RuntimeError:
                self._check_shapes()
                raise

    def _put(self, flat: _Flat) -> None:
        if self._is_on_host:
            for array, piece in zip(self._shared(), flat.arrays, strict=True):
                array[...] = piece
            return
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, flat.views)

    def _shared(self) -> list[Any]:
        places = [(each.data_ptr(), each.shape) for each in self.tensors]
        if places != self._places:  # by `tensor.data = ...`, or as it was resized
            self._check_shapes()
            self._arrays = [np.from_dlpack(each.detach()) for each in self.tensors]
            self._places = places
        return self._arrays

    def _check_shapes(self) -> None:
        for view, tensor in zip(self.start.views, self.tensors, strict=True):
            if view.shape != tensor.shape:
                self._own.refuse_resized(tensor, view.shape)


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
        self._groups = {dtype: _Buffers(mine, dtype, self.own) for dtype, mine in by_type.items()}
        self.shards = self._counted = 0  # of this rank since the last update; in `changes`
        self._had_shards = False  # before that, in this step

    def begin_step(self) -> None:
        self.loss.begin_step()
        self.own.take_back()
        self.shards = self._counted = 0
        self._had_shards = False
        for each in self._groups.values():
            each.begin()

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
        for each in self._groups.values():
            each.swap()

    def changed_since_shard(self) -> set[int]:
        """Return the ids of the buffers that are not as `end_shard` has put them back."""
        self.own.take_back()
        return {
            id(tensor)
            for group in self._groups.values()
            for tensor, view in zip(group.tensors, group.start.views, strict=True)
            if not torch.allclose(tensor.to(view.dtype), view, 0.0, 0.0, equal_nan=True)
        }

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
                each.changes[:] = 0
                if self._had_shards and each.base is not each.start.values:
                    each.changes[:] = each.start.values - each.base  # it stays as it is
            elif self._counted == 0:
                each.changes[:] = each.now.values - each.base
            elif self._counted < self.shards:
                each.changes += each.now.values - each.base
        self._counted = self.shards

    def changes(self, contribute: bool = True) -> dict[Any, Any]:
        """Return the sums of the changes of this rank's shards, by type; or zeros."""
        if not contribute:
            return {dtype: _zeros_like(each.changes) for dtype, each in self._groups.items()}
        self._count_newest()
        return {dtype: each.changes for dtype, each in self._groups.items()}

    def apply_alone(self, filled_shards: int) -> None:
        """Move the buffers by what this rank's shards, which are all there are, have changed."""
        if filled_shards > 1:
            changes = self.changes().items()
            self.apply({dtype: _mean(each, filled_shards, dtype) for dtype, each in changes})
            return
        self._put_now()  # to the bit as the only shard has left them

    def apply(self, moves: Mapping[Any, Any]) -> None:
        """Move the buffers by the mean over all shards of what they have changed."""
        for dtype, each in self._groups.items():
            each.now.values[:] = each.base + moves[dtype]
        self._put_now()

    def _put_now(self) -> None:
        for each in self._groups.values():
            each.end()


def _finite(values: Any) -> Any:
    """Return numbers with zeros in place of those that are not finite."""
    if not isinstance(values, np.ndarray):  # of a device, which is not waited for
        return torch.nan_to_num(values, 0.0, 0.0, 0.0)
    if np.isfinite(values).all():
        return values
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _zeros_like(values: Any) -> Any:
    return (np if isinstance(values, np.ndarray) else torch).zeros_like(values)


def _mean(sums: Any, count: int, dtype: Any) -> Any:
    if dtype != torch.int64:
        return sums / count
    if isinstance(sums, np.ndarray):
        return np.rint(sums / count).astype(np.int64)
    return (sums.to(torch.float64) / count).round().to(torch.int64)


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
        sizes = {dtype: len(each) for dtype, each in buffers.changes().items()}
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
            self._groups[dtype] = _Gradients(mine, flat, flat.values[front:changes])
            front = 0
        first = next(iter(self._groups.values())).flat
        self._front = first.tensor[:front_size]
        self._loss, self._unusual = self._front[header_size], self._front[header_size + 1]
        self._on_host = device.type == "cpu"  # there the front is written in place
        self._written = (
            self._front
            if self._on_host
            else torch.zeros(front_size, dtype=torch.float64, device="cpu")
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
        is_usual = self._on_host and usual is not None and not (changes[torch.int64] != usual).any()
        self._numbers[:] = [
            *header,
            loss.item() if self._on_host else 0.0,
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
                if len(each.changes):
                    each.changes[:] = changes[dtype]
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
                sums = changes[torch.int64] + 0
                sums = torch.from_numpy(sums) if self._on_host else sums
                reduce(sums)
                self._sums = sums.numpy() if self._on_host else sums
        self._presence = found[after:]
        return found[: self._header_size]

    def put_back(self, filled_shards: int) -> None:
        """Replace gradients and buffers by what was summed."""
        moves = {}
        for dtype, each in self._groups.items():
            with torch.no_grad():
                each.scatter([self._target(index) for index in each.indices])
            if len(each.changes):
                moves[dtype] = _mean(each.changes, filled_shards, dtype)
        if self._sums is not None:
            moves[torch.int64] = _mean(self._sums, filled_shards, torch.int64)
            by_shard = _mean(self._sums, max(1, self._shards), torch.int64)
            is_usual = not (by_shard * self._shards != self._sums).any()
            self._usual = by_shard if is_usual else None
        elif self._usual is not None:
            moves[torch.int64] = self._usual
            if self._shards != filled_shards:  # some did nothing: it is a further update
                moves[torch.int64] = _mean(self._usual * self._shards, filled_shards, torch.int64)
        self._buffers.apply(moves)

    def _target(self, index: int) -> Any | None:
        """Return the gradient to overwrite; None: no rank's shard used the parameter."""
        parameter = self._parameters[index]
        if self._presence[index] == 0:
            return None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
