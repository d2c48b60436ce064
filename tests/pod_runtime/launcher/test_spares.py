"""Warm spares, as real processes: they fork trainers, or become the one that they stand in for."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from job_server.api.wire import Order, PodOrders, ReportKind, StagePlan, Way
from pod_runtime.errors import SpawnError
from pod_runtime.launcher import decisions as launcher_decisions
from pod_runtime.launcher.decisions import QUIET_S, SendReport, Spawn, WarmSpare
from pod_runtime.launcher.spares import Spare, Spares
from pod_runtime.launcher.state import ordered, spare_failed, spare_started, spares_counted
from pod_runtime.launcher.trainers import TrainerProcess
from pod_runtime.processes import (
    is_alive,
    may_raise_priority,
    read,
    set_child_subreaper,
    start_time,
)
from pod_runtime.spare import MARK
from tests.pod_runtime.launcher.test_launcher_state import NOW, Simulated, plan, preparing
from tests.programs import run_code
from tests.support import ROOT, no_descriptor_free, wait_until

TELL = """
import json, os, sys
import beside
told = {"argv": sys.argv, "name": __name__, "file": __file__, "beside": beside.VALUE,
        "env": dict(os.environ), "loaded": "colorsys" in sys.modules,
        "nice": os.getpriority(os.PRIO_PROCESS, 0)}
print("TOLD" + json.dumps(told))
if "fail" in sys.argv:
    raise ValueError("as it was asked to")
if "fork" in sys.argv and os.fork() == 0:
    import time
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    return path


@pytest.fixture(autouse=True)
def subreaper():
    """Be what a launcher is: the parent of what a spare forks."""
    set_child_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.fixture
def spares(tmp_path: Path):
    # Without a framework, which takes seconds to import: what is imported is another test's affair.
    made = Spares((), tmp_path / "log")
    yield made
    made.end_all()


def ready(spares: Spares, env: dict[str, str] | None = None) -> Spare:
    spare = spares.start({"PATH": os.environ["PATH"], "OLD": "1", **(env or {})})

    def is_ready() -> bool:
        assert spare.receive(), "the spare has died"
        return spare.ready

    spare.hurry()  # else the imports wait for a processor behind all else
    wait_until(is_ready, 300)
    return spare


def start(
    spares: Spares, script: Path, *args: str, env: dict[str, str] | None = None
) -> TrainerProcess:
    return TrainerProcess(
        stage=4,
        attempt=0,
        rank=2,
        argv=(sys.executable, str(script), *args),
        env={
            "PATH": os.environ["PATH"],
            "NEW": "2",
            "EDL_STAGE": "4",
            "PADDLE_TRAINER_ID": "2",
            **(env or {}),
        },
        log_path=script.parent / "trainer.log",
        spares=spares,
    )


def told(script: Path) -> dict[str, object]:
    log = (script.parent / "trainer.log").read_text()
    lines = [line for line in log.splitlines() if line.startswith("TOLD")]
    assert len(lines) == 1, log
    value: dict[str, object] = json.loads(lines[0].removeprefix("TOLD"))
    return value


def end(trainer: TrainerProcess) -> int:
    wait_until(lambda: (read(trainer.pid) or read(1)).state == "Z", 60)  # type: ignore[union-attr]
    return trainer.reap()


def test_a_script_finds_what_it_finds_when_it_is_started_itself(spares, script):
    trainer = start(spares, script, "--epochs", "3")  # there is no spare
    assert end(trainer) == 0
    cold = told(script)
    spare = ready(spares)
    for number in range(2):
        (script.parent / "trainer.log").unlink()
        trainer = start(spares, script, "--epochs", "3")
        assert trainer.pid != spare.process.pid
        assert end(trainer) == 0, trainer.last_words()
        warm = told(script)
        assert list(spares) == [spare], "it makes trainers, and stays"
        for each, mark in ((warm, trainer.marks[MARK]), (cold, "")):
            env = each["env"]
            assert isinstance(env, dict)
            assert env.pop(MARK, "") == mark
            for name in ("LC_CTYPE", "OLDPWD"):
                env.pop(name, None)
        assert warm == cold, number
    assert warm["argv"] == [str(script), "--epochs", "3"]
    assert warm["beside"] == 7
    assert "OLD" not in warm["env"]  # type: ignore[operator]
    assert warm["nice"] == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("more", [(), ("--note", "two words", "x" * 3000)])
