"""Real processes, because a fake cannot show that no trainer outlives its pod."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pod_runtime import processes, shim_wire
from pod_runtime.shim_wire import PodExit, ShimError
from tests.programs import loaded_by
from tests.support import nothing_writable, wait_until

StartShim = Callable[..., Path]

IGNORES_SIGTERM = """
    import os, pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("stubborn").write_text(f"{os.getpid()}\\n")
    time.sleep(600)
"""


@pytest.fixture
def start_shim(tmp_path: Path) -> Iterator[StartShim]:
    """Start a shim in a folder of its own; every process of it is gone when the test ends."""
    shims: list[subprocess.Popen[bytes]] = []
    folders: list[Path] = []

    def start(*command: str, name: str = "pod", **env: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        folders.append(folder)
        argv = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder), "--"]
        environ = {**os.environ, "EDL_GRACE_S": "5", "MARK": str(tmp_path), **env}
        shims.append(subprocess.Popen([*argv, *command], cwd=tmp_path, env=environ))
        wait_until(lambda: answers(folder) or (folder / "exit.json").exists())
        return folder

    yield start
    for shim, folder in zip(shims, folders, strict=True):
        if shim.poll() is None:
            with contextlib.suppress(ShimError):  # a SIGTERM alone leaves a client time to fetch
                ask(folder, op="release")
            shim.terminate()
            try:
                shim.wait(120)
            except subprocess.TimeoutExpired:
                shim.kill()
                shim.wait()
    processes.kill_marked("MARK", str(tmp_path), lambda _pid, _env: False)


def python(tmp_path: Path, text: str, name: str = "script.py") -> str:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def answers(folder: Path) -> bool:
    try:
        ask(folder, op="status")
    except ShimError:
        return False
    return True


def ask(folder: Path, **request: Any) -> dict[str, Any]:
    return shim_wire.request(folder, request)[0]


def ended(folder: Path) -> PodExit:
    wait_until(lambda: shim_wire.read_exit(folder) is not None, what="the pod's end")
    found = shim_wire.read_exit(folder)
    assert found is not None
    return found


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), what=str(path))
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    found = processes.read(pid)
    return found is None or found.state == "Z"


def shim_pid(folder: Path) -> int:
    return int(json.loads((folder / "shim.json").read_text())["pid"])


def put(folder: Path, stage: int, text: bytes, *, announced: int | None = None) -> None:
    """Have the shim hold a segment of pod p."""
    fd = os.memfd_create("segment")
    try:
        os.write(fd, text)
        size = len(text) if announced is None else announced
        segment = {"pod_id": "p", "stage": stage, "size_bytes": size, "digest": "d"}
        shim_wire.request(folder, {"op": "put", "segment": segment}, (fd,))
    finally:
        os.close(fd)


def get(folder: Path, stage: int | None = None) -> list[tuple[int, bytes]]:
    """Return stage and content of each segment that the shim hands out, in its order."""
    answer, fds = shim_wire.request(folder, {"op": "get", "stage": stage})
    contents = [os.pread(fd, 100, 0) for fd in fds]
    for fd in fds:
        os.close(fd)
    return [(each["stage"], text) for each, text in zip(answer["segments"], contents, strict=True)]


@pytest.mark.parametrize(
    ("line", "code", "signal_number", "reason"),
    [
        pytest.param("exit 0", 0, None, "exited with code 0", id="success"),
        pytest.param("exit 3", 3, None, "exited with code 3", id="failure"),
        pytest.param("kill -35 $$", None, 35, "ended by signal 35", id="a signal without a name"),
        pytest.param("kill -SEGV $$", None, signal.SIGSEGV, "ended by SIGSEGV", id="signal"),
    ],
)
def test_the_way_a_script_ended_is_written_down(start_shim, line, code, signal_number, reason):
    folder = start_shim("bash", "-c", f"echo first; echo last; {line}")
    assert ended(folder) == PodExit(
        code=code, signal=signal_number, reason=reason, last_lines=("first", "last")
    )


def test_a_script_that_cannot_be_started_says_why(start_shim):
    end = ended(start_shim("/no/such/program"))
    assert end.code == 127
    assert end.reason == "cannot start /no/such/program: No such file or directory"


def test_the_shim_writes_who_it_is_and_is_a_session_leader(start_shim):
    folder = start_shim("sleep", "600", EDL_POD_ID="pod_0_0")
    written = json.loads((folder / "shim.json").read_text())
    assert written["pod_id"] == "pod_0_0"
    assert written["argv"] == ["sleep", "600"]
    assert processes.is_alive(written["pid"], written["start_time"])
    assert os.getsid(written["pid"]) == written["pid"]


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace(start_shim, tmp_path):
    folder = start_shim(sys.executable, python(tmp_path, IGNORES_SIGTERM))
    pid = pid_in(tmp_path / "stubborn")
    ask(folder, op="stop", grace_s=0.3)
    end = ended(folder)
    assert is_gone(pid)
    assert end.signal == signal.SIGKILL
    assert end.reason == (
        "stopped on request: ended by SIGKILL; what was left after the grace was killed"
    )


def test_a_stop_waits_for_a_child_that_still_saves_after_its_shell_has_ended(start_shim, tmp_path):
    saver = python(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        def save(*_):
            time.sleep(0.5)
            pathlib.Path("saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("saver").write_text(f"{os.getpid()}\\n")
        while True:
            time.sleep(60)
        """,
    )
    folder = start_shim("bash", "-c", f"{sys.executable} {saver}; true")
    pid_in(tmp_path / "saver")
    ask(folder, op="stop", grace_s=20)
    end = ended(folder)
    assert (tmp_path / "saved").exists()
    assert end.reason == "stopped on request: ended by SIGTERM"


