"""The server as a program: its command line, its start and its end."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest

from job_server.__main__ import main
from job_server.api import wire
from job_server.api.errors import ConfigError
from job_server.api.wire import ScriptKind
from job_server.server.config import read_config
from tests.job_server.serving import InThread, ServerProcess, cpu_node, running_server
from tests.support import ROOT, free_port


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("EDL_TOKEN", "EDL_TOKEN_FILE", "PADDLE_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("- {at: 1m, remove: 1}\n- {at: 2m, remove: [}\n")
    (tmp_path / "holes.csv").write_text("time_s,free_slots\n0,8\n60,\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.yaml").write_text("- {at: 1m, kill: 0}\n")
    (tmp_path / "junk.db").write_bytes(b"my thesis" * 1000)
    (tmp_path / "empty.token").write_text("\n")
    (tmp_path / "empty.token").chmod(0o600)
    (tmp_path / "open.token").write_text("correct-horse\n")
    (tmp_path / "open.token").chmod(0o644)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param("--gpu_num_of_node 8 --pod_num_of_node 3", "--pod_num_of_node", id="divide"),
        pytest.param("--gpu_num_of_node 0", "--gpu_num_of_node", id="no gpus"),
        pytest.param("--pod_num_of_node eight", "'eight'", id="no number"),
        pytest.param("--server_port 99999", "--server_port", id="port out of range"),
        pytest.param("--server_port -1", "--server_port", id="negative port"),
        pytest.param("--node_ips 10.0.0.1,,10.0.0.2", "--node_ips", id="empty address"),
        pytest.param("--node_ips 10.0.0.1,10.0.0.1", "named twice", id="same address"),
        pytest.param("--node_ips a/b", "addr", id="no address"),
        pytest.param("--time_interval_to_change 0", "interval_s", id="no interval"),
        pytest.param("--time_interval_to_change nan", "interval_s", id="nan"),
        pytest.param("--del_pods_one_step -1", "del_pods", id="negative step"),
        pytest.param("--job_id ../x", "job_id", id="job id leaves"),
        pytest.param("--change_script no.yaml", "no.yaml", id="no such file"),
        pytest.param("--change_script whatever", "'whatever'", id="unknown script"),
        pytest.param("--change_script broken.yaml", "line 2", id="broken YAML"),
        pytest.param("--change_script binary.yaml", "binary.yaml", id="not text"),
        pytest.param("--change_script holes.csv", "line 3", id="trace with holes"),
        pytest.param("--change_script walk", "max_pods", id="nowhere to walk"),
        pytest.param("--heartbeat_s 0", "--heartbeat_s", id="no heartbeat"),
        pytest.param("--heartbeat_s nan", "--heartbeat_s", id="heartbeat nan"),
        pytest.param("--max_watchers 0", "--max_watchers", id="no watchers"),
        pytest.param("--min_pods 3 --max_pods 2", "max_pods", id="min above max"),
        pytest.param("--overlap perhaps", "--overlap", id="choice"),
        pytest.param("--bind 0.0.0.0", "--token_file", id="open without a token"),
        pytest.param("--bind ::", "--token_file", id="open on IPv6"),
        pytest.param("--bind gpu-box", "--token_file", id="a name may be any address"),
        pytest.param("--token_file no.token", "no.token", id="no token file"),
        pytest.param("--token_file empty.token", "empty.token", id="empty token"),
        pytest.param("--token_file open.token", "chmod 600", id="token for all to read"),
        pytest.param("--db no/server.db", "--db", id="no folder for the database"),
        pytest.param(f"--db {300 * 'x'}/a.db", "--db: cannot open xxx", id="no such name"),
        pytest.param("--db junk.db", "--db", id="no database"),
        pytest.param("--no_job --dry_run", "--dry_run", id="nothing to show"),
        pytest.param("--unknown", "--unknown", id="unknown flag"),
    ],
)
def test_a_wrong_value_ends_with_code_2_and_names_the_flag(files, capsys, args, says):
    given = args.split()
    if "--db" not in given:
        given += ["--db", ":memory:"]
    assert main(given) == 2
    assert says in capsys.readouterr().err
    assert (files / "junk.db").read_bytes() == b"my thesis" * 1000


def test_the_defaults_are_the_originals():
    config = read_config([], {})
    assert (config.bind, config.port, config.token) == ("127.0.0.1", 8180, None)
    job = config.job
    assert job is not None
    assert (job.job_id, job.pods, job.max_pods, job.slots_per_pod) == ("default_job", 1, 1, 8)
    assert job.script.kind is ScriptKind.ALTERNATE
    assert (job.script.interval_s, job.script.del_pods, job.script.add_pods) == (900, 1, 1)
    (node,) = config.legacy_nodes
    assert (node.addr, len(node.slots)) == ("127.0.0.1", 8)
    assert (node.port_low, node.port_high) == (20000, 20159)  # 20 of each slot


def test_environment_names_the_job_and_the_token(files):
    config = read_config([], {"PADDLE_JOB_ID": "digits", "EDL_TOKEN": "correct-horse"})
    assert config.job is not None
    assert config.job.job_id == "digits"
    assert config.token == "correct-horse"
    assert read_config(["--bind", "0.0.0.0"], {"EDL_TOKEN": "correct-horse"}).bind == "0.0.0.0"
    (files / "open.token").chmod(0o600)
    named = read_config(["--token_file", "open.token", "--job_id", "x"], {"PADDLE_JOB_ID": "y"})
    assert named.token == "correct-horse"
    assert named.job is not None
    assert named.job.job_id == "x"


def test_the_token_is_taken_from_the_flag_then_from_a_file_that_the_environment_names(files):
    (files / "a.token").write_text("correct-horse\n")
    (files / "b.token").write_text("battery-staple\n", encoding="utf-8-sig")  # as of Notepad
    for name in ("a.token", "b.token"):
        (files / name).chmod(0o600)
    environ = {"EDL_TOKEN_FILE": "a.token", "EDL_TOKEN": "of-the-environment"}
    assert read_config([], environ).token == "correct-horse"
    assert read_config(["--token_file", "b.token"], environ).token == "battery-staple"
    with pytest.raises(ConfigError, match="EDL_TOKEN_FILE: gone"):
        read_config([], {"EDL_TOKEN_FILE": "gone.token"})


def test_a_dry_run_prints_the_timeline_and_starts_nothing(files, capsys):
    assert main(["--dry_run", "--change_script", "good.yaml", "--db", "new.db"]) == 0
    assert "0:01:00  kill rank 0" in capsys.readouterr().out
    assert not (files / "new.db").exists()


def test_a_trace_may_be_as_a_spreadsheet_writes_it(files, capsys):
    text = "time_s,free_slots\r\n0,8\r\n60,2\r\n"
    (files / "sheet.csv").write_text(text, encoding="utf-8-sig", newline="")
    argv = ["--dry_run", "--pod_num_of_node", "8", "--change_script", "sheet.csv"]
    assert main(argv) == 0
    assert "0:01:00  set 2 pods (2 free slots): 8 -> 2 pods" in capsys.readouterr().out


def test_a_dry_run_of_a_job_that_cannot_change_says_what_to_say(files, capsys):
    assert main(["--dry_run"]) == 0
    assert "every change is skipped: this job may have 1 to 1 pod" in capsys.readouterr().out
    assert main(["--dry_run", "--pod_num_of_node", "2"]) == 0
    assert "every change is skipped" not in capsys.readouterr().out


def test_a_port_in_use_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--server_port", str(port), "--db", ":memory:"]) == 2
    err = capsys.readouterr().err
    assert f"--server_port: {port}" in err
    assert "in use" in err


def test_a_second_server_on_the_same_database_ends_with_code_2(tmp_path, capsys):
    with running_server(tmp_path, "--no_job"):
        port = str(free_port())
        assert main(["--server_port", port, "--db", str(tmp_path / "server.db")]) == 2
    assert "in use by another job server" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_who_waits_and_ends_with_code_0(tmp_path, signum):
    with running_server(tmp_path) as server, server.api() as api:
        revision = api.status("default_job").revision
        waits = [InThread(lambda: server.api().watch("default_job", revision, 60)) for _ in "ab"]
        assert server.process is not None
        server.process.send_signal(signum)
        assert server.process.wait(60) == 0
        for wait in waits:
            try:
                wait.result()
            except ConnectionError:
                continue  # it was still on its way
    assert "Traceback" not in server.log()
    assert "ended" in server.log()


def test_more_open_files_than_the_machine_gives_are_refused():
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048));"
    code = f"{limit} from job_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    args = ["--no_job", "--server_port", "0", "--db", ":memory:", "--max_watchers", "20000"]
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True)
    assert done.returncode == 2
    assert b"needs 40200 open files for 20000 watchers" in done.stderr


def test_an_ended_default_job_is_not_run_again_by_a_restart(tmp_path):
    with running_server(tmp_path) as server, server.api() as api:
        api.stop("default_job")
        server.stop()
        server.start()
        assert api.status("default_job").state.value == "STOPPED"
        assert "edl delete default_job" in server.log()


def test_a_restart_says_that_its_job_is_being_stopped(tmp_path):
    with running_server(tmp_path) as server, server.api() as api:
        slots = tuple(wire.Slot(index=index, kind=wire.SlotKind.CPU) for index in range(8))
        api.register_node(cpu_node(job_id="default_job", slots=slots))
        pod = wire.PodState(pod_id="pod_0_0", job_id="default_job", phase=wire.PodPhase.RUNNING)
        api.node_report(wire.NodeReport(node_id="node-a", pods=(pod,)))
        assert api.stop("default_job").state is wire.JobState.STOPPING
        server.stop()
        server.start()
        assert "job default_job: is being stopped; `edl delete default_job` first" in server.log()


def test_a_job_in_the_database_stands_above_the_command_line(tmp_path):
    with running_server(tmp_path, "--pod_num_of_node", "2") as server, server.api() as api:
        server.stop()
        server.args = ["--pod_num_of_node", "4"]
        server.start()
        assert api.status("default_job").spec.max_pods == 2
        assert "as the database" in server.log()


def test_a_server_whose_own_job_cannot_be_read_says_so_and_serves_the_others(tmp_path):
    with running_server(tmp_path) as server, server.api() as api:
        api.submit(wire.JobSpec(job_id="other"))
    with sqlite3.connect(tmp_path / "server.db") as db:
        db.execute("UPDATE jobs SET data = '{}' WHERE job_id = 'default_job'")
    db.close()
    with running_server(tmp_path) as server, server.api() as api:
        assert [job.job_id for job in api.jobs()] == ["other"]
        assert "job 'default_job' is in the database, but this version cannot" in server.log()
        assert "goes on as the database" not in server.log()


def test_what_is_no_http_is_refused_as_json(tmp_path):
    with running_server(tmp_path, "--no_job") as server:
        too_long = b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n"
        for raw in (b"GET\r\n\r\n", too_long):
            with socket.create_connection(("127.0.0.1", server.port), timeout=120) as sock:
                sock.sendall(raw)
                answer = b""
                while data := sock.recv(65536):
                    answer += data
            assert answer.startswith(b"HTTP/1.")
            assert answer.split()[1][:1] == b"4"
            assert b'{"error":"' in answer


def test_help_ends_with_code_0():
    command = [sys.executable, "-m", "job_server", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0
    assert "--time_interval_to_change" in done.stdout


def test_edl_server_is_the_same_program(tmp_path):
    server = ServerProcess(tmp_path, ["--no_job"], program=("edl", "server"))
    try:
        server.start()
        assert server.process is not None
        with server.api() as api:
            assert api.jobs() == ()
    finally:
        assert server.stop() == 0
