"""Measure what a node has left: processor, memory, disks, network."""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from job_client.devices.host import Host
from job_server.api.wire import NodeLoad

logger = logging.getLogger(__name__)

DISK_EVERY_S = 5.0
FEW_FILES, FEW_SHARE = 1000, 0.03  # inodes: with fewer free a disk is full, whatever bytes are left
MB = 10**6


class NodeMeter:
    """The load of this node. One thread asks it at a time.

    Args:
        folders: where pods and this client write.
    """

    def __init__(self, host: Host, folders: Sequence[Path]) -> None:
        self._host = host
        self._folders = folders
        self._before: tuple[float, float | None, int, int] | None = None
        self._disk: tuple[str, int, int] = ("", 0, 0)  # the fullest: folder, free, in all
        self._looked_at = float("-inf")
        self._looking: threading.Thread | None = None

    def read(self, now: float) -> NodeLoad:
        """Return the load, what is a rate since the last call.

        Args:
            now: seconds, of a clock that never goes back.
        """
        self._look_at_disks(now)
        sent, received = _traffic()
        busy_s = self._host.busy_s()
        before, self._before = self._before, (now, busy_s, sent, received)
        cpu_milli = sent_s = received_s = None
        if before is not None and now > before[0]:
            passed_s = now - before[0]
            sent_s = max(0, round((sent - before[2]) / passed_s))
            received_s = max(0, round((received - before[3]) / passed_s))
            if busy_s is not None and before[1] is not None:
                cpu_milli = max(0, round(1000 * (busy_s - before[1]) / passed_s))
        folder, free, total = self._disk
        return NodeLoad(
            cpu_milli=cpu_milli,
            load_1m=os.getloadavg()[0],
            memory_used_mb=self._host.used_memory() // MB,
            memory_total_mb=self._host.memory_mb,
            disk=folder,
            disk_free_mb=free // MB,
            disk_total_mb=total // MB,
            sent_bytes_s=sent_s,
            received_bytes_s=received_s,
        )

    def _look_at_disks(self, now: float) -> None:
        """Have a thread look, as a file server that is away lets it wait for ever."""
        busy = self._looking is not None and self._looking.is_alive()
        if busy or now < self._looked_at + DISK_EVERY_S:
            return
        looking = threading.Thread(target=self._measure_disks, name="disks", daemon=True)
        try:
            looking.start()
        except RuntimeError as error:  # no thread is to be had: the next call tries again
            logger.debug("the disks cannot be looked at: %s", error)
            return
        self._looked_at, self._looking = now, looking

    def _measure_disks(self) -> None:
        found = []
        for folder in self._folders:
            try:
                place = str(_existing(folder))
                usage, stats = psutil.disk_usage(place), os.statvfs(place)
            except OSError as error:
                logger.debug("%s: its disk cannot be read: %s", folder, error)
                continue
            name, free = str(folder), usage.free
            if stats.f_favail < min(FEW_FILES, FEW_SHARE * stats.f_files):  # 0 of 0: not counted
                name, free = f"{name}: no inodes, see `df -i`", 0
            found.append((free / max(usage.total, 1), name, free, usage.total))
        if found:
            _, name, free, total = min(found)
            self._disk = (name, free, total)


def _existing(folder: Path) -> Path:
    """Return the folder, or the one above it that there is."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _traffic() -> tuple[int, int]:
    """Return the bytes that were sent and received, by all interfaces but the loopback."""
    links = psutil.net_io_counters(pernic=True).items()
    outside = [counters for name, counters in links if name != "lo"]
    return sum(each.bytes_sent for each in outside), sum(each.bytes_recv for each in outside)
