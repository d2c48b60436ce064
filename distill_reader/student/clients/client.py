"""What the reader asks of a connection to a teacher, whatever protocol it speaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill_reader.model.specs import ModelSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of a request, as a teacher announces them."""

    most_bytes: int | None = None  # of all inputs; None: it does not say
    most_samples: int | None = None


class TeacherClient(Protocol):
    """One connection to one teacher. One thread predicts at a time; several clients may be open.

    Requests in flight to a teacher are as many clients, each in a thread of its own.
    """

    endpoint: str  # as the user wrote it
    protocol: str  # the one in use: "fast-tcp", "fast-unix", "fast-shm", "oip-grpc", ...

    @property
    def spec(self) -> ModelSpec:
        """What the model takes and returns, as the teacher said when the connection was made."""
        ...

    @property
    def bounds(self) -> Bounds:
        """What a request may have, as the teacher said likewise."""
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
            By name of `fetch`: (samples, ...) arrays that nobody else writes to.

        Raises:
            TeacherGone, TeacherBusy, TeacherTimeout: another teacher may answer.
            RequestTooLarge: it will answer fewer samples.
            BadRequest: this teacher will not; another one might.
        """
        ...

    def close(self) -> None:
        """End the connection; from any thread: a `predict` that waits raises TeacherGone."""
        ...
