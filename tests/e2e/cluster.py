"""A real server, a real client and real trainers on loopback, to be killed at will."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from job_server.api.api_client import ApiClient
from job_server.api.errors import ServerAway
from job_server.api.wire import JobSpec, JobState, JobStatus
from tests.support import ROOT, free_port, trainer_ports, wait_until

_LOOK_S = 0.2  # between two looks at a job: each costs the server and this process milliseconds


class Cluster:
    """One job server and one job client, in a folder of their own.

    Args:
        slots: CPU slots of the node.
        script: bash line that the pods run; `{python}` and `{out}` are replaced.
        nvml: script of the fake NVML (tests/nvml/pynvml.py), whose GPUs are the slots then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        script: str,
        grace_s: float = 3,
        nvml: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.slots, self.grace_s = slots, grace_s
        self.port = free_port()
        self.first_port, self.last_port = trainer_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: subprocess.Popen[bytes] | None = None  # None: not running
        self.client: subprocess.Popen[bytes] | None = None  # None: not running
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self.env = dict(os.environ)
        if nvml is not None:
            (folder / "nvml.json").write_text(json.dumps(nvml))
            self.env |= {
                "FAKE_NVML": str(folder / "nvml.json"),
                "PYTHONPATH": str(ROOT / "tests" / "nvml"),
            }
        (folder / "train.sh").write_text(
            "#!/usr/bin/env bash\nexec " + script.format(python=sys.executable, out=self.out) + "\n"
        )

    def api(self) -> ApiClient:
        return ApiClient(self.url)

    def start_server(self) -> None:
        args = ["--no_job", "--server_port", str(self.port), "--db", str(self.folder / "server.db")]
        self.server = self._spawn("job_server", [*args, "--heartbeat_s", "1"])

    def start_client(self) -> None:
        args = ["--job_server", self.url, "--log_dir", str(self.folder / "client")]
        args += ["--pod_path", str(self.folder / "pods")]
        args += [] if "FAKE_NVML" in self.env else ["--cpu_slots", str(self.slots)]
        args += ["--port_range", f"{self.first_port}-{self.last_port}"]
        args += ["--grace_s", f"{self.grace_s:g}"]
        self.client = self._spawn("job_client", [*args, str(self.folder / "train.sh")])

    def _spawn(self, module: str, args: list[str]) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{module}.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *args],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def submit(self, spec: JobSpec) -> None:
        wait_until(self._healthy, what="the server answers")
        self.api().submit(spec)

    def _healthy(self) -> bool:
        try:
            self.api().health()
        except ServerAway:
            return False
        return True

    def status(self) -> JobStatus:
        return self.api().jobs()[0]

    def wait_for(
        self, condition: Callable[[JobStatus], object], what: str, timeout_s: float = 120
    ) -> JobStatus:
        """Return the first status that fulfils `condition`; fail when the job ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status = self.status()
            except ServerAway:
                status = None
            if status is not None and condition(status):
                return status
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}: {status}\n{self.logs()}")
            if status is not None and status.state.ended:
                said = f"{status.state}: {status.reason}\n{self.logs()}"
                raise AssertionError(f"ended before {what}: {said}")
            time.sleep(_LOOK_S)

    def wait_running(self, pods: int) -> JobStatus:
        """Wait until the job trains on so many pods; those of a change that failed do not count."""

        def trains(now: JobStatus) -> bool:
            committed = [record.pods for record in now.stages if record.committed_at is not None]
            runs = now.state is JobState.RUNNING and len(now.pods) == pods
            return runs and committed[-1:] == [pods]

        return self.wait_for(trains, f"{pods} pods run")

    def wait_steps(self, more: int, timeout_s: float = 120) -> JobStatus:
        """Wait until the job has trained `more` further steps."""
        begin = self.wait_for(lambda now: True, "the server answers").step
        return self.wait_for(
            lambda now: now.state is JobState.RUNNING and now.step >= begin + more,
            f"{more} steps after step {begin}",
            timeout_s,
        )

    def processes(self) -> list[psutil.Process]:
        """Every living process with our folder on its command line or in its environment."""
        return [process for process, _line in self._find()]

    def find(self, *words: str, without: tuple[str, ...] = ()) -> list[psutil.Process]:
        """The cluster's processes whose command line has all of `words`, by pid."""
        found = [
            process
            for process, line in self._find()
            if all(word in line for word in words) and not any(word in line for word in without)
        ]
        return sorted(found, key=lambda process: process.pid)

    def trainers(self) -> list[psutil.Process]:
        """The processes of scripts, without those that they have forked to read data."""
        programs = ("pod_runtime.", "job_server", "job_client", "bash")
        found = {process.pid: process for process in self.find(".py", without=programs)}
        trainers = []
        for process in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() not in found:
                    trainers.append(process)
        return trainers

    def launchers(self) -> list[psutil.Process]:
        return self.find("pod_runtime.launch", without=("bash ",))

    def shims(self) -> list[psutil.Process]:
        return self.find("--pod_dir")

    def _find(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield processes with their command lines, which are gone when the process is."""
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                line = " ".join(process.cmdline())
                text = line + " ".join(process.environ().values())
            except psutil.Error:
                continue
            if str(self.folder) in text:
                yield process, line

    def kill(self, process: psutil.Process | subprocess.Popen[bytes]) -> None:
        """SIGKILL, and wait until it is gone."""
        process.send_signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(60)

    def kill_everything(self) -> None:
        """SIGKILL every process at once: server, client, shims, launchers, trainers."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent's death ended it
                process.kill()
        for program in (self.server, self.client):
            if program is not None:
                program.wait(60)

    def stop(self) -> None:
        """End client and server in order; whatever is left is killed."""
        for process in (self.client, self.server):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for left in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it was ending
                left.kill()

    def logs(self) -> str:
        """The ends of all logs, for a failed test's report."""
        parts = []
        for path in sorted(self.folder.rglob("*log*")):
            if path.is_file():
                text = path.read_text(errors="replace")[-3000:]
                parts.append(f"----- {path.relative_to(self.folder)}\n{text}")
        return "\n".join(parts)
