"""A simulated cluster around one job: clients, launchers, trainers, messages and a server.

They behave as docs/architecture.md says, but die, fall silent, and have their messages delayed,
doubled and overtaken whenever a test says so. Steps are global: stage s makes one only while all
its trainers train, as in an all-reduce; so the world can see when two worlds would both count.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from job_server.api import wire
from job_server.api.wire import (
    DesiredState,
    JobSpec,
    Order,
    PodPhase,
    PodReport,
    PodStagePhase,
    PodState,
    ReportKind,
    Resize,
    Save,
    SavePhase,
    SaveState,
    SnapshotRef,
    StagePlan,
    StageRecord,
    TrainerError,
    Way,
)
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.events import (
    Event,
    KillAsked,
    LauncherAttached,
    LauncherReported,
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
from job_server.jobs.work import Goal
from job_server.training import machine, views
from job_server.training.core.allocation import unsaved
from job_server.training.core.job import HaltPhase, Job, JobStage, age, same_but_progress
from job_server.training.reports.launcher_reports import ELSEWHERE
from job_server.training.views import PodView

HEARTBEAT_S = 1.0
ALIVE_S = 10.0  # a launcher is never silent for longer
RUNNING = wire.JobState.RUNNING


def node(
    name: str,
    slots: int = 2,
    *,
    job_id: str | None = "job",
    stop_after_s: float | None = None,
    saves: bool = True,
    gpu_bytes: int = 0,
) -> wire.Node:
    kind = wire.SlotKind.GPU if gpu_bytes else wire.SlotKind.CPU
    return wire.Node(
        node_id=name,
        addr=f"addr-{name}",
        slots=tuple(wire.Slot(index=i, kind=kind, memory_bytes=gpu_bytes) for i in range(slots)),
        port_low=20000,
        port_high=20000 + 8 * slots - 1,
        job_id=job_id,
        stop_after_s=stop_after_s,
        saves=saves,
    )


@dataclass
class Run:
    """The trainers of one pod for one attempt at a stage."""

    plan: StagePlan
    phase: PodStagePhase = PodStagePhase.STARTED
    step: int = 0
    first_step: bool = False
    peer_lost: bool = False
    blank: bool = False  # it has joined, and gets its state from those that stayed

    @property
    def key(self) -> tuple[int, int]:
        return self.plan.stage, self.plan.attempt


@dataclass
class Launcher:
    pod_id: str
    run: Run | None = None
    prepared: Run | None = None  # beside `run`: trainers that wait for a state
    joining: Run | None = None  # the trainers of `run` have formed the group of this one, too
    joins: bool = True  # its trainers say that they can
    refuses: bool = False  # ... but do not, the next time
    left: set[tuple[int, int]] = field(default_factory=set)  # runs that went on as another
    attached_to: int = -1  # which life of the server
    alive_at: float = 0.0  # when it is to say that it lives, if it has nothing else to say
    told: set[object] = field(default_factory=set)
    outbox: list[Event] = field(default_factory=list)  # in order; a lost message is sent again
    kills_done: set[str] = field(default_factory=set)
    ports_fail: bool = False
    done: bool = False
    done_at: float = math.inf
    hangs: bool = False  # does and says nothing more; its trainers go on


@dataclass
class SimPod:
    pod_id: str
    slots: tuple[int, ...]
    phase: PodPhase = PodPhase.RUNNING
    code: int | None = None
    signal: int | None = None
    launcher: Launcher | None = None
    snapshot: SnapshotRef | None = None  # in its shim
    tail: bool = False  # its launcher has exited 0, its script goes on
    save: SaveState | None = None  # what its client writes of that, or has written
    holds: bool = True  # its shim is there
    complete: bool = False  # its launcher has written that the training is

    def die(self) -> None:
        """End with its shim, as a client finds it that starts after a loss of power."""
        if self.phase is not PodPhase.EXITED:
            self.end(signal=9)
        self.snapshot, self.holds = None, False

    def end(self, code: int | None = None, signal: int | None = None) -> None:
        self.phase, self.code, self.signal, self.launcher = PodPhase.EXITED, code, signal, None
        self.tail = False


@dataclass
class SimNode:
    node: wire.Node
    seen_at: float
    shortage: str = ""  # of memory or disk; "": it gets new pods
    registered: bool = True
    link: bool = True
    client: bool = True
    pods: dict[str, SimPod] = field(default_factory=dict)


class World:
    """See the module. `now` moves only by `pass_time`."""

    def __init__(
        self,
        spec: wire.JobSpec,
        nodes: tuple[wire.Node, ...],
        *,
        elastic: bool = True,
        total_steps: int = 40,
    ) -> None:
        self.now = 1000.0
        self.elastic, self.total_steps = elastic, total_steps
        self.nodes = {n.node_id: SimNode(n, self.now) for n in nodes}
        self.job = machine.new_job(spec, self.now)
        self.stored = self.job  # as on disk; through JSON when the server restarts
        self.sent = 0
        self.up, self.life = True, 0
        self.old: list[Event] = []  # delivered once already
        self.pod_ids: set[str] = set()
        self.committed: dict[int, float] = {}
        self.committed_alone = 0  # stages whose trainers ask nobody what they begin from
        self.max_stage = 0
        self.set_back_s = 0.0  # the clock, between two lives of the server
        self.durable = 0  # newest checkpoint
        self.shares_path = True  # all nodes see what one has written there
        self.cuts: dict[int, int] = {}  # stage -> step after which its ranks park
        self.stepped = 0  # newest stage that has made a step
        self.reasons: list[str] = []
        self.refusal = ""
        self.fail_next: list[str] = []
        self.tail_code = 0  # of scripts, after their launcher has exited 0
        self.script_fails = 0  # how many more package scripts fail
        self.clients_lie = False  # a pod may live that its client reports as exited
        self.has_path = True  # the script has a checkpoint path, which all nodes see
        self.halted = False  # a pause or an end was begun
        self.full: set[str] = set()  # nodes that can write nothing; "path": nobody can write there
        self.save_rounds = 2  # so many reports does the writing of a state take
        self.stuck = False  # no byte is written any more
        self.memory = True  # there is some for snapshots
        self.shims_answer = True  # else no launcher knows what its shim holds
        self.gpu_bytes_used = 0  # on each GPU
        self.in_run_folders: set[tuple[str, int, int]] = set()  # node, stage, step

    # --- the server -----------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        views = tuple(
            NodeView(
                node=sim.node,
                seen_at=sim.seen_at,
                shortage=sim.shortage,
                memory_used={slot.index: self.gpu_bytes_used for slot in sim.node.slots},
            )
            for sim in self.nodes.values()
            if sim.registered
        )
        return Cluster(nodes=views, heartbeat_s=HEARTBEAT_S)

    def send(self, event: Event) -> None:
        """Step the job, as the shell does, and check what must always hold."""
        if not self.up:
            return
        before = self.job
        self.job, reason = machine.step(before, event, self.now, self.cluster)
        if reason:
            self.reasons.append(f"{self.now - 1000:.1f} {type(event).__name__}: {reason}")
        if not same_but_progress(before, self.job):
            self.stored = self.job
        self.check(before)
        self.sent += 1
        if self.sent % 50 == 0:  # slow beside all else, so not each time
            self.check_json()

    def ask(self, event: Event) -> bool:
        """Send what a user asks; False: refused."""
        try:
            self.send(event)
        except RequestRefused as refusal:
            self.refusal = str(refusal)
            return False
        return True

    def stop_server(self) -> None:
        self.up = False

    def start_server(self, *, clock_back_s: float = 0.0) -> None:
        """Start it again, from what is on disk; the machine's clock was set back meanwhile."""
        if self.up:
            return
        self.up, self.life = True, self.life + 1
        self.now -= clock_back_s
        lead_s = max(0.0, self.stored.progress.accrued_at - self.now)
        self.set_back_s += lead_s
        self.committed = {stage: at - lead_s for stage, at in self.committed.items()}
        self.job = wire.decode(Job, wire.encode(self.stored))
        assert self.job == self.stored
        for sim in self.nodes.values():
            sim.registered = False
        self.send(ServerRestarted())

    def restore(self, copy: Job) -> None:
        """Give the server, which is away, an older copy of its database."""
        assert not self.up
        self.stored = copy
        committed = {record.stage: record.committed_at for record in copy.records}
        self.committed = {stage: at for stage, at in committed.items() if at is not None}
        self.pod_ids, self.max_stage = {pod.pod_id for pod in copy.pods}, copy.next_stage - 1

    def check_json(self) -> None:
        job = self.job
        status = views.job_status(job, self.now, 0)
        assert wire.decode(wire.JobStatus, wire.encode(status)) == status
        assert wire.decode(Job, wire.encode(job)) == job

    def check(self, before: Job) -> None:
        job = self.job
        self.halted |= job.goal is not Goal.RUN
        status = views.job_status(job, self.now, 0)
        lived_s = self.end_or_now(job) + self.set_back_s - job.submitted_at
        assert abs(status.account.total_s - lived_s) < 1e-6
        assert status.reason
        assert job.next_stage >= before.next_stage
        for record in job.records:
            if record.committed_at is not None:
                assert self.committed.setdefault(record.stage, record.committed_at) == (
                    record.committed_at
                ), "a stage was committed twice"
        self.check_restore(job, before)
        if job.preparing is not None and job.preparing.stage not in (
            s.stage for s in before.stages
        ):
            assert job.preparing.stage > self.max_stage, "a stage number came again"
            self.max_stage = job.preparing.stage
        for pod in job.pods:
            if before.pod(pod.pod_id) is None:
                assert pod.pod_id not in self.pod_ids, f"{pod.pod_id} came again"
                self.pod_ids.add(pod.pod_id)
        self.check_stages(job)
        self.check_slots(job)
        self.check_kept(job, before)
        deadline = machine.next_deadline(job, self.now, self.cluster)
        assert deadline is None or deadline > self.now

    def check_restore(self, job: Job, before: Job) -> None:
        """What every node is said to have when a stage is committed, every node has."""
        stage = job.active
        if stage is None or not stage.committed or stage.restore_from is None:
            return
        source = stage.restore_from
        is_new = before.active is None or before.active.stage != stage.stage
        if not is_new or not source.local_on_all_nodes:
            return
        self.committed_alone += 1
        for node_id in {member.pod.node_id for member in stage.members}:
            wanted = SnapshotRef(stage=source.stage, step=source.step, serial=source.serial)
            pods = self.nodes[node_id].pods.values()
            # One that has lost its power just now says so, and its trainers start again.
            assert any(pod.snapshot == wanted or not pod.holds for pod in pods), (node_id, wanted)

    def check_release(self, pod: SimPod) -> None:
        """The newest state of a job is let go of only once a later stage has one of its own."""
        job, known = self.job, pod.snapshot
        if job.state.ended or job.done or job.ending.discard:
            return
        if known is None or known.step <= self.durable or known.stage < job.snapshot_stage:
            return
        if job.ending.saved is not None and age(job.ending.saved) >= age(known):
            return
        if self.halted and not job.elastic:
            return  # docs/known-limits.md: nothing was heard of the loop yet
        others = [p.snapshot for sim in self.nodes.values() for p in sim.pods.values() if p != pod]
        assert any(ref is not None and age(ref) >= age(known) for ref in others), (
            f"{pod.pod_id} of {job.spec.job_id} held the newest state, {known}"
        )

    def check_kept(self, job: Job, before: Job) -> None:
        """No pause and no end lets go of the newest state, unless somebody asked for that."""
        if job.ending.discard or before.state.ended:
            return
        gone = job.state.ended and job.state is not wire.JobState.SUCCEEDED
        gone |= job.halt is not None and job.halt.phase is HaltPhase.RELEASE
        if gone and (before.halt is None or before.halt.phase is not HaltPhase.RELEASE):
            held = {
                pod.pod_id
                for sim in self.nodes.values()
                for pod in sim.pods.values()
                if pod.snapshot is not None and sim.node.saves
            }
            pods = tuple(pod for pod in before.pods if pod.pod_id in held)
            lost = unsaved(replace(before, ending=job.ending, done=job.done, pods=pods))
            assert lost is None, f"lost: {lost}"

    def end_or_now(self, job: Job) -> float:
        return self.now if job.ended_at is None else job.ended_at

    def check_stages(self, job: Job) -> None:
        orders = views.pod_orders(job)
        told_go = [
            stage.stage
            for stage in job.stages
            if any(
                plan.stage == stage.stage and plan.order in (Order.GO, Order.RESUME)
                for pod_id in stage.pod_ids
                for plan in (orders.get(pod_id) or PodView()).plans
            )
        ]
        assert len(told_go) <= 1, f"two stages are told to train: {told_go}"
        for stage in job.stages:
            assert stage.members, "a stage without pods"
            ranks = [rank for member in stage.members for rank in member.pod.ranks]
            assert ranks == list(range(len(ranks)))
            ports = [(m.pod.addr, port) for m in stage.members for port in m.pod.ports]
            assert len(set(ports)) == len(ports) == len(ranks)

    def check_slots(self, job: Job) -> None:
        pods_of, held_of = views.node_pods(job), views.slots_held(job)
        for name in self.nodes:
            wanted = [p for p in pods_of.get(name, ()) if p.want is DesiredState.RUN]
            slots = [slot for pod in wanted for slot in pod.slots]
            assert len(set(slots)) == len(slots), "two pods on one slot"
            held = held_of.get(name, frozenset())
            assert set(slots) <= held
            sim = self.nodes[name]
            told = sim.client and sim.link and not self.clients_lie
            for pod in sim.pods.values() if told else ():
                known = job.pod(pod.pod_id) is not None
                if pod.launcher is not None and known and not job.legacy:
                    assert held.issuperset(pod.slots), "another job would get a slot in use"

    # --- clients --------------------------------------------------------------------------------

    def client_acts(self, sim: SimNode) -> None:
        """One pass of a node's client: register if need be, act on its plan, report."""
        if not (sim.client and sim.link and self.up):
            return
        if not sim.registered:
            sim.registered, sim.seen_at = True, self.now
            self.send(NodesChanged())
        for wanted in views.node_pods(self.job).get(sim.node.node_id, ()):
            self.reconcile(sim, wanted)
        named = {pod.pod_id for pod in views.node_pods(self.job).get(sim.node.node_id, ())}
        for pod_id in [pod_id for pod_id in sim.pods if pod_id not in named]:
            if sim.node.saves:
                self.check_release(sim.pods[pod_id])
            del sim.pods[pod_id]
        self.report(sim)

    def reconcile(self, sim: SimNode, wanted: wire.NodePod) -> None:
        pod = sim.pods.get(wanted.pod_id)
        if pod is None:
            held = [p for p in sim.pods.values() if p.phase is not PodPhase.EXITED]
            busy = {s for p in held for s in p.slots}
            may_start = wanted.want is DesiredState.RUN and not wanted.started
            if may_start and busy.isdisjoint(wanted.slots):
                pod = sim.pods[wanted.pod_id] = SimPod(wanted.pod_id, wanted.slots)
                if self.script_fails:
                    self.script_fails -= 1
                    pod.end(code=3)
                else:
                    pod.launcher = Launcher(wanted.pod_id)
        elif pod.phase is not PodPhase.EXITED and wanted.want is not DesiredState.RUN:
            pod.end(signal=9) if wanted.want is DesiredState.KILL else pod.end(code=0)
        if pod is not None:
            pod.save = self.saved(sim, pod, wanted.save)

    def saved(self, sim: SimNode, pod: SimPod, order: Save | None) -> SaveState | None:
        """Write a bit more of the state that a pod's shim holds, as ordered."""
        if order is None:
            return None
        state, held = pod.save, pod.snapshot
        if state is None or state.id != order.id:
            if held is None:
                failed, why = SavePhase.FAILED, "it holds nothing"
                return SaveState(id=order.id, phase=failed, reason=why, nothing=True)
            return SaveState(
                id=order.id,
                phase=SavePhase.WRITING,
                stage=held.stage,
                step=held.step,
                total_bytes=self.save_rounds,
            )
        if state.phase is not SavePhase.WRITING or self.stuck:
            return state
        if state.written_bytes < self.save_rounds:
            return replace(state, written_bytes=state.written_bytes + 1)
        if self.has_path and not order.spare and not {"path", sim.node.node_id} & self.full:
            self.durable = max(self.durable, state.step)
            return replace(state, phase=SavePhase.WRITTEN, path="/shared/checkpoint")
        if sim.node.node_id in self.full:
            return replace(state, phase=SavePhase.FAILED, reason="No space left on device")
        self.in_run_folders.add((sim.node.node_id, state.stage, state.step))
        path = f"/{sim.node.node_id}/run/checkpoint"
        return replace(state, phase=SavePhase.WRITTEN, path=path, spare=True)

    def client_leaves(self, sim: SimNode) -> None:
        """An orderly end: its pods are stopped, the newest state is written, it says goodbye."""
        if not sim.client:
            return
        for pod in sim.pods.values():
            if pod.phase is not PodPhase.EXITED:
                pod.end(signal=15)
        hears = sim.link and self.up and sim.registered
        if hears:
            self.report(sim)
        told = {
            p.pod_id for p in views.node_pods(self.job).get(sim.node.node_id, ()) if p.last_save
        }
        held = [p.snapshot for p in sim.pods.values() if p.snapshot is not None]
        saved = None
        if told & set(sim.pods) and held and sim.node.node_id not in self.full:
            newest = max(held, key=lambda ref: (ref.stage, ref.step, ref.serial))
            spare = not self.has_path or "path" in self.full
            saved = SaveState(
                id=0,
                phase=SavePhase.WRITTEN,
                stage=newest.stage,
                step=newest.step,
                serial=newest.serial,
                path=f"/{sim.node.node_id}/run/checkpoint" if spare else "/shared/checkpoint",
                spare=spare,
            )
            if spare:
                self.in_run_folders.add((sim.node.node_id, newest.stage, newest.step))
            else:
                self.durable = max(self.durable, newest.step)
        for pod in sim.pods.values():
            pod.snapshot = None  # its shim goes, whether that was written or not
        if hears:
            self.report(sim, saved, leaving=True)
            sim.registered = False
            self.send(NodesChanged())
        sim.client = False
        sim.pods.clear()

    def report(
        self, sim: SimNode, saved: SaveState | None = None, *, leaving: bool = False
    ) -> None:
        states = tuple(
            PodState(
                pod_id=pod.pod_id,
                job_id="job",
                phase=pod.phase,
                exit_code=pod.code,
                signal=pod.signal,
                reason="the package script failed" if pod.code == 3 else "",
                save=saved or pod.save,
                holds=pod.holds and not leaving,
                snapshot=pod.snapshot if pod.phase is PodPhase.EXITED else None,
                complete=pod.complete,
            )
            for pod in sim.pods.values()
        )
        event = NodeReported(sim.node.node_id, states)
        sim.seen_at = self.now
        self.send(event)

    # --- launchers ------------------------------------------------------------------------------

    def launchers(self) -> list[tuple[SimNode, SimPod, Launcher]]:
        return [
            (sim, pod, pod.launcher)
            for sim in self.nodes.values()
            for pod in sim.pods.values()
            if pod.launcher is not None
        ]

    def launcher_acts(self, sim: SimNode, pod: SimPod, launcher: Launcher) -> None:
        """Attach if need be, then follow the orders of the moment."""
        if not (sim.link and self.up) or launcher.hangs:
            return
        if launcher.attached_to != self.life:
            launcher.attached_to = self.life
            launcher.told.clear()
            launcher.outbox = [self.attach(sim, pod, launcher)]
            return
        orders = views.pod_orders(self.job).get(pod.pod_id)
        if orders is None or orders.leave:
            pod.end(code=0)
            return
        run = launcher.run
        keys = {(plan.stage, plan.attempt) for plan in orders.plans}
        if launcher.prepared is not None and launcher.prepared.key not in keys:
            launcher.prepared = None
        if launcher.joining is not None and launcher.joining.key not in keys:
            launcher.joining = None
        if run is not None and run.key not in keys and not launcher.done:
            run.phase = PodStagePhase.ENDED
        for plan in orders.plans:
            self.follow(pod, launcher, plan)
        if launcher.outbox:
            launcher.alive_at = self.now + ALIVE_S
        elif orders.plans and self.now >= launcher.alive_at:
            launcher.alive_at = self.now + ALIVE_S
            self.tell(pod, orders.plans[-1], ReportKind.ALIVE, once=self.now)

    def attach(self, sim: SimNode, pod: SimPod, launcher: Launcher) -> Event:
        blank = wire.Attach(
            pod_id=pod.pod_id, node_id=sim.node.node_id, pid=1, snapshot=pod.snapshot
        )
        run = launcher.run
        if run is None:
            return LauncherAttached(blank)
        failure = self.failed(run) if run.phase is PodStagePhase.FAILED else None
        return LauncherAttached(
            replace(
                blank,
                stage=run.plan.stage,
                attempt=run.plan.attempt,
                phase=run.phase,
                step=run.step,
                elastic=self.elastic and run.phase is not PodStagePhase.STARTED,
                done=launcher.done,
                failure=failure,
            )
        )

    def failed(self, run: Run) -> PodReport:
        return PodReport(
            kind=ReportKind.FAILED,
            stage=run.plan.stage,
            attempt=run.plan.attempt,
            rank=None,
            code=-9,
            peer_lost=run.peer_lost,
        )

    def follow(self, pod: SimPod, launcher: Launcher, plan: StagePlan) -> None:
        prepared = launcher.prepared
        begins = plan.order in (Order.GO, Order.CUT, Order.RESUME)
        if begins and prepared is not None and prepared.key == (plan.stage, plan.attempt):
            if prepared.phase is PodStagePhase.FAILED:
                self.tell(pod, plan, ReportKind.FAILED, reason="a trainer died")  # once
                return
            formed = prepared.plan
            assert not plan.missing_pods or plan.missing_pods in formed.survivable_failures, (
                "no group was formed without them"
            )
            left = [p.pod_id for p in formed.pods if p.pod_id not in plan.missing_pods]
            assert [p.pod_id for p in plan.pods] == left
            launcher.run = Run(plan, step=self.restored(plan), blank=plan.way is Way.JOIN)
            launcher.prepared = None
        joining = launcher.joining
        if begins and joining is not None and joining.key == (plan.stage, plan.attempt):
            stays = launcher.run
            assert stays is not None
            assert stays.phase in (PodStagePhase.PARKED, PodStagePhase.FAILED), "joined amid a step"
            launcher.left.add(stays.key)
            launcher.run = replace(joining, phase=stays.phase, step=stays.step)
            if stays.phase is PodStagePhase.PARKED:
                launcher.run.phase = PodStagePhase.LOADED
            launcher.joining = None
        run = launcher.run
        mine = run is not None and run.key == (plan.stage, plan.attempt)
        match plan.order:
            case Order.PREPARE if plan.way is Way.JOIN and self.stays(run):
                assert run is not None
                self.follow_join(pod, launcher, plan, run)
            case Order.PREPARE if plan.way in (Way.REPLACE, Way.JOIN):
                self.follow_prepare(pod, launcher, plan)
            case Order.PREPARE:
                self.tell(pod, plan, ReportKind.READY)
            case Order.END:
                if run is not None and mine:
                    run.phase = PodStagePhase.ENDED
                    launcher.done = False  # it exits only by a stage that it is not told to end
                self.tell(pod, plan, ReportKind.ENDED)
            case Order.START:
                self.follow_start(pod, launcher, plan)
            case _ if (plan.stage, plan.attempt) in launcher.left:
                pass
            case _ if run is None or not mine:
                self.tell(pod, plan, ReportKind.FAILED, reason="no trainers of this stage")
            case Order.CUT:
                self.cuts.setdefault(plan.stage, run.step + 1)
                self.going(launcher, run)
                if run.phase is PodStagePhase.PARKED:
                    self.tell(pod, plan, ReportKind.DRAINED, once=run.step)
            case _:
                self.cuts.pop(plan.stage, None)
                if run.phase is PodStagePhase.PARKED:
                    run.phase = PodStagePhase.TRAINING
                    self.tell(pod, plan, ReportKind.PROGRESS, once=("resumed", self.now))
                self.going(launcher, run)
        if run is not None and mine:
            self.obey_kills(pod, launcher, plan, run)

    def obey_kills(self, pod: SimPod, launcher: Launcher, plan: StagePlan, run: Run) -> None:
        own = next(p.ranks for p in plan.pods if p.pod_id == pod.pod_id)
        for kill_id, rank in plan.kill_ranks:
            if rank in own and kill_id not in launcher.kills_done:
                launcher.kills_done.add(kill_id)
                self.kill_trainer(pod, launcher, rank=rank)
        if run.phase is PodStagePhase.FAILED and plan.order is not Order.END:
            self.tell(pod, plan, ReportKind.FAILED)

    def going(self, launcher: Launcher, run: Run) -> None:
        if run.phase in (PodStagePhase.STARTED, PodStagePhase.LOADED):
            run.phase = PodStagePhase.TRAINING

    def follow_prepare(self, pod: SimPod, launcher: Launcher, plan: StagePlan) -> None:
        run = launcher.prepared
        if run is None or run.key != (plan.stage, plan.attempt):
            if launcher.ports_fail:
                launcher.ports_fail = False
                self.tell(pod, plan, ReportKind.PORT_TAKEN)
                return
            launcher.prepared = Run(plan)
        elif run.phase is PodStagePhase.FAILED:
            self.tell(pod, plan, ReportKind.FAILED)
        else:
            self.tell(pod, plan, ReportKind.READY)

    def stays(self, run: Run | None) -> bool:
        return run is not None and run.phase is not PodStagePhase.ENDED

    def follow_join(self, pod: SimPod, launcher: Launcher, plan: StagePlan, run: Run) -> None:
        """The trainers of `run` stay: they form the next group beside their own."""
        if run.phase is PodStagePhase.FAILED:
            return  # its stage is over, as it has said
        joining = launcher.joining
        if joining is not None and joining.key == (plan.stage, plan.attempt):
            self.tell(pod, plan, ReportKind.READY)
        elif launcher.ports_fail:
            launcher.ports_fail = False
            self.tell(pod, plan, ReportKind.PORT_TAKEN)
        elif launcher.refuses or not launcher.joins:
            launcher.refuses = False
            self.tell(pod, plan, ReportKind.CANNOT_JOIN, reason="it does not want to")
        else:
            launcher.joining = Run(plan)

    def follow_start(self, pod: SimPod, launcher: Launcher, plan: StagePlan) -> None:
        run = launcher.run
        if run is None or run.key != (plan.stage, plan.attempt):
            if launcher.ports_fail:
                launcher.ports_fail = False
                self.tell(pod, plan, ReportKind.PORT_TAKEN)
                return
            source = plan.restore_from
            if source is not None and source.away and not self.shares_path:
                launcher.run = Run(plan, phase=PodStagePhase.FAILED)
                raised = wire.RaisedError(types=(ELSEWHERE,), text="no trainer sees it")
                self.tell(pod, plan, ReportKind.FAILED, error=TrainerError(chain=(raised,)))
                return
            launcher.run = Run(plan, step=self.restored(plan))
            self.tell(pod, plan, ReportKind.STARTED)
            return
        if run.phase is PodStagePhase.STARTED and self.elastic:
            run.phase = PodStagePhase.LOADED
        if run.phase is PodStagePhase.LOADED:
            self.tell(pod, plan, ReportKind.LOADED)

    def restored(self, plan: StagePlan) -> int:
        """Return the step that a stage's trainers find; from the checkpoint if no shim has it."""
        source = plan.restore_from
        if source is None:
            return self.durable
        nodes = {pod.node_id for pod in plan.pods}  # nobody reads another's memory
        held = [p.snapshot for name in nodes for p in self.nodes[name].pods.values()]
        # The server may not have heard of the newest.
        steps = [s.step for s in held if s and s.stage == source.stage and s.step >= source.step]
        if source.path and not steps:
            homes = {(pod.node_id, source.stage, source.step) for pod in plan.pods}
            assert homes & self.in_run_folders or not source.spare, f"no node has {source}"
            return max(source.step, self.durable)
        return max(steps, default=self.durable)

    def tell(
        self,
        pod: SimPod,
        plan: StagePlan,
        kind: ReportKind,
        *,
        once: object = None,
        reason: str = "",
        error: TrainerError | None = None,
    ) -> None:
        """Queue a report, once for what it says."""
        launcher = pod.launcher
        if launcher is None:
            return
        name = (kind, plan.stage, plan.attempt, once)
        if name in launcher.told:
            return
        launcher.told.add(name)
        run = launcher.run
        step = run.step if run is not None and run.key == (plan.stage, plan.attempt) else 0
        loaded = kind not in (ReportKind.READY, ReportKind.STARTED, ReportKind.PORT_TAKEN)
        parked = kind is ReportKind.DRAINED and self.elastic
        writes = parked and not self.memory and self.has_path and "path" not in self.full
        if writes:
            self.durable = max(self.durable, step)
        report = PodReport(
            kind=kind,
            stage=plan.stage,
            attempt=plan.attempt,
            step=step,
            snapshot=pod.snapshot if self.shims_answer else None,
            snapshot_is_current=parked and self.memory,
            durable="/shared/checkpoint" if writes else "",
            elastic=self.elastic and loaded,
            joins=self.elastic and launcher.joins,
            reason=reason,
            error=error,
            code=-9 if kind is ReportKind.FAILED else None,
            rank=None,
            peer_lost=bool(run and run.peer_lost) and kind is ReportKind.FAILED,
        )
        launcher.outbox.append(LauncherReported(pod.pod_id, report))

    def deliver(self, launcher: Launcher, *, overtake: bool = False) -> None:
        """Let the server get a launcher's oldest message, or, late ones first, its newest."""
        if not launcher.outbox or not self.up or launcher.hangs:
            return
        event = launcher.outbox.pop(-1 if overtake else 0)
        self.old.append(event)
        del self.old[:-30]
        self.send(event)

    # --- what a story says: what users ask, what breaks, what is seen ---------------------------

    def resize(self, pods: int, *, assume_dead: bool = False) -> None:
        self.send(ResizeAsked(Resize(pods=pods, assume_dead=assume_dead)))

    def pause(self) -> None:
        self.send(PauseAsked())

    def resume(self) -> None:
        self.send(ResumeAsked())

    def stop(self, *, discard: bool = False) -> None:
        self.send(StopAsked(discard=discard))

    def kill(self, **whom: Any) -> None:
        """Ask for the end of a pod (`pod_id`) or of a trainer (`rank`)."""
        self.send(KillAsked(wire.Kill(**whom)))

    def crash(self, pod_id: str | None = None) -> None:
        """Kill a trainer of this pod, or of the first that has a launcher."""
        pod = self.launchers()[0][1] if pod_id is None else self.pod(pod_id)
        assert pod.launcher is not None
        self.kill_trainer(pod, pod.launcher)

    def kill_shim(self, pod_id: str) -> None:
        """Trainers, launcher and snapshot are gone with it."""
        pod = self.pod(pod_id)
        pod.snapshot = None
        pod.end()

    def cut_off(self, *names: str) -> None:
        """Let nothing pass between the server and these nodes, or all."""
        for name in names or self.nodes:
            self.nodes[name].link = False

    def reconnect(self, *names: str) -> None:
        for name in names or self.nodes:
            self.nodes[name].link = True

    def pod(self, pod_id: str) -> SimPod:
        return next(sim.pods[pod_id] for sim in self.nodes.values() if pod_id in sim.pods)

    def launcher(self, pod_id: str) -> Launcher:
        launcher = self.pod(pod_id).launcher
        assert launcher is not None, f"{pod_id} has none"
        return launcher

    def orders(self, pod_id: str) -> PodView:
        """Return what the launcher of a pod is told to do."""
        view = views.pod_orders(self.job).get(pod_id)
        assert view is not None, f"{pod_id} is told nothing"
        return view

    @property
    def status(self) -> wire.JobStatus:
        return views.job_status(self.job, self.now, 0)

    @property
    def active(self) -> JobStage:
        assert self.job.active is not None, self.reasons
        return self.job.active

    @property
    def preparing(self) -> JobStage:
        assert self.job.preparing is not None, self.reasons
        return self.job.preparing

    # --- training -------------------------------------------------------------------------------

    def train(self) -> None:
        """Make a step of every stage whose trainers all train; old ones must not be among them."""
        runs: dict[int, list[tuple[SimPod, Launcher, Run]]] = {}
        for _, pod, launcher in self.launchers():
            run = launcher.run
            if run is not None and run.phase is PodStagePhase.TRAINING and not launcher.done:
                runs.setdefault(run.plan.stage, []).append((pod, launcher, run))
        for stage, members in sorted(runs.items()):
            plan = members[0][2].plan
            keys = {run.key for _, _, run in members}
            if len(members) == len(plan.pods) and len(keys) == 1:
                self.step(stage, members)

    def step(self, stage: int, members: list[tuple[SimPod, Launcher, Run]]) -> None:
        for _, _, run in members:
            if run.blank:
                run.step = next(each.step for _, _, each in members if not each.blank)
        for _, _, run in members:
            run.blank = False
        steps = {run.step for _, _, run in members}
        assert len(steps) == 1, f"ranks of stage {stage} are at different steps {steps}"
        assert stage >= self.stepped, f"stage {stage} trains beside stage {self.stepped}"
        self.stepped = stage
        step = steps.pop() + 1
        parks = self.cuts.get(stage) is not None and step >= self.cuts[stage]
        for pod, launcher, run in members:
            if step > self.total_steps:
                self.complete(pod, launcher, run)
                continue
            run.step = step
            if self.elastic and self.memory and (step % 3 == 0 or parks):
                pod.snapshot = SnapshotRef(stage=stage, step=step)
            if parks:
                run.phase = PodStagePhase.PARKED
            else:
                kind = ReportKind.PROGRESS if run.first_step else ReportKind.FIRST_STEP
                if self.elastic:
                    run.first_step = True
                    self.tell(pod, run.plan, kind, once=step)
        if parks:
            self.cuts.pop(stage)
        if step % 7 == 0 and step <= self.total_steps and self.has_path:
            self.durable = max(self.durable, step)

    def complete(self, pod: SimPod, launcher: Launcher, run: Run) -> None:
        launcher.done = True
        self.durable = self.total_steps
        if self.elastic:
            self.tell(pod, run.plan, ReportKind.DONE)

    def leave_done(self) -> None:
        """Pods whose training is complete exit 0, once they have said so."""
        for sim in self.nodes.values():
            for pod in sim.pods.values():
                if pod.tail:
                    pod.end(code=self.tail_code)
        for sim, pod, launcher in self.launchers():
            if launcher.done:
                launcher.done_at = min(launcher.done_at, self.now)
                is_told = sim.link and self.up and not launcher.outbox
                if not is_told and self.now < launcher.done_at + wire.EXIT_REPORT_S:
                    continue
                pod.launcher, pod.tail, pod.complete = None, True, True
                report = PodReport(kind=ReportKind.EXITED, stage=0, code=0)
                if sim.link:
                    self.send(LauncherReported(pod.pod_id, report))

    # --- what goes wrong ------------------------------------------------------------------------

    def kill_trainer(self, pod: SimPod, launcher: Launcher, *, rank: int | None = None) -> None:
        run = launcher.run
        if run is None or run.phase in (PodStagePhase.ENDED, PodStagePhase.FAILED) or launcher.done:
            return
        run.phase = PodStagePhase.FAILED
        report = replace(self.failed(run), rank=run.plan.pods[0].ranks[0] if rank is None else rank)
        launcher.told.add((ReportKind.FAILED, run.plan.stage, run.plan.attempt, None))
        launcher.outbox.append(LauncherReported(pod.pod_id, report))
        launcher.joining = None
        for _, peer_pod, peer in self.launchers():
            other = peer.run
            training = (PodStagePhase.TRAINING, PodStagePhase.LOADED)
            if other is not None and other.key == run.key and other.phase in training:
                other.phase, other.peer_lost = PodStagePhase.FAILED, True
                self.tell(peer_pod, other.plan, ReportKind.FAILED)

    def kill_prepared(self, launcher: Launcher) -> None:
        """A trainer dies that was prepared beside those that train."""
        if launcher.prepared is not None:
            launcher.prepared.phase = PodStagePhase.FAILED

    def power_off(self, sim: SimNode) -> None:
        sim.pods.clear()
        sim.client = sim.link = False

    def power_on(self, sim: SimNode) -> None:
        sim.client = sim.link = True

    # --- time -----------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.fence()
        self.send(Tick())

    def round(self, dt: float = 0.5) -> None:
        """Everybody does what is to be done, all messages arrive, `dt` seconds pass."""
        for sim in self.nodes.values():
            self.client_acts(sim)
        for sim, pod, launcher in self.launchers():
            self.launcher_acts(sim, pod, launcher)
        for sim, _, launcher in self.launchers():
            while launcher.outbox and sim.link and self.up and not launcher.hangs:
                self.deliver(launcher)
        self.train()
        self.leave_done()
        self.pass_to(self.now + dt)

    def pass_to(self, then: float) -> None:
        """Let time pass as the shell does, with a tick whenever the job wants one."""
        ticks = 0
        while self.up:
            deadline = machine.next_deadline(self.job, self.now, self.cluster)
            if deadline is None or deadline > then:
                break
            self.now = deadline
            self.fence()
            self.send(Tick())
            ticks += 1
            assert ticks < 30, f"a busy loop in {self.job}"
        self.now = then
        self.fence()

    def fence(self) -> None:
        """Clients that have not heard the server for as long as was said stop their pods."""
        for sim in self.nodes.values():
            limit_s = sim.node.stop_after_s
            if limit_s is None or not sim.client or self.now < sim.seen_at + limit_s:
                continue
            for pod in sim.pods.values():
                if pod.phase is not PodPhase.EXITED:
                    pod.end(signal=15)

    def rounds(self, count: int, dt: float = 0.5) -> None:
        for _ in range(count):
            self.round(dt)

    def run_until(self, *states: wire.JobState, rounds: int = 200) -> None:
        for _ in range(rounds):
            if self.job.state in states:
                return
            self.round()
        told = "\n".join(self.reasons[-30:])
        raise AssertionError(f"{self.job.state} instead of {states}; the log:\n{told}")

    def run_to(self, phase: Order) -> None:
        """Let small rounds pass until the next stage is in this phase."""
        for _ in range(200):
            if self.job.preparing is not None and self.job.preparing.phase is phase:
                return
            self.round(0.2)
        raise AssertionError(f"no change came to {phase}: {self.reasons[-30:]}")

    def quarantine(self, name: str, index: int, why: str, *, fatal: bool = False) -> None:
        """Put a slot in quarantine, as the registry shows it; without a why: take it back."""
        sim = self.nodes[name]
        slots = tuple(
            replace(
                slot,
                usable=not why,
                reason=f"in quarantine: {why}" if why else "",
                quarantine=why,
                ends_trainers=bool(why) and fatal,
            )
            if slot.index == index
            else slot
            for slot in sim.node.slots
        )
        sim.node = replace(sim.node, slots=slots)
        self.send(NodesChanged())

    def heal(self) -> None:
        """From now on everybody lives and answers, but for launchers that the server waits for."""
        self.start_server()
        self.script_fails = 0
        self.full.clear()
        self.stuck = False
        for sim in self.nodes.values():
            for slot in sim.node.slots:
                if slot.quarantine:
                    self.quarantine(sim.node.node_id, slot.index, "")
            self.power_on(sim)
        active = self.job.active
        for _, pod, launcher in self.launchers():
            launcher.ports_fail = False
            trains = active is not None and active.member(pod.pod_id) is not None
            if trains and active is not None and active.end_since is None:
                launcher.hangs = False  # to notice that one is the work of a hang watch