@pytest.mark.parametrize("forks", [True, False])
def test_the_system_shows_a_trainer_by_its_script_and_not_as_a_spare(tmp_path, script, forks, more):
    script.write_text("import time; print('runs', flush=True); time.sleep(600)")
    (tmp_path / "sitecustomize.py").write_text(NOTHING if forks else THREAD)
    command = (sys.executable, str(script), *more)
    spares = Spares((), tmp_path / "log", command)
    try:
        spare = ready(spares, {"PYTHONPATH": str(tmp_path)})
        assert spare.forks == forks
        before = psutil.Process(spare.process.pid).environ()
        trainer = start(spares, script, *more)
        wait_until(lambda: "runs" in (tmp_path / "trainer.log").read_text(), 60)
        process = psutil.Process(trainer.pid)
        assert " ".join(process.cmdline()) == " ".join(command)
        assert process.environ() == {**before, MARK: trainer.marks[MARK]}
        trainer.send_signal(signal.SIGKILL)
        end(trainer)
    finally:
        spares.end_all()


THREAD = "import threading as t, time; t.Thread(target=time.sleep, args=[600], daemon=True).start()"
DEVICE = "import os; os.openpty()"
NOTHING = "import threading"


@pytest.mark.parametrize(("imported", "forks"), [(THREAD, False), (DEVICE, False), (NOTHING, True)])
def test_a_spare_forks_only_where_a_fork_loses_nothing(spares, script, imported, forks):
    (script.parent / "sitecustomize.py").write_text(imported)
    spare = ready(spares, {"PYTHONPATH": str(script.parent)})
    assert spare.forks == forks
    trainer = start(spares, script)
    assert (trainer.pid == spare.process.pid) == (not forks)
    assert list(spares) == ([spare] if forks else [])
    assert end(trainer) == 0, trainer.last_words()
    assert told(script)["argv"] == [str(script)]


@pytest.mark.parametrize("forks", [True, False])
def test_trainers_of_a_spare_have_the_version_that_is_on_the_disk(monkeypatch, tmp_path, forks):
    monkeypatch.chdir(tmp_path)  # of which `python -m` takes its modules first
    for package in ("pod_runtime", "job_server"):
        shutil.copytree(ROOT / package, tmp_path / package)
    version = tmp_path / "pod_runtime" / "trainer" / "version.py"
    thread = "import _thread, time\n_thread.start_new_thread(time.sleep, (600,))\n"
    version.write_text("VERSION = 1\n" + thread * (not forks))
    script = tmp_path / "tell.py"
    script.write_text(
        "import os\nfrom pod_runtime.trainer.version import VERSION\n"
        "print('TOLD', VERSION, os.environ['NEW'], os.environ['PADDLE_TRAINER_ID'])\n"
    )
    spares = Spares(("pod_runtime.trainer.version",), tmp_path / "log")
    try:
        path = {"PYTHONPATH": str(tmp_path)}
        spare = ready(spares, path)
        assert spare.forks == forks
        if forks:
            assert end(start(spares, script, env=path)) == 0
        version.write_text("VERSION = 22\n")
        assert end(trainer := start(spares, script, env=path)) == 0, trainer.last_words()
        log = (tmp_path / "trainer.log").read_text()
        assert log == "TOLD 1 2 2\n" * forks + "TOLD 22 2 2\n"
        assert trainer.marks[MARK]
        wait_until(lambda: not spare.receive() if forks else spare not in spares)
    finally:
        spares.end_all()


