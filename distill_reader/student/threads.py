"""Threads beside which a process may be forked."""

import os
import threading
import time
from collections import deque

_LONGEST_END_S = 1.0

_ending: deque[int] = deque(maxlen=256)  # native ids of threads, some of which are still there


class ForkSafeThread(threading.Thread):
    """A thread whose end no process is forked amid.

    Python takes a thread for ended, and `join` returns, before the thread-local objects of C++
    libraries are destroyed. Those of Paddle hold a lock of Paddle's meanwhile. A process that is
    forked at this moment, such as a worker of a DataLoader, would wait for that lock for ever.
    """

    def run(self) -> None:
        try:
            super().run()
        finally:
            _ending.append(threading.get_native_id())


def _await_ends() -> None:
    """Wait until the threads that have ended for Python have ended for the kernel, too."""
    deadline = time.monotonic() + _LONGEST_END_S
    while _ending:
        if os.path.exists(f"/proc/self/task/{_ending[0]}") and time.monotonic() < deadline:
            time.sleep(0.0005)
        else:
            _ending.popleft()


os.register_at_fork(before=_await_ends)
