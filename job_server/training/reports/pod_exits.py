"""Apply what clients report of pods, and decide what a pod's exit means. Pure.

A report may be late or come twice: it counts only where it says something new.
"""

from msgspec.structs import replace

from job_server.api.failure_policy import FailedProcess, FailureRule, Then
from job_server.api.text import describe_exit
from job_server.api.wire import (
    EXIT_REPORT_S,
    DesiredState,
    Order,
    PodPhase,
    PodReport,
    PodStagePhase,
    PodState,
    Saved,
    SavePhase,
    SaveState,
)
from job_server.cluster.placement import find_node
from job_server.jobs.pod_reports import (
    PATH_CHARS,
    REASON_CHARS,
    SIGKILL,
    compare,
    exit_code,
    is_missing,
    last_words,
    missing_text,
    without,
)
from job_server.training.core.accounting import note_error
from job_server.training.core.allocation import avoid
from job_server.training.core.faults import Failure, fault_of, judge, policy_of
from job_server.training.core.job import Cause, CauseKind, JobStage, TrainingPod, age
from job_server.training.core.moves import let_go, lose, record_snapshot
from job_server.training.core.work import Work, client_silent_at


def node_reported(work: Work, node_id: str, states: tuple[PodState, ...]) -> None:
    """Apply what a client reports of this job's pods."""
    compare(work, node_id, states, named=_named, not_named=_not_named)


def _named(work: Work, pod: TrainingPod, state: PodState) -> None:
    if pod.phase is PodPhase.EXITED:
        _apply_save(work, pod, state.save)
        if not state.holds and pod.desired is DesiredState.HOLD:
            work.drop_pod(pod.pod_id)
        return  # final; a late report changes nothing
    _apply_save(work, pod, state.save)
    stage = _completing(work, pod) if state.complete and not pod.launcher_done else None
    if stage is not None:  # its launcher left while the server was away
        pod = _left(work, pod, stage)
    changed = replace(pod, phase=state.phase, log_path=state.log_path[:PATH_CHARS] or pod.log_path)
    if changed != pod:
        work.set_pod(changed)
    if state.phase is not PodPhase.EXITED:
        return
    # With neither code nor signal the shim itself is gone, and the snapshot with it.
    holds = state.holds and (state.exit_code is not None or state.signal is not None)
    if not holds:
        work.progress(snapshots=without(work.job.progress.snapshots, pod.pod_id))
    elif not pod.released:
        record_snapshot(work, pod.pod_id, state.snapshot)
    if not pod.leaving:
        exited(
            work,
            changed,
            code=exit_code(state),
            reason=state.reason,
            lines=state.last_lines,
            holds=holds,
        )
        return
    _confirm_stopped(work, pod.pod_id)
    if pod.released or not holds:
        work.drop_pod(pod.pod_id)


def _apply_save(work: Work, pod: TrainingPod, state: SaveState | None) -> None:
    """Record how far the writing of a state is."""
    held = work.job.halt
    if state is None:
        return
    state = replace(state, path=state.path[:PATH_CHARS], reason=state.reason[:REASON_CHARS])
    ordered = held is not None and held.save is not None and state.id == held.save.id
    if ordered and held is not None and held.pod_id == pod.pod_id:
        if state != work.job.progress.saving:
            work.progress(saving=state, saving_at=work.now)
            _apply_written(work, pod, state)
    elif state.id == 0:
        _apply_written(work, pod, state)


def _apply_written(work: Work, pod: TrainingPod, state: SaveState) -> None:
    """Record at once where a state was written: its writer may be gone with the next report.

    Order 0 is a state that a client has written by itself because it was ended.
    """
    known = work.job.ending.saved
    if state.phase is not SavePhase.WRITTEN:
        return
    saved = Saved(
        stage=state.stage,
        step=state.step,
        serial=state.serial,
        path=state.path,
        node_id=pod.site.node_id,
        spare=state.spare,
    )
    # It is ordered once more where the job has left the node that wrote it before.
    is_moved = known is not None and age(known) == age(saved) and state.id and known != saved
    if known is not None and age(known) >= age(saved) and not is_moved:
        return
    work.set(ending=replace(work.job.ending, saved=saved))
    if state.id:
        where = f"the run folder of node {saved.node_id}: " if saved.spare else ""
        work.note(f"the state of step {saved.step} is written to {where}{saved.path}")
    else:
        text = f"node {saved.node_id} has written step {saved.step} to {saved.path}"
        work.note(text, lasting=False)


