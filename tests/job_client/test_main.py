"""The program itself: its command line, and what its death does to its pods (nothing)."""

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from job_client.__main__ import is_ours, parse_args
from job_client.errors import SetupError
from job_server.api.errors import JobServerError, Rejected, Unauthorized
from job_server.api.local_servers import listed
from job_server.api.wire import Node, NodeReport, PodPhase, decode, encode
from pod_runtime import env, processes
from tests.job_client.conftest import FakeServer, kill_all, pod
from tests.nvml.pynvml import healthy
from tests.support import ROOT, wait_until

StartProgram = Callable[..., subprocess.Popen[str]]


class Handler(http.server.BaseHTTPRequestHandler):
    """Puts the scripted server behind real HTTP."""

    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/api/v1/jobs":
            self._answer(lambda: {"jobs": encode(self.fake.jobs())})
        else:
            node_id = url.path.split("/")[4]
            revision, timeout_s = int(query["revision"]), float(query["timeout_s"])
            self._answer(lambda: encode(self.fake.node_plan(node_id, revision, timeout_s)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/report"):
            report = decode(NodeReport, body)
            self._answer(lambda: encode(self.fake.node_report(report)))
        else:
            node = decode(Node, body)
            self._answer(lambda: encode(self.fake.register_node(node)))

    def _answer(self, call: Callable[[], object]) -> None:
        try:
            if self.fake.token and self.headers["Authorization"] != f"Bearer {self.fake.token}":
                raise Unauthorized("Authorization: expected the server's token")
            status, value = 200, call()
        except Rejected as error:
            status, value = error.status, {"error": str(error)}
        except JobServerError as error:
            status, value = 503, {"error": str(error)}
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


class QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: object) -> None:
        """A killed client hangs up in the middle of things: that is what is tested here."""


@pytest.fixture
def url(server: FakeServer) -> Iterator[str]:
    handler = type("BoundHandler", (Handler,), {"fake": server})
    with QuietServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        server.go_away()
        http_server.shutdown()
        thread.join()


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[StartProgram]:
    """Start `python -m job_client` in tmp_path."""
    programs: list[subprocess.Popen[str]] = []

    def start(
        *args: str, slots: tuple[str, ...] = ("--cpu_slots", "2"), **environ: str
    ) -> subprocess.Popen[str]:
        programs.append(
            subprocess.Popen(
                [sys.executable, "-m", "job_client", *slots, *args],
                cwd=tmp_path,
                env={**os.environ, "PADDLE_JOB_ID": "job", **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()
    kill_all(tmp_path / "pod_log")


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "train.sh").write_text(text + "\n")
    return "./train.sh"


def shim_pid(tmp_path: Path) -> int:
    path = tmp_path / "pod_log" / "pods" / "pod_0_0" / "shim.json"
    return int(json.loads(path.read_text())["pid"])


def is_gone(pid: int) -> bool:
    found = processes.read(pid)
    return found is None or found.state == "Z"


def marked(tmp_path: Path) -> list[int]:
    marker = (tmp_path / "pod_log" / "marker").read_text().strip()
    return list(processes.find_marked(env.RUN_MARKER, marker))


def test_sigkill_of_the_client_stops_nothing_and_its_successor_adopts(
    server, url, start_program, tmp_path
):
    train = script(tmp_path, "sleep 600")
    first = start_program("--job_server", url, train)
    server.want_until(PodPhase.RUNNING, pod())
    pid = shim_pid(tmp_path)
    first.kill()
    first.wait()
    assert not is_gone(pid)

    second = start_program("--job_server", url, train)
    # What the first one has said last may only be heard now: not before this does the second speak.
    wait_until(lambda: len(server.nodes) == 2)
    server.reports.clear()
    server.wait_phase("pod_0_0", PodPhase.RUNNING)
    assert shim_pid(tmp_path) == pid
    second.terminate()
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    assert "adopted" in output
    assert server.reports[-1].leaving
    wait_until(lambda: marked(tmp_path) == [])


def test_client_and_shim_killed_the_successor_cleans_up_and_reports(
    server, url, start_program, tmp_path
):
    train = script(tmp_path, "setsid sleep 600 & echo $! > ../child; wait")
    first = start_program("--job_server", url, train)
    server.want_until(PodPhase.RUNNING, pod())
    child_file = tmp_path / "edl_pods" / "child"
    wait_until(lambda: child_file.exists() and child_file.read_text().endswith("\n"))
    child = int(child_file.read_text())
    first.kill()
    first.wait()
    os.kill(shim_pid(tmp_path), signal.SIGKILL)
    wait_until(lambda: is_gone(shim_pid(tmp_path)))
    assert not is_gone(child)

    server.reports.clear()
    start_program("--job_server", url, train)
    state = server.wait_phase("pod_0_0", PodPhase.EXITED)
    assert state.reason.startswith("shim died while no client was there")
    assert not state.holds
    assert is_gone(child)


def test_a_client_killed_in_the_package_script_has_it_run_again(
    server, url, start_program, tmp_path
):
    script(tmp_path, "exit 0")
    package = tmp_path / "package.sh"
    package.write_text(
        "echo $$ > running; [ -e second ] || { touch second; sleep 600; }\n"
        "mkdir -p edl_pods/$2; cp train.sh edl_pods/$2\n"
    )
    args = ["--job_server", url, "--package_sh", "./package.sh", "./train.sh"]
    first = start_program(*args)
    server.want(pod())
    wait_until(lambda: (tmp_path / "second").exists())
    stuck = int((tmp_path / "running").read_text())
    first.kill()
    first.wait()
    start_program(*args)
    assert server.wait_phase("pod_0_0", PodPhase.EXITED).exit_code == 0
    assert is_gone(stuck)


def test_a_client_reports_what_happens_to_its_gpus_and_goes_on(
    server, url, start_program, tmp_path
):
    falls, path = tmp_path / "falls", os.pathsep.join([str(ROOT / "tests" / "nvml"), str(ROOT)])
    fault = {"gpu": 1, "when": str(falls)}
    faults = [fault | {"xid": 79}, fault | {"lost": True}, {"gpu": 0, "xid": 31}]
    nvml = tmp_path / "nvml.json"
    nvml.write_text(json.dumps({"gpus": [healthy(0), healthy(1)], "faults": faults}))
    command = ("--job_server", url, script(tmp_path, "sleep 600"))
    start_program(*command, slots=(), PYTHONPATH=path, FAKE_NVML=str(nvml))

    def faults_of(slot: int) -> set[str]:
        report = server.reports[-1] if server.reports else None
        slots = () if report is None or len(report.slots) < 2 else report.slots
        return {fault.name for usage in slots if usage.index == slot for fault in usage.faults}

    server.want_until(PodPhase.RUNNING, pod())
    wait_until(lambda: faults_of(0) == {"xid_31"}, what="the program's own error is told")
    assert server.nodes[-1].slots[1].usable
    falls.touch()
    wait_until(lambda: faults_of(1) == {"xid_79", "gpu_lost"}, what="the loss is told")
    wait_until(lambda: not server.nodes[-1].slots[1].usable, what="the slot is not usable")
    assert server.nodes[-1].slots[0].usable
    assert server.reports[-1].load is not None
    assert server.reports[-1].pods[0].phase is PodPhase.RUNNING


def test_with_keep_pods_sigterm_leaves_them_running(server, url, start_program, tmp_path):
    client = start_program("--keep_pods", "--job_server", url, script(tmp_path, "sleep 600"))
    server.want_until(PodPhase.RUNNING, pod())
    client.terminate()
    client.communicate(timeout=120)
    assert client.returncode == 0
    assert not is_gone(shim_pid(tmp_path))


def test_a_second_sigterm_ends_the_pods_at_once(server, url, start_program, tmp_path):
    train = script(tmp_path, "trap : TERM; touch ../deaf; while :; do sleep 0.05; done")
    client = start_program("--job_server", url, train)
    server.want_until(PodPhase.RUNNING, pod(grace_s=600.0))
    wait_until((tmp_path / "edl_pods" / "deaf").exists)
    client.terminate()
    server.wait_phase("pod_0_0", PodPhase.STOPPING)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=120)
    assert client.returncode == 0
    wait_until(lambda: marked(tmp_path) == [])


def test_without_a_job_on_the_server_it_waits_and_says_so(server, url, start_program, tmp_path):
    client = start_program("--job_server", url, script(tmp_path, "true"), PADDLE_JOB_ID="")
    assert client.stdout is not None
    lines = iter(client.stdout)
    assert any("has no job to run; waiting for one" in line for line in lines)


def test_two_clients_in_one_folder_are_refused(server, url, start_program, tmp_path):
    train = script(tmp_path, "true")
    start_program("--job_server", url, train)
    wait_until(lambda: server.nodes)
    second = start_program("--job_server", url, train)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 2
    assert "another job client runs in" in output


LONG = 300 * "x"  # nobody can look at it, as at what is in a folder that this user may not enter


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "give either a training script or --jobs_dir"),
        (["./missing.sh"], "training script: ./missing.sh: no such file"),
        (["--jobs_dir", "missing"], "--jobs_dir: missing: no such folder"),
        (["--jobs_dir", LONG], f"--jobs_dir: {LONG}: File name too long"),
        ([LONG], f"training script: {LONG}: File name too long"),
        (["a/train.py"], "a train.sh beside it that says `python -m pod_runtime.launch"),
        (["--jobs_dir", ".", "train.sh"], "not both"),
        (["--package_sh", "missing.sh", "train.sh"], "--package_sh: missing.sh: no such file"),
        (["--cpu_slots", "0", "train.sh"], "--cpu_slots: expected 1 to 4096, got 0"),
        (["--port_range", "99-100", "train.sh"], "--port_range: expected 1024 <= LOW"),
        (["--port_range", "1", "train.sh"], "--port_range: expected LOW-HIGH"),
        (["--grace_s", "-1", "train.sh"], "--grace_s: expected 0 to 3600 seconds, got -1"),
        (["--on_server_loss", "panic", "train.sh"], "--on_server_loss: expected continue or"),
        (["--on_server_loss", "stop_after=0", "train.sh"], "--on_server_loss: expected"),
        (["--node_id", "../x", "train.sh"], "--node_id: '../x' is not an id"),
        (["--job_server", "ftp://x", "train.sh"], "is no server's URL; write HOST:PORT"),
        (["--token_file", "missing", "train.sh"], "missing cannot be read: No such file"),
    ],
)
def test_a_wrong_command_line_names_the_flag_and_the_remedy(tmp_path, args, text):
    (tmp_path / "train.sh").touch()
    with pytest.raises(SetupError) as refused:
        parse_args(args, {}, tmp_path)
    assert text in str(refused.value)


