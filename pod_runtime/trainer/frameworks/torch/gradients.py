"""Sum gradients and buffers of a PyTorch model over the ranks of one step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.buffers import OwnBuffers


def sum_dtype(dtype: Any) -> Any:
    """Return the type in which values of type `dtype` are summed.

    Half precision is summed in float32: sums over ranks must not depend on their number more than
    rounding does. Whole numbers (counters among the buffers) are summed as float64.

    Raises:
        UsageError: there is none, as for complex numbers.
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if not (dtype.is_complex or dtype.is_floating_point):
        return torch.float64
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

    def gather(self, tensors: Sequence[Any | None]) -> None:
        """Copy each tensor to its place; None leaves zeros."""
        there = [tensor for tensor in tensors if tensor is not None]
        views = self.views
        if len(there) < len(views):
            pairs = list(zip(views, tensors, strict=True))
            views = [view for view, tensor in pairs if tensor is not None]
            for view, tensor in pairs:
                if tensor is None:
                    view.zero_()
        if there:
            with torch.no_grad():
                torch._foreach_copy_(views, there)  # one call costs less than one for each

    def scatter(self, tensors: Sequence[Any | None]) -> None:
        """Copy each place back into its tensor; None is left out."""
        with torch.no_grad():
            for view, tensor in zip(self.views, tensors, strict=True):
                if tensor is not None:
                    tensor.copy_(view if tensor.is_floating_point() else view.round())


class TorchShardBuffers:
    """Keeps the loss, batch-norm statistics and other buffers of a step's shards.

    Every shard begins with the buffers of the step.

    After the step a buffer is its old value plus the mean, over the shards that are not empty, of
    the change that each made to it; so it does not matter which rank computed which shard.
    """

    def __init__(self, model: Any) -> None:
        kept = {id(each) for each in model.state_dict(keep_vars=True).values()}
        self.own = OwnBuffers(model.named_modules(), kept, _copy)
        self.loss = TorchStepLoss(next(iter(model.parameters())).device)
        by_type: dict[Any, list[Any]] = {}
        for each in self.own.tensors:
            by_type.setdefault(sum_dtype(each.dtype), []).append(each)
        self._groups = [
            (mine, _Flat(mine, dtype, mine[0].device), _Flat(mine, dtype, mine[0].device))
            for dtype, mine in by_type.items()
        ]
        self._changes: dict[Any, Any] = {}

    def sizes(self) -> dict[Any, int]:
        """Return how many elements change, by type."""
        return {start.tensor.dtype: start.tensor.numel() for _mine, start, _now in self._groups}

    def begin_step(self) -> None:
        self.loss.begin_step()
        self.own.take_back()
        for tensors, start, _now in self._groups:
            start.gather(tensors)
            self._changes[start.tensor.dtype] = torch.zeros_like(start.tensor)

    def end_shard(self) -> None:
        self.own.take_back()
        with torch.no_grad():
            for tensors, start, now in self._groups:
                now.gather(tensors)
                torch._foreach_copy_(tensors, start.views)  # as they were
                self._changes[start.tensor.dtype] += now.tensor - start.tensor

    def changes(self) -> dict[Any, Any]:
        """Return the sums of the changes of this rank's shards, by type."""
        return self._changes

    def apply_alone(self, filled_shards: int) -> None:
        """Move the buffers by what this rank's shards, which are all there are, have changed."""
        if filled_shards > 1:
            self.apply(self._changes, filled_shards)
            return
        for tensors, _start, now in self._groups:
            now.scatter(tensors)  # to the bit as the only shard has left them

    def apply(self, changes: dict[Any, Any], filled_shards: int) -> None:
        """Move the buffers by `changes` / `filled_shards`."""
        for tensors, start, now in self._groups:
            torch.add(start.tensor, changes[start.tensor.dtype] / filled_shards, out=now.tensor)
            now.scatter(tensors)


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


class TorchGradientExchange:
    """One flat tensor per type: header, loss, presence of each gradient, buffer changes, gradients.

    The loss goes from the device to the flat tensor there: no number is waited for.
    """

    def __init__(
        self, parameters: Sequence[Any], buffers: TorchShardBuffers, header_size: int
    ) -> None:
        self._parameters = list(parameters)
        self._buffers = buffers
        self._header_size = header_size
        self._presence: list[float] = []
        sizes = buffers.sizes()
        dtypes = {sum_dtype(each.dtype) for each in self._parameters} | set(sizes)
        self._groups: list[tuple[list[int], _Flat, int, int]] = []
        # float64, where there is one, carries the header: its numbers are exact there.
        for position, dtype in enumerate(sorted(dtypes, key=str, reverse=True)):
            mine = [i for i, each in enumerate(self._parameters) if sum_dtype(each.dtype) == dtype]
            front = header_size + 1 + len(self._parameters) if position == 0 else 0
            changes = sizes.get(dtype, 0)
            device = self._parameters[0].device
            flat = _Flat([self._parameters[i] for i in mine], dtype, device, front + changes)
            self._groups.append((mine, flat, front, changes))

    def run(
        self, header: Sequence[float], contribute: bool, reduce: Callable[[Any], None]
    ) -> list[float]:
        """Sum over all ranks; return the header's sums. The local gradients stay as they are."""
        grads = [each.grad if contribute else None for each in self._parameters]
        for position, (mine, flat, front, changes) in enumerate(self._groups):
            flat.gather([grads[index] for index in mine])
            if position == 0:
                present = [float(grad is not None) for grad in grads]
                numbers = torch.tensor([*header, 0.0, *present], dtype=flat.tensor.dtype)
                flat.tensor[:front] = numbers
                flat.tensor[self._header_size] = self._buffers.loss.mine(contribute)
            if changes:
                place = flat.tensor[front : front + changes]
                if contribute:
                    place.copy_(self._buffers.changes()[flat.tensor.dtype])
                else:
                    place.zero_()
            reduce(flat.tensor)
        front = self._groups[0][1].tensor[: self._groups[0][2]]
        self._buffers.loss.value = front[self._header_size].clone()
        found: list[float] = front.tolist()
        self._presence = found[self._header_size + 1 :]
        return found[: self._header_size]

    def put_back(self, filled_shards: int) -> None:
        """Replace gradients and buffers by what was summed."""
        moved = {}
        for mine, flat, front, changes in self._groups:
            flat.scatter([self._target(index) for index in mine])
            if changes:
                moved[flat.tensor.dtype] = flat.tensor[front : front + changes]
        self._buffers.apply(moved, filled_shards)

    def _target(self, index: int) -> Any | None:
        """Return the gradient to overwrite; None: no rank's shard used the parameter."""
        parameter = self._parameters[index]
        if self._presence[index] == 0:
            return None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
