"""What is done about a failure: by which rule it is judged, and what then becomes of the job."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api.failure_policy import HANG, PEER_LOST, FailedProcess, FailureRule, Then
from job_server.api.wire import (
    JobSpec,
    JobState,
    Order,
    PodPhase,
    PodState,
    RaisedError,
    ReportKind,
    TrainerError,
    Way,
)
from job_server.cluster.quarantine import is_grave
from job_server.jobs.events import NodeReported
from job_server.training import views
from job_server.training.core.changes import choose_way
from job_server.training.core.faults import Failure, judge, policy_of
from job_server.training.core.job import Avoided
from tests.job_server.world import World, records, tell, trains, world


def failure(**known: Any) -> Failure:
    return Failure(**{"of": FailedProcess.TRAINER, "code": 1, **known})


def error(*types: str, text: str = "", cause: RaisedError | None = None) -> TrainerError:
    raised = RaisedError(types=(*types, "Exception"), text=text, at="net.py:7")
    return TrainerError(chain=(raised,) if cause is None else (raised, cause), step=3)


NO_THREADS = (
    "no more threads or processes may be made, as by its container's pids limit or `ulimit -u`"
)
WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, ...)"


@pytest.mark.parametrize(
    ("known", "then", "name"),
    [
        (
            {"code": -9, "events": ("oom_kill",)},
            Then.RESTART,
            "out of memory, killed by the kernel",
        ),
        ({"code": -9}, Then.RESTART, ""),
        ({"code": -11}, Then.RESTART, ""),
        ({"code": 3}, Then.RESTART, ""),
        ({"code": None}, Then.RESTART, ""),
        ({"code": 78}, Then.FAIL, "it asks not to be started again"),
        ({"code": 78, "of": FailedProcess.POD}, Then.FAIL, "it asks not to be started again"),
        ({"code": 2}, Then.FAIL, "wrong arguments"),
        ({"code": 2, "of": FailedProcess.POD}, Then.FAIL_IF_REPEATED, None),
        ({"code": -15, "of": FailedProcess.POD}, Then.PREEMPTED, ""),
        ({"code": 143, "of": FailedProcess.POD}, Then.PREEMPTED, ""),
        ({"code": -15}, Then.RESTART, ""),
        ({"code": -9, "events": (HANG,)}, Then.RESTART, "hung"),
        ({"code": -6, "events": (PEER_LOST,)}, Then.RESTART, "lost a peer"),
        ({"code": -6, "events": (PEER_LOST,), "lines": (WATCHDOG,)}, Then.RESTART, "NCCL timeout"),
        ({"code": 1, "events": ("xid_79",)}, Then.QUARANTINE, "its GPU has failed"),
        ({"code": 1, "events": ("xid_13",)}, Then.RESTART, ""),
        ({"code": 1, "events": ("gpu_lost",)}, Then.QUARANTINE, "its GPU has failed"),
        (
            {"error": error("RuntimeError", text="uncorrectable ECC error encountered")},
            Then.RESTART_ELSEWHERE,
            "ECC error of the GPU",
        ),
        (
            {"error": error("torch.OutOfMemoryError", "RuntimeError", text="CUDA out of memory.")},
            Then.RESTART,
            "CUDA out of memory",
        ),
        (
            {
                "error": error(
                    "MemoryError", text="(ResourceExhausted) Out of memory error on GPU 0"
                )
            },
            Then.RESTART,
            "CUDA out of memory",
        ),
        (
            {"error": error("RuntimeError", text="can't start new thread")},
            Then.RESTART,
            NO_THREADS,
        ),
        (
            {"code": -6, "lines": ("  what():  Resource temporarily unavailable",)},
            Then.RESTART,
            NO_THREADS,
        ),
        ({"error": error("ValueError", text="odd")}, Then.FAIL_IF_REPEATED, ""),
    ],
)
def test_a_failure_is_told_apart_by_the_rules_of_edl(known, then, name):
    rule = judge((), failure(**known))
    assert rule.then is then
    assert name is None or rule.name == name


OWN_LOG = FailureRule(log=("disk .* gone",), then=Then.RESTART_ELSEWHERE)


@pytest.mark.parametrize(
    ("own", "known", "then"),
    [
        (FailureRule(exit_code=(3,), then=Then.FAIL), {"code": 3}, Then.FAIL),
        (FailureRule(exit_code=(3,), then=Then.FAIL), {"code": 4}, Then.RESTART),
        (FailureRule(exit_code=(78,), then=Then.IGNORE), {"code": 78}, Then.IGNORE),
        (FailureRule(signal=("SIGSEGV",), then=Then.FAIL), {"code": -11}, Then.FAIL),
        (FailureRule(signal=("SIGSEGV",), then=Then.FAIL), {"code": 11}, Then.RESTART),
        (FailureRule(of=FailedProcess.POD, then=Then.FAIL), {"code": 3}, Then.RESTART),
        (OWN_LOG, {"code": 3, "lines": ("disk sdb gone", "bye")}, Then.RESTART_ELSEWHERE),
        (OWN_LOG, {"error": error("ValueError"), "lines": ("disk sdb gone",)}, OWN_LOG.then),
        (OWN_LOG, {"error": error("ValueError", text="disk sdb gone")}, Then.FAIL_IF_REPEATED),
        (OWN_LOG, {"code": 3, "lines": ("disk sdb gone", *["more"] * 20)}, Then.RESTART),
        (
            FailureRule(exception=("ValueError",), at=("net.py:*",), then=Then.FAIL),
            {"error": error("ValueError")},
            Then.FAIL,
        ),
        (
            FailureRule(exception=("ValueError",), at=("data.py:*",), then=Then.FAIL),
            {"error": error("ValueError")},
            Then.FAIL_IF_REPEATED,
        ),
        (FailureRule(exception=("*",), then=Then.FAIL), {"code": 3}, Then.RESTART),
        (FailureRule(event=("xid_*",), then=Then.IGNORE), {"events": ("xid_13",)}, Then.IGNORE),
        (FailureRule(then=Then.FAIL), {"code": -9}, Then.FAIL),
    ],
)
def test_the_rules_of_a_job_come_before_those_of_edl(own, known, then):
    assert judge((own,), failure(**known)).then is then


def test_where_a_cause_may_pass_the_error_may_unless_the_jobs_own_rules_know_better():
    passing = RaisedError(types=("ConnectionError", "OSError"))
    mine = error("MyError", cause=passing)
    assert judge((), failure(error=mine)).then is Then.RESTART
    fails = FailureRule(exception=("MyError",), then=Then.FAIL)
    assert judge((fails,), failure(error=mine)).then is Then.FAIL
    of_cause = FailureRule(exception=("ConnectionError",), then=Then.IGNORE)
    assert judge((fails, of_cause), failure(error=mine)).then is Then.IGNORE


def test_a_hang_fails_where_its_policy_says_so_unless_a_rule_is_more_exact():
    fails = JobSpec(job_id="a", hang_policy="fail")
    hung = failure(code=-9, events=(HANG,))
    assert judge(policy_of(fails), hung).then is Then.FAIL
    ignored = replace(fails, failure_policy=(FailureRule(event=(HANG,), then=Then.IGNORE),))
    assert judge(policy_of(ignored), hung).then is Then.IGNORE


# --- in a job -------------------------------------------------------------------------------------


def fails(made: World, code: int, *, rank: int = 1, **more: Any) -> None:
    stage = made.active
    pod_id = stage.pod_ids[rank]
    made.kill_trainer(made.pod(pod_id), made.launcher(pod_id), rank=rank)
    tell(made, pod_id, ReportKind.FAILED, stage.stage, rank=rank, code=code, **more)


def where(made: World) -> list[tuple[str, tuple[int, ...]]]:
    return [(pod.node_id, pod.slots) for pod in views.running_pods(made.job)]


def rule(then: Then, code: int = 3) -> tuple[FailureRule, ...]:
    return (FailureRule(exit_code=(code,), then=then, name="a test"),)


def test_exit_code_78_ends_the_job_at_once():
    made = trains(world())
    fails(made, 78, reason="no license")
    made.run_until(JobState.FAILED)
    assert made.job.reason.startswith(
        "FAILED: exited with 78: no license; rank 1 (pod_1_0), not tried again: it asks not to be "
        "started again"
    )
    assert len(records(made)) == 1


def test_restart_elsewhere_takes_a_free_slot_and_stays_where_there_is_none():
    made = trains(world(slots=3, nodes=1, failure_policy=rule(Then.RESTART_ELSEWHERE)))
    assert where(made) == [("a", (0,)), ("a", (1,))]
    fails(made, 3)
    trains(made)
    assert where(made) == [("a", (0,)), ("a", (2,))]
    assert made.job.budget.failures == 1
    fails(made, 3)
    trains(made)
    assert sorted(where(made)) == [("a", (0,)), ("a", (2,))]  # slot 1 is no better


def test_slots_that_were_avoided_are_used_again_after_an_hour():
    made = trains(world(slots=3, nodes=1, failure_policy=rule(Then.RESTART_ELSEWHERE)))
    fails(made, 3)
    trains(made)
    made.now += 3600
    for sim in made.nodes.values():
        sim.seen_at = made.now
    made.rounds(4)
    made.run_until(JobState.RUNNING)
    fails(made, 3)
    trains(made)
    assert where(made) == [("a", (0,)), ("a", (1,))]


def test_quarantine_avoids_the_slot_and_names_it_for_all_jobs():
    made = trains(world(slots=3, nodes=1, failure_policy=rule(Then.QUARANTINE)))
    fails(made, 3)
    trains(made)
    assert where(made) == [("a", (0,)), ("a", (2,))]
    (bad,) = made.job.bad_slots
    assert (bad.node_id, bad.slot, bad.name) == ("a", 1, "a test")


def test_what_is_ignored_counts_in_no_budget_but_not_for_ever():
    made = trains(world(failure_policy=rule(Then.IGNORE), max_failures=0))
    fails(made, 3)
    trains(made)
    assert (made.job.budget.failures, made.job.budget.preemptions) == (0, 0)
    for _ in range(4):
        made.job = replace(made.job, budget=replace(made.job.budget, step_at_failure=10_000))
        fails(made, 3)
        made.rounds(60)
        if made.job.state is JobState.FAILED:
            break
    made.run_until(JobState.FAILED)
    assert "restarts in a row brought no new step (max_restarts_without_progress)" in (
        made.job.reason
    )


def test_a_trainer_may_count_as_preempted():
    made = trains(world(failure_policy=rule(Then.PREEMPTED), max_failures=0))
    fails(made, 3)
    trains(made)
    assert (made.job.budget.failures, made.job.budget.preemptions) == (0, 1)


def test_what_a_rule_says_of_a_victim_gives_way_to_the_cause():
    policy = (FailureRule(signal=("SIGABRT",), then=Then.FAIL),)
    made = trains(world(failure_policy=policy))
    stage = made.active.stage
    tell(made, "pod_0_0", ReportKind.FAILED, stage, rank=0, code=-6, peer_lost=True)
    fails(made, -9)
    tell(made, "pod_0_0", ReportKind.FAILED, stage, rank=0, code=-6, peer_lost=True)
    trains(made)
    assert made.job.budget.failures == 1


def test_the_status_names_what_was_told_apart():
    made = trains(world())
    fails(made, -9, events=("oom_kill",), reason="oom_kill of its control group has risen to 1")
    trains(made)
    assert made.status.error is not None
    assert made.status.error.text == (
        "rank 1 (pod_1_0) was killed by SIGKILL (out of memory, killed by the kernel): oom_kill "
        "of its control group has risen to 1"
    )


@pytest.mark.parametrize("committed", [False, True])
def test_a_trainer_killed_for_lack_of_memory_beside_others_is_the_last_one(committed):
    made = trains(world(nodes=1, slots=4, max_pods=4, overlap="auto"))
    fails(made, -9, events=("oom_kill",))  # alone
    trains(made)
    assert choose_way(made.job, made.cluster) is Way.REPLACE
    made.resize(3)
    made.run_to(Order.PREPARE)
    while committed and made.job.retiring is None:
        made.round(0.2)
    assert (made.job.preparing or made.active).way is Way.REPLACE
    fails(made, -9, events=("oom_kill",))
    trains(made)
    assert any("no memory for a second set of trainers" in each for each in made.reasons)
    assert len(made.active.members) == 3
    made.resize(2)
    made.run_to(Order.PREPARE)
    assert made.job.preparing is not None
    assert made.job.preparing.way is Way.DRAIN


def test_what_a_launcher_tells_again_is_done_once():
    made = trains(world(slots=3, nodes=1, failure_policy=rule(Then.QUARANTINE)))
    stage = made.active.stage
    for _ in range(2):
        tell(made, "pod_1_0", ReportKind.FAILED, stage, rank=1, code=3, reason="odd")
    assert len(made.job.bad_slots) == len(made.job.avoided) == 1
    assert sum("others are used" in reason for reason in made.reasons) == 1


def test_an_error_that_is_ignored_between_two_others_hides_neither():
    made = trains(world(failure_policy=rule(Then.IGNORE)))
    for _ in range(2):
        fails(made, 1, rank=0, error=error("ValueError", text="odd"))
        made.rounds(20)
        if made.job.state is JobState.FAILED:
            break
        trains(made)
        fails(made, 3)
        trains(made)
    made.run_until(JobState.FAILED)
    assert "it has come twice at step 3" in made.job.reason


def test_the_first_error_may_be_that_of_a_script_which_never_reached_training():
    made = world(pods=1)
    while not made.nodes["a"].pods:
        made.round()
    (sim,) = made.nodes["a"].pods.values()
    sim.end(code=1)
    lines = ("starting", "Traceback (most recent call last):", "  File 'x.py', line 1", "KeyError")
    ended = PodState(
        pod_id=sim.pod_id, job_id="job", phase=PodPhase.EXITED, exit_code=1, last_lines=lines
    )
    made.send(NodeReported("a", (ended,)))
    assert made.status.error is not None
    assert made.status.error.text.startswith(f"pod {sim.pod_id} exited with 1; last lines: ")
    assert made.status.error.traceback.splitlines() == list(lines[1:])


def test_the_node_that_has_the_state_is_used_although_something_failed_there():
    policy = rule(Then.RESTART_ELSEWHERE)
    made = trains(world(slots=1, nodes=2, pods=1, failure_policy=policy))
    made.has_path = False
    made.pause()
    made.run_until(JobState.PAUSED)
    assert made.job.ending.saved is not None
    assert (made.job.ending.saved.node_id, made.job.ending.saved.spare) == ("a", True)
    avoided = Avoided(node_id="a", slots=(0,), ends_at=made.now + 3600, why="a test")
    made.job = replace(made.job, avoided=(avoided,))
    made.resume()
    trains(made)
    assert where(made) == [("a", (0,))]


def test_the_table_and_the_server_put_a_slot_in_quarantine_for_the_same_faults():
    names = [
        *("gpu_lost", "ecc_uncorrected", "rows_remap_failed", "rows_remap_pending"),
        *("pages_pending", "recovery_reset", "recovery_reboot", "recovery_drain_reset"),
        *("nvml_hangs", *(f"xid_{number}" for number in range(1, 160))),
    ]
    verdicts = {name: judge((), failure(events=(name,))).then is Then.QUARANTINE for name in names}
    assert verdicts == {name: is_grave(name) for name in names}


def test_what_victims_alone_have_written_is_named():
    made = trains(world())
    for rank, pod_id in enumerate(("pod_0_0", "pod_1_0")):
        said = {"code": -6, "peer_lost": True, "last_lines": (WATCHDOG,)}
        tell(made, pod_id, ReportKind.FAILED, 1, rank=rank, **said)
    trains(made)
    assert made.status.error is not None
    expected = "rank 0 (pod_0_0) died of SIGABRT when it lost a peer (NCCL timeout)"
    assert made.status.error.text == expected


@pytest.mark.parametrize("least", [1, 3])
def test_a_job_has_fewer_pods_where_memory_has_no_room_for_all_of_them(least):
    made = trains(world(nodes=2, slots=2, max_pods=4, min_pods=least, pods=3, overlap="off"))
    second = [pod.pod_id for pod in made.job.pods if pod.site.node_id == "a"][-1]
    oom = {"code": -9, "events": ("oom_kill",)}
    tell(made, second, ReportKind.FAILED, made.active.stage, rank=1, **oom)
    made.run_to(Order.START)
    assert made.job.preparing is not None
    assert len(made.job.preparing.members) == 3  # once says nothing: another program took memory
    tell(made, second, ReportKind.FAILED, made.job.preparing.stage, rank=1, **oom)
    trains(made)
    assert len(made.active.members) == max(2, least) == made.job.target
    if least == 3:
        return
    assert sum(member.pod.node_id == "a" for member in made.active.members) == 1
    assert any("no memory on node a for 2 pods" in each for each in made.reasons)
    made.rounds(60)
    assert len(made.active.members) == 2  # it does not grow into the same trouble
    made.resize(3)
    while len(made.active.members) < 3:
        made.round()


def killed_for_memory(made: World, starts: int, *, fits: int) -> None:
    """Let time pass; the kernel kills a trainer of node a in so many stages of more pods."""
    killed: set[int] = set()
    for _ in range(100):
        made.round(0.2)
        stage = made.job.active
        if stage is None or not stage.committed or len(stage.members) <= fits:
            continue
        if stage.stage not in killed and len(killed) < starts:
            killed.add(stage.stage)
            pod = next(m.pod for m in reversed(stage.members) if m.pod.node_id == "a")
            oom = {"rank": pod.ranks[0], "code": -9, "events": ("oom_kill",)}
            tell(made, pod.pod_id, ReportKind.FAILED, stage.stage, attempt=stage.attempt, **oom)
    assert len(killed) == starts, made.reasons[-20:]


def test_a_job_that_grew_far_beyond_its_memory_goes_on_with_what_there_is_room_for():
    made = trains(world(nodes=1, slots=8, max_pods=8, pods=2))
    made.resize(8)
    killed_for_memory(made, 7, fits=2)
    trains(made)
    assert len(made.active.members) == 2 == made.job.target


def test_the_only_pod_of_the_node_that_has_the_state_stays_where_there_is_no_memory():
    """A start without it would wait for a place there, which it has just left."""
    made = trains(world(nodes=2, slots=1, pods=1))
    made.has_path = False
    made.pause()
    made.run_until(JobState.PAUSED)
    made.resize(2)
    made.resume()
    killed_for_memory(made, 2, fits=1)
    trains(made)
    assert where(made)[0] == ("a", (0,)), made.reasons[-10:]