def test_a_grandchild_in_a_session_of_its_own_does_not_survive_a_stop(start_shim, tmp_path):
    script = python(tmp_path, IGNORES_SIGTERM)
    folder = start_shim("bash", "-c", f"setsid {sys.executable} {script} & sleep 600")
    pid = pid_in(tmp_path / "stubborn")
    ask(folder, op="stop", grace_s=0.2)
    ended(folder)
    assert is_gone(pid)


def test_what_a_script_leaves_behind_is_ended_before_its_exit_is_told(start_shim, tmp_path):
    script = python(tmp_path, IGNORES_SIGTERM)
    folder = start_shim(
        "bash",
        "-c",
        f"setsid {sys.executable} {script} & until [ -s stubborn ]; do sleep 0.01; done; exit 7",
        EDL_GRACE_S="0.3",
    )
    end = ended(folder)
    assert is_gone(pid_in(tmp_path / "stubborn"))
    assert end.code == 7
    assert end.reason.startswith("the script ended and left processes behind: exited with code 7")


def test_a_shim_without_a_free_descriptor_keeps_what_it_holds_and_ends_its_pod_later(
    start_shim, tmp_path
):
    text = f"cd {tmp_path}; until [ -e go ]; do sleep 0.1; done; setsid sleep 99 & echo $! > child"
    folder = start_shim("bash", "-c", text)
    put(folder, 3, b"state")
    shim = psutil.Process(shim_pid(folder))
    low, high = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (3, high))
    (tmp_path / "go").touch()
    child = pid_in(tmp_path / "child")
    before = shim.num_ctx_switches().voluntary
    wait_until(lambda: shim.num_ctx_switches().voluntary > before + 5, what="it tries")
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (low, high))
    ended(folder)
    assert is_gone(child)
    assert get(folder) == [(3, b"state")]


def test_a_shim_without_a_free_descriptor_lets_nobody_go_who_watches_it(start_shim):
    folder = start_shim("sleep", "600")
    launcher = shim_wire.connect(folder, 60.0)  # whose end would be that of its trainers
    launcher.send({"op": "watch", "fds": 0})
    assert launcher.receive() is not None
    shim = psutil.Process(shim_pid(folder))
    low, high = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (3, high))
    before = shim.num_ctx_switches().voluntary
    client = shim_wire.connect(folder, 60.0)
    wait_until(lambda: shim.num_ctx_switches().voluntary > before + 5, what="it tries")
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (low, high))
    client.send({"op": "status", "fds": 0})
    answer = client.receive()
    assert answer is not None
    assert answer[0]["running"] is True
    launcher.send({"op": "status", "fds": 0})
    assert launcher.receive() is not None
    launcher.close()
    client.close()


