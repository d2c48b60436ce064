"""Show how jobs share the cluster: the queue, and one job of it in words. Pure."""

from typing import Any

from job_server.api import wire
from job_server.api.text import counted, listed, printable, roughly, table
from job_server.sharing.explain import Explanation, outlook_text, range_text
from job_server.sharing.forecast import Outlook, foresee

NOBODY = "no job shares the cluster; `edl submit --share` adds one"


def queue_text(sharing: wire.Sharing) -> str:
    """Return all shared jobs as a table, and what the cluster has for them."""
    lines = [queue_table(sharing) if sharing.jobs else NOBODY, "", slots_text(sharing)]
    if sharing.jobs:
        lines[-1] += "; `edl explain JOB` says more of a job"
    return "\n".join(lines)


def queue_table(sharing: wire.Sharing) -> str:
    """Return a row for each shared job, in the order in which they are served."""
    outlooks = foresee(sharing)
    rows = [
        (
            job.job_id,
            job.user or "-",
            job.priority,
            job.state.value,
            f"{job.pods if job.pods == job.allotted else f'{job.pods} -> {job.allotted}'} "
            f"({range_text(job)})",
            roughly(job.waited_s),
            outlook_text(job, outlooks[job.job_id]) or "-",
            _why(job) or "-",
        )
        for job in sharing.jobs
    ]
    header = ("JOB", "USER", "PRIORITY", "STATE", "PODS", "WAITED", "NEXT", "WHY")
    if not any(job.user for job in sharing.jobs):
        rows = [(row[0], *row[2:]) for row in rows]  # type: ignore[misc]  # one column less
        header = (header[0], *header[2:])  # type: ignore[assignment]
    return table(header, rows)


def slots_text(sharing: wire.Sharing) -> str:
    """Return who has the slots, e.g. `8 slots on 2 nodes: 6 of shared jobs, 2 free`."""
    nodes = [node for node in sharing.nodes if node.alive]
    if not nodes:
        return "no node can be reached; `edl client` adds one"
    slots = sum(node.slots for node in nodes)
    shared = sum(node.used_shared for node in nodes)
    others = sum(node.used_others for node in nodes)
    kept = sum(
        max(0, node.slots - node.used_others - max(node.limit, node.used_shared))
        for node in nodes
        if node.limit is not None
    )
    free = max(0, slots - shared - others - kept)
    parts = [f"{shared} of shared jobs"]
    parts += [f"{others} of others"] if others else []
    parts += [f"{kept} kept free by `edl capacity`"] if kept else []
    parts.append(f"{free} free")
    policy = f"; policy {sharing.policy}" if sharing.policy else ""
    return f"{counted(slots, 'slot')} on {counted(len(nodes), 'node')}: {', '.join(parts)}{policy}"


def queue_json(sharing: wire.Sharing) -> dict[str, Any]:
    """Return what the server says, and of each job when it is likely to start and to end."""
    outlooks, data = foresee(sharing), wire.encode(sharing)
    for job in data["jobs"]:
        job |= _outlook_json(outlooks[job["job_id"]])
    return dict(data)


def explanation_text(explanation: Explanation) -> str:
    """Return the sentence, and below it what stands behind it."""
    width = max((len(name) for name, _ in explanation.facts), default=0)
    facts = [f"  {name:<{width}}  {text}" for name, text in explanation.facts]
    return "\n".join(map(printable, [explanation.summary, *facts]))


def explanation_json(job_id: str, explanation: Explanation) -> dict[str, Any]:
    facts = [{"name": name, "text": text} for name, text in explanation.facts]
    return {
        "job_id": job_id,
        "summary": explanation.summary,
        "facts": facts,
        **_outlook_json(explanation.outlook),
    }


def explain_other(status: wire.JobStatus) -> Explanation:
    """Return what there is to say of a job that has ended, or that does not share the cluster."""
    if status.state.ended:
        why = status.reason.removeprefix(f"{status.state.value}: ")
        text = f"{status.job_id} has {status.state.value}: {why}"
    else:
        text = (
            f"{status.job_id} does not share the cluster, it has {len(status.pods)} of "
            f"{counted(status.target_pods, 'pod')} that are wanted: {status.reason}; "
            "submitted with --share, the server would choose how many it has"
        )
    return Explanation(summary=text, facts=(), outlook=Outlook())


def _why(job: wire.SharedJob) -> str:
    if job.after and not job.nodes:
        return f"after {listed(job.after)}"
    return job.reason


def _outlook_json(outlook: Outlook) -> dict[str, float | None]:
    return {"starts_in_s": outlook.starts_in_s, "ends_in_s": outlook.ends_in_s}
