"""Write durations, steps, exit codes and tables for people. Pure."""

import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from job_server.api.wire import (
    FirstError,
    JobStatus,
    NodeReport,
    NodeStatus,
    Quarantine,
    SaveState,
    SlotUsage,
    StageRecord,
    TeacherStatus,
    decode,
)

_RECENT_S = 3600.0
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # requests to end, not crashes


def duration(seconds: float) -> str:
    """Return e.g. `0.4 s`, `12 s`, `3 min 20 s`, `5 h 2 min`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def pause(seconds: float | None) -> str:
    """Return e.g. `0.04 s`, `3.1 s`; `-`: not known."""
    if seconds is None:
        return "-"
    return f"{max(seconds, 0):.2f} s" if seconds < 1 else duration(seconds)


def roughly(seconds: float) -> str:
    """Return e.g. `40 s`, `12 min`, `5 h 10 min`, `3 days`: for what is not known exactly."""
    if seconds < 90:
        return f"{max(round(seconds), 0)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        rest = minutes % 60 // 10 * 10
        return f"{minutes // 60} h {rest} min" if rest else f"{minutes // 60} h"
    return f"{round(minutes / 1440)} days"


def counted(number: int, noun: str) -> str:
    """Return e.g. `1 slot`, `2 slots`, `no slot`."""
    return f"{number or 'no'} {noun}" if number in (0, 1) else f"{number} {noun}s"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return e.g. `a`, `a and b`, `a, b and c`; of more than `most`: `a, b, c and 7 others`."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} others"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def saving_text(save: SaveState) -> str:
    """Return how far the writing of a state is, e.g. `writing step 12: 0.6 of 1.2 GB`."""
    if not save.total_bytes:
        return "beginning to write the newest state"
    unit, name = (1e9, "GB") if save.total_bytes >= 1e9 else (1e6, "MB")
    done, total = save.written_bytes / unit, save.total_bytes / unit
    return f"writing step {save.step}: {done:.1f} of {total:.1f} {name}"


def slot_lines(known: NodeStatus, now: float) -> list[str]:
    """Return what is to be said of a node's slots, a line each; nothing where all are well."""
    report = decode(NodeReport, known.report) if known.report else None
    usages = {usage.index: usage for usage in (report.slots if report is not None else ())}
    held = {each.slot: each for each in known.quarantines}
    lines = []
    if known.draining:
        lines.append(f"is drained: {known.draining}")
    if known.shortage:
        lines.append(f"no new pods: {known.shortage}")
    for slot in known.node.slots:
        name = f"slot {slot.index}"
        if slot.index in held:
            lines.append(f"{name} {_quarantine_text(held[slot.index], known.node.node_id, now)}")
        elif not slot.usable and not slot.drained and slot.reason != known.shortage:
            lines.append(f"{name} is not usable: {slot.reason or 'no reason given'}")
        elif slot.index in usages:
            lines += [f"{name}: {text}" for text in _trouble(usages[slot.index])]
    return lines


def load_text(report: Mapping[str, Any]) -> str:
    """Return what of a node is in use, in few words, by its client's report; "": not known."""
    load = decode(NodeReport, report).load if report else None
    if load is None:
        return ""
    parts = [] if load.cpu_milli is None else [f"{load.cpu_milli / 1000:.1f} cores"]
    if load.memory_total_mb:
        used, total = load.memory_used_mb / 1000, load.memory_total_mb / 1000
        parts.append(f"{used:.1f} of {total:.0f} GB")
    if load.disk_total_mb:
        parts.append(f"disk {load.disk_free_mb / 1000:.0f} GB free")
    moved = (load.sent_bytes_s or 0) + (load.received_bytes_s or 0)
    if moved >= 10**6:
        parts.append(f"network {moved / 10**6:.0f} MB/s")
    return ", ".join(parts)


