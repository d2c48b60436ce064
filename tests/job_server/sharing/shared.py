"""Shared jobs and nodes, as `GET /v1/sharing` shows them."""

from typing import Any

from job_server.api.wire import JobState, SharedJob, SharedNode, Sharing

NOW = 1000.0


def shared_job(job_id: str, pods: int = 0, **fields: Any) -> SharedJob:
    """A job of 1 to 8 pods that came at 0 and has had so many, all on node `a`, for 240 s."""
    given: dict[str, Any] = {
        "state": JobState.RUNNING if pods else JobState.WAITING,
        "pods": pods,
        "allotted": pods,
        "min_pods": 1,
        "max_pods": 8,
        "nodes": {"a": pods} if pods else {},
        "step_s": {pods: 0.2} if pods else {},
        "submitted_at": 0.0,
        "since": NOW - 240.0,
        "folder": "f",
    }
    return SharedJob(job_id=job_id, **given | fields)


def shared_node(node_id: str = "a", slots: int = 8, **fields: Any) -> SharedNode:
    """A node that serves the jobs' folder."""
    given: dict[str, Any] = {"alive": True, "used_shared": 0, "used_others": 0, "folders": ("f",)}
    return SharedNode(node_id=node_id, slots=slots, **given | fields)


def cluster(
    *jobs: SharedJob, nodes: tuple[SharedNode, ...] = (), policy: str = "goodput"
) -> Sharing:
    """These jobs, on one node of 8 slots unless told otherwise."""
    return Sharing(policy=policy, now=NOW, nodes=nodes or (shared_node(),), jobs=jobs)
