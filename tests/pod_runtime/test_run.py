"""`edl run` as a user starts it: real server, real client, real pods, a toy as trainer."""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from job_server.api.api_client import ApiClient, Unauthorized
from job_server.api.wire import JobState
from pod_runtime import processes
from pod_runtime.errors import LaunchError
from pod_runtime.local import session as run_session
from pod_runtime.run import count_gpus, read_config, train_sh
from pod_runtime.shim_wire import lock_folder
from tests import stranger
from tests.disks import small_disk
from tests.job_client.test_saving import hold, places
from tests.job_server.world import trains, world
from tests.support import ROOT, free_port, wait_until

TOY = str(Path(__file__).with_name("toy_trainer.py"))
MARK = "EDL_TEST_RUN"


def carrying(mark: str) -> list[int]:
    return [
        pid
        for pid in processes.find_marked(MARK, mark)
        if (process := processes.read(pid)) is not None and process.state != "Z"
    ]


class Run:
    def __init__(self, folder: Path, argv: tuple[str, ...], output: int | None = None) -> None:
        self.mark = str(folder)
        self.log = folder / "console"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pod_runtime.run", *argv],
                cwd=folder,
                env={**os.environ, MARK: self.mark},
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
            )

    def console(self) -> str:
        return self.log.read_text()

    def child(self, module: str) -> int:
        """The pid of the server or client of this run."""
        for pid in carrying(self.mark):
            with contextlib.suppress(OSError):  # it has just ended
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if line.startswith(f"{sys.executable}\0-m\0{module}\0".encode()):
                    return pid
        raise AssertionError(f"no {module} runs")

    def url(self) -> str:
        """Of its server; waits until it trains."""
        wait_until(lambda: "[rank 0]" in self.console(), what="training")
        found = re.search(r"edl: watch it at (\S+)/\n", self.console())
        assert found is not None
        return found[1]

    def left(self) -> list[int]:
        return [pid for pid in carrying(self.mark) if pid != self.process.pid]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*argv: str, output: int | None = None) -> Run:
        started.append(Run(tmp_path, argv, output))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        processes.kill_marked(MARK, each.mark, lambda _pid, _env: False)


def test_a_training_succeeds_and_leaves_its_logs_and_no_process(run, tmp_path):
    job = run("--max", "2", "--cpu_slots", "2", TOY, "--steps", "40", "--print", 'it\'s "me" $1')
    assert job.process.wait(60) == 0
    console = job.console()
    assert '[rank 0] it\'s "me" $1\n' in console
    assert '[rank 1] it\'s "me" $1\n' in console
    assert "edl: SUCCEEDED after step 40 (train_loss 0.5), " in console
    assert not job.left()
    folder = (tmp_path / "edl_run" / "latest").resolve()
    assert {"trainer_0.stage_1.log", "trainer_1.stage_1.log"} <= {
        path.name for path in (folder / "trainers").iterdir()
    }


def test_a_run_beside_another_users_latest_one_begins_all_the_same(run, tmp_path):
    (tmp_path / "latest").mkdir()  # as little to be replaced as a link in a sticky folder
    job = run("--log_dir", ".", "--max", "1", "--cpu_slots", "1", TOY, "--steps", "5")
    assert job.process.wait(60) == 0
    assert f"edl: {tmp_path}/latest does not lead there: Is a directory\n" in job.console()
    assert not list(tmp_path.glob(".latest*"))


@pytest.mark.parametrize(
    ("more", "env"),
    [
        pytest.param(" <&- >&- 2>&-", {}, id="closed streams"),
        pytest.param("", {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, id="no UTF-8"),
    ],
)
def test_a_run_needs_neither_streams_nor_a_locale(tmp_path, more: str, env: dict[str, str]):
    script = tmp_path / "größe.py"
    shutil.copy(TOY, script)
    args = f"-m edl run --max 1 --cpu_slots 1 {script} --steps 5 --print größer"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONCOERCECLOCALE": "0", **env}
    line = f"exec {sys.executable} {args}{more}"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, timeout=120).returncode == 0
    (log,) = (tmp_path / "edl_run" / "latest" / "trainers").glob("trainer_0*.log")
    assert "größer" in log.read_text("utf-8")


def test_the_folder_of_a_run_that_goes_on_has_a_lock_which_cleaners_heed(run, tmp_path):
    job = run("--max", "1", "--cpu_slots", "1", TOY)
    job.url()
    folder = (tmp_path / "edl_run" / "latest").resolve()
    assert lock_folder(folder) is None
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == 130
    lock = lock_folder(folder)
    assert lock is not None
    os.close(lock)


