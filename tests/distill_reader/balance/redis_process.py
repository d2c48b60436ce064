"""A real Redis, to be stopped, frozen and started again with nothing in it."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support import free_port, wait_until


class RedisProcess:
    """`redis-server` on a port of loopback, which it keeps; nothing is written to disk."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.url = f"redis://{self.endpoint}"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._command += ["--requirepass", password] if password else []
        self._process: subprocess.Popen[bytes] | None = None  # None: not running
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, 30, "redis answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.thaw()
        self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                probe.sendall(b"PING\r\n")
                return bool(probe.recv(1))
        except OSError:
            return False
