"""Sum gradients and buffers of a Paddle model over the ranks of one step."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.jit import dy2static

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.buffers import OwnBuffers, is_written_in_part
from pod_runtime.trainer.frameworks.paddle.flat import (
    DeviceFlat,
    Flat,
    HostFlat,
    Slice,
    flat_dtype,
    lay_out,
)
from pod_runtime.trainer.frameworks.paddle.state import optimizer_parameters
from pod_runtime.trainer.frameworks.paddle.tensors import dtype_name, of_model, running_statistics
from pod_runtime.trainer.frameworks.unowned import limited_norm, sparse_gradient

_EXACT = 2**53  # up to which float64 has every whole number


class ShardBuffers:
    """Keeps the loss, batch-norm statistics and other buffers of a step's shards.

    Every shard begins with the buffers of the step.

    After the step a buffer is its old value plus the mean, over the shards that are not empty, of
    the change that each made to it; so it does not matter which rank computed which shard.
    """

    def __init__(self, model: Any, on_host: bool) -> None:
        self.loss = StepLoss()
        self.own = own_buffers(model)
        self.tensors = [*running_statistics(model), *self.own.tensors]
        self.dtypes = sorted({flat_dtype(dtype_name(tensor)) for tensor in self.tensors})
        make = HostFlat if on_host else DeviceFlat
        self._groups: list[tuple[list[Any], list[Slice], Flat, Flat, int]] = []
        self._changes: dict[str, Any] = {}
        for dtype in self.dtypes:
            mine = [each for each in self.tensors if flat_dtype(dtype_name(each)) == dtype]
            slices, size = lay_out(mine, dtype)
            self._groups.append((mine, slices, make(size, dtype), make(size, dtype), size))
        self._bases: dict[str, Any] = {}  # from which changes are counted, by type
        self._shards = 0  # of this rank since the last update
        self._had_shards = False  # before that, in this step

    def sizes(self) -> dict[str, int]:
        """Return how many elements change, by type."""
        return {start.dtype: size for _t, _p, start, _now, size in self._groups}

    def begin_step(self) -> None:
        self.loss.begin_step()
        self.own.take_back()
        for tensors, slices, start, _now, size in self._groups:
            start.gather(tensors, slices)
            # Of an infinite value (a mask's, or a limit's that is not found yet) no change can be
            # told, but what the shards have made of it can: as the change from zero.
            self._bases[start.dtype] = _finite(start.values(0, size))
            self._changes[start.dtype] = self.no_changes(start.dtype)
        self._shards, self._had_shards = 0, False

    def begin_update(self) -> None:
        """Begin anew within a step: the next update may have shards, or none."""
        had_shards = self._had_shards or self._shards > 0
        self.begin_step()
        self._had_shards = had_shards
        for _tensors, _slices, start, _now, size in self._groups:
            if had_shards:  # without a shard it stays as it is
                self._changes[start.dtype] = start.values(0, size) - self._bases[start.dtype]

    def end_shard(self) -> None:
        self.own.take_back()
        for tensors, slices, start, now, size in self._groups:
            now.swap(tensors, slices, start)
            changes = now.values(0, size) - self._bases[start.dtype]
            if self._shards:
                changes += self._changes[start.dtype]
            self._changes[start.dtype] = changes
        self._shards += 1

    def changed_since_shard(self) -> set[int]:
        """Return the ids of the buffers that are not as `end_shard` has put them back."""
        self.own.take_back()
        found = set()
        for tensors, slices, start, _now, _size in self._groups:
            for tensor, (offset, size, _is_native) in zip(tensors, slices, strict=True):
                now = tensor.detach().astype(start.dtype).flatten()
                before = start.tensor[offset : offset + size]
                if size and not paddle.allclose(now, before, 0.0, 0.0, equal_nan=True):
                    found.add(id(tensor))
        return found

    def written_in_part(self) -> set[int]:
        """Return the ids of the buffers into a part of which the newest shard has written."""
        found = set()
        for tensors, slices, start, now, total in self._groups:
            before, after = start.values(0, total), now.values(0, total)
            for tensor, (offset, size, _is_native) in zip(tensors, slices, strict=True):
                part = slice(offset, offset + size)
                changed = int((before[part] != after[part]).sum()) if size else 0
                is_float = tensor.is_floating_point()
                if is_written_in_part(changed, tensor.shape, is_float=is_float):
                    found.add(id(tensor))
        return found

    def changes(self, dtype: str) -> Any:
        """Return the sum of the changes of this rank's shards."""
        return self._changes[dtype]

    def no_changes(self, dtype: str) -> Any:
        """Return zeros in their place."""
        return self._bases[dtype] * 0

    def apply_alone(self, filled_shards: int) -> None:
        """Move the buffers by what this rank's shards, which are all there are, have changed."""
        if filled_shards > 1:
            self.apply(self._changes, filled_shards)
            return
        for tensors, slices, _start, now, _size in self._groups:
            now.scatter(tensors, slices)  # to the bit as the only shard has left them

    def apply(self, changes: dict[str, Any], filled_shards: int) -> None:
        """Move the buffers by `changes` / `filled_shards`."""
        for tensors, slices, start, now, _size in self._groups:
            now.write(0, self._bases[start.dtype] + changes[start.dtype] / filled_shards)
            now.scatter(tensors, slices)


