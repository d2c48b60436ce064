"""No pause and no end of a job lets its newest state go, unless somebody wants that."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.wire import JobState, Order, PodPhase, PodStagePhase, ReportKind, StagePlan
from job_server.jobs.events import NodeReported, PauseAsked, StopAsked, Tick
from job_server.training import views
from job_server.training.core.job import HaltPhase
from job_server.training.reports.launcher_reports import ELSEWHERE
from pod_runtime.trainer.errors import ElsewhereError
from tests.job_server.world import SimPod, World, node, records, tell, trains, world

PAUSED, STOPPED, FAILED = JobState.PAUSED, JobState.STOPPED, JobState.FAILED


def crash(made: World, count: int = 1) -> None:
    """Kill a trainer of each of the next stages, as soon as it trains."""
    for _ in range(count):
        made.run_until(JobState.RUNNING)
        made.crash()
        made.round()


def saved_step(made: World) -> int:
    saved = made.job.ending.saved
    assert saved is not None
    return saved.step


def newest(made: World) -> int:
    held = [pod.snapshot for sim in made.nodes.values() for pod in sim.pods.values()]
    return max(ref.step for ref in held if ref is not None)


def ahead(made: World) -> World:
    """Train until memory holds a newer state than any checkpoint."""
    trains(made)
    while newest(made) <= made.durable:
        made.round()
    return made


def saving(made: World) -> None:
    for _ in range(40):
        if made.job.halt is not None and made.job.halt.phase is HaltPhase.SAVE:
            return
        made.round(0.2)
    raise AssertionError(made.reasons)


def end_saved(made: World, *, order: int, step: int) -> None:
    """Let the pods of node a end by SIGTERM, their state written to its run folder."""
    said = wire.SaveState(
        id=order,
        phase=wire.SavePhase.WRITTEN,
        stage=1,
        step=step,
        path="/a/run/checkpoint",
        spare=True,
    )
    gone = wire.PodState(
        pod_id="", job_id="job", phase=PodPhase.EXITED, signal=15, save=said, holds=False
    )
    states = tuple(replace(gone, pod_id=pod_id) for pod_id in made.nodes["a"].pods)
    made.in_run_folders.add(("a", 1, step))
    made.nodes["a"].pods.clear()
    made.send(NodeReported("a", states))


def resumes_at(made: World, step: int) -> None:
    made.resume()
    trains(made)
    assert records(made)[-1].first_step == step + 1


def test_checkpoints_that_fail_while_it_trains_are_a_warning_until_one_is_written():
    made = trains(world())

    def say(error: str | None) -> None:
        step = made.job.progress.step
        tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, checkpoint_error=error)

    def warnings() -> list[str]:
        return list(made.status.warnings)

    say(None)
    assert warnings() == []
    say("checkpoint of step 7 failed: the disk is full")
    say("checkpoint of step 9 failed: the disk is full")
    say(None)
    assert warnings() == ["checkpoint of step 9 failed: the disk is full"]
    assert sum("the disk is full" in text for text in made.reasons) == 1
    say("")
    assert warnings() == []
    assert made.reasons[-1].endswith("its state is written again")
    say("checkpoint of step 11 failed: the disk is full")
    made.pause()
    made.run_until(PAUSED)
    assert warnings() == []


def test_a_pause_while_recovering_writes_what_the_shims_hold():
    made = ahead(world())
    crash(made)
    assert made.job.state is JobState.RECOVERING
    step = newest(made)
    made.pause()
    made.run_until(PAUSED)
    assert made.durable == step
    assert (
        f"step {step} is in /shared/checkpoint" in made.status.reason
        or made.job.ending.saved is not None
    )
    resumes_at(made, step)


def test_a_trainer_that_dies_in_the_cut_of_a_pause_costs_no_step_that_is_in_memory():
    made = ahead(world())
    made.pause()
    made.crash()
    step = newest(made)
    made.run_until(PAUSED)
    assert made.job.budget.failures == 0
    resumes_at(made, step)


def test_a_trainer_that_dies_while_its_state_is_written_costs_nothing():
    made = trains(world())
    made.save_rounds = 20
    made.pause()
    saving(made)
    step = made.job.progress.step
    made.crash()
    made.run_until(PAUSED)
    resumes_at(made, step)


@pytest.mark.parametrize("asked", [PauseAsked(), StopAsked()])
def test_a_checkpoint_is_waited_for_as_long_as_its_bytes_grow(asked):
    made = trains(world(prepare_timeout_s=10.0))
    made.save_rounds = 200
    made.send(asked)
    made.rounds(120)  # a minute
    assert made.job.state in (JobState.PAUSING, JobState.STOPPING)
    status = made.status
    assert status.saving is not None
    assert 50 < status.saving.written_bytes < status.saving.total_bytes == 200
    made.run_until(PAUSED, STOPPED)
    assert made.durable == made.job.progress.step


def test_a_pause_without_a_checkpoint_path_goes_to_a_run_folder_and_is_resumed_there():
    made = world(nodes=3, slots=1, max_pods=1, pods=1)
    made.has_path = False
    trains(made)
    made.pause()
    made.run_until(PAUSED)
    step = made.job.progress.step
    assert made.status.reason == f"paused; step {step} is in /a/run/checkpoint"
    made.cut_off("a")
    made.rounds(20)
    made.resume()
    made.rounds(10)
    there = f"step {step} is on node a, in /a/run/checkpoint, and that node "
    assert made.status.reason == (
        f"{there}does not answer; `edl resize job 1 --assume_dead` goes on without that state"
    )
    made.reconnect("a")
    trains(made)
    assert records(made)[-1].first_step == step + 1
    assert [pod.node_id for pod in views.running_pods(made.job)] == ["a"]


@pytest.mark.parametrize("then", ["back", "dead"])
def test_a_start_waits_for_the_node_that_wrote_the_state_where_others_do_not_see_it(then):
    made = trains(world(nodes=2, slots=1, max_pods=1, pods=1))
    made.shares_path = False
    made.client_leaves(made.nodes["b"])
    made.client_leaves(made.nodes["a"])
    made.rounds(20)
    step = saved_step(made)
    made.power_on(made.nodes["b"])  # the first to be there in the morning
    made.rounds(40)
    assert made.status.reason.startswith(f"step {step} is on node a, in /shared/checkpoint, and ")
    assert (made.status.failures, made.status.error) == (0, None)
    if then == "dead":
        made.resize(1, assume_dead=True)
    else:
        made.power_on(made.nodes["a"])
    trains(made)
    if then != "dead":
        assert (records(made)[-1].first_step or 0) > step
    home = "b" if then == "dead" else "a"
    assert [pod.node_id for pod in views.running_pods(made.job)] == [home]


def test_a_start_waits_for_the_state_where_the_trainers_that_lost_a_peer_by_it_are_heard_first():
    made = trains(world(nodes=3, slots=1, min_pods=2, max_pods=2, pods=2))
    made.shares_path = False
    for name in "cba":
        made.client_leaves(made.nodes[name])
    made.rounds(20)
    step = saved_step(made)
    say, starts = made.tell, set[int]()

    def tell_of_peer_first(pod: SimPod, plan: StagePlan, kind: ReportKind, **more: Any) -> None:
        if "error" not in more:
            say(pod, plan, kind, **more)
        elif plan.stage not in starts:
            starts.add(plan.stage)
            victim, culprit = (each.pod_id for each in plan.pods)
            tell(made, victim, kind, plan.stage, code=75, peer_lost=True)
            tell(made, culprit, kind, plan.stage, code=1, **more)

    made.tell = tell_of_peer_first  # type: ignore[method-assign]
    made.power_on(made.nodes["b"])
    made.power_on(made.nodes["c"])
    made.rounds(40)
    assert len(starts) == 1, made.reasons[-10:]
    assert made.status.reason.startswith(f"step {step} is on node a, in /shared/checkpoint, and ")


def test_a_start_waits_for_the_state_where_the_script_raises_an_error_of_its_own_from_that():
    made = trains(world(nodes=2, slots=1, max_pods=1, pods=1))
    made.shares_path = False
    made.client_leaves(made.nodes["b"])
    made.client_leaves(made.nodes["a"])
    made.rounds(20)
    own, say = wire.RaisedError(types=("RuntimeError", "Exception"), text="main failed"), made.tell

    def tell_of_both(*args: Any, error: wire.TrainerError | None = None, **more: Any) -> None:
        chain = () if error is None else (own, *error.chain)
        say(*args, error=wire.TrainerError(chain=chain) if chain else None, **more)

    made.tell = tell_of_both  # type: ignore[method-assign]
    made.power_on(made.nodes["b"])
    made.rounds(40)
    assert made.status.reason.startswith("step ")
    assert made.status.failures == 0


def test_a_start_looks_for_the_state_on_other_nodes_as_they_may_share_the_folder():
    made = trains(world(nodes=2, slots=1, max_pods=1, pods=1))
    made.client_leaves(made.nodes["b"])
    made.client_leaves(made.nodes["a"])
    made.rounds(20)
    step = saved_step(made)
    made.power_on(made.nodes["b"])
    trains(made)
    assert (records(made)[-1].first_step or 0) > step


def test_the_trainers_error_by_which_a_start_waits_has_the_name_that_the_server_knows():
    assert f"{ElsewhereError.__module__}.{ElsewhereError.__qualname__}" == ELSEWHERE


def test_a_pause_that_can_be_written_nowhere_is_called_off_and_the_trainers_go_on():
    made = trains(world())
    made.full = {"path", "a", "b"}
    made.pause()
    made.run_until(JobState.RUNNING)
    assert "not paused: the state of step " in made.status.reason
    assert made.status.reason.endswith(
        "cannot be written: a: No space left on device; the job goes on"
    )
    before = made.job.progress.step
    made.rounds(5)
    assert made.job.progress.step > before
    assert len(records(made)) == 1
    made.full = set()
    made.pause()
    made.run_until(PAUSED)


def test_a_pause_while_recovering_that_can_be_written_nowhere_lets_the_recovery_go_on():
    made = trains(world())
    crash(made)
    made.full = {"path", "a", "b"}
    made.pause()
    for _ in range(40):
        made.round()
    assert made.job.state is JobState.RUNNING, made.reasons
    assert any("not paused" in line for line in made.reasons)


def test_another_node_writes_to_its_run_folder_where_the_first_cannot():
    made = trains(world(pods=4, nodes=2))
    made.full = {"a"}
    made.pause()
    made.run_until(PAUSED)
    step = made.job.progress.step
    assert made.job.ending.saved == wire.Saved(
        stage=1, step=step, path="/b/run/checkpoint", node_id="b", spare=True
    )
    resumes_at(made, step)


def test_a_writer_from_which_no_byte_comes_is_given_up():
    made = trains(world())
    made.stuck = True
    made.pause()
    made.rounds(30)
    assert made.status.reason.startswith("node a writes the state of step ")
    made.run_until(JobState.RUNNING)
    assert "not paused" in "".join(made.reasons)
    assert "nothing was written for 60 s" in "".join(made.reasons)


def test_a_job_that_fails_by_its_budgets_writes_what_is_in_memory_first():
    made = ahead(world(max_failures=0))
    crash(made)
    step = newest(made)
    made.run_until(FAILED)
    assert made.durable == step
    assert "max_failures" in made.status.reason
    made.rounds(4)
    assert not made.job.pods


@pytest.mark.parametrize("ended_by", ["room", "time", "discard"])
def test_a_failed_state_that_cannot_be_written_stays_in_memory_for_a_while(ended_by):
    made = ahead(world(max_failures=0, keep_failed_s=100.0))
    made.full = {"path", "a", "b"}
    crash(made)
    step = newest(made)
    made.rounds(60)
    assert made.job.state is JobState.STOPPING
    assert f"the state of step {step} is kept in memory for 1 min 40 s" in made.status.reason
    assert "No space left on device" in made.status.reason
    assert "`edl stop job --discard` gives it up" in made.status.reason
    assert not views.slots_held(made.job).get("a"), "others may have the slots"
    assert newest(made) == step
    if ended_by == "room":
        made.full = set()
        made.rounds(30)
        assert made.durable == step
    elif ended_by == "time":
        made.rounds(200)
        assert f"step {made.job.progress.step} is lost" in "".join(made.reasons)
    else:
        made.stop(discard=True)
        made.rounds(10)
        assert f"step {made.job.progress.step} is lost" in "".join(made.reasons)
    assert made.job.state is FAILED, made.reasons
    assert "max_failures" in made.status.reason
    made.rounds(4)
    assert not made.job.pods


def test_a_stop_is_never_refused_and_discards_only_when_told_to():
    made = trains(world())
    made.full = {"path", "a", "b"}
    made.stop()
    made.rounds(40)
    assert made.job.state is JobState.STOPPING
    assert "kept in memory for 1 h 0 min" in made.status.reason
    step = made.job.progress.step
    made.stop(discard=True)
    made.run_until(STOPPED)
    assert f"step {step} is lost: its state was not written" in "".join(made.reasons)


@pytest.mark.parametrize("end", [PAUSED, STOPPED, FAILED])
def test_what_a_script_without_a_checkpoint_has_trained_is_written_though_it_is_complete(end):
    """As where its own last lines, which save the model, fail, or hang and are stopped."""
    made = world(max_failures=0)
    made.has_path = False
    ahead(made)
    made.rounds(1)
    step = newest(made)
    pods = ("pod_0_0", "pod_1_0")
    tell(made, pods, ReportKind.DONE, 1, step=made.job.progress.step)
    assert made.job.done
    if end is FAILED:
        made.crash()
    else:
        made.pause() if end is PAUSED else made.stop()
    made.run_until(end)
    assert ("a", 1, step) in made.in_run_folders, made.reasons
    assert made.job.ending.saved is not None
    assert made.job.ending.saved.step == step


def test_a_stop_that_discards_waits_for_nothing():
    made = trains(world())
    made.save_rounds = 1000
    made.stop(discard=True)
    made.rounds(6)
    assert made.job.state is STOPPED, made.reasons
    assert made.job.ending.saved is None


def test_a_server_that_restarts_while_a_state_is_written_waits_for_the_same_writer():
    made = trains(world())
    made.save_rounds = 10
    made.pause()
    saving(made)
    made.rounds(4)
    held = made.job.halt
    made.stop_server()
    made.start_server()
    assert held
    assert made.job.halt
    assert made.job.halt.save == held.save
    made.run_until(PAUSED)
    assert made.durable == made.job.progress.step


def test_one_node_is_told_to_write_when_it_is_ended_and_the_other_takes_its_place():
    made = trains(world(pods=4))

    def told() -> list[str]:
        return [
            name
            for name in made.nodes
            if any(pod.last_save for pod in views.node_pods(made.job).get(name, ()))
        ]

    assert told() == ["a"]
    made.power_off(made.nodes["a"])
    made.rounds(20)
    assert told() == ["b"]


def test_what_a_client_wrote_as_it_was_ended_is_where_the_job_goes_on():
    made = ahead(world())
    step = newest(made)
    end_saved(made, order=0, step=step)
    trains(made)
    assert records(made)[-1].first_step == step + 1
    assert f"from step {step} of stage 1, in /a/run/checkpoint" in "".join(made.reasons)


def test_a_node_that_has_left_is_not_waited_for_where_another_holds_what_it_wrote():
    made = world(slots=1)
    made.has_path = False
    trains(made)
    made.client_leaves(made.nodes["a"])
    saved = made.job.ending.saved
    assert saved is not None
    assert (saved.node_id, saved.spare) == ("a", True)
    trains(made)
    assert records(made)[-1].first_step == saved.step + 1
    assert f"from step {saved.step} of stage 1, from memory" in "".join(made.reasons)


def test_a_stop_writes_what_else_only_a_node_that_has_left_would_have():
    made = world(slots=1, min_pods=2)
    made.has_path = False
    trains(made)
    made.client_leaves(made.nodes["a"])
    made.rounds(20)
    assert made.job.state is JobState.WAITING
    assert [pod.last_save for pod in views.node_pods(made.job)["b"]] == [True]
    held = newest(made)
    made.stop()
    made.run_until(STOPPED)
    saved = made.job.ending.saved
    assert saved is not None
    assert (saved.node_id, saved.step) == ("b", held)


def test_the_time_for_which_a_state_is_kept_does_not_pass_while_the_server_is_away():
    made = ahead(world(keep_failed_s=100.0))
    made.full = {"path", "a", "b"}
    made.stop()
    made.rounds(40)
    made.stop_server()
    made.pass_time(3600)
    made.start_server()
    made.rounds(60)
    assert made.job.state is JobState.STOPPING, made.reasons
    made.full = set()
    made.run_until(STOPPED)
    assert made.durable == made.job.progress.step


def test_a_node_that_is_not_heard_for_a_while_amid_a_stop_keeps_what_it_alone_holds():
    made = ahead(world(pods=4))
    step = newest(made)
    made.stop()
    made.cut_off("a")
    for pod_id in made.nodes["b"].pods:
        made.kill_shim(pod_id)
    made.rounds(30)
    assert made.job.state is JobState.STOPPING
    made.reconnect("a")
    made.run_until(STOPPED)
    assert made.durable >= step


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        pytest.param({}, STOPPED, id="amid a stop"),
        pytest.param({"max_preemptions": 0}, FAILED, id="where that fails the job"),
    ],
)
def test_clients_that_were_cut_off_and_have_stopped_their_pods_are_waited_for(limits, end):
    made = ahead(world(stop_after_s=5.0, **limits))
    step = newest(made)
    if end is STOPPED:
        made.stop()
    made.cut_off()
    made.rounds(60)
    assert all(
        pod.phase is PodPhase.EXITED for sim in made.nodes.values() for pod in sim.pods.values()
    )
    assert made.job.state is JobState.STOPPING
    made.reconnect()
    made.run_until(end)
    assert made.durable >= step


def test_a_job_whose_nodes_were_all_cut_off_goes_on_from_what_their_shims_hold():
    made = world(stop_after_s=5.0)
    made.has_path = False
    ahead(made)
    made.cut_off()
    made.rounds(60)
    assert made.job.state is JobState.WAITING
    step = newest(made)
    made.reconnect()
    made.run_until(JobState.RUNNING)
    trains(made)
    assert records(made)[-1].first_step == step + 1


def test_a_server_that_is_killed_knows_every_node_that_holds_the_state():
    made = world(stop_after_s=5.0, slots=1)
    made.has_path = False
    ahead(made)
    made.stop_server()
    made.rounds(20)  # the clients stop their pods
    step = newest(made)
    made.power_off(made.nodes["a"])
    made.start_server()
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert [each.first_step for each in records(made)[:2]] == [1, step + 1]


def test_nodes_that_are_cut_off_keep_the_state_though_the_server_is_started_again():
    """It tries a start at first, as it has just not heard of them yet."""
    made = world(stop_after_s=5.0)
    made.has_path = False
    ahead(made)
    made.cut_off()
    made.rounds(60)
    step = newest(made)
    made.stop_server()
    made.start_server()
    for sim in made.nodes.values():  # as the server reads them from its database
        sim.registered, sim.seen_at = True, made.now
    made.send(Tick())
    assert made.job.preparing is not None
    made.rounds(60)
    assert made.job.state is JobState.WAITING
    made.reconnect()
    trains(made)
    made.rounds(12)
    assert step + 1 in [each.first_step for each in records(made)]


@pytest.mark.parametrize("max_preemptions", [None, 0])
def test_nodes_that_are_cut_off_one_after_the_other_keep_the_state_as_well(max_preemptions):
    """The last heartbeats of two nodes never come at the same moment."""
    made = world(stop_after_s=5.0, slots=1, max_preemptions=max_preemptions)
    made.has_path = False
    ahead(made)
    for name in made.nodes:
        made.cut_off(name)
        made.round()
    made.rounds(60)
    step = newest(made)
    made.reconnect()
    if max_preemptions == 0:
        made.run_until(FAILED)
        assert made.job.ending.saved is not None
        assert made.job.ending.saved.step >= step
        return
    made.run_until(JobState.RUNNING)
    trains(made)
    assert [each.first_step for each in records(made)[:2]] == [1, step + 1]


def cut_off_and_back(**spec: Any) -> tuple[World, int]:
    """Return a job whose only state is held by two nodes that were cut off, and its step."""
    made = world(stop_after_s=5.0, slots=1, **spec)
    made.has_path = False
    ahead(made)
    made.cut_off()
    made.rounds(60)
    step = newest(made)
    made.reconnect()
    return made, step


def goes_on_from(made: World, step: int) -> None:
    """Heal all, and check that no stage but the first has begun before `step`."""
    made.heal()
    made.run_until(JobState.RUNNING)
    made.rounds(12)
    begun = [each.first_step for each in records(made)[1:] if each.first_step is not None]
    assert begun, made.reasons
    assert min(begun) > step, (begun, made.reasons)


def test_nodes_that_fall_silent_while_a_stage_starts_from_their_state_keep_it():
    made, step = cut_off_and_back()
    made.run_to(Order.START)
    assert made.preparing.restore_from is not None
    made.cut_off()
    made.rounds(60)
    goes_on_from(made, step)


@pytest.mark.parametrize("gap", [1, 4, 13])
@pytest.mark.parametrize(
    "what", list(itertools.permutations(["silent", "back", "crash", "killed"])), ids="-".join
)
def test_whatever_happens_to_a_stage_that_begins_from_a_state_that_is_kept(what, gap):
    """Nodes silent and back, trainers that crash, the server killed: in any order."""
    made, step = cut_off_and_back()

    def crash() -> None:
        if any(launcher.run is not None for _, _, launcher in made.launchers()):
            made.crash()

    def kill_server() -> None:
        made.stop_server()
        made.rounds(2)
        made.start_server()

    happen: dict[str, Callable[[], None]] = {
        "silent": made.cut_off,
        "back": made.reconnect,
        "crash": crash,
        "killed": kill_server,
    }
    for name in what:
        made.rounds(gap)
        happen[name]()
        if name == "silent":
            made.rounds(14)
    goes_on_from(made, step)


@pytest.mark.parametrize("back", ["at once", "when the server has given them up"])
def test_a_state_that_its_launcher_could_not_report_any_more_is_known_from_the_client(back):
    """The network is cut between a commit and the stage's first snapshot."""
    made = world(stop_after_s=5.0, slots=1)
    made.has_path = False
    made.run_until(JobState.RUNNING)
    while made.job.progress.step < 1:
        made.round()
    made.cut_off()
    made.rounds(12 if back == "at once" else 60)
    assert not made.job.progress.snapshots
    step = newest(made)
    made.reconnect()
    goes_on_from(made, step)


