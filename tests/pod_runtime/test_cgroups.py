"""What a container may use, from its control groups as engines lay them out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pod_runtime.cgroups import (
    MemoryLimit,
    OomKills,
    OomWatch,
    available_memory,
    cpu_quota,
    cpu_used_s,
    freed_since_peak,
    memory_limit,
    oom_kills,
    usable_cores,
)

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc/self without any group."""
    folder = tmp_path / "self"
    folder.mkdir()
    (folder / "mountinfo").write_text("22 1 254:1 / / rw,relatime - ext4 /dev/root rw\n")
    (folder / "cgroup").write_text("0::/\n")
    return folder


def mount(proc: Path, kind: str, options: str, root: str = "/") -> Path:
    """Mount the groups below `root` of the host; return where."""
    folder = proc.parent / f"cgroup {len(list(proc.parent.iterdir()))}"
    folder.mkdir()
    shown = str(folder).replace(" ", r"\040")
    with (proc / "mountinfo").open("a") as file:
        file.write(f"30 22 0:26 {root} {shown} ro,nosuid master:9 - {kind} {kind} rw,{options}\n")
    return folder


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def test_without_groups_the_machine_is_all_there_is(proc: Path):
    assert cpu_quota(proc) is None
    assert memory_limit(proc) is None
    assert usable_cores(proc) == len(os.sched_getaffinity(0))


def test_a_mount_without_a_source_is_passed_over(proc: Path):
    with (proc / "mountinfo").open("a") as file:  # as of `mount -t tmpfs "" /mnt`
        file.write("31 22 0:27 / /mnt rw,relatime shared:2 - tmpfs  rw,size=1024k\n")
    group(mount(proc, "cgroup2", ""), cpu__max="150000 100000")
    assert cpu_quota(proc) == 1.5