def _finite(values: Any) -> Any:
    """Return numbers with zeros in place of those that are not finite."""
    if isinstance(values, paddle.Tensor):
        return paddle.nan_to_num(values, 0.0, 0.0, 0.0)
    if np.isfinite(values).all():
        return values
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


class StepLoss:
    """The weighed losses of a step's shards, added up on their device: nobody waits for them."""

    def __init__(self) -> None:
        self._zero = paddle.zeros([])
        self._mine = self._zero
        self.value = self._zero  # over all ranks, once they have exchanged

    def begin_step(self) -> None:
        self.value = self._mine = self._zero

    def add(self, loss: Any, weight: float) -> None:
        """Add a shard's; a loss of several elements counts by their sum, as its gradient does."""
        loss = loss.detach()
        if loss.dtype not in (paddle.float32, paddle.float64):
            loss = loss.astype("float32")
        if loss.ndim:
            loss = loss.sum()
        part = loss if weight == 1.0 else loss * weight
        self.value = self._mine = part if self._mine is self._zero else self._mine + part

    def fresh(self) -> "StepLoss":
        """Return another one, of nothing yet."""
        return StepLoss()

    def replace(self, parts: "Sequence[StepLoss]") -> None:
        """Be the sum of these."""
        self.begin_step()
        for each in parts:
            self.add(each._mine, 1.0)

    def mine(self, contribute: bool) -> Any:
        """Return what this rank adds to the sum over all."""
        return self._mine if contribute else self._zero


class GradientExchange:
    """One flat tensor per type: header, loss, presence of each gradient, buffer changes, gradients.

    On a device the loss goes to the flat tensor there: no number is waited for.
    """

    def __init__(
        self, parameters: Sequence[Any], buffers: ShardBuffers, header_size: int, on_host: bool
    ) -> None:
        self.parameters = list(parameters)
        self._buffers = buffers
        self._header_size = header_size
        self._presence: list[float] = []
        dtypes = {flat_dtype(dtype_name(each)) for each in self.parameters} | set(buffers.dtypes)
        self._groups: list[tuple[list[int], list[Slice], Flat, int]] = []
        make = HostFlat if on_host else DeviceFlat
        # float64, where there is one, carries the header: its numbers are exact there.
        for position, dtype in enumerate(sorted(dtypes, reverse=True) or ["float64"]):
            mine = [
                index
                for index, each in enumerate(self.parameters)
                if flat_dtype(dtype_name(each)) == dtype
            ]
            front = header_size + 1 + len(self.parameters) if position == 0 else 0
            changes = buffers.sizes().get(dtype, 0)
            slices, size = lay_out(
                [self.parameters[index] for index in mine], dtype, front + changes
            )
            self._groups.append((mine, slices, make(size, dtype), front))

    def run(
        self, header: Sequence[float], contribute: bool, reduce: Callable[[Any], None]
    ) -> list[float]:
        """Sum over all ranks; return the header's sums. The local gradients stay as they are."""
        grads = [each.grad if contribute else None for each in self.parameters]
        for position, (mine, slices, flat, front) in enumerate(self._groups):
            flat.gather([grads[index] for index in mine], slices)  # zeros where there is none
            if position == 0:
                present = [0.0 if grad is None else 1.0 for grad in grads]
                flat.write_front(header, self._buffers.loss.mine(contribute), present)
            changes = self._buffers.sizes().get(flat.dtype, 0)
            if changes:
                of = self._buffers.changes if contribute else self._buffers.no_changes
                flat.write(front, of(flat.dtype))
            reduce(flat.tensor)
        first = self._groups[0][2]
        numbers = first.numbers(0, self._header_size + 1 + len(self.parameters))
        self._buffers.loss.value = first.number(self._header_size)
        self._presence = numbers[self._header_size + 1 :]
        return numbers[: self._header_size]

    def put_back(self, filled_shards: int) -> None:
        """Replace gradients and buffers by what was summed."""
        changes = {}
        for mine, slices, flat, front in self._groups:
            scatter_gradients(self.parameters, mine, slices, flat, self._presence)
            size = self._buffers.sizes().get(flat.dtype, 0)
            if size:
                changes[flat.dtype] = flat.values(front, size)
        self._buffers.apply(changes, filled_shards)