def test_kill_does_not_wait_for_any_grace(start_shim, tmp_path):
    folder = start_shim(sys.executable, python(tmp_path, IGNORES_SIGTERM))
    pid_in(tmp_path / "stubborn")
    ask(folder, op="stop", grace_s=600)
    ask(folder, op="kill")
    assert ended(folder).reason == "killed on request: ended by SIGKILL"


def test_a_stopped_process_is_woken_to_take_its_sigterm(start_shim, tmp_path):
    folder = start_shim("bash", "-c", "echo $$ > shell; kill -STOP $$")
    pid = pid_in(tmp_path / "shell")
    wait_until(lambda: (found := processes.read(pid)) is not None and found.state == "T")
    ask(folder, op="stop", grace_s=600)
    assert ended(folder).signal == signal.SIGTERM


def test_sigterm_to_the_shim_ends_the_pod_and_then_the_shim(start_shim):
    folder = start_shim("sleep", "600")
    os.kill(shim_pid(folder), signal.SIGTERM)
    assert ended(folder).reason == "the shim was told to end: ended by SIGTERM"
    wait_until(lambda: is_gone(shim_pid(folder)))


def test_a_script_dies_with_its_shim(start_shim, tmp_path):
    folder = start_shim("bash", "-c", "echo $$ > shell; sleep 600 & wait")
    pid = pid_in(tmp_path / "shell")
    os.kill(shim_pid(folder), signal.SIGKILL)
    wait_until(lambda: is_gone(pid))


def test_the_script_finds_signals_as_any_program_does(start_shim):
    end = ended(start_shim("bash", "-c", "grep SigIgn /proc/self/status"))
    assert end.last_lines == ("SigIgn:\t0000000000000000",)


def test_segments_survive_the_script_and_are_handed_out_newest_first(start_shim, tmp_path):
    folder = start_shim("bash", "-c", "until [ -e go ]; do sleep 0.01; done")
    put(folder, 1, b"old")
    put(folder, 2, b"new state")
    (tmp_path / "go").touch()
    ended(folder)
    assert get(folder) == [(2, b"new state"), (1, b"old")]


def test_a_segment_of_the_same_pod_and_stage_takes_the_others_place(start_shim):
    folder = start_shim("sleep", "600")
    put(folder, 1, b"first")
    put(folder, 1, b"second")
    assert get(folder, 1) == [(1, b"second")]


def test_dropped_segments_are_forgotten(start_shim):
    folder = start_shim("sleep", "600")
    for stage in (1, 2, 3):
        put(folder, stage, b"x")
    ask(folder, op="drop", below_stage=3)
    assert [each["stage"] for each in ask(folder, op="status")["segments"]] == [3]


def test_a_shim_that_holds_a_segment_stays_until_it_is_released(start_shim):
    folder = start_shim("sleep", "600")
    put(folder, 1, b"x")
    ask(folder, op="stop", grace_s=5)
    ended(folder)
    assert ask(folder, op="status")["running"] is False
    ask(folder, op="release")
    wait_until(lambda: is_gone(shim_pid(folder)))
    assert not (folder / "sock").exists()


@pytest.mark.parametrize("watched", [False, True])
def test_a_shim_that_is_told_to_end_keeps_its_segment_for_a_moment_or_as_long_as_it_is_watched(
    start_shim, watched
):
    folder = start_shim("sleep", "600")
    put(folder, 1, b"x")
    watcher = shim_wire.connect(folder, 60.0)
    if watched:
        watcher.send({"op": "watch", "fds": 0})
        assert watcher.receive() is not None
    left_at = time.monotonic()
    os.kill(shim_pid(folder), signal.SIGTERM)
    assert ended(folder).signal == signal.SIGTERM
    if watched:
        time.sleep(shim_wire.SIGNALLED_LINGER_S + 0.5)
        assert get(folder) == [(1, b"x")]
        left_at = time.monotonic()
    watcher.close()
    wait_until(lambda: is_gone(shim_pid(folder)), 120, "the shim's end")
    assert time.monotonic() - left_at > shim_wire.SIGNALLED_LINGER_S


