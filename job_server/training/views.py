"""Derive from a job what clients, launchers, original clients and users get. Pure.

Nothing is queued. Every function takes any job, an ended one included.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from job_server.api.wire import (
    Allotment,
    DesiredState,
    HangLimits,
    JobPod,
    JobState,
    JobStatus,
    NodePod,
    Order,
    PlanPod,
    PodPhase,
    PodStagePhase,
    Save,
    StagePlan,
    StageRecord,
    Way,
)
from job_server.jobs.work import Goal
from job_server.training.core.accounting import account_at, is_live, live_hangs, script_runs
from job_server.training.core.allocation import stage_ports, unsaved
from job_server.training.core.changes import queued
from job_server.training.core.job import (
    PHASES_WITH_CUT,
    HaltPhase,
    Job,
    JobStage,
    TrainingPod,
    occupied,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What a launcher gets; the shell adds server id and revision."""

    plans: tuple[StagePlan, ...] = ()
    leave: bool = False
    spares: int = 0
    adapter: str = ""
    hang_limits: HangLimits | None = None
    hang_kills: bool = False


def node_pods(job: Job) -> dict[str, tuple[NodePod, ...]]:
    """Return the pods of this job that the nodes' clients should have, by node."""
    if job.legacy:
        return {}
    home = _last_saver(job)
    found: dict[str, tuple[NodePod, ...]] = {}
    for pod in job.pods:
        if pod.desired is None:
            continue
        node_id = pod.site.node_id
        wanted = NodePod(
            pod_id=pod.pod_id,
            job_id=job.spec.job_id,
            slots=pod.site.slots,
            want=pod.desired,
            folder=job.spec.folder,
            args=job.spec.args,
            max_trainers=job.spec.max_trainers,
            grace_s=job.spec.grace_s,
            save=_save(job, pod),
            last_save=node_id == home,
            submitted_at=job.submitted_at,
            started=pod.phase not in (None, PodPhase.STARTING),
        )
        found[node_id] = (*found.get(node_id, ()), wanted)
    return found


def _save(job: Job, pod: TrainingPod) -> Save | None:
    held = job.halt
    if held is None or held.phase is not HaltPhase.SAVE or held.pod_id != pod.pod_id:
        return None
    return held.save


def _last_saver(job: Job) -> str | None:
    """Return the one node whose client writes the newest state if it is ended. None: none does.

    It is the node of rank 0, whose trainer writes the checkpoints, unless that holds no state yet.
    """
    source = unsaved(job)
    holding = {pod.site.node_id for pod in job.pods if source and pod.pod_id in source.pods}
    stage = job.active
    ranked = [] if stage is None else [member.pod.node_id for member in stage.members]
    return next((node_id for node_id in (*ranked, *sorted(holding)) if node_id in holding), None)


def pod_orders(job: Job) -> dict[str, PodView]:
    """Return the orders for the launchers of all wanted pods, by pod.

    Pods of the same stages share one view.
    """
    if job.legacy:
        return {}
    plans = [(frozenset(stage.pod_ids), _plan(job, stage)) for stage in job.stages]
    leaves = PodView(leave=True)
    views: dict[tuple[int, ...], PodView] = {}  # by the places, in `plans`, of a pod's stages
    found: dict[str, PodView] = {}
    for pod in job.pods:
        if pod.released:
            continue
        if pod.desired is DesiredState.HOLD or pod.launcher_done:
            found[pod.pod_id] = leaves
            continue
        places = tuple(place for place, (ids, _) in enumerate(plans) if pod.pod_id in ids)
        if places not in views:
            own = tuple(plans[place][1] for place in places)
            views[places] = PodView(
                plans=own,
                spares=job.spec.spares,
                adapter=job.adapter,
                hang_limits=job.spec.hang_limits,
                hang_kills=job.spec.hang_policy != "say",
            )
        found[pod.pod_id] = views[places]
    return found


def _plan(job: Job, stage: JobStage) -> StagePlan:
    first = stage.members[0].pod
    return StagePlan(
        job_id=job.spec.job_id,
        stage=stage.stage,
        flag=job.flag if stage.committed else job.next_flag,
        way=stage.way,
        order=_order(job, stage),
        attempt=stage.attempt,
        pods=tuple(member.pod for member in stage.members),
        master=f"{first.addr}:{first.ports[0]}",
        restore_from=stage.restore_from,
        max_trainers=job.spec.max_trainers,
        min_trainers=job.spec.min_trainers,
        durable=_cutting_for_halt(job),
        patient=_cutting_for_join(job),
        cut=stage.cut,
        kill_ranks=stage.kill_ranks,
        policy=job.spec.policy,
        survivable_failures=stage.survivable_failures,
        missing_pods=stage.missing_pods,
        halt=_halt_word(job),
        submitted_at=job.submitted_at,
        take_over=job.spec.take_over,
    )