def unheard(made: World) -> World:
    """Cut both nodes off once the loop is known and before a snapshot of the stage is reported."""
    made.has_path = False
    made.run_until(JobState.RUNNING)
    while made.job.progress.step < 1:
        made.round()
    made.cut_off()
    made.rounds(4)
    assert made.job.elastic
    assert not made.job.progress.snapshots
    return made


def test_a_stop_waits_for_nodes_whose_state_it_has_not_heard_of():
    made = unheard(world(slots=1, prepare_timeout_s=5.0))
    made.ask(StopAsked())
    made.rounds(100)
    assert made.job.state is JobState.STOPPING
    assert "may be on a, b, which cannot be reached; waiting for" in "\n".join(made.reasons)
    step = newest(made)
    made.reconnect()
    made.run_until(STOPPED)
    assert made.job.ending.saved is not None
    assert made.job.ending.saved.step >= step


@pytest.mark.parametrize("ended_by", ["time", "discard"])
def test_nodes_that_do_not_come_back_are_waited_for_until_the_time_or_a_user_says_so(ended_by):
    made = unheard(world(slots=1, prepare_timeout_s=5.0, keep_failed_s=60.0))
    made.ask(StopAsked())
    made.rounds(60)
    assert made.job.state is JobState.STOPPING
    if ended_by == "discard":
        made.ask(StopAsked(discard=True))
    made.rounds(20 if ended_by == "discard" else 240)
    assert made.job.state is STOPPED


