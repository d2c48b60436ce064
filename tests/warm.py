"""Start Python processes that have their framework imported already, for tests that need many.

The first test that wants one starts a server, which imports Paddle, or PyTorch, once and forks for
each script. A fork runs its script as `__main__`, in an environment, a folder and a session of its
own, and ends as an interpreter ends, but for the destruction of modules: with a framework that
takes a fifth of a second of the processor, more than most of the scripts. It has the hash seed of
the other forks, and no modules but the framework, the elastic loop and what these import. In a new
interpreter the import takes two seconds.
"""

import atexit
import functools
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import ROOT

# What frameworks and Python read at their start. The same for all; a script's own may say the same.
STARTUP = {"PYTHONWARNINGS": "ignore", "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}


class WarmProcess:
    """A fork of the server, as `subprocess.Popen` shows a child."""

    def __init__(self, server: "_Server", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # None: it runs, as far as it was asked
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline, pause_s = time.monotonic() + (3600 if timeout is None else timeout), 0.005
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until it has been polled, its pid is nobody else's
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    out: int,
    err: int | None = None,
    cwd: Path | None = None,
) -> WarmProcess:
    """Run the script `argv[0]` in a session of its own.

    Args:
        out: descriptor for its output.
        err: the same for its errors; None: `out`.
    """
    server = _server(_framework_of(Path(argv[0])))
    order = {"argv": list(argv), "env": dict(env), "cwd": str(cwd or Path.cwd())}
    return WarmProcess(server, server.ask(order, out, out if err is None else err)["pid"])


def run(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `subprocess.run` does with its output captured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(argv, env, out.fileno(), err.fileno(), cwd)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(argv), code, out.read(), err.read())


class _Server:
    """The process that forks; it ends with this one."""

    def __init__(self, framework: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", framework, str(theirs.fileno())],
                cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **STARTUP},
            )  # fmt: skip
        self._lines = self._socket.makefile("r")
        atexit.register(self._close)

    def ask(self, order: Mapping[str, Any], *fds: int) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], fds)
            answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def _close(self) -> None:
        self._lines.close()
        # Also where a process that was forked from this one, a loader's worker, has it open, too.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait(60)


@functools.cache
def _server(framework: str) -> _Server:
    return _Server(framework)


def _framework_of(script: Path) -> str:
    lines = script.read_text().splitlines()
    begin = ("import torch", "from torch")
    return "torch" if any(line.startswith(begin) for line in lines) else "paddle"


# --- the server's side


def _serve(framework: str, orders: socket.socket) -> None:
    """Fork for each order; returns in the forks alone, with `sys.argv` set."""
    while True:
        data, fds, _flags, _address = socket.recv_fds(orders, 1 << 20, 2)
        while data and not data.endswith(b"\n"):
            data += orders.recv(1 << 20)
        if not data:
            os._exit(0)
        order = json.loads(data)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            ready, in_session = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.close(ready)
                os.close(in_session)
                orders.close()
                _become(framework, order, *fds)
                return
            os.close(in_session)
            os.read(ready, 1)  # ends when the fork has its session, which tests kill
            os.close(ready)
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        orders.sendall(json.dumps(answer).encode() + b"\n")


def _become(framework: str, order: dict[str, Any], out: int, err: int) -> None:
    import numpy as np

    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    # As separate interpreters do, forks begin with random numbers of their own.
    random.seed()
    np.random.seed()
    made = sys.modules[framework]
    (made.seed if framework == "paddle" else made.manual_seed)(random.getrandbits(31))


def _main() -> None:
    framework = sys.argv[1]
    gc.disable()  # which would look through all that is imported, again and again
    importlib.import_module(framework)  # this is what takes long
    if framework == "torch":  # imports as much again with a process's first optimizer
        importlib.import_module("torch._dynamo")
    elif importlib.util.find_spec("sklearn") is not None:  # has the digits; takes as long as Paddle
        importlib.import_module("sklearn.model_selection")
    importlib.import_module(f"pod_runtime.trainer.frameworks.{framework}.framework")
    importlib.import_module("pod_runtime.trainer.elastic")
    gc.enable()
    # Else each fork's collections, and that at its end, go through what the imports have made: half
    # a second to one of processor time, as every page of it is copied.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _serve(framework, socket.socket(fileno=int(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    code: Any = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001 - shown as at an interpreter's end
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _main()
