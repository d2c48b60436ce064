"""Handle SIGTERM in a trainer: end where the state is whole, not in the middle of a step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Actions:
    now: Callable[[], None]
    waiting: Callable[[], None]


_actions: list[_Actions] = []  # at most one: of this process's present loop


def on_sigterm(now: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Have SIGTERM call both functions; processes forked from now on end by it as usual.

    If the script has set a handler, that stays, and nothing is called.

    Args:
        now: called in the main thread, between two lines of the script: not while that waits in
            the framework, say for a rank that does not answer any more.
        waiting: called at once, in a thread.
    """
    if _actions:
        _actions[0] = _Actions(now, waiting)
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):  # None: the framework's
        return
    _actions.append(_Actions(now, waiting))
    _watch()
    signal.signal(signal.SIGTERM, lambda *_: _actions[0].now())
    os.register_at_fork(after_in_child=_forget)


def _watch() -> None:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if before != -1:  # the script has an event loop, which needs its signals
        signal.set_wakeup_fd(before)
        return
    threading.Thread(target=_read_signals, args=(read_end,), name="sigterm", daemon=True).start()


def _read_signals(read_end: int) -> None:
    while numbers := os.read(read_end, 256):
        if signal.SIGTERM in numbers:
            _actions[0].waiting()


def _forget() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(ValueError):  # its pipe is the parent's
        signal.set_wakeup_fd(-1)
