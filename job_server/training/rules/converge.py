"""Advance a job by rules, each of which compares what is true with what should be. Pure.

`converge` applies them until none changes anything, so their order matters little, and a lost or
late message needs no case of its own. A deadline stands next to its rule.
"""

import math
from collections.abc import Callable, Collection

from msgspec.structs import replace

from job_server.api.text import counted, listed
from job_server.api.wire import (
    DesiredState,
    JobState,
    Order,
    PodPhase,
    PodStagePhase,
    RestoreFrom,
    Way,
)
from job_server.cluster.placement import (
    Cluster,
    explain_shortage,
    serving_nodes,
    slots_to_shun,
)
from job_server.jobs.events import NotConverging
from job_server.jobs.work import Goal
from job_server.training.core.allocation import (
    choose_restore,
    find_movers,
    find_sites,
    find_sites_on,
    is_in_trainers_only,
    is_local,
    make_pods,
    why_in_trainers_only,
)
from job_server.training.core.changes import (
    ask_again,
    choose_way,
    may_change,
    store_script_clock,
    take_next,
)
from job_server.training.core.job import (
    COMPLETED,
    GONE,
    TERMINATED,
    HaltPhase,
    Job,
    JobStage,
    TrainingPod,
)
from job_server.training.core.moves import (
    abandon,
    begin,
    commit,
    count_active,
    delay_growth,
    dismiss_leavers,
    enter,
    enter_start,
    fail_preparing,
    failure,
    finish,
    let_go,
    note_written,
    release_superseded,
)
from job_server.training.core.work import Work, client_silent_at
from job_server.training.reports.launcher_reports import forget_retired
from job_server.training.reports.pod_exits import finish_unsupervised
from job_server.training.rules.evacuation import evacuate, evict_straggler, warn_of_shortage
from job_server.training.rules.fencing import count_fenced, fenced_at, lose_silent
from job_server.training.rules.halting import halt
from job_server.training.rules.share import (
    follow,
    give_way,
    is_refused,
    patience_deadline,
    split,
    stop_for_now,
    stop_overdue,
    waiting_reason,
)
from job_server.training.rules.standby import stand_by
from job_server.training.views import plain_warning, trainers

MAX_ROUNDS = 100  # far more than any job needs: two rules that undo each other are a defect
END_MARGIN_S = 20.0  # beyond the grace, for a launcher that ends its trainers
HUNG_LAUNCHER_S, HUNG_LAUNCHER_HEARTBEATS = 60.0, 20  # whichever is longer
LOAD_PATIENCE = 5.0  # times prepare_timeout_s, where giving up would bring no training back
RECOVERY_PATIENCE_S = 5.0  # how much longer than a recovery a prepared change may take
LOOP_S = 60.0  # a script that builds its data first may call the loop so late


def converge(work: Work) -> None:
    """Apply the rules until nothing changes any more.

    Raises:
        NotConverging: they never come to rest; the text names those that go on.
    """
    fired: list[str] = []  # in the last round
    for number in range(MAX_ROUNDS):
        before = work.job
        for rule in RULES:
            held = work.job
            rule(work)
            if number == MAX_ROUNDS - 1 and work.job != held:
                fired.append(rule.__name__.removeprefix("_"))
            if work.job.state.ended:
                _forget_released(work)
                return
        if work.job == before:
            return
    last = "; ".join(work.notes[-3:])
    raise NotConverging(
        f"the rules of the job do not come to rest after {MAX_ROUNDS} rounds; those that go on: "
        f"{', '.join(fired)}; the last notes: {last or 'nothing'}"
    )


def _succeed(work: Work) -> None:
    stage = work.job.active
    if stage is None or not stage.committed or stage.over is not None:
        return
    busy = any(pod.launcher_done and not pod.leaving for pod in work.job.pods)
    if stage.members and stage.all_in(PodStagePhase.FINISHED) and not busy:
        warn_plain(work, ended=True)
        resize = work.job.queue.resize
        if resize is not None:
            work.note(f"resize to {resize.pods}: not made, as the training was over before")
        finish(work, JobState.SUCCEEDED, "all pods have exited with 0")


