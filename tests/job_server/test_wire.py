"""What does not fit is refused with its field, however far off it is."""

import dataclasses
from typing import Any

import pytest

from job_server.api.codec import MAX_INT, WireError, decode
from job_server.api.wire import JobSpec, PodReport, check_range

HUGE = 10**400


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1e308, -5])
def test_a_number_out_of_range_is_refused_by_the_name_of_its_field(value):
    with pytest.raises(WireError, match="port_low: must be between 1 and 2, got"):
        check_range("port_low", value, 1, 2)


@pytest.mark.parametrize("value", [HUGE, -HUGE, MAX_INT + 1])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(JobSpec, "max_pods"), (JobSpec, "grace_s"), (JobSpec, "max_failures"), (PodReport, "step_s")],
)
def test_a_number_that_no_field_takes_is_refused_and_not_computed_with(kind, field, value):
    needed: dict[str, Any] = {"job_id": "a", "kind": "ready", "stage": 1}
    if kind is JobSpec:
        needed["kind"] = "training"
    names = {f.name for f in dataclasses.fields(kind)}
    data = {key: needed[key] for key in needed if key in names}
    with pytest.raises(WireError, match=f"{field}: expected at most"):
        decode(kind, {**data, field: value})


def test_a_standby_that_could_never_be_prepared_is_refused():
    with pytest.raises(WireError, match=r"^standby: 1 needs .* overlap 'off' forbids; use overlap"):
        JobSpec(job_id="a", standby=1, overlap="off")
    assert JobSpec(job_id="a", overlap="off").standby == 0
