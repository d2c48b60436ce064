"""`python -m distill_reader.discovery` as a process, to be killed and frozen."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

_PROGRAM = (sys.executable, "-m", "distill_reader.discovery")


class DiscoveryProcess:
    """A discovery server on a port of its own."""

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        program: Sequence[str] = _PROGRAM,
        **environment: str,
    ) -> None:
        self.process = subprocess.Popen(
            [*program, "--server", f"127.0.0.1:{port}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"ready on \S+:(\d+);", self.ready)
        assert found, self.ready
        self.endpoint = f"127.0.0.1:{found[1]}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
