"""What users type, against a real server."""

import contextlib
import importlib.metadata
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from edl.__main__ import VERBS
from edl.__main__ import main as edl
from job_server.api import wire
from job_server.api.api_client import ApiClient
from job_server.api.command_line import keep_token, make_token
from job_server.cli import collector, commands
from job_server.cli.commands import main
from job_server.cli.logs import log_lines
from job_server.training import views
from tests.job_server.serving import InThread, cpu_node, running_server
from tests.job_server.world import World, trains, world
from tests.support import free_port, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    args = ("--pod_num_of_node", "4", "--change_script", "none", "--heartbeat_s", "30")
    with running_server(tmp_path_factory.mktemp("server"), *args) as server:
        yield server


@pytest.fixture
def run(server, capsys):
    """Run a command; return (exit code, what it printed)."""

    def run(*args: str) -> tuple[int, str]:
        code = main([args[0], "--server", server.url, *args[1:]])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", b"\\u6570 \xe9"), ("utf-8", "\u6570 \xe9".encode())]
)
def test_what_a_locale_cannot_show_ends_no_command(server, monkeypatch, encoding, shown):
    written = io.BytesIO()
    said = iter([wire.JobEvent(number=1, at=0.0, job_id="a", stage=0, text="\u6570 \xe9")])
    monkeypatch.setattr(commands, "_events_after", lambda *_: said)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    assert edl(["events", "default_job", "--server", server.url]) == 0
    assert written.getvalue().strip().endswith(shown)


def test_status_is_a_table_of_all_jobs(run):
    code, out = run("status")
    assert code == 0
    header, row = out.splitlines()[:2]
    assert header.split() == ["JOB", "STATE", "PODS", "STAGE", "STEP", "REASON"]
    assert row.split()[:2] == ["default_job", "RUNNING"]


def test_status_says_what_the_server_warns_of(run, monkeypatch):
    health = wire.Health(server_id="1", warnings=("the database cannot be written",))
    monkeypatch.setattr(ApiClient, "health", lambda _: health)
    assert run("status")[1].splitlines()[-1] == "warning: the database cannot be written"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The environment of a user who has no server yet."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("PADDLE_JOBSERVER", "EDL_TOKEN", "EDL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def a_token(folder: Path) -> Path:
    path = folder / "token"
    keep_token(path, make_token())
    return path


def test_without_a_server_of_ones_own_no_foreign_one_is_asked(mine, capsys):
    for verb in (["status"], ["status", "--follow"], ["stop", "run"], ["nodes", "--json"]):
        assert main(verb) == 1
        said = capsys.readouterr().err
        assert "no job server of yours runs on this machine" in said
        assert "--server URL or PADDLE_JOBSERVER" in said


def test_the_only_server_of_the_user_is_found_with_its_token(mine, capsys, monkeypatch):
    (mine / "one").mkdir()
    token = a_token(mine)
    with running_server(mine / "one", "--change_script", "none", "--token_file", str(token)) as one:
        assert main(["status"]) == 0
        assert "default_job" in capsys.readouterr().out
        monkeypatch.setenv("EDL_TOKEN", "of-another-server")
        for named in (one.url, one.url.removeprefix("http://"), f"localhost:{one.port}"):
            assert main(["status", "--server", named]) == 0, named
        capsys.readouterr()
        other = mine / "other"
        keep_token(other, "not-the-servers")
        assert main(["status", "--token_file", str(other)]) == 1
        assert "Authorization" in capsys.readouterr().err


