"""Elastic and distilled at once: pods and teachers change together, the student does not notice."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_server.api.wire import JobSpec, JobState
from tests import warm
from tests.e2e.cluster import Cluster
from tests.support import ROOT, free_port, require, wait_until

paddle = pytest.importorskip("paddle", reason="trains with Paddle")
require("sklearn", "trains on its digits")

TRAINER = ROOT / "tests" / "e2e" / "taught_train.py"
EPOCHS = 10  # of 30 steps
STEPS = EPOCHS * 30


def make_teacher(folder: Path) -> Path:
    """Return a model of any opinions: a student that learns other ones has lost or mixed some."""
    from distill_reader.convert import save_servable

    paddle.seed(11)
    network = paddle.nn.Sequential(
        paddle.nn.Linear(64, 10, weight_attr=paddle.nn.initializer.Normal(std=1.0)),
        paddle.nn.Softmax(),
    )
    network.eval()
    spec = paddle.static.InputSpec([None, 64], "float32", "pixels")
    save_servable(network, [spec], folder, feed_alias=["pixels"], fetch_alias=["probs"])
    return folder


class Service:
    """A discovery server and teachers that register there, as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_teacher(folder / "model")
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.running: list[subprocess.Popen[bytes]] = []
        self._run("discovery", "--server", self.endpoint)
        wait_until(lambda: self._ask("/health") is not None, 60, "discovery answers")

    def add_teacher(self) -> tuple[str, subprocess.Popen[bytes]]:
        """Return a new teacher's endpoint and process, when students may be told of it."""
        endpoint = f"127.0.0.1:{free_port()}"
        process = self._run(
            "serve", "--model", str(self.model), "--port", endpoint.split(":")[1],
            "--register", self.endpoint, "--service_name", "digits",
        )  # fmt: skip
        wait_until(lambda: endpoint in self.teachers(), 90, f"{endpoint} is registered")
        return endpoint, process

    def teachers(self) -> list[str]:
        """Return the endpoints that discovery knows."""
        known: list[str] = self._digits()["teachers"]
        return known

    def students_of(self, endpoint: str) -> int:
        """Return how many students have been given this teacher."""
        students = self._digits()["students"].values()
        return sum(endpoint in student["teachers"] for student in students)

    def _digits(self) -> dict[str, Any]:
        told = self._ask("/services") or {"services": {}}
        found: dict[str, Any] = told["services"].get("digits", {"teachers": [], "students": {}})
        return found

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End it as a lost host does, predictors included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.running:
            self.kill(process)

    def _run(self, program: str, *args: str) -> subprocess.Popen[bytes]:
        environ = {name: text for name, text in os.environ.items() if "TOKEN" not in name}
        with (self.folder / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distill_reader.{program}", *args],
                cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}{path}", timeout=5) as answer:
                return json.loads(answer.read() or b"{}")
        except OSError:
            return None


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def cluster(tmp_path: Path, service: Service) -> Iterator[Cluster]:
    script = (
        f"env PYTHONPATH={ROOT} "
        "{python} -m pod_runtime.launch --log_dir {out}/log "
        + f"{TRAINER} --discovery {service.endpoint} --epochs {EPOCHS} "
        + "--checkpoint {out}/checkpoint --out {out}/result.json --hurry {out}/hurry"
    )
    cluster = Cluster(tmp_path / "c", slots=2, script=script)
    cluster.start_server()
    cluster.start_client()
    yield cluster
    cluster.stop()


def undisturbed(folder: Path, teacher: str) -> dict[str, float]:
    """Return how the same training ends alone, with one teacher that stays."""
    folder.mkdir()
    (folder / "hurry").touch()
    done = warm.run(
        [str(TRAINER), "--teachers", teacher, f"--epochs={EPOCHS}",
         "--checkpoint", "checkpoint", "--out", "result.json", "--hurry", "hurry"],
        os.environ | {"PYTHONPATH": str(ROOT), "EDL_MAX_TRAINERS": "2"}, folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_student_learns_the_same_while_its_pods_and_its_teachers_change(
    service: Service, cluster: Cluster, tmp_path: Path
) -> None:
    first, doomed = service.add_teacher()
    second, _stays = service.add_teacher()
    cluster.submit(JobSpec(job_id="taught", pods=1, max_pods=2, spares=1))
    cluster.wait_steps(5)
    cluster.api().resize("taught", 2)
    cluster.wait_running(2)
    cluster.wait_steps(5)

    service.kill(doomed)
    cluster.wait_steps(5)
    cluster.kill(cluster.trainers()[0])
    cluster.wait_steps(5)
    wait_until(lambda: first not in service.teachers(), what="the dead teacher is off the list")
    third, _stays = service.add_teacher()
    wait_until(lambda: service.students_of(third) > 0, what="the new teacher is used")
    cluster.api().resize("taught", 1)
    cluster.wait_running(1)

    (cluster.out / "hurry").touch()
    cluster.wait_for(lambda now: now.state is JobState.SUCCEEDED, "the job succeeds", 300)
    proof = subprocess.run(
        [sys.executable, "-m", "pod_runtime.verify", str(cluster.out / "checkpoint")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"OK: {STEPS} steps, each counted once" in proof.stdout, proof.stdout + proof.stderr
    stages = cluster.status().stages
    assert (stages[0].pods, stages[1].pods, stages[-1].pods) == (1, 2, 1)
    assert len(stages) > 3, "the killed trainer's stage has ended"

    found = json.loads((cluster.out / "result.json").read_text())
    expected = undisturbed(tmp_path / "alone", second)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert found["hits"] == pytest.approx(expected["hits"], abs=0.01)
