"""Random stories of one job in a simulated cluster, in virtual time.

The controller is cut off after any of its steps, runs again, and sees what is old for a while. Pods
come slowly, end, are drained; the job server dies, with its database or without.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from job_server.api.wire import JobState, Saved
from k8s_controller.decisions import reconcile as steps
from k8s_controller.decisions.observed import ListedPod, Observed, ServerView, TrainingNode
from k8s_controller.decisions.spec import TrainingJobSpec
from k8s_controller.decisions.status import Phase, TrainingJobStatus
from tests.k8s_controller.jobs import job_status, parsed, pod, server_pod

DRAIN_S = 40.0
CHANGE_S = 3.0


@dataclass
class SimulatedServer:
    """A job server with one shared job, as far as the controller can see one."""

    spec: TrainingJobSpec
    nodes: dict[str, bool] = field(default_factory=dict)  # node -> alive
    limits: dict[str, int] = field(default_factory=dict)
    state: JobState | None = None  # None: it knows no job
    most: int = 0
    stage: list[str] = field(default_factory=list)  # nodes that train
    next_at: float | None = None  # a change is prepared until then

    def allotted(self) -> list[str]:
        least, kept = self.spec.min_replicas, []
        usable = [n for n, alive in self.nodes.items() if alive and self.limits.get(n) != 0]
        kept = [node for node in self.stage if node in usable][: self.most]
        more = [node for node in usable if node not in kept]
        kept += more[: self.most - len(kept)]
        closed = [n for n in self.stage if n not in kept and self.nodes.get(n)]
        kept += closed[: max(0, least - len(kept))]  # at its least it stays until there is room
        return kept if len(kept) >= least else []

    def tick(self, now: float) -> None:
        self.stage = [node for node in self.stage if self.nodes.get(node)]
        if self.state not in (JobState.RUNNING, JobState.WAITING):
            return
        allotted = self.allotted()
        if set(allotted) == set(self.stage):
            self.next_at = None
        elif self.next_at is None:
            self.next_at = now + CHANGE_S
        elif now >= self.next_at:
            self.stage, self.next_at = allotted, None
        self.state = JobState.RUNNING if self.stage else JobState.WAITING

    def view(self) -> ServerView:
        nodes = {
            node: TrainingNode(alive=alive, limit=self.limits.get(node))
            for node, alive in self.nodes.items()
        }
        if self.state is None:
            return ServerView(job=None, nodes=nodes)
        saved = None
        if self.state is JobState.PAUSED:
            saved = Saved(stage=1, step=1, path="s3://x", node_id="n")
        spec = self.spec.job_spec("digits")
        allotted = {node: 1 for node in self.allotted()} if self.state not in _QUIET else {}
        status = job_status(spec, self.state, self.stage, allotted=allotted, saved=saved)
        return ServerView(job=status, nodes=nodes, most=self.most)


_QUIET = (JobState.PAUSED, JobState.SUCCEEDED)


class SimulatedCluster:
    """Pods, and what the controller's steps do to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        least = self.random.randint(1, 3)
        most = least + self.random.randint(0, 4)
        server = {"storage": {"size": "1Gi"}} if seed % 2 else {}
        self.spec = parsed(
            minReplicas=least, maxReplicas=most, podReadyTimeoutSeconds=60, server=server
        )
        self.status = TrainingJobStatus()
        self.now = 1000.0
        self.pods: dict[str, ListedPod] = {}
        self.registers_at: dict[str, float] = {}
        self.gone_at: dict[str, float] = {}
        self.server_pod: ListedPod | None = None
        self.server_up_at = 0.0
        self.server = SimulatedServer(self.spec)
        self.prepared = False
        self.budget: int | None = None
        self.closed: set[str] = set()
        self.count = 0
        self.old: Observed | None = None

    # --- the controller

    def control(self) -> None:
        """Let the controller look, act, and perhaps die in the middle of it."""
        seen = self.seen()
        if self.old is not None and self.random.random() < 0.2:  # its watch is behind
            seen = replace(seen, trainers=self.old.trainers, server_pod=self.old.server_pod)
        self.old = self.seen()
        outcome = steps.reconcile("digits", 1, self.spec, self.status, seen, self.now)
        cut = self.random.randint(0, len(outcome.steps)) if self.random.random() < 0.2 else None
        for step in outcome.steps[:cut]:
            self.do(step)
        if cut is None:
            self.status = TrainingJobStatus.read(outcome.status.write())
        else:
            self.prepared, self.budget = False, None  # another controller goes on
            self.closed.clear()
        closed = self.server.limits.keys() - self.closed  # as good as leaving
        alive = [
            each
            for each in self.pods.values()
            if not each.leaving and not each.over and each.node_id not in closed
        ]
        assert len(alive) <= self.spec.max_replicas
        assert len({each.index for each in self.pods.values()}) == len(self.pods)

    def seen(self) -> Observed:
        is_up = self.server_pod is not None and self.now >= self.server_up_at
        trainers = tuple(sorted(self.pods.values(), key=lambda each: each.index))
        if is_up:
            self.closed &= self.server.limits.keys()
        return Observed(
            trainers=trainers,
            server_pod=self.server_pod,
            server=self.server.view() if is_up else None,
            prepared=self.prepared,
            budget=self.budget,
            closed=frozenset(self.closed),
        )

    def do(self, step: steps.Step) -> None:
        server = self.server
        match step:
            case steps.Prepare():
                self.prepared = True
            case steps.SetBudget(needed):
                self.budget = needed
            case steps.MakeServer():
                if self.server_pod is None:
                    self.server_pod = server_pod()
                    self.server_up_at = self.now + self.random.uniform(0, 5)
            case steps.MakeTrainer(index):
                if f"digits-{index}" in self.pods:
                    return  # 409
                self.count += 1
                uid = f"{self.count:08d}-x"
                self.pods[f"digits-{index}"] = pod(index, uid=uid, created_at=self.now)
                slow = 200.0 if self.random.random() < 0.1 else 5.0
                self.registers_at[uid] = self.now + self.random.uniform(0, slow)
            case steps.RemovePod(name, uid):
                self.remove(name, uid, grace_s=0.0)
            case steps.SubmitJob():
                server.state, server.most = JobState.WAITING, self.spec.max_replicas
            case steps.SetPods(count):
                assert self.spec.min_replicas <= count <= self.spec.max_replicas
                server.most = count
            case steps.CloseNodes(nodes):
                self.closed |= set(nodes)
                server.limits |= dict.fromkeys(nodes, 0)
            case steps.OpenNodes(nodes):
                for node in nodes:
                    server.limits.pop(node, None)
            case steps.PauseJob():
                server.state, server.stage = JobState.PAUSED, []
            case steps.ResumeJob():
                if server.state is JobState.PAUSED:
                    server.state = JobState.WAITING
            case _:
                raise AssertionError(step)

    def remove(self, name: str, uid: str, grace_s: float) -> None:
        known = self.pods.get(name)
        if known is None or known.uid != uid:
            return  # 404, or 409: another one has the name
        if not grace_s and not known.over:
            assert known.node_id not in self.server.stage, f"{name} still trains"
        self.pods[name] = replace(known, leaving=True, gone_by=self.now + grace_s)
        self.gone_at.setdefault(uid, self.now + grace_s + self.random.uniform(0, 5))

    # --- the world

    def happen(self) -> None:
        """Let something happen to the job."""
        chance = self.random.random()
        alive = [each for each in self.pods.values() if not each.leaving and not each.over]
        least, most = self.spec.min_replicas, self.spec.max_replicas
        if chance < 0.08:
            self.spec = replace(self.spec, replicas=self.random.randint(least, most))
        elif chance < 0.10:
            self.spec = replace(self.spec, suspend=not self.spec.suspend)
        elif chance < 0.14 and alive:
            each = self.random.choice(alive)
            self.pods[each.name] = replace(each, phase="Failed", message="killed")
            self.server.nodes.pop(each.node_id, None)
        elif chance < 0.18 and alive:
            each = self.random.choice(alive)
            self.remove(each.name, each.uid, grace_s=DRAIN_S)
        elif chance < 0.20 and self.server_pod is not None:
            self.server_pod = None
            if self.spec.storage is None:  # its database goes with it
                self.server = SimulatedServer(self.spec)
                for uid in self.registers_at:
                    self.registers_at[uid] = max(self.registers_at[uid], self.now + 1)

    def tick(self) -> None:
        self.now += 1.0
        for name, each in list(self.pods.items()):
            node = each.node_id
            if each.uid in self.gone_at and (
                self.now >= self.gone_at[each.uid] or node not in self.server.stage
            ):
                del self.pods[name], self.gone_at[each.uid]
                self.server.nodes.pop(node, None)
            elif not each.over and self.now >= self.registers_at[each.uid]:
                self.server.nodes[node] = True
        self.server.spec = self.spec
        self.server.tick(self.now)


@pytest.mark.parametrize("seed", range(10))
def test_a_job_gets_what_is_wanted_whatever_happens(seed):
    cluster = SimulatedCluster(seed)
    for _ in range(200):
        cluster.happen()
        cluster.tick()
        cluster.control()
    cluster.spec = replace(cluster.spec, suspend=False)
    for _ in range(900):  # a quiet time; pods may still be slow, and replaced for it
        cluster.tick()
        cluster.control()
        if cluster.status.phase is Phase.RUNNING and len(cluster.pods) == cluster.spec.replicas:
            break
    wanted = cluster.spec.replicas
    assert cluster.status.phase is Phase.RUNNING, cluster.status
    assert len(cluster.pods) == len(cluster.server.stage) == wanted
    assert {each.node_id for each in cluster.pods.values()} == set(cluster.server.stage)