def _unpark(work: Work) -> None:
    """Order parked ranks to go on, unless a cut is on, until they are known to train."""
    job = work.job
    stage = job.active
    if stage is None or stage.over is not None or stage.end_since is not None:
        return
    if job.preparing is not None and job.preparing.phase is Order.CUT:
        return
    if job.halt is not None and job.halt.phase is not HaltPhase.WAIT:
        return
    parked = stage.any_in(PodStagePhase.PARKED, PodStagePhase.CUTTING)
    if parked != stage.resuming:
        work.set(active=replace(stage, resuming=parked))


def end_deadline(job: Job, stage: JobStage) -> float | None:
    """Return when pods are killed that have not ended the stage's trainers.

    None: they have not been told to.
    """
    if stage.end_since is None:
        return None
    return stage.end_since + job.spec.grace_s + END_MARGIN_S


def _kill_stuck(work: Work) -> None:
    """Kill pods that do not end their trainers."""
    for stage in work.job.stages:
        deadline = end_deadline(work.job, stage)
        if deadline is None or work.now < deadline:
            continue
        for pod in work.job.usable_pods(stage.pods_not_in(*TERMINATED)):
            work.set_pod(replace(pod, desired=DesiredState.KILL))
            work.note(f"killing pod {pod.pod_id}: it does not end stage {stage.stage}")


def _kill_hung_launchers(work: Work) -> None:
    """Kill pods whose launcher is silent for long although their node answers.

    Its trainers may go on, but nobody would notice that they fail or are done, and no change could
    reach them.
    """
    job, stage = work.job, work.job.active
    if job.spec.hang_policy == "say" or job.goal is not Goal.RUN or job.done:
        return
    if stage is None or stage.over is not None or not stage.committed or stage.finishing:
        return
    for pod in job.usable_pods(stage.pod_ids):
        if pod.desired is not DesiredState.RUN or work.now < hung_at(job, pod, work.cluster):
            continue
        if work.now < client_silent_at(job, pod, work.cluster):
            work.set_pod(replace(pod, desired=DesiredState.KILL))
            limit_s = _hung_launcher_s(work.cluster)
            text = f"its launcher has given no sign of life for {limit_s:.0f} s, and its node has"
            work.note(f"killing pod {pod.pod_id}: {text}")


def hung_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float:
    """Return when the launcher of a pod counts as one that hangs if it is not heard until then."""
    heard = job.progress.heard.get(pod.pod_id)
    if heard is None or pod.launcher_done:
        return math.inf
    return max(heard, job.grace_from) + _hung_launcher_s(cluster)


def _hung_launcher_s(cluster: Cluster) -> float:
    beats_s = HUNG_LAUNCHER_HEARTBEATS * cluster.heartbeat_s
    many_s = float(len(cluster.nodes))  # many launchers are told to report more rarely
    return max(HUNG_LAUNCHER_S, beats_s, many_s) + cluster.late_s


def _advance_preparing(work: Work) -> None:
    job = work.job
    stage = job.preparing
    if stage is None:
        return
    active = job.active
    trains = active is not None and active.over is None
    finishing = job.done or (active is not None and active.finishing)
    if trains and finishing and stage.phase in (Order.PREPARE, Order.CUT):
        abandon(work, "training is complete")
        return
    if work.now >= preparing_deadline(job, stage):
        _give_up_preparing(work, stage)
        return
    match stage.phase:
        case Order.PREPARE:
            _advance_prepare(work, stage, active)
        case Order.CUT if active is not None:
            _advance_cut(work, stage, active)
        case Order.END:
            _advance_end(work, stage, active)
        case Order.START:
            _advance_start(work, stage)
        case _:
            pass


def preparing_deadline(job: Job, stage: JobStage) -> float:
    """Return when the stage in preparation has taken too long.

    Where nothing trains that giving up would bring back, there is more patience: a package
    script may download, and a big model takes its time to load.
    """
    if stage.stands_by:
        return math.inf
    patience_s = job.spec.prepare_timeout_s
    if stage.phase is Order.START or (stage.phase is Order.PREPARE and stage.way is Way.START):
        patience_s *= LOAD_PATIENCE
    return stage.since + patience_s