# --- what tests do with a world -------------------------------------------------------------------


def world(
    *,
    elastic: bool = True,
    nodes: int = 2,
    slots: int = 2,
    stop_after_s: float | None = None,
    total_steps: int = 400,
    **spec: Any,
) -> World:
    job = JobSpec(**{"job_id": "job", "max_pods": 4, "pods": 2, "overlap": "off", **spec})
    made = tuple(node(name, slots, stop_after_s=stop_after_s) for name in "abcd"[:nodes])
    return World(job, made, elastic=elastic, total_steps=total_steps)


def trains(made: World) -> World:
    """Run until the job trains and has made steps in the active stage."""
    made.run_until(RUNNING)
    made.rounds(8)
    assert made.job.state is RUNNING, made.reasons
    return made


def ids(made: World) -> tuple[str, ...]:
    return tuple(pod.pod_id for pod in views.running_pods(made.job))


def records(made: World) -> list[StageRecord]:
    return list(made.job.records)


def tell(
    made: World, pods: str | tuple[str, ...], kind: ReportKind, stage: int, **more: Any
) -> None:
    """Let the launcher of a pod, or of each of several, report."""
    for pod_id in (pods,) if isinstance(pods, str) else pods:
        made.send(LauncherReported(pod_id, PodReport(kind=kind, stage=stage, **more)))
