"""What the reader asks of a connection to a teacher, whatever protocol it speaks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from distill_reader.specs import ModelSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


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
            BadRequest: no teacher will.
        """
        ...

    def close(self) -> None:
        """End the connection; from any thread: a `predict` that waits raises TeacherGone."""
        ...