def test_the_flags_of_the_original_mean_what_they_did(tmp_path):
    for name in ("train_pretrain.sh", "package.sh"):
        (tmp_path / name).touch()
    line = (
        "--log_level 20 --log_dir pod_log --package_sh ./package.sh --pod_path ./resnet50_pod "
        "./train_pretrain.sh --lr 0.1 -x"
    )
    config = parse_args(line.split(), {"PADDLE_JOBSERVER": "10.0.0.1:8180"}, tmp_path)
    assert config.script == "./train_pretrain.sh"
    assert config.script_args == ("--lr", "0.1", "-x")
    assert config.package_sh == tmp_path / "package.sh"
    assert config.pod_path == tmp_path / "resnet50_pod"
    assert config.log_dir == tmp_path / "pod_log"
    assert config.server_url == "http://10.0.0.1:8180"


def test_certificates_at_a_relative_path_are_found_by_pods_which_run_elsewhere(tmp_path):
    (tmp_path / "train.sh").touch()
    config = parse_args(["train.sh"], {"SSL_CERT_FILE": "certs/ca.pem"}, tmp_path)
    assert config.environ["SSL_CERT_FILE"] == str(tmp_path / "certs/ca.pem")
    config = parse_args(["train.sh"], {"SSL_CERT_FILE": "/etc/ca.pem"}, tmp_path)
    assert config.environ["SSL_CERT_FILE"] == "/etc/ca.pem"


