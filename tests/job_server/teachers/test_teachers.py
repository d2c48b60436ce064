"""Jobs of teachers: their pods, in a world of clients that do as they are told."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.wire import JobKind, JobSpec, JobState, PodPhase, PodState
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.events import (
    Demanded,
    Event,
    KillAsked,
    NodeReported,
    NodesChanged,
    PauseAsked,
    RequestRefused,
    ResizeAsked,
    ResumeAsked,
    ServerRestarted,
    StopAsked,
    Tick,
)
from job_server.sharing import job_types
from job_server.sharing.reservations import NO_RESERVATIONS
from job_server.teachers import machine as teachers
from job_server.teachers import views as teacher_views
from job_server.teachers.job import TeacherJob
from tests.job_server.serving import cpu_node

NOW = 1000.0


def spec(**changes: object) -> JobSpec:
    fields = {
        "job_id": "teachers", "kind": JobKind.TEACHER, "service": "soft",
        "min_pods": 1, "max_pods": 4, "max_failures": None,
    }  # fmt: skip
    return JobSpec(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Nodes:
    """Nodes of two slots whose clients start, stop and kill pods, and tell of it."""

    job: TeacherJob
    names: tuple[str, ...] = ("a", "b")
    now: float = NOW
    silent: set[str] = field(default_factory=set)
    pods: dict[str, dict[str, PodState]] = field(default_factory=dict)  # node -> pods
    slow_to_end: bool = False
    said: list[str] = field(default_factory=list)
    taken: frozenset[int] = frozenset()
    seen: dict[str, float] = field(default_factory=dict)

    def send(self, event: Event) -> None:
        views = tuple(
            NodeView(
                node=cpu_node(name, addr=f"10.0.0.{i}", job_id="teachers"),
                seen_at=self.seen.get(name, NOW),
                taken=self.taken,
            )
            for i, name in enumerate(self.names)
        )
        cluster = Cluster(nodes=views, heartbeat_s=1.0)
        self.job, reason = teachers.step(self.job, event, self.now, cluster)
        # What is stored is what is read back.
        assert job_types.decode_job(wire.encode(self.job)) == self.job
        if reason:
            self.said.append(reason)

    def act(self, seconds: float = 1.0) -> None:
        """Every client does what it is told and reports; time passes."""
        self.now += seconds
        for name in self.names:
            if name in self.silent:
                continue
            self.seen[name] = self.now
            self._obey(name)
            self.send(NodeReported(name, tuple(self.pods[name].values())))
        self.send(Tick())

    def _obey(self, name: str) -> None:
        mine = self.pods.setdefault(name, {})
        plan = {pod.pod_id: pod for pod in teacher_views.node_pods(self.job).get(name, ())}
        for pod_id, pod in list(mine.items()):
            if pod.phase is PodPhase.EXITED and pod_id not in plan:
                del mine[pod_id]
            elif pod.phase is PodPhase.STARTING:
                mine[pod_id] = replace(pod, phase=PodPhase.RUNNING)
            elif pod_id in plan and plan[pod_id].want is wire.DesiredState.KILL:
                mine[pod_id] = replace(pod, phase=PodPhase.EXITED, signal=9)
            elif pod_id not in plan and pod.phase is PodPhase.RUNNING:
                phase = PodPhase.STOPPING if self.slow_to_end else PodPhase.EXITED
                mine[pod_id] = replace(pod, phase=phase, exit_code=0)
        for pod_id in plan.keys() - mine.keys():
            mine[pod_id] = PodState(pod_id=pod_id, job_id="teachers", phase=PodPhase.STARTING)

    def acts(self, times: int, seconds: float = 1.0) -> None:
        for _ in range(times):
            self.act(seconds)

    def asked(self, times: int, **changes: object) -> None:
        """Students report their demand after each round; `teachers` is how many they know."""
        for _ in range(times):
            self.act()
            self.send(demand(**{"teachers": self.job.running, **changes}))

    def resize(self, pods: int | None) -> None:
        self.send(ResizeAsked(wire.Resize(pods=pods)))

    def crash(self, pod_id: str, **how: Any) -> None:
        for mine in self.pods.values():
            if pod_id in mine:
                changes: dict[str, Any] = how or {"exit_code": 1}
                mine[pod_id] = replace(mine[pod_id], phase=PodPhase.EXITED, **changes)

    def is_in(self, state: JobState) -> bool:
        return self.job.state is state

    @property
    def ids(self) -> list[str]:
        return [pod.pod_id for pod in self.job.staying]

    @property
    def status(self) -> wire.JobStatus:
        return job_types.job_status(self.job, self.now, 1)


def running(pods: int, **changes: object) -> Nodes:
    """A job whose first `pods` teachers run."""
    nodes = Nodes(teachers.new_job(spec(pods=pods, **changes), NOW))
    nodes.send(NodesChanged())
    nodes.acts(3)
    assert nodes.job.running == pods
    return nodes


def demand(**changes: object) -> Demanded:
    fields = {"service": "soft", "students": 2, "wait_share": 0.5, "samples_per_s": 100.0}
    return Demanded(wire.Demand(**{**fields, **changes}))  # type: ignore[arg-type]


def test_a_job_starts_with_its_fewest_teachers_each_with_slot_and_ports_of_its_own():
    nodes = Nodes(teachers.new_job(spec(min_pods=3), NOW))
    nodes.send(NodesChanged())
    assert nodes.is_in(JobState.STARTING)
    nodes.acts(2)
    assert nodes.is_in(JobState.RUNNING)
    assert nodes.ids == ["teacher_1", "teacher_2", "teacher_3"]
    plans = [
        pod for name in nodes.names for pod in teacher_views.node_pods(nodes.job).get(name, ())
    ]
    assert [(pod.service, pod.slots, pod.want.value) for pod in plans] == [
        ("soft", (0,), "run"),
        ("soft", (1,), "run"),
        ("soft", (0,), "run"),
    ]
    assert len({pod.ports for pod in plans if pod.pod_id != "teacher_3"}) == 2
    nodes.act()
    assert nodes.status.account.training_s > 0
    assert job_types.pod_orders(nodes.job).get("teacher_1") is None


def test_teachers_come_and_go_one_by_one_and_the_others_are_left_alone():
    nodes = running(2)
    nodes.resize(4)
    nodes.acts(2)
    assert nodes.ids == ["teacher_1", "teacher_2", "teacher_3", "teacher_4"]
    nodes.resize(3)
    assert nodes.ids == ["teacher_1", "teacher_2", "teacher_3"]
    nodes.slow_to_end = True
    nodes.acts(2)
    leaving = next(pod for pod in nodes.status.pods if pod.pod_id == "teacher_4")
    assert leaving.phase == "leaving"
    assert 1 in job_types.slots_held(nodes.job)["b"]  # until its client says that it has ended
    nodes.slow_to_end = False
    nodes.crash("teacher_4", exit_code=0)
    nodes.acts(2)
    assert [pod.pod_id for pod in nodes.status.pods] == nodes.ids


def test_the_number_follows_the_demand_within_its_bounds():
    nodes = running(1)
    for _ in range(300):
        nodes.act(0.5)
        rate = 100.0 * nodes.job.running
        nodes.send(demand(samples_per_s=rate, wait_share=0.4, teachers=nodes.job.running))
    assert nodes.job.running == 4
    assert any("growing to 2: 2 students wait 40 % of the time" in text for text in nodes.said)
    assert nodes.status.teachers is not None
    assert nodes.status.teachers.why.endswith("4 is the most (max_pods)")


def test_a_teacher_that_has_not_registered_yet_is_waited_for():
    nodes = running(2)
    nodes.asked(40, teachers=1)
    assert nodes.job.wanted == 2
    nodes.asked(200, teachers=1)  # but not for ever: one that never does must stop no decision
    assert nodes.job.wanted > 2


def test_silence_keeps_the_number_and_then_lets_it_fall_to_the_fewest():
    nodes = running(3, demand_timeout_s=100)
    nodes.send(demand(wait_share=0.04))
    nodes.acts(90)
    assert nodes.job.wanted == 3
    nodes.acts(20)
    assert nodes.job.running == 1
    assert nodes.job.why == "no student has asked for 100 s"


def test_students_that_ask_nothing_count_as_none():
    nodes = running(3, demand_timeout_s=100, min_pods=0)
    nodes.asked(120, students=0, wait_share=0.0, samples_per_s=0.0, teachers=None)
    assert nodes.job.wanted == 0
    assert nodes.job.pods == ()
    assert nodes.is_in(JobState.RUNNING)
    nodes.send(demand())
    nodes.acts(3)
    assert nodes.job.running == 1


def test_a_users_number_holds_whatever_the_demand_is_until_it_is_let_go():
    nodes = running(1)
    nodes.resize(2)
    nodes.asked(60)
    assert nodes.job.running == 2
    assert nodes.status.teachers is not None
    assert nodes.status.teachers.chosen_by == "resize"
    nodes.resize(None)
    for _ in range(30):
        nodes.act()
        nodes.send(demand(teachers=nodes.job.running, samples_per_s=100.0 * nodes.job.running))
    assert nodes.job.wanted == 4


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ResizeAsked(wire.Resize(pods=5)), r"pods: 5 .* min_pods \(1\) and max_pods \(4\)"),
        (ResizeAsked(wire.Resize(pods=1, assume_dead=True)), "assume_dead: means nothing"),
        (KillAsked(wire.Kill(rank=0)), "rank: .* name a pod"),
        (KillAsked(wire.Kill(pod_id="teacher_9")), "running pods: teacher_1"),
        (ResumeAsked(), "is RUNNING, not PAUSED"),
    ],
)
def test_what_makes_no_sense_is_refused(event, text):
    nodes = running(1)
    with pytest.raises(RequestRefused, match=text):
        nodes.send(event)


def test_a_teacher_that_asks_not_to_be_started_again_ends_its_job():
    nodes = running(1)
    nodes.crash(nodes.ids[0], exit_code=78, last_lines=("no license",))
    nodes.acts(2)
    assert nodes.is_in(JobState.FAILED)
    told = "teacher_1 exited with 78; last lines: no license; it asks not to be started again"
    assert told in nodes.job.reason


def test_a_teacher_that_crashes_is_replaced_at_once_and_ever_later_if_it_crashes_again():
    nodes = running(1)
    waits = []
    for _ in range(3):
        nodes.crash(nodes.ids[0], exit_code=3, last_lines=("no such model",))
        died_at = nodes.now
        nodes.act()
        while nodes.job.running == 0 and nodes.job.state is not JobState.FAILED:
            nodes.act(0.5)
        waits.append(nodes.now - died_at)
    assert waits[0] < waits[2]
    told = "pod teacher_1 exited with 3; last lines: no such model"
    assert any(told in text for text in nodes.said)
    nodes.crash(nodes.ids[0])
    nodes.act()
    assert nodes.is_in(JobState.FAILED)
    assert "max_restarts_without_progress" in nodes.job.reason
    nodes.acts(2)
    assert nodes.job.pods == ()


def test_an_exit_with_0_is_a_death_too():
    nodes = running(1)
    nodes.crash("teacher_1", exit_code=0)
    nodes.acts(4)
    assert nodes.ids == ["teacher_2"]
    assert nodes.job.failures == 1


def test_teachers_that_die_together_count_as_one_try():
    nodes = running(4)
    for pod_id in nodes.ids:
        nodes.crash(pod_id)
    nodes.acts(5)
    assert nodes.job.running == 4
    assert (nodes.job.failures, nodes.job.failures_in_row) == (4, 1)


def test_a_bad_slot_is_avoided_and_does_not_end_the_teachers_that_serve():
    nodes = running(2)  # on the slots of node a
    nodes.acts(25, 3.0)  # healthy by now
    nodes.resize(3)
    nodes.acts(2)
    nodes.crash("teacher_3")
    nodes.acts(3)
    newest = nodes.job.staying[-1]
    assert (newest.site.node_id, newest.site.slots) == ("b", (1,))  # died on b's slot 0
    for _ in range(8):
        nodes.crash(nodes.ids[-1])
        nodes.acts(25, 3.0)
    assert nodes.is_in(JobState.RUNNING)
    assert nodes.job.running == 3


@pytest.mark.parametrize(
    ("how", "budget"),
    [({"exit_code": 1}, "max_failures"), ({"signal": 15}, "max_preemptions")],
)
def test_a_budget_that_is_used_up_fails_the_job(how, budget):
    nodes = running(1, **{budget: 1})
    nodes.acts(25, 3.0)
    nodes.crash(nodes.ids[0], **how)
    nodes.acts(25, 3.0)
    assert nodes.job.running == 1
    nodes.crash(nodes.ids[0], **how)
    nodes.act()
    assert nodes.is_in(JobState.FAILED)
    assert budget in nodes.job.reason


def test_a_pod_that_is_killed_on_request_is_nobodys_failure():
    nodes = running(2)
    nodes.send(KillAsked(wire.Kill(pod_id="teacher_1")))
    nodes.acts(4)
    assert nodes.ids == ["teacher_2", "teacher_3"]
    assert nodes.job.failures == 0


def test_a_silent_node_is_replaced_by_another_and_stopped_when_it_is_back():
    nodes = running(1)
    nodes.silent.add("a")
    nodes.acts(6)
    assert [(pod.pod_id, pod.site.node_id) for pod in nodes.job.staying] == [("teacher_2", "b")]
    nodes.silent.clear()
    nodes.acts(3)
    assert [pod.pod_id for pod in nodes.job.pods] == ["teacher_2"]
    assert nodes.pods["a"] == {}


def test_a_teacher_that_was_to_leave_a_dead_node_stops_no_decision():
    nodes = running(2)
    nodes.slow_to_end = True
    nodes.resize(3)
    nodes.acts(3)
    nodes.resize(2)  # teacher_3 leaves b, which falls silent
    nodes.silent.add("b")
    nodes.acts(6)
    nodes.resize(None)
    nodes.asked(40, teachers=2)
    assert nodes.job.wanted == 4


def test_where_no_other_node_has_a_place_a_silent_teacher_is_kept():
    nodes = running(3)
    nodes.names = ("a", "b")
    nodes.silent.add("a")
    nodes.acts(6)
    assert nodes.job.wanted == 3
    assert len(nodes.job.staying) == 3  # one of two is replaced on b, the other waits for a
    assert "the clients of a are silent" in nodes.job.waiting or "find a place" in nodes.job.waiting
    nodes.silent.clear()
    nodes.acts(3)
    assert nodes.job.running == 3
    assert nodes.job.waiting == ""


def test_a_pod_that_its_client_has_forgotten_is_replaced():
    nodes = running(1)
    for mine in nodes.pods.values():
        mine.clear()
    nodes.silent.add("a")
    for _ in range(5):
        nodes.now += 1
        nodes.seen["a"] = nodes.now
        nodes.send(NodeReported("a", ()))
    assert nodes.ids == ["teacher_2"]
    assert any("does not know pod teacher_1 any more" in text for text in nodes.said)


def test_pause_ends_all_teachers_and_resume_starts_them_again():
    nodes = running(3)
    nodes.send(PauseAsked())
    assert nodes.is_in(JobState.PAUSING)
    nodes.acts(2)
    assert nodes.is_in(JobState.PAUSED)
    assert job_types.slots_held(nodes.job) == {}
    nodes.send(demand(wait_share=0.9))
    nodes.acts(2)
    assert nodes.is_in(JobState.PAUSED)
    nodes.send(ResumeAsked())
    nodes.acts(3)
    assert nodes.job.running == 3
    assert nodes.job.reason == ""


def test_stop_waits_for_the_teachers_but_not_for_a_node_that_is_silent():
    nodes = running(3)
    nodes.slow_to_end = True
    nodes.send(StopAsked())
    nodes.acts(3)
    assert nodes.is_in(JobState.STOPPING)
    nodes.silent.update(nodes.names)
    nodes.acts(6)
    assert nodes.is_in(JobState.STOPPED)
    with pytest.raises(RequestRefused, match="has ended"):
        nodes.send(PauseAsked())
    nodes.send(demand())  # says nothing, changes nothing
    assert nodes.is_in(JobState.STOPPED)


def test_after_a_restart_of_the_server_nothing_is_lost_and_nobody_is_declared_dead():
    nodes = running(3)
    nodes.send(demand(wait_share=0.04))
    nodes.now += 400
    nodes.send(ServerRestarted())
    assert nodes.ids == ["teacher_1", "teacher_2", "teacher_3"]
    assert nodes.job.wanted == 3
    nodes.acts(3)
    assert nodes.job.running == 3


@pytest.mark.parametrize("power", [True, False])
def test_teachers_have_served_while_the_server_was_away_if_they_still_run(power):
    nodes = running(2)
    before = nodes.status.account
    for pod_id in () if power else nodes.ids:
        nodes.crash(pod_id, signal=9)
    nodes.now += 3600
    nodes.send(ServerRestarted())
    nodes.acts(60)
    after = nodes.status.account
    assert nodes.job.running == 2
    assert (after.training_s - before.training_s > 3600) == power
    assert after.total_s == pytest.approx(nodes.now - NOW)


def test_without_any_place_it_waits_and_says_why():
    nodes = Nodes(teachers.new_job(spec(), NOW))
    nodes.names = ()
    nodes.send(NodesChanged())
    assert nodes.is_in(JobState.WAITING)
    assert "no job client serves this job" in nodes.status.reason
    nodes.names, nodes.taken = ("a",), frozenset({0, 1})
    nodes.act()
    assert "2 taken by other jobs" in nodes.status.reason
    nodes.taken = frozenset()
    nodes.acts(3)
    assert nodes.is_in(JobState.RUNNING)


def test_a_tick_is_due_when_it_would_change_something():
    nodes = running(2, demand_timeout_s=50)
    cluster = Cluster(heartbeat_s=1.0)
    due = [nodes.now]
    while (at := job_types.next_deadline(nodes.job, due[-1], cluster)) is not None:
        due.append(at)
    assert any(abs(at - (NOW + 50)) < 1e-6 for at in due)
    assert len(due) < 20


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"service": None}, "service: missing"),
        ({"service": "../x"}, "service: .* is not an id"),
        ({"overlap": "off"}, "overlap: means nothing for a job of kind teacher"),
        ({"standby": 1}, "standby: means nothing"),
        ({"spares": 1}, "spares: means nothing"),
        ({"policy": "linear"}, "policy: means nothing"),
        ({"expected_nodes": 2}, "expected_nodes: means nothing"),
        ({"max_resizes": 3}, "max_resizes: means nothing"),
        ({"script": wire.ScriptSpec(kind=wire.ScriptKind.WALK)}, "script: means nothing"),
        ({"kind": JobKind.TRAINING}, "service: only jobs of kind teacher serve one"),
        ({"demand_timeout_s": 0.0}, "demand_timeout_s: must be between 1"),
        ({"pods": 5}, "pods: must be between 1 and 4"),
    ],
)
def test_options_that_make_no_sense_for_teachers_are_refused_by_name(changes, text):
    with pytest.raises(wire.WireError, match=text):
        spec(**changes)


def test_a_training_knows_neither_none_pods_nor_an_automatic_number():
    with pytest.raises(wire.WireError, match="min_pods: must be between 1"):
        JobSpec(job_id="a", min_pods=0)
    job = job_types.new_job(JobSpec(job_id="a"), NOW)
    with pytest.raises(RequestRefused, match="pods: only the number of teachers"):
        job_types.step(job, ResizeAsked(wire.Resize(pods=None)), NOW, Cluster(), NO_RESERVATIONS)
