"""Stragglers, nodes that are short, and machines that go away: with real processes.

Where no state is handed on, the trainers are toys, which start in no time.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.wire import JobState, JobStatus, Way
from tests.disks import small_disk
from tests.e2e.folders import Folders
from tests.e2e.proof import check_counts
from tests.support import ROOT, wait_until


def slots_of(status: JobStatus) -> list[int]:
    return sorted(slot for pod in status.pods for slot in pod.slots)


@pytest.mark.heavy
def test_a_straggler_is_said_and_its_pod_moves_to_a_free_slot_if_the_job_wants_that(
    folders: Folders,
) -> None:
    for name, slow in (("say", 2), ("evict", 5)):
        folders.write(name, f"{{toy}} --snapshot --durable --slow {slow}")
        folders.add(name, pods=3, max_pods=3, overlap="off", straggler_policy=name)
        folders.wait_step(name)
        assert slots_of(folders.of(name)) == [slow - 2, slow - 1, slow]
        folders.wait_said(name, "straggles: it computes", f", slot {slow} of ")
    folders.wait_said("evict", "straggled", "preparing stage 2")
    wait_until(lambda: folders.of("evict").stages[-1].first_step is not None, 120, "it goes on")
    moved = folders.of("evict")
    assert (moved.failures, moved.preemptions, moved.resizes) == (0, 0, 0)
    assert moved.stages[-1].way is Way.DRAIN
    wait_until(lambda: folders.of("say").account.straggling_s > 0, what="it is counted")
    (warning,) = folders.of("say").warnings
    assert "straggles" in warning
    assert folders.of("say").stage == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64m") as folder:
        yield folder


def test_a_node_whose_disk_is_nearly_full_says_so_and_gets_no_new_pods(
    tmp_path: Path, full_disk: Path
) -> None:
    cluster = Folders(tmp_path / "c")
    (cluster.folder / "pods").symlink_to(full_disk)
    filler = full_disk / "filler"
    try:
        cluster.start_server()
        cluster.start_client()
        wait_until(cluster._healthy, what="the server answers")
        for name in ("first", "second"):
            cluster.write(name, "{toy}")
        cluster.add("first")
        cluster.wait_step("first")
        filler.write_bytes(bytes(63 << 20))
        cluster.wait_said("first", "warning: node ", "its disk (", "no new pods go there")
        (node,) = cluster.api().nodes()
        assert "is nearly used up" in node.shortage
        cluster.add("second")
        cluster.wait_step("first", cluster.of("first").step)
        assert cluster.of("second").pods == ()
        assert "its disk" in cluster.of("second").reason
        filler.unlink()
        cluster.wait_step("second")
        cluster.wait_said("first", "its nodes have enough room again")
    finally:
        cluster.stop()


class Machines(Folders):
    """Several clients on this machine, each with two slots."""

    def start_machine(self, number: int) -> "subprocess.Popen[bytes]":
        first = self.first_port + 40 * number
        args = ["--job_server", self.url, "--node_id", f"m{number}", "--jobs_dir", str(self.jobs)]
        args += ["--log_dir", str(self.folder / f"client{number}"), "--cpu_slots", "2"]
        args += ["--pod_path", str(self.folder / f"pods{number}"), "--grace_s", "120"]
        args += ["--port_range", f"{first}-{first + 39}"]
        args += ["--preemption_notice", f"test -e {self.folder}/notice{number}"]
        return self._spawn("job_client", args)

    def node_of(self, name: str) -> str:
        return ",".join(sorted({pod.node_id for pod in self.of(name).pods}))

    def wait_moved(self, name: str, node: str) -> JobStatus:
        """Wait until all pods are elsewhere, and train; nothing counts as a loss."""

        def is_there() -> bool:
            status = self.of(name)
            newest = status.stages[-1]
            return node not in self.node_of(name) and newest.first_step is not None

        wait_until(is_there, 180, f"{name} has left {node}")
        status = self.of(name)
        assert (status.failures, status.preemptions, status.redone_steps) == (0, 0, 0)
        return status


# The short forms: tests/job_server/server/test_drain.py, and the client's in test_agent.py.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_leave_machines_that_are_drained_or_taken_away_or_whose_client_is_ended(
    tmp_path: Path,
) -> None:
    pytest.importorskip("paddle", reason="trains with Paddle")
    cluster = Machines(tmp_path / "c")
    machines = {}
    try:
        cluster.start_server()
        wait_until(cluster._healthy, what="the server answers")
        machines["m0"] = cluster.start_machine(0)
        wait_until(lambda: len(cluster.api().nodes()) == 1, what="it is there")
        train = f"{ROOT}/tests/e2e/count_train.py --samples 480 --epochs 10000 --step_s 0.05"
        end, out = cluster.folder / "end", cluster.out / "seen.npy"
        paths = f"--checkpoint {cluster.out}/checkpoint --out {out} --end {end}"
        launch = f"{sys.executable} -m pod_runtime.launch --log_dir {cluster.out}/log"
        cluster.write("job", f"{launch} {train} {paths}")
        cluster.add("job", pods=1, max_pods=2)
        cluster.wait_step("job")
        machines["m1"] = cluster.start_machine(1)
        wait_until(lambda: len(cluster.api().nodes()) == 2, what="both are there")

        edl = [sys.executable, "-m", "edl", "drain", "m0", "--server", cluster.url]
        done = subprocess.run(
            [*edl, "--wait", "120"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cluster.wait_moved("job", "m0")
        cluster.api().limit_node("m0", None)

        (cluster.folder / "notice1").touch()
        cluster.wait_moved("job", "m1")

        machines["m2"] = cluster.start_machine(2)
        wait_until(lambda: len(cluster.api().nodes()) == 3, what="the third is there")
        machines["m0"].send_signal(signal.SIGTERM)
        cluster.wait_moved("job", "m0")
        assert machines["m0"].wait(180) == 0
        end.touch()
        cluster.wait_state("job", JobState.SUCCEEDED)
        check_counts(cluster.out)
    finally:
        for machine in machines.values():
            machine.terminate()
        for machine in machines.values():
            machine.wait(300)
        cluster.stop()