def _halt_word(job: Job) -> str:
    if not _cutting_for_halt(job):
        return ""
    return "pause" if job.goal.ends_as is None else "stop"


def _cutting_for_halt(job: Job) -> bool:
    cuts = job.halt is not None and job.halt.phase in PHASES_WITH_CUT
    return cuts and job.goal is not Goal.RUN


def _cutting_for_join(job: Job) -> bool:
    preparing = job.preparing
    return preparing is not None and preparing.way is Way.JOIN and preparing.phase is Order.CUT


def _order(job: Job, stage: JobStage) -> Order:
    if stage.end_since is not None:
        return Order.END
    if stage is job.preparing:  # CUT and END are for the stage before it: it waits in PREPARE
        return Order.START if stage.phase is Order.START else Order.PREPARE
    if stage is job.retiring:
        return Order.CUT  # parked, until the stage after it has made a step
    preparing = job.preparing
    if _cutting_for_halt(job) or (preparing is not None and preparing.phase is Order.CUT):
        return Order.CUT
    return Order.RESUME if stage.resuming else Order.GO


def leaves(job: Job, node_id: str) -> bool:
    """Return whether the job is leaving a node by a planned change, which its client waits for."""
    here = [pod for pod in job.pods if pod.site.node_id == node_id and not pod.released]
    if not here or job.goal is Goal.YIELD:  # then its state is being written
        return bool(here)
    stage = job.active
    if job.goal is not Goal.RUN or stage is None or not stage.committed or stage.over is not None:
        return False
    if any(not pod.usable for pod in here):  # it has left; its state is held until there is a newer
        return True
    if job.spec.share:
        allotment = job.share.allotment
        return allotment is not None and bool(allotment.pods) and node_id not in allotment.nodes
    return any(pod.pod_id in job.moving for pod in here)


def running_pods(job: Job) -> tuple[PlanPod, ...]:
    """Return the pods of the last committed stage in rank order, as original clients see them."""
    return () if job.state.ended else job.served


def slots_held(job: Job) -> Mapping[str, frozenset[int]]:
    """Return node -> slots that other jobs may not have."""
    return {} if job.legacy else occupied(job.pods)


def ports_held(job: Job) -> Mapping[str, frozenset[int]]:
    """Return address -> ports that other jobs may not use."""
    return {} if job.state.ended and not job.pods else stage_ports(job)


def job_status(job: Job, now: float, revision: int) -> JobStatus:
    """Return the job as users see it at `now`."""
    progress = job.progress
    script_s = progress.script_s
    if script_runs(job):
        script_s += max(0.0, now - progress.accrued_at)
    stage = job.active if job.active is not None else job.preparing
    return JobStatus(
        job_id=job.spec.job_id,
        state=job.state,
        reason=_reason(job),
        revision=revision,
        spec=job.spec,
        stage=job.next_stage - 1 if stage is None else stage.stage,
        flag=job.flag,
        pods=_job_pods(job),
        target_pods=job.target,
        queued_changes=queued(job),
        step=progress.step,
        epoch=progress.epoch,
        total_steps=progress.total_steps,
        metrics=dict(progress.metrics),
        metric_epochs=dict(progress.metric_epochs),
        loss_curve=progress.loss_curve,
        failures=job.budget.failures,
        preemptions=job.budget.preemptions,
        resizes=job.resizes,
        redone_steps=job.lineage.redone_steps,
        script_elapsed_s=script_s,
        estimated_run_time_s=job.estimated_run_time_s,
        submitted_at=job.submitted_at,
        account=account_at(job, now),
        stages=tuple(_live(job, record) for record in job.records),
        teachers=None,
        promise=progress.promise,
        warnings=tuple(
            text
            for text in (
                plain_warning(job),
                job.announced.quarantine,
                job.announced.shortage,
                _checkpoint_warning(job),
                *hang_texts(job),
            )
            if text
        ),
        saving=progress.saving if _is_saving(job) else None,
        saved=job.ending.saved,
        allotment=_allotment(job),
        error=job.error,
        unreachable=_waits_for_unreachable(job),
    )


def _waits_for_unreachable(job: Job) -> bool:
    """Return whether the job goes on only once it is known what pods do that do not answer."""
    if job.state.ended:
        return False
    lost = any(stage.pods_in(PodStagePhase.LOST) for stage in (job.retiring, job.active) if stage)
    return job.cut_off or (lost and job.state is JobState.WAITING)


