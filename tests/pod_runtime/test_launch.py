"""A real shim, a real launcher and real trainers, against a job server that says what we want."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from job_server.api.wire import (
    HangLimits,
    Order,
    PlanPod,
    PodReport,
    PodStagePhase,
    ReportKind,
    RestoreFrom,
    SlotKind,
    SnapshotRef,
    Way,
)
from pod_runtime import launch, processes, run
from pod_runtime.env import RUN_MARKER, PodEnv, pod_environment
from pod_runtime.errors import LaunchError
from pod_runtime.launch import check_args
from pod_runtime.segment_header import SlotHeader, read_newest
from pod_runtime.shim_wire import SERVER, read_exit, request, write_json
from pod_runtime.trainer.errors import UsageError
from tests.pod_runtime.fake_job_server import FakeJobServer, make_part, make_plan
from tests.programs import loaded_by
from tests.support import free_port, wait_until

TOY = Path(__file__).with_name("toy_trainer.py")


SUBMITTED_AT = 1763815407.123457


class PodUnderTest:
    """One pod on this machine, under its shim."""

    def __init__(
        self, server: FakeJobServer, folder: Path, pod_id: str, slots: int, grace_s: float
    ) -> None:
        self.server = server
        self.pod_id = pod_id
        self.dir = folder / "pods" / pod_id
        self.dir.mkdir(parents=True)
        self.work = folder / f"{pod_id}_work"
        self.work.mkdir()
        self.marker = uuid.uuid4().hex
        self.ports = tuple(free_port() for _ in range(slots))
        self.env = pod_environment(
            os.environ,
            PodEnv(
                job_server=server.url,
                job_id="job",
                pod_id=pod_id,
                pod_dir=self.dir,
                node_id="node",
                run_marker=self.marker,
                slots=tuple(range(slots)),
                slot_kind=SlotKind.CPU,
                max_trainers=8,
                grace_s=grace_s,
                submitted_at=SUBMITTED_AT,
            ),
        )

    def start(
        self, *args: str, script: str = str(TOY), lines: str = '"$@"; exit $?', **environ: str
    ) -> None:
        shim = ["-m", "pod_runtime.shim", "--pod_dir", str(self.dir), "--detach", "--"]
        launch = [sys.executable, "-m", "pod_runtime.launch", "--log_dir", "log", script, *args]
        # Under a bash that stays, as in a pod's script: when the shim dies bash dies with it, and
        # the launcher lives on for long enough to clean up.
        subprocess.run(
            [sys.executable, *shim, "bash", "-c", lines, "script", *launch],
            env={**self.env, **environ},
            cwd=self.work,
            check=True,
            timeout=120,
        )

    def train(self, *args: str, **environ: str) -> None:
        """Start, and be told alone to train as stage 1, to its first step."""
        self.start(*args, **environ)
        start_stage(self.server, 1, self)

    def part(self, pod_rank: int = 0, first_rank: int = 0) -> PlanPod:
        slots = tuple(range(len(self.ports)))
        ranks = tuple(first_rank + slot for slot in slots)
        return make_part(self.pod_id, pod_rank, ranks, slots=slots, ports=self.ports)

    def log(self, rank: int, stage: int) -> str:
        path = self.work / "log" / f"trainer_{rank}.stage_{stage}.log"
        return path.read_text() if path.exists() else ""

    def console(self) -> str:
        return (self.dir / "log").read_text()

    def living(self) -> dict[int, dict[str, str]]:
        """Every process of this pod; the shim itself included."""
        return {
            pid: env
            for pid, env in processes.find_marked(RUN_MARKER, self.marker).items()
            if (process := processes.read(pid)) is not None and process.state != "Z"
        }

    def trainers(self) -> list[int]:
        return [pid for pid, env in self.living().items() if "PADDLE_TRAINER_ID" in env]

    def launcher(self) -> int:
        return self._find("pod_runtime.launch")

    def shim(self) -> int:
        return self._find("pod_runtime.shim")

    def _find(self, module: str) -> int:
        start = f"{sys.executable}\0-m\0{module}\0".encode()
        for pid in self.living():
            with contextlib.suppress(OSError):  # it has just ended
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(start):
                    return pid
        raise AssertionError(f"no {module} runs")

    def has_exited(self, code: int) -> bool:
        ended = read_exit(self.dir)
        return ended is not None and ended.code == code

    def end(self) -> None:
        processes.kill_marked(RUN_MARKER, self.marker, spare=lambda _pid, _env: False)


@pytest.fixture
def server() -> Iterator[FakeJobServer]:
    fake = FakeJobServer()
    yield fake
    fake.stop()


@pytest.fixture
def make_pod(server: FakeJobServer, tmp_path: Path) -> Iterator[Callable[..., PodUnderTest]]:
    made: list[PodUnderTest] = []

    def make(pod_id: str = "pod_0_0", slots: int = 1, grace_s: float = 5.0) -> PodUnderTest:
        made.append(PodUnderTest(server, tmp_path, pod_id, slots, grace_s))
        return made[-1]

    yield make
    for pod in made:
        pod.end()


def parent(pid: int) -> int:
    process = processes.read(pid)
    assert process is not None
    return process.ppid


def start_of_stack(pid: int) -> str:
    """Return where its stack begins: drawn anew for each program, the same in its forks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[25]


