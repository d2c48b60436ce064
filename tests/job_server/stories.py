"""Random stories of several trainings on a few nodes, for `test_stories`.

The service, its database and what clients decide (`job_client.reconcile`) are the real ones.
Launchers and trainers are simulated (`tests.job_server.world`), and so is the time. The server is
killed just before or just after a write, its disk is full at times, nodes fall silent, lose power
and come back, and users ask for all sorts of things.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from job_client.reconcile import KillPod, LocalPod, ReleasePod, StartPod, StopPod, plan_changes
from job_server.api import wire
from job_server.api.errors import JobServerError, NotFound, StoreTrouble
from job_server.api.wire import JobState, PodPhase, PodState, Resize
from job_server.cluster.placement import Cluster
from job_server.jobs.events import (
    Event,
    KillAsked,
    LauncherAttached,
    LauncherReported,
    PauseAsked,
    ResizeAsked,
    ResumeAsked,
    StopAsked,
)
from job_server.server.engine import JobEntry
from job_server.server.service import JobService
from job_server.server.store import Store
from job_server.training import views
from job_server.training.core.job import Job
from job_server.training.rules.fencing import FENCE_MARGIN_S
from tests.job_server.world import HEARTBEAT_S, Launcher, Run, SimPod, World, node

TOTAL_STEPS = 30


class KilledError(BaseException):
    """The server's process ends here. No handler of errors sees it."""


