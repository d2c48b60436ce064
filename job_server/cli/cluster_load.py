"""What runs on a cluster, as EDL's first collector showed it: for `edl top`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from job_server.api import wire
from job_server.api.text import load_text, printable
from job_server.cli.queue import NOBODY, queue_table, slots_text

HEADER = ("SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS")
_BAR, _WIDE = 48, 4  # characters for all slots of a node, and at most for one
_PARTS = (("█", "shared jobs"), ("▒", "others"), ("·", "free"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """What runs on the cluster."""

    submitted: int  # trainings that have not ended
    pending: int  # those of them that have no trainer
    running: tuple[tuple[str, int], ...]  # job, trainers
    cpu: float | None  # part of all processor time that is used; None: no node says
    gpu: float | None  # mean part of the time in which a GPU computes; None: there is none
    nodes: Mapping[str, str] = field(default_factory=dict)  # node -> what of it is in use


def cluster_load(jobs: Iterable[wire.JobStatus], nodes: Iterable[wire.NodeStatus]) -> ClusterLoad:
    """Return what runs. Trainings alone are counted; CPUs and GPUs are used by others, too."""
    live = [job for job in jobs if job.teachers is None and not job.state.ended]
    running = tuple((job.job_id, _trainers(job)) for job in live)
    reports = [
        (node.node, wire.decode(wire.NodeReport, node.report))
        for node in nodes
        if node.alive and node.report
    ]
    return ClusterLoad(
        submitted=len(live),
        pending=sum(count == 0 for _, count in running),
        running=running,
        cpu=_cpu(reports),
        gpu=_gpu(reports),
        nodes={
            node.node_id: text
            for node, report in reports
            if (text := load_text(wire.encode(report)))
        },
    )


def load_line(load: ClusterLoad | None) -> str:
    """Return a line of the table; None: its header."""
    cells = HEADER if load is None else _cells(load)
    widths = (len(HEADER[0]), len(HEADER[1]), 36, len(HEADER[3]), 0)
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


def load_json(load: ClusterLoad, now: float) -> dict[str, Any]:
    """Return the same as an object; the uses are parts of 1. `now`: seconds since 1970."""
    return {**wire.encode(load), "running": dict(load.running), "at": now}


def load_screen(load: ClusterLoad, sharing: wire.Sharing, server: str, now: float) -> list[str]:
    """Return the lines that `edl top` paints in a terminal. `now`: seconds since 1970."""
    at = datetime.fromtimestamp(now, UTC).astimezone()
    lines = [f"{server}   {at:%H:%M:%S}   {slots_text(sharing)}", ""]
    lines += [load_line(None), load_line(load), ""]
    width = max((len(printable(node.node_id)) for node in sharing.nodes), default=0)
    most = max((node.slots for node in sharing.nodes), default=0)
    scale = min(float(_WIDE), _BAR / max(most, 1))  # the same for all nodes
    for node in sharing.nodes:
        if node.alive:
            bar, text = _bar(node, width, scale), load.nodes.get(node.node_id)
            lines.append(f"{bar}   {text}" if text else bar)
    lines += ["    ".join(f"{mark} {what}" for mark, what in _PARTS), ""]
    return lines + (queue_table(sharing).splitlines() if sharing.jobs else [NOBODY])


def _cells(load: ClusterLoad) -> Sequence[str]:
    return (
        str(load.submitted),
        str(load.pending),
        "|".join(f"{printable(job_id)}:{count}" for job_id, count in load.running) or "-",
        _percent(load.cpu),
        _percent(load.gpu),
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.2f}%"


def _bar(node: wire.SharedNode, width: int, scale: float) -> str:
    free = max(0, node.slots - node.used_shared - node.used_others)
    counts = (node.used_shared, node.used_others, free)
    bar = "".join(
        mark * round(count * scale) for (mark, _), count in zip(_PARTS, counts, strict=True)
    )
    limit = "" if node.limit is None else f", shared jobs may have {node.limit}"
    taken = node.used_shared + node.used_others
    return f"{printable(node.node_id):<{width}}  {bar}  {taken} of {node.slots}{limit}"


def _trainers(job: wire.JobStatus) -> int:
    return sum(len(pod.ranks) for pod in job.pods if pod.phase == "running")


def _cpu(reports: Iterable[tuple[wire.Node, wire.NodeReport]]) -> float | None:
    used = have = 0.0
    for node, report in reports:
        if node.cpu_milli and report.foreign_cpu_milli is not None:
            have += node.cpu_milli
            used += report.foreign_cpu_milli + 10 * sum(pod.cpu_percent for pod in report.pods)
    return min(1.0, used / have) if have else None


def _gpu(reports: Iterable[tuple[wire.Node, wire.NodeReport]]) -> float | None:
    found = []
    for node, report in reports:
        gpus = {slot.index for slot in node.slots if slot.kind is wire.SlotKind.GPU}
        found += [use.utilization_percent for use in report.slots if use.index in gpus]
    return sum(found) / len(found) / 100 if found else None
