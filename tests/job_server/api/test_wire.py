"""What does not fit is refused with its field, however far off it is."""

import dataclasses
import json
import re
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.codec import MAX_INT, WireError, decode, encode, from_json, to_json
from job_server.api.wire import (
    MAX_STAGE,
    Attach,
    JobSpec,
    Node,
    Order,
    PodReport,
    RestoreFrom,
    StagePlan,
    Way,
    check_range,
)
from tests.programs import loaded_by
from tests.support import ROOT

HUGE = 10**400


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1e308, -5])
def test_a_number_out_of_range_is_refused_by_the_name_of_its_field(value):
    with pytest.raises(WireError, match="port_low: must be between 1 and 2, got"):
        check_range("port_low", value, 1, 2)


@pytest.mark.parametrize("stage", [-1, 2 * MAX_STAGE + 1, MAX_INT])
def test_a_state_of_a_stage_that_cannot_be_is_refused_as_later_stages_count_on(stage):
    report = to_json({"kind": "progress", "stage": 1, "snapshot": {"stage": stage, "step": 1}})
    with pytest.raises(WireError, match=r"snapshot\.stage: must be between 0 and"):
        from_json(PodReport, report)


@pytest.mark.parametrize("value", [HUGE, -HUGE, MAX_INT + 1, -MAX_INT - 1])
@pytest.mark.parametrize(
    ("kind", "needed", "field"),
    [
        (JobSpec, {"job_id": "a"}, "max_pods"),
        (JobSpec, {"job_id": "a"}, "max_failures"),
        (PodReport, {"kind": "ready", "stage": 1}, "total_steps"),
    ],
)
def test_an_integer_that_no_field_takes_is_refused_and_not_computed_with(
    kind, needed, field, value
):
    data = {**needed, field: value}
    with pytest.raises(WireError, match=f"^{field}: expected at most"):
        decode(kind, data)
    with pytest.raises(WireError, match=f"^{field}: expected at most"):
        from_json(kind, json.dumps(data).encode())


@pytest.mark.parametrize("value", [HUGE, -HUGE])
@pytest.mark.parametrize(
    ("kind", "needed", "field"),
    [(JobSpec, {"job_id": "a"}, "grace_s"), (PodReport, {"kind": "ready", "stage": 1}, "step_s")],
)
def test_a_float_that_is_not_finite_is_refused(kind, needed, field, value):
    data = {**needed, field: value}
    with pytest.raises(WireError, match=f"^{field}: expected at most"):
        decode(kind, data)
    with pytest.raises(WireError, match=f"^{field}: expected at most"):
        from_json(kind, json.dumps(data).encode())


