"""A cluster of shared jobs: real service, database and client; trainers and time are not.

The nodes are a and b with two slots each, and c with one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from job_server.api.wire import JobState, JobStatus
from tests.job_server.stories import Story, Submission

LONG = 4000  # steps


class SharedCluster(Story):
    """Several shared jobs; nothing goes wrong unless a test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1, folder, shared=True)
        for machine in self.machines.values():
            machine.node = replace(machine.node, stop_after_s=None)
        self.round()

    def add(self, job_id: str, least: int, most: int, *, steps: int = LONG, **more: Any) -> None:
        fields: dict[str, Any] = {"priority": 0, "after": (), "overlap": "auto", **more}
        self.submit_spec(self.shared_spec(job_id, min_pods=least, max_pods=most, **fields))
        self.job(job_id).total_steps = steps

    def job(self, job_id: str) -> Submission:
        return next(each for each in reversed(self.jobs) if each.job.spec.job_id == job_id)

    def status(self, job_id: str) -> JobStatus:
        self.sync()
        return self.job(job_id).status

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.round()

    def sizes(self) -> dict[str, int]:
        """How many pods train, by job."""
        found = {}
        for each in self.jobs:
            stage = each.job.active
            runs = each.job.state is JobState.RUNNING and stage is not None
            found[each.job.spec.job_id] = len(stage.members) if runs and stage else 0
        return found

    def events(self, job_id: str) -> list[str]:
        return [each.text for each in self.service.last_events(job_id, 1000)]
