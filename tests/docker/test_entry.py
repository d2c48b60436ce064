"""The entry point and the health check of the image, run for real outside of it."""

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.docker.compose import DOCKER
from tests.support import free_port, wait_until

TOKEN = "correct-horse"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """As in a container: a folder for state, and a token that is mounted readable by all."""
    token = tmp_path / "secret"
    token.write_text(TOKEN + "\n")
    token.chmod(0o644)
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "EDL_"))}
    # As in the image, whose PATH has EDL's programs, and no folder of this name in the way.
    ours["PATH"] = f"{Path(sys.executable).parent}:{ours['PATH']}"
    return ours | {
        "EDL_STATE_DIR": str(tmp_path / "state"),
        "EDL_TOKEN_FILE": str(token),
        "EDL_PYTHON": sys.executable,
        "EDL_NO_GPU": "1",
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*args: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([DOCKER / "entry.sh", *args], env=environ))
        wait_until((Path(environ["EDL_STATE_DIR"]) / ".role").exists)  # it is well before that, too
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def entry(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DOCKER / "entry.sh", *args], env=environ, capture_output=True, text=True, check=False
    )


def health(environ: dict[str, str]) -> str:
    """What the health check says; "" when all is well."""
    done = subprocess.run(
        [sys.executable, DOCKER / "health.py"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr.strip()


def test_a_server_is_healthy_while_it_runs_and_ends_on_a_sigterm(start, environ, tmp_path: Path):
    port = str(free_port())
    server = start("server", "--bind", "0.0.0.0", "--server_port", port)
    wait_until(lambda: health(environ) == "", what="the server is healthy")
    copy = tmp_path / "state" / ".token"
    assert copy.stat().st_mode & 0o077 == 0, "others may not read what the programs are given"

    beside = entry(environ, "edl", "nodes", "--server", f"http://127.0.0.1:{port}")
    assert beside.returncode == 0, beside.stderr
    assert health(environ) == "", "a command beside it changes nothing"

    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert f"127.0.0.1:{port}" in health(environ)


def test_a_server_with_another_token_is_not_healthy(start, environ, tmp_path: Path):
    start("server", "--server_port", str(free_port()))
    wait_until(lambda: health(environ) == "", what="the server is healthy")
    (tmp_path / "secret").write_text("battery-staple")
    assert "401" in health(environ)


def test_a_client_is_healthy_as_long_as_it_lives_though_no_server_answers(
    start, environ, tmp_path: Path
):
    script = tmp_path / "train.sh"
    script.write_text("exit 0\n")
    server = f"http://127.0.0.1:{free_port()}"
    client = start("client", "--job_server", server, "--port_range", "auto", str(script))
    wait_until(lambda: health(environ) == "", what="the client is healthy")
    log = tmp_path / "state" / "pod_log" / "job_client.log"
    wait_until(lambda: log.exists() and "does not answer" in log.read_text(), what="it asks")
    client.send_signal(signal.SIGTERM)
    assert client.wait(60) == 0
    assert "has ended" in health(environ)


def test_a_client_reads_a_token_that_was_changed_in_the_secret_itself(
    start, environ, tmp_path: Path
):
    """Of a copy from its start it was refused for good: its node was lost, and its jobs waited."""
    script = tmp_path / "train.sh"
    script.write_text("exit 0\n")
    server = f"http://127.0.0.1:{free_port()}"
    client = start("client", "--job_server", server, "--port_range", "auto", str(script))
    wait_until(lambda: health(environ) == "", what="the client is healthy")
    told = Path(f"/proc/{client.pid}/environ").read_text().split("\0")
    assert f"EDL_TOKEN_FILE={tmp_path / 'secret'}" in told


def test_whoever_holds_the_clients_lock_is_the_client(environ, tmp_path: Path):
    state = tmp_path / "state"
    (state / "pod_log").mkdir(parents=True)
    (state / ".role").write_text("client\n")
    assert "no job client has started" in health(environ)
    with (state / "pod_log" / "lock").open("w") as lock:
        assert "has ended" in health(environ)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert health(environ) == ""


def test_a_server_that_listens_on_an_address_of_its_own_is_asked_there(start, environ):
    environ["PADDLE_TRAINERS"] = "127.0.0.2,127.0.0.3"
    port = str(free_port())
    start("server", "--bind", "127.0.0.2", "--server_port", port)
    wait_until(lambda: health(environ) == "", what="the server is healthy")


@pytest.mark.parametrize(
    ("args", "environment", "noted"),
    [
        (["server"], {}, "server 127.0.0.1 8180"),
        (["server"], {"PADDLE_TRAINERS": "10.0.0.1,10.0.0.2"}, "server 10.0.0.1 8180"),
        (["server"], {"PADDLE_TRAINERS": "localhost,10.0.0.2"}, "server 127.0.0.1 8180"),
        (
            ["server", "--bind=0.0.0.0", "--server_port", "81"],
            {"PADDLE_TRAINERS": "node1,node2"},
            "server 0.0.0.0 81",
        ),
        (["teacher", "--model", "m"], {}, "teacher 127.0.0.1 9292"),
        (["teacher", "--bind", "10.0.0.7", "--port=1"], {}, "teacher 10.0.0.7 1"),
        (["discovery"], {}, "discovery 127.0.0.1 7001"),
        (["discovery", "--server", "[fd00::1]:7002"], {}, "discovery [fd00::1] 7002"),
        (["client", "--node_id", "n"], {}, "client"),
    ],
)
def test_what_the_health_check_asks_is_where_the_program_listens(
    environ, tmp_path: Path, args: list[str], environment: dict[str, str], noted: str
):
    nothing = tmp_path / "python"
    nothing.write_text("#!/bin/sh\n")
    nothing.chmod(0o755)
    ours = environ | environment | {"EDL_PYTHON": str(nothing), "EDL_CPU_SLOTS": "1"}
    assert entry(ours, *args).returncode == 0
    assert (Path(environ["EDL_STATE_DIR"]) / ".role").read_text() == noted + "\n"


@pytest.mark.parametrize(
    ("bound", "asked"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::]", "[::1]"),
        ("fd00::1", "[fd00::1]"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_that_means_all_of_this_host_is_asked_by_its_loopback(
    environ, bound: str, asked: str
):
    spec = importlib.util.spec_from_file_location("health", DOCKER / "health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.url_of(bound, "7001") == f"http://{asked}:7001"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_says_what_there_is(environ, flag: str):
    done = entry(environ, flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert "server     the job server" in done.stdout


def test_a_command_that_is_not_there_is_refused_by_name(environ):
    done = entry(environ, "nosuch", "--flag")
    assert done.returncode == 127
    assert "no command 'nosuch'; expected server, client, teacher" in done.stderr
    done = entry(environ, "-x")
    assert done.returncode == 127
    assert "no command '-x'" in done.stderr


def test_any_other_command_runs_as_it_stands_with_its_exit_code(environ):
    done = entry(environ, "bash", "-c", 'echo "$0"; exit 7', "a b")
    assert (done.returncode, done.stdout) == (7, "a b\n")
    assert health(environ) == ""


def test_discovery_is_healthy_while_it_runs_and_ends_on_a_sigterm(start, environ):
    port = free_port()
    discovery = start("discovery", "--server", f"0.0.0.0:{port}")
    wait_until(lambda: health(environ) == "", what="discovery is healthy")
    discovery.send_signal(signal.SIGTERM)
    assert discovery.wait(60) == 0
    assert f"127.0.0.1:{port}" in health(environ)


@pytest.mark.parametrize(
    ("args", "change", "code", "text"),
    [
        pytest.param([], {}, 2, "expected server, client, teacher, disc", id="nothing said"),
        pytest.param(["server"], {"EDL_TOKEN_FILE": "/no/token"}, 1, "/no/token", id="no token"),
        pytest.param(["server"], {"EDL_STATE_DIR": "/proc/x"}, 1, "/proc/x", id="no state"),
    ],
)
def test_what_is_missing_is_named(environ, args, change, code, text):
    done = entry(environ | change, *args)
    assert done.returncode == code
    assert text in done.stderr


class _Wants(BaseHTTPRequestHandler):
    """Answers who shows the teachers' token."""

    def do_GET(self) -> None:
        is_shown = self.headers["Authorization"] == "Bearer the teachers'"
        self.send_response(200 if is_shown else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("role", "names", "is_well"),
    [
        ("teacher", ("EDL_TEACHER_TOKEN",), True),
        ("discovery", ("EDL_TEACHER_TOKEN",), True),
        ("teacher", ("EDL_TOKEN",), True),
        ("teacher", (), False),
        ("server", ("EDL_TEACHER_TOKEN",), False),
    ],
)
@pytest.mark.parametrize("form", ["", "_FILE"])
def test_teachers_are_asked_with_the_token_that_they_read_themselves(
    environ, tmp_path: Path, role: str, names: tuple[str, ...], is_well: bool, form: str
):
    secret = "the teachers'"
    (tmp_path / "theirs").write_text(secret + "\n")
    state = Path(environ["EDL_STATE_DIR"])
    state.mkdir()
    given = {f"{name}{form}": str(tmp_path / "theirs") if form else secret for name in names}
    if "EDL_TOKEN" in names:  # else that file has the job server's
        del environ["EDL_TOKEN_FILE"]
    with HTTPServer(("127.0.0.1", 0), _Wants) as server:
        (state / ".role").write_text(f"{role} 127.0.0.1 {server.server_port}")
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert (health(environ | given) == "") is is_well
        thread.join(20)