def _not_named(work: Work, pod: TrainingPod) -> None:
    if pod.released:
        _confirm_stopped(work, pod.pod_id)
        work.drop_pod(pod.pod_id)
        return
    if is_missing(work, pod):
        lose(work, pod.pod_id, _cause(work, pod, missing_text(pod)), confirmed=True)
        _confirm_stopped(work, pod.pod_id)
        work.drop_pod(pod.pod_id)


def _confirm_stopped(work: Work, pod_id: str) -> None:
    for stage in work.job.stages:
        member = stage.member(pod_id)
        if member is not None and member.phase not in (PodStagePhase.ENDED, PodStagePhase.FINISHED):
            work.move(stage, pod_id, PodStagePhase.ENDED)


def exited(
    work: Work,
    pod: TrainingPod,
    *,
    code: int | None,
    reason: str,
    lines: tuple[str, ...] = (),
    holds: bool = True,
) -> None:
    """Decide whether a pod that exited has finished or is lost.

    Args:
        code: exit code, negative for a signal; None: not known.
        holds: its shim is still there.
    """
    if code == 0 and _finished(work, pod):
        return
    how = "is gone" if code is None else describe_exit(code)
    text = f"pod {pod.pod_id} {how}"
    if pod.planned:
        text += ", as requested"
    elif pod.launcher_done:
        text += " after its trainers were done"
    elif code == 0:
        active = work.job.active
        ending_it = active is not None and active.end_ordered and active.member(pod.pod_id)
        if ending_it:
            text += " while its stage was ended"
        elif _completing(work, pod) is not None:
            text += (
                ", but its training is not known to be complete: its launcher has not said how it "
                "ended. Most likely it was killed and the script went on; begin that with `set -e`"
            )
        else:
            text += (
                " before its trainers had started; its script has to call the launcher: "
                "`python -m pod_runtime.launch SCRIPT`"
            )
    if reason and not (pod.planned and code == -SIGKILL):
        text += f": {reason}"
    if lines:
        text += f"; last lines: {last_words(lines)}"
    cause = _cause(work, pod, text[:REASON_CHARS])
    if not pod.planned:
        cause = _judged(work, pod, cause, code=code, words=last_words(lines) or reason, lines=lines)
    holds = holds and pod.pod_id in work.job.progress.snapshots
    lose(work, pod.pod_id, cause, confirmed=True, holds=holds)


def _judged(
    work: Work,
    pod: TrainingPod,
    cause: Cause,
    *,
    code: int | None,
    words: str,
    lines: tuple[str, ...],
) -> Cause:
    """Return the cause as the failure policy has it."""
    site = pod.site
    failure = Failure(
        of=FailedProcess.POD,
        code=code,
        words=words,
        lines=lines,
        events=slot_events(work, site.node_id, site.slots),
    )
    rule = judge(policy_of(work.job.spec), failure)
    leave_slots(work, site.node_id, site.slots, rule, cause.text)
    stage = next((each for each in work.job.stages if each.member(pod.pod_id)), None)
    if stage is not None and kind_of(rule) is CauseKind.FAILURE:
        shown = failure.last_lines
        began = next((i for i, line in enumerate(shown) if line.startswith("Traceback (")), None)
        traceback = "" if began is None else "\n".join(shown[began:])
        note_error(work, stage.stage, cause.text, traceback=traceback)
    fault = fault_of(f"pod {pod.pod_id}", failure, rule)
    if fault is not None and pod.launcher_done and not fault.at_once:
        fault = None  # its trainers were done: what follows in the script may be tried again
    return replace(cause, kind=kind_of(rule), faults=() if fault is None else (fault,))


