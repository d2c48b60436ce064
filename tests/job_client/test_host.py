"""What a machine has, and what others use of it."""

import os
import subprocess
import sys
import time

import pytest

from job_client.devices.host import Host, trees
from pod_runtime import processes
from tests.support import wait_until

BURN = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"
FILE = """
import mmap, os, sys, time
fd = os.memfd_create("state")
for _ in range(400):
    os.write(fd, b"x" * 1_000_000)
held = mmap.mmap(fd, 400_000_000, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) if {mapped} else fd
print("held", flush=True)
time.sleep(600)
"""
HOLD = "held = b'x' * 400_000_000\nprint('held', flush=True)\nimport time\ntime.sleep(600)"


@pytest.fixture
def start():
    begun = []

    def begin(text: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        begun.append(process)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def used_s(pid: int) -> float:
    found = processes.read(pid)
    return 0.0 if found is None else found.cpu_s


def test_a_machine_has_the_cores_and_the_memory_that_this_process_may_use():
    host = Host()
    assert 0 < host.cpu_milli <= 1000 * len(os.sched_getaffinity(0))
    assert host.memory_mb > 100


def test_the_processor_time_of_others_counts_and_that_of_our_own_trees_does_not(start):
    burner = start(BURN)
    as_other, as_ours = Host(), Host()
    assert as_other.foreign((), time.monotonic()).cpu_milli is None  # nothing to compare with yet
    as_ours.foreign(trees([burner.pid], processes.read_all()), time.monotonic())
    began, used = time.monotonic(), used_s(burner.pid)
    wait_until(lambda: used_s(burner.pid) > used + 0.5, what="the burner has burnt")
    table, now = processes.read_all(), time.monotonic()
    theirs = as_other.foreign((), now).cpu_milli
    without = as_ours.foreign(trees([burner.pid], table), now).cpu_milli
    assert theirs is not None
    assert without is not None
    burnt = 1000 * (used_s(burner.pid) - used) / (now - began)
    assert theirs == as_other.cpu_milli or theirs - without > burnt / 2
    assert 0 <= without <= as_ours.cpu_milli


def test_the_memory_of_others_counts_and_that_of_our_own_does_not(start):
    host, holder = Host(), start(HOLD)
    table = processes.read_all()
    theirs = host.foreign((), 1.0).memory_mb
    without = host.foreign(trees([holder.pid], table), 2.0).memory_mb
    assert theirs is not None
    assert without is not None
    assert theirs - without > 200


@pytest.mark.parametrize("mapped", [False, True])
def test_a_state_that_a_shim_holds_is_not_of_others_and_counts_once(start, mapped, monkeypatch):
    """After the trainers have died nobody maps it: it is in the memory of no process."""
    host, shim = Host(), start(FILE.format(mapped=mapped))
    monkeypatch.setattr(host, "used_memory", lambda: 10_000_000_000)
    ours = trees([shim.pid], processes.read_all())
    assert list(processes.memory_files(shim.pid).values()) == [pytest.approx(400e6, rel=0.02)]
    load = host.foreign(ours, 1.0, shims=[shim.pid, shim.pid])  # two that hold one state
    own_mb = sum(each.rss_bytes for each in ours) / 1e6
    assert load.memory_mb == pytest.approx(10_000 - own_mb - 400 * (not mapped), abs=20)


def test_of_a_process_that_is_gone_no_memory_is_known():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processes.memory_files(gone.pid) == {}
    assert processes.shared_bytes(gone.pid) == 0


def test_a_tree_is_counted_once_however_often_a_part_of_it_is_named(start):
    child = start(BURN)
    found = trees([os.getpid(), child.pid, 0], processes.read_all())
    assert [each.pid for each in found].count(child.pid) == 1
    assert os.getpid() in [each.pid for each in found]
