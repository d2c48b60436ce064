"""The ways to get stuck of docs/supervision.md, each by real processes, and how each ends.

5 and 6, starts that do not end, are in test_failures.py; 11, a node or its network, in
test_two_nodes.py. The trainers are toys but for 4; all else is as users have it.
"""

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests

from job_server.api.api_client import ApiClient
from job_server.api.errors import ServerAway
from job_server.api.wire import HangLimits, JobSpec, JobState
from tests.e2e.cluster import Cluster
from tests.e2e.folders import Folders
from tests.e2e.test_chaos import finish_and_check
from tests.support import freeze, freezer, wait_until

SOON = HangLimits(step_s=0.6, steps=1, first_s=0.6, data_s=0.7, evaluation_s=0.8, saving_s=0.9)


def of_job(found: list[psutil.Process], name: str) -> psutil.Process:
    """Return the one of these processes that belongs to the job."""
    (process,) = [each for each in found if each.environ().get("PADDLE_JOB_ID") == name]
    return process


def has_no_warnings(folders: Folders, name: str) -> bool:
    return folders.of(name).warnings == ()


HANGS = {  # what a trainer does that hangs: in which words that is said
    "STEPPING": "in a step",
    "READING": "while it waits for data",
    "EVALUATING": "in an evaluation",
    "SAVING": "while it takes a snapshot or waits for a checkpoint",
}


@pytest.mark.heavy
def test_1_2_3_trainers_that_hang_are_said_and_killed_and_their_jobs_go_on(
    folders: Folders,
) -> None:
    hold = folders.folder / "hold"
    hold.touch()
    for doing in HANGS:
        folders.write(doing, f"{{toy}} --snapshot --hold {hold} --doing {doing}")
        folders.add(doing, hang_limits=SOON)
    folders.write("stopped", "{toy} --snapshot")
    folders.add("stopped", hang_limits=SOON)
    folders.write("fails", f"{{toy}} --hold {hold}")
    folders.add("fails", hang_limits=SOON, hang_policy="fail")
    folders.write("says", f"{{toy}} --hold {hold}")
    folders.add("says", hang_limits=SOON, hang_policy="say")
    folders.write("done", f"{{toy}} --steps 20 --linger {hold}")
    folders.add("done", hang_limits=SOON)
    folders.wait_step("stopped")
    of_job(folders.trainers(), "stopped").suspend()

    for name, words in HANGS.items():
        said = folders.wait_said(name, "rank 0 (pod_0_0)", "hangs: no sign of life", words)
        assert "toy_trainer.py" in said  # where it hangs
        folders.wait_said(name, "stage 1 is over", "it hung: no sign of life", words)
    folders.wait_said("stopped", "stage 1 is over", "it hung", "stopped by a signal (SIGSTOP)")
    failed = folders.wait_state("fails", JobState.FAILED)
    assert "its hang_policy is fail" in failed.reason
    (warning,) = folders.of("says").warnings
    assert "hangs: no sign of life" in warning
    folders.wait_said("done", "hangs: no sign of life", "after its training was complete")
    hold.unlink()
    assert folders.wait_state("done", JobState.SUCCEEDED, JobState.FAILED).stage == 1
    for name in (*HANGS, "stopped", "says"):
        folders.wait_step(name, folders.of(name).step)
        status = folders.of(name)
        assert status.account.hung_s > 1
        # More where the machine is so busy that a start looks like a hang.
        assert (status.stage == 1) == (name == "says")
        wait_until(functools.partial(has_no_warnings, folders, name), what="its hang is over")


# The short form: a launcher's own, in tests/pod_runtime/launcher/test_trainers.py.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_1_7_what_sigkill_does_not_end_is_given_up_and_its_slot_used_last(
    folders: Folders,
) -> None:
    with freezer() as group:
        check_given_up(folders, group)


