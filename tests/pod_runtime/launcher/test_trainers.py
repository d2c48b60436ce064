"""Starting trainers, what their logs say, what the console shows, and what dead ones leave."""

import errno
import functools
import io
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from job_server.api.wire import Order, PlanPod, SlotKind
from pod_runtime import processes
from pod_runtime.env import spare_environment
from pod_runtime.errors import SpawnError
from pod_runtime.launcher.console import Console
from pod_runtime.launcher.segments import highest_stage
from pod_runtime.launcher.trainer_pool import LaunchConfig, TrainerPool, drop_old_logs
from pod_runtime.launcher.trainers import (
    TrainerProcess,
    adapter_of,
    essence,
    find_taken_port,
    read_script,
    with_defaults,
)
from pod_runtime.log_tail import read_tail
from pod_runtime.orphans import remove_shared_memory
from tests.pod_runtime.fake_job_server import make_part, make_plan
from tests.pod_runtime.test_env import POD
from tests.programs import run_code
from tests.support import free_port, freeze, freezer, no_descriptor_free, wait_until


def start(tmp_path: Path, code: str, rank: int = 0, **env: str) -> TrainerProcess:
    return TrainerProcess(
        stage=1,
        attempt=0,
        rank=rank,
        argv=[sys.executable, "-c", code],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        log_path=tmp_path / "log" / f"trainer_{rank}.stage_1.log",
    )


def test_output_goes_to_the_log_behind_what_is_there_and_only_ours_is_quoted(tmp_path):
    first = start(tmp_path, "raise SystemExit('old words')")
    assert first.reap() == 1
    assert first.last_words() == "old words"
    second = start(tmp_path, "pass")
    assert second.reap() == 0
    assert second.last_words() == ""
    assert second.log_path.read_text() == "old words\n"


def test_a_program_that_does_not_exist_is_refused_with_its_name(tmp_path):
    with pytest.raises(SpawnError, match="cannot start /no/such: ") as refused:
        TrainerProcess(
            stage=1, attempt=0, rank=3, argv=["/no/such"], env={}, log_path=tmp_path / "log"
        )
    assert refused.value.rank == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_trainer_for_whose_log_the_disk_has_no_inode_or_is_read_only_runs_without_one(
    tmp_path, monkeypatch, call: str, code: int
):
    real = getattr(Path, call)

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if tmp_path in path.parents:
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, call, full)
    trainer = start(tmp_path, f"print('words'); open({str(tmp_path / 'ran')!r}, 'w')")
    assert trainer.reap() == 0
    assert trainer.last_words() == ""
    assert (tmp_path / "ran").exists()


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "log").write_text("a file")
    with pytest.raises(SpawnError, match="log"):
        start(tmp_path, "pass")


def test_a_trainer_dies_with_the_process_that_made_it(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from pod_runtime.launcher.trainers import TrainerProcess
trainer = TrainerProcess(stage=1, attempt=0, rank=0, argv=["sleep", "600"], env=dict(os.environ),
                         log_path=Path({str(tmp_path / "log")!r}))
print(trainer.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        pid = int(maker.stdout.readline())
        started = processes.start_time(pid)
        assert started is not None
        maker.kill()
    wait_until(lambda: not processes.is_alive(pid, started))


def test_the_children_of_a_trainer_are_noted(tmp_path):
    trainer = start(tmp_path, "import subprocess; subprocess.run(['sleep', '600'])")

    def noted() -> set[int]:
        trainer.note_children()
        return trainer.children

    wait_until(noted)
    trainer.send_signal(signal.SIGKILL)  # first: it would end by itself after its child
    for pid in trainer.children:
        os.kill(pid, signal.SIGKILL)
    assert trainer.reap() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        (["", "  ", "step 1", ""], "step 1"),
        (
            ["Traceback (most recent call last):", '  File "x", line 1', "ValueError: bad", "bye"],
            "ValueError: bad",
        ),
        (
            [
                *("Traceback (most recent call last):", "  x", "KeyError: 1", "", "During:", ""),
                *("Traceback (most recent call last):", "  y", "a.b.CustomError: two"),
            ],
            "a.b.CustomError: two",
        ),
        (["Traceback (most recent call last):", "  x", "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["Traceback (most recent call last):", "  cut off by a kill"], "cut off by a kill"),
        (["x" * 1000], "x" * 300),
    ],
)
def test_the_essence_of_last_words(lines, expected):
    assert essence(lines) == expected


def test_the_tail_of_a_log_that_is_not_there_is_empty(tmp_path):
    assert read_tail(tmp_path / "no.log") == []


def test_defaults_give_way_to_what_the_user_has_set():
    env = with_defaults({"GLOG_minloglevel": "0", "PYTHONWARNINGS": "error"})
    assert env["GLOG_minloglevel"] == "0"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["PYTHONWARNINGS"] == "error,ignore:No ccache found"
    assert with_defaults({})["PYTHONWARNINGS"] == "ignore:No ccache found"


def test_words_are_in_the_same_order_in_all_trainers_unless_the_user_says_otherwise():
    """A script that numbers words or classes by a set would give them others in each process."""

    def ordered(**env: str) -> str:
        code = "print(*{*map(str, range(50))})"
        env = with_defaults({**os.environ, **env})
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert ordered() == ordered() != ordered(PYTHONHASHSEED="7") == ordered(PYTHONHASHSEED="7")


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ('"""A script."""\nimport torch\n', "torch"),
        ("import os, paddle as p\nimport torch", "paddle"),
        ("from torch.utils.data import DataLoader\n", "torch"),
        ("import os\nrank = os.environ['RANK']\nimport torch\nos.environ['A'] = '1'\n", "torch"),
        ("import os\nif os.environ.get('A') == '1':\n    print()\nimport torch\n", "torch"),
        # The framework may read what is set before.
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", ""),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '2')\nimport torch\n", ""),
        ("import os\nos.environ |= {'OMP_NUM_THREADS': '2'}\nimport torch\n", ""),
        ("import os\nos.environ.pop('OMP_NUM_THREADS')\nimport torch\n", ""),
        ("import os\ndel os.environ['OMP_NUM_THREADS']\nimport torch\n", ""),
        ("import os\nos.unsetenv('OMP_NUM_THREADS')\nimport torch\n", ""),
        ("from models import torch_net\nimport numpy  # torch\n", ""),
        ("def main():\n    import torch\n", ""),  # perhaps never
        ("", ""),
    ],
)
def test_the_framework_that_a_script_imports(text, framework):
    found = adapter_of(text)
    assert found == (f"pod_runtime.trainer.frameworks.{framework}.framework" if framework else "")


