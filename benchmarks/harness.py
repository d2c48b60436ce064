"""Helpers for all benchmarks: ports, processor time of processes and of the machine, ratios."""

import contextlib
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_port(port: int, limit_s: float, process: "subprocess.Popen[bytes] | None" = None) -> bool:
    """Return whether somebody listens there in time; where `process` has ended, nobody will."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((HOST, port), timeout=1).close()
            return True
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            return False
        time.sleep(0.01)


def await_server(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return once a job server listens; end it and raise SystemExit where it does not in time."""
    if not wait_port(port, 120, process):
        process.kill()
        process.wait()
        raise SystemExit("the job server did not start")


def tree_cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of these processes and all below them."""
    total = 0.0
    for pid in pids:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                total += times.user + times.system
    return total


def busy_s() -> float:
    """Return for how long this machine's processors have worked, for anybody."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def machine_used(seconds: float = 1.0) -> float:
    """Return which share of the machine's processors is used now."""
    return psutil.cpu_percent(seconds) / 100


def block(steps: Iterator[None], count: int) -> tuple[float, float]:
    """Return (wall, processor) seconds per step."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median ratio and its 95 % bootstrap interval."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[3899]