def wait_gone(pod: PodUnderTest, orphan: int) -> None:
    wait_until(lambda: orphan not in pod.living(), what="the orphan is gone")


def open_segments(pid: int) -> int:
    """Return how many descriptors of segments a process holds."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            name = os.readlink(link)
            found += name.startswith("/memfd:") and "edl-activity" not in name
    return found


def start_stage(server: FakeJobServer, stage: int, pod: PodUnderTest, **fields: Any) -> PodReport:
    """Take a stage of one pod from START to its first step; return the report of that."""
    server.say(make_plan(stage, Order.START, (pod.part(),), **fields))
    server.wait_told(ReportKind.LOADED, stage)
    server.say(make_plan(stage, Order.GO, (pod.part(),), **fields))
    return server.wait_told(ReportKind.FIRST_STEP, stage)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run_dir", "r"], "--run_dir: only in a pod"),
        (["--keep_logs", "3"], "--keep_logs: only in a pod"),
        (["--preload", "json"], None),
    ],
)
def test_what_counts_in_a_pod_only_is_refused_outside_of_one(
    tmp_path, monkeypatch, capsys, flags, said
):
    script = tmp_path / "train.py"
    script.touch()
    ran: list[list[str]] = []

    def run_alone(argv: list[str]) -> int:
        ran.append(argv)
        return 0

    monkeypatch.setattr(run, "main", run_alone)
    code = launch.main([*flags, str(script), "--lr", "1"], {})
    assert said is None or said in capsys.readouterr().err
    own = ["--fixed", "--log_dir", "log", *flags, str(script), "--lr", "1"]
    assert (code, ran) == ((0, [own]) if said is None else (2, []))


def test_a_script_that_keeps_the_jobs_args_from_its_trainers_is_refused():
    check_args((), ("--epochs", "3"))
    check_args(("--lr", "0.1"), ("--epochs", "3", "--lr", "0.1"))
    for given in ((), ("--lr", "0.2"), ("0.1", "--lr")):
        with pytest.raises(LaunchError, match=r"\(--lr 0.1\) do not come .*; end the launch line"):
            check_args(("--lr", "0.1"), given)


def test_a_stage_is_trained_to_its_end_and_the_launcher_exits_with_0(server, make_pod):
    pod = make_pod(slots=2)
    pod.start("--steps", "30", "--print", "hello from a toy")
    wait_until(lambda: server.attaches)
    assert server.attaches[0].phase is PodStagePhase.READY
    server.say(make_plan(1, Order.PREPARE, (pod.part(),), way=Way.START))
    server.wait_told(ReportKind.READY, 1)
    assert not pod.trainers()

    first = start_stage(server, 1, pod, way=Way.START)
    wait_until(lambda: pod.has_exited(0), what="exit")

    (exited,) = server.told(ReportKind.EXITED)
    (done,) = server.told(ReportKind.DONE)
    assert (exited.code, exited.stage, done.step) == (0, 1, 30)
    assert (first.elastic, first.total_steps) == (True, 30)
    assert {said.submitted_at for said in (*server.attaches, *server.reports)} == {SUBMITTED_AT}
    kinds = [report.kind for report in server.reports]
    assert kinds.index(ReportKind.STARTED) < kinds.index(ReportKind.LOADED)
    assert not server.told(ReportKind.FAILED)
    assert "[rank 0] hello from a toy\n" in pod.console()
    assert "[rank 1] hello from a toy\n" in pod.console()
    assert "hello from a toy" in pod.log(1, 1)
    wait_until(lambda: not pod.living(), what="nothing is left")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('"$@" && "$@"', "the training of this pod is complete, and this would be a second one"),
        (
            '"$@"; "$@"; echo "that was it"',  # without `set -e`
            "the training of this pod is complete, and this would be a second one",
        ),
        ('"$@" && { "$@" || exit 1; }', "the training of this pod is complete, and this would be"),
        (
            '"$@" & one=$!; "$@" & wait $!; code=$?; wait $one; exit $((code | $?))',
            "another launcher of this pod runs",
        ),
    ],
)
def test_a_second_launcher_of_a_pod_is_refused_beside_the_first_and_behind_it(
    server, make_pod, lines, said
):
    pod = make_pod()
    pod.start("--steps", "100", lines=lines)
    start_stage(server, 1, pod, way=Way.START)
    wait_until(lambda: pod.has_exited(78), what="exit")
    assert f"launch: {said}" in pod.console()
    assert ": a job is one training" in pod.console()
    (exited,) = server.told(ReportKind.EXITED)
    assert exited.code == 0
    started = server.told(ReportKind.STARTED)  # told again once the trainer has called the loop
    assert [each.elastic for each in started] in ([False], [True], [False, True])


def test_a_change_by_drain_parks_ends_and_starts_again_from_the_snapshot(server, make_pod):
    pod = make_pod()
    pod.train("--snapshot")
    first_pid = pod.trainers()

    coming = make_plan(2, Order.PREPARE, (pod.part(),))
    server.say(make_plan(1, Order.CUT, (pod.part(),)), coming)
    server.wait_told(ReportKind.DRAINED, 1)
    assert server.told(ReportKind.READY, 2)
    drained = server.told(ReportKind.DRAINED, 1)[0]
    assert drained.step == 1001
    assert drained.snapshot is not None
    assert drained.snapshot.stage == 1
    assert pod.trainers() == first_pid

    server.say(make_plan(1, Order.END, (pod.part(),)), coming)
    server.wait_told(ReportKind.ENDED, 1)
    assert not pod.trainers()

    source = RestoreFrom(stage=1, step=1001, pods=("pod_0_0", "pod_9_9"))
    assert start_stage(server, 2, pod, restore_from=source).step == 1002
    assert '"stages": [1]' in pod.log(0, 2)  # with the welcome came the segment of stage 1

    def held() -> list[int]:
        body, fds = request(pod.dir, {"op": "get", "stage": None})
        for fd in fds:
            os.close(fd)
        return [segment["stage"] for segment in body["segments"]]

    wait_until(lambda: held() == [2], what="the state of stage 1 is let go")


def test_a_launcher_that_waits_says_that_it_lives(server, make_pod):
    pod = make_pod()
    pod.start()
    server.say(make_plan(1, Order.PREPARE, (pod.part(),)))
    wait_until(lambda: len(server.told(ReportKind.ALIVE, 0)) >= 2)


def test_an_abandoned_change_lets_the_parked_trainer_go_on(server, make_pod):
    pod = make_pod()
    pod.train("--snapshot")
    pids = pod.trainers()

    def cut_and_resume(count: int) -> None:
        server.say(make_plan(1, Order.CUT, (pod.part(),), cut=count))
        wait_until(lambda: len(server.told(ReportKind.DRAINED, 1)) == count)
        assert open_segments(launcher), "the state is at hand"
        before = len(server.told(ReportKind.PROGRESS, 1))
        server.say(make_plan(1, Order.RESUME, (pod.part(),), cut=count))
        wait_until(lambda: len(server.told(ReportKind.PROGRESS, 1)) > before + 1)

    launcher = pod.launcher()
    cut_and_resume(1)
    cut_and_resume(2)  # the second cut is another one than the first
    cut_and_resume(3)
    wait_until(lambda: open_segments(launcher) == 0, what="what was at hand has been let go")
    assert pod.trainers() == pids
    wait_until(lambda: pod.log(0, 1).count("resumed") == 3)
    assert [report.step for report in server.told(ReportKind.DRAINED)] == [1001, 1002, 1003]


def test_a_trainer_that_fails_is_reported_with_its_error_and_not_restarted(server, make_pod):
    pod = make_pod()
    pod.start("--fail", "3")
    server.say(make_plan(1, Order.GO, (pod.part(),)))  # a stage it has no trainers for
    assert "it was restarted" in server.wait_told(ReportKind.FAILED, 1).reason

    server.say(make_plan(2, Order.START, (pod.part(),)))
    server.wait_told(ReportKind.LOADED, 2)
    server.say(make_plan(2, Order.GO, (pod.part(),)))
    failed = server.wait_told(ReportKind.FAILED, 2)
    assert (failed.rank, failed.code, failed.peer_lost) == (0, 1, False)
    assert failed.error is not None
    assert failed.error.chain[0].types[:2] == ("ValueError", "Exception")
    assert failed.error.traceback.startswith("Traceback (most recent call last):")
    assert failed.error.traceback.endswith("ValueError: the loss is sad at step 3\n")
    assert re.fullmatch(
        r"\S+/toy_trainer\.py:\d+: ValueError: the loss is sad at step 3", failed.reason
    )
    wait_until(lambda: not pod.trainers(), what="the trainer, whose error is told first, has ended")
    server.say(make_plan(2, Order.END, (pod.part(),)))
    server.wait_told(ReportKind.ENDED, 2)
    assert read_exit(pod.dir) is None


def test_trainers_killed_by_order_are_killed_once_and_their_helpers_with_them(server, make_pod):
    pod = make_pod(slots=2)
    pod.train("--helper")
    server.say(make_plan(1, Order.GO, (pod.part(),), kill_ranks=(("k1", 1),)))
    failed = server.wait_told(ReportKind.FAILED, 1)
    assert (failed.rank, failed.code, failed.peer_lost) == (1, -signal.SIGKILL, False)
    assert failed.reason == ""
    helper = re.search(r"helper (\d+)", pod.log(1, 1))
    assert helper is not None
    wait_gone(pod, int(helper[1]))
    assert {env["PADDLE_TRAINER_ID"] for env in pod.living().values() if "EDL_STAGE" in env} == {
        "0"
    }


def test_a_crash_soon_after_a_change_finds_the_spare_that_made_its_trainers(server, make_pod):
    server.spares = 1
    pod = make_pod()
    # A module of its own in place of a framework's: what is imported makes no difference here.
    pod.train("--adapter", "pod_runtime.trainer.frameworks.framework", "--helper")
    wait_until(lambda: "is ready, for any number of trainers" in pod.console(), 300)
    found = re.search(r"warming a spare trainer \(pid (\d+)\)", pod.console())
    assert found is not None
    spare = int(found[1])
    for stage in (2, 3):  # a change; a crash of its trainers, at once
        server.say(make_plan(stage - 1, Order.END, (pod.part(),)))
        server.wait_told(ReportKind.ENDED, stage - 1)
        start_stage(server, stage, pod)
        begun = re.search(r"helper (\d+)", pod.log(0, stage))
        assert begun is not None
        helper = int(begun[1])
        trainer = parent(helper)
        assert start_of_stack(trainer) == start_of_stack(spare), "it is a fork of it"
        assert parent(trainer) == pod.launcher()
        os.kill(trainer, signal.SIGKILL)
        assert server.wait_told(ReportKind.FAILED, stage).code == -signal.SIGKILL
        wait_gone(pod, helper)
    assert pod.console().count("warming a spare") == 1


def test_a_trainer_that_lost_its_peer_is_a_victim_and_the_cause_is_told_too(server, make_pod):
    pod = make_pod(slots=2)
    pod.start("--exit", "75")
    server.say(make_plan(1, Order.START, (pod.part(),)))
    assert server.wait_told(ReportKind.FAILED, 1).peer_lost


@pytest.mark.parametrize("args", [(), ("--ignore_sigterm",)], ids=["polite", "ignores SIGTERM"])
def test_trainers_without_the_loop_are_terminated_and_killed_after_the_grace(
    server, make_pod, args
):
    pod = make_pod(grace_s=0.5)
    pod.start("--plain", "600", *args)
    server.say(make_plan(1, Order.START, (pod.part(),), way=Way.START))
    server.wait_told(ReportKind.STARTED, 1)
    server.say(make_plan(1, Order.GO, (pod.part(),), way=Way.START))
    assert not server.wait_told(ReportKind.PROGRESS, 1).elastic
    wait_until(lambda: "plain" in pod.log(0, 1))

    server.say(
        make_plan(1, Order.END, (pod.part(),)),
        make_plan(2, Order.PREPARE, (pod.part(),), way=Way.STOP),
    )
    server.wait_told(ReportKind.ENDED, 1)
    assert not pod.trainers()
    assert not server.told(ReportKind.FAILED)


def test_a_trainer_that_hangs_is_said_with_its_stack_and_killed_after_ten_times_its_limit(
    server, make_pod, tmp_path
):
    hold = tmp_path / "hold"
    hold.touch()
    server.hang_limits = HangLimits(step_s=0.4, steps=1, first_s=0.4)
    pod = make_pod()
    pod.train("--hold", str(hold))
    said = server.wait_told(ReportKind.HUNG)
    assert said.rank == 0
    assert "in a step" in said.reason
    assert "toy_trainer.py" in said.reason  # where it hangs
    assert "most recent call first" in pod.log(0, 1)
    hold.unlink()
    wait_until(lambda: not server.told(ReportKind.HUNG)[-1].hung_s, what="a sign of life")
    assert "rank 0: " in pod.console()
    (trainer,) = (pid for pid, env in pod.living().items() if "EDL_STAGE" in env)
    os.kill(trainer, signal.SIGSTOP)
    failed = server.wait_told(ReportKind.FAILED)
    assert failed.hung_s >= 4
    assert (failed.rank, failed.code) == (0, -signal.SIGKILL)
    assert "stopped by a signal (SIGSTOP)" in failed.reason
    assert len([each for each in server.told(ReportKind.HUNG) if each.hung_s]) >= 2


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of our own with 150 MB; skips where this machine allows none."""
    v1 = Path("/sys/fs/cgroup/memory")
    top, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v1.parent, "memory.max")
    folder = top / f"edl-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(150_000_000))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder

    def is_removed() -> bool:
        with contextlib.suppress(OSError):  # its processes are about to end
            folder.rmdir()
        return not folder.exists()

    wait_until(is_removed, what="the control group's end")


