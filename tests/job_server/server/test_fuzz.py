"""Junk on every route: never a 5xx, nothing changed by what is refused, nothing without the token.

Requests are drawn by hypothesis from what is nearly right: real routes with odd ids, real messages
with one value replaced, and plain junk.
"""

import copy
import json
import re
from contextlib import closing
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from job_server.api import wire
from job_server.api.codec import to_json
from job_server.api.routes import ROUTES
from job_server.api.task_wire import TaskQueueSpec
from job_server.server.guard import Guard
from job_server.server.service import JobService
from job_server.server.store import Store
from job_server.sharing.job_types import AnyJob
from tests.job_server.serving import browse, cpu_node

TOKEN = "correct horse"


def plain(message: object) -> Any:
    return json.loads(to_json(message))


GOOD: dict[str, Any] = {
    "submit": {"job_id": "new", "max_pods": 2, "script": {"kind": "walk", "max_pods": 2}},
    "preview": {"job_id": "new", "script": {"kind": "timeline", "text": "- {at: 1m, add: 1}"}},
    "resize": {"pods": 1, "assume_dead": False},
    "kill": {"pod_id": "pod_0_0"},
    "attach": plain(wire.Attach(pod_id="pod_0_0", node_id="node-a", pid=1)),
    "report": plain(
        wire.PodReport(
            kind=wire.ReportKind.PROGRESS,
            stage=1,
            step_s=0.5,
            metrics={"loss": 0.25},
            metric_epochs={"loss": 2},
            paces=(
                wire.RankPace(
                    rank=0,
                    steps=30,
                    samples=240,
                    window_s=2.0,
                    computing_s=1.0,
                    reading_s=0.5,
                    exchanging_s=0.5,
                    saving_s=0.0,
                ),
            ),
        )
    ),
    "register": plain(cpu_node("node-b", addr="10.0.0.9")),
    "report_node": plain(
        wire.NodeReport(
            node_id="node-a",
            pods=(wire.PodState(pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.RUNNING),),
            slots=(
                wire.SlotUsage(
                    index=0,
                    stranger="somebody",
                    faults=(wire.SlotFault(name="xid_31", text="its own error", age_s=3.0),),
                    idle_s=0.0,
                ),
            ),
            load=wire.NodeLoad(
                memory_used_mb=10, memory_total_mb=1000, disk_free_mb=900, disk_total_mb=1000
            ),
            sent_ms=5,
        )
    ),
    "limit_node": {"slots": 0, "drain": True, "also": ["node-a"]},
    "order_slot": {"slot": 0, "take_back": True, "why": "it is slow"},
    "make_queue": {"name": "words", "tasks": ["part-0", "part-1"], "lease_s": 10.0},
    "lease_task": {"worker": "reader", "place": "here", "pass_number": 0},
    "report_task": {
        "worker": "reader",
        "pass_number": 0,
        "number": 0,
        "lease": 1,
        "records": 5,
        "done": True,
    },
    "job_runtime_static": {"job_id": "digits", "estimated_run_time": 5},
    "demand": {
        "service": "soft",
        "students": 2,
        "wait_share": 0.5,
        "samples_per_s": 9.5,
        "teachers": 1,
    },
}

ODD_NUMBER = re.compile(r"(?<=: )-?\d+(\.\d+)?")
ODD_NUMBERS = [
    "1e999", "-1e999", "1e308", "5e-324", "-0.0", "NaN", "Infinity", "9" * 16, "9" * 400, "1e15",
]  # fmt: skip

KNOWN_IDS = [
    "digits", "teachers", "soft", "teacher_1", "pod_0_0", "pod_1_0", "node-a", "nobody", "..",
    "../x", "%2e%2e%2f",
]  # fmt: skip
ids = st.one_of(
    st.sampled_from(KNOWN_IDS),
    st.text(min_size=1, max_size=20),
    st.just("x" * 5000),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [-1, 0, 2**31, 2**63, 10**400, 1e308, "", "../../etc/passwd", "\x00", "\ud800"]
    ),
    st.sampled_from(["gpu", "start", "ready", "timeline", "trace", "digits", "pod_0_0"]),
)
junk = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
queries = st.dictionaries(
    st.sampled_from(["revision", "timeout_s", "after", "limit", "job_id", "x"]),
    st.one_of(
        st.sampled_from(["-1", "0", "1", "0.01", "-5", "nan", "inf", "1e999", "", "9" * 40, "x"]),
        st.text(max_size=8),
    ),
    max_size=3,
)
headers = st.dictionaries(
    st.sampled_from(["Content-Type", "Origin", "Accept", "Expect", "X-Forwarded-For", "Range"]),
    st.one_of(
        st.sampled_from(
            ["application/json", "text/plain", "http://evil.example", "null", "[", "*/*"]
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12),
    ),
    max_size=2,
)


