"""A cluster whose jobs are folders that a test writes. Their trainers are toys."""

import sys
from pathlib import Path
from typing import Any

from job_server.api.wire import JobSpec, JobState, JobStatus
from tests.e2e.cluster import Cluster
from tests.support import ROOT, wait_until

TOY = ROOT / "tests" / "pod_runtime" / "toy_trainer.py"


class Folders(Cluster):
    """A client that runs jobs by name: folders with a train.sh. It has GPUs if `nvml` is given."""

    def __init__(self, folder: Path, *, nvml: dict[str, Any] | None = None) -> None:
        super().__init__(folder, slots=12, script="true", nvml=nvml)
        self.jobs = folder / "jobs"
        self.jobs.mkdir()

    def start_client(self) -> None:
        args = ["--job_server", self.url, "--log_dir", str(self.folder / "client")]
        args += ["--pod_path", str(self.folder / "pods"), "--jobs_dir", str(self.jobs)]
        args += [] if "FAKE_NVML" in self.env else ["--cpu_slots", str(self.slots)]
        args += ["--port_range", f"{self.first_port}-{self.last_port}", "--grace_s", "1"]
        self.client = self._spawn("job_client", args)

    def write(self, name: str, line: str, script: str = "", package: str = "") -> None:
        """Make the folder of a job whose pods run a bash line; `{fail}` is a Python script."""
        folder = self.jobs / name
        folder.mkdir()
        (folder / "fail.py").write_text(script + "\n")
        launch = f"{sys.executable} -m pod_runtime.launch --log_dir {self.out}/{name}"
        (folder / "train.sh").write_text(
            line.format(fail=f"{launch} {folder}/fail.py", toy=f"{launch} {TOY}") + "\n"
        )
        if package:
            (folder / "package.sh").write_text(package + "\n")

    def add(self, name: str, **fields: Any) -> None:
        self.api().submit(JobSpec(**{"job_id": name, "folder": name, "max_pods": 1, **fields}))

    def of(self, name: str) -> JobStatus:
        return self.api().status(name)

    def said(self, name: str) -> list[str]:
        return [event.text for event in self.api().events(name, limit=1000)]

    def wait_said(self, name: str, *words: str) -> str:
        """Wait for an event with all these words; return its text."""

        def found() -> list[str]:
            return [text for text in self.said(name) if all(word in text for word in words)]

        wait_until(found, 180, f"{name}: {words}")
        return found()[0]

    def has_pods(self, name: str, count: int) -> bool:
        return len(self.of(name).pods) == count

    def wait_step(self, name: str, before: int = 0) -> None:
        """Wait until the job trains, and has come further than that step."""

        def trains() -> bool:
            status = self.of(name)
            return status.state is JobState.RUNNING and status.step > before

        wait_until(trains, 180, f"{name} trains")

    def wait_state(self, name: str, *states: JobState) -> JobStatus:
        wait_until(lambda: self.of(name).state in states, 180, f"{name} is {states}")
        return self.of(name)
