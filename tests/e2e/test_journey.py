"""What users do with a job besides letting it run: pause, stop, resize by hand, get it wrong."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState, ScriptKind, ScriptSpec, Way
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.storage import LocalStorage
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check
from tests.support import wait_until


@pytest.mark.timeout(900)
def test_pause_frees_every_slot_and_resume_redoes_no_step(
    counting_cluster: Callable[..., Cluster],
) -> None:
    # Without a checkpoint path: the newest state goes to the run folder, and is found there.
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000, checkpoint="")
    cluster.submit(JobSpec(job_id="nap", max_pods=2, spares=1))
    cluster.wait_steps(5)
    cluster.api().pause("nap")
    paused = cluster.wait_for(lambda now: now.state is JobState.PAUSED, "paused")
    path = cluster.out / "log" / "run" / "checkpoint"
    assert f"paused; step {paused.step} is in {path}" in paused.reason
    wait_until(lambda: not cluster.trainers() and not cluster.shims(), what="no pod is left")

    assert cluster.server is not None
    cluster.kill(cluster.server)  # what is paused survives a crash of the server
    cluster.start_server()
    cluster.wait_for(lambda now: now.state is JobState.PAUSED, "still paused")
    cluster.api().resume("nap")
    resumed = cluster.wait_steps(1)
    assert resumed.redone_steps == 0
    assert resumed.stages[-1].first_step == paused.step + 1
    finish_and_check(cluster)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_whole_stack_that_is_stopped_leaves_its_newest_step_and_goes_on_from_there(
    counting_cluster: Callable[..., Cluster],
) -> None:
    every = "--checkpoint {out}/checkpoint --save_steps 1000000"
    # On a busy machine the trainers need longer than usual to write what they have.
    cluster = counting_cluster(slots=2, samples=4800, epochs=100, checkpoint=every, grace_s=30)
    cluster.submit(JobSpec(job_id="stack", max_pods=2, spares=1))
    seen = cluster.wait_steps(5)
    assert cluster.server is not None
    assert cluster.client is not None
    for program in (cluster.client, cluster.server):
        program.terminate()
    for program in (cluster.client, cluster.server):
        assert program.wait(60) == 0
    wait_until(lambda: not cluster.trainers() and not cluster.shims(), what="no pod is left")
    newest = CheckpointStore(LocalStorage(cluster.out / "checkpoint")).newest_whole()
    assert newest is not None
    assert newest.step >= seen.step
    cluster.start_server()
    cluster.start_client()
    again = cluster.wait_for(lambda now: now.stage > 1 and now.step > newest.step, "it trains")
    assert again.stages[-1].first_step == newest.step + 1
    finish_and_check(cluster)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overlap", "moment"),
    [  # the two that last for seconds; a cut by replace is over before it can be seen from outside
        ("on", JobState.PREPARING),
        # Without processes: a server that comes back in a cut, in test_stages_recovery.py.
        pytest.param("off", JobState.CUTTING_OVER, marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_in_the_middle_of_a_change_finishes_it(
    counting_cluster: Callable[..., Cluster], overlap: str, moment: JobState
) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    cluster.submit(JobSpec(job_id="mid", pods=1, max_pods=2, overlap=overlap))
    cluster.wait_steps(5)
    cluster.api().resize("mid", 2)
    cluster.wait_for(lambda now: now.state is moment, str(moment))
    assert cluster.server is not None
    cluster.kill(cluster.server)
    cluster.start_server()
    status = cluster.wait_running(2)
    assert status.redone_steps == 0
    finish_and_check(cluster)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_timeline_resizes_and_kills_by_itself(counting_cluster: Callable[..., Cluster]) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    timeline = textwrap.dedent("""
        - {at: 2s, add: 1}
        - {at: 10s, kill: 0}
        - {at: 18s, pods: 1}
    """)
    script = ScriptSpec(kind=ScriptKind.TIMELINE, text=timeline)
    cluster.submit(JobSpec(job_id="timed", pods=1, max_pods=2, script=script, spares=1))
    status = cluster.wait_for(
        lambda now: (
            now.state is JobState.RUNNING
            and [record.pods for record in now.stages][-1] == 1
            and len(now.stages) > 2
        ),
        "grown, and shrunk again",
        90,
    )
    # On a slow machine the last change falls due while the kill is being mended, and takes the
    # place of that recovery; then there are three stages.
    assert [record.pods for record in status.stages] in ([1, 2, 2, 1], [1, 2, 1])
    said = [event.text for event in cluster.api().events("timed")]
    assert any("was killed by SIGKILL, as requested" in text for text in said), said
    assert status.failures == 0, "a kill that was asked for is no failure"
    finish_and_check(cluster)


@pytest.mark.timeout(900)
def test_stop_ends_the_job_and_leaves_no_process(counting_cluster: Callable[..., Cluster]) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    cluster.submit(JobSpec(job_id="long", max_pods=2, spares=1))
    cluster.wait_steps(3)
    cluster.api().kill("long", pod_id=cluster.status().pods[1].pod_id)
    cluster.wait_for(lambda now: len(now.stages) >= 2, "a stage without the killed pod")
    cluster.wait_steps(3)
    cluster.api().stop("long")
    cluster.wait_for(lambda now: now.state is JobState.STOPPED, "stopped")
    wait_until(lambda: not cluster.trainers() and not cluster.shims(), what="no pod is left")


@pytest.fixture
def script_cluster(tmp_path: Path):
    """A cluster whose pods run a bash line."""
    made: list[Cluster] = []

    def make(script: str, *, slots: int = 1) -> Cluster:
        cluster = Cluster(tmp_path / "c", slots=slots, script=script)
        made.append(cluster)
        cluster.start_server()
        cluster.start_client()
        return cluster

    yield make
    for cluster in made:
        cluster.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param("{python} -m pod_runtime.launch {out}/no_such.py", "no_such.py", id="missing"),
        pytest.param("{python} -m pod_runtime.launch {out}/one.py", "exited with 1", id="exit 1"),
        pytest.param("false", "1", id="the pod's script itself"),
    ],
)
def test_a_script_that_cannot_run_fails_with_its_reason_and_not_for_ever(
    script_cluster: Callable[..., Cluster], script: str, says: str
) -> None:
    cluster = script_cluster(script)
    (cluster.out / "one.py").write_text("raise SystemExit(1)\n")
    cluster.submit(JobSpec(job_id="bad", max_restarts_without_progress=2))
    status = cluster.wait_for(lambda now: now.state is JobState.FAILED, "failed")
    assert says in status.reason
    assert len(status.stages) <= 6  # three, and some that a busy machine may cost
    wait_until(lambda: not cluster.trainers() and not cluster.shims(), what="no pod is left")


@pytest.mark.timeout(900)
def test_trainers_without_the_elastic_loop_are_stopped_and_started_again(
    script_cluster: Callable[..., Cluster],
) -> None:
    cluster = script_cluster("{python} -m pod_runtime.launch {out}/plain.py {out}/", slots=2)
    (cluster.out / "plain.py").write_text(
        textwrap.dedent("""
            import os, pathlib, sys, time

            out = pathlib.Path(sys.argv[1])
            world, rank = os.environ["PADDLE_TRAINERS_NUM"], os.environ["PADDLE_TRAINER_ID"]
            (out / f"started_{world}_{rank}").touch()
            while not (out / "finish").exists():
                time.sleep(0.05)
        """)
    )
    cluster.submit(JobSpec(job_id="plain", pods=1, max_pods=2, grace_s=2))
    wait_until((cluster.out / "started_1_0").exists)
    cluster.wait_for(lambda now: now.state is JobState.RUNNING, "running")
    cluster.api().resize("plain", 2)
    wait_until((cluster.out / "started_2_1").exists)
    status = cluster.wait_for(lambda now: len(now.stages) == 2, "two stages")
    assert status.stages[1].way is Way.STOP
    (cluster.out / "finish").touch()
    cluster.wait_for(lambda now: now.state is JobState.SUCCEEDED, "succeeded")