def keys(part: dict[str, Any] | list[Any]) -> list[Any]:
    return sorted(part) if isinstance(part, dict) else list(range(len(part)))


@st.composite
def bodies(draw: st.DrawFn, name: str) -> bytes:
    """A message of this operation with something replaced, or junk."""
    kind = draw(st.sampled_from(["mutated", "mutated", "mutated", "junk", "bytes", "good"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    message = copy.deepcopy(GOOD.get(name, {}))
    if kind == "mutated" and isinstance(message, dict) and message:
        where: Any = message
        key = draw(st.sampled_from(keys(where)))
        while isinstance(where[key], dict | list) and where[key] and draw(st.booleans()):
            where = where[key]
            key = draw(st.sampled_from(keys(where)))
        where[key] = draw(junk)
    elif kind == "junk":
        message = draw(junk)
    text = json.dumps(message)
    if draw(st.booleans()):  # numbers that Python's own JSON would not write
        text = ODD_NUMBER.sub(lambda _: draw(st.sampled_from(ODD_NUMBERS)), text, count=1)
    return text.encode()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    operation = draw(st.sampled_from(ROUTES))
    path = operation.path
    name = "words" if "task_queues" in path else "soft"
    good = {"{job_id}": "digits", "{pod_id}": "pod_0_0", "{node_id}": "node-a", "{name}": name}
    for place, value in good.items():
        path = path.replace(place, value if draw(st.integers(0, 2)) else draw(ids))
    if draw(st.integers(0, 9)) == 0:
        path += draw(st.sampled_from(["/", "//", "/x", "/../..", "%00", "\udc80"]))
    method = operation.method.upper()
    if draw(st.integers(0, 9)) == 0:
        method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "BREW"]))
    return {
        "path": path,
        "method": method,
        "query_string": {**draw(queries)},
        "headers": draw(headers),
        "data": draw(bodies(operation.name)),
    }


def send(client: FlaskClient, request: dict[str, Any], **extra: str):
    query = {
        name: value
        for name, value in request["query_string"].items()
        # A poll that waits for nothing is no fuzzing: it only takes time.
        if not (name == "timeout_s" and value.strip().rstrip("0123456789.") == "")
    }
    sent = {name: value.replace("\n", "") for name, value in request["headers"].items()}
    # The path as a server hands it on: the test client would take `//x` for a host.
    path = request["path"].encode("utf-8", "replace").decode("latin-1")
    return client.open(
        "/",
        method=request["method"],
        query_string=query,
        headers={**sent, **extra},
        data=request["data"],
        environ_overrides={"PATH_INFO": path},
    )


def state_of(service: JobService) -> Any:
    """All that a refused request must leave alone: the jobs and nodes, in memory and on disk."""
    engine = service.engine
    jobs = {
        job_id: (entry.spec, entry.state, entry.forget, without_progress(entry.job))
        for job_id, entry in engine.jobs.items()
    }
    nodes = {node_id: known.node for node_id, known in engine.registry.nodes.items()}
    stored = [(job.job_id, job.forget, job.last_event) for job in engine.store.jobs()]
    return jobs, nodes, stored, engine.store.nodes()


def without_progress(job: AnyJob) -> Any:
    data = wire.encode(job)
    return {name: value for name, value in data.items() if name != "progress"}


@pytest.fixture(scope="module")
def service():
    service = JobService(Store(":memory:"))  # not started: no time limit falls due meanwhile
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service):
    return browse(service)  # once: making the routes takes longer than all of a request


@pytest.fixture(scope="module")
def guarded(service):
    return browse(service, Guard(token=TOKEN))