@pytest.mark.parametrize(("path", "first"), [("/bin", "/bin"), (None, os.defpath)])
def test_scripts_find_python_where_no_virtual_environment_was_activated(path, first, tmp_path):
    (tmp_path / "train.sh").touch()
    config = parse_args(["train.sh"], {} if path is None else {"PATH": path}, tmp_path)
    python = shutil.which("python", path=config.environ["PATH"].removeprefix(first))
    assert python is not None
    assert Path(python).parent == Path(sys.executable).parent
    assert config.environ["PATH"].startswith(first)  # another environment's goes first


def test_where_the_server_has_another_token_it_is_read_again(server, url, start_program, tmp_path):
    token, server.token = tmp_path / "token", "of-last-year"
    token.write_text(server.token)
    start_program("--job_server", url, "--token_file", "token", script(tmp_path, "sleep 600"))
    server.want_until(PodPhase.RUNNING, pod())
    server.token = "of-this-year"
    server.come_back()
    log = tmp_path / "pod_log" / "job_client.log"
    wait_until(lambda: "refuses this node" in log.read_text(), what="it is refused")
    token.write_text("")  # a moment in which it is none
    nodes, reports = len(server.nodes), len(server.reports)
    token.write_text(server.token)
    wait_until(lambda: len(server.nodes) > nodes, what="it registers")
    wait_until(lambda: len(server.reports) > reports, what="it reports")
    server.want_until(PodPhase.RUNNING, pod(), pod("pod_1_0", slots=(1,)))