def test_a_trainer_that_the_kernel_kills_for_lack_of_memory_is_told_apart(
    server, make_pod, memory_group, tmp_path
):
    eat = tmp_path / "eat"
    pod = make_pod()
    pod.train("--eat", str(eat))
    (trainer,) = (pid for pid, env in pod.living().items() if "EDL_STAGE" in env)
    for pid in (pod.launcher(), trainer):
        (memory_group / "cgroup.procs").write_text(str(pid))
    eat.touch()
    failed = server.wait_told(ReportKind.FAILED)
    assert (failed.rank, failed.code, failed.events) == (0, -signal.SIGKILL, ("oom_kill",))
    assert failed.reason == "oom_kill of its control group has risen to 1"
    assert failed.last_lines
    pod.end()


def test_a_trainer_that_is_killed_by_another_is_not_said_to_be_out_of_memory(server, make_pod):
    pod = make_pod()
    pod.train()
    (trainer,) = (pid for pid, env in pod.living().items() if "EDL_STAGE" in env)
    os.kill(trainer, signal.SIGKILL)
    failed = server.wait_told(ReportKind.FAILED)
    assert (failed.code, failed.events) == (-signal.SIGKILL, ())
    assert "oom_kill" not in failed.reason


def test_a_sign_of_life_counts_that_comes_before_the_stacks_of_all_trainers(
    server, make_pod, tmp_path
):
    hold = tmp_path / "hold"
    hold.touch()
    server.hang_limits = HangLimits(step_s=0.4, steps=1, first_s=0.4)
    pod = make_pod(slots=2)
    pod.train("--hold", str(hold))
    by_rank = {int(env["PADDLE_TRAINER_ID"]): pid for pid, env in pod.living().items()
               if "EDL_STAGE" in env}  # fmt: skip
    os.kill(by_rank[1], signal.SIGSTOP)  # until it is given up its stacks are waited for
    # Once or twice: alarms that come together have one look at the stacks.
    wait_until(lambda: "Current thread" in pod.log(0, 1), what="an alarm")
    hold.unlink()
    failed = server.wait_told(ReportKind.FAILED)
    assert failed.rank == 1
    assert "rank 0 hangs" in pod.console()
    told = [report.hung_s for report in server.told(ReportKind.HUNG) if report.rank == 0]
    assert not told or not told[-1]