class FaultyStore(Store):
    """A database that fails, or that the server is killed at, where a story says so."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.is_full = False
        self.fails_in: int | None = None  # so many writes before one that fails; None: none
        self.dies_in: int | None = None  # so many before the kill of the server; None: none
        self.dies_after = False  # what is being written then

    @contextlib.contextmanager
    def _fault(self) -> Iterator[None]:
        fails, dies = self.fails_in == 0, self.dies_in == 0
        self.fails_in = self.fails_in - 1 if self.fails_in else None
        self.dies_in = self.dies_in - 1 if self.dies_in else None
        if self.is_full or fails:
            raise StoreTrouble("the disk is full", 2.0)
        if dies and not self.dies_after:
            raise KilledError
        yield
        if dies:
            raise KilledError

    def save_job(self, *args: Any, **options: Any) -> None:
        with self._fault():
            super().save_job(*args, **options)

    def note_held(self, *args: Any) -> bool:
        with self._fault():
            return super().note_held(*args)

    def delete_job(self, job_id: str) -> None:
        with self._fault():
            super().delete_job(job_id)

    def save_node(self, node_id: str, data: object) -> None:
        with self._fault():
            super().save_node(node_id, data)

    def delete_node(self, node_id: str) -> None:
        with self._fault():
            super().delete_node(node_id)


@dataclass
class Machine:
    """A node, as far as all jobs share it."""

    node: wire.Node
    seen_at: float
    client: bool = True
    link: bool = True
    server_id: str = ""  # where it is registered
    on_the_way: list[wire.NodeReport] = field(default_factory=list)  # that come late, in any order
    died_at: float = -math.inf  # its client, the last time
    cut_at: float = -math.inf

    def cut(self, now: float) -> None:
        """Nothing more is heard of it; it goes on looking stopped if it did."""
        if not self.looks_stopped:
            self.cut_at = now

    @property
    def looks_stopped(self) -> bool:
        """Whether its client died as it was cut off: docs/known-limits.md says what follows."""
        limit_s = self.node.stop_after_s
        together = abs(self.died_at - self.cut_at) < FENCE_MARGIN_S + (limit_s or 0.0)
        return limit_s is not None and together


class Submission(World):
    """What one submission of a job has on the nodes."""

    def __init__(self, story: "Story", spec: wire.JobSpec) -> None:
        nodes = tuple(each.node for each in story.machines.values())
        super().__init__(spec, nodes, total_steps=TOTAL_STEPS)
        self.story = story
        self.now = story.server_now
        self.unsent: list[Event] = []

    @property
    def entry(self) -> JobEntry | None:
        """The server's; None: it is away, or has forgotten this submission."""
        if not self.story.up:
            return None
        found = self.story.service.engine.jobs.get(self.job.spec.job_id)
        same = found is not None and found.job.submitted_at == self.job.submitted_at
        return found if same else None

    def clock_is(self, now: float, loaded: JobEntry | None) -> None:
        """Note by how much the server moves this job's times back, as they would lie ahead."""
        if loaded is None or loaded.job.submitted_at != self.job.submitted_at:
            return
        job = loaded.job
        assert isinstance(job, Job)
        lead_s = 0.0 if job.state.ended else max(0.0, job.progress.accrued_at - now)
        self.set_back_s += lead_s
        self.committed = {stage: at - lead_s for stage, at in self.committed.items()}

    @property
    def cluster(self) -> Cluster:
        entry = self.entry
        assert entry is not None
        return self.story.service.engine.cluster(entry)

    def sync(self) -> None:
        """Take in time, nodes and what the server has made of the job since; check that."""
        self.now, self.up, self.life = self.story.server_now, self.story.up, self.story.life
        for name, machine in self.story.machines.items():
            sim = self.nodes[name]
            sim.link, sim.client, sim.seen_at = machine.link, machine.client, machine.seen_at
        entry = self.entry
        if entry is not None and entry.job is not self.job:
            before, job = self.job, entry.job
            assert isinstance(job, Job)
            self.job = job
            self.check(before)

    def send(self, event: Event) -> None:
        story, job_id, at = self.story, self.job.spec.job_id, self.job.submitted_at
        if self.entry is None:
            return
        assert isinstance(event, LauncherAttached | LauncherReported)
        try:
            with story.request():
                if isinstance(event, LauncherAttached):
                    attach = structs.replace(event.attach, submitted_at=at)
                    story.service.attach(job_id, attach.pod_id, attach)
                else:
                    report = structs.replace(event.report, submitted_at=at)
                    story.service.report(job_id, event.pod_id, report)
        except StoreTrouble:
            self.unsent.append(event)  # as launchers do
        except JobServerError:
            pass

    def check_release(self, pod: SimPod) -> None:
        # Where nothing is known to be lost, a job is stopped for others in a single step.
        events = self.story.store.events(self.job.spec.job_id, after=0, limit=1000)
        self.halted |= any("its pods are for others" in event.text for event in events)
        super().check_release(pod)

    def step(self, stage: int, members: list[tuple[SimPod, Launcher, Run]]) -> None:
        nodes = {pod.node_id for pod in members[0][2].plan.pods}
        blind = any(self.story.machines[name].looks_stopped for name in nodes)
        if stage < self.stepped and blind:
            return  # what it does is superseded, not counted
        super().step(stage, members)

    def act(self) -> None:
        """Let launchers follow their orders and report, and the trainers make a step."""
        again, self.unsent = self.unsent, []
        for event in again:
            self.send(event)
        for found in self.launchers():
            if self.entry is not None:
                self.launcher_acts(*found)
                self.sync()
        for sim, _, launcher in self.launchers():
            while launcher.outbox and sim.link and self.entry is not None and not launcher.hangs:
                self.deliver(launcher)
        self.train()
        self.leave_done()
        self.sync()

    def check_slots(self, job: Job) -> None:
        for name in self.nodes:
            done = {pod.pod_id for pod in job.pods if pod.launcher_done}
            named = [each for each in views.node_pods(job).get(name, ()) if each.pod_id not in done]
            slots = [s for pod in named if pod.want is wire.DesiredState.RUN for s in pod.slots]
            assert len(set(slots)) == len(slots), "two pods on one slot"