def kind_of(rule: FailureRule) -> CauseKind:
    """Return which budget a failure counts in that is treated by `rule`."""
    kinds = {Then.PREEMPTED: CauseKind.PREEMPTION, Then.IGNORE: CauseKind.IGNORED}
    return kinds.get(rule.then, CauseKind.FAILURE)


def slot_events(work: Work, node_id: str, slots: tuple[int, ...]) -> tuple[str, ...]:
    """Return the NVML events of slots that are known now."""
    view = find_node(work.cluster, node_id)
    if view is None:
        return ()
    return tuple(name for slot in slots for name in view.faults.get(slot, ()))


def leave_slots(
    work: Work, node_id: str, slots: tuple[int, ...], rule: FailureRule, why: str
) -> None:
    """Have the next start on other slots, where the rule says so and there are free ones."""
    if rule.then not in (Then.RESTART_ELSEWHERE, Then.QUARANTINE):
        return
    if avoid(work, node_id, slots, why) and rule.then is Then.QUARANTINE:
        for slot in slots:
            work.quarantine(node_id, slot, rule.name or "failure_policy", why)


def _finished(work: Work, pod: TrainingPod) -> bool:
    """Enter that a pod has exited 0. Return False if it had nothing to complete.

    Only the trainers or the launcher of an elastic training can say that it is complete: the
    script's last line may exit 0 although the launcher was killed. That a training is elastic may
    not be known yet, so every launcher that would have been heard must have said that it is done.
    """
    stage = _completing(work, pod)
    if stage is None and not pod.launcher_done:
        return False
    heard = work.job.progress.heard.get(pod.pod_id)
    was_killed = heard is not None and work.now < heard + EXIT_REPORT_S
    if (work.job.elastic or was_killed) and not (pod.launcher_done or work.job.done):
        return False
    if stage is not None:
        work.move(stage, pod.pod_id, PodStagePhase.FINISHED)
    _confirm_stopped(work, pod.pod_id)  # a stage that is retiring has it as a member, too
    let_go(work, pod.pod_id)
    work.note(f"pod {pod.pod_id} has finished")
    return True


def _completing(work: Work, pod: TrainingPod) -> JobStage | None:
    """Return the stage that a pod completes by exiting 0. None: there is none."""
    active, preparing = work.job.active, work.job.preparing
    if preparing is not None and preparing.phase is Order.START and preparing.member(pod.pod_id):
        return preparing
    if active is not None and active.committed and not active.end_ordered:
        return active if active.member(pod.pod_id) else None
    return None


def launcher_exited(work: Work, pod: TrainingPod, report: PodReport) -> None:
    """Enter that a launcher has exited.

    After code 0 the trainers are done, but the pod's script may go on.
    """
    if pod.launcher_done:
        return  # reported twice, or a later launcher of the same script
    stage = _completing(work, pod)
    if report.code != 0 or stage is None:
        exited(work, pod, code=report.code, reason=report.reason)
        return
    _left(work, pod, stage)


def _left(work: Work, pod: TrainingPod, stage: JobStage) -> TrainingPod:
    """Enter that a pod's launcher has left, as its trainers were done; return the pod."""
    work.move(stage, pod.pod_id, PodStagePhase.LEFT)
    done = replace(pod, launcher_done=True)
    work.set_pod(done)
    work.note(f"the trainers of pod {pod.pod_id} are done; waiting for its script to end")
    return done


def finish_unsupervised(work: Work) -> None:
    """Count a pod as finished after its launcher's 0 if no client looks after the pod."""
    for pod in work.job.pods:
        if not (pod.launcher_done and not pod.leaving):
            continue
        if work.now >= client_silent_at(work.job, pod, work.cluster):
            exited(work, pod, code=0, reason="")


def _cause(work: Work, pod: TrainingPod, text: str, *, preempted: bool = False) -> Cause:
    if pod.planned:
        return Cause(kind=CauseKind.PLANNED, text=text, at=work.now)
    kind = CauseKind.PREEMPTION if preempted else CauseKind.FAILURE
    return Cause(kind=kind, text=text, at=work.now)


def preempted(work: Work, pod: TrainingPod, text: str) -> Cause:
    """Return the loss of a pod as a preemption."""
    return _cause(work, pod, text, preempted=True)
