"""SIGTERM for a trainer: it ends where its state is whole, and not amid a step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Acts:
    now: Callable[[], None]
    waiting: Callable[[], None]


_acts: list[_Acts] = []  # at most one: of the loop that this process is in


def on_sigterm(now: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Have SIGTERM call both; processes forked from now on end by it as ever.

    A handler that the script has set stays, and nothing is called.

    Args:
        now: called in the main thread, between two lines of the script: not while that waits in
            the framework, say for a rank that answers no more.
        waiting: called in a thread of its own, at once.
    """
    if _acts:
        _acts[0] = _Acts(now, waiting)
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):  # None: the framework's
        return
    _acts.append(_Acts(now, waiting))
    _watch()
    signal.signal(signal.SIGTERM, lambda *_: _acts[0].now())
    os.register_at_fork(after_in_child=_forget)


def _watch() -> None:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if before != -1:  # the script has an event loop, which needs to hear of signals
        signal.set_wakeup_fd(before)
        return
    threading.Thread(target=_hear, args=(read_end,), name="sigterm", daemon=True).start()


def _hear(read_end: int) -> None:
    while numbers := os.read(read_end, 256):
        if signal.SIGTERM in numbers:
            _acts[0].waiting()


def _forget() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(ValueError):  # its pipe is the parent's
        signal.set_wakeup_fd(-1)