@pytest.mark.parametrize("stops", [None, 5.0])
def test_a_pause_is_called_off_while_nodes_may_hold_a_state_that_it_has_not_heard_of(stops):
    made = unheard(world(slots=1, prepare_timeout_s=5.0, stop_after_s=stops))
    made.pause()
    made.rounds(60)
    assert any("not paused: " in line for line in made.reasons)
    step = newest(made)
    if stops is not None:
        made.reconnect()
        goes_on_from(made, step)
        return
    made.heal()
    made.run_until(JobState.RUNNING)
    assert trains(made).job.lineage.redone_steps == 0


def test_a_pause_that_is_called_off_while_no_node_answers_recovers_when_they_do():
    made = trains(world(prepare_timeout_s=10.0))
    made.pause()
    made.cut_off()
    for _ in range(400):
        made.round()
        if any("not paused" in line for line in made.reasons):
            break
    assert made.job.state is JobState.WAITING
    made.heal()
    trains(made)
    assert made.job.lineage.redone_steps <= 3


@pytest.mark.parametrize("how", ["killed by the server", "killed on the node"])
def test_a_pause_that_is_called_off_though_its_launchers_hang_recovers_when_they_are_killed(how):
    made = ahead(world(prepare_timeout_s=10.0))
    step = newest(made)
    for _, _, launcher in made.launchers():
        launcher.hangs = True
    made.pause()
    made.full = {"path", "a", "b"}
    made.rounds(60)
    assert made.active.all_in(PodStagePhase.LOST)
    if how == "killed on the node":
        for _, pod, _ in made.launchers():
            pod.end(signal=9)
    made.run_until(JobState.RUNNING, rounds=400)
    trains(made)
    assert (records(made)[-1].first_step or 0) > step  # the trainers of launchers that hang went on


