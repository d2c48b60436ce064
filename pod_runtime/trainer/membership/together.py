"""Wait together: ranks that have nothing to do show themselves while another one works alone."""

import time
from collections.abc import Callable

import numpy as np

from pod_runtime.trainer.frameworks.adapter import Adapter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0


def barrier(adapter: Adapter, is_busy: Callable[[], bool]) -> None:
    """Return when no rank is busy any more. All ranks call it, the busy one too.

    A rank that simply waited in the next exchange would give the others up: gloo does after 30 s.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        busy = np.array([float(is_busy())])
        adapter.all_reduce(busy)
        if not busy[0]:
            return
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