def _give_up_preparing(work: Work, stage: JobStage) -> None:
    """Give up a phase that took too long; a pod that is late to a start is released."""
    active = work.job.active
    late: tuple[str, ...] = ()
    what = {
        Order.PREPARE: "ready",
        Order.CUT: "parked",
        Order.END: "over with the stage before",
        Order.START: "loaded",
    }[stage.phase]
    if stage.phase is Order.PREPARE:
        late = stage.pods_in(PodStagePhase.ABSENT)
    elif stage.phase is Order.START:
        late = stage.pods_not_in(*_loaded(work.job))
    elif active is not None:
        parked = (PodStagePhase.PARKED,) if stage.phase is Order.CUT else ()
        late = active.pods_not_in(*TERMINATED, *parked)
    waited_s = work.now - stage.since
    text = f"not {what} within {waited_s:.0f} s: {', '.join(late) or 'no pod'}"
    if stage.way is Way.START and stage.phase is Order.PREPARE:
        text += "; a pod is ready once its script has called `python -m pod_runtime.launch SCRIPT`"
        for pod_id in late:
            let_go(work, pod_id)
    if stage.phase is Order.END:
        work.set(preparing=replace(stage, since=work.now))
        return
    fail_preparing(work, failure(work, text))


def _advance_prepare(work: Work, stage: JobStage, active: JobStage | None) -> None:
    job = work.job
    ready = not stage.any_in(PodStagePhase.ABSENT)
    if active is not None and active.over is not None and stage.way is not Way.START:
        _replace_recovery(work, stage, active, ready=ready)
        return
    if not ready or work.now < job.budget.retry_at or stage.standby:
        return
    if stage.way is Way.START:
        nodes = [member.pod.node_id for member in stage.members]
        if job.spec.share and _leaves_its_state(work, nodes):
            return  # the node that has it was silent as the start began, and is back
        enter_start(work)
        return
    if active is None or active.resuming:
        return
    if stage.way is Way.STOP and job.elastic:
        # A trainer has called the elastic loop meanwhile; it needs a step to agree on one.
        if active.first_step_at is None:
            return
        work.set(preparing=replace(stage, way=Way.DRAIN))
        enter(work, Order.CUT)
    else:
        enter(work, Order.END if stage.way is Way.STOP else Order.CUT)


def crash_deadline(stage: JobStage) -> float | None:
    """Return until when a prepared change may replace a recovery."""
    return None if stage.over is None else stage.over.at + RECOVERY_PATIENCE_S


def _replace_recovery(work: Work, stage: JobStage, active: JobStage, *, ready: bool) -> None:
    """Let a prepared change take the place of a recovery if it is as quick."""
    job = work.job
    if not _is_fenced(work, active):
        return
    patience = crash_deadline(active)
    if ready:
        enter(work, Order.END)
        return
    late = patience is not None and work.now >= patience
    comes = set(stage.pods_in(PodStagePhase.ABSENT)) - set(active.pod_ids)
    left = len(job.usable_pods(active.pod_ids))
    if late or (comes and (left >= job.target or _goes_on_with(work, left))):
        abandon(work, "the stage before crashed, and a recovery is quicker")
        ask_again(work, stage)


def _goes_on_with(work: Work, pods: int) -> bool:
    """Whether so many pods, which are left, train at once; those to add come by a change.

    A pod that is to come has its script to start and its framework to import. Where it can be made
    ready beside the training, nothing has to stand still for that.
    """
    if work.job.fresh or pods < max(1, work.job.spec.min_pods):
        return False
    return choose_way(work.job, work.cluster) in (Way.REPLACE, Way.JOIN)


def _advance_cut(work: Work, stage: JobStage, active: JobStage) -> None:
    steps = {member.step for member in active.members}
    if not active.all_in(PodStagePhase.PARKED) or len(steps) != 1:
        return
    if stage.any_in(PodStagePhase.ABSENT):  # the server was away: are its trainers still there?
        return
    only_there = is_in_trainers_only(work.job)
    if only_there and stage.way is not Way.JOIN:  # who joins gets it from them
        why = why_in_trainers_only(active)
        abandon(work, f"{why}: step {max(steps)} would be lost")
        return
    note_written(work, active)
    if stage.overlaps:
        is_current = all(member.snapshot_is_current for member in active.members)
        commit(work, snapshot_is_current=is_current and not only_there)
    else:
        enter(work, Order.END)


def _advance_end(work: Work, stage: JobStage, active: JobStage | None) -> None:
    if active is not None:
        if not _is_fenced(work, active):
            return
        count_active(work)
        if work.job.state.ended or work.job.goal is Goal.FAIL:
            return
    if work.now < work.job.budget.retry_at:
        return
    if stage.overlaps:
        commit(work)
    else:
        enter_start(work)


