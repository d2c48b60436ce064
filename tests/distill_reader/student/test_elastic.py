"""A DistillReader inside an elastic training whose pods, and teachers, come and go."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec
from tests.distill_reader.student.teacher_process import TeacherProcess
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check
from tests.support import ROOT

pytest.importorskip("paddle", reason="trains with Paddle")

PIXELS = 4  # as in elastic_train.py


@pytest.fixture
def teachers(tmp_path: Path) -> Iterator[list[TeacherProcess]]:
    pair = [TeacherProcess(tmp_path / name, shape=(PIXELS,)) for name in ("t0", "t1")]
    for teacher in pair:
        teacher.start()
    for teacher in pair:
        teacher.wait()
    yield pair
    for teacher in pair:
        teacher.kill()


@pytest.fixture
def cluster(tmp_path: Path, teachers: list[TeacherProcess]) -> Iterator[Cluster]:
    trainer = ROOT / "tests" / "distill_reader" / "student" / "elastic_train.py"
    endpoints = ",".join(teacher.endpoint for teacher in teachers)
    script = (
        f"env PYTHONPATH={ROOT} "
        "{python} -m pod_runtime.launch --log_dir {out}/log "
        + f"{trainer} --teachers {endpoints} --samples 480 "
        + "--checkpoint {out}/checkpoint --out {out}/seen.npy --end {out}/end"
    )
    cluster = Cluster(tmp_path / "c", slots=2, script=script)
    cluster.start_server()
    cluster.start_client()
    yield cluster
    cluster.stop()


@pytest.mark.slow  # the short form is in tests/e2e/test_taught.py
@pytest.mark.timeout(600)
def test_each_sample_counts_once_with_its_own_prediction_while_pods_and_teachers_change(
    cluster: Cluster, teachers: list[TeacherProcess]
) -> None:
    cluster.submit(JobSpec(job_id="taught", pods=1, max_pods=2))
    cluster.wait_steps(5)
    cluster.api().resize("taught", 2)
    cluster.wait_running(2)
    cluster.wait_steps(10)

    teachers[0].kill()
    cluster.wait_steps(10)
    cluster.kill(cluster.trainers()[0])
    cluster.wait_steps(10)
    teachers[0].start()

    cluster.api().resize("taught", 1)
    cluster.wait_running(1)
    cluster.wait_steps(10)
    finish_and_check(cluster)
