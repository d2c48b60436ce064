"""Read jobs of a database that the version before wrote. Pure.

Each table says where a field of that version is now. A job of this version passes unchanged.
"""

from collections.abc import Mapping
from typing import Any

# Old name -> the path to its new place.
_JOB = {
    "previous": "retiring",
    "current": "active",
    "coming": "preparing",
    "roster": "recovery_pods",
    "heed_from": "grace_from",
    "failures": "budget.failures",
    "failures_in_row": "budget.failures_in_row",
    "step_at_failure": "budget.step_at_failure",
    "faults": "budget.faults",
    "preemptions": "budget.preemptions",
    "preemptions_in_row": "budget.preemptions_in_row",
    "step_at_preemption": "budget.step_at_preemption",
    "retry_at": "budget.retry_at",
    "grow_at": "growth.retry_at",
    "grow_failures": "growth.failures",
    "standby_at": "standby.retry_at",
    "standby_failures": "standby.failures",
    "script_index": "queue.script_index",
    "script_stored_s": "queue.script_stored_s",
    "manual": "queue.resize",
    "given_ids": "given.pod_ids",
    "given_flag": "given.flag",
    "dealt": "given.last_ports",
    "stopped_at": "lineage.stopped_at",
    "line_step": "lineage.previous_last_step",
    "redone_steps": "lineage.redone_steps",
    "saves": "ending.orders",
    "saved": "ending.saved",
    "discard": "ending.discard",
    "failed": "ending.failed",
    "waiting_told": "announced.waiting",
    "standby_said": "announced.standby",
    "warned": "announced.plain",
}
_POD = {"left": "launcher_done"}
_TEACHERS = {"dealt": "last_ports", "heed_from": "grace_from"}
_TEACHER_PROGRESS = {"governor": "autoscaler"}
_PHASES = {"ready": "idle", "started": "starting"}
_STAGES = ("previous", "current", "coming")


def upgraded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an encoded job as this version encodes it.

    Raises:
        LookupError, TypeError, AttributeError: it is damaged.
    """
    if "heed_from" not in data:  # every job of the version before has it
        return data
    data = {**data, "pods": [upgraded_pod(pod) for pod in data["pods"]]}
    if "governor" in data["progress"]:
        data["progress"] = _moved(data["progress"], _TEACHER_PROGRESS)
        return _moved(data, _TEACHERS)
    for place in _STAGES:
        if data[place] is not None:
            data[place] = _stage(data[place])
    return _moved(data, _JOB)


def upgraded_pod(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an encoded pod as this version encodes it; raises as `upgraded`."""
    if "keep" not in pod:
        return pod
    desired = "kill" if pod["keep"] == "run" and pod["kill"] else pod["keep"]
    others = {key: value for key, value in pod.items() if key not in ("keep", "kill")}
    return {**_moved(others, _POD), "desired": None if desired == "released" else desired}


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    phase = "go" if stage["phase"] == "committed" else stage["phase"]
    return {**stage, "phase": phase, "members": [_stage_pod(each) for each in stage["members"]]}


def _stage_pod(member: Mapping[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in member.items() if key != "at"}
    return {**others, "phase": _PHASES.get(member["at"], member["at"])}


def _moved(data: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for key, value in data.items():
        *groups, name = places.get(key, key).split(".")
        held = moved
        for group in groups:
            held = held.setdefault(group, {})
        held[name] = value
    return moved