def test_a_trainer_is_watched_that_its_script_has_started_as_a_child(server, make_pod, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f'#!/bin/sh\n{sys.executable} {TOY} "$@"\nexit $?\n')
    script.chmod(0o755)
    server.hang_limits = HangLimits(step_s=0.4, steps=1, first_s=0.4)
    pod = make_pod()
    pod.start(script=str(script))
    start_stage(server, 1, pod)
    (trainer,) = (pid for pid in pod.trainers() if parent(pid) in pod.trainers())
    os.kill(trainer, signal.SIGSTOP)
    assert "stopped by a signal (SIGSTOP)" in server.wait_told(ReportKind.HUNG).reason


def test_two_processes_of_a_script_that_would_be_one_trainer_are_refused(
    server, make_pod, tmp_path
):
    script = tmp_path / "train.sh"
    script.write_text(f'#!/bin/sh\n{sys.executable} {TOY} "$@" &\n{sys.executable} {TOY} "$@"\n')
    script.chmod(0o755)
    pod = make_pod()
    pod.start(script=str(script))
    server.say(make_plan(1, Order.START, (pod.part(),)))
    failed = server.wait_told(ReportKind.FAILED)
    assert failed.error is not None
    assert failed.error.chain[0].types[0] == f"{UsageError.__module__}.{UsageError.__name__}"
    assert "two processes of the script have made a Loop" in failed.reason
    assert "without torch.multiprocessing.spawn" in failed.reason
    assert "forkserver, which run the script again" in failed.reason