def test_a_training_needs_few_open_files(run):
    job = run("--cpu_slots", "2", TOY, "--steps", "40")
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (512, 512))  # it starts still
    assert job.process.wait(60) == 0


def a_jobs_state(url: str, token: str | None) -> str:
    with ApiClient(url, token) as api:
        return api.status("run").state.value


def test_runs_that_start_at_once_do_not_choose_one_port():
    """Their servers open it later: that it is free now says nothing."""
    ports = [free_port(), free_port()]
    first, claim = run_session.claim_port(ports)
    second, other = run_session.claim_port(ports)
    with claim, other, pytest.raises(LaunchError, match="no free port"):
        run_session.claim_port(ports)
    assert [first, second] == ports


@stranger.needs_root
def test_another_user_of_this_machine_can_neither_see_nor_stop_the_job(run, tmp_path):
    job = run("--cpu_slots", "1", TOY)
    url, latest = job.url(), (tmp_path / "edl_run" / "latest").resolve()
    for method, path in (
        ("GET", "/"), ("GET", "/api/v1/jobs"), ("POST", "/api/v1/jobs/run/stop"),
        ("DELETE", "/api/v1/jobs/run"), ("POST", "/api/v1/nodes"),
    ):  # fmt: skip
        assert stranger.asks(method, url + path) == 401, path
    link = re.search(r"once, by (\S+) ", job.console())
    assert link is not None
    assert requests.get(link[1], timeout=30).status_code == 200
    assert stranger.asks("GET", link[1]) == 401, "it was used"
    for made in (latest / "token", *latest.glob("client/token")):
        assert made.stat().st_mode & 0o777 == 0o600
        assert stranger.reads(made) == "PermissionError"
    assert a_jobs_state(url, (latest / "token").read_text().strip()) == "RUNNING"


def test_a_token_of_the_users_own_is_that_of_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_TOKEN", "correct-horse")
    job = run("--cpu_slots", "1", TOY)
    assert a_jobs_state(job.url(), "correct-horse") == "RUNNING"
    with pytest.raises(Unauthorized):
        a_jobs_state(job.url(), None)


FAILS = {  # script; how its error is shown; stages; lines of all that is printed
    "syntax": ("def f(:\n", "train.py:1: SyntaxError: invalid syntax; rank ", 1, 17),
    "usage": (
        "from pod_runtime.trainer.errors import UsageError\nraise UsageError('epochs: 0')\n",
        "train.py:2: UsageError: epochs: 0; rank ",
        1,
        17,
    ),
    "twice": ("raise RuntimeError('boom')\n", "train.py:1: RuntimeError: boom; rank ", 2, 21),
}


@pytest.mark.parametrize("name", FAILS)
def test_an_error_that_cannot_go_away_is_final_and_told_once(run, tmp_path, name):
    text, reason, stages, most = FAILS[name]
    (tmp_path / "train.py").write_text(text)
    job = run("--max", "2", "--pods", "2", "--cpu_slots", "2", "train.py")
    assert job.process.wait(60) == 1
    console = job.console()
    lines = [line for line in console.splitlines() if "warning: node" not in line]  # of its memory
    assert len(lines) <= most, console
    shown = [line for line in lines if line.startswith(f"edl: {reason}")]
    assert len(shown) == 1, console
    word = "stage" if stages == 1 else "stages"
    assert f"edl: FAILED after step 0, {stages} {word} and " in console
    assert console.count("Traceback (most recent") == (name in ("usage", "twice")), console
    assert not job.left()


def test_a_failure_policy_of_ones_own_decides_by_what_the_log_says(run, tmp_path):
    (tmp_path / "policy.yaml").write_text(
        "- {name: the disk is gone, exit_code: 5, log: 'sd[a-z] is gone', then: fail}\n"
    )
    (tmp_path / "train.py").write_text(
        "import os\nprint('disk sdb is gone\\nbye', flush=True)\nos._exit(5)\n"
    )
    flags = ("--cpu_slots", "1", "--max", "1", "--failure_policy", "policy.yaml")
    job = run(*flags, "train.py")
    assert job.process.wait(60) == 1
    console = job.console()
    assert "edl: exited with 5: bye; rank 0 (pod_0_0), not tried again: the disk is gone" in console
    assert "edl: FAILED after step 0, 1 stage and " in console
    assert not job.left()


