"""Decide which slots get no pods because something is wrong with their GPU. Pure.

Clients report what is wrong, with its age, for as long as they remember it. So a report that is
lost, or a server that was away, changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from job_server.api.wire import Node, Quarantine, Slot, SlotFault, SlotUsage

PROBE_S = 600.0  # a slot that had no fault and no process for so long is taken back
RELAPSE_FACTOR = 4  # ... and for so many times that after each relapse
MAX_PROBE_S = 86400.0
FORGIVEN_S = 7 * 86400.0  # who was well for so long begins anew
BY_HAND = "by_hand"
_LATE_S = 1.0  # by which a report may make a fault seem younger

# No trainer can go on there.
_FATAL = frozenset(
    {
        *("gpu_lost", "nvml_hangs", "recovery_reset", "recovery_reboot"),
        *(f"xid_{xid}" for xid in (46, 48, 61, 62, 79, 95, 110, 119, 120, 140, 143)),
    }
)
# One that runs may go on until it can leave without a step lost.
_GRAVE = frozenset(
    {
        *("ecc_uncorrected", "rows_remap_failed", "recovery_drain_reset"),
        *("xid_64", "xid_74", "xid_94"),
    }
)


def is_grave(name: str) -> bool:
    """Return whether a fault of this name puts its slot in quarantine."""
    return name in _FATAL or name in _GRAVE


def judge(known: Quarantine | None, slot: Slot, usage: SlotUsage, now: float) -> Quarantine | None:
    """Return the quarantine of a slot after a heartbeat; None: there is none to be remembered."""
    if known is not None and known.uuid and slot.uuid and known.uuid != slot.uuid:
        known = None  # another card is there
    grave = [fault for fault in usage.faults if is_grave(fault.name)]
    if known is None or known.ended_at is not None:
        news = [fault for fault in grave if _is_news(known, fault, now)]
        if news:
            worst = max(news, key=lambda fault: (fault.name in _FATAL, -fault.age_s))
            return begin(known, slot, worst.name, worst.text, now)
        forgiven = known is not None and now - (known.ended_at or now) > FORGIVEN_S
        return None if forgiven else known
    worse = next((fault for fault in grave if fault.name in _FATAL and fault.age_s == 0), None)
    if worse is not None and known.name not in _FATAL:
        return replace(known, name=worse.name, why=worse.text)
    return replace(known, ended_at=now) if _is_well(known, grave, usage, now) else known


def begin(known: Quarantine | None, slot: Slot, name: str, why: str, now: float) -> Quarantine:
    """Return a quarantine that begins now.

    Args:
        known: what is remembered of the slot.
        name: of the fault.
    """
    times = 1 if known is None else known.times + (known.ended_at is not None)
    probe_s = min(PROBE_S * float(RELAPSE_FACTOR) ** min(times - 1, 10), MAX_PROBE_S)
    return Quarantine(
        slot=slot.index,
        uuid=slot.uuid,
        name=name,
        why=why,
        since=now,
        times=times,
        probe_s=0.0 if name == BY_HAND else probe_s,
    )


def lasting(usage: SlotUsage | None) -> str:
    """Return the fault that keeps a slot in quarantine whatever is asked; "": none does."""
    faults = () if usage is None else usage.faults
    return next((each.text for each in faults if is_grave(each.name) and each.age_s == 0), "")


def effective(
    node: Node, quarantines: Sequence[Quarantine], *, shortage: str = "", draining: str = ""
) -> Node:
    """Return a node as it is to be used: its slots in quarantine get no pods.

    Args:
        shortage: why none of its slots gets any; the pods that are there stay. "": it has enough.
        draining: why the pods on all its slots leave; "": they do not.
    """
    if draining:
        node = replace(node, slots=tuple(_drained(slot, draining) for slot in node.slots))
    barred = {each.slot: each for each in quarantines if each.ended_at is None}
    if not barred and not shortage:
        return node
    slots = tuple(
        _barred(slot, barred[slot.index])
        if slot.index in barred
        else replace(slot, usable=False, reason=shortage)
        if shortage and slot.usable
        else slot
        for slot in node.slots
    )
    return replace(node, slots=slots)


def recent_faults(usages: Sequence[SlotUsage], within_s: float) -> dict[int, tuple[str, ...]]:
    """Return slot -> the names of its faults that are so young, the newest first.

    What lasts is always the newest: a row that waits for its replacement must not hide an XID.
    """
    return {
        usage.index: names
        for usage in usages
        if (names := tuple(each.name for each in usage.faults if each.age_s <= within_s))
    }


def _drained(slot: Slot, why: str) -> Slot:
    reason = f"its node is drained: {why}"
    return replace(slot, usable=False, reason=reason, quarantine=why, drained=True)


def _barred(slot: Slot, known: Quarantine) -> Slot:
    return replace(
        slot,
        usable=False,
        reason=f"in quarantine: {known.why}",
        quarantine=known.why,
        ends_trainers=known.name in _FATAL,
        drained=False,
    )


def _is_news(known: Quarantine | None, fault: SlotFault, now: float) -> bool:
    if known is None or known.ended_at is None:
        return fault.age_s < PROBE_S
    return fault.age_s == 0 or now - fault.age_s > known.ended_at + _LATE_S


def _is_well(known: Quarantine, grave: Sequence[SlotFault], usage: SlotUsage, now: float) -> bool:
    if not known.probe_s or usage.stranger:
        return False
    quiet_s = [now - known.since, *(fault.age_s for fault in grave)]
    if usage.idle_s is not None:
        quiet_s.append(usage.idle_s)
    return min(quiet_s) >= known.probe_s
