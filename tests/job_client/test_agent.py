"""The agent against a scripted server, with real shims and real processes."""

import errno
import json
import os
import shutil
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from job_client import agent, client_dir, preemption
from job_client.agent import EndMode
from job_client.client_dir import ClientDir
from job_client.errors import FatalError, PodStartError, SetupError
from job_client.pods import folders
from job_client.pods.supervisor import PodSupervisor
from job_server.api.errors import Conflict, Unauthorized
from job_server.api.wire import DesiredState, JobSpec, JobStatus, PodPhase
from job_server.training.machine import new_job
from job_server.training.views import job_status
from pod_runtime import env, processes, shim_wire
from tests.job_client.conftest import Client, FakeServer, kill_all, pod
from tests.support import no_descriptor_free, no_file_locks, wait_until


def shim_pid(tmp_path: Path, pod_id: str = "pod_0_0") -> int:
    return int(json.loads((tmp_path / "log" / "pods" / pod_id / "shim.json").read_text())["pid"])


def is_gone(pid: int) -> bool:
    found = processes.read(pid)
    return found is None or found.state == "Z"


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), what=str(path))
    return int(path.read_text())


def status(job_id: str) -> JobStatus:
    spec = JobSpec(job_id=job_id, max_pods=1)
    return job_status(new_job(spec, 1000.0), 1000.0, 1)


def marked(tmp_path: Path) -> list[int]:
    """The processes of this test's pods."""
    marker = (tmp_path / "log" / "marker").read_text().strip()
    return list(processes.find_marked(env.RUN_MARKER, marker))


def test_a_client_registers_its_slots_and_ports(start_client, server):
    start_client()
    wait_until(lambda: server.nodes)
    node = server.nodes[0]
    assert len(node.slots) == 4
    assert (node.port_low, node.port_high) == (20000, 21999)
    assert node.job_id == "job"
    assert node.addr == "127.0.0.1"


def test_a_wanted_pod_runs_its_script_with_its_environment_in_its_folder(
    start_client, server, tmp_path
):
    start_client(
        'pwd; echo "args $*"; env | grep -E "^(PADDLE|EDL)_" | sort; exit 3',
        script_args=("--lr", "0.1"),
    )
    state = server.want_until(PodPhase.EXITED, pod(slots=(1, 2), max_trainers=8))
    assert state.exit_code == 3
    assert not state.complete
    assert state.reason == "exited with code 3"
    log = Path(state.log_path).read_text().splitlines()
    assert log[:2] == [str(tmp_path / "pods" / "pod_0_0"), "args --lr 0.1"]
    expected = {
        "EDL_POD_ID=pod_0_0", "EDL_SLOTS=1,2", "EDL_SLOT_KIND=cpu", "EDL_MAX_TRAINERS=8",
        "EDL_GRACE_S=5", "PADDLE_JOB_ID=job", "PADDLE_POD_ID=pod_0_0",
        f"EDL_POD_FOLDER={tmp_path}/pods/pod_0_0",
        f"EDL_POD_DIR={tmp_path}/log/pods/pod_0_0", "PADDLE_JOBSERVER=http://127.0.0.1:8180",
    }  # fmt: skip
    assert expected <= set(log)
    assert state.last_lines[-1].startswith("PADDLE_")


def test_a_pod_that_exited_is_not_started_again(start_client, server, tmp_path):
    start_client("date +%N >> ../starts; echo complete > $EDL_POD_DIR/launcher; exit 1")
    assert server.want_until(PodPhase.EXITED, pod()).complete
    server.want_until(PodPhase.EXITED, pod(), pod("pod_1_0"))
    assert len((tmp_path / "pods" / "starts").read_text().splitlines()) == 2


def test_a_pod_that_is_not_named_any_more_is_stopped_and_forgotten(start_client, server, tmp_path):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    server.want()
    wait_until(lambda: server.state("pod_0_0") is None)
    wait_until(lambda: is_gone(pid))
    assert marked(tmp_path) == []
    assert (tmp_path / "log" / "pods" / "pod_0_0" / "log").exists()