def test_the_script_of_a_command_is_read_if_it_is_one_of_python(tmp_path):
    script = tmp_path / "train.py"
    command = [sys.executable, str(script), "--epochs", "1"]
    assert read_script(command) == ""
    script.write_text("import torch  # é\n", encoding="utf-8")
    assert read_script(command) == "import torch  # é\n"
    assert read_script(["bash", str(script)]) == ""
    script.write_bytes(b"import torch  # \xff\n")
    assert read_script(command) == ""


def test_what_a_step_frees_is_there_for_the_next_one(tmp_path):
    code = (
        "import resource\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def step(): [bytearray(b'x') * (4 << 20) for _ in range(40)]\n"
        "step(); before = faults(); step(); print(faults() - before)\n"
    )
    made = spare_environment({}, replace(POD, slot_kind=SlotKind.CPU))
    ours = {name: value for name, value in made.items() if name.startswith("MALLOC_")}
    pages = []
    for rank, env in enumerate(({}, ours)):
        process = start(tmp_path, code, rank, **env)
        assert process.reap() == 0
        pages.append(int(process.last_words()))
    assert pages[1] < pages[0] / 10, f"{pages[1]} pages were fetched again, {pages[0]} by default"


def plan_pod(*ports: int) -> PlanPod:
    return make_part(ranks=tuple(range(len(ports))), ports=ports)


def test_a_port_that_somebody_listens_on_is_found_and_one_in_time_wait_is_not():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the frameworks do
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port} " in find_taken_port(plan_pod(free_port(), port))
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # first to close: its end stays in TIME_WAIT
            assert client.recv(1) == b""
    assert find_taken_port(plan_pod(port)) == ""


def test_a_port_that_cannot_be_tried_for_want_of_a_descriptor_is_told_as_one_that_is_taken():
    with no_descriptor_free():
        assert "port 1 cannot be used: Too many open files" in find_taken_port(plan_pod(1))


def test_the_console_shows_whole_lines_with_their_rank(tmp_path):
    output = io.BytesIO()
    console = Console(output)
    log = tmp_path / "log"
    log.write_bytes(b"earlier run\n")
    console.follow(log, 3, log.stat().st_size)
    with log.open("ab") as file:
        file.write(b"one\ntw")
    wait_until(lambda: output.getvalue() == b"[rank 3] one\n")
    with log.open("ab") as file:
        file.write(b"o \xff\nlast")
    console.ended(log)
    console.finish(10)
    assert output.getvalue() == b"[rank 3] one\n[rank 3] two \xff\n[rank 3] last\n"