def test_a_shim_without_a_segment_goes_with_its_pod(start_shim):
    folder = start_shim("true")
    ended(folder)
    wait_until(lambda: is_gone(shim_pid(folder)))


def test_a_watcher_is_told_of_the_exit_and_sees_the_shim_go(start_shim, tmp_path):
    folder = start_shim("bash", "-c", "until [ -e go ]; do sleep 0.01; done; exit 4")
    plain, told = shim_wire.connect(folder, 60.0), shim_wire.connect(folder, 60.0)
    plain.send({"op": "watch", "fds": 0})
    told.send({"op": "watch", "exit": True, "fds": 0})
    assert plain.receive() is not None
    assert told.receive() is not None
    (tmp_path / "go").touch()
    news = told.receive()
    assert news is not None
    assert news[0]["exit"]["code"] == 4
    assert told.receive() is None
    assert plain.receive() is None
    plain.close()
    told.close()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"op": "dance"}, "op: 'dance' is none of status, stop"),
        ({}, "op: None is none of"),
        ({"op": "stop", "grace_s": "soon"}, "grace_s: expected 0 to 86400 seconds, got 'soon'"),
        ({"op": "stop", "grace_s": -1}, "grace_s: expected"),
        ({"op": "stop", "grace_s": float("nan")}, "grace_s: expected"),
        ({"op": "put"}, "segment: expected an object"),
        ({"op": "put", "segment": {"pod_id": "p", "stage": 1, "size_bytes": 1}}, "put: expected"),
        ({"op": "put", "segment": {"pod_id": "p", "stage": -1, "size_bytes": 1}}, "segment.stage"),
        ({"op": "get", "stage": "all"}, "stage: expected a whole number"),
        ({"op": "drop", "below_stage": None}, "below_stage: expected"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_and_harms_nothing(start_shim, request_, error):
    folder = start_shim("sleep", "600")
    with pytest.raises(ShimError, match=re.escape(error)):
        ask(folder, **request_)
    assert ask(folder, op="status")["running"] is True


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"not json\n", id="no json"),
        pytest.param(b"[1]\n", id="no object"),
        pytest.param(b"\xff\xfe\n", id="no text"),
        pytest.param(b"[" * 100_000 + b"\n", id="a hundred thousand brackets"),
        pytest.param(b"x" * (2 << 20), id="an endless line"),
        pytest.param(b'{"op": "put", "fds": 3}\n', id="descriptors that never came"),
        pytest.param(b'{"op": "sta', id="half a request"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_garbage_on_the_socket_harms_nothing(start_shim, data):
    folder = start_shim("sleep", "600")
    line = shim_wire.connect(folder)
    try:
        line.socket.sendall(data)
        line.socket.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it hung up on us: its right
    line.close()
    assert ask(folder, op="status")["running"] is True


def test_a_segment_that_is_smaller_than_announced_is_refused(start_shim):
    folder = start_shim("sleep", "600")
    with pytest.raises(ShimError, match="1000 announced, the descriptor has 5"):
        put(folder, 1, b"short", announced=1000)
    assert ask(folder, op="status")["segments"] == []


def test_a_client_that_reads_nothing_does_not_hold_up_the_others(start_shim):
    folder = start_shim("sleep", "600")
    deaf = shim_wire.connect(folder)
    deaf.socket.setblocking(False)
    try:
        for _ in range(20_000):
            deaf.socket.send(b'{"op": "status", "fds": 0}\n')
    except OSError:
        pass  # full, or hung up
    assert ask(folder, op="status")["running"] is True
    deaf.close()


def test_more_connections_than_it_serves_at_once_do_not_lock_anyone_out(start_shim):
    folder = start_shim("sleep", "600")
    idle = []
    for _ in range(150):
        idle.append(shim_wire.connect(folder))
        wait_until(lambda: answers(folder))  # so fast, the kernel's queue would be full before
    for line in idle:
        line.close()


def test_a_folder_path_longer_than_a_socket_name_may_be_works(start_shim):
    folder = start_shim("sleep", "600", name="/".join(["a" * 100] * 3))
    assert len(str(folder / "sock")) > 200
    assert ask(folder, op="status")["running"] is True


def test_a_second_shim_of_the_same_folder_is_refused(start_shim):
    folder = start_shim("sleep", "600")
    argv = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder), "--", "true"]
    second = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "has a running shim already" in second.stderr
    assert ask(folder, op="status")["running"] is True