def _reason(job: Job) -> str:
    allotment = job.share.allotment
    if job.waiting and allotment is not None and not allotment.pods:
        return _queue_reason(job, allotment)
    if job.halt is not None and job.halt.phase not in (HaltPhase.WAIT, HaltPhase.CUT):
        return job.reason  # which says what is waited for from then on
    return job.waiting or job.reason


def _queue_reason(job: Job, allotment: Allotment) -> str:
    """Return why a shared job has what it has; of one that was stopped, also why it was."""
    decided, now = allotment.reason, job.progress.queue_reason
    if not now or now == decided:
        return decided
    return f"{decided}; {now}" if job.commits and not allotment.pods else now


def _allotment(job: Job) -> Allotment | None:
    allotment = job.share.allotment
    if allotment is None or job.state.ended:
        return None
    return replace(allotment, reason=_queue_reason(job, allotment))


def _is_saving(job: Job) -> bool:
    held, state = job.halt, job.progress.saving
    order = None if held is None else held.save
    return order is not None and state is not None and state.id == order.id


def _live(job: Job, record: StageRecord) -> StageRecord:
    """Fill in what is only written when the stage ends."""
    stage = job.active
    runs = stage is not None and stage.stage == record.stage and record.ended_at is None
    if not runs or record.first_step is None:
        return record
    return replace(record, last_step=job.progress.step)


def _job_pods(job: Job) -> tuple[JobPod, ...]:
    if job.legacy:
        return tuple(_shown(pod, "running") for pod in job.served)
    shown: list[JobPod] = []
    seen: set[str] = set()
    active, preparing, known = job.active, job.preparing, job.pods_by_id()
    stay = known.keys() if preparing is None else set(preparing.pod_ids)
    paces = job.progress.paces
    if active is None or job.progress.paced_stage != active.stage:
        paces = {}
    for stage in (active, preparing):
        for member in stage.members if stage is not None else ():
            pod = known.get(member.pod.pod_id)
            if pod is None or pod.pod_id in seen:
                continue
            seen.add(pod.pod_id)
            phase = "running" if stage is active else "preparing"
            leaves = pod.pod_id not in stay
            if not pod.usable or leaves:
                phase = "holding" if pod.desired is DesiredState.HOLD else "leaving"
            told = [] if stage is not active else [paces.get(rank) for rank in member.pod.ranks]
            uses = [each for each in told if each is not None and each.memory_mb]
            entry = _shown(member.pod, phase, pod.log_path)
            if uses and len(uses) == len(told):
                entry = replace(
                    entry,
                    cpu_percent=tuple(each.cpu_percent for each in uses),
                    memory_mb=tuple(each.memory_mb for each in uses),
                )
            shown.append(entry)
    for pod in job.pods:
        if pod.pod_id not in seen:
            plan_pod = PlanPod(
                pod_id=pod.pod_id,
                pod_rank=len(shown),
                node_id=pod.site.node_id,
                addr=pod.site.addr,
                slots=pod.site.slots,
                ranks=(),
                ports=(),
            )
            phase = "holding" if pod.desired is DesiredState.HOLD else "leaving"
            shown.append(_shown(plan_pod, phase, pod.log_path))
    return tuple(shown)


def _shown(pod: PlanPod, phase: str, log_path: str = "") -> JobPod:
    return JobPod(
        pod_id=pod.pod_id,
        pod_rank=pod.pod_rank,
        node_id=pod.node_id,
        addr=pod.addr,
        slots=pod.slots,
        ranks=pod.ranks,
        phase=phase,
        log_path=log_path,
    )


def plain_warning(job: Job) -> str:
    """Return what the user of a job without the elastic loop should know. "": nothing."""
    if job.elastic or not job.announced.plain:
        return ""
    count = trainers(job)
    alone = (
        f"; each of the {count} trainers trains alone on all the data, unless the script joins "
        f"them itself, say by paddle.distributed.init_parallel_env()"
        if count > 1
        else ""
    )
    return (
        "no trainer has called the elastic loop: a change of the pods starts the script afresh, "
        f"from what it has saved itself{alone}; docs/training-scripts.md shows the loop"
    )


def _checkpoint_warning(job: Job) -> str:
    stage = job.active
    trains = stage is not None and stage.committed and stage.over is None
    return job.progress.checkpoint_error if trains else ""


def hang_texts(job: Job) -> tuple[str, ...]:
    """Return what is said of the trainers of the active stage that hang or straggle."""
    hangs = live_hangs(job)
    slow = [each for each in job.progress.stragglers if is_live(job, each)]
    return tuple(each.text for each in (*hangs, *slow))


def trainers(job: Job) -> int:
    """Return how many trainers the active stage has."""
    return job.active.trainers if job.active else 0
