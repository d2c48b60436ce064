"""Paddle's part of epoch checkpoints: the state of a program, and whether all ranks agree."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.paddle.checks import check_is_no_fit, unowned_parameters
from pod_runtime.trainer.frameworks.paddle.gradients import own_buffers
from pod_runtime.trainer.frameworks.paddle.state import (
    PaddleState,
    load_scheduler,
    states_of_scheduler,
)
from pod_runtime.trainer.frameworks.paddle.tensors import to_plain
from pod_runtime.trainer.layout import StateLayout, make_layout, missing_and_surplus


class ProgramState:
    """The parameters and accumulators of a static-graph program, by their names in it."""

    def __init__(self, program: Any, place: Any, optimizer: Any | None) -> None:
        """Look at `program`, whose executor runs at `place`.

        Args:
            optimizer: whose learning rate schedule belongs to the state; None: there is none.
        """
        self._program, self._place = program, place
        rate = getattr(optimizer, "_learning_rate", None)
        self._scheduler = rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None
        self._layout: StateLayout | None = None  # None: to be made
        self._arrays: list[Any] = []

    def layout(self) -> StateLayout:
        """Return the layout of the state as it is now.

        Raises:
            UsageError: the startup program has not been run.
        """
        arrays = {name: np.asarray(tensor) for name, tensor in self._tensors().items()}
        self._arrays = list(arrays.values())
        self._layout = make_layout(
            [(f"model/{name}", str(array.dtype), array.shape) for name, array in arrays.items()]
        )
        return self._layout

    def copy_out(self, target: memoryview) -> None:
        """Copy what the last `layout()` found into `target`."""
        assert self._layout is not None
        for spec, array in zip(self._layout.specs, self._arrays, strict=True):
            target[spec.offset : spec.offset + spec.size_bytes] = array.tobytes()

    def scalars(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        found = states_of_scheduler(self._scheduler)
        return {name: to_plain(name, value) for name, value in found.items()}

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            StateError: it belongs to another program; nothing has been changed.
        """
        tensors = self._tensors()
        wanted = {f"model/{name}": np.asarray(t).shape for name, t in tensors.items()}
        difference = missing_and_surplus(layout, wanted)
        if difference:
            raise StateError(f"main_program: the state does not fit: {difference}")
        for spec in layout.specs:
            piece = data[spec.offset : spec.offset + spec.size_bytes]
            array = np.frombuffer(piece, spec.dtype).reshape(spec.shape)
            tensors[spec.name.removeprefix("model/")].set(array.copy(), self._place)
        if self._scheduler is not None and "lr_scheduler" in scalars:
            load_scheduler(self._scheduler, scalars)

    def _tensors(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._program.state_dict()
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"main_program: has no values yet ({error}); run the startup program first"
            ) from error
        return found


State = PaddleState | ProgramState


def open_state(
    exe: Any, main_program: Any, model: Any, optimizer: Any, scaler: Any, extra: Mapping[str, Any]
) -> State:
    """Return what the original's calls save and load.

    Raises:
        UsageError: it cannot be found out; the text says what to pass.
    """
    if model is not None:
        if optimizer is None:
            raise UsageError(
                "optimizer: missing; pass optimizer= with model=, its momentum is half of the state"
            )
        check_is_no_fit(model)
        if not isinstance(model, paddle.nn.Layer):
            raise UsageError(
                f"model: expected a paddle.nn.Layer, got {type(model).__name__}; a PyTorch script "
                "has its checkpoints by elastic.Loop(checkpoint=...)"
            )
        inner = model._layers if isinstance(model, paddle.DataParallel) else model
        unowned = unowned_parameters(inner, optimizer)
        return PaddleState(inner, [optimizer], own_buffers(inner), unowned, scaler, extra)
    if paddle.in_dynamic_mode():
        raise UsageError(
            "model: missing; in dynamic graph an executor knows no parameters: pass model= and "
            "optimizer="
        )
    for name, given in (("scaler", scaler), ("extra", extra)):
        if given:
            raise UsageError(f"{name}: belongs to model=; a program's state does not have it")
    program = main_program or paddle.static.default_main_program()
    place = getattr(exe, "place", None)
    if place is None:
        raise UsageError(f"exe: expected a paddle.static.Executor, got {type(exe).__name__}")
    return ProgramState(program, place, optimizer)


def check_all_ranks_have(place: tuple[int, int, int, str] | None) -> None:
    """Check that every rank has found the same checkpoint.

    Without a process group nothing is checked: ranks cannot talk.

    Raises:
        UsageError: they have not.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    numbers = [-1, -1, -1, -1]
    if place is not None:
        numbers = [*place[:3], zlib.crc32(place[3].encode())]
    everyone: list[Any] = []
    dist.all_gather(everyone, paddle.to_tensor(np.array(numbers, np.int64)))
    seen = [tuple(int(n) for n in tensor.numpy()) for tensor in everyone]
    if len(set(seen)) > 1:
        found = ", ".join(
            f"rank {rank} {'nothing' if one[0] < 0 else f'epoch {one[1]}'}"
            for rank, one in enumerate(seen)
        )
        raise UsageError(
            f"path: the trainers found different checkpoints ({found}); it has to be one folder "
            f"that all nodes share, or a URL"
        )