@pytest.mark.parametrize("asked", [PauseAsked(), StopAsked()])
def test_what_was_written_as_ordered_counts_though_its_shim_is_gone_by_then(asked):
    made = trains(world(nodes=1, pods=1))
    made.save_rounds = 1000
    made.send(asked)
    saving(made)
    made.rounds(3)
    step = newest(made)
    end_saved(made, order=made.job.ending.orders, step=step)
    made.run_until(PAUSED, STOPPED)
    assert made.status.reason.endswith(f"step {step} is in /a/run/checkpoint")
    assert made.job.ending.saved is not None
    assert made.job.ending.saved.node_id == "a"
    if made.job.state is PAUSED:
        resumes_at(made, step)


def test_trainers_without_memory_for_a_snapshot_have_written_a_checkpoint_or_the_pause_is_off():
    for durable, state in (("/shared/checkpoint", PAUSED), ("", JobState.RUNNING)):
        made = trains(world(pods=1))
        made.pause()
        member = replace(
            made.active.members[0],
            phase=PodStagePhase.PARKED,
            step=made.job.progress.step,
            durable=durable,
        )
        made.job = replace(made.job, active=made.active.with_member(member))
        made.send(Tick())
        made.run_until(state)
        assert (made.job.ending.saved is not None) == bool(durable)


