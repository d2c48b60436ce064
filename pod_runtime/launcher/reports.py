"""Derive a launcher's reports to the server from its state. Pure.

Reports are not queued when something happens. Each time, they are derived from the state, and those
that were not made since the last attach are due. So a server that comes back misses nothing.
"""

from dataclasses import replace

from job_server.api.wire import (
    Attach,
    Order,
    PodReport,
    PodStagePhase,
    RankPace,
    ReportKind,
    StagePlan,
    Way,
)
from pod_runtime.activity import Doing, Seen
from pod_runtime.launcher.state import (
    TRAINS,
    LauncherState,
    StageRun,
    awaits_spare,
    find_joining,
    find_run,
    paces_told,
    report_on,
)

PACE_STEPS, PACE_S = 30, 5.0  # a trainer's time is told for at least so many steps and seconds


def due_reports(pod: LauncherState, now: float) -> tuple[LauncherState, list[PodReport]]:
    """Return the reports that are due at `now`, and the pod that remembers them."""
    reports: list[PodReport] = []
    reported = set(pod.reported)
    for plan in pod.plans:
        key = (plan.stage, plan.attempt)
        run = find_run(pod, key)
        if run is None and starts_after_cut(plan) and awaits_spare(pod):
            continue  # not READY: the training need not stand still while it imports
        joining = find_joining(pod, key) if run is None else None
        for report in (
            [*_status_reports(plan, run), *_hang_reports(run)]
            if joining is None
            else _reports_of_join(plan, joining)
        ):
            name = _name(report, run)
            if name not in reported:
                reported.add(name)
                reports.append(report)
    moving = [run for run in pod.runs if makes_progress(run)]
    if moving and now >= pod.progress_at and pod.orders is not None:
        for run in moving:
            paces = tuple(t.pace for t in run.trainers if t.pace is not None)
            reports.append(report_on(run, ReportKind.PROGRESS, paces=paces))
        runs = tuple(paces_told(run) if run in moving else run for run in pod.runs)
        pod = replace(pod, runs=runs, progress_at=now + pod.orders.heartbeat_s)
    if pod.orders is not None:
        if not reports and pod.alive_at is not None and now >= pod.alive_at:
            stage = pod.runs[-1].plan.stage if pod.runs else 0
            reports.append(PodReport(kind=ReportKind.ALIVE, stage=stage))
        if reports or pod.alive_at is None:  # attaching was a sign of life, too
            pod = replace(pod, alive_at=now + pod.orders.heartbeat_s)
    return replace(pod, reported=frozenset(reported)), reports


def _name(report: PodReport, run: StageRun | None) -> tuple[object, ...]:
    """Return what tells a report apart from those made before."""
    more: tuple[int, ...] = ()
    if run is not None and report.kind is ReportKind.DRAINED:
        more = (run.cut_id, report.step)
    elif run is not None and report.kind is ReportKind.STARTED:
        more = (run.plan.order in TRAINS,)
    elif report.kind in (ReportKind.FIRST_STEP, ReportKind.DONE):
        more = (report.step,)  # each loop of a script has its own
    elif run is not None and report.kind is ReportKind.PROGRESS:
        more = (run.cut_id,)
    elif run is not None and report.kind is ReportKind.HUNG:
        news = next(t.hang_news for t in run.trainers if t.rank == report.rank)
        return (report.kind, report.stage, report.attempt, report.rank, news)
    return (report.kind, report.stage, report.attempt, report.rank, report.code, *more)


def _status_reports(plan: StagePlan, run: StageRun | None) -> list[PodReport]:
    """Return all reports about `plan`, whether or not they were made before."""
    if run is None:
        return _reports_without_trainers(plan)
    if plan.order is Order.END:
        return [] if run.alive else [report_on(run, ReportKind.ENDED)]
    reports: list[PodReport] = []
    if plan.order is Order.PREPARE and run.prepared and run.trouble is None:
        reports.append(report_on(run, ReportKind.READY))
    # Also after the GO: a first start is committed before a trainer has called the elastic loop,
    # and those who have may wait long for each other.
    late = plan.order in TRAINS and plan.way is Way.START
    if run.trouble is None and (plan.order is Order.START or (late and run.elastic)):
        reports.append(report_on(run, ReportKind.STARTED))
    if run.trouble is None and run.loaded and (plan.order is Order.START or late):
        reports.append(report_on(run, ReportKind.LOADED))
    if plan.order in TRAINS and run.first_step is not None:
        # Made late, as after a server's absence, it is still about that step.
        reports.append(replace(report_on(run, ReportKind.FIRST_STEP), step=run.first_step))
    if plan.order in TRAINS and run.parked and run.trouble is None:
        reports.append(_drained(run))  # also before the CUT has come: its peers' flag was quicker
    if plan.order is Order.RESUME and run.trouble is None:
        reports.append(report_on(run, ReportKind.PROGRESS))  # "training again", at once
    if run.done_step is not None:
        reports.append(replace(report_on(run, ReportKind.DONE), step=run.done_step))
    if run.trouble is not None:
        reports.append(run.trouble)
    return reports


