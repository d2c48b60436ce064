"""Handle SIGTERM in a trainer: end where the state is whole, not in the middle of a step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class _Actions:
    now: Callable[[], None]
    waiting: Callable[[], None]


_actions: list[_Actions] = []  # at most one: of this process's present loop
_noted: list[int] = []  # signals for which the script has a handler of its own


def on_sigterm(now: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Have SIGTERM call both functions; processes forked from now on end by it as usual.

    If the script has set a handler, that stays, and nothing is called; `was_told_to_end` knows.

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
    handler = signal.getsignal(signal.SIGTERM)
    if handler not in (signal.SIG_DFL, None):  # None: the framework's
        if callable(handler) and not isinstance(handler, _Noting):
            signal.signal(signal.SIGTERM, _Noting(handler))
        return
    _actions.append(_Actions(now, waiting))
    _watch()
    signal.signal(signal.SIGTERM, lambda *_: _actions[0].now())
    os.register_at_fork(after_in_child=_forget)


def was_told_to_end() -> bool:
    """Whether SIGTERM has come to a handler that the script had set before its loop."""
    return bool(_noted)


class _Noting:
    """Notes a signal before the script's own handler acts on it."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _noted.append(number)
        self._handler(number, frame)


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