def test_a_log_that_has_become_too_long_is_cut_and_every_line_shown_once(tmp_path):
    output = io.BytesIO()
    console = Console(output, longest=100)
    log = tmp_path / "log"
    lines = b"".join(b"line %d\n" % number for number in range(100))
    with log.open("ab", buffering=0) as writer:
        console.follow(log, 0, 0)
        for start in range(0, len(lines), 70):
            writer.write(lines[start : start + 70])
            if start // 70 % 3 == 0:
                wait_until(lambda: log.stat().st_size <= 100)
    console.ended(log)
    console.finish(10)
    assert output.getvalue().replace(b"[rank 0] ", b"") == lines
    assert log.stat().st_size <= 210


def all_shown(output: io.BytesIO, *lines: bytes) -> bool:
    return all(line in output.getvalue() for line in lines)


def test_a_log_that_cannot_be_cut_grows_on_and_the_other_logs_are_shown(tmp_path):
    output = io.BytesIO()
    console = Console(output, longest=100)
    logs = [tmp_path / f"log_{rank}" for rank in range(2)]
    (tmp_path / "log_0.1").mkdir()  # where its first part should go
    for rank, log in enumerate(logs):
        console.follow(log, rank, 0)
    for text in ("one", "two"):
        for log in logs:
            with log.open("a") as writer:
                writer.write(f"{text} of {log.name}\n" + "x" * 60 + "\n")
        lines = f"{text} of log_0".encode(), f"{text} of log_1".encode()
        wait_until(functools.partial(all_shown, output, *lines))
    console.finish(10)
    assert output.getvalue().count(b"\n") == 8
    assert logs[0].stat().st_size > 100
    assert logs[1].stat().st_size == 0


def test_logs_of_stages_long_past_are_dropped_unless_somebody_still_writes_there(tmp_path):
    now = time.time()
    for stage in range(1, 7):
        path = tmp_path / f"trainer_0.stage_{stage}.log"
        path.touch()
        os.utime(path, (0, now - 90_000))
    (tmp_path / "trainer_1.stage_1.log").touch()  # of a trainer that has stayed
    for name in ("trainer_0.stage_2.log.1", "spares.log", "trainer_0.stage_1.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    drop_old_logs(tmp_path, 4, now)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "spares.log",
        "trainer_0.stage_1.txt",
        "trainer_0.stage_5.log",
        "trainer_0.stage_6.log",
        "trainer_1.stage_1.log",
    ]


def test_a_console_that_nobody_reads_does_not_stop_the_launcher(tmp_path):
    read, write = os.pipe()
    log = tmp_path / "log"
    log.write_bytes(b"x" * 99 + b"\n" * 1_000_000)
    with os.fdopen(write, "wb", buffering=0) as output:
        console = Console(output)
        console.follow(log, 0, 0)
        console.finish(0.2)  # the pipe is full: it returns nevertheless
        os.close(read)
        console.finish(10)


class FullDisk(io.RawIOBase):
    """A file that takes `room` bytes, and then says that there is no space."""

    def __init__(self, room: int) -> None:
        self.room, self.held, self.refused = room, b"", 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.held, self.room = self.held + taken, self.room - len(taken)
        return len(taken)