def _quarantine_text(held: Quarantine, node_id: str, now: float) -> str:
    by_hand = f"`edl capacity {node_id} --take_back {held.slot}`"
    again = f"used again after {by_hand}"
    if held.probe_s:
        again = f"used again once it was well and idle for {roughly(held.probe_s)}"
    return f"is in quarantine for {roughly(now - held.since)}: {held.why}; {again}"


def _trouble(usage: SlotUsage) -> list[str]:
    """Return what does not keep a slot from use, and is worth knowing."""
    found = [
        fault.text if fault.age_s == 0 else f"{fault.text}, {roughly(fault.age_s)} ago"
        for fault in usage.faults
        if fault.age_s < _RECENT_S
    ]
    slowed = [each for each in usage.throttled_by.split(", ") if each not in ("", "power limit")]
    return [*found, *([f"slowed by {listed(slowed)}"] if slowed else [])]


def wanted_pods(status: JobStatus) -> int:
    """Return how many pods a job is to have now; of a shared one that waits: none."""
    return status.target_pods if status.allotment is None else status.allotment.pods


def steps_of_total(status: JobStatus) -> str:
    """Return e.g. `120 of 400 (30 %)`, or the step alone where the total is not known."""
    if status.total_steps:
        share = 100 * status.step / status.total_steps
        return f"{status.step} of {status.total_steps} ({share:.0f} %)"
    return str(status.step)


def steps_of_stage(record: StageRecord) -> str:
    """Return e.g. `1 to 40`, `41 to ...` while it runs, `-` before its first step."""
    if record.first_step is None:
        return "-"
    return f"{record.first_step} to {'...' if record.last_step is None else record.last_step}"


def account_parts(status: JobStatus) -> dict[str, float]:
    """Return where the job's time went: seconds by name."""
    account = status.account
    return {
        "training" if status.teachers is None else "serving": account.training_s,
        "preparing": account.preparing_s,
        "cutting over": account.cutting_over_s,
        "recovering": account.recovering_s,
        "waiting": account.waiting_s,
        "paused": account.paused_s,
        "hung": account.hung_s,
        "waiting for data": account.reading_s,
        "saving": account.saving_s,
        "straggling": account.straggling_s,
    }


def error_lines(error: FirstError) -> tuple[str, str]:
    """Return the first error of a stage in two lines: what it was, and where it came from."""
    at = datetime.fromtimestamp(error.at, UTC).astimezone()
    frames = [line.strip() for line in error.traceback.splitlines() if line.startswith("  File ")]
    where = f"{len(frames)} frames, the last: {frames[-1]}" if frames else "no traceback"
    return error.text, f"heard first in stage {error.stage}, {at:%Y-%m-%d %H:%M:%S}; {where}"


def teacher_facts(teachers: TeacherStatus) -> list[tuple[str, str]]:
    """Return the facts about a job of teachers, as names and values."""
    demand, age_s = teachers.demand, teachers.demand_age_s
    reported = "never reported"
    if demand is not None and age_s is not None:
        reported = (
            f"{demand.students} students, waiting {100 * demand.wait_share:.0f} % of their time, "
            f"{demand.samples_per_s:,.0f} samples/s; {duration(age_s)} ago"
        )
        if demand.teachers is not None:
            reported += f"; {demand.teachers} registered"
    return [
        ("service", teachers.service),
        ("chosen", f"by {teachers.chosen_by}"),
        ("demand", reported),
    ]


def describe_exit(code: int) -> str:
    """Return e.g. `exited with 3`, `was killed by SIGKILL`, `died of SIGSEGV`.

    Args:
        code: exit code, negative for a signal.
    """
    if code >= 0:
        return f"exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"was killed by {name}"
    return f"was ended by {name}" if -code in _REQUESTS else f"died of {name}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned columns; the last one is not padded. Control characters are made visible."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def printable(text: str, *, lines: bool = False) -> str:
    """Return text from elsewhere so that it cannot move the terminal's cursor.

    Args:
        lines: it may have several lines.
    """
    kept = "\n" if lines else ""
    return "".join(
        char if char.isprintable() or char in kept else f"\\x{ord(char):02x}" for char in text
    )
