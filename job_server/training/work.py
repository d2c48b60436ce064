"""Hold a training while one step changes it. Pure."""

from dataclasses import replace

from job_server.api.wire import PodStagePhase
from job_server.jobs.work import StepWork
from job_server.training.job import Job, JobStage


class Work(StepWork[Job]):
    """What the functions of one step hand to each other."""

    def set_stage(self, stage: JobStage) -> None:
        """Put a changed stage back in its place."""
        for place in ("retiring", "active", "preparing"):
            held = getattr(self.job, place)
            if held is not None and held.stage == stage.stage:
                self.set(**{place: stage})

    def move(
        self,
        stage: JobStage,
        pod_id: str,
        phase: PodStagePhase,
        step: int | None = None,
        *,
        snapshot_is_current: bool = False,
        durable: str = "",
    ) -> None:
        """Record a pod's phase in a stage."""
        held = self.job.stage_numbered(stage.stage)
        member = held.member(pod_id) if held is not None else None
        if held is None or member is None:
            return
        step = member.step if step is None else step
        changed = replace(
            member, phase=phase, step=step, snapshot_is_current=snapshot_is_current, durable=durable
        )
        self.set_stage(held.with_member(changed))