def test_a_script_behind_a_link_finds_what_lies_beside_it(spares, script):
    ready(spares)
    folder = script.parent / "elsewhere"
    folder.mkdir()
    link = folder / "train.py"
    link.symlink_to(script)
    trainer = TrainerProcess(
        stage=4,
        attempt=0,
        rank=2,
        argv=(sys.executable, str(link)),
        env={"PATH": os.environ["PATH"]},
        log_path=script.parent / "trainer.log",
        spares=spares,
    )
    assert end(trainer) == 0, trainer.last_words()
    assert told(script)["file"] == str(link)


def test_a_script_that_fails_leaves_its_error_as_its_last_words(spares, script):
    ready(spares)
    trainer = start(spares, script, "fail")
    assert end(trainer) == 1
    assert trainer.last_words() == "ValueError: as it was asked to"


ENDS = """
import os, random, signal, sys
import numpy, paddle, torch
before = set(sys.modules)
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
print("late", len(set(sys.modules) - before), flush=True)
drawn = paddle.randn([1]).item(), torch.randn(1).item(), numpy.random.rand(), random.random()
print("drawn", *drawn, flush=True)
for number in (signal.SIGTERM, signal.SIGSEGV):
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), number)
    print("ended by", os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_forks_of_a_spare_with_frameworks_are_trainers_like_others(tmp_path, script):
    script.write_text(ENDS)
    frameworks = [
        f"pod_runtime.trainer.frameworks.{name}.framework" for name in ("paddle", "torch")
    ]
    spares = Spares((*frameworks, "numpy.random"), tmp_path / "log")
    drawn = set()
    try:
        spare = ready(spares)
        assert spare.forks
        for _ in range(2):
            (tmp_path / "trainer.log").unlink(missing_ok=True)
            assert end(start(spares, script)) == 0
            log = (tmp_path / "trainer.log").read_text()
            late, numbers, log = log.split("\n", 2)
            assert late == "late 0", "PyTorch imports 800 modules with the first optimizer"
            drawn.update(numbers.split()[1:])
            # Paddle says nothing of a SIGTERM, and all of a crash.
            quiet, _, loud = log.partition("ended by 15\n")
            assert quiet == ""
            assert "`Segmentation fault` is detected" in loud
            assert loud.endswith("ended by 11\n")
    finally:
        spares.end_all()
    assert len(drawn) == 8, "each has random numbers of its own"


def test_a_spare_that_still_imports_is_taken_and_hurries(spares, script):
    spare = spares.start({"PATH": os.environ["PATH"]})
    assert not spare.ready
    trainer = start(spares, script)
    assert trainer.pid == spare.process.pid
    assert end(trainer) == 0, trainer.last_words()
    assert told(script)["nice"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_without_a_free_descriptor_there_is_no_spare_and_nothing_else_ends(spares):
    with no_descriptor_free(), pytest.raises(SpawnError, match="cannot start a spare"):
        spares.start({})
    assert list(spares) == []


def test_a_spare_that_died_unnoticed_is_no_loss(spares, script):
    spare = ready(spares)
    os.kill(spare.process.pid, signal.SIGKILL)
    spare.process.wait()
    trainer = start(spares, script)
    assert end(trainer) == 0
    assert told(script)["argv"] == [str(script)]


def test_what_a_trainer_forked_is_found_by_its_mark_and_no_other_trainers_with_it(script):
    code = f"""
import os, sys
from pathlib import Path
from pod_runtime import orphans, processes
from pod_runtime.launcher.spares import Spares
from pod_runtime.launcher.trainers import TrainerProcess
from tests.support import wait_until
processes.set_child_subreaper()
spares = Spares((), Path({str(script.parent)!r}))
spare = spares.start({{}})
wait_until(lambda: spare.receive() and spare.ready)
def start():
    return TrainerProcess(
        stage=4, attempt=0, rank=2, argv=[sys.executable, {str(script)!r}, "fork"],
        env={{}}, log_path=Path({str(script.parent)!r}) / "log", spares=spares)