def test_a_held_pod_is_stopped_but_keeps_its_snapshot(start_client, server, tmp_path):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    folder = tmp_path / "log" / "pods" / "pod_0_0"
    fd = os.memfd_create("segment")
    os.write(fd, b"state")
    segment = {"pod_id": "pod_0_0", "stage": 1, "size_bytes": 5}
    shim_wire.request(folder, {"op": "put", "segment": segment}, (fd,))
    os.close(fd)

    state = server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))
    assert state.signal == signal.SIGTERM
    _, fds = shim_wire.request(folder, {"op": "get", "stage": None})
    assert [os.pread(fd, 10, 0) for fd in fds] == [b"state"]
    os.close(fds[0])

    server.want()
    wait_until(lambda: is_gone(shim_pid(tmp_path)))


def test_a_killed_pod_gets_no_grace(start_client, server):
    start_client("trap '' TERM; while :; do sleep 1; done")
    server.want_until(PodPhase.RUNNING, pod(grace_s=600.0))
    state = server.want_until(PodPhase.EXITED, pod(want=DesiredState.KILL, grace_s=600.0))
    assert state.signal == signal.SIGKILL
    assert "killed on request" in state.reason


def test_when_a_shim_is_killed_the_rest_of_its_pod_goes_too(start_client, server, tmp_path):
    start_client("setsid sleep 600 & echo $! > ../child; wait")
    server.want(pod())
    child = pid_in(tmp_path / "pods" / "child")
    server.wait_phase("pod_0_0", PodPhase.RUNNING)
    os.kill(shim_pid(tmp_path), signal.SIGKILL)
    state = server.wait_phase("pod_0_0", PodPhase.EXITED)
    assert state.reason.startswith("shim died")
    assert not state.holds
    assert is_gone(child)
    assert marked(tmp_path) == []


@pytest.mark.parametrize("left", ["", "setsid sleep 600 &"])
def test_a_script_that_ends_while_its_shim_is_stopped_is_reported(
    start_client, server, tmp_path, left
):
    start_client(f"{left} until [ -e {tmp_path}/go ]; do sleep 0.02; done; exit 7")
    server.want_until(PodPhase.RUNNING, pod())
    os.kill(shim_pid(tmp_path), signal.SIGSTOP)
    os.mkdir(tmp_path / "go")
    assert server.wait_phase("pod_0_0", PodPhase.EXITED).exit_code == 7


@pytest.mark.parametrize(
    ("want", "reason"),
    [(DesiredState.KILL, "killed on request"), (DesiredState.HOLD, "stopped on request")],
)
def test_a_shim_that_was_stopped_goes_on_when_its_pod_is_to_end(
    start_client, server, tmp_path, want, reason
):
    start_client("setsid sleep 600 & echo $! > ../child; wait")
    server.want_until(PodPhase.RUNNING, pod(grace_s=0.5))
    child = pid_in(tmp_path / "pods" / "child")
    os.kill(shim_pid(tmp_path), signal.SIGSTOP)
    state = server.want_until(PodPhase.EXITED, pod(want=want, grace_s=0.5))
    assert state.reason.startswith(reason)
    assert is_gone(child)


@pytest.mark.parametrize("want", [DesiredState.KILL, DesiredState.HOLD])
def test_a_pod_whose_shim_is_stopped_again_is_ended_without_it(
    start_client, server, tmp_path, monkeypatch, want
):
    monkeypatch.setattr(PodSupervisor, "rouse_shim", lambda *_: None)
    start_client("setsid sleep 600 & echo $! > ../child; wait")
    server.want_until(PodPhase.RUNNING, pod(grace_s=0.5))
    child = pid_in(tmp_path / "pods" / "child")
    os.kill(shim_pid(tmp_path), signal.SIGSTOP)
    state = server.want_until(PodPhase.EXITED, pod(want=want, grace_s=0.5))
    assert state.reason.startswith("shim died")
    assert not state.holds
    assert is_gone(child)


def test_a_pod_whose_folder_was_deleted_is_told_to_end_and_still_shows_what_it_holds(
    start_client, server, tmp_path
):
    start_client("sleep 600")
    server.want_until(PodPhase.RUNNING, pod())
    folder = tmp_path / "log" / "pods" / "pod_0_0"
    shutil.rmtree(folder)

    wait_until((folder / "sock").exists)
    fd = os.memfd_create("segment")
    os.write(fd, b"state")
    segment = {"pod_id": "pod_0_0", "stage": 1, "size_bytes": 5}
    shim_wire.request(folder, {"op": "put", "segment": segment}, (fd,))
    os.close(fd)
    state = server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))
    assert (state.signal, state.holds) == (signal.SIGTERM, True)
    assert shim_wire.request(folder, {"op": "status"})[0]["segments"]
    server.want()
    wait_until(lambda: marked(tmp_path) == [])
    assert (folder / "released").exists()


