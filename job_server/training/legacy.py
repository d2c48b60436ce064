"""Serve jobs that only clients of the original run: they never report, so changes apply at once.

Pure. As soon as a client of ours registers a node that serves the job, these pods are dropped and
the job starts properly.
"""

import dataclasses

from msgspec.structs import replace

from job_server.api.text import counted
from job_server.api.wire import StageRecord, Way
from job_server.cluster.placement import NodeView, place, serving_nodes
from job_server.training.core.accounting import update_record
from job_server.training.core.allocation import lay_out, make_pods, slots_of_stayers
from job_server.training.core.changes import is_due, scripted, skip_to, store_script_clock, why_not
from job_server.training.core.job import MAX_RECORDS, TrainingPod
from job_server.training.core.work import Work


def begin_legacy(work: Work) -> None:
    """Assign the first pods to nodes that have not registered."""
    if work.job.legacy:
        _commit_pods(work, work.job.target, "first start, for clients of the original")


def converge_legacy(work: Work) -> None:
    """Apply every due change, or hand the job to clients of ours."""
    if serving_nodes(work.job.spec, work.cluster, work.now):
        _hand_over(work)
        return
    while (change := scripted(work.job)) is not None and is_due(work.job, change):
        skip_to(work, 1)
        size = len(work.job.served)
        wanted = {"set": change.pods, "add": size + change.pods, "remove": size - change.pods}
        if change.action not in wanted:
            work.note(f"{change.text}: skipped: no client of ours looks after the pods")
            continue
        resize_legacy(work, wanted[change.action], change.text)
    store_script_clock(work)


def resize_legacy(work: Work, pods: int, why: str) -> None:
    skip = why_not(work.job, pods)
    if not skip and pods == len(work.job.served):
        skip = f"the job has {counted(pods, 'pod')} already"
    if skip:
        work.note(f"{why}: skipped: {skip}")
    elif _commit_pods(work, pods, why):
        work.set(target=pods, resizes=work.job.resizes + 1)


def _commit_pods(work: Work, pods: int, why: str) -> bool:
    """Commit a set of `pods` pods. Return False if a new one cannot be placed on these nodes."""
    job = work.job
    old = {pod.pod_id: pod for pod in job.pods}
    stay = tuple(old[pod.pod_id] for pod in job.served[:pods])
    work.set(pods=stay)
    nodes = tuple(NodeView(node=node, seen_at=work.now) for node in job.legacy_nodes)
    virtual = Work(work.job, work.now, dataclasses.replace(work.cluster, nodes=nodes))
    sites = place(
        job.spec,
        virtual.cluster,
        work.now,
        count=pods - len(stay),
        held=slots_of_stayers(virtual.job),
        leaving={},
    )
    if (not stay and not sites) or (pods > len(stay) and not sites):
        work.set(pods=job.pods)
        work.note(f"{why}: skipped: no place for {pods} pods on the nodes of --node_ips")
        return False
    new: tuple[TrainingPod, ...] = make_pods(virtual, sites, len(stay))
    served = lay_out(virtual, (*stay, *new))
    number = job.next_stage
    record = StageRecord(
        stage=number,
        flag=job.next_flag,
        way=Way.START,
        pods=len(served),
        trainers=sum(len(pod.ranks) for pod in served),
        reason=why,
        outcome="committed",
        wanted_at=work.now,
        committed_at=work.now,
    )
    update_record(work, number - 1, outcome="ended", ended_at=work.now)
    work.job = replace(
        virtual.job,
        records=(*work.job.records, record)[-MAX_RECORDS:],
        served=served,
        next_stage=number + 1,
        commits=job.commits + 1,
    )
    work.note(f"stage {number} committed: {len(served)} pods, {why}")
    return True


def _hand_over(work: Work) -> None:
    """Forget these pods. If nothing has changed yet, start from the beginning."""
    job = work.job
    unchanged = job.commits <= 1
    work.set(
        legacy_nodes=(),
        pods=(),
        served=(),
        records=() if unchanged else job.records,
        commits=0 if unchanged else job.commits,
        next_stage=1 if unchanged else job.next_stage,
        given=replace(job.given, pod_ids=() if unchanged else job.given.pod_ids, last_ports={}),
        start_since=work.now,
    )
    if unchanged:
        work.set(queue=replace(job.queue, script_index=0, script_stored_s=0.0))
        work.progress(script_s=0.0)
    else:
        update_record(work, job.next_stage - 1, outcome="ended", ended_at=work.now)
    work.note("a client of ours has registered: starting")
