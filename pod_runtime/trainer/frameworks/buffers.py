"""Keep a model's buffers the tensors that they were built as.

A forward pass may put another tensor in a buffer's place (`self.mean = 0.9 * self.mean + ...`)
rather than write into it. The state and the merging of shards know the tensors as they were built,
so what stands in their place is copied into them, and they are put back.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from pod_runtime.trainer.errors import UsageError

_SMALL = 8  # elements of a buffer, below which it may change in any way


class OwnBuffers:
    """The buffers of some layers that belong to the state. Of either framework."""

    def __init__(
        self, named_layers: Iterable[tuple[str, Any]], kept: set[int], copy: Callable[..., Any]
    ) -> None:
        """
        Args:
            kept: ids of the tensors that belong to the state.
            copy: copies the values of its first argument, a tensor, into the second.
        """
        self._copy = copy
        self._places = [
            (layer._buffers, key, own, f"{name}.{key}".removeprefix("."))
            for name, layer in named_layers
            for key, own in layer._buffers.items()
            if id(own) in kept
        ]
        self._before: list[tuple[Any, Any]] | None = None  # with their values; None: not in `kept`

    @property
    def tensors(self) -> list[Any]:
        """The buffers, each once."""
        return list({id(own): own for _buffers, _key, own, _name in self._places}.values())

    def take_back(self) -> None:
        """Copy what stands in a buffer's place into the buffer, and put that back.

        Within `kept` buffers are put back as they were: a state is taken amid an evaluation, too.

        Raises:
            UsageError: it is no tensor of the same shape and type.
        """
        if self._before is not None:
            self._put_back(self._before)
            return
        for buffers, key, own, name in self._places:
            # TorchScript's are in no dict.
            now = buffers[key] if key in buffers else None  # noqa: SIM401
            if now is own:
                continue
            shape, dtype = getattr(now, "shape", None), getattr(now, "dtype", None)
            if shape is None or list(shape) != list(own.shape) or dtype != own.dtype:
                raise UsageError(
                    f"model: its buffer {name} is {list(own.shape)} {own.dtype}, and was replaced "
                    f"by {'None' if now is None else f'{list(shape or [])} {dtype}'}: it could not "
                    f"be carried; keep shape and type, or leave it out of the model's state_dict"
                )
            self._copy(now, own)
            buffers[key] = own

    @contextmanager
    def kept(self, others: Sequence[Any] = ()) -> Iterator[None]:
        """Within it forward passes may change buffers; afterwards these are as they were.

        An evaluation is such a time: each trainer makes its share of the passes. A batch norm of
        Paddle with `use_global_stats=False` moves its statistics there as well.

        Args:
            others: tensors of the model that are no buffers, and change likewise.

        Raises:
            UsageError: a forward pass has resized a buffer.
        """
        self.take_back()
        before = [(own, own.detach().clone()) for own in (*self.tensors, *others)]
        self._before = before
        try:
            yield
        finally:
            self._before = None
            self._put_back(before)

    def _put_back(self, before: Sequence[tuple[Any, Any]]) -> None:
        for buffers, key, own, _name in self._places:
            buffers[key] = own
        for own, was in before:
            if list(own.shape) != list(was.shape):
                self.refuse_resized(own, was.shape)
            if not bool((own == was).all()):
                self._copy(was, own)

    def refuse_resized(self, tensor: Any, shape: Sequence[int]) -> NoReturn:
        """Refuse one that was built in this shape, and has been resized in place."""
        name = next(name for _buffers, _key, own, name in self._places if own is tensor)
        raise UsageError(
            f"model: its buffer {name} was {list(shape)}, and was resized to {list(tensor.shape)}: "
            f"it could not be carried; give the model a first batch before the optimizer and the "
            f"Loop, or leave the buffer out of the model's state_dict"
        )


def check_unset(named: Iterable[tuple[str, Any]], changed: Collection[int]) -> None:
    """Check that a script has set no buffer between the shards of a step and its update.

    Args:
        named: the buffers, perhaps with other tensors.
        changed: ids of those that are not as the step began with them.

    Raises:
        UsageError: it has set one.
    """
    names = [name for name, each in named if id(each) in changed]
    if names:
        raise UsageError(
            f"model: its buffer {names[0]} was set between `for batch in step:` and step.update(), "
            f"which puts there what the shards have made of it; set it before them, or after the "
            f"update. A forward pass there changes buffers as well: make it in loop.evaluate, or "
            f"in evaluation mode"
        )


def is_written_in_part(changed: int, shape: Collection[int], *, is_float: bool) -> bool:
    """Whether a shard has written into a part of a buffer, by how many elements it changed.

    Running statistics move as a whole, but for channels of a batch norm that are always zero.
    """
    size = math.prod(shape)
    return size >= _SMALL and 0 < 2 * changed < size and (len(shape) > 1 or not is_float)


def check_whole(named: Iterable[tuple[str, Any]], in_part: Collection[int]) -> None:
    """Check that no shard has written into a part of a buffer.

    Args:
        in_part: ids of those into which the newest shard did.

    Raises:
        UsageError: it has, as into a queue of past batches.
    """
    names = [name for name, each in named if id(each) in in_part]
    if names:
        raise UsageError(
            f"model: a forward pass writes into a part of its buffer {names[0]}, as into a queue "
            f"or a memory of past batches. Each shard does that from the same values, and a buffer "
            f"moves by the mean of what they change: it would hold something else. Fill such a "
            f"buffer after step.update(), from what all trainers have"
        )
