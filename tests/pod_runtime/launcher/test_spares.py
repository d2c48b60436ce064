"""Warm spares, as real processes: they become the trainer that they stand in for."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from job_server.api.wire import Order, PodOrders
from pod_runtime.launcher import decisions as launcher_decisions
from pod_runtime.launcher.decisions import QUIET_S, WarmSpare
from pod_runtime.launcher.spares import MARK, Spares
from pod_runtime.launcher.state import spare_started, spares_counted
from pod_runtime.launcher.trainers import TrainerProcess
from pod_runtime.processes import is_alive, may_raise_priority, read, start_time
from tests.pod_runtime.launcher.test_launcher_state import NOW, Simulated, plan, preparing
from tests.programs import run_code
from tests.support import wait_until

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


@pytest.fixture
def spares(tmp_path: Path):
    # Without Paddle, which takes a second to import: what is imported is another test's business.
    made = Spares((), tmp_path / "log")
    yield made
    made.end_all()


def ready(spares: Spares, env: dict[str, str] | None = None) -> None:
    spare = spares.start({"PATH": os.environ["PATH"], "OLD": "1", **(env or {})})

    def is_ready() -> bool:
        assert spare.receive()
        return spare.ready

    wait_until(is_ready, 60)


def start(spares: Spares, script: Path, *args: str) -> TrainerProcess:
    return TrainerProcess(
        stage=4,
        attempt=0,
        rank=2,
        argv=(sys.executable, str(script), *args),
        env={"PATH": os.environ["PATH"], "NEW": "2", "EDL_STAGE": "4", "PADDLE_TRAINER_ID": "2"},
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
    ready(spares)
    pid = next(iter(spares)).process.pid
    trainer = start(spares, script, "--epochs", "3")
    assert trainer.pid == pid
    assert end(trainer) == 0
    warm = told(script)
    (script.parent / "trainer.log").unlink()
    trainer = start(spares, script, "--epochs", "3")  # no spare is left
    assert trainer.pid != pid
    assert end(trainer) == 0
    cold = told(script)
    for each in (warm, cold):
        env = each["env"]
        assert isinstance(env, dict)
        assert env.pop(MARK, "") == ("1" if each is warm else "")
        for name in ("LC_CTYPE", "OLDPWD"):
            env.pop(name, None)
    assert warm == cold
    assert warm["argv"] == [str(script), "--epochs", "3"]
    assert warm["beside"] == 7
    assert "OLD" not in warm["env"]  # type: ignore[operator]
    assert warm["nice"] == os.getpriority(os.PRIO_PROCESS, 0)


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
import os, signal
for number in (signal.SIGTERM, signal.SIGSEGV):
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), number)
    print("ended by", os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_trainer_with_paddle_says_nothing_of_a_sigterm_and_all_of_a_crash(tmp_path, script):
    script.write_text(ENDS)
    spares = Spares(("paddle",), tmp_path / "log")
    try:
        ready(spares)
        assert end(start(spares, script)) == 0
    finally:
        spares.end_all()
    log = (tmp_path / "trainer.log").read_text()
    quiet, _, loud = log.partition("ended by 15\n")
    assert quiet == ""
    assert "`Segmentation fault` is detected" in loud
    assert loud.endswith("ended by 11\n")


def test_a_spare_that_still_imports_is_taken_and_hurries(spares, script):
    spare = spares.start({"PATH": os.environ["PATH"]})
    assert not spare.ready
    trainer = start(spares, script)
    assert trainer.pid == spare.process.pid
    assert end(trainer) == 0, trainer.last_words()
    assert told(script)["nice"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_spare_that_died_unnoticed_is_no_loss(spares, script):
    ready(spares)
    spare = next(iter(spares))
    os.kill(spare.process.pid, signal.SIGKILL)
    spare.process.wait()
    trainer = start(spares, script)
    assert end(trainer) == 0
    assert told(script)["argv"] == [str(script)]


def test_what_a_trainer_that_was_a_spare_forked_is_found_by_the_spares_mark(script):
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
trainer = TrainerProcess(stage=4, attempt=0, rank=2, argv=[sys.executable, {str(script)!r}, "fork"],
                         env={{}}, log_path=Path({str(script.parent)!r}) / "log", spares=spares)
trainer.reap()
killed = orphans.kill_orphans(trainer.marks, ())
print(len(killed), killed == orphans.reap_adopted(()), len(processes.descendants(os.getpid())))
"""
    assert run_code(code) == "1 True 0\n"


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


def test_a_spare_ends_with_its_launcher(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from pod_runtime.launcher.spares import Spares\n"
        "s = Spares((), Path(sys.argv[1])); print(s.start({}).process.pid, "
        "flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    started = start_time(pid)
    assert started is not None
    launcher.kill()
    launcher.wait(30)
    launcher.stdout.close()
    wait_until(lambda: not is_alive(pid, started), 30)


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


def wants(pod: Simulated, spares: int) -> None:
    assert pod.pod.orders is not None
    orders = PodOrders(
        server_id="s", revision=99, plans=pod.pod.plans, heartbeat_s=1.0, spares=spares
    )
    pod.pod = replace(pod.pod, orders=orders)


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
    pod.pod = spares_counted(pod.pod, 1, warming=False)
    assert warms(pod, NOW + QUIET_S + 61)
    pod.pod = spares_counted(pod.pod, 2, warming=False)
    assert not warms(pod, NOW + QUIET_S + 90)


def test_no_spare_is_started_beside_a_preparation():
    pod = Simulated()
    pod.train()
    pod.told(plan(1, Order.GO), preparing())
    wants(pod, 1)
    assert not warms(pod, NOW + 100)