def test_a_training_of_a_second_process_of_a_script_is_refused(server, make_pod, tmp_path):
    # As of a script that starts one `train.py` after the other: a state in memory could not say of
    # which of them it is, and after a crash the second would go on with the model of the first.
    script = tmp_path / "train.sh"
    script.write_text(f'#!/bin/sh\n{sys.executable} {TOY} "$@"\n{sys.executable} {TOY} "$@"\n')
    script.chmod(0o755)
    pod = make_pod()
    pod.start("--steps", "5", script=str(script))
    start_stage(server, 1, pod)
    failed = server.wait_told(ReportKind.FAILED)
    assert failed.error is not None
    assert failed.error.chain[0].types[0] == f"{UsageError.__module__}.{UsageError.__name__}"
    assert "has trained before, and another one makes a Loop now" in failed.reason
    assert "one after the other in one process" in failed.reason


def test_a_taken_port_is_reported_and_a_new_attempt_starts(server, make_pod):
    pod = make_pod()
    pod.start("--steps", "5")
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", pod.ports[0]))
        thief.listen()
        server.say(make_plan(1, Order.START, (pod.part(),)))
        assert str(pod.ports[0]) in server.wait_told(ReportKind.PORT_TAKEN, 1).reason
        assert not pod.trainers()
        pod.ports = (free_port(),)
        server.say(make_plan(1, Order.START, (pod.part(),), attempt=1))
        assert server.wait_told(ReportKind.LOADED, 1).attempt == 1


