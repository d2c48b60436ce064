"""Say what is wrong with a GPU, by what was read of it and what it has announced. Pure.

The server decides what follows from a fault, by its name: see `job_server.cluster.quarantine`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from job_server.api.wire import SlotFault

KEPT_S = 86400.0  # a fault that is older is forgotten
MAX_FAULTS = 8  # of one GPU that a report names: the newest

# What NVIDIA's catalogue of XIDs says of those that are met most.
_XIDS = {
    13: "an error of the program's own: a kernel went wrong",
    31: "an error of the program's own: a kernel used memory that is not its own",
    43: "an error of the program's own: it was stopped",
    45: "a program was ended while it ran",
    46: "the GPU stopped processing",
    48: "memory error that ECC could not correct",
    61: "its micro-controller has halted",
    62: "its micro-controller has halted",
    63: "a broken row of memory was set aside",
    64: "a broken row of memory could not be set aside",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "many memory errors that ECC corrects",
    94: "memory error that ECC could not correct, within one program",
    95: "memory error that ECC could not correct, perhaps in all programs",
    110: "its security processor reports an error",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) reports an error",
    140: "memory error that ECC could not correct",
    143: "it could not be initialised",
}
_RECOVERY = {
    "reset": "a reset of this GPU (nvidia-smi -r)",
    "drain_reset": "a reset of this GPU once it is free",
    "reboot": "a reboot of this machine",
}
STUCK_S = 30.0  # a driver that says nothing about a GPU for so long has lost it
_COUNTED_S = 5.0  # of the time between two questions: a client that was stopped counts no more
_HARMLESS = ("rows_remap_pending", "pages_pending")  # until somebody resets the GPU anyway

NO_ANSWER = SlotFault(
    name="nvml_hangs", text=f"the driver has given no answer about it for {STUCK_S:g} s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """What a GPU says of its own health; what it does not say stays as here."""

    lost: bool = False  # it has fallen off the bus
    unreachable: str = ""  # the driver's words, where it cannot reach it for another reason
    ecc_corrected: int | None = None  # since the driver was loaded, as the next
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None  # in its life; GPUs before Ampere
    pages_pending: bool = False  # more are to be, at the next reset
    remapped_rows: int | None = None  # in its life; GPUs since Ampere
    rows_pending: bool = False
    rows_failed: bool = False  # more are broken than it can replace
    recovery: str = ""  # what the driver asks for: a key of `_RECOVERY`; "": nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """What is remembered of one GPU, as long as its client lives."""

    health: GpuHealth = GpuHealth()
    faults: tuple[tuple[SlotFault, float], ...] = ()  # when each was seen last; newest first
    used_at: float = 0.0  # when a process was last on it


def lasting(health: GpuHealth) -> tuple[SlotFault, ...]:
    """Return the faults that a GPU has as long as it says so, the gravest first."""
    found = []
    if health.lost:
        found.append(("gpu_lost", "it has fallen off the bus; reboot the machine"))
    if health.unreachable:
        found.append(("gpu_lost", f"the driver cannot reach it: {health.unreachable}"))
    if health.recovery:
        text = f"the driver asks for {_RECOVERY[health.recovery]}"
        found.append((f"recovery_{health.recovery}", text))
    if health.rows_failed:
        text = "its memory has more broken rows than it can replace; replace the card"
        found.append(("rows_remap_failed", text))
    if health.rows_pending:
        text = "a broken row of its memory is replaced at the next reset of the GPU"
        found.append(("rows_remap_pending", text))
    if health.pages_pending:
        text = "a broken page of its memory is set aside at the next reset of the GPU"
        found.append(("pages_pending", text))
    return tuple(SlotFault(name=name, text=text) for name, text in found)


def momentary(before: GpuHealth, now: GpuHealth, xids: Iterable[int]) -> tuple[SlotFault, ...]:
    """Return what has happened between two looks at a GPU."""
    found = [SlotFault(name=f"xid_{xid}", text=describe_xid(xid)) for xid in dict.fromkeys(xids)]
    # Who sees the count for the first time does not know when the errors were.
    if before.ecc_uncorrected is not None and now.ecc_uncorrected is not None:
        more = now.ecc_uncorrected - before.ecc_uncorrected
        if more > 0:
            errors = "1 memory error" if more == 1 else f"{more} memory errors"
            text = f"{errors} that ECC could not correct"
            found.append(SlotFault(name="ecc_uncorrected", text=text))
    return tuple(found)


def describe_xid(xid: int) -> str:
    known = _XIDS.get(xid)
    return f"XID {xid}: {known}" if known else f"XID {xid} (see NVIDIA's list of XID errors)"


def look(
    record: GpuRecord | None, health: GpuHealth, xids: Collection[int], *, used: bool, now: float
) -> GpuRecord:
    """Return what is to be remembered after another look at a GPU.

    Args:
        record: what was before; None: this is the first look.
        xids: that it has announced since.
        used: a process is on it, or a pod holds it.
        now: seconds, of a clock that never goes back.
    """
    if record is None:
        record = GpuRecord(health=health, used_at=now)
    if health.ecc_uncorrected is None:  # a lost GPU says nothing: its counts are not forgotten
        health = replace(health, ecc_uncorrected=record.health.ecc_uncorrected)
    seen = (*lasting(health), *momentary(record.health, health, xids))
    newest = {fault.name: (fault, now) for fault in reversed(seen)}
    older = {fault.name: (fault, at) for fault, at in reversed(record.faults) if now - at < KEPT_S}
    kept = sorted((older | newest).values(), key=lambda each: -each[1])
    return GpuRecord(
        health=health, faults=tuple(kept[:MAX_FAULTS]), used_at=now if used else record.used_at
    )


def reported(record: GpuRecord, now: float) -> tuple[SlotFault, ...]:
    """Return the faults with their age at `now`; 0: it lasted when the GPU was last looked at."""
    last = {fault.name for fault in lasting(record.health)}
    return tuple(
        replace(fault, age_s=0.0 if fault.name in last else max(0.0, now - at))
        for fault, at in record.faults
    )


def prevents(fault: SlotFault) -> bool:
    """Return whether no trainer should begin on a GPU that has this fault."""
    return fault.name not in _HARMLESS


class StuckCall:
    """How long the same call has been under way, as far as we were there to see it."""

    def __init__(self) -> None:
        self._call: tuple[int, float] | None = None  # index of the GPU, when it began
        self._asked_at = 0.0
        self._lasted_s = 0.0

    def index_of(self, call: tuple[int, float] | None, now: float) -> int | None:
        """Return the GPU whose call has taken too long; None: none has. Ask again and again.

        Args:
            call: the one that is under way; None: none is.
        """
        gap_s, self._asked_at = now - self._asked_at, now
        same = call is not None and call == self._call
        self._lasted_s = self._lasted_s + min(gap_s, _COUNTED_S) if same else 0.0
        self._call = call
        return call[0] if call is not None and self._lasted_s >= STUCK_S else None