def test_what_names_no_server_is_refused(tmp_path):
    (tmp_path / "train.sh").touch()
    with pytest.raises(SetupError, match="--job_server: 'host:port' is no server's URL"):
        parse_args(["--job_server", "host:port", "train.sh"], {}, tmp_path)


def test_a_trainer_that_lost_its_environment_is_known_by_its_launcher(spawn_marked):
    marker = "a" * 32
    launcher = spawn_marked(marker, "bash", "-c", "env -i sleep 600; true")
    wait_until(lambda: processes.descendants(launcher.pid))
    (trainer,) = processes.descendants(launcher.pid)
    wait_until(lambda: processes.environment(trainer.pid) == {})
    assert is_ours(marker, trainer.pid)
    assert not is_ours("b" * 32, trainer.pid)
    assert not is_ours(marker, 2**22 + 1)
    os.kill(trainer.pid, signal.SIGKILL)


def test_a_client_that_is_told_no_token_finds_that_of_its_users_server(tmp_path):
    (tmp_path / "train.sh").touch()
    token, url = tmp_path / "token", "http://127.0.0.1:8180"
    token.write_text("correct-horse")
    mine = {"HOME": str(tmp_path)}

    def read(**environ: str) -> tuple[str | None, Path | None]:
        config = parse_args(["train.sh"], {**mine, **environ}, tmp_path)
        return config.token, config.token_file

    with listed(url, token_file=token, folder=tmp_path, environ=mine):
        assert read() == ("correct-horse", token)
        assert read(EDL_TOKEN="my-own-token") == ("my-own-token", None)
        assert read(PADDLE_JOBSERVER="127.0.0.1:8181") == (None, None)
    assert read() == (None, None)
