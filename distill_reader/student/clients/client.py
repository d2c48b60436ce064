"""The interface of a connection to a teacher, for all protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill_reader.model.specs import ModelSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of a request that a teacher announces."""

    most_bytes: int | None = None  # of all inputs; None: it announces none
    most_samples: int | None = None


class TeacherClient(Protocol):
    """One connection to one teacher. Only one thread may predict at a time.

    Several requests in flight to a teacher take several clients, each with a thread of its own.
    """

    endpoint: str  # as the user wrote it
    protocol: str  # the one in use: "fast-tcp", "fast-unix", "fast-shm", "oip-grpc", ...

    @property
    def spec(self) -> ModelSpec:
        """What the model takes and returns, as the teacher told when the connection was opened."""
        ...

    @property
    def bounds(self) -> Bounds:
        """The bounds of a request, as the teacher told then."""
        ...

    def predict(
        self,
        feeds: Mapping[str, Sequence[Array]],
        fetch: Sequence[str],
        *,
        timeout_s: float,
    ) -> dict[str, Array]:
        """Return the outputs named by `fetch` for all samples.

        Args:
            feeds: for each input the arrays whose rows, one array after the other, are its
                samples; C-contiguous, of the spec's dtype; they are not joined before sending.
            fetch: outputs wanted; empty: all.

        Returns:
            By name of `fetch`: (samples, ...) arrays that belong to the caller.

        Raises:
            TeacherGone, TeacherBusy, TeacherTimeout: another teacher may answer.
            RequestTooLarge: it will answer fewer samples.
            BadRequest: this teacher will not; another one might.
        """
        ...

    def close(self) -> None:
        """Close the connection, from any thread; a waiting `predict` raises TeacherGone."""
        ...
