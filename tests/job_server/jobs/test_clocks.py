"""Times of an earlier life of the server, where its clock has been set back since."""

import dataclasses
from typing import get_args, get_type_hints

from job_server.api import wire
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.clocks import is_time, moved_back
from job_server.jobs.events import Demanded, ServerRestarted
from job_server.teachers import machine as teachers
from job_server.teachers.job import TeacherJob
from job_server.training.core.job import Job
from tests.job_server.serving import cpu_node

# Numbers that are no times, and whose names do not end with _s as durations do.
NUMBERS = {"cpu_percent", "wait_share", "rate_per_s", "per_teacher", "sum_rate", "sum_wait"}
NUMBERS |= {"sum_rate_squared", "last", "metrics", "loss", "steps"}
NUMBERS |= {"submitted_at"}


def float_fields(kind: type, seen: set[type]) -> set[str]:
    """All fields that hold floats, of a dataclass and of those that it is made of."""
    if kind in seen:
        return set()
    seen.add(kind)
    names: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        parts = [hint]
        for part in parts:
            parts += get_args(part)
        names |= {name} if float in parts else set()
        for part in parts:
            if dataclasses.is_dataclass(part):
                names |= float_fields(part, seen)  # type: ignore[arg-type]
    return names


def test_every_float_of_a_job_is_a_time_or_a_duration_by_its_name():
    found = float_fields(Job, set()) | float_fields(TeacherJob, set())
    assert {"since", "at", "grace_from", "retry_at", "heard", "demand_at"} <= found
    odd = {n for n in found if not (is_time(n) or n.endswith("_s") or n in NUMBERS)}
    assert odd == set(), "name it *_at where it is a time, *_s where it is a duration"


def test_times_move_together_and_durations_stay():
    job = teachers.new_job(SPEC, 5000.0)
    moved = moved_back(job, 600.0)
    assert (moved.grace_from, moved.progress.accrued_at) == (4400.0, 4400.0)
    assert moved.submitted_at == job.submitted_at  # it tells jobs of one id apart
    assert moved.spec == job.spec
    assert moved.retry_at == 0.0  # never
    assert moved_back(moved, -600.0) == job


SPEC = wire.JobSpec(
    job_id="teachers", kind=wire.JobKind.TEACHER, service="soft", min_pods=0, max_pods=2, pods=1
)


def test_teachers_are_started_and_counted_again_at_once_after_a_clock_was_set_back():
    def cluster(now: float) -> Cluster:
        view = NodeView(node=cpu_node(job_id="teachers"), seen_at=now)
        return Cluster(nodes=(view,), heartbeat_s=1.0)

    job = teachers.new_job(SPEC, 5000.0)
    job = dataclasses.replace(job, retry_at=5001.0, grow_at=5001.0)
    now = 1400.0
    job, reason = teachers.step(job, ServerRestarted(), now, cluster(now))
    assert "the clock was set back by 3600 s" in reason
    demand = wire.Demand(service="soft", students=1, wait_share=0.5, samples_per_s=10.0)
    job, _ = teachers.step(job, Demanded(demand), now + 2, cluster(now + 2))
    assert len(job.pods) == 1
    assert job.progress.counted_at == now + 2
