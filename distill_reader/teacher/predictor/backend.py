"""The interface of a model that a predictor computes, whatever framework runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import Array

__all__ = ["Array", "Backend", "BackendFactory", "Device"]  # for the authors of backends

PADDLE_BACKEND = "distill_reader.teacher.predictor.paddle_backend:load"  # as `--backend` names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device on which a predictor computes."""

    gpu: int | None = None  # CUDA's index; None: the CPU
    threads: int = 1  # of the math library, on the CPU
    memory_optim: bool = False  # let Paddle reuse the memory of intermediate tensors


class Backend(Protocol):
    """A loaded model. It is created and used by one thread of one predictor process."""

    @property
    def spec(self) -> ModelSpec: ...

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return all outputs of a batch by name, in the types and shapes of `spec`.

        The inputs are valid only during the call. It may work on them in place.
        """
        ...


class BackendFactory(Protocol):
    """A function that `--backend module:function` names, for models of other frameworks."""

    def __call__(self, folder: str, name: str, device: Device) -> Backend:
        """Load the model in `folder`.

        Raises:
            ModelError: it cannot be served; the text names the file and the remedy.
        """
        ...
