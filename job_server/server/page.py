"""Collect what the status page shows, as plain values for its template."""

from datetime import UTC, datetime
from typing import Any

from job_server.api import wire
from job_server.api.text import (
    account_parts,
    duration,
    steps_of_stage,
    steps_of_total,
    teacher_facts,
)
from job_server.server.service import JobService

SHOWN_EVENTS = 12
SHOWN_STAGES = 12
REFRESH_S = 3


def page_context(service: JobService, version: str) -> dict[str, Any]:
    """Return the template's variables; the template escapes all of them."""
    now = service.now()
    jobs = [
        _job_context(status, service.last_events(status.job_id, SHOWN_EVENTS), now)
        for status in service.statuses()
    ]
    return {
        "jobs": jobs,
        "nodes": [_node_context(status, now) for status in service.node_statuses()],
        "refresh_s": REFRESH_S,
        "now": f"{datetime.fromtimestamp(now, UTC).astimezone():%Y-%m-%d %H:%M:%S}",
        "server_id": service.server_id,
        "version": version,
    }


def _job_context(status: wire.JobStatus, events: list[wire.JobEvent], now: float) -> dict[str, Any]:
    account = status.account
    total = account.total_s
    good = account.training_s + account.preparing_s
    return {
        "status": status,
        "steps": steps_of_total(status),
        "metrics": {name: f"{value:.4g}" for name, value in status.metrics.items()},
        "account": {
            name: duration(seconds)
            for name, seconds in account_parts(status).items()
            if seconds >= 0.05
        },
        "goodput": f"{100 * good / total:.0f} %" if total > 0 else "-",
        "teachers": [] if status.teachers is None else teacher_facts(status.teachers),
        "stages": [_stage_context(record) for record in status.stages[-SHOWN_STAGES:][::-1]],
        "more_stages": max(len(status.stages) - SHOWN_STAGES, 0),
        "events": [
            {"ago": duration(now - event.at), "stage": event.stage, "text": event.text}
            for event in reversed(events)
        ],
    }


def _stage_context(record: wire.StageRecord) -> dict[str, Any]:
    return {
        "record": record,
        "steps": steps_of_stage(record),
        "pause": "-" if record.pause_s is None else duration(record.pause_s),
    }


def _node_context(status: wire.NodeStatus, now: float) -> dict[str, Any]:
    slots = status.node.slots
    return {
        "status": status,
        "slots": f"{sum(slot.usable for slot in slots)} of {len(slots)} {slots[0].kind.value}",
        "seen": duration(now - status.last_seen_at),
        "unusable": [f"slot {slot.index}: {slot.reason}" for slot in slots if not slot.usable],
    }
