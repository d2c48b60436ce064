"""Trainers that give no sign of life: what is said, what is counted, and what follows."""

import pytest

from job_server.api.wire import JobState, ReportKind
from tests.job_server.world import World, tell, trains, world

SAID = {"rank": 1, "reason": "no sign of life for 60 s", "hung_s": 60.0}


def hangs(made: World) -> World:
    made.rounds(200)  # what was counted as training
    tell(made, "pod_1_0", ReportKind.HUNG, 1, **SAID)
    return made


def test_a_hang_is_an_event_and_a_warning_that_name_rank_pod_and_node_until_it_is_over():
    made = hangs(trains(world()))
    (warning,) = made.status.warnings
    assert warning == "rank 1 (pod_1_0) on a hangs: no sign of life for 60 s"
    assert made.reasons[-1].endswith(warning)
    assert made.status.state is JobState.RUNNING
    tell(made, "pod_1_0", ReportKind.HUNG, 1, rank=1, reason="it has given a sign of life")
    assert made.status.warnings == ()
    assert any("goes on" in reason for reason in made.reasons)


def test_the_time_of_a_hang_is_counted_as_hung_from_its_beginning_and_the_account_adds_up():
    made = trains(world())
    made.rounds(200)
    before = made.status.account
    tell(made, "pod_1_0", ReportKind.HUNG, 1, **SAID)
    tell(made, "pod_1_0", ReportKind.HUNG, 1, **SAID)  # a launcher that attaches again repeats it
    made.pass_time(30)
    account = made.status.account
    assert account.hung_s == pytest.approx(90, abs=2)
    assert account.training_s == pytest.approx(before.training_s - 60, abs=2)
    assert account.total_s == pytest.approx(made.now - made.job.submitted_at)


def fail(made: World) -> None:
    killed = {"rank": 1, "code": -9, "hung_s": 600.0, "reason": "it was killed, as it hung"}
    tell(made, "pod_1_0", ReportKind.FAILED, 1, **killed)


def test_a_trainer_that_is_killed_for_its_hang_is_recovered_from_like_any_failure():
    made = hangs(trains(world()))
    fail(made)
    assert made.status.state is JobState.RECOVERING
    assert made.status.warnings == ()
    trains(made)
    assert made.job.budget.failures == 1


def test_with_the_policy_fail_the_job_ends_with_the_reason():
    made = hangs(trains(world(hang_policy="fail")))
    fail(made)
    made.run_until(JobState.FAILED)
    assert "as it hung" in made.status.reason


def test_orders_say_whether_launchers_may_kill_and_for_how_long_a_trainer_may_be_silent():
    made = trains(world(hang_policy="say"))
    orders = made.orders("pod_1_0")
    assert not orders.hang_kills
    assert orders.hang_limits == made.job.spec.hang_limits
    assert trains(world()).orders("pod_1_0").hang_kills


def test_a_pod_whose_launcher_hangs_while_its_client_answers_is_killed_and_the_job_goes_on():
    made = trains(world(total_steps=100_000))
    made.launcher("pod_1_0").hangs = True
    made.rounds(100)  # 50 s
    assert made.job.lineage.redone_steps == made.job.budget.failures == 0
    made.rounds(60)
    assert any("killing pod pod_1_0: its launcher has given no sign" in r for r in made.reasons)
    assert made.job.state is JobState.RUNNING
    assert made.job.budget.failures == 1


def test_with_the_policy_say_such_a_pod_is_left_alone():
    made = trains(world(total_steps=100_000, hang_policy="say"))
    made.launcher("pod_1_0").hangs = True
    made.rounds(200)
    assert not any("killing pod" in reason for reason in made.reasons)