trainer, other = start(), start()
trainer.reap()
other.reap()
killed = orphans.kill_orphans(trainer.marks, [spare.process.pid])
print(len(killed), killed == orphans.reap_adopted(()), len(processes.descendants(os.getpid())))
killed |= orphans.kill_orphans(other.marks, [spare.process.pid])
spares.end_all()
print(len(killed), len(processes.descendants(os.getpid())))
"""
    assert run_code(code) == "1 True 2\n2 0\n"


@pytest.mark.parametrize(
    ("module", "why"),
    [("beside", "is not in site-packages"), ("no_such_module", "there is no such module")],
)
def test_only_what_is_installed_is_imported_ahead(tmp_path, script, module, why):
    spares = Spares((module, "pytest"), tmp_path / "log")
    ready(spares, {"PYTHONPATH": str(script.parent)})
    spares.end_all()
    log = (tmp_path / "log" / "spares.log").read_text()
    assert f"--preload: {module} is left out" in log
    assert why in log
    assert "--preload: pytest" not in log


def test_a_spare_and_what_it_forked_end_with_their_launcher(tmp_path, script):
    script.write_text("import time; time.sleep(600)")
    code = f"""
import os, sys, time
from pathlib import Path
from pod_runtime import processes
from pod_runtime.launcher.spares import Spares
from tests.support import wait_until
processes.set_child_subreaper()
spares = Spares((), Path({str(tmp_path)!r}))
spare = spares.start({{}})
wait_until(lambda: spare.receive() and spare.ready)
taken = spares.take([{str(script)!r}], {{}}, Path({str(tmp_path / "log")!r}))
print(spare.process.pid, taken.process.pid, processes.read(taken.process.pid).ppid == os.getpid(),
      flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert launcher.stdout is not None
    *pids, is_child = launcher.stdout.readline().split()
    assert is_child == "True"
    begun = [(int(pid), start_time(int(pid)) or 0) for pid in pids]
    launcher.kill()
    launcher.wait(120)
    launcher.stdout.close()
    wait_until(lambda: not any(is_alive(pid, started) for pid, started in begun), 120)


def test_importing_is_gentle_only_where_the_priority_can_be_raised_again():
    code = (
        "import os, resource\n"
        "from pod_runtime.processes import may_raise_priority as may\n"
        "resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "print(may())\n"
    )
    assert run_code(code) == "False\n"
    assert may_raise_priority() or os.geteuid() != 0


# --- when the launcher starts one -----------------------------------------------------------------


def wants(pod: Simulated, spares: int, adapter: str = "") -> None:
    assert pod.pod.orders is not None
    pod.pod = replace(pod.pod, orders=replace(pod.pod.orders, spares=spares, adapter=adapter))


def warms(pod: Simulated, now: float) -> bool:
    pod.now = now
    return any(isinstance(action, WarmSpare) for action in pod.settle())


def test_a_spare_is_started_late_and_one_at_a_time():
    pod = Simulated()
    pod.train()
    wants(pod, 2)
    assert not warms(pod, NOW)
    assert launcher_decisions.next_deadline(pod.pod) is not None
    assert warms(pod, NOW + QUIET_S)
    pod.pod = spare_started(pod.pod)
    assert not warms(pod, NOW + QUIET_S + 60)
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=False)
    assert warms(pod, NOW + QUIET_S + 61)
    pod.pod = spares_counted(pod.pod, 2, warming=False)
    assert not warms(pod, NOW + QUIET_S + 90)


def test_one_spare_that_forks_is_enough():
    pod = Simulated()
    pod.train()
    wants(pod, 2)
    assert warms(pod, NOW + QUIET_S)
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=True)
    assert not warms(pod, NOW + QUIET_S + 60)


def test_no_spare_is_started_beside_a_preparation():
    pod = Simulated()
    pod.train()
    pod.told(plan(1, Order.GO), preparing())
    wants(pod, 1)
    assert not warms(pod, NOW + 100)


