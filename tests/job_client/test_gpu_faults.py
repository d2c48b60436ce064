"""What is wrong with a GPU, as a table."""

from dataclasses import replace

import pytest

from job_client.devices.gpu_faults import (
    STUCK_S,
    GpuHealth,
    GpuRecord,
    StuckCall,
    lasting,
    look,
    prevents,
    reported,
)

WELL = GpuHealth(ecc_corrected=0, ecc_uncorrected=0, remapped_rows=0)


def names(record: GpuRecord) -> list[str]:
    return [fault.name for fault, _ in record.faults]


@pytest.mark.parametrize(
    ("health", "name", "no_trainer"),
    [
        (GpuHealth(lost=True), "gpu_lost", True),
        (GpuHealth(unreachable="Unknown Error"), "gpu_lost", True),
        (replace(WELL, recovery="reset"), "recovery_reset", True),
        (replace(WELL, recovery="drain_reset"), "recovery_drain_reset", True),
        (replace(WELL, recovery="reboot"), "recovery_reboot", True),
        (replace(WELL, rows_failed=True), "rows_remap_failed", True),
        (replace(WELL, rows_pending=True), "rows_remap_pending", False),
        (replace(WELL, pages_pending=True), "pages_pending", False),
    ],
)
def test_what_a_gpu_says_of_itself_is_a_fault_as_long_as_it_says_so(health, name, no_trainer):
    (fault,) = lasting(health)
    assert (fault.name, prevents(fault)) == (name, no_trainer)
    assert lasting(WELL) == ()


def test_a_fault_that_is_over_is_remembered_with_its_age_for_a_day():
    sick = look(None, replace(WELL, rows_failed=True), (), used=False, now=100.0)
    told = [(each.name, each.age_s) for each in reported(sick, 101.5)]  # between two looks
    assert told == [("rows_remap_failed", 0)]
    well = look(sick, WELL, (), used=False, now=160.0)
    assert [each.age_s for each in reported(well, 160.0)] == [60.0]
    assert names(look(well, WELL, (), used=False, now=100.0 + 86400.0)) == []


def test_errors_from_before_the_first_look_are_no_news():
    first = look(None, replace(WELL, ecc_uncorrected=9), (), used=False, now=1.0)
    assert names(first) == []
    assert names(look(first, replace(WELL, ecc_uncorrected=10), (), used=False, now=2.0)) == [
        "ecc_uncorrected"
    ]


def test_a_count_that_a_lost_gpu_does_not_tell_is_no_new_error_when_it_is_back():
    before = look(None, replace(WELL, ecc_uncorrected=9), (), used=False, now=1.0)
    lost = look(before, GpuHealth(lost=True), (), used=False, now=2.0)
    back = look(lost, replace(WELL, ecc_uncorrected=9), (), used=False, now=3.0)
    assert names(back) == ["gpu_lost"]


def test_the_newest_faults_are_kept_where_there_are_very_many():
    record = look(None, WELL, range(100, 120), used=False, now=1.0)
    record = look(record, WELL, (79,), used=False, now=2.0)
    assert len(record.faults) == 8
    assert names(record)[0] == "xid_79"


def test_a_gpu_is_idle_since_the_last_process_was_on_it():
    record = look(None, WELL, (), used=True, now=10.0)
    record = look(record, WELL, (), used=True, now=20.0)
    assert look(record, WELL, (), used=False, now=30.0).used_at == 20.0


def test_a_call_that_lasts_is_noticed_and_the_time_of_a_stopped_client_does_not_count():
    stuck, call = StuckCall(), (3, 0.0)
    assert stuck.index_of(call, 1.0) is None
    assert stuck.index_of(call, 1000.0) is None  # it was stopped in between
    for second in range(1001, 1001 + int(STUCK_S)):
        last = stuck.index_of(call, float(second))
    assert last == 3
    assert stuck.index_of(None, 1040.0) is None
    assert stuck.index_of((4, 1039.0), 1041.0) is None
