"""When a slot gets no pods, and when it is used again, as a table."""

from dataclasses import replace

import pytest

from job_server.api.wire import Node, Quarantine, Slot, SlotFault, SlotKind, SlotUsage
from job_server.cluster.quarantine import (
    BY_HAND,
    MAX_PROBE_S,
    PROBE_S,
    begin,
    effective,
    judge,
    lasting,
    recent_faults,
)

SLOT = Slot(index=5, kind=SlotKind.GPU, uuid="GPU-5")
NOW = 1000.0


def usage(*faults: tuple[str, float], idle_s: float | None = 0.0, stranger: str = "") -> SlotUsage:
    told = tuple(SlotFault(name=name, text=f"what {name} is", age_s=age) for name, age in faults)
    return SlotUsage(index=5, faults=told, idle_s=idle_s, stranger=stranger)


def held(name: str = "xid_79", *, since: float = NOW, **more: object) -> Quarantine:
    return replace(begin(None, SLOT, name, f"what {name} is", since), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "begins"),
    [
        (usage(), ""),
        (usage(("xid_79", 0.0)), "xid_79"),
        (usage(("xid_79", 30.0)), "xid_79"),  # the server was away as it happened
        (usage(("xid_79", PROBE_S)), ""),  # ... and so long that the probe is over
        (usage(("xid_31", 0.0)), ""),  # an error of the program's own
        (usage(("xid_63", 0.0), ("rows_remap_pending", 0.0)), ""),
        (usage(("ecc_uncorrected", 0.0)), "ecc_uncorrected"),
        (usage(("rows_remap_failed", 0.0)), "rows_remap_failed"),
        (usage(("recovery_drain_reset", 0.0)), "recovery_drain_reset"),
        (usage(("nvml_hangs", 0.0)), "nvml_hangs"),
        (usage(("ecc_uncorrected", 0.0), ("gpu_lost", 2.0)), "gpu_lost"),  # the gravest
        (usage(("xid_999", 0.0)), ""),
    ],
)
def test_what_puts_a_slot_in_quarantine(told: SlotUsage, begins: str):
    quarantine = judge(None, SLOT, told, NOW)
    assert ("" if quarantine is None else quarantine.name) == begins
    if quarantine is not None:
        assert (quarantine.why, quarantine.since) == (f"what {begins} is", NOW)


@pytest.mark.parametrize(
    ("told", "after_s", "is_used"),
    [
        (usage(("xid_79", PROBE_S), idle_s=PROBE_S), PROBE_S, True),
        (usage(("xid_79", PROBE_S - 1), idle_s=PROBE_S), PROBE_S, False),
        (usage(idle_s=PROBE_S), PROBE_S, True),  # its client has begun anew
        (usage(idle_s=PROBE_S - 1), PROBE_S, False),  # a process was on it
        (usage(idle_s=PROBE_S, stranger="pid 7 (python)"), PROBE_S, False),
        (usage(idle_s=9 * PROBE_S), PROBE_S - 1, False),
        (usage(idle_s=None), PROBE_S, True),  # no GPU
        (usage(("gpu_lost", 0.0), idle_s=PROBE_S), 9 * PROBE_S, False),
        (usage(("xid_31", 1.0), idle_s=PROBE_S), PROBE_S, True),
    ],
)
def test_when_a_slot_is_taken_back(told: SlotUsage, after_s: float, is_used: bool):
    quarantine = judge(held(), SLOT, told, NOW + after_s)
    assert quarantine is not None
    assert (quarantine.ended_at is not None) == is_used


def test_what_an_operator_has_put_in_quarantine_only_an_operator_takes_back():
    well = usage(idle_s=10 * MAX_PROBE_S)
    assert judge(held(BY_HAND), SLOT, well, NOW + 10 * MAX_PROBE_S) == held(BY_HAND)


def test_each_relapse_makes_the_probe_longer_until_a_slot_was_well_for_a_week():
    known, now, probes = None, NOW, []
    for _ in range(6):
        known = judge(known, SLOT, usage(("xid_79", 0.0)), now)
        assert known is not None
        probes.append(known.probe_s)
        now += known.probe_s
        known = judge(known, SLOT, usage(idle_s=known.probe_s), now)
        assert known is not None
        assert known.ended_at == now
        now += 10.0
    assert probes == [600.0, 2400.0, 9600.0, 38400.0, MAX_PROBE_S, MAX_PROBE_S]
    assert judge(known, SLOT, usage(), now + 8 * 86400.0) is None


def test_a_fault_that_is_known_already_begins_nothing_once_the_slot_was_taken_back():
    over = held(ended_at=NOW + 20)
    assert judge(over, SLOT, usage(("xid_79", 25.0)), NOW + 25) == over
    again = judge(over, SLOT, usage(("xid_79", 2.0)), NOW + 25)
    assert again is not None
    assert (again.ended_at, again.times) == (None, 2)
    lasts = judge(over, SLOT, usage(("gpu_lost", 0.0)), NOW + 20)
    assert lasts is not None
    assert lasts.ended_at is None


def test_a_fault_that_grows_worse_is_the_one_that_is_named():
    worse = judge(held("ecc_uncorrected"), SLOT, usage(("gpu_lost", 0.0)), NOW + 5)
    assert worse is not None
    assert (worse.name, worse.why, worse.since) == ("gpu_lost", "what gpu_lost is", NOW)


def test_another_card_in_the_same_place_begins_anew():
    assert judge(held(), replace(SLOT, uuid="GPU-new"), usage(), NOW + 5) is None
    assert judge(held(), replace(SLOT, uuid=""), usage(), NOW + 5) == held()  # it is lost


def test_a_slot_in_quarantine_is_not_usable_and_says_whether_trainers_can_go_on():
    node = Node(
        node_id="a", addr="a", slots=(replace(SLOT, index=4), SLOT), port_low=20000, port_high=20003
    )
    fatal, grave = (effective(node, [held(name)]).slots for name in ("xid_79", "xid_74"))
    assert (fatal[1].usable, fatal[1].ends_trainers) == (False, True)
    assert fatal[1].reason == "in quarantine: what xid_79 is"
    assert (grave[1].usable, grave[1].ends_trainers) == (False, False)
    assert fatal[0] == grave[0] == node.slots[0]
    assert effective(node, [held(ended_at=NOW)]) is node


def test_what_lasts_keeps_a_slot_in_quarantine_whatever_is_asked():
    assert lasting(usage(("gpu_lost", 0.0))) == "what gpu_lost is"
    assert lasting(usage(("gpu_lost", 5.0), ("xid_31", 0.0))) == ""
    assert lasting(None) == ""


def test_recent_faults_are_known_by_slot_beside_what_lasts():
    faults = usage(("rows_remap_pending", 0.0), ("xid_94", 4.0), ("xid_31", 90.0))
    assert recent_faults([faults], 60.0) == {5: ("rows_remap_pending", "xid_94")}
    assert recent_faults([usage(("xid_31", 90.0))], 60.0) == {}