def comes(pod: Simulated, *plans: StagePlan) -> list[object]:
    """Tell a pod of its plans, in a job whose framework is known; return what it does."""
    orders = PodOrders(
        server_id="s", revision=1, plans=plans, heartbeat_s=1.0, spares=1, adapter="some.adapter"
    )
    pod.pod = ordered(pod.pod, orders)
    return pod.settle()


def spawns(actions: list[object]) -> bool:
    return any(isinstance(action, Spawn) for action in actions)


def test_a_jobs_first_trainers_are_made_of_a_spare_where_the_script_says_its_framework():
    orders = PodOrders(
        server_id="s", revision=1, plans=(plan(1, Order.START),), heartbeat_s=1.0, spares=1
    )
    pod = Simulated()
    pod.pod = ordered(pod.pod, orders)
    assert spawns(pod.settle())
    pod = Simulated()
    pod.pod = ordered(replace(pod.pod, adapter="some.adapter"), orders)
    assert pod.settle() == [WarmSpare(hurry=True)]
    pod.pod = spare_started(pod.pod)
    assert not spawns(pod.settle())
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=True)
    assert spawns(pod.settle())


@pytest.mark.parametrize("way", [Way.REPLACE, Way.JOIN, Way.START])
def test_a_new_pods_first_trainers_are_made_of_a_spare_that_stays(way):
    order = Order.START if way is Way.START else Order.PREPARE
    pod = Simulated()
    assert comes(pod, plan(4, order, way=way)) == [WarmSpare(hurry=True)]
    pod.pod = spare_started(pod.pod)
    assert not spawns(pod.settle())
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=True)
    assert spawns(pod.settle())
    # A crash a moment later finds the same one.
    comes(pod, plan(4, Order.END, way=way))
    pod.die(0, -signal.SIGKILL, 4)
    actions = pod.die(1, -signal.SIGKILL, 4)
    actions += comes(pod, plan(5, Order.START, way=Way.START))
    assert spawns(actions)
    assert not any(isinstance(action, WarmSpare) for action in actions)


def test_a_pod_is_ready_for_a_change_by_drain_when_its_spare_is():
    """Else the training would stand still while that imports."""

    def is_ready(actions: list[object]) -> bool:
        kinds = [action.report.kind for action in actions if isinstance(action, SendReport)]
        return ReportKind.READY in kinds

    pod = Simulated()
    actions = comes(pod, plan(4, Order.PREPARE, way=Way.DRAIN))
    assert actions == [WarmSpare(hurry=True)]
    pod.pod = spare_started(pod.pod)
    assert not is_ready(pod.settle())
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=True)
    assert is_ready(pod.settle())


def test_trainers_are_started_without_a_spare_that_does_not_come_or_does_not_stay():
    pod = Simulated()
    comes(pod, plan(4, Order.START))
    pod.pod = spare_failed(pod.pod)
    assert spawns(pod.settle())
    pod.pod = spares_counted(pod.pod, 0, warming=False)
    pod.die(0, 1, 4)
    pod.die(1, 1, 4)
    assert spawns(comes(pod, plan(5, Order.START))), "nothing is waited for twice"
    pod = Simulated()
    pod.pod = spares_counted(pod.pod, 0, warming=False, forks=False)
    assert spawns(comes(pod, plan(4, Order.START)))


def test_a_spare_that_imports_late_hurries_when_a_trainer_waits_for_it():
    pod = Simulated()
    pod.train()
    wants(pod, 1)
    assert warms(pod, NOW + QUIET_S)
    pod.pod = spare_started(pod.pod)
    actions = comes(pod, plan(1, Order.GO), plan(2, Order.PREPARE, way=Way.REPLACE))
    assert WarmSpare(hurry=True) in actions
    assert not spawns(actions)
    assert not warms(pod, pod.now), "once"
    pod.pod = spares_counted(pod.pod, 1, warming=False, forks=True)
    assert spawns(pod.settle())
