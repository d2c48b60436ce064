"""A connection that one thread uses and any thread may end, without closing it under its user."""

import threading
from collections.abc import Callable
from types import TracebackType

from distill_reader.errors import TeacherGone


class ConnectionGuard:
    """`with` it around each use of the connection."""

    def __init__(
        self, endpoint: str, *, wake: Callable[[], None], close: Callable[[], None]
    ) -> None:
        """
        Args:
            endpoint: for messages.
            wake: ends a use that waits; called from another thread while the connection is open.
            close: frees the connection; called once, while nobody uses it.
        """
        self._endpoint = endpoint
        self._wake = wake
        self._free = close
        self._lock = threading.Lock()
        self._is_in_use = False
        self.is_closed = False

    def __enter__(self) -> None:
        with self._lock:
            if self.is_closed:
                raise TeacherGone(f"{self._endpoint}: the connection is closed")
            if self._is_in_use:
                raise RuntimeError("a client predicts for one thread at a time: open another one")
            self._is_in_use = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_in_use = False
            if self.is_closed:
                self._free()

    def close(self) -> None:
        """End it, now for others and for good when nobody uses it any more."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self._is_in_use:
                self._wake()
            else:
                self._free()