def test_a_link_to_the_page_is_printed_and_opens_it(mine, capsys):
    token = a_token(mine)
    with running_server(mine, "--no_job", "--token_file", str(token)) as server:
        assert main(["page"]) == 0
        link = capsys.readouterr().out.strip()
        assert link.startswith(f"{server.url}/open/")
        browser = requests.Session()
        browser.trust_env = False
        assert browser.get(server.url, timeout=30).status_code == 401
        assert browser.get(link, timeout=30).status_code == 200
        page = browser.get(server.url, timeout=30)
        assert "There is no job" in page.text
        assert main(["page", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["url"] != link


def test_several_servers_are_listed_and_one_has_to_be_named(mine, capsys, monkeypatch):
    token = a_token(mine)
    (mine / "one").mkdir()
    (mine / "two").mkdir()
    flags = ("--change_script", "none", "--token_file", str(token))
    with running_server(mine / "one", *flags) as one, running_server(mine / "two", *flags) as two:
        assert main(["status"]) == 0
        header, *rows, _, hint = capsys.readouterr().out.splitlines()
        assert header.split() == ["SERVER", "JOBS", "FOLDER"]
        for server, row in zip((one, two), rows, strict=True):
            assert row.split() == [server.url, "default_job", "RUNNING", str(server.folder)]
        assert "--server URL" in hint
        assert main(["stop", "default_job"]) == 2
        said = capsys.readouterr().err
        assert "2 job servers of yours run here; name one: --server URL" in said
        assert two.url in said
        monkeypatch.setenv("PADDLE_JOBSERVER", two.url)
        assert main(["stop", "default_job"]) == 0
        capsys.readouterr()
        assert main(["status"]) == main(["status", "--server", one.url]) == 0
        states = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
        assert states == ["STATE", "STOPPED", "STATE", "RUNNING"]
        monkeypatch.delenv("PADDLE_JOBSERVER")
        with one.api(token.read_text().strip()) as api:
            for number in range(7):
                api.submit(wire.JobSpec(job_id=f"more{number}", folder="none"))
                api.stop(f"more{number}", discard=True)
            api.submit(wire.JobSpec(job_id="waits", folder="none"))
        assert main(["status"]) == 0
        assert (
            "default_job RUNNING, waits WAITING, more6 STOPPED, more5 STOPPED, more4 STOPPED, "
            "4 more" in capsys.readouterr().out
        )


def test_status_of_one_job_tells_pods_and_stages(run):
    code, out = run("status", "default_job")
    assert code == 0
    for shown in ("state", "pod_0_0", "STAGE", "first start"):
        assert shown in out


def test_json_is_what_the_server_says(run):
    code, out = run("status", "default_job", "--json")
    assert code == 0
    assert wire.decode(wire.JobStatus, json.loads(out)).job_id == "default_job"
    for verb in ("status", "pods", "nodes"):
        assert isinstance(json.loads(run(verb, "--json")[1]), list)
    lines = run("events", "default_job", "--json")[1].splitlines()
    assert json.loads(lines[0])["text"] == "submitted"


def test_capacity_keeps_slots_of_a_node_from_shared_jobs(server, run):
    api = server.api()
    api.register_node(cpu_node("web", job_id=None, folders=("none",), addr="10.1.1.1"))
    assert run("capacity", "web", "--slots", "1") == (0, "web: shared jobs may have 1 of 2 slots\n")
    row = next(line for line in run("nodes")[1].splitlines() if line.startswith("web"))
    assert "1 to share" in row
    assert json.loads(run("capacity", "web", "--slots", "9", "--json")[1])["limit"] == 9
    assert run("capacity", "web", "--slots", "all") == (
        0, "web: shared jobs may have all 2 slots\n",
    )  # fmt: skip
    code, out = run("capacity", "web", "--slots", "-1")
    assert code == 2
    assert "slots: must be between 0 and 4096, got -1" in out
    assert run("capacity", "nowhere", "--slots", "1")[0] == 1
    assert "expected a number or all, got 'few'" in run("capacity", "web", "--slots", "few")[1]


def test_a_drained_node_says_so_until_capacity_gives_it_back(server, run):
    api = server.api()
    api.register_node(cpu_node("gone", job_id=None, folders=("none",), addr="10.1.1.3"))
    code, out = run("drain", "gone", "--wait", "5")
    assert (code, out) == (
        0, "gone: no job has a pod there any more; `edl capacity gone --slots all` ends that\n",
    )  # fmt: skip
    shown = [line for line in run("nodes")[1].splitlines() if line.startswith("gone")]
    assert "0 of 2" in shown[0]
    assert shown[1:] == ["gone: is drained: an operator asked for it (`edl drain`)"]
    code, out = run("capacity", "gone", "--slots", "1")
    assert code == 1
    assert "gone is drained already: an operator asked for it" in out
    assert "`edl capacity gone --slots all` ends an `edl drain`" in out
    assert api.nodes()[-1].draining, "another's limit ends no drain"
    run("capacity", "gone", "--slots", "all")
    assert not [line for line in run("nodes")[1].splitlines() if line.startswith("gone: ")]
    assert run("drain", "nowhere")[0] == 1
    assert run("drill", "gone") == (
        0, "no job has a pod on gone: it would cost nothing\n",
    )  # fmt: skip
    assert api.nodes()[-1].draining == ""
    assert run("drill", "nowhere")[0] == 1


def test_capacity_puts_a_slot_in_quarantine_and_takes_it_back(server, run):
    server.api().register_node(cpu_node("sick", job_id=None, folders=("none",), addr="10.1.1.2"))
    code, out = run("capacity", "sick", "--quarantine", "1")
    assert (code, out) == (0, "sick: slot 1 is in quarantine: its pods leave, and none comes\n")
    shown = [line for line in run("nodes")[1].splitlines() if line.startswith("sick")]
    assert "1 of 2" in shown[0]
    assert shown[1].startswith("sick: slot 1 is in quarantine for ")
    assert run("capacity", "sick", "--take_back", "1") == (0, "sick: slot 1 is used again\n")
    code, out = run("capacity", "sick", "--take_back", "1")
    assert (code, "is not in quarantine" in out) == (1, True)
    for wrong in ((), ("--slots", "1", "--quarantine", "1")):
        code, out = run("capacity", "sick", *wrong)
        assert (code, "give one of --slots N|all" in out) == (2, True)


def test_capacity_waits_until_shared_jobs_have_left_a_node(server, run):
    api = server.api()
    api.register_node(cpu_node("web", job_id=None, folders=("none",), addr="10.1.1.1"))
    assert run("capacity", "web", "--slots", "0", "--wait", "5")[0] == 0  # they have none there


def test_resize_changes_the_pods(run):
    code, out = run("resize", "default_job", "2")
    assert code == 0
    assert "2 pods" in out
    assert len(run("pods", "default_job")[1].splitlines()) == 3  # with the header
    code, out = run("resize", "default_job", "4")
    assert "4 pods" in out


def test_a_dry_run_changes_nothing_and_refuses_what_a_resize_refuses(run):
    before = run("pods", "default_job")[1]
    code, out = run("resize", "default_job", "2", "--dry_run")
    assert code == 0
    assert "nothing can be predicted yet" in out
    assert run("pods", "default_job")[1] == before
    for pods in ("4000", "auto"):
        assert run("resize", "default_job", pods, "--dry_run")[0] != 0


def test_a_job_is_submitted_from_file_and_flags_and_deleted(run, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "job_id: digits\nmax_pods: 3\nmax_failures: null\nscript: {kind: walk, interval_s: 5}\n"
    )
    code, out = run(
        "submit", "--file", str(job), "--min", "2", "--max_resizes", "none", "--take_over", "--json"
    )
    assert code == 0, out
    spec = wire.decode(wire.JobStatus, json.loads(out)).spec
    assert (spec.job_id, spec.min_pods, spec.max_pods) == ("digits", 2, 3)
    assert spec.script == wire.ScriptSpec(kind=wire.ScriptKind.WALK, interval_s=5)
    assert spec.max_failures is None
    assert spec.max_resizes is None
    assert spec.take_over
    code, out = run("submit", "--job_id", "digits", "--max", "9")
    assert code == 1
    assert "another spec" in out
    assert run("stop", "digits")[0] == 0
    assert run("delete", "digits")[0] == 0
    code, out = run("status", "digits")
    assert code == 1
    assert "digits" in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("job_id: [", "line 1", id="broken"),
        pytest.param("- 1", "expected fields", id="a list"),
        pytest.param("job_id: a\nmax_pod: 3", "unknown key 'max_pod'", id="unknown key"),
        pytest.param("job_id: a\nscript: {text: x, knd: y}", "'script.knd'", id="in the script"),
        pytest.param("job_id: a\nscript: walk", "script: expected fields", id="script is a word"),
        pytest.param("job_id: a\nmax_pods: many", "max_pods: expected int", id="wrong type"),
        pytest.param("max_pods: 3", "--job_id: missing", id="no name"),
    ],
)
def test_a_wrong_job_file_is_refused_with_exit_code_2(run, tmp_path, text, says):
    job = tmp_path / "job.yaml"
    job.write_text(text)
    code, out = run("submit", "--file", str(job))
    assert code == 2
    assert says in out