def _loaded(job: Job) -> tuple[PodStagePhase, ...]:
    """Return the phases that allow the commit: loaded, or started without the elastic loop."""
    loaded = (PodStagePhase.LOADED, PodStagePhase.TRAINING, *COMPLETED)
    return loaded if job.elastic else (PodStagePhase.STARTED, *loaded)


def _advance_start(work: Work, stage: JobStage) -> None:
    if stage.all_in(*_loaded(work.job)):
        commit(work)


def _is_fenced(work: Work, stage: JobStage) -> bool:
    """Return whether no further step of the stage can count, whichever pods still run.

    Every step needs every rank, so one stopped pod of an elastic stage is enough. Ranks that never
    received GO made no step. All pods that can be reached must have ended.
    """
    job = work.job
    stages = [s for s in (job.retiring, stage) if s is not None]
    if not all(s.all_in(*GONE) for s in stages):
        return False
    if not job.elastic:
        return all(s.all_in(*TERMINATED) for s in stages)
    if not stage.committed:
        return True
    return stage.any_in(*TERMINATED)


def _recover(work: Work) -> None:
    """Begin the next start: a first one, one after a pause, or a recovery."""
    job = work.job
    active = job.active
    if job.goal is not Goal.RUN or job.preparing is not None or job.legacy or job.cut_off:
        return
    if active is not None:
        if active.over is None:
            return
        if not _is_fenced(work, active):
            _wait_for_fence(work, active)
            return
        count_active(work)
        if work.job.state.ended or work.job.goal is Goal.FAIL:
            return
    if work.job.retiring is not None:
        work.set(retiring=None)
        dismiss_leavers(work)
    if work.now < work.job.budget.retry_at:
        work.set(waiting="")
        return
    why = _cannot_start_yet(work)
    if why:
        work.set(waiting=why)
        return
    _begin_start(work)


def _wait_for_fence(work: Work, stage: JobStage) -> None:
    lost = stage.pods_in(PodStagePhase.LOST)
    if not lost or not stage.all_in(*GONE):
        work.set(waiting="")
        return
    pods = work.job.known_pods(lost)
    fences = [fenced_at(work.job, pod, work.cluster) for pod in pods]
    way_out = f"or for `edl resize {work.job.spec.job_id} N --assume_dead`"
    if pods and None not in fences:
        way_out = "or has stopped it (--on_server_loss stop_after)"
    work.set(
        waiting=f"{', '.join(lost)} cannot be reached and may still run; waiting until its client "
        f"answers, {way_out}"
    )


def start_deadline(job: Job) -> float:
    """Return until when a first start waits for all expected nodes."""
    return job.start_since + job.spec.start_timeout_s


def _cannot_start_yet(work: Work) -> str:
    job = work.job
    if job.spec.share:
        return waiting_reason(job)
    if not job.fresh or work.now >= start_deadline(job):
        return ""
    have = len(serving_nodes(job.spec, work.cluster, work.now))
    expected = job.spec.expected_nodes
    if have >= expected:
        return ""
    text = f"{have} of {expected} nodes have registered"
    if have:
        return text
    shortage = explain_shortage(
        job.spec, work.cluster, work.now, wanted=job.spec.min_pods, placeable=0
    )
    return f"{text}: {shortage}"


def grace_deadline(job: Job, cluster: Cluster) -> float:
    """Return until when silence may only mean that the server has just come back."""
    return job.grace_from + cluster.silence_s


