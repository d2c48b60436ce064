"""What must hold after chaos: nothing lost, nothing left, everything explained."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.faults import Faults, Submission
from benchmarks.harness import ROOT
from job_server.api.wire import JobEvent, JobState, JobStatus, Saved
from pod_runtime.verify import main as verify
from tests.support import wait_until

_CLOSE = 1e-8
_PAUSE_S = 10.0  # without a step, which has to be explained
_SLACK_S = 2.0


def check_status(status: JobStatus, submission: Submission, wall_s: float) -> Iterator[str]:
    """Yield what is wrong with what the server says of a job that has ended.

    Args:
        wall_s: for how long it was there.
    """
    job_id = status.job_id
    if not status.reason:
        yield f"{job_id} is {status.state.value} without a reason"
    for record in status.stages:
        if not record.reason or record.outcome == "abandoned: ":
            yield f"{job_id}: stage {record.stage} has no reason: {record}"
    counted_s = status.account.total_s - submission.ahead_s
    slack_s = 0.01 * wall_s + 1.0
    if not wall_s - slack_s - submission.unseen_s <= counted_s <= wall_s + slack_s:
        yield (
            f"{job_id}: the account adds up to {counted_s:.1f} s of {wall_s:.1f} s"
            f" (may lack {submission.unseen_s:.1f}): {status.account}"
        )


def check_events(job_id: str, events: Sequence[JobEvent]) -> Iterator[str]:
    for event in events:
        if not event.text.strip() or "defect" in event.text:
            yield f"{job_id}: event {event.number} says {event.text!r}"


def check_goes_on(status: JobStatus, saved: Saved) -> Iterator[str]:
    """Yield what is wrong if a job did not go on from what its submission before had written."""
    began = next((each.first_step for each in status.stages if each.first_step is not None), None)
    if not saved.spare and began is not None and began <= saved.step:
        yield f"{status.job_id} went on with step {began}, but step {saved.step} was written"


def check_pauses(
    job_id: str, stamps: Path, events: Sequence[JobEvent], faults: Faults, acted: Sequence[float]
) -> Iterator[str]:
    """Yield the long pauses that neither an event nor one of our actions explains.

    Args:
        acted: when we did or undid something (monotonic).
    """
    for begin, end in pairwise(sorted(_times(stamps))):
        if end < begin + _PAUSE_S:
            continue
        low, high = sorted((faults.server_time(begin), faults.server_time(end)))
        told = any(low - _SLACK_S <= event.at <= high + _SLACK_S for event in events)
        if not told and not any(begin - _SLACK_S <= at <= end for at in acted):
            yield f"{job_id}: no step for {end - begin:.1f} s, and nothing says why"


def check_result(cluster: ChaosCluster, job_id: str, framework: str) -> Iterator[str]:
    """Yield what the parameters and the ledger say against a job that has succeeded."""
    for path in (cluster.home(job_id) / "log" / "run", cluster.checkpoint(job_id)):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = verify([str(path)])
        if code != 0:
            yield f"{job_id}: {path.name} proves nothing: {said.getvalue().strip()[-500:]}"
    result = np.load(cluster.result(job_id))
    epochs = int(result["epochs"])
    wrong = np.abs(result["seen"] - epochs)
    if wrong.max() > 1e-6:
        many = int((wrong > 1e-6).sum())
        yield f"{job_id}: {many} samples did not count {epochs} times: {result['seen']}"
    calm = cluster.folder / f"{job_id}.calm.npz"
    command = [sys.executable, str(Path(__file__).with_name("train.py"))]
    command += ["--framework", framework, "--epochs", str(epochs), "--out", str(calm)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        yield f"{job_id}: the undisturbed training failed: {done.stderr[-500:]}"
        return
    expected = np.load(calm)
    for name in expected.files:
        difference = np.abs(result[name] - expected[name]).max()
        if not difference <= _CLOSE:
            yield f"{job_id}: {name} differs by {difference:.1e} from an undisturbed training's"


def check_left(cluster: ChaosCluster, pids: set[int], memory_before: set[str]) -> Iterator[str]:
    """Yield what is left over, once all has been stopped in order.

    Args:
        pids: of all processes that were seen.
        memory_before: names in /dev/shm, before.
    """
    for name in set(os.listdir("/dev/shm")) - memory_before:
        if any(int(number) in pids for number in re.findall(r"\d+", name)):
            yield f"/dev/shm/{name} is left"
    for path in cluster.folder.rglob("*"):
        of_programs = cluster.tmp in path.parents  # nothing is to be there
        named_so = path.name in ("sock", "filler") or path.name.startswith(".")
        if of_programs or named_so or path.suffix in (".part", ".tmp"):
            yield f"{path.relative_to(cluster.folder)} is left"
    if cluster.network is not None:
        return  # the ports were those of processes in namespaces, and there is none
    for port in range(cluster.first_port, cluster.last_port + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield f"port {port} is left: {error}"


def check_processes(cluster: ChaosCluster) -> Iterator[str]:
    """Yield pods' processes that are there a minute after their jobs have ended."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not cluster.find(".py") and not cluster.shims(), 60)
    for process in (*cluster.find(".py"), *cluster.shims()):
        yield f"process {process.pid} of a pod is left"


def goodput(status: JobStatus, stamps: Path, wall_s: float) -> float:
    """Return the share of the time that steps which count would take undisturbed."""
    steps_s = sorted(end - begin for begin, end in pairwise(_times(stamps)) if end > begin)
    median_s = steps_s[len(steps_s) // 2] if steps_s else 0.0
    assert status.state is JobState.SUCCEEDED
    return min(1.0, status.step * median_s / wall_s)


def _times(stamps: Path) -> list[float]:
    """Return when steps ended (monotonic); the last line may be cut."""
    return [float(line.split()[0]) for line in stamps.read_text().splitlines() if " " in line]