def test_what_the_server_refuses_is_exit_code_1(run):
    for args in (("resume", "default_job"), ("pause", "nobody"), ("kill", "nobody", "0")):
        code, out = run(*args)
        assert code == 1
        assert out.startswith("edl: ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(("resize", "default_job", "many"), "many", id="no number"),
        pytest.param(("resize", "default_job", "0"), "pods: must be between", id="no pods"),
        pytest.param(("kill", "default_job", "../x"), "not an id", id="a path"),
        pytest.param(("status", "--unknown"), "--unknown", id="unknown flag"),
        pytest.param(("logs", "default_job", "pod_9_9"), "has no pod pod_9_9", id="unknown pod"),
        pytest.param(("logs", "default_job", "--lines", "-1"), "--lines", id="negative lines"),
        pytest.param(("submit", "--file", "/no/such/file"), "cannot be read", id="no file"),
        pytest.param(
            ("submit", "--job_id", "x", "--change_script", "x.txt"), "x.txt", id="no script"
        ),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(run, args, says):
    code, out = run(*args)
    assert code == 2
    assert says in out


def test_an_absent_server_is_said_with_the_remedy(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["status", "--server", url]) == 1
    err = capsys.readouterr().err
    assert url in err
    assert "--server" in err
    assert main(["status", "--server", "http://box/path"]) == 2


def test_the_server_is_found_by_the_environment(server, capsys, monkeypatch):
    monkeypatch.setenv("PADDLE_JOBSERVER", server.url.removeprefix("http://"))
    assert main(["status"]) == 0
    assert "default_job" in capsys.readouterr().out


def test_simulate_needs_no_server(capsys, tmp_path):
    script = tmp_path / "script.yaml"
    script.write_text("- {at: 1m, remove: 1}\n- {at: 2m, kill: 0}\n")
    assert main(["simulate", "--max", "4", "--change_script", str(script)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0:00:00  start with 4 pods",
        "0:01:00  remove 1 pod: 4 -> 3 pods",
        "0:02:00  kill rank 0: 3 pods",
    ]
    assert main(["simulate", "--change_script", "walk"]) == 2  # one pod has nowhere to go
    assert main(["simulate", "--change_script", "alternate", "--max", "2", "--json"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("flag", ["--load", "--sigma", "--start_cost_s", "--change_cost_s"])
@pytest.mark.parametrize("text", ["nan", "inf", "-1"])
def test_simulate_takes_amounts_that_are_numbers(capsys, flag, text):
    assert main(["simulate", "--nodes", "2x2", "--synthetic", "5", f"{flag}={text}"]) == 2
    assert f"{flag}: expected a number of 0 or more, got '{text}'" in capsys.readouterr().err


def test_events_are_followed_until_the_job_ends(server, capsys):
    with server.api() as api:
        api.submit(wire.JobSpec(job_id="followed"))
        follow = InThread(lambda: main(["events", "followed", "--follow", "--server", server.url]))
        api.stop("followed")
        assert follow.result() == 0
        texts = [event.text for event in api.events("followed")]
        out = capsys.readouterr().out
        for text in texts:
            assert text in out
        follow = InThread(lambda: main(["status", "followed", "--follow", "--server", server.url]))
        assert follow.result() == 0
        api.delete("followed")


@pytest.mark.parametrize("flag", ["--follow", "--json"])
def test_a_status_that_is_followed_into_a_file_has_a_line_only_for_what_it_shows(
    server, capsys, monkeypatch, flag: str
):
    with server.api() as api:
        first = api.submit(wire.JobSpec(job_id="followed"))
        api.delete("followed")
    ended = {"revision": first.revision + 3, "state": wire.JobState.STOPPED}
    later = [replace(first, revision=first.revision + 1), replace(first, **ended)]
    monkeypatch.setattr(ApiClient, "status", lambda *_args: first)
    monkeypatch.setattr(ApiClient, "watch", lambda *_args: later.pop(0))
    assert main(["status", "followed", "--follow", flag, "--server", server.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == (3 if flag == "--json" else 2)


@pytest.mark.parametrize("verb", ["events", "status"])
def test_what_is_followed_is_followed_on_once_the_server_is_back(tmp_path, capsys, verb):
    with running_server(tmp_path, "--no_job") as server:
        with server.api() as api:
            api.submit(wire.JobSpec(job_id="followed"))
        follow = InThread(lambda: main([verb, "followed", "--follow", "--server", server.url]))
        wait_until(lambda: "no job client serves" in capsys.readouterr().out)
        server.kill()
        server.start()
        with server.api() as api:
            api.stop("followed")
        assert follow.result() == 0
    assert "STOPPED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [["stop", "followed"], ["delete", "followed"], ["drain", "node-a", "--wait", "60"]],
    ids=lambda words: words[0],
)
def test_an_end_is_waited_for_while_the_server_is_started_again(tmp_path, capsys, command):
    with running_server(tmp_path, "--no_job", "--heartbeat_s", "60") as server:
        with server.api() as api:
            api.submit(wire.JobSpec(job_id="followed", grace_s=60))
            api.register_node(cpu_node(job_id="followed"))
            wait_until(lambda: api.node_plan("node-a").pods)
            before = api.node_plan("node-a").pods
        end = InThread(lambda: main([*command, "--server", server.url]))
        with server.api() as api:
            wait_until(lambda: api.node_plan("node-a").pods != before)
        server.kill()
        server.start()
        with server.api() as api:
            api.register_node(cpu_node(job_id="followed"))
            api.node_report(wire.NodeReport(node_id="node-a"))
        assert end.result() == 0, capsys.readouterr().err


def test_who_follows_what_was_never_there_is_told_at_once(monkeypatch, capsys):
    monkeypatch.setattr(commands, "PATIENCE_S", 3600.0)
    for verb in ("events", "logs", "status"):
        assert main([verb, "j", "--follow", "--server", f"127.0.0.1:{free_port()}"]) != 0
    assert "--server" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_followed_job_is_one_line_for_each_state(server, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with server.api() as api:
        api.submit(wire.JobSpec(job_id="painted", max_pods=3))
        follow = InThread(lambda: main(["status", "painted", "--follow", "--server", server.url]))
        wait_until(lambda: "painted: WAITING" in terminal.getvalue())
        for pods in (3, 2, 1):  # no other state: the line is painted again
            api.resize("painted", pods)
        api.stop("painted")
        assert follow.result() == 0
        api.delete("painted")
    *lines, end = terminal.getvalue().split("\n")
    assert end == ""
    assert all(line.startswith("\r\x1b[K") for line in lines)
    states = [line.rpartition("\r")[2] for line in lines]
    assert len(states) == len(set(states))
    assert "STOPPED" in states[-1]


@pytest.mark.parametrize(
    ("left", "is_shown"),
    [
        ({}, True),
        ({"submitted_at": 0.0}, True),  # by a client of the version before
        ({"submitted_at": 5.0}, False),  # an earlier job of that name
        ({"job_id": "other"}, False),
        ({"pod_id": "pod_0_0"}, False),
        (None, False),  # nobody knows whose it is
    ],
)
def test_a_log_that_an_earlier_pod_has_left_here_is_not_taken_for_that_of_a_pod_elsewhere(
    left, is_shown, tmp_path
):
    log = tmp_path / "log"
    log.write_text("epoch 90\n")
    mine: Any = {"pod_id": "pod_1_0", "job_id": "job", "submitted_at": 1000.0, **(left or {})}
    known = wire.NodePod(slots=(0,), want=wire.DesiredState.RUN, **mine)
    if left is not None:
        (tmp_path / "pod.json").write_text(json.dumps(wire.encode(known)))
    made = trains(world())
    status = made.status
    (pod,) = (replace(pod, log_path=str(log)) for pod in status.pods if pod.pod_id == "pod_1_0")
    status = replace(status, pods=(pod,))
    assert status.submitted_at == 1000.0
    api: Any = SimpleNamespace(status=lambda _job_id: status)
    said = list(log_lines(api, "job", [], follow=False, lines=20))
    elsewhere = f"[pod_1_0] not on this machine: {log} on node {pod.node_id} ({pod.addr})"
    assert said == (["epoch 90"] if is_shown else [elsewhere])


def _bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_end_of_a_log_of_a_progress_bar_is_found_at_once(tmp_path):
    bar = "".join(f"\r{number:<99}" for number in range(300_000))
    (tmp_path / "log").write_text(f"epoch 1\n{bar}")
    mine = wire.NodePod(pod_id="pod_0_0", job_id="job", slots=(0,), want=wire.DesiredState.RUN)
    (tmp_path / "pod.json").write_text(json.dumps(wire.encode(mine)))
    status = trains(world()).status
    pod = replace(status.pods[0], pod_id="pod_0_0", log_path=str(tmp_path / "log"))
    api: Any = SimpleNamespace(status=lambda _job_id: replace(status, pods=(pod,)))
    before = _bytes_read()
    said = list(log_lines(api, "job", [], follow=False, lines=2))
    assert _bytes_read() - before < 4 * len(bar)  # block by block it was some hundred times that
    assert [line.split() for line in said] == [["299998", "299999"]]


def test_logs_of_pods_on_this_machine_are_printed(server, capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)) + "no end yet")
    mine = wire.NodePod(pod_id="pod_0_0", job_id="logged", slots=(0,), want=wire.DesiredState.RUN)
    (tmp_path / "pod.json").write_text(json.dumps(wire.encode(mine)))
    with server.api() as api:
        api.submit(wire.JobSpec(job_id="by_name", folder="f", max_pods=2))
        assert main(["logs", "by_name", "--server", server.url]) == 0
        assert "nodes: pods/by_name/*/log in the --log_dir" in capsys.readouterr().out
        api.delete("by_name")
        api.submit(wire.JobSpec(job_id="logged", max_pods=2))
        assert main(["logs", "logged", "--server", server.url]) == 0
        said = capsys.readouterr().out
        assert "has no pods now; what earlier ones wrote is on their nodes: pods/*/log in" in said
        api.register_node(cpu_node("node-l", job_id="logged", addr="192.0.2.9"))

        def report(phase: wire.PodPhase, other: str = "/far/away/log") -> None:
            code = 0 if phase is wire.PodPhase.EXITED else None
            pods = tuple(
                wire.PodState(
                    pod_id=pod_id, job_id="logged", phase=phase, exit_code=code, log_path=path
                )
                for pod_id, path in (("pod_0_0", str(log)), ("pod_1_0", other))
            )
            api.node_report(wire.NodeReport(node_id="node-l", pods=pods))

        report(wire.PodPhase.RUNNING)
        assert main(["logs", "logged", "--lines", "3", "--server", server.url]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out == [
            "[pod_1_0] not on this machine: /far/away/log on node node-l (192.0.2.9)",
            "line 98",
            "line 99",
            "no end yet",
        ]
        unreadable = "/" + 300 * "x"  # as a folder that this user may not enter
        report(wire.PodPhase.RUNNING, unreadable)
        assert main(["logs", "logged", "--lines", "1", "--server", server.url]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"[pod_1_0] {unreadable} cannot be read: File name too long",
            "no end yet",
        ]
        report(wire.PodPhase.RUNNING)
        follow = InThread(
            lambda: main(["logs", "logged", "pod_0_0", "--follow", "--server", server.url])
        )
        printed: list[str] = []

        def has(text: str) -> bool:
            printed.append(capsys.readouterr().out)
            return text in "".join(printed)

        wait_until(lambda: has("line 99"))
        with log.open("a") as file:
            file.write(", now it has\n")
        wait_until(lambda: has("no end yet, now it has"))
        api.delete("logged")
        report(wire.PodPhase.EXITED)
        api.node_report(wire.NodeReport(node_id="node-l", leaving=True))
        assert follow.result() in (0, 1)  # ended, or forgotten by then


def test_a_job_that_has_ended_is_not_said_to_be_submitted(run):
    assert run("submit", "--job_id", "over")[0] == 0
    assert run("submit", "--job_id", "over")[0] == 0  # it is there: no error
    assert run("stop", "over")[0] == 0
    lines = run("status", "over")[1].splitlines()
    assert next(line for line in lines if line.startswith("state")).count("STOPPED") == 1
    code, out = run("submit", "--job_id", "over")
    assert code == 1
    assert "over has ended (STOPPED) and stays so; `edl delete over` first, or" in out
    code, out = run("resume", "over")
    assert (code, "has ended (STOPPED); `edl delete over`, then submit it again" in out) == (
        1,
        True,
    )
    code, out = run("delete", "over")
    assert (code, out.splitlines()[-1]) == (0, "over: deleted")
    assert run("submit", "--job_id", "over")[0] == 0
    assert run("stop", "over")[0] == 0
    assert json.loads(run("delete", "over", "--json")[1]) == {"deleted": "over"}


def test_a_job_that_is_being_stopped_is_not_said_to_be_submitted(server, run):
    assert run("submit", "--job_id", "going")[0] == 0
    with server.api() as api:
        api.register_node(cpu_node("node-g", job_id="going", port_low=23200, port_high=23299))
        pod = wire.PodState(pod_id="pod_0_0", job_id="going", phase=wire.PodPhase.RUNNING)
        api.node_report(wire.NodeReport(node_id="node-g", pods=(pod,)))
        api.stop("going")
        assert api.status("going").state is wire.JobState.STOPPING
        code, out = run("submit", "--job_id", "going")
        assert code == 1
        assert "going is being stopped, and ends; `edl delete going`, and submit it again" in out
        api.delete("going")
        code, out = run("submit", "--job_id", "going")
        assert (code, "'going' is being deleted; submit it again once it is gone" in out) == (
            1,
            True,
        )
        api.node_report(wire.NodeReport(node_id="node-g"))
        assert run("submit", "--job_id", "going")[0] == 0
        api.delete("going")
        api.node_report(wire.NodeReport(node_id="node-g", leaving=True))


def test_what_a_script_wrote_does_not_move_the_cursor(server, run):
    with server.api() as api:
        api.submit(wire.JobSpec(job_id="colourful", max_failures=0))
        api.register_node(cpu_node("node-c", job_id="colourful", port_low=23000, port_high=23099))
        state = wire.PodState(
            pod_id="pod_0_0",
            job_id="colourful",
            phase=wire.PodPhase.EXITED,
            exit_code=1,
            last_lines=("45 %\r\x1b[2A\x1b[31m46 %",),
        )
        api.node_report(wire.NodeReport(node_id="node-c", pods=(state,)))
        for command in ("events", "status", "explain", "resize 1"):
            verb, *more = command.split()
            _, out = run(verb, "colourful", *more)
            if verb != "resize":
                assert r"45 %\x0d\x1b[2A\x1b[31m46 %" in out, out
            assert set("\r\x1b").isdisjoint(out), out
        api.node_report(wire.NodeReport(node_id="node-c", leaving=True))
        api.delete("colourful")


def test_edl_lists_what_exists_and_nothing_else(capsys):
    assert edl(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("server", "status", "resize", "simulate"):
        assert f"\n  {verb} " in out
    assert edl(["--version"]) == 0
    assert importlib.metadata.version("edl") in capsys.readouterr().out
    assert edl([]) == 2
    assert edl(["fly"]) == 2
    assert "'fly'" in capsys.readouterr().err


def test_edl_has_every_command_of_the_server():
    verbs = re.findall(r"^    (\w+)", commands.build_parser().format_help(), re.M)
    assert "status" in verbs
    assert set(verbs) <= set(VERBS)


def test_edl_does_not_list_an_absent_verb(capsys, monkeypatch):
    monkeypatch.setitem(VERBS, "fly", ("job_server.fly", "leave the ground"))
    assert edl(["--help"]) == 0
    assert "leave the ground" not in capsys.readouterr().out
    assert edl(["fly"]) == 2


@pytest.mark.parametrize(
    ("typed", "meant"), [("staus", "status"), ("Resize", "resize"), ("paus", "pause")]
)
def test_a_verb_that_is_nearly_one_is_told(capsys, typed, meant):
    assert edl([typed]) == 2
    assert f"there is no verb {typed!r}; did you mean {meant!r}?" in capsys.readouterr().err


def test_a_verb_that_is_like_none_is_refused_without_a_guess(capsys):
    assert edl(["xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_edl_passes_on_to_the_programs(server, capsys):
    assert edl(["status", "--server", server.url]) == 0
    assert "default_job" in capsys.readouterr().out
    assert edl(["server", "--dry_run", "--pod_num_of_node", "2"]) == 0
    assert "0:15:00  remove 1 pod" in capsys.readouterr().out


class SimulatedApi:
    """The API of a job in a simulated cluster, in which time passes while somebody watches."""

    def __init__(self, made: World) -> None:
        self.made = made

    def _status(self) -> wire.JobStatus:
        return views.job_status(self.made.job, self.made.now, 0)

    def pause(self, _job_id: str) -> wire.JobStatus:
        self.made.pause()
        return self._status()

    def stop(self, _job_id: str, *, discard: bool) -> wire.JobStatus:
        self.made.stop(discard=discard)
        return self._status()

    delete = stop

    def watch(self, *_args: object) -> wire.JobStatus:
        self.made.round()
        return self._status()

    def events(self, _job_id: str, *, after: int, limit: int) -> tuple[wire.JobEvent, ...]:
        del limit
        return tuple(
            wire.JobEvent(number=number, at=0.0, job_id="job", stage=1, text=text)
            for number, text in enumerate(self.made.reasons, 1)
            if number > after
        )


@pytest.mark.parametrize(
    ("command", "full", "code", "says"),
    [
        (["pause", "job"], False, 0, ["writing step 9: ", "step 9 is in /shared/checkpoint"]),
        (["pause", "job"], True, 1, ["not paused: the state of step 9", "No space left"]),
        (["stop", "job"], False, 0, ["STOPPED", "/shared/checkpoint"]),
        (["stop", "job", "--discard"], True, 0, ["is lost: its state was not written", "STOPPED"]),
        (["delete", "job", "--discard"], True, 0, ["STOPPED"]),
    ],
)
def test_who_pauses_or_ends_a_job_sees_how_far_that_is_and_where_its_state_is(
    monkeypatch, capsys, command, full, code, says
):
    made = trains(world())
    if full:
        made.full = {"path", "a", "b"}
    monkeypatch.setattr(commands, "connect", lambda *_: contextlib.nullcontext(SimulatedApi(made)))
    assert main([*command, "--server", "http://127.0.0.1:1"]) == code
    out, err = capsys.readouterr()
    for text in says:
        assert text in out + err, out + err


def test_a_job_of_a_file_shares_the_cluster_and_is_explained(run, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("name: mine\nfolder: digits\nshare: true\nmin: 2\nmax: 4\npriority: 3\n")
    code, out = run("submit", str(job))
    assert code == 0, out
    assert "`edl explain mine` says when it starts, and why" in out
    code, out = run("queue")
    assert code == 0
    assert out.splitlines()[1].split()[:5] == ["mine", "3", "WAITING", "0", "(2"]
    code, out = run("explain", "mine")
    assert code == 0
    assert "no node that can be reached has a folder 'digits' for it" in out
    code, out = run("explain", "mine", "--json")
    assert json.loads(out)["starts_in_s"] is None
    assert json.loads(run("queue", "--json")[1])["jobs"][0]["priority"] == 3
    assert "default_job does not share the cluster" in run("explain", "default_job")[1]
    assert run("delete", "mine", "--discard")[0] == 0
    assert "mine" in run("explain", "mine")[1]
    code, out = run("submit", str(job), "--file", str(job))
    assert code == 2
    assert "is named as well; give one file" in out


def test_logs_are_text(run, server):
    assert run("logs", "--json")[0] == 2


def test_top_prints_the_collectors_lines(run, server, capsys):
    code, out = run("top", "--lines", "--count", "2", "--interval_s", "0.1")
    assert code == 0
    header, first, second = out.splitlines()
    assert header.split()[0] == "SUBMITTED-JOBS"
    assert first.split()[:3] == second.split()[:3] == ["1", "0", "default_job:8"]
    code, out = run("top", "--json", "--count", "1")
    assert json.loads(out)["running"] == {"default_job": 8}
    assert run("top", "--count", "0")[0] == 2
    assert collector.main(["--server", server.url, "--count", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "1"


def test_top_paints_a_terminal(server, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["top", "--server", server.url, "--count", "1"]) == 0
    assert terminal.getvalue().startswith("\x1b[H")
    assert server.url in terminal.getvalue()
    assert "no job shares the cluster" in terminal.getvalue()