def _hang_reports(run: StageRun | None) -> list[PodReport]:
    """Return a report for each trainer that hangs, or has hung."""
    return [
        report_on(run, ReportKind.HUNG, rank=t.rank, reason=str(t.hang), hung_s=t.hang.silent_s)
        for t in (() if run is None else run.trainers)
        if run is not None and t.hang is not None and not t.hang.killed
    ]


def starts_after_cut(plan: StagePlan) -> bool:
    """Whether a stage is prepared whose trainers start when those before have stopped."""
    return plan.order is Order.PREPARE and plan.way is Way.DRAIN


def _reports_without_trainers(plan: StagePlan) -> list[PodReport]:
    blank = PodReport(kind=ReportKind.READY, stage=plan.stage, attempt=plan.attempt)
    if plan.order is Order.PREPARE:
        return [] if plan.way in (Way.REPLACE, Way.JOIN) else [blank]
    if plan.order is Order.END:
        return [replace(blank, kind=ReportKind.ENDED)]
    if plan.order in TRAINS:
        reason = f"this launcher has no trainers of stage {plan.stage}: it was restarted"
        return [replace(blank, kind=ReportKind.FAILED, reason=reason)]
    return []


def _reports_of_join(plan: StagePlan, run: StageRun) -> list[PodReport]:
    """Return all reports about a plan that the trainers of `run` are asked to join."""
    joining = run.joining
    if plan.order is not Order.PREPARE:  # they could not join it, or it is over
        return _reports_without_trainers(plan)
    if joining is None or run.trouble is not None:
        return []
    report = PodReport(
        kind=ReportKind.READY,
        stage=plan.stage,
        attempt=plan.attempt,
        elastic=True,
        joins=run.joins,
    )
    if joining.refusal is not None:
        return [replace(report, kind=ReportKind.CANNOT_JOIN, reason=joining.refusal)]
    return [report] if run.formed else []


def _drained(run: StageRun) -> PodReport:
    steps = {t.parked_at for t in run.trainers if t.parked_at is not None}
    if len(steps) > 1:  # impossible, as they agreed; but no state would be whole
        reason = f"trainers of one pod parked after different steps: {sorted(steps)}"
        return report_on(run, ReportKind.FAILED, reason=reason)
    report = report_on(
        run,
        ReportKind.DRAINED,
        snapshot=run.parked_as,
        snapshot_is_current=run.parked_as is not None,
        durable=run.durable,
    )
    return replace(report, step=steps.pop())


def pace_between(rank: int, before: Seen, now: Seen) -> RankPace | None:
    """Return where a trainer's time went between two looks. None: too little to say."""
    steps = now.steps - before.steps
    spent = [later - earlier for earlier, later in zip(before.seconds, now.seconds, strict=True)]
    # What it did when it was looked at is not in these seconds, so they need not be all.
    if steps < PACE_STEPS or sum(spent) < PACE_S or min(spent) < 0:
        return None
    return RankPace(
        rank=rank,
        steps=steps,
        samples=now.samples - before.samples,
        window_s=sum(spent),
        computing_s=spent[Doing.STEPPING],
        reading_s=spent[Doing.READING],
        exchanging_s=spent[Doing.EXCHANGING],
        saving_s=spent[Doing.SAVING],
    )


def makes_progress(run: StageRun) -> bool:
    """Whether steps are made; without the elastic loop, whether they may be."""
    return (
        run.alive
        and not run.ending
        and not run.parked
        and run.trouble is None
        and run.plan.order in TRAINS
        and (run.first_step is not None or not run.elastic)
    )


def attach_status(pod: LauncherState, pid: int, highest_stage: int) -> Attach:
    """Return the whole status of this launcher, except the snapshot that its shim holds."""
    blank = Attach(pod_id=pod.pod_id, node_id=pod.node_id, pid=pid, highest_stage=highest_stage)
    run = pod.in_force
    if run is None:
        return blank
    # A stage that is only prepared is reported by READY and FAILED.
    phase = _phase(run)
    return replace(
        blank,
        stage=run.plan.stage,
        attempt=run.plan.attempt,
        phase=phase,
        step=run.step,
        elastic=run.elastic,
        done=run.done_step is not None,
        failure=run.trouble if phase is PodStagePhase.FAILED else None,
    )


def _phase(run: StageRun) -> PodStagePhase:
    if run.trouble is not None and not (run.ending and not run.alive):
        return PodStagePhase.FAILED
    # Trainers that have succeeded are about to be told of by EXITED: nothing has ended them.
    if not run.alive and (run.ending or not run.succeeded):
        return PodStagePhase.ENDED
    if run.parked:
        return PodStagePhase.PARKED
    if any(trainer.go_sent for trainer in run.trainers) or run.plan.order in TRAINS:
        return PodStagePhase.TRAINING
    return PodStagePhase.LOADED if run.loaded else PodStagePhase.STARTED
