"""Collect what the status page shows, as plain values for its template."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from job_server.api import wire
from job_server.api.text import (
    account_parts,
    counted,
    duration,
    error_lines,
    load_text,
    pause,
    roughly,
    slot_lines,
    steps_of_stage,
    steps_of_total,
    teacher_facts,
    wanted_pods,
)
from job_server.server.service import JobService
from job_server.sharing.explain import outlook_text, range_text, summarize
from job_server.sharing.forecast import foresee

SHOWN_EVENTS = 12
SHOWN_STAGES = 12
SHOWN_ENDED = 50  # jobs that have ended: each open page costs the server all of them, every 3 s
REFRESH_S = 3
CURVE_WIDTH, CURVE_HEIGHT = 400, 60  # of the loss curve and the timeline, in pixels
_PASSES = 1000  # times jobs: what a forecast may cost the server, some 30 ms
_EXPLAINED = 40  # shared jobs; of more, the page has the server's short reasons alone


def page_context(service: JobService, version: str) -> dict[str, Any]:
    """Return the template's variables; the template escapes all of them."""
    now, wall = service.now(), service.wall()
    jobs = [
        _job_context(status, service.last_events(status.job_id, SHOWN_EVENTS), now, wall)
        for status in service.statuses(SHOWN_ENDED)
    ]
    sharing = service.sharing()
    shares = {node.node_id: node for node in sharing.nodes}
    return {
        "warnings": service.warnings(),
        "jobs": jobs,
        "more_jobs": max(0, len(service.job_ids()) - len(jobs)),
        "policy": sharing.policy,
        "queue": _queue_context(sharing),
        "has_users": len({job.user for job in sharing.jobs}) > 1,
        "nodes": [
            _node_context(status, shares.get(status.node.node_id), now)
            for status in service.node_statuses()
        ],
        "refresh_s": REFRESH_S,
        "now": f"{datetime.fromtimestamp(wall, UTC).astimezone():%Y-%m-%d %H:%M:%S}",
        "server_id": service.server_id,
        "version": version,
    }


