"""Carry an exception from a loader's worker to the script.

Paddle's loader raises it in a thread of its own and ends the iteration with a `SystemError` without
a cause, so that neither the script nor the last lines of its log would show it.
"""

import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pod_runtime.trainer_main import place_of

_failed_start: "Failed | None" = None  # of this worker; None: it has begun, or this is none


class WorkerTraceback(Exception):  # noqa: N818  the `__cause__` of an error, not one itself
    """The traceback of the worker."""

    def __init__(self, text: str, place: str) -> None:
        """`place`: FILE:LINE in the user's own files; "": in none."""
        super().__init__(text)
        self.edl_place = place  # `trainer_main` asks for it

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands for a sample that could not be read, and then for its batch."""

    error: Exception | SystemExit
    worker_traceback: str
    place: str  # FILE:LINE in the user's own files; "": in none


def read_or_fail(read: Callable[[], Any]) -> Any:
    """Return what `read()` returns, or a `Failed` if it raises, or if the worker's start has."""
    if _failed_start is not None:
        return _failed_start
    try:
        return read()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise  # a number, which a signal's handler may have given, ends the worker alone
        text, place = traceback.format_exc(), place_of(error, os.getcwd())
        try:
            # Both ways: some exceptions can be pickled but not unpickled.
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  whatever it is, the text remains
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Failed(error, text, place)


class CarryingInit:
    """Wraps a loader's `worker_init_fn`: if it raises, all that the worker reads is a `Failed`."""

    def __init__(self, init: Callable[[int], Any] | None, begin: Callable[[], None]) -> None:
        """`begin` is called before."""
        self._init, self._begin = init, begin

    def __call__(self, worker: int) -> None:
        global _failed_start
        self._begin()
        init = self._init
        made = None if init is None else read_or_fail(lambda: init(worker))
        _failed_start = made if isinstance(made, Failed) else None


def carrying_options(options: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """Return a loader's options, with what its workers begin with wrapped, and `begin` before."""
    return {**options, "worker_init_fn": CarryingInit(options.get("worker_init_fn"), begin)}


class CarryingCollate:
    """Wraps a collate function: samples may be `Failed`."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        failed = next((sample for sample in samples if isinstance(sample, Failed)), None)
        made = failed or read_or_fail(lambda: self._collate(samples))
        if isinstance(made, Failed):
            return [made, np.zeros(1, np.uint8)]  # Paddle's queue wants an array in each batch
        return made


def raise_if_failed(batch: Any) -> Any:
    """Return the batch; raise the error that is in its place, with the worker's traceback."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else None
    if isinstance(first, Failed):
        raise first.error from WorkerTraceback(first.worker_traceback, first.place)
    return batch