def _begin_start(work: Work) -> None:
    job = work.job
    allotted = {} if job.share.allotment is None else job.share.allotment.nodes
    stay = [
        pod
        for pod in job.known_pods(job.recovery_pods)
        if pod.usable and not slots_to_shun(work.cluster, pod.site)
    ]
    if job.avoided:
        more = max(0, job.target - len(stay))
        shared = split(tuple(stay), allotted)[1] if job.spec.share else None
        movers = find_movers(work, stay, more if shared is None else shared)
        stay = [pod for pod in stay if pod.pod_id not in movers]
    if job.spec.share:
        stay = list(split(tuple(stay), allotted)[0])
        if _leaves_its_state(work, {*allotted, *(pod.site.node_id for pod in stay)}):
            return
    part = _part_of_one_node(work, stay)
    if part:
        stay = part
        names = listed([pod.pod_id for pod in stay])
        work.note(f"its nodes do not reach each other: {names} of {stay[0].site.node_id} goes on")
        delay_growth(work)
    stay = _fewer_for_memory(work, stay)
    for pod in job.pods:
        if pod.usable and pod not in stay:
            let_go(work, pod.pod_id)
    job = work.job
    stay = stay[: job.target]
    source = choose_restore(work)
    home = _home(job, stay, source)
    nodes = serving_nodes(job.spec, work.cluster, work.now)
    answers = any(view.node.node_id == home for view in nodes)
    # A shared job starts again far more often than one that a user pauses: it waits for its node.
    bound = answers and job.spec.share and source is not None and is_local(source.path)
    needs_home = bool(_only_home(job, source)) or bound
    if needs_home and answers and all(pod.site.node_id != home for pod in stay):
        for pod in stay[job.target - 1 :]:  # they have looked for the state in vain
            let_go(work, pod.pod_id)
        job, stay = work.job, stay[: job.target - 1]
    goes_on = bool(part) or (not home and _goes_on_with(work, len(stay)))
    missing = 0 if goes_on else job.target - len(stay)
    if job.spec.share:
        to_add = split(tuple(stay), allotted)[1] if missing else {}
        sites = find_sites_on(work, to_add, first=home)
    else:
        sites = find_sites(work, missing, first=home)
        if needs_home and home not in {each.node_id for each in (*sites, *(p.site for p in stay))}:
            sites = find_sites(work, missing, first=home, avoiding=False)
    size = len(stay) + len(sites)
    if job.spec.share and size < len(stay) + missing and work.now < patience_deadline(job):
        work.set(waiting=f"{size} of its {job.target} pods have a place; others give way")
        return
    is_small = size < job.target and not part
    if is_small and work.now < grace_deadline(job, work.cluster) and not job.fresh:
        work.set(waiting="")  # nodes may not have registered again since the server came back
        return
    if job.fresh and size < job.target and work.cluster.promised:
        work.set(waiting="teachers are leaving slots for it")  # growing later would be a change
        return
    if size < job.spec.min_pods or size < 1:
        waiting = explain_shortage(
            job.spec, work.cluster, work.now, wanted=job.spec.min_pods, placeable=size
        )
        done = [pod.pod_id for pod in job.pods if pod.launcher_done and not pod.leaving]
        if done:
            waiting += f"; scripts that go on after their trainers were done: {listed(done)}"
        work.set(waiting=waiting)
        return
    starts_on = [pod.site.node_id for pod in stay] + [site.node_id for site in sites]
    if job.spec.share and _leaves_its_state(work, starts_on):
        return
    if source is not None and needs_home and home not in starts_on:
        why = "has no free slots" if answers else "does not answer"
        text = f"step {source.step} is on node {home}, in {source.path}, and that node {why}"
        if not answers:
            resize = f"edl resize {job.spec.job_id} {job.target} --assume_dead"
            text += f"; `{resize}` goes on without that state"
        work.set(waiting=text)
        return
    new = make_pods(work, sites, len(stay))
    active = job.active
    reason = "first start" if job.commits == 0 else "start after a pause"
    if job.commits and (not job.fresh or (active is not None and active.over is not None)):
        cause = active.over if active is not None else None
        reason = "recovery" if cause is None else f"recovery: {cause.text}"
    begin(work, (*stay, *new), way=Way.START, reason=reason, target=job.target)


def _part_of_one_node(work: Work, stay: list[TrainingPod]) -> list[TrainingPod]:
    """Return the pods of the node to go on with where those of several never form a group.

    So it is where all trainers lost a peer again and again and nobody knows a culprit: the server
    reaches the nodes, and they do not reach each other. The others come back by growing. Empty: all
    are tried, or one node's are too few.
    """
    job, active = work.job, work.job.active
    cause = None if active is None else active.over
    lost_again = cause is not None and cause.peer_lost and job.budget.failures_in_row > 1
    if job.fresh or job.spec.share or not lost_again:
        return []
    by_node: dict[str, list[TrainingPod]] = {}
    for pod in stay:
        by_node.setdefault(pod.site.node_id, []).append(pod)
    source = choose_restore(work)
    holding = {pod.site.node_id for pod in stay if source and pod.pod_id in source.pods}
    holding.add(_only_home(job, source))
    most = max(by_node.values(), key=lambda pods: (pods[0].site.node_id in holding, len(pods)))
    return most if len(by_node) > 1 and len(most) >= max(1, job.spec.min_pods) else []


