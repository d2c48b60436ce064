"""A job server and one job client on this machine, whose jobs are small trainings by name."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import HOST, ROOT, free_port, wait_port
from job_server.api.api_client import ApiClient
from job_server.api.wire import JobSpec, JobStatus

WAITING = Path(__file__).with_name("waiting_trainer.py")
_LOOK_S = 0.1
_END_S = 60.0


class SharedCluster:
    """Ends all of its processes with the `with` block.

    Args:
        slots: CPU slots of the one node.
        server_args: more flags of the server.
    """

    def __init__(self, slots: int, server_args: Sequence[str] = ()) -> None:
        self._slots, self._server_args = slots, server_args
        self._temporary = tempfile.TemporaryDirectory(prefix="edl-shared-")
        self.folder = Path(self._temporary.name)
        self.jobs_dir = self.folder / "jobs"
        self.jobs_dir.mkdir()
        self._programs: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.api = ApiClient(self.url)

    def __enter__(self) -> Self:
        self._start(
            "job_server", "--no_job", "--server_port", str(self.port), "--db",
            str(self.folder / "server.db"), *self._server_args,
        )  # fmt: skip
        if not wait_port(self.port, 120, self._programs[0]):
            raise SystemExit(f"the job server did not start: {self.log('job_server')}")
        self._start(
            "job_client", "--job_server", self.url, "--jobs_dir", str(self.jobs_dir),
            "--log_dir", str(self.folder / "client"), "--pod_path", str(self.folder / "pods"),
            "--cpu_slots", str(self._slots), "--port_range", "auto", "--node_id", "here",
        )  # fmt: skip
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for program in reversed(self._programs):
            program.terminate()
            try:
                program.wait(_END_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self.api.close()
        self._temporary.cleanup()

    def log(self, module: str) -> str:
        return "\n".join((self.folder / f"{module}.log").read_text().splitlines()[-20:])

    def checkpoint(self, job_id: str) -> Path:
        return self.folder / "checkpoints" / job_id

    def add_training(self, job_id: str, script: Path, *args: str) -> None:
        """Make a job's folder: `script` with these arguments and the job's own checkpoint."""
        folder = self.jobs_dir / job_id
        folder.mkdir()
        words = [sys.executable, "-m", "pod_runtime.launch", "--log_dir", "log", str(script)]
        words += [*args, "--checkpoint", str(self.checkpoint(job_id))]
        (folder / "train.sh").write_text(f"exec {shlex.join(words)}\n")

    def add_waiting(self, job_id: str, *, steps: int, sample_s: float) -> None:
        self.add_training(job_id, WAITING, "--steps", str(steps), "--sample_s", str(sample_s))

    def wait_for_slots(self, limit_s: float = 60.0) -> None:
        """Wait until the client has said what else runs on its node."""
        deadline = time.monotonic() + limit_s
        while not any(node.report for node in self.api.nodes()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the job client says nothing: {self.log('job_client')}")
            time.sleep(_LOOK_S)

    def submit(self, spec: JobSpec) -> None:
        """Submit a job; raises Rejected."""
        self.api.submit(spec)

    def wait(
        self, job_id: str, done: Callable[[JobStatus], object], limit_s: float, what: str
    ) -> JobStatus:
        """Return the first status that is as wanted.

        Raises:
            SystemExit: it ended otherwise, or did not come in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            status = self.api.status(job_id)
            if done(status):
                return status
            if status.state.ended or time.monotonic() > deadline:
                raise SystemExit(
                    f"{job_id}: {what} did not come in {limit_s:.0f} s: {status.state}, "
                    f"{status.reason}\n{self.log('job_client')}"
                )
            time.sleep(_LOOK_S)

    def _start(self, module: str, *args: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{module}.log").open("ab") as log:
            self._programs.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *args],
                    cwd=ROOT,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
