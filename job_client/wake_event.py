"""An event that threads, and also signal handlers, may set."""

import os
import select


class WakeEvent:
    """Like threading.Event, which a signal handler must not set: it may hold the event's lock."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for `timeout_s`, and clear it; return whether it was set.

        For one thread only.
        """
        if not self._poll.poll(timeout_s * 1000):
            return False
        os.eventfd_read(self._fd)
        return True