def _fewer_for_memory(work: Work, stay: list[TrainingPod]) -> list[TrainingPod]:
    """Leave out a pod of the node where the kernel kills trainers for lack of memory at each start.

    The job is to have no more pods then, until a user or its change script says otherwise. How many
    a shared job has is the server's to say.
    """
    job, active = work.job, work.job.active
    cause = None if active is None else active.over
    node_id = "" if cause is None else cause.no_memory_on
    most = len(stay) - 1
    if not node_id or job.budget.failures_in_row < 2 or job.fresh or job.spec.share:
        return stay
    source = choose_restore(work)
    there = [pod for pod in stay if pod.site.node_id == node_id]
    needed = int(node_id == _only_home(job, source))  # the state can be read there alone
    if len(there) <= needed or most < max(1, job.spec.min_pods):
        return stay
    gone = max(there, key=lambda pod: source is None or pod.pod_id not in source.pods)
    # Another number is another try: where several are too many, each costs one start.
    work.set(target=most, budget=replace(job.budget, failures_in_row=1))
    work.note(
        f"warning: there is no memory on node {node_id} for {counted(len(there), 'pod')} of this "
        f"job: it is to have {most} from now on. With more memory, `edl resize {job.spec.job_id} "
        f"{job.target}` asks for {job.target} again"
    )
    return [pod for pod in stay if pod is not gone]


def _leaves_its_state(work: Work, nodes: Collection[str]) -> bool:
    """Have the newest state written first where none of these nodes holds it in memory."""
    source = choose_restore(work)
    if source is None or source.path or is_refused(work.job, work.now):
        return False
    holders = {pod.site.node_id for pod in work.job.pods if pod.pod_id in source.pods}
    if not holders.isdisjoint(nodes):
        return False
    stop_for_now(work, "its newest state is in the memory of nodes that it is to leave")
    return True


def _home(job: Job, stay: list[TrainingPod], source: RestoreFrom | None) -> str:
    """Return the node that a start needs because it holds the state. "": any node will do."""
    if source is None:
        return ""
    if source.path:
        return "" if job.ending.saved is None else job.ending.saved.node_id
    holders = [pod.site.node_id for pod in job.pods if pod.pod_id in source.pods]
    if any(pod.site.node_id in holders for pod in stay):
        return ""
    return next(iter(holders), "")


def _only_home(job: Job, source: RestoreFrom | None) -> str:
    """Return the node that alone can read the state. "": others can, too, or have not looked."""
    saved = job.ending.saved
    if source is None or not source.path or saved is None or not (saved.spare or saved.alone):
        return ""
    return saved.node_id


def _forget_released(work: Work) -> None:
    """Forget released pods that their clients have confirmed gone."""
    for pod in work.job.pods:
        if pod.released and pod.phase is PodPhase.EXITED:
            work.drop_pod(pod.pod_id)


def _change(work: Work) -> None:
    if work.job.spec.share:
        follow(work)
        return
    while take_next(work) and not work.job.state.ended:
        pass


def _stand_by(work: Work) -> None:
    stand_by(work, may_begin=may_change(work.job, work.now))


def warn_plain(work: Work, *, ended: bool = False) -> None:
    """Warn once that no trainer has called the elastic loop, where that matters.

    It matters where a change is about to stop the trainers, where they have run for a while, and
    where several have trained to their end (`ended`).
    """
    job = work.job
    stage = job.active
    if (
        job.announced.plain
        or job.elastic
        or job.legacy
        or stage is None
        or stage.committed_at is None
    ):
        return
    stops = job.preparing is not None and job.preparing.way is Way.STOP
    if stops or work.now >= stage.committed_at + LOOP_S or (ended and trainers(job) > 1):
        work.set(announced=replace(job.announced, plain=True))
        work.note(f"warning: {plain_warning(work.job)}", lasting=False)


RULES: tuple[Callable[[Work], None], ...] = (
    finish_unsupervised,
    lose_silent,
    count_fenced,
    _succeed,
    stop_overdue,
    give_way,
    halt,
    evacuate,
    _advance_preparing,
    _unpark,
    _kill_stuck,
    _kill_hung_launchers,
    _recover,
    forget_retired,
    release_superseded,
    _forget_released,
    _change,
    evict_straggler,
    _stand_by,
    warn_plain,
    warn_of_shortage,
    store_script_clock,
)