def test_two_pods_do_not_run_in_one_folder_and_the_next_may_once_the_first_has_ended(
    start_shim, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    folder = start_shim("sleep", "600", EDL_POD_FOLDER=str(own))
    (tmp_path / "b").mkdir()
    argv = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(tmp_path / "b"), "--"]
    environ = {**os.environ, "EDL_POD_FOLDER": str(own)}
    second = subprocess.run([*argv, "true"], capture_output=True, text=True, env=environ)
    assert second.returncode == 2
    assert f"another pod runs in {own}; give this client a folder of its own" in second.stderr
    segment = {"pod_id": "pod_0_0", "stage": 1, "size_bytes": 5}
    fd = os.memfd_create("segment")
    os.write(fd, b"state")
    shim_wire.request(folder, {"op": "put", "segment": segment}, (fd,))  # its shim stays for it
    os.close(fd)
    ask(folder, op="kill")
    wait_until(lambda: (folder / "exit.json").exists())
    assert subprocess.run([*argv, "true"], env=environ, timeout=120).returncode == 0
    assert answers(folder)


def test_pods_run_in_one_folder_by_links_that_their_package_script_has_made(start_shim, tmp_path):
    (tmp_path / "code").mkdir()
    for name in ("one", "two"):
        (tmp_path / name).symlink_to("code")
    start_shim("sleep", "600", EDL_POD_FOLDER=str(tmp_path / "one"))
    (tmp_path / "b").mkdir()
    argv = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(tmp_path / "b"), "--"]
    environ = {**os.environ, "EDL_POD_FOLDER": str(tmp_path / "two")}
    assert subprocess.run([*argv, "true"], env=environ, timeout=120).returncode == 0


@pytest.mark.parametrize(
    "args", [[], ["--pod_dir", "x"], ["--", "true"], ["--pod_dir", "/no/such", "--", "true"]]
)
def test_a_wrong_command_line_is_refused(args):
    argv = [sys.executable, "-m", "pod_runtime.shim", *args]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 2


def test_the_last_lines_of_a_huge_log_are_short(start_shim):
    end = ended(start_shim("bash", "-c", "yes | head -c 3000000; printf 'x%.0s' {1..9000}; exit 1"))
    assert len(end.last_lines) == 20
    assert max(map(len, end.last_lines)) <= 500


def test_the_shim_loads_neither_framework_nor_numpy_nor_psutil():
    others = {"paddle", "numpy", "psutil", "flask", "argparse"}
    assert others.isdisjoint(loaded_by("pod_runtime.shim.__main__"))


def test_a_full_disk_behind_its_log_does_not_end_the_shim_of_a_pod_that_has_ended(tmp_path):
    folder = tmp_path / "pod"
    (folder / "exit.json").mkdir(parents=True)  # it cannot be written
    argv = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder), "--", "true"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(argv, cwd=tmp_path, stderr=full, timeout=120, check=False)
    assert ended.returncode != 1  # by an error; Python says 120 of what it could not write itself
    assert not (folder / "sock").exists()


def test_a_small_file_that_finds_no_room_leaves_nothing_behind(tmp_path):
    with nothing_writable(), pytest.raises(OSError, match="too large"):
        shim_wire.write_json(tmp_path / "exit.json", {"code": 0})
    assert list(tmp_path.iterdir()) == []
