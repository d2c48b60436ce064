"""A bell that threads, and also signal handlers, may ring."""

import os
import select


class Bell:
    """Like threading.Event, which a signal handler must not set: it may hold the event's lock."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings, or for `timeout_s`; return whether it did. One thread only."""
        if not self._poll.poll(timeout_s * 1000):
            return False
        os.eventfd_read(self._fd)
        return True