def test_a_pod_whose_socket_alone_was_deleted_can_be_ended(start_client, server, tmp_path):
    start_client("sleep 600")
    server.want_until(PodPhase.RUNNING, pod())
    (tmp_path / "log" / "pods" / "pod_0_0" / "sock").unlink()
    state = server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))
    assert state.signal == signal.SIGTERM
    assert state.reason.startswith("stopped on request")


def test_a_pod_that_ends_while_no_descriptor_is_free_is_reported_as_ended_later(
    start_client, server, tmp_path
):
    start_client(f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; exit 7")
    server.want_until(PodPhase.RUNNING, pod())
    with no_descriptor_free():
        os.mkdir(tmp_path / "go")
        told = len(server.reports)
        wait_until(lambda: len(server.reports) > told + 10, what="the client still reports")
    assert server.wait_phase("pod_0_0", PodPhase.EXITED).exit_code == 7


def test_a_client_outlives_a_log_folder_that_cannot_be_read_for_a_moment(
    start_client, server, monkeypatch
):
    start_client("sleep 600")
    server.want_until(PodPhase.RUNNING, pod())
    refused, stat = threading.Event(), os.stat

    def broken_stat(path: object, *args: object, **more: object) -> os.stat_result:
        if str(path).endswith("pod.json"):
            refused.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, *args, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as context:
        context.setattr(os, "stat", broken_stat)
        assert refused.wait(60)
    assert server.want_until(PodPhase.EXITED, pod(want=DesiredState.KILL)).signal == signal.SIGKILL


def test_a_client_that_gets_no_thread_for_a_moment_starts_and_ends_its_pods_later(
    start_client, server, monkeypatch
):
    start_client("sleep 600")
    wait_until(lambda: server.nodes)
    refused: list[str] = []
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if thread.name.startswith("pod ") and len(refused) % 4 < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        refused.append("")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    server.want_until(PodPhase.RUNNING, pod())
    assert server.want_until(PodPhase.EXITED, pod(want=DesiredState.KILL)).signal == signal.SIGKILL
    assert any(refused)


def test_a_client_that_gets_no_thread_for_its_figures_goes_on_reporting(
    start_client, server, monkeypatch
):
    refused: list[str] = []
    start = threading.Thread.start

    def start_no_look(thread: threading.Thread) -> None:
        if thread.name == "disks":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_look)
    start_client("sleep 600")
    wait_until(lambda: len(refused) > 1)  # it is tried again
    assert server.want_until(PodPhase.RUNNING, pod()).reason == ""
    assert server.reports[-1].load.disk == ""


def test_a_failing_package_script_is_reported_with_its_code_and_its_last_words(
    start_client, server, tmp_path
):
    package = tmp_path / "package.sh"
    package.write_text('echo "no space for $2"; exit 9\n')
    start_client(package_sh=package)
    state = server.want_until(PodPhase.EXITED, pod())
    assert state.exit_code == 9
    assert state.reason == f"package script {package} exited with code 9"
    assert state.last_lines == ("no space for pod_0_0",)


def test_a_package_script_makes_the_folder_that_the_script_runs_in(start_client, server, tmp_path):
    package = tmp_path / "package.sh"
    package.write_text('[ "$1" = -pod_id ]; mkdir -p pods/$2; echo "pwd; ls" > pods/$2/go.sh\n')
    start_client(package_sh=package, script="./go.sh")
    state = server.want_until(PodPhase.EXITED, pod())
    assert Path(state.log_path).read_text().split() == [str(tmp_path / "pods/pod_0_0"), "go.sh"]


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("true", "did not make"),
        ("mkdir -p pods/$2", "no such file; the package script must put it there"),
    ],
)
def test_a_package_script_that_does_half_its_work_is_told_so(
    start_client, server, tmp_path, package, reason
):
    path = tmp_path / "package.sh"
    path.write_text(package + "\n")
    start_client(package_sh=path)
    assert reason in server.want_until(PodPhase.EXITED, pod()).reason


def test_a_pod_can_be_stopped_while_its_package_script_runs(start_client, server, tmp_path):
    package = tmp_path / "package.sh"
    package.write_text("setsid sleep 600 & echo $! > child; sleep 600\n")
    start_client(package_sh=package)
    server.want(pod())
    child = pid_in(tmp_path / "child")
    state = server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))
    assert "stopped before the package script had ended" in state.reason
    assert is_gone(child)