class Story:
    """Several jobs, three nodes and one server.

    Args:
        late: heartbeats of nodes come late, twice or out of order at times.
        shared: most of the jobs share the nodes.
    """

    def __init__(
        self, seed: int, folder: Path, *, late: bool = False, shared: bool = False
    ) -> None:
        self.shared = shared
        self.rng = random.Random(seed)
        self.post = random.Random(seed) if late else None
        self.now = 1_000_000.0  # of all but the server, whose clock may be set between two lives
        self.ahead_s = self.set_ahead_s = 0.0  # the server's clock: of this life, of the next one
        self.up, self.life = False, 0
        self.jobs: list[Submission] = []
        self.told: list[str] = []
        self.names = ["one", "two", "three", "four"] if shared else ["one", "two"]
        stop_after_s = self.rng.choice([None, None, 5.0])
        self.machines = {
            name: Machine(node(name, slots, job_id=None, stop_after_s=stop_after_s), self.now)
            for name, slots in (("a", 2), ("b", 2), ("c", 1))
        }
        for machine in self.machines.values():
            machine.node = replace(machine.node, folders=("train",))
        self._path = str(folder / f"{seed}.db")
        self.start_server()

    # --- the server -----------------------------------------------------------------------------

    def start_server(self) -> None:
        if self.up:
            return
        self.store = FaultyStore(self._path)
        self.ahead_s = self.set_ahead_s
        self.service = JobService(self.store, heartbeat_s=HEARTBEAT_S, now=lambda: self.server_now)
        for job in self.jobs:
            job.clock_is(self.server_now, self.service.engine.jobs.get(job.job.spec.job_id))
        self.service.engine.lock.acquire()  # its timer waits: here time passes by `pass_to`
        self.up, self.life = True, self.life + 1
        with self.request():
            self.service.start()

    @property
    def server_now(self) -> float:
        return self.now + self.ahead_s

    def end_server(self, *, kill: bool) -> None:
        """End it in order, or so that nothing more is written."""
        if not self.up:
            return
        self.up = False
        self.store.is_full = kill
        self.store.dies_in = None
        self.service.engine.lock.release()
        self.service.close()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Whoever asks a server that is killed meanwhile gets no answer."""
        try:
            yield
        except KilledError:
            self.end_server(kill=True)

    def pass_to(self, then: float) -> None:
        """Let time pass, with a tick whenever the server wants one."""
        for _ in range(400):
            if not self.up:
                break
            wait_s = then - self.now
            with self.request():
                wait_s = self.service.engine.tick()
            self.sync()
            if self.now + wait_s > then:
                break
            self.now += wait_s
            self.fence()
        else:
            raise AssertionError("the server's clock turns without end")
        self.now = max(self.now, then)
        self.fence()
        self.sync()

    def sync(self) -> None:
        for job in self.jobs:
            job.sync()

    def fence(self) -> None:
        for name, machine in self.machines.items():
            limit_s = machine.node.stop_after_s
            if machine.client and limit_s is not None and self.now >= machine.seen_at + limit_s:
                for _, pod in self.pods(name):
                    if pod.phase is not PodPhase.EXITED:
                        pod.end(signal=15)

    # --- clients --------------------------------------------------------------------------------

    def pods(self, name: str) -> list[tuple[Submission, SimPod]]:
        return [(job, pod) for job in self.jobs for pod in job.nodes[name].pods.values()]

    def client_acts(self, name: str) -> None:
        """Register if need be, follow the plan, report."""
        machine = self.machines[name]
        if not (machine.client and machine.link and self.up):
            return
        service = self.service
        with contextlib.suppress(StoreTrouble), self.request():
            if machine.server_id != service.server_id:
                service.register(machine.node)
                machine.server_id, machine.seen_at = service.server_id, self.now
            self.follow(name, service.engine.registry.get(name).plan.value)
            sent_ms = int(self.now * 1000)
            pods = self.states(name)
            self.report(machine, wire.NodeReport(node_id=name, pods=pods, sent_ms=sent_ms))
        self.sync()

    def report(self, machine: Machine, report: wire.NodeReport) -> None:
        """Let the server get a node's report, or an older one, or both."""
        post, waits = self.post, machine.on_the_way
        if post is not None and post.random() < 0.3:
            waits.insert(post.randint(0, len(waits)), report)
        if post is not None and waits and post.random() < 0.3:
            self.service.report_node(report.node_id, waits.pop())
            if post.random() < 0.5:
                return  # the newer one is among those that wait, or lost
        self.service.report_node(report.node_id, report)
        machine.seen_at = self.now

    def follow(self, name: str, plan: tuple[wire.NodePod, ...]) -> None:
        by_key = {(job.job.spec.job_id, pod.pod_id): (job, pod) for job, pod in self.pods(name)}
        local = [
            LocalPod(
                job_id=job.job.spec.job_id,
                pod_id=pod.pod_id,
                phase=pod.phase,
                grace_s=1.0,
                slots=pod.slots,
                submitted_at=job.job.submitted_at,
            )
            for job, pod in by_key.values()
        ]
        for action in plan_changes(local, plan):
            match action:
                case StartPod(spec):
                    self.start_pod(name, spec)
                case ReleasePod(key):
                    job, pod = by_key[key]
                    job.sync()
                    if job.entry is not None:
                        job.check_release(pod)
                    del job.nodes[name].pods[pod.pod_id]
                case StopPod(key) | KillPod(key):
                    by_key[key][1].end(signal=9 if isinstance(action, KillPod) else 15)
        for spec in plan:
            found = by_key.get((spec.job_id, spec.pod_id))
            if found is not None and found[0].job.submitted_at == spec.submitted_at:
                job, pod = found
                pod.save = job.saved(job.nodes[name], pod, spec.save)

    def start_pod(self, name: str, spec: wire.NodePod) -> None:
        for job, pod in self.pods(name):
            known = job.job.pod(pod.pod_id)
            done = known is not None and known.launcher_done
            runs = pod.phase is not PodPhase.EXITED and not done
            assert not runs or set(pod.slots).isdisjoint(spec.slots), "a slot in use is given"
        job = next(
            each
            for each in self.jobs
            if (each.job.spec.job_id, each.job.submitted_at) == (spec.job_id, spec.submitted_at)
        )
        pod = job.nodes[name].pods[spec.pod_id] = SimPod(spec.pod_id, spec.slots)
        pod.launcher = Launcher(spec.pod_id)

    def states(self, name: str) -> tuple[PodState, ...]:
        return tuple(
            PodState(
                pod_id=pod.pod_id,
                job_id=job.job.spec.job_id,
                phase=pod.phase,
                exit_code=pod.code,
                signal=pod.signal,
                save=pod.save,
                holds=pod.holds,
                snapshot=pod.snapshot if pod.phase is PodPhase.EXITED else None,
                submitted_at=job.job.submitted_at,
            )
            for job, pod in self.pods(name)
        )

    # --- what happens ---------------------------------------------------------------------------

    def round(self) -> None:
        for name in self.machines:
            self.client_acts(name)
        for job in self.jobs:
            job.act()
        self.pass_to(self.now + 0.5)

    def submit(self, job_id: str) -> None:
        choose = self.rng.choice
        pods = choose([1, 2, 2, 3])
        if self.shared and choose([True, True, False]):
            self.submit_spec(self.shared_spec(job_id))
            return
        spec = wire.JobSpec(
            job_id=job_id,
            max_pods=3,
            pods=pods,
            folder="train",
            overlap=choose(["auto", "off", "join"]),
            prepare_timeout_s=10.0,
            start_timeout_s=5.0,
            max_preemptions=choose([None, None, 1]),
            keep_failed_s=600.0,
        )
        self.submit_spec(spec)

    def shared_spec(self, job_id: str, **changes: Any) -> wire.JobSpec:
        choose = self.rng.choice
        fields: dict[str, Any] = {
            "job_id": job_id,
            "share": True,
            "min_pods": choose([1, 1, 2]),
            "max_pods": choose([2, 3, 4]),
            "priority": choose([0, 0, 0, 1, 2]),
            "after": choose([(), (), (), ("one",)]) if job_id != "one" else (),
            "folder": "train",
            "overlap": choose(["auto", "off", "join"]),
            "prepare_timeout_s": 10.0,
            "keep_failed_s": 600.0,
        }
        return wire.JobSpec(**{**fields, **changes})

    def submit_spec(self, spec: wire.JobSpec) -> None:
        """Submit a job, which the server may refuse."""
        if not self.up:
            return
        job = Submission(self, spec)
        job.has_path = self.rng.choice([True, False])
        job.job = replace(job.job, submitted_at=self.server_now)
        self.jobs.append(job)
        with contextlib.suppress(JobServerError), self.request():
            self.service.submit(spec)
        self.now += 0.01

    def ask(self, event: Event) -> None:
        jobs = [job for job in self.jobs if job.entry is not None]
        if jobs:
            job_id = self.rng.choice(jobs).job.spec.job_id
            with contextlib.suppress(JobServerError), self.request():
                self.service.ask(job_id, event)
            self.sync()

    def delete(self, job_id: str) -> None:
        if self.up:
            with contextlib.suppress(NotFound, StoreTrouble), self.request():
                self.service.delete(job_id)
            self.sync()

    def trouble(self) -> None:
        """Let something go wrong, on a node, with a pod or with the server."""
        rng = self.rng
        machine = rng.choice(list(self.machines.values()))
        pods = [each for name in self.machines for each in self.pods(name)]
        launchers = [(job, *each) for job in self.jobs for each in job.launchers()]

        def kill_trainer() -> None:
            if launchers:
                job, _, pod, launcher = rng.choice(launchers)
                job.kill_trainer(pod, launcher)

        def kill_pod() -> None:
            if pods:
                rng.choice(pods)[1].end(signal=9)

        def toggle_link() -> None:
            machine.link = not machine.link
            if not machine.link:
                machine.cut(self.now)

        def toggle_client() -> None:
            machine.client, machine.server_id = not machine.client, ""
            if not machine.client:
                machine.died_at = self.now

        def lose_power() -> None:
            machine.server_id = ""
            for job in self.jobs:
                for pod in job.nodes[machine.node.node_id].pods.values():
                    pod.die()

        def fill_disk() -> None:
            self.store.is_full = self.up and not self.store.is_full

        def fail_a_write() -> None:
            self.store.fails_in = rng.randrange(5)

        def die_at_a_write() -> None:
            self.store.dies_in, self.store.dies_after = rng.randrange(5), rng.random() < 0.5

        def cut_all_off() -> None:
            for each in self.machines.values():
                if each.link:
                    each.cut(self.now)
                each.link = False
                self.round()

        def restart() -> None:
            if self.up:
                self.end_server(kill=rng.random() < 0.5)
            else:
                self.start_server()

        choices: list[Callable[[], None]] = [
            kill_trainer, kill_pod, toggle_link, toggle_client, lose_power, fill_disk,
            fail_a_write, die_at_a_write, cut_all_off, restart, restart,
        ]  # fmt: skip
        chosen = rng.choice(choices)
        self.told.append(f"{self.now - 1e6:.1f} {chosen.__name__} {machine.node.node_id}")
        chosen()
        self.sync()

    def request_something(self) -> None:
        rng = self.rng
        events = (
            ResizeAsked(Resize(pods=rng.randint(1, 3))),
            ResizeAsked(Resize(pods=rng.randint(1, 3))),
            PauseAsked(),
            ResumeAsked(),
            StopAsked(),
            KillAsked(wire.Kill(rank=rng.randrange(3))),
        )
        kind = rng.randrange(8)
        self.told.append(f"{self.now - 1e6:.1f} request {kind}")
        if kind < len(events):
            self.ask(events[kind])
        elif kind == len(events):
            self.delete(rng.choice(self.names))
        else:
            self.submit(rng.choice(self.names))

    def happen(self) -> None:
        chance = self.rng.random()
        if chance < 0.4:
            for _ in range(1 + self.rng.randrange(5)):
                self.round()
        elif chance < 0.5:
            for machine in self.machines.values():
                machine.cut(self.now)  # nobody says anything meanwhile
            self.pass_to(self.now + self.rng.choice([0.7, 3.0, 20.0]))
        elif chance < 0.75:
            self.trouble()
        else:
            self.request_something()

    # --- the end --------------------------------------------------------------------------------

    def heal(self) -> None:
        self.start_server()
        self.store.is_full, self.store.fails_in, self.store.dies_in = False, None, None
        for machine in self.machines.values():
            machine.client = machine.link = True
        self.sync()
        for job in self.jobs:
            if job.entry is not None and job.job.state is JobState.PAUSED:
                self.service.ask(job.job.spec.job_id, ResumeAsked())
            if job.entry is not None and "or stop this job" in job.status.reason:
                self.service.ask(job.job.spec.job_id, StopAsked())  # it waits for one that failed
        self.sync()

    def finish(self) -> None:
        """Heal all, and check that every job comes to its end and leaves nothing behind."""
        for _ in range(60):
            self.heal()
            for _ in range(15):
                self.round()
            known = [job for job in self.jobs if job.entry is not None]
            if all(job.job.state.ended for job in known):
                break
        else:
            raise AssertionError([(job.job.state, job.job.reason) for job in known])
        for _ in range(10):
            self.round()
        left = [pod for name in self.machines for pod in self.pods(name)]
        assert not left, f"left behind: {left}"
        for job in known:
            assert not job.job.pods
            if job.job.state is JobState.SUCCEEDED:
                assert job.durable == TOTAL_STEPS, "a false success"
            events = self.store.events(job.job.spec.job_id, after=0, limit=1000)
            assert not [each.text for each in events if "defect" in each.text]
        self.end_server(kill=False)
        self.start_server()
        assert not self.service.engine.unreadable
        self.end_server(kill=False)
