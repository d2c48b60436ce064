"""Slots go to trainings before teachers above the minimum; a real service, simulated clients."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from job_server.api import wire
from job_server.api.errors import BadRequest, Conflict, Gone, NotFound
from job_server.api.wire import JobKind, JobSpec, JobState, PodPhase, PodState, Resize
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.events import Allotted, PauseAsked, ResizeAsked, ResumeAsked
from job_server.server.engine import Engine
from job_server.server.service import JobService
from job_server.server.store import Store
from job_server.sharing.reservations import reserve, shortage
from job_server.training.core.job import Job
from job_server.training.machine import new_job, step
from tests.job_server.serving import cpu_node

FOLDERS = ("train", "teach")


@dataclass
class Site:
    """A service under a clock of ours, and one node that serves both kinds of jobs."""

    slots: int = 4
    now: float = 1000.0
    slow_to_end: bool = False
    pods: dict[str, PodState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.service = JobService(Store(":memory:"), heartbeat_s=1.0, now=lambda: self.now)
        slots = tuple(wire.Slot(index=i, kind=wire.SlotKind.CPU) for i in range(self.slots))
        self.service.register(cpu_node(slots=slots, job_id=None, folders=FOLDERS))

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def submit(self, job_id: str, *, pods: int, folder: str = "train", **changes: object) -> None:
        fields = {"job_id": job_id, "folder": folder, "pods": pods, "min_pods": 1, "max_pods": 4}
        if folder == "teach":
            fields |= {"kind": JobKind.TEACHER, "service": changes.pop("service", "soft")}
        self.service.submit(JobSpec(**{**fields, **changes}))  # type: ignore[arg-type]

    def teach(self, pods: int, job_id: str = "teachers", **changes: object) -> None:
        """Submit a job of teachers, and let its first pods start."""
        self.submit(job_id, pods=pods, folder="teach", **changes)
        self.act(2)

    def end_pod(self, key: str, exit_code: int) -> None:
        self.pods[key] = replace(self.pods[key], phase=PodPhase.EXITED, exit_code=exit_code)

    def act(self, times: int = 1) -> None:
        """The client does as it is told and reports; launchers there are none."""
        for _ in range(times):
            self.now += 1.0
            plan = {f"{pod.job_id}/{pod.pod_id}": pod for pod in self.engine.plan_of("node-a")}
            for key, pod in list(self.pods.items()):
                if key not in plan and pod.phase is PodPhase.EXITED:
                    del self.pods[key]
                elif key not in plan and not self.slow_to_end:
                    self.pods[key] = replace(pod, phase=PodPhase.EXITED, exit_code=0)
            for key in plan.keys() - self.pods.keys():
                self.pods[key] = PodState(
                    pod_id=plan[key].pod_id, job_id=plan[key].job_id, phase=PodPhase.RUNNING
                )
            report = wire.NodeReport(node_id="node-a", pods=tuple(self.pods.values()))
            self.service.report_node("node-a", report)
            with self.engine.lock:
                self.engine.tick()

    def status(self, job_id: str) -> wire.JobStatus:
        return next(s for s in self.service.statuses() if s.job_id == job_id)

    def count(self, job_id: str) -> int:
        return sum(pod.phase != "leaving" for pod in self.status(job_id).pods)

    def events(self, job_id: str) -> str:
        return "\n".join(event.text for event in self.service.last_events(job_id, 100))


@pytest.fixture
def make_site() -> Iterator[Callable[[int], Site]]:
    made: list[Site] = []

    def make(slots: int) -> Site:
        made.append(Site(slots))
        return made[-1]

    yield make
    for each in made:
        each.service.close()


@pytest.fixture
def site(make_site: Callable[[int], Site]) -> Site:
    return make_site(4)


def test_a_training_that_waits_for_slots_gets_those_of_the_newest_teachers(site):
    site.teach(4)
    assert site.count("teachers") == 4
    site.submit("training", pods=2)
    site.act(3)
    assert [pod.pod_id for pod in site.status("teachers").pods] == ["teacher_1", "teacher_2"]
    assert site.count("training") == 2
    assert site.status("training").state is JobState.STARTING
    assert "teacher_3, teacher_4 leave: a training needs their slots" in site.events("teachers")
    assert "went to a training" in site.status("teachers").reason
    site.act(30)
    assert "only 2 of 4 pods find a place" in site.status("teachers").reason


def test_the_fewest_teachers_stay_whatever_a_training_wants(site):
    site.teach(4, min_pods=3)
    site.submit("training", pods=4)
    site.act(10)
    assert site.count("teachers") == 3
    assert site.count("training") == 1


def test_a_slot_is_given_only_when_its_teacher_has_ended_and_no_second_one_leaves(site):
    site.teach(4)
    site.slow_to_end = True
    site.submit("training", pods=1)
    site.act(10)
    assert site.count("teachers") == 3
    assert site.count("training") == 0
    assert site.status("training").state is JobState.WAITING
    site.slow_to_end = False
    site.act(3)
    assert site.count("training") == 1
    assert site.count("teachers") == 3


def test_a_training_waits_for_all_that_leave_for_it_and_does_not_begin_with_fewer(make_site):
    site = make_site(5)
    site.teach(4)
    site.slow_to_end = True
    site.submit("training", pods=3)  # one slot is free
    site.act(3)
    assert site.status("training").reason == "teachers are leaving slots for it"
    site.end_pod("teachers/teacher_4", 0)
    site.act(3)
    assert site.count("training") == 0
    site.slow_to_end = False
    site.act(3)
    assert site.count("training") == 3


def test_teachers_take_the_slots_again_when_the_training_has_left_them(site):
    site.teach(4)
    site.submit("training", pods=2)
    site.act(3)
    site.service.delete("training")
    site.act(10)
    assert site.count("teachers") == 2  # not at once: a training that comes and goes shakes nobody
    site.act(30)
    assert site.count("teachers") == 4


def test_teachers_take_no_slot_that_a_training_waits_for(site):
    """Two of the three slots that it needs are free; the third comes when the other job ends."""
    site.submit("other", pods=2)
    site.act(2)
    site.submit("training", pods=3, min_pods=3)
    site.submit("teachers", pods=2, folder="teach", min_pods=1)
    site.act(5)
    assert site.count("teachers") == 0
    assert site.status("teachers").state is JobState.WAITING
    site.service.delete("other")
    site.act(5)
    assert site.count("training") == 3
    assert site.count("teachers") == 1


def test_a_training_that_is_paused_frees_its_slots_and_gets_them_back(site):
    site.submit("training", pods=3)
    site.teach(4)
    assert (site.count("training"), site.count("teachers")) == (3, 1)
    site.service.ask("training", PauseAsked())
    site.act(140)
    assert site.status("training").state is JobState.PAUSED
    site.act(30)
    assert site.count("teachers") == 4
    site.service.ask("training", ResumeAsked())
    site.act(3)
    assert (site.count("training"), site.count("teachers")) == (3, 1)


def test_a_pod_of_several_slots_gets_them_where_the_fewest_teachers_must_leave(make_site):
    site = make_site(5)
    site.teach(4)
    site.submit("training", pods=1, slots_per_pod=2, max_pods=1)
    site.act(3)
    assert site.count("teachers") == 3
    assert site.status("training").pods[0].slots == (3, 4)


def test_a_number_that_a_user_has_fixed_gives_slots_back_as_well(site):
    site.submit("teachers", pods=1, folder="teach")
    site.service.ask("teachers", ResizeAsked(Resize(pods=4)))
    site.act(2)
    site.submit("training", pods=1)
    site.act(3)
    assert (site.count("training"), site.count("teachers")) == (1, 3)
    assert site.status("teachers").target_pods == 4


def test_the_youngest_of_two_jobs_of_teachers_leave_and_no_more_than_needed(site):
    site.teach(2, "old")
    site.teach(2, "new", service="hard")
    site.submit("training", pods=1)
    site.act(3)
    assert (site.count("old"), site.count("new"), site.count("training")) == (2, 1, 1)


def test_a_demand_finds_the_job_of_its_service(site):
    site.teach(1)
    demand = wire.Demand(service="soft", students=1, wait_share=0.4, samples_per_s=9.0)
    answer = site.service.demand("soft", demand).body
    assert b'"job_id":"teachers","running":1,"wanted":1' in answer
    teachers = site.status("teachers").teachers
    assert teachers is not None
    assert teachers.demand == demand
    with pytest.raises(NotFound, match="edl submit --kind teacher --service hard"):
        site.service.demand("hard", replace(demand, service="hard"))
    with pytest.raises(BadRequest, match="service: 'soft' is posted at the route of 'hard'"):
        site.service.demand("hard", demand)
    with pytest.raises(Conflict, match="'soft' is served by job 'teachers'"):
        site.submit("more", pods=1, folder="teach")


def test_a_launcher_in_a_teachers_pod_is_told_what_to_run_instead(site):
    site.teach(1)
    attach = wire.Attach(pod_id="teacher_1", node_id="node-a", pid=1)
    with pytest.raises(Gone, match="`edl serve`"):
        site.service.attach("teachers", "teacher_1", attach)


def test_clients_of_the_original_see_the_training_beside_teachers(site):
    site.submit("teachers", pods=1, folder="teach")
    site.submit("training", pods=1)
    site.act(2)
    assert site.service.legacy_pods(None).job_id == "training"
    teachers = site.service.legacy_pods("teachers")
    assert teachers.job_stage_flag == -1
    assert [pod.pod_id for pod in teachers.pods] == ["teacher_1"]


def test_teachers_and_their_number_survive_a_kill_of_the_server(tmp_path):
    store = str(tmp_path / "server.db")
    first = JobService(Store(store), heartbeat_s=1.0)
    first.register(cpu_node(job_id=None, folders=FOLDERS))
    spec = JobSpec(
        job_id="teachers", kind=JobKind.TEACHER, service="soft", folder="teach", max_pods=2
    )
    first.submit(spec)
    first.ask("teachers", ResizeAsked(Resize(pods=2)))
    before = first.statuses()[0]
    first.engine.store.close()  # nothing is written after this moment
    second = JobService(Store(store), heartbeat_s=1.0)
    second.start()
    after = second.statuses()[0]
    assert [pod.pod_id for pod in after.pods] == ["teacher_1", "teacher_2"]
    assert after.teachers == before.teachers
    assert after.spec == spec
    second.close()


def test_a_training_in_a_crash_has_no_shortage_of_what_it_gets_back(site):
    """A recovery takes the slots of the dead pods: no teacher leaves for it."""
    site.submit("training", pods=2)
    site.teach(2)
    site.end_pod("training/pod_1_0", 1)
    site.act(6)
    assert (site.count("training"), site.count("teachers")) == (2, 2)
    assert "needs its slots" not in site.events("teachers")


def test_nothing_is_claimed_where_nothing_is_short(site):
    site.submit("training", pods=2)
    site.act(2)
    entry = site.engine.jobs["training"]
    assert isinstance(entry.job, Job)
    cluster = site.engine.cluster(entry)
    assert shortage(entry.job, site.now, cluster) == 0
    assert reserve([(entry.job, cluster)], [], site.now).reserved == {}


def test_a_shared_job_has_slots_reserved_on_the_nodes_that_it_is_allotted():
    spec = JobSpec(job_id="training", folder="train", share=True, max_pods=4)
    views = tuple(
        NodeView(node=cpu_node(name, addr=name, job_id=None, folders=FOLDERS), seen_at=1000.0)
        for name in ("a", "b")
    )
    cluster = Cluster(nodes=views)
    job, _ = step(new_job(spec, 1000.0), Allotted({"b": 1}, "there is room"), 1000.0, Cluster())
    assert reserve([(job, cluster)], [], 1000.0).reserved == {"b": {0}}
    job, _ = step(job, Allotted({"a": 1, "b": 2}, "there is room"), 1000.0, Cluster())
    assert reserve([(job, cluster)], [], 1000.0).reserved == {"a": {0}, "b": {0, 1}}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_two_pods_share_a_slot_and_all_calms_down(make_site, seed):
    rng = random.Random(seed)
    site = make_site(6)
    site.submit(
        "teachers",
        pods=2,
        folder="teach",
        max_pods=6,
        max_failures=None,
        max_restarts_without_progress=1000,
    )
    for _ in range(60):
        _something_happens(site, rng)
        site.act(rng.randint(1, 3))
        plan = site.engine.plan_of("node-a")
        slots = [slot for pod in plan if pod.job_id != "teachers" for slot in pod.slots]
        # Teachers that leave hold theirs until their client says that they have ended.
        slots += [slot for pod in site.status("teachers").pods for slot in pod.slots]
        assert len(slots) == len(set(slots)), site.events("teachers")
    site.slow_to_end = False
    site.act(3)
    with suppress(Conflict):
        site.service.ask("teachers", ResumeAsked())
    site.service.ask("teachers", ResizeAsked(Resize(pods=3)))
    for status in site.service.statuses():
        if status.job_id != "teachers":
            site.service.delete(status.job_id)
    site.act(300)
    assert site.status("teachers").state is JobState.RUNNING
    assert site.count("teachers") == 3


def _something_happens(site: Site, rng: random.Random) -> None:
    match rng.randrange(8):
        case 0:
            name = f"training-{rng.randrange(3)}"
            with suppress(Conflict):
                pods = rng.randint(1, 4)
                site.submit(name, pods=pods, slots_per_pod=rng.randint(1, 2), max_preemptions=None)
        case 1:
            with suppress(NotFound):
                site.service.delete(f"training-{rng.randrange(3)}")
        case 2:
            with suppress(Conflict):
                resize = Resize(pods=rng.choice([None, 1, 3, 6]))
                site.service.ask("teachers", ResizeAsked(resize))
        case 3:
            for key, pod in site.pods.items():
                if rng.random() < 0.3:
                    site.pods[key] = replace(pod, phase=PodPhase.EXITED, exit_code=1)
        case 4:
            site.now += rng.choice([3.0, 10.0, 100.0])  # the node is silent
        case 5:
            site.slow_to_end = not site.slow_to_end
        case 6:
            paused = site.status("teachers").state is JobState.PAUSED
            with suppress(Conflict):
                event = ResumeAsked() if paused else PauseAsked()
                site.service.ask("teachers", event)
        case _:
            demand = wire.Demand(
                service="soft",
                students=rng.randint(0, 9),
                wait_share=rng.random(),
                samples_per_s=rng.uniform(0, 500),
            )
            with suppress(NotFound):
                site.service.demand("soft", demand)