def test_a_container_of_cgroup_v2_sees_its_own_group_as_the_root(proc: Path):
    top = mount(proc, "cgroup2", "nsdelegate")
    group(
        top, cpu__max="150000 100000", memory__max=str(2 * GIB), memory__current=str(GIB),
        memory__stat=f"anon 1\ninactive_file {GIB // 8}\nactive_file {GIB // 8}",
    )  # fmt: skip
    assert cpu_quota(proc) == 1.5
    assert usable_cores(proc) == 1
    assert memory_limit(proc) == MemoryLimit(total=2 * GIB, available=GIB + GIB // 4)


def test_what_is_available_is_the_least_of_the_machine_and_the_groups(proc: Path):
    (proc.parent / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2097152 kB\nSwap: 1 kB\n")
    assert available_memory(proc) == 2 * GIB
    group(mount(proc, "cgroup2", "x"), memory__max=str(3 * GIB), memory__current=str(2 * GIB))
    assert available_memory(proc) == GIB


def test_what_a_process_has_given_back_since_its_peak(proc: Path):
    (proc / "status").write_text("Name:\tx\nVmHWM:\t    300 kB\nVmRSS:\t    100 kB\n")
    assert freed_since_peak(proc) == 200 << 10


def test_max_means_that_a_group_has_no_limit(proc: Path):
    group(mount(proc, "cgroup2", "x"), cpu__max="max 100000", memory__max="max")
    assert cpu_quota(proc) is None
    assert memory_limit(proc) is None


def test_each_group_above_binds_as_well(proc: Path):
    (proc / "cgroup").write_text("0::/kubepods/pod1/container\n")
    top = mount(proc, "cgroup2", "x")
    group(
        top / "kubepods" / "pod1", cpu__max="50000 100000", memory__max=str(3 * GIB),
        memory__current=str(3 * GIB),
    )  # fmt: skip
    group(
        top / "kubepods" / "pod1" / "container", cpu__max="400000 100000",
        memory__max=str(2 * GIB), memory__current=str(GIB),
    )  # fmt: skip
    assert cpu_quota(proc) == 0.5
    assert usable_cores(proc) == 1, "half a core still runs one trainer"
    assert memory_limit(proc) == MemoryLimit(total=2 * GIB, available=0)


def test_a_container_of_cgroup_v1_has_its_group_mounted_under_the_name_of_the_host(proc: Path):
    (proc / "cgroup").write_text("4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    mount(proc, "cgroup2", "x")  # which many hosts have beside it, with no controller
    group(
        mount(proc, "cgroup", "memory", root="/docker/abc"),
        memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB // 2),
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 8}",
    )  # fmt: skip
    group(
        mount(proc, "cgroup", "cpu,cpuacct", root="/docker/abc"),
        cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000",
    )  # fmt: skip
    assert cpu_quota(proc) == 2.5
    assert memory_limit(proc) == MemoryLimit(total=GIB, available=GIB // 2 + GIB // 8)


def test_v1_says_by_numbers_that_there_is_no_limit(proc: Path):
    (proc / "cgroup").write_text("4:memory:/\n2:cpu:/\n")
    group(mount(proc, "cgroup", "memory"), memory__limit_in_bytes=NO_LIMIT_V1)
    group(mount(proc, "cgroup", "cpu"), cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(proc) is None
    assert memory_limit(proc) is None


def test_a_group_of_the_host_that_is_not_mounted_here_is_looked_for_at_the_top(proc: Path):
    (proc / "cgroup").write_text("4:memory:/process/of/the/host\n")
    group(
        mount(proc, "cgroup", "memory", root="/docker/abc"),
        memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="0",
    )  # fmt: skip
    assert memory_limit(proc) == MemoryLimit(total=GIB, available=GIB)


def test_scripts_are_told_the_number_of_cores():
    told = subprocess.run(
        [sys.executable, "-m", "pod_runtime.cgroups"], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) == usable_cores()


def test_the_group_whose_quota_binds_says_how_much_was_used_of_it(proc: Path):
    top = mount(proc, "cgroup2", "nsdelegate")
    assert cpu_used_s(proc) is None
    group(top, cpu__max="200000 100000", cpu__stat="usage_usec 2500000\nuser_usec 1")
    assert cpu_used_s(proc) == 2.5


def test_a_group_of_v1_says_it_in_nanoseconds(proc: Path):
    (proc / "cgroup").write_text("4:cpu,cpuacct:/\n")
    top = mount(proc, "cgroup", "cpu,cpuacct")
    group(top, cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000", cpuacct__usage="1500000000")
    assert cpu_used_s(proc) == 1.5


def test_kills_for_lack_of_memory_are_those_of_the_own_group_in_either_version(proc: Path):
    assert oom_kills(proc) is None
    (proc.parent / "vmstat").write_text("pgfault 9\noom_kill 7\n")
    assert oom_kills(proc) == OomKills(count=7, of="this machine")
    v2 = mount(proc, "cgroup2", "")
    (proc / "cgroup").write_text("4:memory:/a\n0::/a/b\n")
    group(v2 / "a", memory__events="low 0\noom 4\noom_kill 3\noom_group_kill 0")
    group(v2 / "a" / "b")  # where the controller is not on
    assert oom_kills(proc) == OomKills(count=3, of="its control group")
    group(v2 / "a" / "b", memory__events="oom 2\noom_kill 1")
    assert oom_kills(proc) == OomKills(count=1, of="its control group")
    (v2 / "a" / "b" / "memory.events").unlink()
    (v2 / "a" / "memory.events").unlink()
    group(mount(proc, "cgroup", "memory") / "a", memory__oom_control="under_oom 0\noom_kill 5")
    assert oom_kills(proc) == OomKills(count=5, of="its control group")


def test_a_kill_explains_one_death_that_comes_soon_after_it(proc: Path):
    events = proc.parent / "vmstat"
    events.write_text("oom_kill 7\n")
    watch = OomWatch(proc)
    assert watch.explain(10.0) == ""
    events.write_text("oom_kill 9\n")
    assert watch.explain(20.0) == "oom_kill of this machine has risen to 9"
    assert watch.explain(20.5) == "oom_kill of this machine has risen to 9"
    assert watch.explain(21.0) == ""


def test_a_kill_that_nobody_here_has_died_of_explains_no_later_death(proc: Path):
    events = proc.parent / "vmstat"
    events.write_text("oom_kill 7\n")
    watch = OomWatch(proc)
    events.write_text("oom_kill 8\n")  # of another pod, or another program
    watch.look(100.0)
    watch.look(130.0)
    assert watch.explain(100.0 + OomWatch.SOON_S + 1) == ""
    events.write_text("oom_kill 9\n")
    assert watch.explain(200.0)


def test_where_nothing_counts_kills_nobody_knows(proc: Path):
    assert OomWatch(proc).explain(1.0) is None
