"""How many pods jobs with `autoscale` get: tables, and random stories in virtual time."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from job_server.sharing.policies import POLICIES
from job_server.sharing.resources import Resources
from k8s_controller.autoscaler import Autoscaler
from k8s_controller.decisions import autoscale
from k8s_controller.decisions.capacity import requests_of, usable_nodes
from k8s_controller.decisions.observed import time_text
from k8s_controller.decisions.status import Autoscale, TrainingJobStatus
from k8s_controller.kube_api import KubeApi, KubeError
from k8s_controller.metrics import Metrics

NOW = 100_000.0
Object = dict[str, Any]


def node(name: str, cpu: str = "4", **more: Any) -> Object:
    spec = {key: more[key] for key in ("taints", "unschedulable") if key in more}
    conditions = [{"type": "Ready", "status": more.get("ready", "True")}]
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu, "memory": "64Gi", **more.get("has", {})},
            "conditions": conditions,
        },
    }


def pod(name: str, on: str = "", cpu: str = "1", job: str = "", **more: Any) -> Object:
    labels = {"paddlepaddle.org/job-name": job, "paddlepaddle.org/role": "trainer"} if job else {}
    conditions = []
    if not on:
        conditions = [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/1 nodes are available",
        }]  # fmt: skip
    return {
        "metadata": {
            "name": name, "namespace": "default", "uid": name, "labels": labels,
            "creationTimestamp": time_text(more.get("created_at", NOW)),
        },
        "spec": {
            "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}],
            **({"nodeName": on} if on else {}),
            **{key: more[key] for key in ("nodeSelector", "schedulingGates") if key in more},
        },
        "status": {"phase": "Running" if on else "Pending", "conditions": conditions},
    }  # fmt: skip


def job(
    name: str,
    least: int,
    most: int,
    has: int = 0,
    *,
    cpu: str = "1",
    at: float = NOW - 1000,
    status: Object | None = None,
    pod_spec: Object | None = None,
    **spec: Any,
) -> Object:
    """Return a job that has so many pods by an earlier decision, and trains with them."""
    container = {
        "name": "trainer", "image": "edl", "command": ["true"],
        "resources": {"requests": {"cpu": cpu}},
    }  # fmt: skip
    made: Object = {
        "phase": "Running" if has else "Pending", "desiredReplicas": has, "trainingReplicas": has,
        "scaleStartedAt": time_text(at),
    }  # fmt: skip
    if has:
        made["autoscale"] = Autoscale(replicas=has, reason="there is room", since=at).write()
    return {
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": time_text(at)},
        "spec": {
            "autoscale": True, "minReplicas": least, "maxReplicas": most,
            "template": {"spec": {"containers": [container], **(pod_spec or {})}}, **spec,
        },
        "status": made | (status or {}),
    }  # fmt: skip


def affinity_of(*rules: Object) -> Object:
    terms = [{"matchExpressions": list(rules)}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


def pods_of(name: str, **on: int) -> list[Object]:
    return [pod(f"{name}-{n}-{i}", n, job=name) for n, count in on.items() for i in range(count)]


def leaving(pods: list[Object]) -> list[Object]:
    for each in pods:
        each["metadata"]["deletionTimestamp"] = time_text(NOW)
    return pods


def decided(
    jobs: list[Object],
    pods: list[Object],
    nodes: list[Object],
    classes: tuple[Object, ...] = (),
    policy: str = "fulfilment",
    now: float = NOW,
) -> dict[str, tuple[int, str]]:
    seen = autoscale.look(jobs, pods, nodes, classes, now)
    found = autoscale.decide(POLICIES[policy], seen, now)
    return {name.split("/")[1]: (each.replicas, each.reason) for name, each in found.items()}


@pytest.mark.parametrize("policy", ["fulfilment", "goodput"])
def test_alone_a_job_gets_all_it_may_have_and_no_more_than_there_is(policy):
    assert decided([job("a", 1, 3)], [], [node("n")], policy=policy) == {"a": (3, "there is room")}
    assert decided([job("a", 1, 9)], [], [node("n")], policy=policy) == {"a": (4, "there is room")}
    assert decided([job("a", 5, 9)], [], [node("n")], policy=policy) == {
        "a": (0, "waits: no room for its least, 5")
    }


def test_what_other_pods_ask_for_is_not_given_away():
    others = [pod("web", "n", "1500m"), pod("done", "n", "2")]
    others[1]["status"]["phase"] = "Succeeded"
    assert decided([job("a", 1, 9)], others, [node("n")])["a"][0] == 2


def test_a_job_that_comes_has_its_least_and_others_give_way_for_it_and_its_server():
    first = job("a", 1, 4, has=4, at=NOW - 2000)
    server = pod("b-server", cpu="100m")
    news = decided([first, job("b", 1, 4)], [*pods_of("a", n=4), server], [node("n")])
    assert news == {
        "a": (2, "gives way to default/b"),
        "b": (1, "starts with its least, 1"),
    }


def test_a_job_whose_pods_come_or_go_is_left_alone_and_so_is_its_room():
    changing = job("a", 1, 4, has=2, at=NOW - 1)
    changing["status"] |= {"phase": "Scaling", "trainingReplicas": 4}
    news = decided([changing, job("b", 1, 4)], pods_of("a", n=4), [node("n")])
    assert news == {"b": (0, "waits: no room for its least, 1")}
    coming = job("a", 1, 4, has=3, at=NOW - 1)  # the third is not made yet
    coming["status"] |= {"phase": "Scaling", "trainingReplicas": 2}
    assert decided([coming, job("b", 1, 4)], pods_of("a", n=2), [node("n")])["b"][0] == 1


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        pytest.param(0, {"a": (3, "gives way to default/b"), "b": (1, "starts with its least, 1")}),
        pytest.param(-5, {"b": (0, "waits: no room for its least, 1")}, id="lower"),
    ],
)
def test_a_job_gives_way_to_those_of_its_priority_or_higher(priority, expected):
    classes = ({"metadata": {"name": "p"}, "value": priority},)
    new = job("b", 1, 4, pod_spec={"priorityClassName": "p"})
    first = job("a", 1, 4, has=4, at=NOW - 2000)
    assert decided([first, new], pods_of("a", n=4), [node("n")], classes) == expected


def test_no_job_that_has_begun_goes_below_its_least_for_any_priority():
    classes = ({"metadata": {"name": "high"}, "value": 1000},)
    new = job("b", 1, 4, pod_spec={"priorityClassName": "high"})
    first = job("a", 4, 4, has=4)
    news = decided([first, new], pods_of("a", n=4), [node("n")], classes)
    assert news == {"b": (0, "waits: no room for its least, 1")}


def test_pods_of_others_that_wait_are_given_room_where_they_may_be():
    both = [node("m"), node("n")]
    placed = pods_of("a", m=4, n=4)
    first = job("a", 1, 8, has=8)
    waiting = pod("web", cpu="2", nodeSelector={"kubernetes.io/hostname": "n"})
    seen = autoscale.look([first], [*placed, waiting], both, (), NOW)
    (news,) = autoscale.decide(POLICIES["goodput"], seen, NOW).values()
    assert (news.replicas, news.reason, news.nodes) == (6, "others use n", {"m": 4, "n": 2})
    for hopeless in (pod("web", cpu="5"), pod("web", schedulingGates=[{"name": "x"}])):
        assert decided([first], [*placed, hopeless], both) == {}


def test_what_waits_for_the_room_of_pods_that_are_going_takes_no_more():
    first = job("a", 1, 4, has=2)
    gone = leaving([pod("a-2", "n", job="a"), pod("a-3", "n", job="a")])
    waiting = [pod("b-0"), pod("b-1")]
    there = [*pods_of("a", n=2), *gone]
    assert decided([first], [*there, *waiting], [node("n")]) == {}
    assert decided([first], [*there, *waiting, pod("c")], [node("n")]) == {"a": (1, "others use n")}


def test_what_waits_for_the_room_that_a_job_is_about_to_leave_takes_none_of_another():
    changing = job("a", 1, 4, has=4, at=NOW - 1)
    changing["status"]["autoscale"] = Autoscale(
        replicas=2, reason="gives way to default/b", since=NOW - 1, nodes={"m": 2}
    ).write()
    starting = job("b", 2, 2, at=NOW - 1)
    starting["status"]["autoscale"] = Autoscale(
        replicas=2, reason="starts with its least, 2", since=NOW - 1, nodes={"n": 2}
    ).write()
    third = job("c", 1, 2, has=2)
    both = [node("m", "4"), node("n", "2")]
    there = [*pods_of("a", m=2, n=2), *pods_of("c", m=2)]
    jobs = [changing, starting, third]
    assert decided(jobs, there, both) == {}  # the pods of b are not made yet
    made = [pod("b-0", job="b"), pod("b-1", job="b")]
    assert decided(jobs, [*there, *made], both) == {}
    assert decided(jobs, [*there, *made, pod("web")], both) == {"c": (1, "others use m")}


def test_a_pod_is_given_up_where_others_wait_though_there_is_room_elsewhere():
    first = job("a", 1, 2, has=2)
    waiting = pod("web", cpu="1", nodeSelector={"kubernetes.io/hostname": "m"})
    both = [node("m", "1"), node("n", "2")]
    news = decided([first], [*pods_of("a", m=1, n=1), waiting], both)
    assert news["a"] == (1, "others need room where it has pods; it may have them elsewhere")


def test_pods_for_which_there_is_no_node_are_given_up_and_tried_again_later():
    old = NOW - autoscale.UNPLACED_S - 1
    first = job("a", 1, 4, has=4, at=old)
    first["status"] |= {"phase": "Scaling", "trainingReplicas": 2}
    pods = [*pods_of("a", n=2), *(pod(f"p{i}", job="a", created_at=old) for i in range(2))]
    seen = autoscale.look([first], pods, [node("n")], (), NOW)
    (news,) = autoscale.decide(POLICIES["goodput"], seen, NOW).values()
    assert (news.replicas, news.limit) == (2, 2)
    assert news.reason == "there is no node for more: 0/1 nodes are available"
    after = job("a", 1, 4, has=2)
    after["status"]["autoscale"] = news.write()
    args = [after], pods_of("a", n=2), [node("n")]
    assert decided(*args, now=NOW + autoscale.RETRY_S - 5) == {}
    assert decided(*args, now=NOW + autoscale.RETRY_S + 5) == {"a": (4, "there is room")}
    assert decided(*args, now=NOW - 3600) == {"a": (4, "there is room")}, "by a clock that is ahead"


def test_a_decision_of_a_controller_with_a_faster_clock_is_as_one_of_just_now():
    args = [job("a", 1, 4, has=3, at=NOW + 3600)], pods_of("a", n=3), [node("n")]
    args[0][0]["status"]["phase"] = "Scaling"  # it is about to settle
    assert decided(*args) == {}
    (seen,) = autoscale.look(args[0], args[1], args[2], (), NOW).now_have.values()
    assert seen.since == NOW


def test_a_suspended_job_gives_up_its_number_and_waits_when_it_goes_on():
    paused = job("a", 1, 4, has=4, suspend=True)
    assert decided([paused], pods_of("a", n=4), [node("n")]) == {"a": (0, "spec.suspend is true")}
    paused["status"]["autoscale"] = Autoscale(replicas=0, since=NOW).write()
    assert decided([paused], pods_of("a", n=4), [node("n")]) == {}


@pytest.mark.parametrize(("least", "there"), [(1, 4), (1, 2), (3, 2)])
def test_a_job_that_goes_on_before_its_pods_have_gone_has_a_number_again_at_once(
    least: int, there: int
):
    resumed = job("a", least, 4, has=4, at=NOW - 1)
    resumed["status"] |= {"phase": "Pending", "trainingReplicas": 0}
    resumed["status"]["autoscale"] = Autoscale(replicas=0, since=NOW - 1).write()
    assert decided([resumed], pods_of("a", n=there), [node("n")])["a"][0] == 4


def test_a_job_that_is_switched_to_autoscale_keeps_what_it_has_until_there_is_a_reason():
    switched = job("a", 1, 4, has=2)
    del switched["status"]["autoscale"]
    others = pod("web", "n", "2")
    news = decided([switched], [*pods_of("a", n=2), others], [node("n")])
    assert news == {"a": (2, "stays with 2")}


def test_what_has_ended_or_cannot_be_read_or_is_not_asked_for_is_left_alone():
    ended = job("a", 1, 4, status={"conditions": [{"type": "Complete", "status": "True"}]})
    broken = job("b", 3, 2)
    other = job("c", 1, 4, autoscale=False)
    misread = job("d", 1, 4)
    misread["spec"]["template"]["spec"]["containers"][0]["env"] = {"A": "not a list"}
    assert decided([ended, broken, other, misread], [], [node("n")]) == {}


@pytest.mark.parametrize(
    ("pod_spec", "told"),
    [
        (
            {"initContainers": [{"resources": {"requests": {"cpu": "lots"}}}]},
            "'lots' is no quantity",
        ),
        ({"affinity": affinity_of({"key": "zone"})}, "KeyError('operator')"),
    ],
)
def test_a_template_that_cannot_be_read_is_told_and_holds_up_no_other_job(pod_spec, told):
    jobs = [job("a", 1, 2, pod_spec=pod_spec), job("b", 1, 2)]
    news = decided(jobs, [], [node("n")])
    assert news["b"] == (2, "there is room")
    assert news["a"][0] == 0
    assert told in news["a"][1]
    jobs[0]["status"]["autoscale"] = Autoscale(reason=news["a"][1], since=NOW).write()
    assert "a" not in decided(jobs, [], [node("n")]), "it is said once"


def test_a_job_whose_status_cannot_be_written_holds_up_no_other():
    written = []

    class Kube(KubeApi):
        def __init__(self) -> None:
            pass

        def list_all(self, kind: str, namespace: str | None = None) -> list[Object]:
            listed = {"TrainingJob": [job("a", 1, 1), job("b", 1, 1)], "Node": [node("n")]}
            return listed.get(kind, [])

        def write_status(self, job: Any, status: Any) -> Object:
            if job["metadata"]["name"] == "a":
                raise KubeError(403, "a policy denies it")
            written.append(job["metadata"]["name"])
            return dict(job)

    woken: list[str] = []
    policy = POLICIES["fulfilment"]
    Autoscaler(Kube(), lambda _, name: woken.append(name), Metrics(), policy, 5.0).decide()
    assert (written, woken) == (["b"], ["b"])


def test_measured_times_say_who_gets_the_next_pod():
    flat = {"stepSeconds": {"1": 1.0, "2": 1.0}, "totalSteps": 10_000, "step": 10}
    steep = {"stepSeconds": {"1": 1.0, "2": 0.5}, "totalSteps": 10_000, "step": 10}
    jobs = [job("a", 1, 4, 2, status=flat), job("b", 1, 4, 2, status=steep)]
    pods = [*pods_of("a", n=2), *pods_of("b", n=2)]
    news = decided(jobs, pods, [node("n")], policy="goodput")
    assert {name: count for name, (count, _) in news.items()} == {"a": 1, "b": 3}


# --- nodes and pods


def test_a_pod_asks_for_the_larger_of_what_starts_it_and_what_runs_beside_it():
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 2, "memory": "1Gi"}}},
            {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        ],
        "initContainers": [
            {"resources": {"requests": {"cpu": "3", "memory": "1M"}}},
            {"resources": {"requests": {"cpu": "1"}}, "restartPolicy": "Always"},
        ],
        "overhead": {"cpu": "250m"},
    }
    assert requests_of(spec) == Resources(slots=2, cpu_milli=3250, memory_mb=1074)
    of_the_pod = {"requests": {"cpu": "5"}, "limits": {"cpu": "6", "memory": "2G"}}
    whole = requests_of({**spec, "resources": of_the_pod})
    assert whole == Resources(slots=2, cpu_milli=5250, memory_mb=2000)


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "has", "may"),
    [
        ({}, {}, True),
        ({}, {"unschedulable": True}, False),
        ({}, {"ready": "Unknown"}, False),
        ({}, {"taints": [TAINT]}, False),
        ({}, {"taints": [TAINT | {"effect": "PreferNoSchedule"}]}, True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, {"taints": [TAINT]}, True),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, {"taints": [TAINT]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, {"taints": [TAINT]}, False),
        ({"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
         {"taints": [TAINT]}, False),
        ({"nodeSelector": {"kubernetes.io/hostname": "n"}}, {}, True),
        ({"nodeSelector": {"zone": "b"}}, {}, False),
    ],
)  # fmt: skip
def test_a_node_is_usable_as_the_scheduler_sees_it(spec, has, may):
    assert bool(usable_nodes(spec, [node("n", **has)])) is may


@pytest.mark.parametrize(
    ("rule", "may"),
    [
        (("In", ["n", "m"]), True),
        (("NotIn", ["n"]), False),
        (("Exists", []), True),
        (("DoesNotExist", []), False),
        (("Gt", ["1"]), False),
    ],
)
def test_a_required_affinity_is_kept(rule, may):
    rules = {"key": "kubernetes.io/hostname", "operator": rule[0], "values": rule[1]}
    terms = [{}, {"matchExpressions": [rules]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {"affinity": {"nodeAffinity": required}}
    assert bool(usable_nodes(spec, [node("n")])) is may


# --- stories


def where(pod_: Object) -> str:
    return str(pod_["spec"]["nodeName"])


@dataclass
class _Job:
    """A job of the story: its pods follow the decision after a while."""

    body: Object
    least: int
    most: int
    work_s: float
    pods: dict[str, Object] = field(default_factory=dict)
    ready_at: float | None = None
    made: int = 0


class Story:
    """A cluster whose scheduler binds what fits, with jobs and strangers that come and go."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random, self.policy, self.now = random.Random(seed), POLICIES[policy], NOW
        self.nodes = [node(f"n{i}", str(self.random.randint(2, 8))) for i in range(3)]
        self.jobs: dict[str, _Job] = {}
        self.others: dict[str, Object] = {}
        self.going: list[tuple[float, Object]] = []  # until when, and a pod
        self.decisions: list[tuple[float, str, int, str]] = []

    def all_pods(self) -> list[Object]:
        own = [each for job_ in self.jobs.values() for each in job_.pods.values()]
        return [*self.others.values(), *own, *(each for _, each in self.going)]

    def remove(self, pods: Object, name: str) -> None:
        """Delete a pod, which takes its time to end."""
        (gone,) = leaving([pods.pop(name)])
        self.going.append((self.now + self.random.uniform(0, 8), gone))

    def happen(self) -> None:
        chance = self.random.random()
        if chance < 0.03 and len(self.jobs) < 5:
            name = f"j{int(self.now)}"
            least = self.random.randint(1, 2)
            most = least + self.random.randint(0, 6)
            body = job(name, least, most, at=self.now)
            del body["status"]
            self.jobs[name] = _Job(body, least, most, self.random.uniform(200, 3000))
        elif chance < 0.05:
            name = f"o{int(self.now)}"
            self.others[name] = pod(name, cpu=str(self.random.randint(1, 2)), created_at=self.now)
        elif chance < 0.07 and self.others:
            self.remove(self.others, self.random.choice(list(self.others)))

    def tick(self) -> None:
        self.now += 1.0
        self.going = [each for each in self.going if each[0] > self.now]
        self.schedule()
        for name, each in list(self.jobs.items()):
            self.follow(each)
            if each.work_s <= 0:
                for pod_name in list(each.pods):
                    self.remove(each.pods, pod_name)
                del self.jobs[name]
        if int(self.now) % 5 == 0:
            self.decide()

    def schedule(self) -> None:
        for each in self.all_pods():
            if "nodeName" in each["spec"] or "deletionTimestamp" in each["metadata"]:
                continue
            for where in self.nodes:
                if self.free(where) >= requests_of(each["spec"]).cpu_milli:
                    each["spec"]["nodeName"] = where["metadata"]["name"]
                    each["status"] = {"phase": "Running"}
                    break

    def free(self, where: Object) -> int:
        on = where["metadata"]["name"]
        used = sum(
            requests_of(each["spec"]).cpu_milli
            for each in self.all_pods()
            if each["spec"].get("nodeName") == on
        )
        return int(where["status"]["allocatable"]["cpu"]) * 1000 - used

    def follow(self, each: _Job) -> None:
        """Let a job's pods come and go as its decision says, after some seconds."""
        status = TrainingJobStatus.read(each.body.get("status"))
        if status.autoscale is None or not status.autoscale.replicas:
            return
        wanted, raw = status.autoscale.replicas, each.body["status"]
        if raw.get("desiredReplicas") != wanted:
            raw |= {"desiredReplicas": wanted, "scaleStartedAt": time_text(self.now)}
            each.ready_at = self.now + self.random.uniform(2, 40)
            while len(each.pods) < wanted:
                each.made += 1
                name = f"{each.body['metadata']['name']}-{each.made}"
                each.pods[name] = pod(name, job=each.body["metadata"]["name"], created_at=self.now)
        assert each.ready_at is not None
        bound = [name for name, each_ in each.pods.items() if "nodeName" in each_["spec"]]
        if self.now >= each.ready_at and len(each.pods) > wanted:
            idle = [name for name in each.pods if name not in bound]
            kept = Counter(status.autoscale.nodes)
            staying = []
            for name in bound:
                on = where(each.pods[name])
                if kept[on]:
                    kept[on] -= 1
                    staying.append(name)
            going = [*idle, *(name for name in reversed(bound) if name not in staying), *staying]
            for name in going[: len(each.pods) - wanted]:
                self.remove(each.pods, name)
            bound = [name for name in bound if name in each.pods]
        if self.now >= each.ready_at:
            raw["trainingReplicas"] = len(bound)
        settled = raw.get("trainingReplicas") == wanted == len(each.pods)
        raw["phase"] = "Running" if settled else "Scaling"
        each.work_s -= raw.get("trainingReplicas", 0)
        raw |= {
            "step": 100_000 - int(each.work_s * 10), "totalSteps": 100_000,
            "stepSeconds": {"1": 0.1, str(max(wanted, 2)): 0.1 / max(wanted, 2) * 1.1},
        }  # fmt: skip

    def decide(self) -> None:
        bodies = [each.body for each in self.jobs.values()]
        seen = autoscale.look(bodies, self.all_pods(), self.nodes, (), self.now)
        for name, news in autoscale.decide(self.policy, seen, self.now).items():
            each = self.jobs[name.split("/")[1]]
            before = TrainingJobStatus.read(each.body.get("status")).autoscale
            assert news.replicas == 0 or each.least <= news.replicas <= each.most
            assert news.replicas or not (before and before.replicas), "it was stopped"
            assert name not in seen.changing, "a change was under way"
            assert news.reason
            each.body.setdefault("status", {})["autoscale"] = news.write()
            if before is None or before.replicas != news.replicas:
                self.decisions.append((self.now, name, news.replicas, news.reason))


@pytest.mark.parametrize(
    ("seed", "policy"),
    [(0, "fulfilment"), (0, "goodput"), (23, "fulfilment"), (27, "goodput"), (30, "goodput")],
)
def test_whatever_comes_and_goes_bounds_are_kept_and_quiet_times_are_quiet(seed, policy):
    story = Story(seed, policy)
    for _ in range(300):
        story.happen()
        story.tick()
    for each in story.jobs.values():
        each.work_s = 1e6  # none ends from now on
    for _ in range(450):
        story.tick()
    quiet_since = story.now - 200
    assert [each for each in story.decisions if each[0] > quiet_since] == []
    held = sum(len(each.pods) for each in story.jobs.values())
    free = sum(story.free(where) // 1000 for where in story.nodes)
    hungry = [each for each in story.jobs.values() if len(each.pods) < each.most]
    assert not (hungry and free), (held, free)
    waiting = [
        name
        for each in story.jobs.values()
        for name, pod_ in each.pods.items()
        if "nodeName" not in pod_["spec"]
    ]
    if waiting:  # strangers have taken what was freed for them
        assert all(len(each.pods) <= each.least for each in story.jobs.values()), waiting