@pytest.mark.parametrize(("asked", "state"), [(PauseAsked(), PAUSED), (StopAsked(), STOPPED)])
def test_clients_of_the_version_before_are_not_waited_for(asked, state):
    spec = wire.JobSpec(job_id="job", max_pods=2, overlap="off")
    made = trains(World(spec, (node("a", saves=False),), total_steps=400))
    made.send(asked)
    made.rounds(12)
    assert made.job.state is state, made.reasons
    assert "of a version that writes no states" in "".join(made.reasons)


def test_an_older_state_is_written_where_clients_of_the_version_before_hold_the_newest():
    spec = wire.JobSpec(job_id="job", max_pods=2, overlap="off", max_failures=0)
    made = ahead(World(spec, (node("a", 1, saves=False), node("b", 1)), total_steps=400))
    refs = made.job.progress.snapshots
    older = min(refs.values(), key=lambda ref: ref.step)
    held = {
        pod.pod_id: replace(older, step=older.step + 5) if pod.site.node_id == "a" else older
        for pod in made.job.pods
    }
    made.job = replace(made.job, progress=replace(made.job.progress, snapshots=held))
    made.crash()
    made.run_until(FAILED)
    saved = made.job.ending.saved
    assert saved is not None
    assert (saved.node_id, saved.step >= older.step) == ("b", True)
    assert f"step {older.step + 5} is on nodes whose job clients" in "".join(made.reasons)


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_server_with_an_older_copy_of_its_database_goes_on_from_what_the_pods_hold(overlap):
    made = trains(world(overlap=overlap))
    made.has_path = False
    copy = made.stored
    for pods in (3, 2):
        made.resize(pods)
        made.rounds(40)
    assert made.job.active is not None
    assert made.job.active.stage == 3
    step = made.job.progress.step
    made.stop_server()
    made.restore(copy)
    made.start_server()
    made.run_until(JobState.RECOVERING)
    made.run_until(JobState.RUNNING)
    assert made.active.stage == 4
    assert made.active.base_step is not None
    assert made.active.base_step > step - 3  # the newest snapshot