def scatter_gradients(
    parameters: Sequence[Any],
    indices: Sequence[int],
    slices: Sequence[Slice],
    flat: Flat,
    presence: Sequence[float],
) -> None:
    """Make what was summed these parameters' gradients; `presence` counts ranks that had one."""
    targets: list[Any | None] = []
    for index in indices:
        parameter = parameters[index]
        if presence[index] == 0:
            targets.append(None)  # no shard used it: the optimizer leaves it alone
            continue
        grad = parameter.grad
        if grad is None:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
            grad = parameter.grad
        targets.append(grad)
    flat.scatter(targets, slices)


@cache  # once in a process
def keep_gradients_of_static_graphs() -> None:
    """Have a graph that `paddle.jit.to_static` makes between two shards leave gradients alone.

    A new shape of an input may have one made, and Paddle empties the gradients then.
    """
    for name in ("partial_program", "pir_partial_program"):
        graph: Any = getattr(getattr(dy2static, name, None), "PartialProgramLayer", None)
        if hasattr(graph, "_set_grad_type"):
            graph._set_grad_type = _keeping(graph._set_grad_type)


def _keeping(set_grad_type: Callable[..., None]) -> Callable[..., None]:
    def keeping(graph: Any, parameters: Sequence[Any], *args: Any) -> None:
        before = [each._grad_ivar() for each in parameters]
        set_grad_type(graph, parameters, *args)
        for parameter, grad in zip(parameters, before, strict=True):
            if grad is not None:
                parameter._copy_gradient_from(grad)  # the same memory

    return keeping


def _shortens(embedding: Any) -> bool:
    """Whether a forward pass may change its vectors: not those of a frozen one that are short."""
    limit, weight = getattr(embedding, "_max_norm", None), embedding.weight
    if limit is None:
        return False
    norms = paddle.linalg.norm(weight.detach(), embedding._norm_type, -1)
    return not weight.stop_gradient or bool((norms > limit * 0.99999).any())


def trained_parameters(model: Any, optimizer: Any) -> list[Any]:
    """Return what the optimizer trains, in the model's order.

    Raises:
        UsageError: the model cannot be trained in shards; the text says what to change.
    """
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"model: {name or 'it'} is a SyncBatchNorm, whose statistics depend on the number "
                f"of trainers; use BatchNorm: the loop merges its statistics per shard"
            )
        if isinstance(layer, nn.Embedding) and getattr(layer, "_sparse", False):
            raise UsageError(sparse_gradient(f"{name}.weight"))
        if isinstance(layer, nn.Embedding) and _shortens(layer):
            renormed = f"paddle.renorm(weight, {layer._norm_type:g}, 0, {layer._max_norm:g})"
            raise UsageError(limited_norm(name or "it", f"weight.set_value({renormed})"))
    merged = of_model(model)
    parameters = dict(model.named_parameters())
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        is_carried = name in parameters or name in merged  # an LSTM keeps what it never fills
        if is_carried and tensor.size and not tensor._is_initialized():
            raise UsageError(
                f"model: {name} has no values, as within paddle.LazyGuard; give it some before the "
                f"optimizer and the Loop: parameter.initialize()"
            )
        if name in parameters and not tensor.size and not tensor.stop_gradient:
            raise UsageError(
                f"model: {name} has no elements, of shape {list(tensor.shape)}, and nothing to "
                f"train; leave it out, or freeze it: stop_gradient = True"
            )
        if is_carried and tensor.is_complex():
            raise UsageError(
                f"model: {name} is {dtype_name(tensor)}, which is not summed over trainers; keep "
                f"it as real numbers: paddle.as_real, and paddle.as_complex where it is used; a "
                f"constant: register_buffer(..., persistable=False)"
            )
        if name in merged and _is_beyond_float64(tensor):
            raise UsageError(
                f"model: {name} has whole numbers beyond 2**53, which are rounded where buffers "
                f"are merged; what does not change needs no place in the state: "
                f"register_buffer(..., persistable=False)"
            )
    trained = [each for each in model.parameters() if not each.stop_gradient]
    if not trained:
        raise UsageError("model: none of its parameters is trained (all have stop_gradient)")
    known = {id(each) for each in optimizer_parameters(optimizer)}
    owned = [each for each in trained if id(each) in known]
    if not owned:
        if known.intersection(id(each) for each in model.parameters()):
            raise UsageError(
                "optimizer: all of its parameters are frozen; unfreeze them before its turn, and "
                "before the Loop"
            )
        raise UsageError("optimizer: none of its parameters is one of the model's; pass that model")
    return owned


def _is_beyond_float64(tensor: Any) -> bool:
    if dtype_name(tensor) != "int64" or not tensor.size:
        return False
    return bool(tensor.max() > _EXACT) or bool(tensor.min() < -_EXACT)


def own_buffers(model: Any) -> OwnBuffers:
    """Return the buffers that belong to a model's state."""
    kept = {id(tensor) for tensor in of_model(model).values()}
    return OwnBuffers(model.named_sublayers(include_self=True), kept, _copy)


def _copy(source: Any, target: Any) -> None:
    with paddle.no_grad():
        paddle.assign(source.detach(), target)
