"""A clock that chaos sets: imported by every Python program whose PYTHONPATH names this folder.

`time.time` is ahead of the machine's clock by as many seconds as the file `CHAOS_CLOCK` says; the
machine's own clock is left alone, and so is the monotonic one, which nobody can set.
"""

import os
import time

_machine_time = time.time
_path = os.environ.get("CHAOS_CLOCK", "")


def _chaos_time() -> float:
    try:
        with open(_path) as file:
            return _machine_time() + float(file.read())
    except (OSError, ValueError):  # no descriptor is free, say
        return _machine_time()


if _path:
    time.time = _chaos_time