def test_pods_go_on_while_the_server_is_away_and_are_reported_to_the_next_one(
    start_client, server, tmp_path
):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    server.go_away()
    registrations, reports = len(server.nodes), len(server.reports)
    server.come_back()
    wait_until(lambda: len(server.nodes) > registrations and len(server.reports) > reports)
    assert server.wait_phase("pod_0_0", PodPhase.RUNNING)
    assert shim_pid(tmp_path) == pid
    assert not is_gone(pid)


def test_pods_that_a_client_finds_are_told_where_its_server_is(start_client, server, tmp_path):
    first = start_client("sleep 600")
    server.want_until(PodPhase.RUNNING, pod())
    first.end(EndMode.KEEP)
    folder = tmp_path / "log" / "pods" / "pod_0_0"
    assert shim_wire.read_server(folder) is None
    moved, registrations = "http://127.0.0.1:8181", len(server.nodes)
    start_client("sleep 600", server_url=moved)
    wait_until(lambda: shim_wire.read_server(folder) == moved)
    wait_until(lambda: len(server.nodes) > registrations)  # before, it ends what has no folder
    shutil.rmtree(folder)
    wait_until(lambda: shim_wire.read_server(folder) == moved, what="they are told again")


def test_a_server_that_forgot_its_nodes_gets_them_again(start_client, server):
    start_client()
    wait_until(lambda: server.nodes)
    server.go_away()
    server.come_back(forgetful=True)
    wait_until(lambda: server.nodes, what="registered again")


def test_pods_are_stopped_when_the_server_is_away_for_as_long_as_was_said(start_client, server):
    start_client(stop_after_s=5.0)  # for so long a busy machine is not silent
    pod_dir = Path(server.want_until(PodPhase.RUNNING, pod(grace_s=600.0)).log_path).parent
    server.go_away()
    registrations = len(server.nodes)
    assert server.nodes[-1].stop_after_s == 5.0  # the server counts on it
    wait_until(lambda: shim_wire.read_exit(pod_dir) is not None, what="the pod's end")
    server.come_back()
    wait_until(lambda: len(server.nodes) > registrations)
    assert (
        "no answer from the server for 5 s" in server.wait_phase("pod_0_0", PodPhase.EXITED).reason
    )


def test_an_orderly_end_stops_the_pods_and_says_goodbye(start_client, server, tmp_path):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod())
    client.end()
    assert client.result == 0
    assert server.reports[-1].leaving
    assert [p.phase for p in server.reports[-1].pods] == [PodPhase.EXITED]
    wait_until(lambda: marked(tmp_path) == [])


def test_a_client_that_is_ended_waits_while_its_job_leaves_by_a_planned_change(
    start_client, server, monkeypatch
):
    monkeypatch.setattr(preemption, "ANSWER_S", 60.0)  # as on a busy machine
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(grace_s=60.0))
    server.moving = True
    client.agent.end(EndMode.STOP)
    wait_until(lambda: server.reports[-1].draining)
    said = len(server.reports)
    wait_until(lambda: len(server.reports) > said + 3)
    assert server.state("pod_0_0").phase is PodPhase.RUNNING
    server.want()  # the job has gone on elsewhere
    client.join()
    assert client.result == 0
    assert server.reports[-1].leaving


@pytest.mark.parametrize(
    ("moving", "grace_s"),
    [
        pytest.param(False, 60.0, id="the job has no other place"),
        pytest.param(None, 60.0, id="the server is of the version before"),
        pytest.param(True, 1.0, id="the grace is over"),
    ],
)
def test_a_client_whose_job_cannot_leave_stops_it_as_ever(start_client, server, moving, grace_s):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(grace_s=grace_s))
    server.moving = moving
    client.end()
    assert [p.phase for p in server.reports[-1].pods] == [PodPhase.EXITED]