def test_a_trainer_that_fails_on_a_slot_goes_on_on_another_one(run, tmp_path):
    (tmp_path / "policy.yaml").write_text(
        "- {exit_code: 5, then: restart_elsewhere}\n- {exit_code: 6, then: quarantine}\n"
    )
    (tmp_path / "train.py").write_text(
        "import os, pathlib\n"
        "slot = os.environ['EDL_SLOTS']\n"
        "with pathlib.Path('slots').open('a') as file:\n    print(slot, file=file)\n"
        "os._exit({'0': 5, '1': 6}.get(slot, 0))\n"
    )
    flags = ("--cpu_slots", "3", "--max", "1", "--failure_policy", "policy.yaml")
    job = run(*flags, "train.py")
    assert job.process.wait(60) == 0, job.console()
    assert (tmp_path / "slots").read_text().split() == ["0", "1", "2"]
    assert not job.left()


def test_of_a_trainer_that_was_killed_the_end_of_its_output_is_shown_again(run, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\nprint('about to go', flush=True)\nos.kill(os.getpid(), 11)\n"
    )
    job = run("--max_failures", "0", "--cpu_slots", "1", "--max", "1", "train.py")
    assert job.process.wait(60) == 1
    console = job.console()
    assert "edl: failed more than 0 times (max_failures); the last time: rank 0" in console
    assert re.search(r"edl: the end of \S+/trainer_0.stage_1.log:\n  about to go\n", console)
    assert not job.left()


@pytest.mark.parametrize("program", ["job_server", "job_client"])
def test_a_killed_server_or_client_comes_back_and_the_training_ends_well(run, program, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    flags = ("--steps", "100", "--hold", str(hold))
    job = run("--cpu_slots", "1", "--heartbeat_s", "0.3", TOY, *flags)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    first = job.child(program)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "was started again" in job.console())
    hold.unlink()
    assert job.process.wait(60) == 0
    assert not job.left()


def test_a_server_that_cannot_be_started_again_ends_the_pods_in_order(run, tmp_path):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    server, latest = job.child("job_server"), (tmp_path / "edl_run" / "latest").resolve()
    job.process.send_signal(signal.SIGSTOP)
    os.kill(server, signal.SIGKILL)
    for path in latest.glob("server.db*"):
        path.write_text("no database any more")
    job.process.send_signal(signal.SIGCONT)
    assert job.process.wait(180) == 1
    assert "writes their newest state" in job.console()
    assert "the job server has ended with 2" in job.console()
    said = (latest / "client" / "job_client.log").read_text()
    assert "pod pod_0_0: stop, grace 2 s" in said
    assert said.endswith("job_client.agent: ended\n")
    assert not job.left()


def break_client(job: Run, folder: Path) -> None:
    """Kill the client of a run, which cannot be started again."""
    client, lock = job.child("job_client"), folder / "client" / "lock"
    job.process.send_signal(signal.SIGSTOP)
    os.kill(client, signal.SIGKILL)
    lock.unlink()
    lock.mkdir()
    job.process.send_signal(signal.SIGCONT)


def test_a_client_that_cannot_be_started_again_takes_no_state_with_it(run, tmp_path):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    folder = (tmp_path / "edl_run" / "latest").resolve()
    hold(folder / "client" / "pods" / "pod_0_0", places(tmp_path))
    break_client(job, folder)
    assert job.process.wait(120) == 1
    goes_on = f"the same command goes on at step 13, from {tmp_path}/checkpoint\n"
    assert goes_on in job.console()
    assert "the job client has ended with " in job.console()
    assert not job.left()


def test_ctrl_c_ends_at_once_what_is_done_without_a_client(run, tmp_path):
    job = run("--cpu_slots", "1", "--grace_s", "60", TOY, "--ignore_sigterm")
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    break_client(job, (tmp_path / "edl_run" / "latest").resolve())
    wait_until(lambda: "no job client is left" in job.console(), 60)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(120) == 1
    assert not job.left()