def _queue_context(sharing: wire.Sharing) -> list[dict[str, Any]]:
    outlooks = foresee(sharing, passes=max(4, _PASSES // max(1, len(sharing.jobs))))
    rows = []
    for job in sharing.jobs:
        why = job.reason
        if len(sharing.jobs) <= _EXPLAINED:
            why = summarize(sharing, job, outlooks[job.job_id]).removeprefix(f"{job.job_id} ")
        rows.append(
            {
                "job": job,
                "range": range_text(job),
                "waited": roughly(job.waited_s),
                "next": outlook_text(job, outlooks[job.job_id]),
                "why": why.split("`"),  # every other part is a command
            }
        )
    return rows


def _job_context(
    status: wire.JobStatus, events: list[wire.JobEvent], now: float, wall: float
) -> dict[str, Any]:
    account = status.account
    total = account.total_s
    good = account.training_s + account.preparing_s
    return {
        "status": status,
        "wanted": wanted_pods(status),
        "steps": steps_of_total(status),
        "metrics": {name: f"{value:.4g}" for name, value in status.metrics.items()},
        "timeline": timeline(status.stages, now),
        "curve": _curve_context(status),
        "account": {
            name: duration(seconds)
            for name, seconds in account_parts(status).items()
            if seconds >= 0.05
        },
        "goodput": f"{100 * good / total:.0f} %" if total > 0 else "-",
        "error": None if status.error is None else error_lines(status.error),
        "teachers": [] if status.teachers is None else teacher_facts(status.teachers),
        "stages": [_stage_context(record) for record in status.stages[-SHOWN_STAGES:][::-1]],
        "more_stages": max(len(status.stages) - SHOWN_STAGES, 0),
        "events": [
            {"ago": duration(wall - event.at), "stage": event.stage, "text": event.text}
            for event in reversed(events)
        ],
    }


def timeline(records: Sequence[wire.StageRecord], now: float) -> dict[str, Any] | None:
    """Draw stages as bars over the time, as high as their trainers are many.

    A bar reaches from a stage's first step to its last one; between two bars nothing trained.

    Args:
        records: by stage; those that made no step are left out.
        now: seconds since 1970.

    Returns:
        What the template draws, in pixels; None where no stage has made a step.
    """
    stages = [record for record in records if record.first_step_at is not None]
    begins = [record.first_step_at or 0.0 for record in stages]
    if not stages:
        return None
    ends = [now if record.ended_at is None else record.ended_at for record in stages]
    # Where no stage is left the job is over or paused: its picture stays as it is.
    goes_on = any(record.ended_at is None for record in records)
    span_s = max((now if goes_on else max(ends)) - begins[0], 1.0)
    for at, (begin, after) in enumerate(zip(begins[1:], stages[1:], strict=True)):
        ends[at] = min(ends[at], begin - (after.pause_s or 0.0))
    across = CURVE_WIDTH / span_s
    least = min(record.trainers for record in stages)
    most = max(record.trainers for record in stages)
    bars = [
        {
            "x": round((begin - begins[0]) * across, 2),
            "width": round(max(end - begin, 0.0) * across, 2),
            "height": round(CURVE_HEIGHT * record.trainers / most, 1),
            "text": f"stage {record.stage}: {counted(record.trainers, 'trainer')}, {record.reason}"
            + ("" if record.pause_s is None else f"; {pause(record.pause_s)} of pause before it"),
        }
        for record, begin, end in zip(stages, begins, ends, strict=True)
    ]
    return {
        "width": CURVE_WIDTH,
        "height": CURVE_HEIGHT,
        "bars": bars,
        "text": f"{least} to {most}" if least < most else f"{most}",
        "span": roughly(span_s),
    }


def _curve_context(status: wire.JobStatus) -> dict[str, Any] | None:
    """Return the loss curve as points of a picture; None: there is no curve yet."""
    points = status.loss_curve
    newest = status.metrics.get(wire.TRAIN_LOSS)
    if points and newest is not None and status.step > points[-1].step:
        points += (wire.LossPoint(step=status.step, loss=newest),)
    if len(points) < 2:
        return None
    first, last = points[0].step, points[-1].step
    losses = [point.loss for point in points]
    low, high = min(losses), max(losses)
    across = CURVE_WIDTH / (last - first)
    down = CURVE_HEIGHT / (high - low) if high > low else 0.0
    return {
        "width": CURVE_WIDTH,
        "height": CURVE_HEIGHT,
        "points": " ".join(
            f"{(point.step - first) * across:.1f},{(high - point.loss) * down:.1f}"
            for point in points
        ),
        "text": f"{high:.4g} to {low:.4g}, steps {first} to {last}",
    }


def _stage_context(record: wire.StageRecord) -> dict[str, Any]:
    return {
        "record": record,
        "steps": steps_of_stage(record),
        "pause": pause(record.pause_s),
    }


def _node_context(
    status: wire.NodeStatus, shared: wire.SharedNode | None, now: float
) -> dict[str, Any]:
    slots = status.node.slots
    return {
        "status": status,
        "slots": f"{sum(slot.usable for slot in slots)} of {len(slots)} {slots[0].kind.value}",
        "use": None if shared is None else _use_context(shared),
        "load": load_text(status.report),
        "seen": duration(now - status.last_seen_at),
        "unusable": slot_lines(status, now),
    }


def _use_context(node: wire.SharedNode) -> dict[str, Any]:
    free = max(0, node.slots - node.used_shared - node.used_others)
    parts = [("shared", node.used_shared), ("others", node.used_others), ("free", free)]
    names = {"shared": "of shared jobs", "others": "of others", "free": "free"}
    text = [f"{count} {names[part]}" for part, count in parts if count]
    if node.limit is not None:
        text.append(f"shared jobs may have {node.limit}")
    if node.cpu_milli:
        text.append(f"CPU {100 * node.cpu_used_milli / node.cpu_milli:.0f} %")
    if node.gpu_percent is not None:
        text.append(f"GPU {node.gpu_percent:.0f} %")
    return {"parts": [part for part in parts if part[1]], "text": ", ".join(text)}