NODE = {"node_id": "a", "addr": "b", "port_low": 2000, "port_high": 3000}
PLAN: dict[str, Any] = {
    "job_id": "a",
    "stage": 1,
    "flag": 0,
    "way": "start",
    "order": "go",
    "master": "b:1",
}


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        pytest.param(JobSpec, [], "body: expected an object, got []", id="list"),
        pytest.param(JobSpec, {}, "job_id: missing", id="missing"),
        pytest.param(
            JobSpec, {"job_id": "a", "kind": "x"},
            "kind: expected one of training, teacher, got 'x'", id="enum",
        ),
        pytest.param(
            JobSpec, {"job_id": "a", "pods": True}, "pods: expected int or null, got True",
            id="true is no number",
        ),
        pytest.param(
            JobSpec, {"job_id": "a", "script": {"interval_s": "5"}},
            "script.interval_s: expected float, got '5'", id="nested",
        ),
        pytest.param(
            JobSpec, {"job_id": "a", "script": {"interval_s": 0}},
            "script.interval_s: must be between 0.05", id="refused by a nested class",
        ),
        pytest.param(
            Node, {**NODE, "slots": [{"index": 0, "kind": "gpu"}, {"index": 1, "kind": 5}]},
            "slots[1].kind: expected one of gpu, cpu, got 5", id="item of a list",
        ),
        pytest.param(Node, {**NODE, "slots": [{}]}, "slots[0].index: missing", id="in an item"),
        pytest.param(
            StagePlan, {**PLAN, "pods": [], "max_trainers": 1, "kill_ranks": [["a"]]},
            "kill_ranks[0]: expected 2 items, got 1", id="length",
        ),
        pytest.param(
            StagePlan, {**PLAN, "pods": [], "max_trainers": 1, "kill_ranks": [["a", "b"]]},
            "kill_ranks[0][1]: expected int, got 'b'", id="item of a pair",
        ),
        pytest.param(
            PodReport, {"kind": "ready", "stage": 1, "metrics": {"a": 1, "loss": "x"}},
            "metrics.loss: expected float, got 'x'", id="key of a mapping",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_field_what_was_expected_and_the_value(kind, data, says):
    with pytest.raises(WireError, match=re.escape(says)):
        decode(kind, data)
    with pytest.raises(WireError, match=re.escape(says)):
        from_json(kind, json.dumps(data).encode())
    with pytest.raises(WireError, match=r"^a\.b"):
        decode(kind, data, "a.b")


def test_unknown_keys_are_ignored_and_missing_ones_have_their_default():
    spec = from_json(JobSpec, b'{"job_id": "a", "of_the_future": [1e999, {"deep": null}]}')
    assert spec == JobSpec(job_id="a") == decode(JobSpec, {"job_id": "a", "odd": 1})


def test_a_message_is_what_it_was_after_a_journey():
    plan = StagePlan(
        **{**PLAN, "way": Way.JOIN, "order": Order.CUT}, pods=(), max_trainers=1,
        kill_ranks=(("a", 1),), restore_from=RestoreFrom(stage=1, step=2, pods=("a", "b")),
    )  # fmt: skip
    assert from_json(StagePlan, to_json(plan)) == plan
    assert decode(StagePlan, encode(plan)) == plan
    assert dataclasses.replace(plan, stage=2).stage == 2


def test_importing_the_contract_loads_no_server_and_no_framework():
    others = {"flask", "requests", "gevent", "numpy", "yaml"}
    assert others.isdisjoint(loaded_by("job_server.api.routes"))


def test_a_standby_that_could_never_be_prepared_is_refused():
    with pytest.raises(WireError, match=r"^standby: 1 needs .* overlap 'off' forbids; use overlap"):
        JobSpec(job_id="a", standby=1, overlap="off")
    assert JobSpec(job_id="a", overlap="off").standby == 0


@pytest.mark.parametrize("phase", ["absent", "cutting", "left", "finished", "lost"])
def test_a_launcher_cannot_attach_in_a_phase_that_only_the_server_knows(phase):
    with pytest.raises(WireError, match=f"phase: '{phase}' is no phase that a launcher"):
        decode(Attach, {"pod_id": "a", "node_id": "n", "pid": 1, "phase": phase})


# A message of each class, with a value of its own in every field, as the version before wrote it.
OLD: dict[str, Any] = json.loads(
    (ROOT / "tests" / "job_server" / "data" / "messages_of_version_1.json").read_text()
)


@pytest.mark.parametrize("name", OLD)
def test_messages_of_the_version_before_are_read_and_programs_of_it_can_read_ours(name):
    """Pods outlive an upgrade of the server, and a node may be upgraded before or after it."""
    message = from_json(getattr(wire, name), json.dumps(OLD[name]).encode())
    assert _as_then(json.loads(to_json(message)), OLD[name]) == OLD[name]


def _as_then(now: Any, then: Any) -> Any:
    """Return a message without the fields that there were not then."""
    if isinstance(then, dict):
        return {key: _as_then(now[key], value) for key, value in then.items()}
    if isinstance(then, list):
        return [_as_then(*pair) for pair in zip(now, then, strict=True)]
    return now


def test_a_message_without_the_fields_of_this_version_has_their_defaults():
    old = {key: OLD["PodReport"][key] for key in ("kind", "stage", "kept")}
    report = from_json(PodReport, json.dumps(old).encode())
    assert report == PodReport(kind=report.kind, stage=report.stage, snapshot_is_current=True)


@pytest.mark.parametrize(
    ("kind", "body", "where"),
    [
        (wire.JobSpec, b'{"job_id": "a", "script": {"kind": 5}, "script": 1}', "script"),
        (wire.NodeReport, b'{"node_id": "n", "pods": [{"pod_id": 1}], "pods": []}', "pods"),
        (wire.PodReport, b'{"snapshot": {"stage": "x"}, "snapshot": [3]}', "snapshot"),
    ],
)
def test_a_key_that_stands_twice_with_other_content_is_refused_by_name(kind, body, where):
    with pytest.raises(WireError, match=f"^{where}: a key stands twice; send it once"):
        from_json(kind, body)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"priority": 5}, "priority: only of a job that shares the cluster; add share"),
        ({"user": "ann"}, "user: only of a job that shares"),
        ({"after": ["b"]}, "after: only of a job that shares"),
        ({"max_run_time_s": 60}, "max_run_time_s: only of a job that shares"),
        ({"share": True, "pods": 1}, "pods: the server chooses how many pods"),
        ({"share": True, "expected_nodes": 2}, "expected_nodes: a shared job starts as soon as"),
        ({"share": True, "script": {"kind": "alternate"}}, "script: the server chooses"),
        ({"share": True, "priority": 1001}, "priority: must be between -1000 and 1000, got 1001"),
        ({"share": True, "user": "../x"}, "user: '../x' is not an id"),
        ({"share": True, "after": ["../x"]}, "after: '../x' is not an id"),
        ({"share": True, "after": ["a"]}, "after: 'a' is the job itself"),
        ({"share": True, "cpu_milli": -1}, "cpu_milli: must be between 0"),
        ({"share": True, "memory_mb": -1}, "memory_mb: must be between 0"),
        ({"share": True, "max_run_time_s": 0}, "max_run_time_s: must be between 1"),
        ({"share": True, "kind": "teacher", "service": "s"}, "share: means nothing for a job of"),
    ],
)
def test_what_a_shared_job_cannot_have_and_what_only_it_can_is_refused_by_name(fields, says):
    with pytest.raises(WireError, match=f"^{re.escape(says)}"):
        decode(JobSpec, {"job_id": "a", **fields})


def test_a_shared_job_is_what_it_was_after_a_journey():
    spec = JobSpec(
        job_id="a", share=True, priority=-3, user="ann", after=("b", "c"), cpu_milli=1500,
        memory_mb=800, max_run_time_s=3600.0,
    )  # fmt: skip
    assert from_json(JobSpec, to_json(spec)) == spec
    sharing = wire.Sharing(
        policy="goodput",
        jobs=(
            wire.SharedJob(
                job_id="a", state=wire.JobState.WAITING, pods=0, allotted=0, min_pods=1,
                max_pods=2, submitted_at=1.0, step_s={1: 0.5, 2: 0.3}, nodes={"n": 1}, since=2.0,
            ),
        ),
    )  # fmt: skip
    assert from_json(wire.Sharing, to_json(sharing)) == sharing
