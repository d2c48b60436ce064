"""Guard a connection that one thread uses, and that any thread may close."""

import threading
from collections.abc import Callable
from types import TracebackType

from distill_reader.errors import TeacherGone


class ConnectionGuard:
    """Closes a connection only when its user has left it. Enter it by `with` for each use."""

    def __init__(
        self, endpoint: str, *, wake: Callable[[], None], close: Callable[[], None]
    ) -> None:
        """
        Args:
            endpoint: for messages.
            wake: makes a waiting use fail; called from another thread, before `close`.
            close: closes the connection; called once, while no thread uses it.
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
        """Refuse further uses, wake the present one, and close the connection after it."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self._is_in_use:
                self._wake()
            else:
                self._free()
