"""Run a program whose name server fails: `slow_names.py NAME silent|unknown FILE MODULE ARG...`.

Until FILE exists, look-ups of NAME get no answer for a minute, or that there is no such name. After
that new ones find 127.0.0.1. A name server cannot be tested otherwise without a network of its own.
"""

import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

_SILENT_S = 60.0
_look_up = socket.getaddrinfo


def look_up(host: Any, *args: Any, **options: Any) -> Any:
    if host != NAME:
        return _look_up(host, *args, **options)
    if FILE.exists():
        return _look_up("127.0.0.1", *args, **options)
    if MODE == "silent":
        time.sleep(_SILENT_S)
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


if __name__ == "__main__":
    NAME, MODE, FILE = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    socket.getaddrinfo = look_up
    module = sys.argv[4]
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