def test_a_notice_that_comes_while_a_client_waits_for_its_jobs_lets_it_hear_the_answers(
    start_client, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(preemption, "ANSWER_S", 60.0)  # as on a busy machine
    notice = tmp_path / "notice"
    client = start_client(preemption_notice=f"until test -e {notice}; do sleep 0.05; done")
    server.want_until(PodPhase.RUNNING, pod(grace_s=600.0))
    server.moving = True
    client.agent.end(EndMode.STOP)
    wait_until(lambda: server.reports[-1].draining)
    notice.touch()
    wait_until(lambda: "taken away" in server.reports[-1].draining)
    server.moving = False  # the jobs have found no other place
    client.join()
    assert [p.phase for p in server.reports[-1].pods] == [PodPhase.EXITED]


def test_a_notice_of_preemption_is_reported_and_the_pods_stay_until_the_plan_says_so(
    start_client, server, tmp_path
):
    notice = tmp_path / "notice"
    start_client(preemption_notice=f"test -e {notice}")
    server.want_until(PodPhase.RUNNING, pod())
    assert not server.reports[-1].draining
    notice.touch()
    wait_until(lambda: "taken away" in server.reports[-1].draining, timeout_s=30)
    assert server.wait_phase("pod_0_0", PodPhase.RUNNING)


def test_a_client_whose_loop_hangs_says_where_and_reports_nothing_until_it_goes_on(
    start_client, server, monkeypatch, caplog
):
    monkeypatch.setattr("job_client.agent.STUCK_S", 1.5)
    hangs, go_on = threading.Event(), threading.Event()

    def hang(self: PodSupervisor) -> None:
        hangs.set()
        assert go_on.wait(60)

    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    monkeypatch.setattr(PodSupervisor, "keep_log_short", hang)
    assert hangs.wait(60)
    wait_until(lambda: "this client has hung for" in caplog.text)
    assert "in hang" in caplog.text  # its stack
    said = len(server.reports)
    assert not go_on.wait(1.0)  # five heartbeats
    assert len(server.reports) <= said + 1
    go_on.set()
    wait_until(lambda: len(server.reports) > said + 3)


def test_a_pod_id_may_be_used_again_after_its_pod_was_released(start_client, server, tmp_path):
    start_client("echo hello")
    server.want_until(PodPhase.EXITED, pod())
    server.want()
    wait_until(lambda: server.state("pod_0_0") is None)
    server.want_until(PodPhase.EXITED, pod())
    assert (tmp_path / "log" / "pods" / "pod_0_0.1" / "log").read_text() == "hello\n"
    assert (tmp_path / "log" / "pods" / "pod_0_0" / "log").read_text() == "hello\n"


def test_of_pods_that_are_over_the_newest_keep_their_folders(start_client, server, tmp_path):
    start_client("echo hello", keep_folders=2)
    folders = tmp_path / "log" / "pods"
    for number in range(4):
        wanted = pod(f"pod_{number}_0")
        server.want_until(PodPhase.EXITED, wanted)
        server.want()
        wait_until(lambda: all(server.state(f"pod_{n}_0") is None for n in range(4)))
        if number == 0:  # where its newest state lies is known nowhere else
            (folders / "pod_0_0" / "saved.json").write_text("{}")
    left = ["pod_0_0", "pod_2_0", "pod_3_0"]
    wait_until(lambda: sorted(path.name for path in folders.iterdir()) == left)


def test_a_client_with_kept_pods_leaves_them_to_its_successor(start_client, server, tmp_path):
    first = start_client()
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    first.end(EndMode.KEEP)
    assert not is_gone(pid)

    reports = len(server.reports)
    start_client()
    wait_until(lambda: len(server.reports) > reports)
    assert server.wait_phase("pod_0_0", PodPhase.RUNNING)
    assert shim_pid(tmp_path) == pid


def test_what_happened_while_no_client_was_there_is_reported(start_client, server, tmp_path):
    first = start_client("until [ -e ../go ]; do sleep 0.02; done; exit 5")
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    first.end(EndMode.KEEP)
    (tmp_path / "pods" / "go").touch()
    wait_until(lambda: is_gone(pid))
    start_client()
    assert server.wait_phase("pod_0_0", PodPhase.EXITED).exit_code == 5


def test_pods_that_have_ended_do_not_bind_the_next_client_to_their_job(start_client, server):
    """The server may have forgotten it: nothing would ever start here, and nobody would say why."""
    server.statuses = (status("old"),)
    first = start_client("exit 5", job_id=None)
    server.want(pod(job_id="old"))
    server.wait_phase("pod_0_0", PodPhase.EXITED)
    first.end(EndMode.KEEP)
    server.statuses = (status("new"),)
    start_client(job_id=None)
    wait_until(lambda: len(server.nodes) > 1)
    assert server.nodes[-1].job_id == "new"


def test_orphans_of_pods_that_nobody_knows_are_ended_and_strangers_are_not(
    start_client, server, tmp_path, spawn_marked
):
    first = start_client()
    first.end()
    marker = (tmp_path / "log" / "marker").read_text().strip()
    orphan, stranger = spawn_marked(marker), spawn_marked("f" * 32)
    start_client()
    wait_until(lambda: orphan.poll() is not None)
    wait_until(lambda: server.nodes)
    assert stranger.poll() is None


def test_jobs_come_by_folder_and_only_by_folder(start_client, server, tmp_path):
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    (tmp_path / "jobs" / "a" / "train.sh").write_text("echo from a; pwd\n")
    start_client(jobs_dir=tmp_path / "jobs", script=None, job_id=None)
    wait_until(lambda: server.nodes)
    assert server.nodes[0].folders == ("a",)
    server.want(
        pod("pod_0_0", job_id="one", folder="a"),
        pod("pod_0_0", job_id="two", folder="a"),
        pod("pod_9_0", job_id="three", folder="../a"),
        pod("pod_8_0", job_id="four"),
    )
    assert "is not an id" in server.wait_phase("pod_9_0", PodPhase.EXITED).reason
    assert "names none" in server.wait_phase("pod_8_0", PodPhase.EXITED).reason
    wait_until(lambda: [s.exit_code for s in server.reports[-1].pods].count(0) == 2)
    log = tmp_path / "log" / "pods" / "one" / "pod_0_0" / "log"
    assert log.read_text().split() == ["from", "a", str(tmp_path / "pods" / "one" / "pod_0_0")]


def test_a_job_whose_folder_comes_later_is_served_and_none_is_lost_while_they_cannot_be_read(
    start_client, server, tmp_path
):
    jobs = tmp_path / "jobs"

    def make_job(name: str) -> None:
        (jobs / name).mkdir(parents=True)
        (jobs / name / "train.sh").write_text("sleep 600\n")

    def served() -> tuple[str, ...]:
        return server.nodes[-1].folders if server.nodes else ()

    make_job("a")
    start_client(jobs_dir=jobs, script=None, job_id=None)
    wait_until(lambda: served() == ("a",))
    make_job("b")
    wait_until(lambda: served() == ("a", "b"))
    jobs.rename(tmp_path / "away")  # as a file server does
    told = len(server.reports)
    wait_until(lambda: len(server.reports) > told + 10)
    assert served() == ("a", "b")
    (tmp_path / "away").rename(jobs)
    server.want_until(PodPhase.RUNNING, pod(folder="b"))


def test_a_node_whose_jobs_folder_hangs_goes_on_reporting_with_the_jobs_that_it_had(
    start_client, server, tmp_path, monkeypatch
):
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    (tmp_path / "jobs" / "a" / "train.sh").write_text("sleep 600\n")
    answers, waiting = threading.Event(), threading.Event()
    answers.set()

    read = folders.list_jobs

    def list_jobs(jobs_dir: Path) -> tuple[str, ...]:  # hangs as a file server that is away does
        if not answers.is_set():
            waiting.set()
        answers.wait()
        return read(jobs_dir)

    monkeypatch.setattr(folders, "list_jobs", list_jobs)
    start_client(jobs_dir=tmp_path / "jobs", script=None, job_id=None)
    wait_until(lambda: server.nodes and server.nodes[-1].folders == ("a",))
    answers.clear()
    try:
        assert waiting.wait(60)
        told = len(server.reports)
        wait_until(lambda: len(server.reports) > told + 10, 120)
        assert server.nodes[-1].folders == ("a",)
        (tmp_path / "jobs" / "b").mkdir()
        (tmp_path / "jobs" / "b" / "train.sh").touch()
    finally:
        answers.set()
    wait_until(lambda: server.nodes[-1].folders == ("a", "b"))


def test_a_pod_whose_folder_hangs_gives_its_slots_back_when_it_is_stopped_and_never_starts(
    start_client, server, tmp_path, monkeypatch
):
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    (tmp_path / "jobs" / "a" / "train.sh").write_text(f"echo >> {tmp_path}/starts; sleep 600\n")
    answers, asked = threading.Event(), threading.Event()
    read = folders.recipe_for

    def recipe_for(config, wanted):  # hangs as a file server that is away does
        asked.set()
        if wanted.pod_id == "pod_0_0":
            answers.wait()
        return read(config, wanted)

    monkeypatch.setattr(folders, "recipe_for", recipe_for)
    start_client(jobs_dir=tmp_path / "jobs", script=None, job_id=None)
    server.want(pod(folder="a"))
    assert asked.wait(60)
    try:
        state = server.want_until(PodPhase.EXITED, pod(folder="a", want=DesiredState.HOLD))
        assert (state.exit_code, state.signal) == (None, None)
        assert state.reason.startswith("stopped before it was started")
        server.want()
        wait_until(lambda: server.state("pod_0_0") is None)
        server.want_until(PodPhase.RUNNING, pod("pod_1_0", folder="a"))
    finally:
        answers.set()
    wait_until(lambda: (tmp_path / "starts").exists() and (tmp_path / "starts").stat().st_size > 0)
    wait_until(lambda: "pod pod_0_0" not in {each.name for each in threading.enumerate()})
    assert (tmp_path / "starts").read_text() == "\n"


def test_a_stopped_pod_whose_folder_errs_late_leaves_the_next_pod_of_its_name_alone(
    start_client, server, tmp_path, monkeypatch
):
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    (tmp_path / "jobs" / "a" / "train.sh").write_text("exec sleep 600\n")
    answers, hanging = threading.Event(), list[threading.Thread]()
    read = folders.recipe_for

    def recipe_for(config, wanted):  # hangs the first time, and fails then
        if not hanging:
            hanging.append(threading.current_thread())
            answers.wait()
            raise PodStartError("its train.sh cannot be read")
        return read(config, wanted)

    monkeypatch.setattr(folders, "recipe_for", recipe_for)
    start_client(jobs_dir=tmp_path / "jobs", script=None, job_id=None)
    server.want(pod(folder="a"))
    try:
        wait_until(lambda: hanging)
        server.want_until(PodPhase.EXITED, pod(folder="a", want=DesiredState.HOLD))
        server.want()
        wait_until(lambda: server.state("pod_0_0") is None)
        server.want_until(PodPhase.RUNNING, pod(folder="a"))
    finally:
        answers.set()
    hanging[0].join(60)
    (exit_file,) = [each.with_name("exit.json") for each in tmp_path.rglob("shim.json")]
    assert not exit_file.exists()
    assert len(marked(tmp_path)) == 2  # its shim and its script
    assert server.state("pod_0_0").phase is PodPhase.RUNNING


def test_a_slot_that_is_not_there_is_no_place_to_start(start_client, server):
    start_client()
    assert server.want_until(PodPhase.EXITED, pod(slots=(7,))).reason == "slot 7 is not one of 4"


def test_a_report_says_what_a_pod_uses(start_client, server):
    start_client("while :; do :; done")
    server.want_until(PodPhase.RUNNING, pod())
    state = server.wait_state("pod_0_0", lambda state: state.cpu_percent > 1, "computing")
    assert state.memory_bytes > 100_000


def test_taken_ports_end_the_client_with_the_remedy(start_client, server):
    server.refuse = Conflict("port_low: node-b has 20000-21999; give another --port_range")
    client = start_client()
    client.join()
    assert isinstance(client.result, SetupError)
    assert "give another --port_range" in str(client.result)


def test_with_automatic_ports_a_taken_block_makes_it_try_the_next(start_client, server):
    server.refuse, server.refusals_left = Conflict("port_low: taken"), 3
    start_client(port_range=None)
    wait_until(lambda: server.nodes)
    assert server.refusals_left == 0
    assert server.nodes[0].port_high - server.nodes[0].port_low == 1999


def test_a_wrong_token_ends_the_client(start_client, server):
    server.refuse = Unauthorized("token: wrong")
    client = start_client()
    client.join()
    assert isinstance(client.result, FatalError)


def test_a_node_keeps_its_id_while_its_pods_live_though_its_host_is_renamed(
    start_client, server, tmp_path, monkeypatch
):
    first = start_client()
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    first.end(EndMode.KEEP)
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    second = start_client()
    wait_until(lambda: len(server.nodes) == 2, what="it registers")
    assert server.nodes[0].node_id == server.nodes[1].node_id
    assert not is_gone(pid)
    second.end()
    start_client()
    wait_until(lambda: len(server.nodes) == 3, what="it registers")
    assert server.nodes[2].node_id.startswith("renamed-")


def test_a_node_whose_address_changes_says_so(start_client, server, monkeypatch):
    start_client()
    wait_until(lambda: server.reports, what="it reports")

    def no_way(_url: str) -> str:
        raise SetupError("the network is down")

    monkeypatch.setattr(agent, "interface_of", {"10.0.0.7": "eth0"}.get)
    monkeypatch.setattr(agent, "own_address", no_way)
    heard = len(server.reports)
    wait_until(lambda: len(server.reports) > heard + 2, what="it reports")
    assert len(server.nodes) == 1
    monkeypatch.setattr(agent, "own_address", lambda _url: "10.0.0.7")
    wait_until(lambda: len(server.nodes) > 1, what="it registers again")
    assert server.nodes[1].addr == "10.0.0.7"
    heard = len(server.reports)
    wait_until(lambda: len(server.reports) > heard + 2, what="it reports")
    assert len(server.nodes) == 2


def test_two_clients_cannot_share_a_folder(start_client, make_config, server):
    start_client()
    with pytest.raises(SetupError, match="another job client runs in"):
        start_client()
    with no_file_locks(), pytest.raises(SetupError, match=r"cannot be locked .*; give a folder on"):
        start_client()


def test_no_pod_starts_in_the_folder_of_another_clients_pod(
    start_client, make_config, server, tmp_path
):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    (tmp_path / "package.sh").write_text("mkdir -p pods/$2; touch pods/$2/packed\n")
    others = FakeServer()
    config = make_config(log_dir=tmp_path / "log_b", package_sh=tmp_path / "package.sh")
    client = Client(replace(config, script="../../train.sh"), others)
    try:
        state = others.want_until(PodPhase.EXITED, pod(job_id="b"))
        assert state.reason == (
            f"--pod_path: another pod runs in {tmp_path}/pods/pod_0_0; give this client a folder "
            "of its own"
        )
        assert not (tmp_path / "pods" / "pod_0_0" / "packed").exists()
        server.want()
        wait_until(lambda: server.state("pod_0_0") is None)
        others.want()
        wait_until(lambda: others.state("pod_0_0") is None)
        others.want_until(PodPhase.RUNNING, pod(job_id="b"))
    finally:
        client.end(EndMode.KILL)
        kill_all(tmp_path / "log_b")


def test_a_folder_whose_marker_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "marker").mkdir()  # where a file is to be
    with pytest.raises(SetupError, match="--log_dir: cannot write"):
        ClientDir(tmp_path)