def test_a_console_whose_disk_was_full_shows_the_rest_once_there_is_room(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    output = FullDisk(room=33)
    console = Console(output)  # type: ignore[arg-type]
    console.follow(log, 0, 0)
    wait_until(lambda: output.refused > 0)
    output.room = 1_000_000
    wait_until(lambda: output.held.endswith(b"line 99\n"))
    with log.open("ab") as file:
        file.write(b"more\n")
    console.ended(log)
    console.finish(10)
    lines = [b"[rank 0] line %d" % number for number in range(100)]
    assert output.held.splitlines() == [*lines, b"[rank 0] more"]


def test_a_dead_trainers_helpers_are_killed_and_those_of_a_living_one_are_not(tmp_path):
    helper = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    env = {"EDL_POD_ID": "p", "EDL_STAGE": "1"}
    script = f"""
import os, sys
from pathlib import Path
from pod_runtime import orphans, processes
from pod_runtime.launcher.trainers import TrainerProcess
processes.set_child_subreaper()
trainers = [
    TrainerProcess(stage=1, attempt=0, rank=rank, argv=[sys.executable, "-c", {helper!r}],
                   env={{**os.environ, **{env!r}, "PADDLE_TRAINER_ID": str(rank)}},
                   log_path=Path({str(tmp_path)!r}) / f"log_{{rank}}")
    for rank in (0, 1)
]
def has_begun(process):  # amid its exec a process shows no environment
    shown = processes.environment(process.pid)
    return shown and Path(f"/proc/{{process.pid}}/cmdline").read_bytes().startswith(b"sleep")
while sum(map(bool, map(has_begun, processes.descendants(os.getpid())))) < 2:
    pass
trainers[0].send_signal(9)
trainers[0].reap()
killed = orphans.kill_orphans(trainers[0].marks, {{trainers[1].pid}})
reaped = orphans.reap_adopted({{trainers[1].pid}})
left = processes.descendants(os.getpid())
print(len(killed), killed == reaped, len(left))
trainers[1].send_signal(9)
for process in left:
    processes.send_signal(process.pid, process.start_time, 9)
"""
    assert run_code(script) == "1 True 2\n"


def test_a_trainer_that_sigkill_does_not_end_is_given_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pod_runtime.launcher.trainer_pool.UNKILLABLE_S", 0.2)
    config = LaunchConfig(
        command=("sleep", "600"), log_dir=tmp_path / "log", run_dir=tmp_path, console=False
    )
    pool = TrainerPool(config, replace(POD, pod_dir=tmp_path), os.environ, "channel")
    plan = make_plan(1, Order.START, (make_part("pod_1_0", ranks=(0, 1)),))
    first, second = (pool.start(plan, rank) for rank in (0, 1))
    with freezer() as group:
        for trainer in (first, second):
            freeze(group, psutil.Process(trainer.pid))
        assert pool.give_up_at() is None
        first.send_signal(signal.SIGKILL)
        assert pool.give_up_at() is not None
        assert f"process {first.pid} (state D) has not ended for" in pool.give_up(first)
        pool.kill_all()  # it comes to its end
        assert f"rank 1: process {second.pid} (state D) has not ended" in caplog.text
        assert list(pool) == []

    def are_reaped() -> bool:
        pool.sweep()
        return all(processes.read(each.pid) is None for each in (first, second))

    wait_until(are_reaped)


def test_only_files_of_our_own_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (
        f"paddle_{dead.pid}_1_2",
        f"paddle_{os.getpid()}_1_2",  # its maker is alive
        "paddle_999999999_1_2",  # nobody of ours
        f"psm_{dead.pid}",
    ):
        (tmp_path / name).touch()
    assert remove_shared_memory({dead.pid, os.getpid()}, tmp_path) == [f"paddle_{dead.pid}_1_2"]
    assert len(list(tmp_path.iterdir())) == 3
    assert remove_shared_memory({dead.pid}, tmp_path / "none") == []


def test_a_process_without_children_has_nothing_to_reap():
    code = (
        "from pod_runtime.orphans import kill_orphans, reap_adopted\n"
        "print(kill_orphans({'EDL_POD_ID': 'no such pod'}, ()), reap_adopted(()))"
    )  # in a process of its own: this one may have children of earlier tests
    assert run_code(code) == "set() set()\n"


@pytest.mark.parametrize(
    ("names", "highest"),
    [((), 0), (("stage_00000002", "stage_00000010"), 10), (("stage_", "stage_x", "y"), 0)],
)
def test_the_highest_stage_of_a_checkpoint_path(tmp_path, names, highest):
    for name in names:
        (tmp_path / name).mkdir()
    assert highest_stage(tmp_path) == highest
    assert highest_stage(tmp_path / "missing") == 0


@pytest.mark.slow
def test_a_killed_paddle_trainer_leaves_neither_loader_processes_nor_shared_memory(tmp_path):
    pytest.importorskip("paddle")
    loader = tmp_path / "train.py"
    loader.write_text("""
import time, numpy as np, paddle
class Images(paddle.io.Dataset):
    def __len__(self): return 100000
    def __getitem__(self, i): return np.zeros((3, 64, 64), "float32"), i
if __name__ == "__main__":
    for n, batch in enumerate(paddle.io.DataLoader(Images(), batch_size=32, num_workers=2)):
        print("batch", n, flush=True); time.sleep(0.05)
""")
    script = f"""
import os, sys
from pathlib import Path
from pod_runtime import orphans, processes
from pod_runtime.launcher.trainers import TrainerProcess
from tests.support import wait_until
processes.set_child_subreaper()
log = Path({str(tmp_path / "log")!r})
trainer = TrainerProcess(stage=1, attempt=0, rank=0, argv=[sys.executable, {str(loader)!r}],
    env={{**os.environ, "EDL_POD_ID": "p", "EDL_STAGE": "1", "PADDLE_TRAINER_ID": "0"}},
    log_path=log)
wait_until(lambda: "batch 5" in log.read_text())
trainer.note_children()
trainer.send_signal(9)
trainer.reap()
killed = orphans.kill_orphans(trainer.marks, ())
orphans.reap_adopted(())
pids = killed | trainer.children | {{trainer.pid}}
removed = orphans.remove_shared_memory(pids)
left = [n for n in os.listdir("/dev/shm") if n.startswith(tuple(f"paddle_{{p}}_" for p in pids))]
print(len(killed), len(removed) > 0, left, len(processes.descendants(os.getpid())))
"""
    shown = run_code(script, timeout_s=100)
    assert shown == "2 True [] 0\n", (tmp_path / "log").read_text()
