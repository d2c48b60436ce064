"""What a node does to its pods, as tables."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job_client.reconcile import (
    Action,
    KillPod,
    LocalPod,
    ReleasePod,
    StartPod,
    StopPod,
    plan_changes,
)
from job_server.api.wire import DesiredState, NodePod, PodPhase

KEY = ("job", "a")


def wanted(want: DesiredState, pod_id: str = "a", job_id: str = "job") -> NodePod:
    return NodePod(pod_id=pod_id, job_id=job_id, slots=(0,), want=want, grace_s=7.0)


def local(phase: PodPhase, *, pod_id: str = "a", killed: bool = False) -> LocalPod:
    return LocalPod(job_id="job", pod_id=pod_id, phase=phase, grace_s=9.0, killed=killed)


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


RUN, HOLD, KILL = DesiredState.RUN, DesiredState.HOLD, DesiredState.KILL
STARTING, RUNNING = PodPhase.STARTING, PodPhase.RUNNING
STOPPING, EXITED = PodPhase.STOPPING, PodPhase.EXITED


@pytest.mark.parametrize(
    ("phase", "want", "expected"),
    [
        (None, RUN, ["StartPod"]),
        (None, HOLD, []),
        (None, KILL, []),
        (STARTING, RUN, []),
        (STARTING, HOLD, ["StopPod"]),
        (STARTING, KILL, ["KillPod"]),
        (STARTING, None, ["StopPod"]),
        (RUNNING, RUN, []),
        (RUNNING, HOLD, ["StopPod"]),
        (RUNNING, KILL, ["KillPod"]),
        (RUNNING, None, ["StopPod"]),
        (STOPPING, RUN, []),
        (STOPPING, HOLD, []),
        (STOPPING, KILL, ["KillPod"]),
        (STOPPING, None, []),
        (EXITED, RUN, []),
        (EXITED, HOLD, []),
        (EXITED, KILL, []),
        (EXITED, None, ["ReleasePod"]),
    ],
)
def test_what_is_done_to_a_pod(phase, want, expected):
    pods = [] if phase is None else [local(phase)]
    plan = [] if want is None else [wanted(want)]
    assert kinds(plan_changes(pods, plan)) == expected


def test_a_pod_is_killed_once():
    assert plan_changes([local(STOPPING, killed=True)], [wanted(KILL)]) == []


def test_a_held_pod_gets_the_plans_grace_and_a_forgotten_one_its_own():
    assert plan_changes([local(RUNNING)], [wanted(HOLD)]) == [
        StopPod(KEY, 7.0, "the plan wants only its snapshot held")
    ]
    assert plan_changes([local(RUNNING)], []) == [StopPod(KEY, 9.0, "not in the plan")]


def test_ends_come_before_starts_so_that_slots_are_freed_first():
    pods = [local(EXITED, pod_id="x"), local(RUNNING, pod_id="y"), local(RUNNING, pod_id="z")]
    plan = [wanted(RUN, "new"), wanted(KILL, "z")]
    assert kinds(plan_changes(pods, plan)) == ["KillPod", "StopPod", "ReleasePod", "StartPod"]


def test_a_pod_that_ran_elsewhere_or_before_is_not_started_a_second_time():
    assert plan_changes([], [replace(wanted(RUN), started=True)]) == []


def test_pods_of_two_jobs_may_have_the_same_id():
    plan = [wanted(RUN, "a", "job"), wanted(RUN, "a", "other")]
    assert plan_changes([local(RUNNING)], plan) == [StartPod(plan[1])]


def test_a_pod_of_an_earlier_job_of_the_same_id_makes_way_for_the_one_that_is_wanted():
    plan = [replace(wanted(RUN), submitted_at=2.0)]
    for phase, expected in (
        (RUNNING, ["StopPod"]),
        (STOPPING, []),
        (EXITED, ["ReleasePod"]),
    ):
        assert kinds(plan_changes([replace(local(phase), submitted_at=1.0)], plan)) == expected
    for known in (0.0, 2.0):  # 0: its client was of the version before
        assert plan_changes([replace(local(RUNNING), submitted_at=known)], plan) == []


@pytest.mark.parametrize("phase", [STARTING, RUNNING, STOPPING])
@pytest.mark.parametrize("want", [None, HOLD, KILL])
def test_a_pod_starts_when_who_leaves_its_slot_has_exited(phase, want):
    plan = [wanted(RUN, "new"), *([] if want is None else [wanted(want, "old")])]
    leaver = replace(local(phase, pod_id="old"), slots=(0, 1))
    assert "StartPod" not in kinds(plan_changes([leaver], plan))
    elsewhere = replace(leaver, slots=(1,))
    assert "StartPod" in kinds(plan_changes([elsewhere], plan))
    gone = replace(leaver, phase=EXITED)
    assert "StartPod" in kinds(plan_changes([gone], plan))


phases = st.sampled_from(list(PodPhase))
states = st.dictionaries(st.sampled_from("abcdef"), phases)
plans = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(list(DesiredState)))


@given(states, plans)
def test_carrying_the_actions_out_comes_to_rest_where_the_plan_is(current, plan):
    """Level-triggered: acting on each pass until nothing is left to do always ends, and well."""
    used_up = {pod_id for pod_id, phase in current.items() if phase is not PodPhase.RUNNING}
    pods = {pod_id: local(phase, pod_id=pod_id) for pod_id, phase in current.items()}
    nodes = [wanted(want, pod_id) for pod_id, want in plan.items()]
    for _ in range(5):
        for action in plan_changes(pods.values(), nodes):
            match action:
                case StartPod(pod):
                    assert pod.pod_id not in pods
                    pods[pod.pod_id] = local(RUNNING, pod_id=pod.pod_id)
                case StopPod((_, pod_id)) | KillPod((_, pod_id)):
                    pods[pod_id] = local(EXITED, pod_id=pod_id, killed=True)
                case ReleasePod((_, pod_id)):
                    del pods[pod_id]
        for pod_id, state in pods.items():  # what is under way comes to its end
            if state.phase is STOPPING:
                pods[pod_id] = local(EXITED, pod_id=pod_id, killed=True)
    assert plan_changes(pods.values(), nodes) == []
    assert set(pods) <= set(plan)
    running = {pod_id for pod_id, pod in pods.items() if pod.phase is RUNNING}
    must_run = {pod_id for pod_id, want in plan.items() if want is RUN}
    assert running <= must_run
    assert must_run - used_up <= running
