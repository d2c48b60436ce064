"""The start scripts: the command lines that they make, and real programs in the background."""

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from job_server.api.api_client import ApiClient
from tests import stranger
from tests.authority import make_authority
from tests.support import ROOT, free_port, wait_until

SERVER = ROOT / "scripts" / "start_job_server.sh"
CLIENT = ROOT / "scripts" / "start_job_client.sh"

Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(tmp_path: Path) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "EDL_"))}
    return ours | {
        "EDL_STATE_DIR": str(tmp_path / "state"),
        "EDL_PYTHON": sys.executable,
        "EDL_NO_GPU": "1",
        "EDL_CPU_SLOTS": "2",
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run one of the scripts with this test's own folder for pid files and logs."""

    def call(script: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *args],
            env=environment(tmp_path) | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture
def command_of(run: Run, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the command line that a script would run, without the Python before it."""
    echo = tmp_path / "bin" / "python"
    echo.parent.mkdir()
    echo.write_text("#!/bin/bash\nprintf '%q ' \"$@\"\n")
    echo.chmod(0o755)

    def command(script: Path, *args: str, **env: str) -> list[str]:
        done = run(script, "--foreground", *args, EDL_PYTHON=str(echo), **env)
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout)

    return command


@pytest.fixture
def port(run: Run) -> Iterator[str]:
    """A port for a server that does not outlive the test."""
    number = str(free_port())
    yield number
    run(CLIENT, "--stop")
    run(SERVER, "--stop", "--server_port", number)


def is_gone(pid: int) -> bool:
    """No such process, or one that waits for its parent: a container may have none."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def value(command: list[str], flag: str) -> str:
    """The value that argparse would take: the last one."""
    return command[len(command) - 1 - command[::-1].index(flag) + 1]


def test_the_server_without_arguments_is_this_node_with_one_pod_per_slot(command_of):
    command = command_of(SERVER)
    assert command[:2] == ["-m", "job_server"]
    assert value(command, "--node_ips") == "127.0.0.1"
    assert value(command, "--gpu_num_of_node") == value(command, "--pod_num_of_node") == "2"
    assert value(command, "--bind") == "127.0.0.1"


def test_the_first_of_paddle_trainers_hosts_the_server(command_of):
    nodes = {"PADDLE_TRAINERS": "10.0.0.7,10.0.0.8"}
    command = command_of(SERVER, **nodes)
    assert value(command, "--node_ips") == "10.0.0.7,10.0.0.8"
    assert value(command, "--bind") == "10.0.0.7"
    assert value(command_of(CLIENT, **nodes), "--job_server") == "http://10.0.0.7:8180"


def test_the_users_own_flags_come_last_and_so_win(command_of):
    command = command_of(SERVER, "--pod_num_of_node", "1", "--time_interval_to_change", "30")
    assert value(command, "--pod_num_of_node") == "1"
    assert value(command, "--time_interval_to_change") == "30"


@pytest.mark.parametrize(
    ("args", "env", "server"),
    [
        pytest.param([], {}, "http://127.0.0.1:8180", id="nothing said"),
        pytest.param([], {"PADDLE_JOBSERVER": "http://h:1"}, "http://h:1", id="PADDLE_JOBSERVER"),
        pytest.param([], {"PADDLE_JOBSERVER": "h:1"}, "http://h:1", id="without the scheme"),
        pytest.param(
            ["--job_server", "http://flag:2"], {"PADDLE_JOBSERVER": "h:1"}, "http://flag:2",
            id="the flag wins",
        ),
    ],
)  # fmt: skip
def test_which_server_the_client_talks_to(command_of, args, env, server):
    assert value(command_of(CLIENT, *args, **env), "--job_server") == server


@pytest.mark.parametrize(
    "args", [[], ["--grace_s", "3"], ["--cpu_slots=4", "--log_level", "10"]], ids=str
)
def test_a_client_that_is_told_no_script_trains_resnet50(command_of, tmp_path, args):
    command = command_of(CLIENT, *args)
    assert command[-1] == "./train_pretrain.sh"
    assert value(command, "--package_sh") == str(ROOT / "resnet50" / "package.sh")
    assert value(command, "--pod_path") == str(tmp_path / "state" / "resnet50_pod")
    assert value(command, "--cpu_slots") == "2"
    assert command[-len(args) - 3 : -3] == args


def test_what_stands_behind_two_dashes_goes_to_the_training(command_of):
    command = command_of(CLIENT, "--grace_s", "3", "--", "--num_epochs", "2")
    assert command[-3:] == ["./train_pretrain.sh", "--num_epochs", "2"]
    assert value(command, "--grace_s") == "3"


@pytest.mark.parametrize(
    "args",
    [["./my.sh"], ["--grace_s", "3", "./my.sh", "--lr", "1"], ["--grace_s=3", "my.sh"],
     ["--jobs_dir", "jobs"], ["--keep_pods", "./my.sh", "--lr", "1"],
     ["./my.sh", "--", "--lr", "1"]],
    ids=str,
)  # fmt: skip
def test_a_client_that_is_told_what_to_run_runs_only_that(command_of, args):
    command = command_of(CLIENT, *args)
    assert command[-len(args) :] == args
    assert not any("resnet50" in word for word in command)


@pytest.fixture
def pods_environment(run: Run, tmp_path: Path) -> Callable[..., tuple[dict[str, str], str]]:
    """Return what the client's pods start from, and what was said."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\nenv\n")
    program.chmod(0o755)

    def environment(*args: str, **env: str) -> tuple[dict[str, str], str]:
        done = run(CLIENT, "--foreground", *args, EDL_PYTHON=str(program), **env)
        assert done.returncode == 0, done.stderr
        pairs = (line.partition("=") for line in done.stdout.splitlines())
        return {name: text for name, _, text in pairs}, done.stderr

    return environment


def test_without_imagenet_it_says_that_it_trains_digits_and_where_checkpoints_are(
    pods_environment, tmp_path: Path
):
    checkpoint = str(tmp_path / "state" / "resnet50_checkpoint")
    env, said = pods_environment()
    assert "PADDLE_EDL_IMAGENET_PATH" not in env
    assert env["PADDLE_EDL_FLEET_CHECKPOINT_PATH"] == checkpoint
    assert "digits at 32 pixels" in said
    assert checkpoint in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/data/check points", "/data/check points"), ("ckpt", "{cwd}/ckpt"), ("s3://b/c", "s3://b/c")],
)  # fmt: skip
def test_the_paths_of_the_original_are_honoured_and_made_absolute(
    pods_environment, tmp_path: Path, given, expected
):
    (tmp_path / "image net").mkdir()
    env, said = pods_environment(
        PADDLE_EDL_IMAGENET_PATH="image net", PADDLE_EDL_FLEET_CHECKPOINT_PATH=given
    )
    assert env["PADDLE_EDL_IMAGENET_PATH"] == str(tmp_path / "image net")
    assert env["PADDLE_EDL_FLEET_CHECKPOINT_PATH"] == expected.format(cwd=tmp_path)
    assert str(tmp_path / "image net") in said


def test_a_checkpoint_that_is_there_is_named_as_where_it_goes_on(pods_environment, tmp_path: Path):
    (tmp_path / "ckpt" / "stage_00000001").mkdir(parents=True)
    _env, said = pods_environment(PADDLE_EDL_FLEET_CHECKPOINT_PATH=str(tmp_path / "ckpt"))
    assert "goes on from there" in said


def test_an_imagenet_folder_that_is_not_there_is_a_wrong_command_line(run: Run):
    refused = run(CLIENT, PADDLE_EDL_IMAGENET_PATH="/no/such/folder")
    assert refused.returncode == 2
    assert "PADDLE_EDL_IMAGENET_PATH: no folder /no/such/folder" in refused.stderr


@pytest.mark.parametrize("script", [SERVER, CLIENT], ids=lambda path: path.stem)
def test_help_is_the_scripts_own_comment_and_the_programs_options(run: Run, script: Path):
    shown = run(script, "--help")
    assert shown.returncode == 0
    assert "--foreground   stay in front" in shown.stdout
    assert "set -euo" not in shown.stdout
    assert "usage: python -m job_" in shown.stdout


def test_a_server_with_a_token_is_found_to_answer(run: Run, tmp_path: Path, port: str):
    """Without the token the script would take its refusal for silence, and end it again."""
    token = tmp_path / "token"
    token.write_text("correct-horse")
    token.chmod(0o600)
    started = run(SERVER, "--server_port", port, EDL_TOKEN_FILE=str(token))
    assert started.returncode == 0, started.stderr
    assert "The job server runs" in started.stderr


@stranger.needs_root
def test_server_and_client_share_a_token_that_no_other_user_has(
    run: Run, tmp_path: Path, port: str
):
    script = tmp_path / "train.sh"
    script.write_text("sleep 600\n")
    assert run(SERVER, "--server_port", port).returncode == 0
    token, url = tmp_path / "state" / "token", f"http://127.0.0.1:{port}"
    assert token.stat().st_mode & 0o777 == 0o600
    for method, path in (("GET", "/"), ("GET", "/api/v1/jobs"), ("POST", "/api/v1/nodes")):
        assert stranger.asks(method, url + path) == 401
    assert stranger.reads(token) == "PermissionError"
    started = run(CLIENT, "--job_server", url, "--port_range", "auto", str(script))
    assert started.returncode == 0, started.stderr
    with ApiClient(url, token.read_text()) as api:
        wait_until(lambda: api.nodes() and api.status("default_job").pods)


def test_the_client_may_be_started_before_the_server(run: Run, tmp_path: Path, port: str):
    script = tmp_path / "train.sh"
    script.write_text("sleep 600\n")
    url = f"http://127.0.0.1:{port}"
    first = run(CLIENT, "--job_server", url, "--port_range", "auto", str(script))
    assert "the client will wait for it" in first.stderr
    second = run(SERVER, "--server_port", port)
    assert second.returncode == 0, second.stderr
    with ApiClient(url, (tmp_path / "state" / "token").read_text()) as api:
        wait_until(lambda: api.nodes())


def test_a_token_that_could_not_be_written_is_none(run: Run, tmp_path: Path, port: str):
    full = tmp_path / "bin" / "tr"
    full.parent.mkdir()
    full.write_text("#!/bin/bash\necho >/dev/full")
    full.chmod(0o755)
    refused = run(SERVER, "--server_port", port, PATH=f"{full.parent}:{os.environ['PATH']}")
    assert refused.returncode == 1
    assert "token cannot be made" in refused.stderr
    assert list((tmp_path / "state").glob("token*")) == []


def test_a_client_without_the_servers_token_is_told_where_it_is(
    run: Run, tmp_path: Path, port: str
):
    script = tmp_path / "train.sh"
    script.write_text("true\n")
    assert run(SERVER, "--server_port", port).returncode == 0
    url = f"http://127.0.0.1:{port}"
    refused = run(CLIENT, "--job_server", url, str(script), EDL_TOKEN="not-the-servers")
    assert refused.returncode == 1
    assert f"The job server at {url} wants its token" in refused.stderr
    assert f"copy that to {tmp_path}/state/token here" in refused.stderr
    elsewhere = run(CLIENT, "--foreground", "--job_server", "http://10.0.0.7:8180", str(script),
                    EDL_PYTHON="/bin/echo", EDL_STATE_DIR=str(tmp_path / "elsewhere"))  # fmt: skip
    assert elsewhere.returncode == 0
    assert not (tmp_path / "elsewhere" / "token").exists(), "it would not be that server's"


def test_a_token_of_the_users_own_wins(run: Run, tmp_path: Path, port: str):
    assert run(SERVER, "--server_port", port, EDL_TOKEN="correct-horse").returncode == 0
    with ApiClient(f"http://127.0.0.1:{port}", "correct-horse") as api:
        assert api.health().server_id
    assert not (tmp_path / "state" / "token").exists()


def test_a_client_of_the_version_before_is_not_shut_out(run: Run, tmp_path: Path, port: str):
    client = subprocess.Popen(["sleep", "600"])
    try:
        ticks = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "job_client.pid").write_text(f"{client.pid} {ticks}\n")
        started = run(SERVER, "--server_port", port)
        assert "It gets no token" in started.stderr
        with ApiClient(f"http://127.0.0.1:{port}") as api:
            assert api.health().server_id
    finally:
        client.kill()
        client.wait()


def test_a_server_starts_once_and_stops(run: Run, tmp_path: Path, port: str):
    first = run(SERVER, "--server_port", port)
    api = ApiClient(f"http://127.0.0.1:{port}", (tmp_path / "state" / "token").read_text())
    assert first.returncode == 0, first.stderr
    assert "--stop" in first.stderr
    pid = int(first.stderr.split("pid ")[1].split(")")[0])
    server_id = api.health().server_id

    second = run(SERVER, "--server_port", port)
    assert second.returncode == 0
    assert f"runs already (pid {pid})" in second.stderr
    assert api.health().server_id == server_id

    assert run(SERVER, "--stop", "--server_port", port).returncode == 0
    assert is_gone(pid)
    again = run(SERVER, "--stop", "--server_port", port)
    assert again.returncode == 0
    assert "does not run" in again.stderr


def test_of_starts_at_the_same_time_one_starts_it_and_it_can_be_stopped(
    run: Run, tmp_path: Path, port: str
):
    """The one that came second took the pid file with it: what ran was not found any more."""
    script = tmp_path / "train.sh"
    script.write_text("sleep 600\n")
    url = f"http://127.0.0.1:{port}"
    for start in (
        [SERVER, "--server_port", port],
        [CLIENT, "--job_server", url, "--port_range", "auto", str(script)],
    ):
        command = ["bash", *map(str, start)]
        at_once = [
            subprocess.Popen(
                command, env=environment(tmp_path), cwd=tmp_path, stderr=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        said = [each.communicate()[1] for each in at_once]
        assert [each.returncode for each in at_once] == [0, 0, 0], said
        assert len({tuple(re.findall(r"\(pid (\d+)\)", text)) for text in said}) == 1, said
        assert sum("runs already" in text for text in said) == 2
    assert "has stopped" in run(CLIENT, "--stop").stderr
    assert "has stopped" in run(SERVER, "--stop", "--server_port", port).stderr


def test_a_server_that_somebody_else_started_is_not_taken_for_the_new_one(
    run: Run, tmp_path: Path, port: str
):
    assert run(SERVER, "--server_port", port).returncode == 0
    (tmp_path / "state" / f"job_server_{port}.pid").rename(tmp_path / "pid")
    refused = run(SERVER, "--server_port", port)
    (tmp_path / "pid").rename(tmp_path / "state" / f"job_server_{port}.pid")
    assert refused.returncode == 1
    assert "answers already" in refused.stderr
    assert "The job server runs (pid" not in refused.stderr


def test_a_server_whose_job_has_ended_says_so_when_it_is_started_again(
    run: Run, tmp_path: Path, port: str
):
    assert "default_job" not in run(SERVER, "--server_port", port).stderr
    token = (tmp_path / "state" / "token").read_text()
    ApiClient(f"http://127.0.0.1:{port}", token).stop("default_job")
    run(SERVER, "--stop", "--server_port", port)
    said = run(SERVER, "--server_port", port).stderr
    assert "job default_job: has ended (STOPPED) and stays so; `edl delete default_job`" in said


def test_a_server_that_cannot_start_says_why_and_leaves_no_pid_file(
    run: Run, tmp_path: Path, port: str
):
    refused = run(SERVER, "--server_port", port, "--time_interval_to_change", "soon")
    assert refused.returncode == 1
    assert "soon" in refused.stderr
    assert list((tmp_path / "state").glob("*.pid")) == []


@pytest.mark.parametrize("port", ["many", "0", "99999", ""])
def test_a_port_that_nobody_could_be_told_is_a_wrong_command_line(run: Run, port: str):
    refused = run(SERVER, "--server_port", port)
    assert refused.returncode == 2
    assert f"'{port}'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_process_that_has_taken_over_the_pid_is_not_stopped(run: Run, tmp_path: Path):
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "job_client.pid").write_text(f"{bystander.pid} 1\n")
        stopped = run(CLIENT, "--stop")
        assert "does not run" in stopped.stderr
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_another_machine_has_started_from_the_same_folder_keeps_its_pid_file(
    run: Run, tmp_path: Path, port: str
):
    """Its own --stop found nothing any more, said so, and left it running."""
    file = tmp_path / "state" / f"job_server_{port}.pid"
    file.parent.mkdir()
    file.write_text("4190000 1\non node-a\n")
    refused = run(SERVER, "--server_port", port, "--time_interval_to_change", "soon")
    assert refused.returncode == 1
    assert "EDL_STATE_DIR=" in refused.stderr
    stopped = run(SERVER, "--server_port", port, "--stop")
    assert stopped.returncode == 1
    assert "was started on node-a" in stopped.stderr
    assert file.read_text() == "4190000 1\non node-a\n"


def test_what_is_started_on_a_full_disk_does_not_stay_where_no_stop_finds_it(tmp_path: Path):
    (tmp_path / "state").mkdir()
    full = "trap '' XFSZ; ulimit -f 0"  # no byte can be written to a file
    program = f"trap 'echo $started_pid' EXIT; {full}; in_background job_client sleep 60"
    refused = subprocess.run(
        ["bash", "-euc", f"source scripts/lib.sh; source scripts/background.sh; {program}"],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "EDL_STATE_DIR=" in refused.stderr
    wait_until(lambda: is_gone(int(refused.stdout)))
    assert not (tmp_path / "state" / "job_client.pid").exists()


@pytest.mark.parametrize(
    "call", ["background.sh; one_at_a_time job_client", "with_teachers.sh; only_one $state"]
)
def test_a_folder_that_knows_no_locks_is_told_with_the_remedy(tmp_path: Path, call: str):
    """As some mounts of NFS and Lustre: `flock` ends with another code than where one waits."""
    (tmp_path / "state").mkdir()
    (tmp_path / "flock").write_text("#!/bin/sh\necho 'flock: 9: No locks available' >&2; exit 71\n")
    (tmp_path / "flock").chmod(0o755)
    settings = environment(tmp_path)
    refused = subprocess.run(
        ["bash", "-euc", f"state=$EDL_STATE_DIR; source scripts/lib.sh; source scripts/{call}"],
        cwd=ROOT, env=settings | {"PATH": f"{tmp_path}:{settings['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "name a folder on a local disk: EDL_STATE_DIR=" in refused.stderr


def test_a_client_is_asked_to_end_once_however_often_stop_is_called(tmp_path: Path):
    """A second signal would end it at once, without the state that it is writing."""
    said, done = tmp_path / "said", tmp_path / "done"
    client = (
        f"trap 'echo TERM >>{said}' TERM; touch {said}; until [ -e {done} ]; do sleep 0.1; done"
    )
    (tmp_path / "state").mkdir()
    settings = environment(tmp_path)
    start = f"in_background job_client bash -c {shlex.quote(client)}"
    subprocess.run(
        ["bash", "-c", f"source scripts/lib.sh; source scripts/background.sh; {start}"],
        cwd=ROOT, env=settings, check=True,
    )  # fmt: skip
    try:
        wait_until(said.exists)
        stop = ["bash", str(CLIENT), "--stop"]
        with subprocess.Popen(stop, env=settings) as first:
            wait_until(lambda: "asked" in (tmp_path / "state" / "job_client.pid").read_text())
            first.terminate()  # its user has had enough of waiting
        with subprocess.Popen(stop, env=settings, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert "was asked to end before" in second.stderr.readline()
            done.touch()
            assert "has stopped" in second.stderr.read()
    finally:
        done.touch()
    assert said.read_text() == "TERM\n"


def test_a_client_runs_a_script_until_it_is_stopped(run: Run, tmp_path: Path, port: str):
    """The script is the user's own; the pod must be gone when --stop returns."""
    script = tmp_path / "train.sh"
    script.write_text(f"echo $$ >{shlex.quote(str(tmp_path / 'pid'))}\nexec sleep 600\n")
    assert run(SERVER, "--server_port", port).returncode == 0
    started = run(
        CLIENT, "--job_server", f"http://127.0.0.1:{port}", "--port_range", "auto",
        "--grace_s", "1", str(script),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    pid = int((tmp_path / "pid").read_text())
    assert "runs already" in run(CLIENT).stderr

    stopped = run(CLIENT, "--stop")
    assert stopped.returncode == 0, stopped.stderr
    assert is_gone(pid)


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404, "nothing of this kind here")

    def log_message(self, *_: object) -> None:
        pass


def test_a_client_that_waits_for_a_server_with_an_unknown_certificate_says_so(
    run: Run, tmp_path: Path
):
    script = tmp_path / "train.sh"
    script.write_text("true\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as proxy:
        context = make_authority(tmp_path).context()
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"https://localhost:{proxy.server_address[1]}"
        waits = run(CLIENT, "--job_server", url, str(script))
        run(CLIENT, "--stop")
        proxy.shutdown()
    assert "certificate verify failed" in waits.stderr
    assert "SSL_CERT_FILE" in waits.stderr


def test_a_client_does_not_wait_for_a_server_that_is_somebody_elses(run: Run, tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text("true\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stranger.server_address[1]}"
        refused = run(CLIENT, "--job_server", url, str(script))
        stranger.shutdown()
    assert refused.returncode == 1
    assert "will wait" not in refused.stderr
    assert f"What answers at {url} refuses this client, or is no job server" in refused.stderr
    assert "--job_server" in refused.stderr
