"""What is done for one job, from what is there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from job_server.api.wire import JobState, Saved, Sharing, StageRecord, Way
from k8s_controller.decisions import status as states
from k8s_controller.decisions.objects import trainer_pod
from k8s_controller.decisions.observed import (
    ListedPod,
    Observed,
    ServerView,
    TrainingNode,
    pod_view,
    server_view,
    time_text,
)
from k8s_controller.decisions.reconcile import (
    CloseNodes,
    GiveUpDead,
    MakeServer,
    MakeTrainer,
    Notice,
    OpenNodes,
    Outcome,
    PauseJob,
    Prepare,
    RemovePod,
    RemoveTrainingJob,
    ResumeJob,
    SetBudget,
    SetPods,
    StopJob,
    SubmitJob,
    reconcile,
    refuse,
    refused,
)
from k8s_controller.decisions.spec import TrainingJobSpec, parse
from k8s_controller.decisions.status import Autoscale, Phase, TrainingJobStatus
from tests.k8s_controller.jobs import (
    job_status,
    nodes_of,
    parsed,
    pod,
    scaled_job,
    server_pod,
    training_job,
)

NOW = 1000.0
STORAGE = {"storage": {"size": "1Gi"}}


def look(
    spec: TrainingJobSpec, seen: Observed, status: TrainingJobStatus | None = None, now: float = NOW
) -> Outcome:
    known = status or TrainingJobStatus(desired=spec.replicas, scaled_at=NOW, started_at=NOW)
    return reconcile("digits", 1, spec, known, seen, now)


def running(
    spec: TrainingJobSpec,
    pods: Sequence[ListedPod],
    *,
    used: Sequence[ListedPod] | None = None,
    most: int | None = None,
    state: JobState = JobState.RUNNING,
    **job: Any,
) -> Observed:
    """Return what is seen of a job that trains on the pods."""
    used = pods if used is None else used
    status = job_status(spec.job_spec("digits"), state, [each.node_id for each in used], **job)
    view = ServerView(job=status, nodes=nodes_of(pods), most=most or spec.replicas)
    return Observed(
        trainers=tuple(pods), server_pod=server_pod(), server=view, prepared=True, budget=0
    )


def with_limits(seen: Observed, **limits: int) -> Observed:
    """Return what is seen once the controller has closed some pods."""
    server = seen.server
    assert server is not None
    nodes = dict(server.nodes)
    for name, limit in limits.items():
        node = next(each.node_id for each in seen.trainers if each.index == int(name[1:]))
        nodes[node] = TrainingNode(alive=True, limit=limit)
    closed = frozenset(each for each, node in nodes.items() if node.limit == 0)
    return replace(seen, server=replace(server, nodes=nodes), closed=closed)


def test_a_new_job_gets_all_that_it_needs_at_once():
    outcome = look(parsed(replicas=2), Observed(), TrainingJobStatus())
    assert outcome.steps == (Prepare(), MakeServer(), MakeTrainer(0), MakeTrainer(1))
    assert outcome.status.started_at == NOW
    assert outcome.status.observed_generation == 1
    assert outcome.status.selector == (
        "paddlepaddle.org/job-name=digits,paddlepaddle.org/role=trainer"
    )


def test_the_training_begins_when_all_its_pods_have_registered():
    spec = parsed(minReplicas=1, maxReplicas=3)
    pods = [pod(index) for index in range(3)]
    view = ServerView(job=None, nodes=nodes_of(pods[:2]))
    seen = Observed(
        trainers=tuple(pods), server_pod=server_pod(), server=view, prepared=True, budget=0
    )
    assert look(spec, seen).steps == ()
    assert look(spec, seen, now=NOW + 31).steps == (SubmitJob(),)  # one is late
    seen = replace(seen, server=replace(view, nodes=nodes_of(pods)))
    assert look(spec, seen).steps == (SubmitJob(),)


@pytest.mark.parametrize("ahead", [-600.0, 0.0, 600.0])
def test_the_seconds_of_a_step_are_those_of_the_servers_clock(ahead: float):
    spec = parsed(replicas=2)
    pods = [pod(0), pod(1)]
    seen = running(spec, pods, step=101)
    assert seen.server is not None
    assert seen.server.job is not None
    stage = StageRecord(
        stage=1, flag=0, way=Way.START, pods=2, trainers=2, reason="", wanted_at=NOW,
        first_step=1, first_step_at=NOW,
    )  # fmt: skip
    job = replace(seen.server.job, stages=(stage,))
    sharing = Sharing(policy="goodput", now=NOW + 50)
    seen = replace(seen, server=replace(server_view(job, sharing), nodes=nodes_of(pods), most=2))
    assert look(spec, seen, now=NOW + 50 + ahead).status.step_s == {"2": 0.5}


def test_a_time_that_a_controller_with_a_faster_clock_has_written_holds_nothing_up():
    spec = parsed(minReplicas=1, maxReplicas=3, activeDeadlineSeconds=600)
    pods, ahead = [pod(index) for index in range(3)], NOW + 3600
    view = ServerView(job=None, nodes=nodes_of(pods[:2]))
    seen = Observed(
        trainers=tuple(pods[:2]), server_pod=server_pod(), server=view, prepared=True, budget=0
    )
    status = TrainingJobStatus(
        desired=3, scaled_at=ahead, started_at=ahead, pod_failures=1, pod_failed_at=ahead
    )
    status = status.with_condition(states.SERVER_READY, True, "Answers", "", ahead)
    first = look(spec, seen, status)
    again = look(spec, seen, first.status, now=NOW + 2)
    assert (first.steps, again.steps) == ((), (MakeTrainer(2),))
    late = replace(seen, trainers=tuple(pods))
    assert look(spec, late, again.status, now=NOW + 33).steps[-1:] == (SubmitJob(),)
    overdue = {each.reason for each in look(spec, late, again.status, now=NOW + 601).notices}
    assert {"PodReplaced", "DeadlineExceeded"} <= overdue


def test_more_pods_are_used_by_one_change_when_all_are_there():
    spec = parsed(replicas=5, maxReplicas=5)
    two = [pod(0), pod(1)]
    seen = running(spec, two, most=2)
    assert look(spec, seen).steps == (MakeTrainer(2), MakeTrainer(3), MakeTrainer(4))
    four = replace(
        running(spec, [pod(index) for index in range(4)], used=two, most=2),
        trainers=tuple(pod(index) for index in range(5)),
    )
    assert look(spec, four).steps == ()
    five = running(spec, [pod(index) for index in range(5)], used=two, most=2)
    assert look(spec, five).steps == (SetPods(5),)


def test_pods_that_leave_are_told_first_and_deleted_when_the_training_has_left_them():
    spec = parsed(replicas=3, maxReplicas=5)
    pods = [pod(index) for index in range(5)]
    seen = running(spec, pods, most=5)
    closing = CloseNodes((pods[3].node_id, pods[4].node_id))
    assert look(spec, seen).steps == (closing, SetPods(3))
    told = with_limits(running(spec, pods, most=3), n3=0, n4=0)
    assert look(spec, told).steps == ()
    left = with_limits(running(spec, pods, used=pods[:4], most=3), n3=0, n4=0)
    assert look(spec, left).steps == (RemovePod("digits-4", "uid00004"),)


def test_a_sick_pod_leaves_before_those_of_higher_index():
    spec = parsed(replicas=2, maxReplicas=3)
    pods = [pod(0, trouble="ImagePull", message="no such image"), pod(1), pod(2)]
    seen = running(spec, pods[1:], most=3)
    seen = replace(seen, trainers=tuple(pods))
    steps = look(spec, seen).steps
    assert steps == (SetPods(2), RemovePod("digits-0", "uid00000"))


def test_a_job_that_is_resumed_with_fewer_pods_keeps_the_one_that_has_its_state():
    spec, pods = parsed(replicas=1, maxReplicas=2), [pod(0), pod(1)]
    saved = Saved(stage=2, step=70, path="/state/pods", node_id=pods[1].node_id, spare=True)
    paused = running(spec, pods, used=[], state=JobState.PAUSED, saved=saved)
    outcome = look(spec, with_limits(paused, p0=0))
    assert outcome.steps == (ResumeJob(), RemovePod("digits-0", "uid00000"))
    for state in (JobState.WAITING, JobState.STARTING):
        begins = running(spec, pods, used=[pods[1]], state=state, saved=saved)
        assert look(spec, begins).steps == (CloseNodes((pods[0].node_id,)),)
    trains = running(spec, pods, used=[pods[1]], saved=saved)
    assert look(spec, trains).steps == (CloseNodes((pods[1].node_id,)),), "it moves"


def test_a_pod_that_is_drained_gets_a_substitute_at_once():
    spec = parsed(replicas=3)
    pods = [pod(0), pod(1, leaving=True), pod(2)]
    steps = look(spec, running(spec, pods)).steps
    assert steps == (MakeTrainer(3), CloseNodes((pods[1].node_id,)))


def test_a_pod_that_its_kubelet_ends_is_replaced_and_not_opened_again():
    spec = parsed(replicas=1, maxReplicas=2)
    seen = replace(with_limits(running(spec, [pod(0)]), p0=0), closed=frozenset())
    assert look(spec, seen).steps == (MakeTrainer(1),)
    moved = replace(seen, trainers=(pod(0), pod(1)))
    assert moved.server is not None
    assert moved.server.job is not None
    job = replace(moved.server.job, pods=(), allotment=None)
    outcome = look(spec, replace(moved, server=replace(moved.server, job=job)))
    assert outcome.steps == (RemovePod("digits-0", "uid00000"),)
    assert outcome.notices == (
        Notice(
            "PodRemoved",
            "digits-0: its node ends it, or it was closed by hand; the training left it",
        ),
    )
    saved = Saved(stage=2, step=70, path="/state/p", node_id=pod(0).node_id, spare=True)
    waits = running(spec, [pod(0)], used=[], state=JobState.WAITING, saved=saved)
    kept = replace(with_limits(waits, p0=0), closed=frozenset())
    assert look(spec, kept).steps == (OpenNodes((pod(0).node_id,)),), "it has the newest state"


def test_pods_are_evicted_one_at_a_time_and_those_without_a_node_keep_none_from_that():
    spec = parsed(replicas=3)
    placed = [pod(index, node="n") for index in range(2)]
    pods = [*placed, pod(2, trouble="Unschedulable", message="0/1 nodes")]
    seen = running(spec, pods, used=placed)
    assert SetBudget(1) in look(spec, seen).steps
    assert look(spec, replace(seen, budget=1)).steps == ()
    going = (pod(0, node="n", leaving=True), placed[1], pod(2, node="n"))
    assert SetBudget(2) in look(spec, replace(seen, trainers=going, budget=1)).steps
    first = look(spec, Observed(), TrainingJobStatus())
    assert not any(isinstance(step, SetBudget) for step in first.steps), "it is not there yet"


def test_a_pod_that_no_node_ends_keeps_no_other_from_being_evicted():
    spec = parsed(replicas=2)
    lost = pod(0, node="lost", leaving=True, gone_by=NOW + 120)
    pods = [lost, pod(1, node="n"), pod(2, node="n")]
    seen = running(spec, pods, used=pods[1:])
    assert SetBudget(2) in look(spec, seen).steps
    assert SetBudget(1) in look(spec, replace(seen, budget=2), now=NOW + 121).steps


def test_a_pod_that_was_closed_is_opened_when_it_is_wanted_again():
    spec = parsed(replicas=3)
    seen = with_limits(running(spec, [pod(0), pod(1), pod(2)]), n2=0)
    assert look(spec, seen).steps == (OpenNodes((pod(2).node_id,)),)


def test_a_pod_that_ended_is_made_anew_and_more_slowly_each_time():
    spec = parsed(replicas=2)
    pods = [pod(0), pod(1, phase="Failed", trouble="Ended", message="code 1")]
    seen = running(spec, pods[:1], most=2, state=JobState.WAITING)
    outcome = look(spec, replace(seen, trainers=tuple(pods)))
    assert outcome.steps == (RemovePod("digits-1", "uid00001"),)
    assert (outcome.status.pod_failures, outcome.status.pod_failed_at) == (1, NOW)
    assert look(spec, seen, outcome.status, NOW + 0.5).steps == ()
    assert look(spec, seen, outcome.status, NOW + 1.5).steps == (MakeTrainer(1),)
    again = replace(outcome.status, pod_failures=4)
    assert look(spec, seen, again, NOW + 7).steps == ()


def test_a_pod_that_always_ends_is_made_more_slowly_though_the_others_make_steps():
    spec = parsed(replicas=2, restartLimit=2)
    status = TrainingJobStatus(desired=2, scaled_at=NOW, started_at=NOW)
    ended = pod(1, phase="Failed", trouble="Ended", message="code 1")
    made: list[int] = []
    trainers: tuple[ListedPod, ...] = (pod(0), ended)
    for second in range(300):
        seen = running(spec, [pod(0)], step=100 + second, most=2)
        outcome = look(spec, replace(seen, trainers=trainers), status, NOW + second)
        status, trainers = outcome.status, (pod(0),)
        if MakeTrainer(1) in outcome.steps:
            made.append(second)
            trainers = (pod(0), ended)
    assert made == [1, 4, 9, 18, 35, 68, 129, 190, 251]
    assert not status.ended
    assert look(spec, running(spec, [pod(0), pod(1)]), status, NOW + 300).status.pod_retries == 0


def test_a_pod_whose_gpu_is_in_quarantine_is_replaced_once_the_training_can_leave_it():
    spec = parsed(replicas=1)
    seen, why = running(spec, [pod(0)]), "GPU 0 is in quarantine: XID 79"
    assert seen.server is not None
    sick = {pod(0).node_id: TrainingNode(alive=True, limit=None, sick=why)}
    seen = replace(seen, server=replace(seen.server, nodes=sick))
    trains = look(spec, seen)
    assert trains.steps == (MakeTrainer(1), CloseNodes((pod(0).node_id,)))
    waits = running(spec, [pod(0)], used=[], state=JobState.WAITING)
    assert waits.server is not None
    sick = {pod(0).node_id: TrainingNode(alive=True, limit=0, sick=why)}
    waits = replace(waits, server=replace(waits.server, nodes=sick))
    outcome = look(spec, waits)
    assert outcome.steps == (MakeTrainer(1), RemovePod("digits-0", "uid00000"))
    assert outcome.notices[-1] == Notice("PodReplaced", f"digits-0: {why}", warning=True)
    again = look(spec, waits, outcome.status, NOW + 0.5)
    assert MakeTrainer(1) not in again.steps, "the next one was ill as well"
    saved = Saved(stage=2, step=70, path="/state/pods", node_id=pod(0).node_id, spare=True)
    holds = running(spec, [pod(0)], used=[], state=JobState.WAITING, saved=saved)
    assert holds.server is not None
    holds = replace(holds, server=replace(holds.server, nodes=sick))
    kept = look(spec, holds)
    assert kept.steps == (MakeTrainer(1),)
    assert kept.notices[-1].message.startswith(f"digits-0: {why}; it stays, as the newest state")
    assert not kept.status.holds(states.PODS_READY)
    assert look(spec, holds, kept.status, NOW + 1).notices == kept.notices[:-1], "it is told once"
    assert MakeTrainer(1) in look(spec, waits, outcome.status, NOW + 1).steps


@pytest.mark.parametrize(("code", "phase"), [(137, "Failed"), (0, "Succeeded")])
def test_a_pod_whose_trainer_has_ended_is_over_though_another_container_runs_on(code, phase):
    ended = {"exitCode": code, "reason": "OOMKilled"}
    listed = pod_view(
        {
            "metadata": {"name": "digits-0", "uid": "uid00000"},
            "spec": {"nodeName": "n"},
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {"name": "log", "state": {"running": {}}},
                    {"name": "trainer", "state": {"terminated": ended}},
                ],
            },
        }
    )
    assert (listed.phase, listed.over) == (phase, True)
    assert listed.message == ("container trainer ended with code 137: OOMKilled" if code else "")


def ended_by_its_node(reason: str, message: str) -> ListedPod:
    """Return a pod as kubelets leave it that end it for the sake of their node."""
    return pod_view(
        {
            "metadata": {
                "name": "digits-0", "uid": "uid00000", "labels": {"paddlepaddle.org/index": "0"}
            },
            "spec": {"nodeName": "n"},
            "status": {
                "phase": "Failed", "reason": reason, "message": message,
                "conditions": [{"type": "DisruptionTarget", "status": "True"}],
                "containerStatuses": [
                    {"name": "trainer", "state": {"terminated": {"exitCode": 137}}}
                ],
            },
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "The node was low on resource: memory. "),
        ("Terminated", "Pod was terminated in response to imminent node shutdown."),
    ],
)
def test_pods_that_their_nodes_end_are_no_failures_and_it_is_said_why_they_ended(reason, message):
    spec = parsed(minReplicas=2, maxReplicas=3, restartLimit=1)
    seen = running(spec, [], state=JobState.WAITING)
    ended = ended_by_its_node(reason, message)
    status = TrainingJobStatus(desired=3, scaled_at=NOW, started_at=NOW)
    for night in range(6):
        outcome = look(spec, replace(seen, trainers=(ended,)), status, NOW + 600 * night)
        assert RemovePod("digits-0", "uid00000") in outcome.steps
        told = Notice("PodEnded", f"digits-0: {message.strip()}", warning=True)
        assert told in outcome.notices
        status = outcome.status
    assert (status.ended, status.pod_failures) == (False, 0)
    assert MakeTrainer(0) in look(spec, seen, status, NOW + 3600.1).steps, "at once"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "Pod was rejected: The node had condition: [DiskPressure]. "),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present"),
        ("OutOfnvidia.com/gpu", "Pod was rejected: Node didn't have enough resource"),
    ],
)
def test_pods_that_their_nodes_do_not_take_are_no_failures_and_are_made_more_and_more_slowly(
    reason, message
):
    """As where they tolerate all taints, so that the scheduler gives them to that node again."""
    spec = parsed(replicas=1, restartLimit=1)
    waits = running(spec, [], state=JobState.WAITING)
    meta = {"name": "digits-0", "uid": "uid00000", "labels": {"paddlepaddle.org/index": "0"}}
    told = {"phase": "Failed", "reason": reason, "message": message}
    rejected = pod_view({"metadata": meta, "spec": {"nodeName": "n"}, "status": told})
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW)
    made: list[int] = []
    trainers: tuple[ListedPod, ...] = (rejected,)
    for second in range(300):
        outcome = look(spec, replace(waits, trainers=trainers), status, NOW + second)
        status, trainers = outcome.status, ()
        if MakeTrainer(0) in outcome.steps:
            made.append(second)
            trainers = (rejected,)
    assert made == [1, 4, 9, 18, 35, 68, 129, 190, 251]
    assert (status.ended, status.pod_failures) == (False, 0)


def test_a_server_that_its_node_does_not_take_is_made_more_and_more_slowly():
    spec = parsed(replicas=1)
    rejected = server_pod(phase="Failed", trouble="Evicted", message="Pod was rejected")
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW)
    made: list[int] = []
    there: ListedPod | None = rejected
    for second in range(300):
        seen = Observed(trainers=(pod(0),), server_pod=there, prepared=True, budget=0)
        outcome = look(spec, seen, status, NOW + second)
        status, there = outcome.status, None
        if MakeServer() in outcome.steps:
            made.append(second)
            there = rejected
    assert made == [1, 4, 9, 18, 35, 68, 129, 190, 251]


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "data" exceeds the limit "1Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    ],
)
def test_a_job_whose_pods_always_take_more_disk_than_they_may_has_failed(message):
    """Their kubelet evicts them, and gives no DisruptionTarget: another node would as well."""
    spec, now = parsed(replicas=1, restartLimit=1), NOW
    meta = {"name": "digits-0", "uid": "uid00000", "labels": {"paddlepaddle.org/index": "0"}}
    told = {"phase": "Failed", "reason": "Evicted", "message": message, "podIP": "10.0.0.1"}
    evicted = pod_view({"metadata": meta, "spec": {"nodeName": "n"}, "status": told})
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW)
    seen = replace(running(spec, [], state=JobState.WAITING), trainers=(evicted,))
    for _pod in range(3):
        now += 100
        status = look(spec, seen, status, now).status
    assert status.ended
    assert f"the last one: {message.strip()}" in status.reason


def test_a_job_whose_pods_end_at_the_same_step_again_and_again_has_failed():
    spec = parsed(replicas=1, restartLimit=2)
    status, now = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW), NOW
    counts = []
    # What it had at its ends; the fourth time it goes on from an older checkpoint.
    for number, step in enumerate((40, 90, 90, 70, 90, 90)):
        trains = running(spec, [pod(number)], step=step)
        status = look(spec, trains, status, now := now + 100).status
        ended = pod(number, phase="Failed", trouble="Ended", message="OOMKilled")
        status = look(spec, replace(trains, trainers=(ended,)), status, now := now + 1).status
        counts.append(status.pod_failures)
    assert counts == [1, 1, 2, 3, 4, 4]
    assert status.phase is Phase.FAILED
    assert "4 pods have ended without a new step between them" in status.reason


def test_a_training_that_tells_of_no_step_is_well_when_it_has_run_for_a_while():
    spec = parsed(replicas=1)
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW, pod_failures=4)
    status = look(spec, running(spec, [pod(0)]), status, NOW).status
    status = look(spec, running(spec, [pod(0)]), status, NOW + 59).status
    assert status.pod_failures == 4
    assert look(spec, running(spec, [pod(0)]), status, NOW + 60).status.pod_failures == 0


def waits_for(spec: TrainingJobSpec, lost: ListedPod, pods: Sequence[ListedPod]) -> Observed:
    """Return what is seen of a job that waits for a pod which its server hears no more."""
    seen = running(spec, pods, used=[lost], state=JobState.WAITING)
    assert seen.server is not None
    assert seen.server.job is not None
    job = replace(seen.server.job, unreachable=True)
    nodes = nodes_of([pod for pod in pods if pod != lost])
    nodes |= nodes_of([lost], alive=False)
    return replace(seen, server=replace(seen.server, job=job, nodes=nodes))


@pytest.mark.parametrize("suspend", [False, True])
def test_a_training_whose_pods_have_all_ended_is_told_so_and_waits_for_none_that_may_run(suspend):
    spec = parsed(replicas=2, suspend=suspend)
    lost, new = pod(0), pod(0, uid="uid-new")
    ended = replace(lost, phase="Failed")
    for there in ([], [ended], [new]):
        outcome = look(spec, waits_for(spec, lost, there))
        assert GiveUpDead(2) in outcome.steps
        assert "PodsLost" in [notice.reason for notice in outcome.notices]
        second = look(spec, waits_for(spec, lost, there), outcome.status, NOW + 1)
        assert second.status.holds(states.SUSPENDED) == (suspend and new not in there)
    for there in ([lost], [replace(lost, leaving=True), new]):
        outcome = look(spec, waits_for(spec, lost, there))
        assert GiveUpDead(2) not in outcome.steps, "its node may be cut off"


def test_a_state_in_the_folder_of_a_pod_that_is_gone_is_waited_for_no_longer():
    spec, gone = parsed(replicas=1), pod(0)
    saved = Saved(stage=1, step=175, path="/pods/p/log/run/checkpoint", node_id=gone.node_id)
    for state in (replace(saved, spare=True), replace(saved, alone=True), saved):
        seen = running(spec, [pod(1)], used=[], state=JobState.WAITING, saved=state)
        assert (GiveUpDead(1) in look(spec, seen).steps) == (state != saved)
        kept = replace(seen, trainers=(gone, *seen.trainers))
        assert GiveUpDead(1) not in look(spec, kept).steps, "it may come back"


def test_a_job_whose_pods_always_end_has_failed_and_says_why():
    spec = parsed(replicas=1, restartLimit=2)
    seen = running(spec, [], state=JobState.WAITING)
    ended = pod(0, phase="Failed", trouble="Ended", message="container trainer ended with code 2")
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW, pod_failures=3)
    outcome = look(spec, replace(seen, trainers=(ended,)), status)
    assert outcome.status.phase is Phase.FAILED
    assert "code 2" in outcome.status.conditions[states.FAILED].message


def test_a_pod_that_does_not_get_ready_in_time_is_replaced_but_not_where_there_is_no_room():
    spec = parsed(replicas=2, podReadyTimeoutSeconds=60)
    seen = running(spec, [pod(0)], most=2)
    late = replace(seen, trainers=(pod(0), pod(1, created_at=NOW - 61)))
    status = TrainingJobStatus(desired=2, scaled_at=NOW, started_at=NOW)
    status = status.with_condition(states.SERVER_READY, True, "Answers", "", NOW - 900)
    assert look(spec, late, status).steps == (RemovePod("digits-1", "uid00001"), MakeTrainer(2))
    unplaced = pod(1, created_at=NOW - 61, trouble="Unschedulable", message="0/3 nodes")
    outcome = look(spec, replace(seen, trainers=(pod(0), unplaced)), status)
    assert outcome.steps == ()
    assert outcome.status.conditions[states.PODS_READY].reason == "Unschedulable"
    assert "digits-1: 0/3 nodes" in outcome.status.conditions[states.PODS_READY].message


def test_a_pod_that_its_server_hears_no_more_is_not_said_to_have_been_late():
    spec = parsed(replicas=2, podReadyTimeoutSeconds=60)
    pods = [pod(0), pod(1, created_at=NOW - 9000)]
    seen = running(spec, pods, used=pods[:1])
    assert seen.server is not None
    nodes = {**nodes_of(pods[:1]), **nodes_of(pods[1:], alive=False)}
    seen = replace(seen, server=replace(seen.server, nodes=nodes))
    status = TrainingJobStatus(desired=2, scaled_at=NOW, started_at=NOW)
    status = status.with_condition(states.SERVER_READY, True, "Answers", "", NOW - 900)
    outcome = look(spec, seen, status)
    assert outcome.steps[0] == RemovePod("digits-1", "uid00001")
    words = "digits-1: the job server hears nothing of it any more, and the training has left it"
    assert outcome.notices[0] == Notice("PodReplaced", words, warning=True)


def test_a_pod_that_waited_long_for_a_node_has_all_its_time_to_get_ready():
    spec = parsed(replicas=1, podReadyTimeoutSeconds=60)
    late = pod_view(
        {
            "metadata": {
                "name": "digits-0", "uid": "uid00000",
                "labels": {"paddlepaddle.org/index": "0"},
                "creationTimestamp": time_text(NOW - 9000),
            },
            "spec": {"nodeName": "n"},
            "status": {"phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "True",
                "lastTransitionTime": time_text(NOW - 1),
            }]},
        }
    )  # fmt: skip
    view = ServerView(job=None, nodes={})
    seen = Observed(trainers=(late,), server_pod=server_pod(), server=view, prepared=True, budget=0)
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW - 9000)
    status = status.with_condition(states.SERVER_READY, True, "Answers", "", NOW - 9000)
    assert look(spec, seen, status).steps == ()
    assert look(spec, seen, status, NOW + 61).steps[0] == RemovePod("digits-0", "uid00000")


def test_a_pod_whose_init_containers_take_long_has_all_its_time_to_get_ready():
    spec = parsed(replicas=1, podReadyTimeoutSeconds=60)
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW - 9000)
    status = status.with_condition(states.SERVER_READY, True, "Answers", "", NOW - 9000)

    def seen(state: dict[str, Any]) -> Observed:
        first = {"running": {"startedAt": time_text(NOW - 8999)}}
        late = pod_view(
            {
                "metadata": {
                    "name": "digits-0", "uid": "uid00000",
                    "labels": {"paddlepaddle.org/index": "0"},
                    "creationTimestamp": time_text(NOW - 9000),
                },
                "spec": {
                    "nodeName": "n",
                    "initContainers": [
                        {"name": "log", "restartPolicy": "Always"}, {"name": "data"},
                    ],
                },
                "status": {"phase": "Pending", "initContainerStatuses": [
                    {"name": "log", "state": first}, {"name": "data", "state": state},
                ]},
            }
        )  # fmt: skip
        view = ServerView(job=None, nodes={})
        return Observed(
            trainers=(late,), server_pod=server_pod(), server=view, prepared=True, budget=0
        )

    copies = look(spec, seen({"running": {"startedAt": time_text(NOW - 8990)}}), status)
    assert copies.steps == ()
    told = copies.status.conditions[states.PODS_READY]
    assert (told.reason, told.message) == ("Initializing", "digits-0: init container data runs")
    done = seen({"terminated": {"exitCode": 0, "finishedAt": time_text(NOW - 1)}})
    assert look(spec, done, status).steps == ()
    late = look(spec, done, status, NOW + 60)
    assert late.steps[0] == RemovePod("digits-0", "uid00000")
    assert late.notices[0].message == (
        "digits-0: not ready after 60 s, spec.podReadyTimeoutSeconds: it has not registered with "
        "the job server"
    )


def test_pods_have_all_their_time_to_register_with_a_server_that_is_made_again():
    spec = parsed(replicas=2, podReadyTimeoutSeconds=60, server=STORAGE)
    pods = [pod(0, created_at=NOW - 9000), pod(1, created_at=NOW - 9000)]
    seen = running(spec, pods)
    status = look(spec, seen).status
    lost = replace(seen, server_pod=None, server=None)
    status = look(spec, lost, status, NOW + 10).status
    empty = replace(seen, server=ServerView(job=None, nodes={}))
    outcome = look(spec, empty, status, NOW + 20)
    assert outcome.steps == ()
    late = look(spec, empty, outcome.status, NOW + 81).steps
    assert late[:2] == (RemovePod("digits-0", "uid00000"), RemovePod("digits-1", "uid00001"))


def test_a_pod_that_is_refused_again_and_again_holds_up_no_start():
    spec = parsed(replicas=3, minReplicas=1)
    pods = [pod(0), pod(1)]
    view = ServerView(job=None, nodes=nodes_of(pods))
    seen = Observed(
        trainers=tuple(pods), server_pod=server_pod(), server=view, prepared=True, budget=0
    )
    status = TrainingJobStatus(desired=3, scaled_at=NOW, started_at=NOW)
    told: list[str] = []
    for at in (NOW, NOW + 10, NOW + 20):
        outcome = look(spec, seen, status, at)
        assert outcome.steps == (MakeTrainer(2),)
        outcome = refused(outcome, status, "exceeded quota", at)
        told += [each.reason for each in outcome.notices]
        status = outcome.status
    assert told == ["PodsRefused"]
    assert SubmitJob() in look(spec, seen, status, NOW + 31).steps


def test_a_server_that_is_away_stops_nothing():
    spec = parsed(replicas=1, maxReplicas=3)
    seen = replace(running(spec, [pod(0), pod(1)]), server=None)
    outcome = look(spec, seen, TrainingJobStatus(phase=Phase.RUNNING, desired=1, scaled_at=NOW))
    assert outcome.steps == ()
    assert outcome.status.phase is Phase.RUNNING
    assert not outcome.status.holds(states.SERVER_READY)


def test_a_suspended_job_is_paused_durably_before_its_pods_go():
    spec = parsed(replicas=2, suspend=True)
    pods = [pod(0), pod(1)]
    first = look(spec, running(spec, pods))
    assert first.steps == (PauseJob(),)
    assert look(spec, running(spec, pods), first.status, NOW + 1).steps == ()
    pausing = running(spec, pods, state=JobState.PAUSING)
    assert look(spec, pausing, first.status, NOW + 2).steps == ()
    saved = Saved(stage=2, step=70, path="s3://bucket/digits", node_id=pods[0].node_id)
    paused = running(spec, pods, used=[], state=JobState.PAUSED, saved=saved)
    outcome = look(spec, paused, first.status, NOW + 3)
    assert outcome.steps == (
        RemovePod("digits-0", "uid00000"),
        RemovePod("digits-1", "uid00001"),
    )
    assert outcome.status.phase is Phase.SUSPENDED
    assert "step 70" in outcome.status.conditions[states.SUSPENDED].message
    lost = look(spec, Observed(prepared=True), outcome.status, NOW + 4)
    assert lost.steps == ()
    assert "step 70" in lost.status.conditions[states.SUSPENDED].message


def test_of_a_script_without_the_loop_it_is_said_that_its_pause_may_have_saved_nothing():
    spec = parsed(replicas=1, suspend=True)
    asked = look(spec, running(spec, [pod(0)]))
    assert asked.notices[-1] == Notice("Suspending", "spec.suspend is true: it is paused")
    why = "paused; no trainer has called the elastic loop: EDL cannot know what was saved"
    paused = running(spec, [pod(0)], used=[], state=JobState.PAUSED, reason=why)
    assert look(spec, paused, asked.status, NOW + 1).notices == (Notice("Suspended", why),)


def mounted(**spec: Any) -> TrainingJobSpec:
    """Return a job with a claim at /data, and a scratch volume in it."""
    job = training_job(**spec)
    pod_spec = job["spec"]["template"]["spec"]
    claim = {"persistentVolumeClaim": {"claimName": "data"}}
    pod_spec["volumes"] = [{"name": "data", **claim}, {"name": "scratch", "emptyDir": {}}]
    pod_spec["containers"][0]["volumeMounts"] = [
        {"name": "data", "mountPath": "/data/"},
        {"name": "scratch", "mountPath": "/data/scratch"},
    ]
    return parse(job)


@pytest.mark.parametrize("path", ["/data", "/data/digits", "gs://bucket/digits"])
def test_a_state_that_outlives_the_pods_lets_them_go(path):
    spec = mounted(replicas=1, suspend=True)
    saved = Saved(stage=2, step=70, path=path, node_id=pod(0).node_id)
    paused = running(spec, [pod(0)], used=[], state=JobState.PAUSED, saved=saved)
    outcome = look(spec, paused)
    assert outcome.steps == (RemovePod("digits-0", "uid00000"),)
    assert outcome.status.holds(states.SUSPENDED)


@pytest.mark.parametrize(
    "path",
    ["/state/pod_log/run", "/state", "/tmp/digits", "/app/digits", "/database", "/data/scratch/d"],
)
def test_a_state_that_would_go_with_a_pod_keeps_the_pods(path):
    spec = mounted(replicas=1, suspend=True)
    saved = Saved(stage=2, step=70, path=path, node_id=pod(0).node_id)
    paused = running(spec, [pod(0)], used=[], state=JobState.PAUSED, saved=saved)
    outcome = look(spec, paused)
    assert outcome.steps == ()
    assert outcome.status.conditions[states.SUSPENDED].reason == "NotDurable"
    assert outcome.status.phase is Phase.SUSPENDED, "nothing starts"
    (told,) = outcome.notices
    assert told.warning
    assert f"its state is in a pod's own folder, {path}" in told.message
    assert look(spec, paused, outcome.status, NOW + 1).notices == (), "once"


@pytest.mark.parametrize("server", [{}, STORAGE])
def test_a_state_in_a_pod_alone_keeps_the_pods_when_the_server_is_lost_too(server):
    spec = parsed(replicas=1, suspend=True, server=server)
    saved = Saved(stage=2, step=70, path="/state/pods", node_id=pod(0).node_id)
    paused = running(spec, [pod(0)], used=[], state=JobState.PAUSED, saved=saved)
    status = look(spec, paused).status
    lost = look(spec, replace(paused, server_pod=None, server=None), status, NOW + 1)
    assert lost.steps == (MakeServer(),)
    empty = replace(paused, server=ServerView(job=None, nodes=nodes_of([pod(0)])))
    outcome = look(spec, empty, lost.status, NOW + 2)
    assert outcome.steps == ()
    assert outcome.status.conditions[states.SUSPENDED].reason == "NotDurable"
    assert outcome.status.phase is Phase.SUSPENDED
    begins = look(parsed(replicas=1, server=server), empty, outcome.status, NOW + 40)
    assert SubmitJob() in begins.steps
    assert "its server knows it no more" in begins.notices[-1].message


@pytest.mark.parametrize("suspend", [False, True])
def test_pods_write_the_newest_state_before_a_server_is_made_that_has_lost_its_database(suspend):
    spec = parsed(replicas=2, suspend=suspend)
    pods = [pod(0), pod(1)]
    status = look(parsed(replicas=2), running(spec, pods)).status
    lost = Observed(trainers=tuple(pods), prepared=True, budget=1)
    ending = look(spec, lost, status, NOW + 1)
    assert ending.steps == (
        RemovePod("digits-0", "uid00000"),
        RemovePod("digits-1", "uid00001"),
    )
    (told,) = ending.notices
    assert (told.reason, told.warning) == ("ServerLost", True)
    assert ending.status.phase is Phase.STARTING
    going = replace(lost, trainers=tuple(pod(i, leaving=True, gone_by=NOW + 90) for i in range(2)))
    waiting = look(spec, going, ending.status, NOW + 2)
    assert (waiting.steps, waiting.notices) == ((), ())
    gone = look(spec, Observed(prepared=True, budget=0), waiting.status, NOW + 9)
    if suspend:
        assert gone.steps == ()
        assert gone.status.holds(states.SUSPENDED)
        assert "goes on from its newest" in gone.status.conditions[states.SUSPENDED].message
    else:
        assert gone.steps == (MakeServer(), MakeTrainer(0), MakeTrainer(1))
        assert gone.status.phase is Phase.PENDING
    cut_off = look(spec, going, waiting.status, NOW + 91)
    assert suspend or MakeServer() in cut_off.steps, "a pod on a lost node is not waited for"


def test_a_server_whose_database_is_in_a_volume_is_made_again_beside_the_pods():
    spec = parsed(replicas=2, server=STORAGE)
    seen = running(spec, [pod(0), pod(1)])
    lost = replace(seen, server_pod=None, server=None)
    assert look(spec, lost, look(spec, seen).status, NOW + 1).steps == (MakeServer(),)


def test_a_job_that_is_no_longer_suspended_goes_on_when_its_pods_are_there():
    spec = parsed(replicas=1)
    status = TrainingJobStatus(
        desired=1, scaled_at=NOW, started_at=0.0, suspended_at=NOW - 50
    ).with_condition(states.SUSPENDED, True, "Suspended", "", NOW - 50)
    paused = running(spec, [], state=JobState.PAUSED)
    outcome = look(spec, paused, status)
    assert outcome.steps == (MakeTrainer(0),)
    assert outcome.status.suspended_s == 50
    ready = running(spec, [pod(0)], used=[], state=JobState.PAUSED)
    resumed = look(spec, ready, outcome.status)
    assert resumed.steps == (ResumeJob(),)
    again, lost = parsed(replicas=1, suspend=True, server=STORAGE), replace(ready, server_pod=None)
    pods_stay = look(again, replace(lost, server=None), resumed.status, NOW + 1).steps
    assert pods_stay == (MakeServer(),), "it may run by now"


def test_a_job_that_is_created_suspended_makes_nothing():
    outcome = look(parsed(replicas=2, suspend=True), Observed(), TrainingJobStatus())
    assert outcome.steps == ()
    assert outcome.status.conditions[states.SUSPENDED].message == "it has not begun"
    assert outcome.status.phase is Phase.SUSPENDED
    assert outcome.status.started_at is None


def test_a_deadline_ends_a_job_whose_server_never_came_and_waits_for_one_that_trains():
    spec = parsed(replicas=1, activeDeadlineSeconds=100)
    words = "image edl: not found"
    server = server_pod(phase="Pending", trouble="ImagePull", message=words)
    seen = Observed(trainers=(pod(0),), server_pod=server, prepared=True, budget=0)
    assert not look(spec, seen, now=NOW + 99).status.ended
    failed = look(spec, seen, now=NOW + 100).status.conditions[states.FAILED]
    assert failed.reason == "DeadlineExceeded"
    assert failed.message == f"100 s, its activeDeadlineSeconds, are over; {words}"
    trains = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW, job_state="RUNNING")
    assert not look(spec, seen, trains, NOW + 100).status.ended, "its state is to be written"
    suspended = parsed(replicas=1, activeDeadlineSeconds=100, suspend=True)
    assert not look(suspended, seen, now=NOW + 100).status.ended


def test_a_deadline_does_not_count_the_time_that_a_job_was_suspended():
    spec = parsed(replicas=1, activeDeadlineSeconds=100)
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW - 120, suspended_s=30.0)
    seen = running(spec, [pod(0)])
    assert look(spec, seen, status).steps == ()
    assert look(spec, seen, status, NOW + 10).steps == (StopJob(),)
    stopped = running(spec, [pod(0)], used=[], state=JobState.STOPPED)
    outcome = look(spec, stopped, status, NOW + 20)
    assert outcome.status.conditions[states.FAILED].reason == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("state", "phase", "condition"),
    [
        (JobState.SUCCEEDED, Phase.SUCCEEDED, states.COMPLETE),
        (JobState.FAILED, Phase.FAILED, states.FAILED),
        (JobState.STOPPED, Phase.FAILED, states.FAILED),  # by `edl stop` in a pod
    ],
)
def test_a_job_ends_as_its_training_does(state, phase, condition):
    spec = parsed(replicas=1, ttlSecondsAfterFinished=60)
    seen = running(spec, [pod(0)], used=[], state=state, reason="a word")
    first = look(spec, seen)
    assert (first.status.phase, first.status.completed_at) == (phase, NOW)
    assert first.status.conditions[condition].message == "a word"
    cleaned = look(spec, seen, first.status, NOW + 1)
    assert cleaned.steps == (
        RemovePod("digits-0", "uid00000"),
        RemovePod("digits-server", "uid-server"),
    )
    kept = parsed(replicas=1, cleanPodPolicy="None")
    assert look(kept, seen, first.status, NOW + 1).steps == ()
    gone = Observed(prepared=True, budget=0)
    assert look(spec, gone, first.status, NOW + 59).steps == ()
    assert look(spec, gone, first.status, NOW + 61).steps == (RemoveTrainingJob(),)


def test_pods_that_are_kept_after_the_end_can_all_be_evicted():
    spec = parsed(replicas=2, cleanPodPolicy="None")
    there = replace(running(spec, [pod(0), pod(1)], state=JobState.SUCCEEDED), budget=1)
    ended = look(spec, there).status
    assert look(spec, there, ended, NOW + 1).steps == (SetBudget(0),)
    again = replace(there, prepared=False, budget=None)
    assert look(spec, again, ended, NOW + 1).steps == (SetBudget(0),), "of another controller"
    assert look(spec, replace(there, budget=0), ended, NOW + 2).steps == ()


def test_the_server_that_pods_wait_for_goes_after_them_at_the_end():
    spec = parsed(replicas=1, server=STORAGE)
    ended = look(spec, running(spec, [pod(0)], used=[], state=JobState.SUCCEEDED)).status
    there = Observed(trainers=(pod(0),), server_pod=server_pod(), prepared=True, budget=0)
    assert look(spec, there, ended, NOW + 1).steps == (RemovePod("digits-0", "uid00000"),)
    leaving = replace(there, trainers=(pod(0, leaving=True, gone_by=NOW + 100),))
    assert look(spec, leaving, ended, NOW + 2).steps == ()
    server = (RemovePod("digits-server", "uid-server"),)
    assert look(spec, leaving, ended, NOW + 100).steps == server, "its node may be lost"
    assert look(spec, replace(there, trainers=()), ended, NOW + 3).steps == server


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED])
def test_a_last_state_that_goes_with_its_pod_is_told_where_pods_are_deleted(state):
    saved = Saved(stage=2, step=70, path="/state/pods", node_id=pod(0).node_id, spare=True)
    ended = running(parsed(replicas=1), [pod(0)], used=[], state=state, reason="a", saved=saved)
    told = look(parsed(replicas=1), ended).notices[-1].message
    assert "step 70 was written to a pod's own folder alone" in told
    assert "cleanPodPolicy None keeps pods" in told
    assert look(parsed(replicas=1, cleanPodPolicy="None"), ended).notices[-1].message == "a"


def test_a_state_that_goes_with_its_pod_is_told_where_pods_that_always_end_end_the_job():
    spec = parsed(replicas=2, minReplicas=2, restartLimit=2)
    saved = Saved(stage=2, step=70, path="/state/pods", node_id=pod(0).node_id, spare=True)
    waits = running(spec, [pod(0)], used=[], state=JobState.WAITING, saved=saved)
    ended = pod(1, phase="Failed", trouble="Ended", message="code 2")
    status = TrainingJobStatus(desired=2, scaled_at=NOW, started_at=NOW, pod_failures=4)
    outcome = look(spec, replace(waits, trainers=(pod(0), ended)), status)
    assert outcome.status.phase is Phase.FAILED
    assert "step 70 was written to a pod's own folder alone" in outcome.notices[-1].message


def test_what_its_server_warns_of_is_told_once_and_stands_in_a_condition():
    spec = parsed(replicas=1)

    def warned(*warnings: str) -> Observed:
        seen = running(spec, [pod(0)], reason="stage 1 committed")
        assert seen.server is not None
        assert seen.server.job is not None
        job = replace(seen.server.job, warnings=warnings)
        return replace(seen, server=replace(seen.server, job=job))

    outcome = look(spec, warned("/data: no space left", "each trainer trains alone"))
    words = "warning: /data: no space left; each trainer trains alone"
    assert outcome.notices == (Notice("TrainingWarns", words, warning=True),)
    assert outcome.status.conditions[states.RUNNING].message == f"{words}; stage 1 committed"
    again = look(spec, warned("/data: no space left for 2"), outcome.status, NOW + 1)
    assert again.notices == ()
    well = look(spec, warned(), again.status, NOW + 2)
    assert well.status.conditions[states.RUNNING].message == "stage 1 committed"
    assert look(spec, warned("x"), well.status, NOW + 3).notices != ()


def test_every_decision_about_the_number_of_pods_is_told_with_its_reason():
    spec = parsed(replicas=3, maxReplicas=5)
    status = TrainingJobStatus(desired=5, scaled_at=0.0, started_at=0.0)
    outcome = look(spec, running(spec, [pod(index) for index in range(5)], most=5), status)
    assert Notice("Scaling", "from 5 to 3 pods: spec.replicas is 3") in outcome.notices


def test_a_job_does_not_get_more_pods_than_it_was_begun_with():
    seen = running(parsed(replicas=2), [pod(0), pod(1)])
    status = TrainingJobStatus(desired=1, scaled_at=NOW, started_at=NOW)
    outcome = look(parsed(replicas=4), seen, status)  # maxReplicas was never given
    assert (outcome.steps, outcome.status.desired) == ((), 2)
    assert "begun with at most 2: give maxReplicas" in outcome.notices[0].message
    has_all = look(parsed(replicas=2), seen).status
    scaled_up = reconcile("digits", 2, parsed(replicas=4), has_all, seen, NOW + 1)
    assert "stays with 2 pods: spec.replicas is 4, but" in scaled_up.notices[0].message
    again = reconcile("digits", 2, parsed(replicas=4), scaled_up.status, seen, NOW + 2)
    assert again.notices == (), "it is told once"


def scaled(replicas: int | None, reason: str = "there is room", **status: Any) -> TrainingJobStatus:
    given = None if replicas is None else Autoscale(replicas=replicas, reason=reason, since=NOW)
    return TrainingJobStatus(autoscale=given, **status)


def test_a_job_with_autoscale_waits_for_a_decision_with_its_server_and_without_pods():
    spec = parse(scaled_job(minReplicas=2, maxReplicas=4))
    outcome = look(spec, Observed(), scaled(None))
    assert outcome.steps == (Prepare(), MakeServer())
    assert outcome.notices == ()
    why = "waits: no room for its least, 2"
    view = ServerView(job=None, nodes={})
    seen = Observed(server_pod=server_pod(), server=view, prepared=True, budget=0)
    outcome = look(spec, seen, replace(outcome.status, autoscale=scaled(0, why).autoscale))
    assert outcome.steps == ()
    assert outcome.notices == (Notice("WaitsForRoom", why),)
    assert outcome.status.phase is Phase.PENDING
    assert outcome.status.started_at is None, "waiting does not count for its deadline"
    assert outcome.status.conditions[states.PODS_READY].message == why
    assert look(spec, seen, outcome.status).notices == (), "it is said once"
    status = replace(outcome.status, autoscale=scaled(2, "starts").autoscale)
    outcome = look(spec, seen, status)
    assert outcome.steps == (MakeTrainer(0), MakeTrainer(1))
    assert outcome.notices[0] == Notice("Scaling", "from 0 to 2 pods: starts")


def test_a_decision_is_followed_and_told_with_its_reason_and_pods_leave_where_it_says():
    spec = parse(scaled_job(minReplicas=1, maxReplicas=4))
    pods = [pod(index, node="mmnn"[index]) for index in range(4)]
    known = scaled(2, "others use m", desired=4, scaled_at=NOW, started_at=NOW)
    given = known.autoscale
    assert given is not None
    known = replace(known, autoscale=replace(given, nodes={"n": 2}))
    outcome = look(spec, running(spec, pods, most=4), known)
    assert CloseNodes((pods[0].node_id, pods[1].node_id)) in outcome.steps
    assert outcome.notices == (Notice("Scaling", "from 4 to 2 pods: others use m"),)
    known = replace(known, autoscale=replace(given, nodes={"m": 1, "n": 1}))
    outcome = look(spec, running(spec, pods, most=4), known)
    assert CloseNodes((pods[1].node_id, pods[3].node_id)) in outcome.steps


def test_a_suspended_job_with_autoscale_has_its_pods_again_when_they_are_decided_on():
    spec = parse(scaled_job(minReplicas=1, maxReplicas=4))
    paused = running(spec, [], state=JobState.PAUSED)
    known = scaled(0, "spec.suspend is true", desired=0, scaled_at=NOW, started_at=NOW)
    outcome = look(spec, paused, known)
    assert outcome.steps == ()
    assert outcome.status.phase is Phase.PENDING


def test_a_deadline_does_not_count_the_time_in_which_a_resumed_job_waits_for_room():
    spec = parse(scaled_job(minReplicas=1, maxReplicas=4, activeDeadlineSeconds=100))
    suspended = replace(spec, suspend=True)
    paused = running(spec, [], state=JobState.PAUSED)
    known = scaled(0, "spec.suspend is true", desired=0, scaled_at=NOW, started_at=NOW - 90)
    known = look(suspended, paused, known).status
    waits = look(spec, paused, known, NOW + 500)
    assert waits.notices[-1] == Notice("Resumed", "spec.suspend is false")
    again = look(suspended, paused, waits.status, NOW + 1000).status
    waits = look(spec, paused, look(spec, paused, again, NOW + 1500).status, NOW + 2000)
    assert waits.steps == (), "it has no pods"
    given = replace(waits.status, autoscale=scaled(1, "starts").autoscale)
    outcome = look(spec, paused, given, NOW + 2500)
    assert outcome.steps == (MakeTrainer(0),)
    assert (outcome.status.suspended_s, outcome.status.suspended_at) == (2500.0, None)
    trains = running(spec, [pod(0)], most=1)
    assert look(spec, trains, outcome.status, NOW + 2509).steps == ()
    assert look(spec, trains, outcome.status, NOW + 2510).steps == (StopJob(),)


def test_a_training_whose_spec_is_made_wrong_goes_on_and_is_looked_after_when_it_is_right_again():
    spec = parsed(replicas=2)
    status = look(spec, running(spec, [pod(0), pod(1)])).status
    why = "spec.template.spec.containers[trainer].command: missing"
    wrong = refuse("digits", 2, status, why, NOW + 1)
    assert (wrong.steps, wrong.notices) == ((), (Notice("InvalidSpec", why, warning=True),))
    assert not wrong.status.ended
    assert (wrong.status.phase, wrong.status.reason) == (Phase.RUNNING, why)
    assert wrong.status.conditions[states.SPEC_VALID].message == why
    again = refuse("digits", 2, wrong.status, why, NOW + 2)
    assert (again.notices, again.status) == ((), wrong.status), "it is said once"
    right = look(spec, running(spec, [pod(0), pod(1)]), again.status, NOW + 3)
    assert right.steps == ()
    assert right.status.holds(states.SPEC_VALID)


def test_a_template_with_other_gpus_than_the_training_was_begun_with_makes_no_pods():
    job = training_job(replicas=2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    begun = running(parse(job), [pod(0)])
    known = look(parse(job), begun).status
    container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    wrong = reconcile("digits", 2, parse(job), known, begun, NOW + 1)
    assert wrong.steps == ()
    assert not wrong.status.ended
    assert wrong.status.conditions[states.SPEC_VALID].message == (
        "spec.template: its pods have 1 trainer each, and the training was begun with 2; change "
        "that back, or make a new TrainingJob"
    )
    container["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    right = reconcile("digits", 3, parse(job), wrong.status, begun, NOW + 2)
    assert right.steps == (MakeTrainer(1),)
    assert right.status.holds(states.SPEC_VALID)


@pytest.mark.parametrize(("before", "after"), [("1", None), (None, "1")])
def test_a_template_that_loses_its_gpus_or_gets_some_while_the_job_trains_makes_no_pods(
    before, after
):
    words = {"1": "1 GPU", None: "no GPU"}
    begun = training_job(replicas=2)
    (container,) = begun["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": before} if before else {}}
    there = trainer_pod(begun, parse(begun), 0)
    there["metadata"]["uid"], there["status"] = "uid00000", {"phase": "Running"}
    seen = running(parse(begun), [pod_view(there)])
    known = look(parse(begun), seen).status
    container["resources"] = {"limits": {"nvidia.com/gpu": after} if after else {}}
    wrong = reconcile("digits", 2, parse(begun), known, seen, NOW + 1)
    assert wrong.steps == ()
    assert wrong.status.conditions[states.SPEC_VALID].message == (
        f"spec.template: its pods have {words[after]} each, and the training has pods with "
        f"{words[before]}; change that back, or make a new TrainingJob"
    )
    unused = replace(seen, trainers=(replace(seen.trainers[0], uid="uid-other"),))
    assert reconcile("digits", 2, parse(begun), known, unused, NOW + 1).steps != ()


def test_a_spec_that_can_never_run_is_the_end_of_a_new_job_and_changes_none_that_has_ended():
    spec = parsed(replicas=1)
    new = refuse("digits", 1, TrainingJobStatus(), "spec.template: missing", NOW)
    assert new.status.phase is Phase.FAILED
    ended = look(spec, running(spec, [], state=JobState.SUCCEEDED)).status
    outcome = refuse("digits", 2, ended, "spec.template: missing", NOW)
    assert (outcome.notices, outcome.status.phase) == ((), Phase.SUCCEEDED)
    assert not outcome.status.holds(states.FAILED)


def test_a_status_survives_being_written_and_read():
    spec = parsed(replicas=2)
    status = look(spec, running(spec, [pod(0), pod(1)])).status
    assert TrainingJobStatus.read(status.write()) == status
