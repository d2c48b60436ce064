"""A cluster of shared jobs: real service, database and client; trainers and time are not.

The nodes are a and b with two slots each, and c with one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from job_server.api.wire import (
    JobState,
    JobStatus,
    NodeReport,
    PodPhase,
    SavePhase,
    SaveState,
)
from tests.job_server.stories import Machine, Story, Submission
from tests.job_server.world import node

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

    def bring(self, name: str, slots: int) -> None:
        """Let a node come; before any job is added."""
        made = replace(node(name, slots, job_id=None), folders=("train",))
        self.machines[name] = Machine(made, self.now, client=False)

    def leave(self, name: str) -> None:
        """Let a node's client end: it writes what its pods hold, if it is to."""
        for _, pod in self.pods(name):
            if pod.phase is not PodPhase.EXITED:
                pod.end(signal=15)
        self.client_acts(name)
        plan = self.service.engine.registry.get(name).plan.value
        told = {pod.job_id for pod in plan if pod.last_save}
        for job, pod in self.pods(name):
            held, pod.snapshot, pod.holds = pod.snapshot, None, False
            if held is not None and job.job.spec.job_id in told:
                path = "/shared/checkpoint" if job.has_path else f"/{name}/run/checkpoint"
                job.durable = max(job.durable, held.step) if job.has_path else job.durable
                job.in_run_folders.add((name, held.stage, held.step))
                pod.save = SaveState(
                    id=0, phase=SavePhase.WRITTEN, stage=held.stage, step=held.step, path=path,
                    spare=not job.has_path,
                )  # fmt: skip
        said = NodeReport(node_id=name, pods=self.states(name), leaving=True)
        self.service.report_node(name, said)
        self.machines[name].client, self.machines[name].server_id = False, ""
        for job in self.jobs:
            job.nodes[name].pods.clear()
        self.sync()

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