def test_ctrl_c_stops_the_job_in_order_and_leaves_the_page(run, tmp_path):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    assert "stopping the job" in job.console()
    assert not job.left()
    page = (tmp_path / "edl_run" / "latest" / "status.html").read_text()
    assert "STOPPED" in page
    assert "http-equiv" not in page


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of runs."""
    with small_disk(tmp_path / "edl_run", "6m") as folder:
        yield folder


def test_a_run_on_a_full_disk_that_gets_sigterm_has_its_state_written_at_once(full_disk, run):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    with contextlib.suppress(OSError), (full_disk / "filler").open("wb", 0) as filler:
        while True:
            filler.write(bytes(4096))
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(120) == 1
    assert "the job client ends the pods, and writes their newest state" in job.console()
    assert "the job cannot be stopped in order" in job.console()
    assert not job.left()


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    job.process.send_signal(signal.SIGHUP)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    assert "ends it at once" in job.console()  # so the SIGINT was the first that counted
    assert "ended at once" not in job.console()


def test_ctrl_c_before_the_job_is_there_ends_the_run(run):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    wait_until(lambda: "logs and state in" in job.console(), what="the beginning")
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    assert not job.left()


def test_a_job_that_was_deleted_ends_the_run(run):
    job = run("--cpu_slots", "1", "--grace_s", "2", TOY)
    url = job.url()
    token = next(Path(job.log.parent).glob("edl_run/*/token")).read_text().strip()
    job.process.send_signal(signal.SIGSTOP)  # else it may still see that the job has ended
    with ApiClient(url, token) as api:
        (status,) = api.jobs()
        api.delete(status.job_id)
        wait_until(lambda: not api.jobs(), what="the end")
    job.process.send_signal(signal.SIGCONT)
    assert job.process.wait(60) == 1
    assert "the job was deleted" in job.console()
    assert not job.left()


def test_a_run_that_nobody_listens_to_any_more_stops_the_job_in_order(run, tmp_path):
    read, write = os.pipe()
    with os.fdopen(read) as console:  # as a `| tee log` that ends with its terminal
        job = run("--cpu_slots", "1", "--grace_s", "2", TOY, output=write)
        os.close(write)
        while "[rank 0] welcome" not in console.readline():
            pass
    os.kill(job.child("job_server"), signal.SIGKILL)  # something is to be said
    assert job.process.wait(180) == 130
    assert not job.left()
    assert "STOPPED" in (tmp_path / "edl_run" / "latest" / "status.html").read_text()


def test_a_second_ctrl_c_kills_and_leaves_nothing(run):
    job = run("--cpu_slots", "1", "--grace_s", "600", TOY, "--plain", "600", "--ignore_sigterm")
    wait_until(lambda: "[rank 0] plain" in job.console(), what="training")
    job.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping the job" in job.console())
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    assert not job.left()


def test_a_killed_edl_run_takes_everything_with_it(run):
    job = run("--cpu_slots", "1", "--grace_s", "1", TOY)
    wait_until(lambda: "[rank 0] welcome" in job.console(), what="training")
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not job.left(), what="nothing is left")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["missing.py"], "missing.py does not exist"),
        ([300 * "x"], "xxx: File name too long"),
        (["--max", "1", "--min", "2", TOY], "--max: 1 is less than --min, 2"),
        (["--min", "0", TOY], "--min: must be between"),
        (["--pods", "5", "--max", "4", TOY], "--pods: 5 is not between 1 (--min) and 4 (--max)"),
        (["--cpu_slots", "2", "--min", "3", TOY], "do not fit into 2 slots"),
        (["--cpu_slots", "0", TOY], "--cpu_slots: must be between"),
        (["--change_script", "x.txt", TOY], "--change_script: 'x.txt'"),
        (["--change_script", "no.yaml", TOY], "no.yaml cannot be read"),
        (["--failure_policy", "p.yaml", TOY], "--failure_policy: p.yaml cannot be read: "),
        (["--job_id", "../x", TOY], "job_id: '../x' is not an id"),
        (["--share", "--pods", "1", TOY], "pods: the server chooses how many pods a shared job"),
        (["--share", "--change_script", "walk", TOY], "script: the server chooses how many pods"),
        (["--cpu", "1", TOY], "cpu_milli: only of a job that shares the cluster; add share"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as refused:
        read_config(argv, {"CUDA_VISIBLE_DEVICES": ""})
    assert refused.value.exit_code == 2
    assert words in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_token_that_is_none_is_refused_before_anything_starts():
    with pytest.raises(LaunchError, match="EDL_TOKEN: expected one word") as refused:
        read_config([TOY], {"CUDA_VISIBLE_DEVICES": "", "EDL_TOKEN": "two words"})
    assert refused.value.exit_code == 2


def test_a_trace_may_be_as_a_spreadsheet_writes_it(tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_text("time_s,free_slots\n0,1\n", encoding="utf-8-sig")
    argv = ["--change_script", str(path), TOY]
    script = read_config(argv, {"CUDA_VISIBLE_DEVICES": ""}).spec.script
    assert script.text == "time_s,free_slots\n0,1\n"


def test_a_change_script_that_the_server_refuses_ends_with_2_and_its_words(run, tmp_path):
    (tmp_path / "changes.yaml").write_text("- at: 1s\n  pods: [\n")
    job = run("--cpu_slots", "1", "--change_script", "changes.yaml", TOY)
    assert job.process.wait(60) == 2
    assert "line" in job.console()
    assert not job.left()


@pytest.mark.parametrize(
    ("argv", "pods", "slots"),
    [
        (["--cpu_slots", "4"], (1, 4, 4), 4),
        (["--cpu_slots", "4", "--max", "8"], (1, 8, 4), 4),  # it may grow elsewhere
        (["--cpu_slots", "4", "--slots_per_pod", "2"], (1, 2, 2), 4),
        (["--cpu_slots", "4", "--fixed"], (4, 4, 4), 4),
        (["--cpu_slots", "4", "--pods", "2"], (1, 4, 2), 4),
    ],
)
def test_how_many_pods_a_job_has(argv, pods, slots):
    config = read_config([*argv, TOY], {"CUDA_VISIBLE_DEVICES": ""})
    spec = config.spec
    assert (spec.min_pods, spec.max_pods, spec.first_pods) == pods
    assert config.cpu_slots == slots


def test_a_run_beside_other_programs_leaves_the_number_of_pods_to_the_server():
    argv = ["--share", "--cpu", "0.5", "--memory", "1 GB", "--max_run_time", "2h", "--max", "4"]
    spec = read_config([*argv, TOY], {"CUDA_VISIBLE_DEVICES": ""}).spec
    assert (spec.share, spec.pods, spec.min_pods, spec.max_pods) == (True, None, 1, 4)
    assert (spec.cpu_milli, spec.memory_mb, spec.max_run_time_s) == (500, 1000, 7200.0)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,2", 2)])
def test_only_visible_gpus_count(visible, count):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_driver_that_fails_is_no_machine_without_gpus(monkeypatch):
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert count_gpus({}) == 0
    error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with pytest.raises(LaunchError, match=r"the driver of the GPUs fails.*--cpu_slots"):
        count_gpus({})


def test_without_gpus_a_job_gets_the_slots_that_it_wants():
    config = read_config(["--max", "64", TOY], {"CUDA_VISIBLE_DEVICES": ""})
    assert (config.spec.first_pods, config.cpu_slots) == (64, 64)


def test_the_pods_script_survives_odd_names(tmp_path, monkeypatch):
    odd = tmp_path / "it's $HOME"
    odd.mkdir()
    (odd / "train it.py").write_text("import sys; print(sys.argv)")
    monkeypatch.chdir(odd)
    config = read_config(["--cpu_slots", "1", "--take_over", "train it.py", "--", "a b"], {})
    assert config.spec.take_over
    script = train_sh(config)
    parsed = subprocess.run(["bash", "-n"], input=script, text=True, timeout=120)
    assert parsed.returncode == 0
    assert config.script_args == ("a b",)
    shown = subprocess.run(
        ["bash"],
        input=script.replace("-m pod_runtime.launch", "-c 'import sys; print(sys.argv[1:])'"),
        text=True,
        capture_output=True,
        timeout=120,
    ).stdout
    assert repr(str(odd / "train it.py")) in shown
    assert "'a b'" in shown


def test_the_launcher_outside_a_pod_is_a_run_of_its_own(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PADDLE_JOBSERVER"}
    result = subprocess.run(
        [sys.executable, "-m", "pod_runtime.launch", TOY, "--steps", "20"],
        cwd=tmp_path,
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "edl: SUCCEEDED" in result.stdout
    assert (tmp_path / "log" / "latest" / "trainers").is_dir()


def test_a_second_ctrl_c_names_what_is_lost_and_the_first_shows_how_far_the_state_is(capsys):
    made = trains(world())
    made.stop()
    status = made.status
    shown = ""
    while status.state is JobState.STOPPING:
        shown = run_session.show_saving(status, shown)
        before = run_session.describe_loss(status)
        made.round()
        status = made.status
    step = status.step
    assert f"edl: writing step {step}: " in capsys.readouterr().out
    assert before == f"ended at once; step {step} is in /shared/checkpoint"
    again = f"the same command goes on at step {step + 1}, from /shared/checkpoint"
    assert run_session.describe_continuation(status) == again
    assert run_session.describe_continuation(replace(status, saved=None)) == ""
    assert status.saved is not None
    spare = replace(status, saved=replace(status.saved, spare=True, path="/run/state"))
    assert f"step {step} is in /run/state" in run_session.describe_continuation(spare)
    lost = replace(status, saved=None)
    assert run_session.describe_loss(lost).startswith(f"ended at once: step {step} is lost")
