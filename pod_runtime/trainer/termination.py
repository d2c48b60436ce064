"""SIGTERM for a trainer: it ends where its state is whole, and not amid a step."""

import os
import signal
import threading
from collections.abc import Callable

_act: list[Callable[[], None]] = []  # at most one: of the loop that this process is in


def on_sigterm(act: Callable[[], None]) -> None:
    """Have SIGTERM call `act`, in the main thread; processes forked from now on end by it as ever.

    A handler that the script has set stays, and `act` is not called.
    """
    if _act:
        _act[0] = act
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):  # None: the framework's
        return
    _act.append(act)
    signal.signal(signal.SIGTERM, lambda *_: _act[0]())
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
