"""What a node has left, as this machine says it."""

import os
import time
from pathlib import Path

import pytest

from job_client.devices.host import Host
from job_client.devices.node_load import NodeMeter
from job_server.api.wire import NodeLoad
from tests.support import wait_until


def test_a_node_says_what_of_it_is_in_use(tmp_path: Path):
    meter = NodeMeter(Host(), (tmp_path, tmp_path / "not" / "made" / "yet"))
    loads: list[NodeLoad] = []

    def has_disk() -> bool:
        loads.append(meter.read(time.monotonic()))
        return bool(loads[-1].disk)

    wait_until(has_disk, what="the disks are measured")
    first, last = loads[0], meter.read(time.monotonic())
    assert (first.cpu_milli, first.sent_bytes_s) == (None, None)  # nothing to compare with yet
    stats = os.statvfs(tmp_path)
    assert last.disk.startswith(str(tmp_path))
    assert last.disk_total_mb == stats.f_blocks * stats.f_frsize // 10**6
    assert 0 < last.disk_free_mb < last.disk_total_mb
    assert 0 < last.memory_used_mb < last.memory_total_mb
    assert last.cpu_milli is not None
    assert last.cpu_milli >= 0


@pytest.mark.parametrize(
    ("files", "left", "is_full"), [(10**6, 999, True), (10**6, 1000, False), (0, 0, False)]
)
def test_a_disk_without_inodes_is_full_whatever_bytes_it_has(
    tmp_path: Path, monkeypatch, files: int, left: int, is_full: bool
):
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(
        "os.statvfs", lambda _path: os.statvfs_result((*found[:5], files, left, left, *found[8:]))
    )
    meter = NodeMeter(Host(), (tmp_path,))
    wait_until(lambda: bool(meter.read(time.monotonic()).disk), what="the disk is measured")
    load = meter.read(time.monotonic())
    assert (load.disk_free_mb == 0) == is_full
    assert load.disk.endswith("no inodes, see `df -i`") == is_full


def test_a_folder_whose_disk_cannot_be_read_costs_its_own_figure_alone(tmp_path: Path):
    gone = tmp_path / ("x" * 300)  # no name may be so long
    meter = NodeMeter(Host(), (gone,))
    load = meter.read(time.monotonic())
    assert load.memory_total_mb > 0
    assert load.disk_total_mb == 0