def check_given_up(folders: Folders, group: Path) -> None:
    folders.write("trainer", "{toy} --snapshot")
    folders.add("trainer", hang_limits=SOON)
    folders.write("leaves", "{toy} --snapshot")
    folders.add("leaves")
    for name in ("trainer", "leaves"):
        folders.wait_step(name)
    before = folders.of("trainer").pods[0].slots
    trainers = [of_job(folders.trainers(), name) for name in ("trainer", "leaves")]
    for process in trainers:
        freeze(group, process)
    folders.api().stop("leaves", discard=True)  # no program can write the state of a toy

    said = folders.wait_said("trainer", "stage 1 is over", "SIGKILL does not end it")
    assert f"process {trainers[0].pid} (state D) has not ended for 15 s after SIGKILL" in said
    assert "it hung: no sign of life" in said
    folders.wait_step("trainer", folders.of("trainer").step)
    status = folders.of("trainer")
    assert (status.redone_steps, status.failures) == (0, 1)
    assert status.pods[0].slots != before
    wait_until(
        lambda: [each["pod_id"] for each in pods_of(folders, "trainer")] == ["pod_0_0_1"],
        120,
        "its pod is over",
    )
    folders.wait_state("leaves", JobState.STOPPED)
    wait_until(lambda: not pods_of(folders, "leaves"), 120, "its pod is over")
    assert all(process.is_running() for process in trainers)


def pods_of(folders: Folders, name: str) -> list[dict[str, object]]:
    (node,) = folders.api().nodes()
    return [each for each in node.report.get("pods", ()) if each["job_id"] == name]


def test_7_9_who_ignores_sigterm_is_killed_and_a_stopped_shim_ends_nothing(
    folders: Folders,
) -> None:
    end = folders.folder / "end"
    folders.write("trainer", "{toy} --snapshot --ignore_sigterm", script="")
    folders.write("script", "trap '' TERM; {toy} --snapshot; sleep 600")
    folders.write("shim", f"{{toy}} --snapshot --script {end}")
    folders.write("shim_stop", "{toy} --snapshot")
    waits = f"[time.sleep(0.02) for _ in iter(lambda: os.path.exists('{end}.now'), True)]"
    end.write_text(f"{waits}; args.steps = step\n")
    for name in ("trainer", "script", "shim", "shim_stop"):
        folders.add(name)
    for name in ("trainer", "script", "shim_stop"):
        folders.wait_step(name)
    for name in ("shim", "shim_stop"):
        of_job(folders.shims(), name).suspend()
    step = folders.of("shim_stop").step
    folders.wait_step("shim_stop", step)  # training goes on
    Path(f"{end}.now").touch()
    assert folders.wait_state("shim", JobState.SUCCEEDED, JobState.FAILED).state is (
        JobState.SUCCEEDED
    )
    for name in ("trainer", "script", "shim_stop"):
        folders.api().stop(name, discard=True)
    for name in ("trainer", "script", "shim_stop"):
        folders.wait_state(name, JobState.STOPPED)
    wait_until(lambda: not folders.trainers() and not folders.shims(), 120, "all of it is gone")


# --- what takes as long as docs/supervision.md says ----------------------------------------------


@pytest.mark.slow  # the short form: tests/job_server/training/test_hangs.py
@pytest.mark.timeout(400)
def test_8_a_pod_whose_launcher_is_stopped_is_killed_and_its_job_goes_on(folders: Folders) -> None:
    for name in ("trains", "ends", "says"):
        folders.write(name, "{toy} --snapshot")
        folders.add(name, pods=2, max_pods=2, hang_policy="say" if name == "says" else "restart")
    for name in ("trains", "ends", "says"):
        folders.wait_step(name)
        pods = [each for each in folders.launchers() if each.environ()["PADDLE_JOB_ID"] == name]
        next(each for each in pods if each.environ()["EDL_POD_ID"] == "pod_1_0").suspend()
    folders.api().kill("ends", rank=0)
    folders.wait_said("ends", "killing pod pod_1_0: it does not end stage 1")
    folders.wait_step("ends", folders.of("ends").step)
    folders.wait_said("trains", "killing pod pod_1_0", "no sign of life for 60 s")
    folders.wait_step("trains", folders.of("trains").step)
    for name, failures in (("trains", 1), ("ends", 0), ("says", 0)):
        assert folders.of(name).failures == failures, name
    assert (folders.of("says").stage, folders.of("says").state) == (1, JobState.RUNNING)