def test_clients_of_two_machines_that_were_made_of_one_image_are_two(tmp_path, monkeypatch):
    boot_id = tmp_path / "boot_id"
    monkeypatch.setattr(client_dir, "BOOT_ID", boot_id)

    def client_id(boot: str) -> str:
        boot_id.write_text(f"{boot}\n")
        folder = ClientDir(tmp_path / "log")
        folder.close()
        return folder.client_id()

    first = client_id("0f2fd1f9-14e6-4b28-a4be-4d9e0c4b1f0c")
    assert client_id("0f2fd1f9-14e6-4b28-a4be-4d9e0c4b1f0c") == first
    assert client_id("b3a9d3c2-6d7e-4f5a-9c1b-2a3b4c5d6e7f") != first
    boot_id.unlink()
    assert first.startswith(ClientDir(tmp_path / "log").client_id())


def test_folder_paths_longer_than_a_socket_name_may_be_work(start_client, server, tmp_path):
    log_dir = tmp_path / ("l" * 100) / ("m" * 100)
    client = start_client("exit 6", log_dir=log_dir)
    assert server.want_until(PodPhase.EXITED, pod()).exit_code == 6
    client.end()


def test_a_token_reaches_the_pod_as_a_file_that_only_its_user_reads(start_client, server):
    start_client('echo "$EDL_TOKEN_FILE"; cat "$EDL_TOKEN_FILE"', token="secret")
    state = server.want_until(PodPhase.EXITED, pod())
    path, token = state.last_lines
    assert token == "secret"
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_a_node_with_too_few_ports_for_its_slots_is_refused_before_it_registers(
    start_client, server
):
    client = start_client(port_range=(20000, 20003))
    client.join()
    assert isinstance(client.result, SetupError)
    assert "at least two per slot" in str(client.result)
    assert server.nodes == []


def test_a_client_says_what_its_machine_has_and_what_others_use_of_it(start_client, server):
    start_client()
    wait_until(lambda: any(report.foreign_cpu_milli is not None for report in server.reports))
    node, report = server.nodes[0], server.reports[-1]
    assert node.cpu_milli >= (report.foreign_cpu_milli or 0) >= 0
    assert node.memory_mb > (report.foreign_memory_mb or 0) > 0
