"""What several tests need."""

import socket
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "") -> None:
    """Return once `condition()` is true; fail the test when it is not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(0.01)


def free_port() -> int:
    """Return a TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
