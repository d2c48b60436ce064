"""A database of the version before is read, and its jobs look to everybody as they did.

`data/jobs_of_version_1.json` holds jobs as that version encoded them, and what it told users,
clients and launchers of them.
"""

import json
from typing import Any

import pytest

from job_server.api.codec import WireError, to_json
from job_server.cluster.placement import Cluster, NodeView
from job_server.server.store import Store
from job_server.sharing import job_types
from tests.job_server.serving import browse, open_service
from tests.job_server.world import node
from tests.support import ROOT

OLD: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "job_server" / "data" / "jobs_of_version_1.json").read_text()
)


@pytest.mark.parametrize("name", OLD)
def test_a_job_of_the_version_before_looks_as_it_did(name):
    old = OLD[name]
    now = old["now"]
    job = job_types.decode_job(old["job"])
    status = _plain(job_types.job_status(job, now, 7))
    assert _as_then(status, old["status"]) == old["status"]
    assert _plain(job_types.ports_held(job)) == old["ports"]
    assert _plain(job_types.slots_held(job)) == old["slots"]
    for node_id, plan in old["plans"].items():
        assert _as_then(_plain(job_types.node_pods(job).get(node_id, ())), plan) == plan
    for pod_id, plans in old["orders"].items():
        orders = job_types.pod_orders(job).get(pod_id)
        assert _as_then(None if orders is None else _plain(orders.plans), plans) == plans
    nodes = tuple(NodeView(node=node(each, 4), seen_at=now - 0.5) for each in "ab")
    due = job_types.next_deadline(job, now, Cluster(nodes=nodes))
    assert (None if due is None else round(due - now, 6)) == old["due_s"]


def _plain(value: Any) -> Any:
    return json.loads(to_json(value))


def _as_then(now: Any, then: Any) -> Any:
    """Return what is told now without the fields that there were not then."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {key: _as_then(now[key], value) for key, value in then.items()}
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [_as_then(*pair) for pair in zip(now, then, strict=True)]
    return now


@pytest.mark.parametrize("name", OLD)
def test_nothing_of_a_job_of_the_version_before_is_forgotten(name):
    """Every number of the old job, made unique, is somewhere in the new one."""
    old = json.loads(json.dumps(OLD[name]["job"]))
    marks = [*_mark(old), *_mark(old["progress"], first=2_000_000)]
    found = set(_numbers(_plain(job_types.decode_job(old))))
    assert set(marks) <= found


def _mark(data: dict[str, Any], first: int = 1_000_000) -> list[float]:
    marks: list[float] = []
    for mark, (key, value) in enumerate(data.items(), first):
        if type(value) in (int, float):
            data[key] = type(value)(mark)
            marks.append(mark)
    return marks


def _numbers(data: Any) -> list[float]:
    if isinstance(data, dict):
        return [number for value in data.values() for number in _numbers(value)]
    if isinstance(data, list):
        return [number for value in data for number in _numbers(value)]
    return [data] if type(data) in (int, float) else []


def test_a_database_of_the_version_before_is_opened_and_written_as_this_one(tmp_path):
    path = str(tmp_path / "server.db")
    store = Store(path)
    for name in ("recovering", "teachers_busy"):
        data = OLD[name]["job"]
        store.save_job(data["spec"]["job_id"], data)
    store.connection.execute("PRAGMA user_version=1")
    store.close()
    with open_service(path) as service:
        jobs = browse(service).get("/api/v1/jobs").get_json()["jobs"]
    assert [(job["job_id"], job["state"]) for job in jobs] == [
        ("job", "RECOVERING"),
        ("t", "RUNNING"),
    ]
    store = Store(path)
    assert store.connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert all("grace_from" in job.data for job in store.jobs())
    store.close()


@pytest.mark.parametrize("damage", [{"pods": 1}, {"progress": None}, {"coming": {"members": 2}}])
def test_a_damaged_job_of_the_version_before_is_refused(damage):
    with pytest.raises(WireError):
        job_types.decode_job({**OLD["running"]["job"], **damage})


def test_the_pods_of_a_damaged_job_of_the_version_before_are_known():
    old = OLD["kill_asked"]
    held = job_types.pods_of_unreadable({**old["job"], "goal": "to be the best"})
    assert held is not None
    assert {pod["pod_id"] for plan in old["plans"].values() for pod in plan} == {
        pod.pod_id for pod in held.pods
    }