def prepare(service: JobService) -> None:
    """Have a job that is starting on a node, whatever the requests before have made of it."""
    engine = service.engine
    for entry in list(engine.jobs.values()):
        good = (wire.JobState.STARTING, wire.JobState.WAITING)
        if entry.state not in good or entry.spec.job_id == "new":
            engine.drop(entry)
    if "digits" not in engine.jobs:
        service.submit(wire.JobSpec(job_id="digits", max_pods=2))
        service.register(cpu_node())
    if "node-a" not in engine.registry.nodes:
        service.register(cpu_node())
    if engine.registry.limits:
        service.limit_node("node-a", wire.NodeLimit(slots=None))
    if not service.tasks.list_queues().queues:
        service.tasks.make_queue(TaskQueueSpec(**GOOD["make_queue"]))
    if "teachers" not in engine.jobs:
        kind = wire.JobKind.TEACHER
        service.submit(wire.JobSpec(job_id="teachers", kind=kind, service="soft", max_pods=2))


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(request=requests())
def test_no_request_is_a_5xx_and_a_refused_one_changes_nothing(service, client, request):
    prepare(service)
    before = state_of(service)
    answer = send(client, request)
    assert answer.status_code < 500, (request, answer.text)
    if answer.status_code >= 400:
        assert state_of(service) == before, request
        if request["method"] != "HEAD":
            assert list(answer.get_json()) == ["error"], request


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(request=requests(), token=st.one_of(st.just(""), st.text(max_size=10), st.just(TOKEN[:-1])))
def test_nothing_is_answered_without_the_token(service, guarded, request, token):
    prepare(service)
    before = state_of(service)
    given = "".join(char for char in token if char.isprintable() and ord(char) < 256)
    answer = send(guarded, request, Authorization=f"Bearer {given}")
    assert answer.status_code in (401, 403), (request, answer.text)
    assert state_of(service) == before


ODD_FIELDS = [
    ("submit", "grace_s"), ("submit", "max_pods"), ("submit", "prepare_timeout_s"),
    ("preview", "start_timeout_s"), ("resize", "pods"), ("kill", "rank"), ("attach", "pid"),
    ("attach", "stage"), ("attach", "highest_stage"), ("attach", "step"), ("report", "step_s"),
    ("report", "stage"), ("report", "step"), ("report", "total_steps"), ("report", "code"),
    ("report", "metrics.loss"), ("register", "stop_after_s"), ("register", "port_high"),
    ("report_node", "slots.0.temperature_c"), ("report_node", "slots.0.memory_used_bytes"),
    ("job_runtime_static", "estimated_run_time"), ("demand", "samples_per_s"),
    ("demand", "wait_share"), ("demand", "students"), ("demand", "teachers"),
    ("report", "paces.0.samples"), ("report", "paces.0.window_s"), ("report", "metric_epochs.loss"),
    ("report_node", "slots.0.faults.0.age_s"), ("report_node", "slots.0.idle_s"),
    ("report_node", "load.memory_used_mb"), ("report_node", "sent_ms"), ("limit_node", "slots"),
    ("order_slot", "slot"), ("make_queue", "lease_s"), ("make_queue", "max_tries"),
    ("lease_task", "pass_number"), ("report_task", "records"), ("report_task", "number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field"), ODD_FIELDS)
def test_no_number_makes_an_answer_a_list_or_a_restart_fail(tmp_path, name, field):
    path = tmp_path / "server.db"
    operation = next(op for op in ROUTES if op.name == name)
    route = operation.path.replace("{job_id}", "digits").replace("{pod_id}", "pod_0_0")
    route = route.replace("{name}", "words" if "task_queues" in route else "soft")
    route = route.replace("{node_id}", "node-a")
    with closing(JobService(Store(str(path)))) as service:
        prepare(service)
        client = browse(service)
        for number in ODD_NUMBERS:
            message = copy.deepcopy(GOOD[name])
            where: Any = message
            *above, last = field.split(".")
            for key in above:
                where = where[int(key)] if isinstance(where, list) else where[key]
            where[last] = 1234567.5
            body = json.dumps(message).replace("1234567.5", number)
            answer = client.post(route, data=body.encode())
            assert answer.status_code < 500, (number, answer.text)
        for job_id in ("digits", "teachers"):
            assert client.get(f"/api/v1/jobs/{job_id}").status_code == 200
        for route in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/task_queues", "/"):
            assert client.get(route).status_code == 200
    with closing(JobService(Store(str(path)))) as service:
        assert {"digits", "teachers"} <= set(service.job_ids())


def test_a_good_request_of_every_kind_is_not_refused_by_accident(service, client):
    """Else the fuzzer would only try doors that are shut anyway."""
    prepare(service)
    for name, body in GOOD.items():
        operation = next(op for op in ROUTES if op.name == name)
        path = operation.path.replace("{job_id}", "digits").replace("{pod_id}", "pod_0_0")
        path = path.replace("{name}", "words" if "task_queues" in path else "soft")
        answer = client.post(path.replace("{node_id}", "node-a"), json=body)
        assert answer.status_code in (200, 201, 409, 410), (name, answer.text)