def test_a_trainer_that_cannot_be_started_is_a_failure_with_the_reason(server, make_pod, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    pod = make_pod()
    pod.start(script=str(script))
    server.say(make_plan(1, Order.START, (pod.part(),)))
    failed = server.wait_told(ReportKind.FAILED, 1)
    assert failed.rank == 0
    assert "cannot start" in failed.reason


def test_a_stage_number_that_is_too_low_is_passed_on_and_is_no_failure(server, make_pod):
    pod = make_pod()
    pod.start("--say_too_low")
    server.say(make_plan(1, Order.START, (pod.part(),)))
    assert server.wait_told(ReportKind.STAGE_TOO_LOW, 1).highest_stage == 7
    wait_until(lambda: not pod.trainers())
    server.say(make_plan(8, Order.START, (pod.part(),)))
    server.wait_told(ReportKind.STARTED, 8)
    assert not server.told(ReportKind.FAILED)


def test_the_checkpoint_path_is_looked_through_at_attach(server, make_pod, tmp_path):
    for name in ("stage_00000003", "stage_00000012", "stage_x", "other"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    pod = make_pod()
    pod.start(EDL_CHECKPOINT=str(tmp_path / "checkpoint"))
    wait_until(lambda: server.attaches)
    assert server.attaches[0].highest_stage == 12


def test_training_goes_on_without_a_server_and_everything_is_told_on_its_return(server, make_pod):
    pod = make_pod()
    pod.train("--snapshot")
    pids = pod.trainers()
    server.stop()
    os.kill(pids[0], signal.SIGKILL)  # it happens while nobody listens
    wait_until(lambda: "stage 1: failed" in pod.console(), what="the launcher knows")
    attaches = len(server.attaches)
    server.reports.clear()
    server.restart("server-2")
    wait_until(lambda: len(server.attaches) > attaches)
    server.wait_told(ReportKind.FAILED, 1)
    attach = server.attaches[-1]
    assert (attach.stage, attach.phase, attach.elastic) == (1, PodStagePhase.FAILED, True)
    assert attach.failure is not None
    assert attach.failure.code == -signal.SIGKILL
    assert isinstance(attach.snapshot, SnapshotRef)  # read from the shim, not from the dead
    assert attach.snapshot.stage == 1


def test_a_restarted_server_hears_again_what_its_predecessor_was_told(server, make_pod):
    pod = make_pod()
    pod.train()
    server.say(make_plan(1, Order.CUT, (pod.part(),)))
    server.wait_told(ReportKind.DRAINED, 1)
    server.stop()
    server.reports.clear()
    server.restart("server-2")
    server.wait_told(ReportKind.DRAINED, 1)
    assert server.attaches[-1].phase is PodStagePhase.PARKED


def test_where_the_server_has_another_token_it_is_read_again(server, make_pod, tmp_path):
    token, server.token = tmp_path / "token", "of-last-year"
    token.write_text(server.token)
    pod = make_pod()
    pod.train(EDL_TOKEN_FILE=str(token))
    server.stop()
    server.token = "of-this-year"
    server.restart("server-2")
    wait_until(lambda: "the job server refuses us" in pod.console(), what="it is refused")
    attaches, reports = len(server.attaches), len(server.reports)
    token.write_text("of")  # a moment in which it is none
    token.write_text(server.token)
    wait_until(lambda: len(server.attaches) > attaches, what="it attaches")
    wait_until(lambda: len(server.reports) > reports, what="it reports")
    assert pod.console().count("the job server refuses us") == 1


def test_a_server_that_has_moved_is_found_where_the_client_says_that_it_is(server, make_pod):
    pod = make_pod()
    pod.train()
    server.stop()
    wait_until(lambda: "no job server" in pod.console(), what="it is missed")
    server.start_elsewhere("server-2")
    attaches, reports = len(server.attaches), len(server.reports)
    write_json(pod.dir / SERVER, {"url": server.url})
    wait_until(lambda: len(server.attaches) > attaches, what="it attaches")
    wait_until(lambda: len(server.reports) > reports, what="it reports")


def test_a_pod_that_is_not_wanted_ends_its_trainers_and_exits(server, make_pod):
    pod = make_pod()
    pod.train()
    server.refuse_all()
    wait_until(lambda: pod.has_exited(0))
    wait_until(lambda: not pod.living())


def test_a_pod_told_to_leave_exits_with_0_and_says_so(server, make_pod):
    pod = make_pod()
    pod.train()
    server.say(leave=True)
    wait_until(lambda: pod.has_exited(0))
    assert server.told(ReportKind.EXITED)[0].code == 0


def test_sigterm_ends_trainers_and_launcher_with_143(server, make_pod):
    pod = make_pod()
    pod.train("--helper")
    os.kill(pod.launcher(), signal.SIGTERM)
    wait_until(lambda: pod.has_exited(143))
    assert server.told(ReportKind.EXITED)[0].code == 143
    assert not server.told(ReportKind.FAILED)
    wait_until(lambda: not pod.living())


SAVES_AT_THE_END = """
import signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(1)
    Path("saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(600)
"""


def test_a_script_has_its_grace_where_all_processes_get_sigterm_at_once(server, make_pod, tmp_path):
    pod = make_pod(grace_s=30.0)
    script = tmp_path / "saves.py"
    script.write_text(SAVES_AT_THE_END)
    pod.start(script=str(script))
    server.say(make_plan(1, Order.START, (pod.part(),), way=Way.START))
    wait_until(lambda: "trains" in pod.log(0, 1))
    for pid in sorted(pod.living()):  # as systemd ends a unit, and Slurm a job step
        with contextlib.suppress(ProcessLookupError):  # a spare has ended meanwhile
            os.kill(pid, signal.SIGTERM)
    wait_until(lambda: read_exit(pod.dir) is not None, what="the pod has ended")
    assert (pod.work / "saved").exists()
    wait_until(lambda: not pod.living())


@pytest.mark.parametrize("victim", ["launcher", "shim"])
def test_no_trainer_survives_the_death_of(server, make_pod, victim):
    pod = make_pod(slots=2, grace_s=1.0)
    pod.train("--ignore_sigterm", "--helper")
    os.kill(getattr(pod, victim)(), signal.SIGKILL)
    wait_until(lambda: not pod.trainers(), what="all trainers and helpers are gone")
    wait_until(lambda: not pod.living())


def held_by(pod_dir: Path) -> list[SlotHeader | None]:
    """Return the newest state of each segment that a shim holds."""
    _, fds = request(pod_dir, {"op": "get", "stage": None})
    headers = [read_newest(fd) for fd in fds]
    for fd in fds:
        os.close(fd)
    return headers


def test_of_two_pods_on_a_node_both_shims_hold_what_the_first_makes(server, make_pod, tmp_path):
    one, two = make_pod("pod_0_0"), make_pod("pod_1_0")
    parts = (one.part(), two.part(1, 1))
    one.start("--snapshot")
    two.start("--snapshot")
    server.say(make_plan(1, Order.START, parts))
    wait_until(lambda: len(server.told(ReportKind.LOADED, 1)) == 2)
    server.say(make_plan(1, Order.GO, parts))
    wait_until(lambda: len(server.told(ReportKind.FIRST_STEP, 1)) == 2)

    server.say(make_plan(1, Order.END, parts))
    wait_until(lambda: len(server.told(ReportKind.ENDED, 1)) == 2)
    assert all(report.snapshot is not None for report in server.told(ReportKind.ENDED, 1))
    held = [held_by(pod.dir) for pod in (one, two)]  # what was told may be of different moments
    assert held[0] == held[1] != []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train_missing.py"], "train_missing.py does not exist"),
        ([], "the following arguments are required"),
        (["--log_level", "loud", "x.py"], "--log_level"),
    ],
)
def test_a_wrong_command_line_is_refused_with_2(tmp_path, argv, words):
    result = subprocess.run(
        [sys.executable, "-m", "pod_runtime.launch", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert words in result.stderr


def test_the_launcher_loads_no_framework_no_server_and_no_numpy():
    others = {"paddle", "flask", "numpy", "psutil", "gevent"}
    assert others.isdisjoint(loaded_by("pod_runtime.launch"))
