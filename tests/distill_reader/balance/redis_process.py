"""A real Redis, to be stopped, frozen and started again with nothing in it."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.authority import Authority
from tests.support import free_port, wait_until


class RedisProcess:
    """`redis-server` on a port of loopback, which it keeps; nothing is written to disk."""

    def __init__(
        self,
        folder: Path,
        *,
        password: str = "",
        authority: Authority | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`authority`: for TLS; None: it speaks none."""
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.url = f"redis://{self.endpoint}"
        self._is_tls = authority is not None
        self._command = [program, "--bind", "127.0.0.1"]
        if authority is None:
            self._command += ["--port", str(self.port)]
        else:
            self._command += ["--port", "0", "--tls-port", str(self.port)]
            self._command += ["--tls-cert-file", authority.chain_file]
            self._command += ["--tls-key-file", authority.key_file]
            self._command += ["--tls-ca-cert-file", authority.ca_file, "--tls-auth-clients", "no"]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._command += ["--requirepass", password] if password else []
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None  # None: not running
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, 120, "redis answers")

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
                if self._is_tls:
                    return True
                probe.sendall(b"PING\r\n")
                return bool(probe.recv(1))
        except OSError:
            return False