HANG_FROM_OUTSIDE = """
import os, sys, time
words = open("/proc/self/cmdline", "rb").read().split(b"\\0")
hangs = {hangs!r}

def hanging(usual, file):
    def call(*args, **named):
        while os.path.exists(hangs + file):
            time.sleep(0.1)
        return usual(*args, **named)
    return call

if b"job_client" in words:
    from job_client.pods.supervisor import PodSupervisor
    PodSupervisor.keep_log_short = hanging(PodSupervisor.keep_log_short, ".client")
if b"job_server" in words:
    from job_server.server.engine import Engine
    Engine.tick = hanging(Engine.tick, ".server")
"""


# The short forms: tests/job_client/test_agent.py, tests/job_server/server/test_engine.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_10_12_a_client_whose_loop_hangs_and_a_server_that_stands_still_stop_no_training(
    tmp_path: Path,
) -> None:
    hangs = tmp_path / "hangs"
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(HANG_FROM_OUTSIDE.format(hangs=str(hangs)))
    cluster = Folders(tmp_path / "c")
    cluster.env["PYTHONPATH"] = str(tmp_path / "path")
    try:
        cluster.start_server()
        cluster.start_client()
        wait_until(cluster._healthy, what="the server answers")
        check_hanging_programs(cluster, hangs)
    finally:
        for path in tmp_path.glob("hangs.*"):
            path.unlink()
        cluster.stop()


def check_hanging_programs(cluster: Folders, hangs: Path) -> None:
    cluster.write("job", "{toy} --snapshot")
    cluster.write("later", "{toy}")
    cluster.add("job")
    cluster.wait_step("job")
    # The clock of the server, as in a write to a disk that hangs: it says that it is unwell.
    before = cluster.of("job").step
    server = hangs.with_suffix(".server")
    server.touch()
    wait_until(lambda: "late" in unwell(cluster), what="it is unwell")
    server.unlink()
    wait_until(lambda: unwell(cluster) == "", what="it is well")
    cluster.wait_step("job", before + 500)  # it went on meanwhile: a step takes 10 ms or more
    # The server as a whole.
    assert cluster.server is not None
    before = cluster.of("job").step
    cluster.server.send_signal(signal.SIGSTOP)
    with pytest.raises(ServerAway), ApiClient(cluster.url, timeout_s=5) as api:
        api.status("job")
    cluster.server.send_signal(signal.SIGCONT)
    cluster.wait_step("job", before + 200)
    # The loop of the client.
    hangs.with_suffix(".client").touch()
    wait_until(lambda: not cluster.api().nodes()[0].alive, 120, "its node counts as lost")
    log = (cluster.folder / "job_client.log").read_text()
    assert "this client has hung for 6" in log
    assert "in hanging" in log or "in call" in log  # its stack
    cluster.add("later")
    cluster.wait_step("job", cluster.of("job").step)
    assert cluster.of("later").pods == ()
    hangs.with_suffix(".client").unlink()
    cluster.wait_step("later")
    status = cluster.of("job")
    assert (status.stage, status.failures, status.redone_steps) == (1, 0, 0)


def unwell(cluster: Folders) -> str:
    """Return why the server says that it is unwell; "": it is not."""
    answer = requests.get(f"{cluster.url}/api/v1/health", timeout=120)
    assert answer.status_code in (200, 503)
    return "" if answer.status_code == 200 else answer.text


# The short form: trainers alone, in tests/pod_runtime/trainer/membership/test_worlds.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_4_ranks_give_up_one_that_hangs_and_it_is_named(
    counting_cluster: Callable[..., Cluster],
) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    cluster.submit(JobSpec(job_id="waits", pods=2, max_pods=2, spares=1))
    cluster.wait_steps(3)
    stopped = cluster.trainers()[1]
    rank = stopped.environ()["PADDLE_TRAINER_ID"]
    stopped.suspend()
    status = cluster.wait_for(lambda now: now.stage == 2, "it recovers")
    cluster.wait_steps(3)
    events = [event.text for event in cluster.api().events("waits", limit=1000)]
    assert any("when it lost a peer" in text for text in events), events
    named = [text for text in events if "no sign of life" in text]
    assert any(text.startswith(f"rank {rank} (") for text in named), events
    assert status.failures == 1
    finish_and_check(cluster)
