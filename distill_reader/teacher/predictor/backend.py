"""What a predictor process asks of a model, whatever framework runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill_reader.model.specs import ModelSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a predictor computes."""

    gpu: int | None = None  # index as CUDA counts; None: on the CPU
    threads: int = 1  # of the math library, on the CPU
    memory_optim: bool = False  # let Paddle reuse the memory of intermediate tensors


class Backend(Protocol):
    """A loaded model. Made and used in one predictor process, by one thread."""

    @property
    def spec(self) -> ModelSpec: ...

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return all outputs by name for one batch; the inputs are only valid during the call."""
        ...


class BackendFactory(Protocol):
    """Named on the command line as `--backend module:function`, for models of other frameworks."""

    def __call__(self, folder: str, name: str, device: Device) -> Backend:
        """Load the model in `folder`.

        Raises:
            ModelError: it cannot be served; the text names the file and the remedy.
        """
        ...
