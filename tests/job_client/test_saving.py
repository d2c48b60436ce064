"""States that only shims hold are written: real shims, real segments, real writers."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from job_client.agent import EndMode
from job_client.pods.saving import SaveAttempt
from job_server.api.errors import StoreTrouble
from job_server.api.wire import DesiredState, PodPhase, Save, SavePhase, SaveState
from pod_runtime import shim_wire
from pod_runtime.segment_header import Stamp
from pod_runtime.shim_wire import ShimError
from pod_runtime.trainer.state.checkpoint import CheckpointId, CheckpointStore
from pod_runtime.trainer.state.host_state import SaveTarget, meta_bytes
from pod_runtime.trainer.state.owner import Owner, job_holder
from pod_runtime.trainer.state.snapshot import SnapshotSegment
from pod_runtime.trainer.state.storage import LocalStorage
from tests.job_client.conftest import pod
from tests.pod_runtime.trainer.states import make_host_state
from tests.support import ROOT, wait_until

POD_DIR = "log/pods/pod_0_0"  # of a client of this test


def hold(folder: Path, places: SaveTarget | None, *, step: int = 12, fill: float = 1.0) -> None:
    """Have the shim of `folder` hold a state of stage 3."""
    host_state = make_host_state(stage=3, step=step, fill=fill)
    meta = meta_bytes(
        json.dumps(host_state.status.to_json()),
        json.dumps(host_state.scalars),
        host_state.layout,
        "null" if places is None else json.dumps(places.to_json()),
    )
    segment = SnapshotSegment.make(
        "test", writers=1, meta_bytes=len(meta), data_bytes=host_state.layout.total_bytes
    )
    segment.write_whole(State(host_state.data), host_state.layout, Stamp(stage=3, step=step), meta)  # type: ignore[arg-type]
    described = {"pod_id": folder.name, "stage": 3, "size_bytes": segment.handle.size_bytes}
    shim_wire.request(folder, {"op": "put", "segment": described}, (segment.fd,))
    segment.close()


class State:
    """What a state does for a segment."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def copy_out(self, target: memoryview, start: int, stop: int) -> None:
        target[start:stop] = self.data[start:stop]


@pytest.fixture
def shim(tmp_path: Path):
    """A pod that sleeps, under a shim."""
    folder = tmp_path / "pod_0"
    folder.mkdir()
    command = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder), "--"]
    process = subprocess.Popen([*command, "sleep", "600"], cwd=tmp_path)
    wait_until(lambda: answers(folder))
    yield folder
    shim_wire.request(folder, {"op": "release"}, timeout_s=60)
    shim_wire.request(folder, {"op": "kill"}, timeout_s=60)
    process.wait(60)


def answers(folder: Path) -> bool:
    try:
        shim_wire.request(folder, {"op": "status"})
    except ShimError:
        return False
    return True


def places(tmp_path: Path, checkpoint: str = "checkpoint") -> SaveTarget:
    path = str(tmp_path / checkpoint) if checkpoint else None
    return SaveTarget.of(path, 3, tmp_path / "run", job_id="job", submitted_at=1.0)


def written(folder: Path, *, spare: bool = False) -> SaveState:
    saving = SaveAttempt(Save(id=7, spare=spare), [folder], dict(os.environ), lambda: None)
    saving.start()
    wait_until(lambda: saving.is_over)
    assert saving.state.id == 7
    return saving.state


def hold_up_writers(tmp_path: Path) -> Path:
    """Let the writer of a checkpoint stop before its last file; return the checkpoint's folder."""
    folder = tmp_path / "checkpoint" / CheckpointId(3, 12).folder
    folder.mkdir(parents=True)
    os.mkfifo(folder / "train_status.json")  # nobody reads
    return folder


def weight_at(path: Path, step: int) -> float:
    host_state = CheckpointStore(LocalStorage(path)).load(CheckpointId(3, step))
    return float(np.frombuffer(host_state.data, np.float32, count=1)[0])


def test_the_newest_state_goes_where_the_script_has_its_checkpoints(shim, tmp_path):
    hold(shim, places(tmp_path), fill=0.5)
    said = written(shim)
    assert said == SaveState(
        id=7,
        phase=SavePhase.WRITTEN,
        stage=3,
        step=12,
        written_bytes=said.total_bytes,
        total_bytes=said.total_bytes,
        path=str(tmp_path / "checkpoint"),
    )
    assert said.total_bytes > 0
    assert weight_at(tmp_path / "checkpoint", 12) == 0.5
    again = written(shim)  # it is there: nothing is written twice
    assert (again.phase, again.path) == (SavePhase.WRITTEN, said.path)


@pytest.mark.parametrize("why", ["no path", "full", "told to", "another job's"])
def test_the_run_folder_takes_what_the_checkpoint_path_does_not(shim, tmp_path, why):
    if why == "full":
        (tmp_path / "checkpoint").write_text("a file, so no folder can be made below it")
    if why == "another job's":
        storage = LocalStorage(tmp_path / "checkpoint")
        other = Owner(storage, job_holder("other", 2.0, "http://127.0.0.1:1"))
        other.claim()
        other.close()
    hold(shim, places(tmp_path, "" if why == "no path" else "checkpoint"))
    said = written(shim, spare=why == "told to")
    assert (said.phase, said.path) == (SavePhase.WRITTEN, str(tmp_path / "run" / "checkpoint"))
    assert said.spare
    assert weight_at(tmp_path / "run" / "checkpoint", 12) == 1.0
    assert not list(tmp_path.glob("checkpoint/stage_*"))


def test_what_can_be_written_nowhere_is_refused_with_both_reasons(shim, tmp_path):
    for name in ("checkpoint", "run"):
        (tmp_path / name).write_text("a file")
    hold(shim, places(tmp_path))
    said = written(shim)
    assert said.phase is SavePhase.FAILED
    assert said.reason.count("not written: ") == 2, said.reason
    assert (said.stage, said.step) == (3, 12)


def test_a_shim_without_a_state_and_a_state_without_places_are_refused(shim):
    said = written(shim)
    assert said.phase is SavePhase.FAILED
    assert said.nothing
    assert said.reason == "no shim of this node holds a snapshot"
    hold(shim, None)
    assert "did not say where to write it" in written(shim).reason


def writers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended
            if "pod_runtime.save" in each.cmdline():
                found.append(each)
    return found


def test_a_writer_that_is_killed_amid_its_work_is_followed_by_another(shim, tmp_path):
    hold(shim, places(tmp_path))
    folder = hold_up_writers(tmp_path)
    saving = SaveAttempt(Save(id=1), [shim], dict(os.environ), lambda: None)
    saving.start()
    tensors = folder / "extra.safetensors"
    wait_until(lambda: tensors.exists() and writers(), what="the last file before that one")
    (folder / "train_status.json").unlink()
    writers()[0].send_signal(signal.SIGKILL)
    wait_until(lambda: saving.is_over)
    assert saving.state.phase is SavePhase.WRITTEN
    assert weight_at(tmp_path / "checkpoint", 12) == 1.0


def test_a_writers_warning_may_be_in_any_encoding(shim, tmp_path, monkeypatch):
    hold(shim, places(tmp_path))
    sitecustomize = tmp_path / "lib" / "sitecustomize.py"
    sitecustomize.parent.mkdir()
    sitecustomize.write_text("import os\nos.write(2, b'caf\\xe9\\n')\n")
    paths = os.pathsep.join([str(sitecustomize.parent), str(ROOT)])
    saving = SaveAttempt(Save(id=1), [shim], {**os.environ, "PYTHONPATH": paths}, lambda: None)
    saving.start()
    wait_until(lambda: saving.is_over)
    assert saving.state.phase is SavePhase.WRITTEN


def test_a_writer_that_dies_again_and_again_is_given_up_and_one_that_is_called_off_is_killed(
    shim, tmp_path
):
    environ = {**os.environ, "PYTHONHOME": "/nowhere"}  # no interpreter starts so
    saving = SaveAttempt(Save(id=1), [shim], environ, lambda: None)
    saving.start()
    wait_until(lambda: saving.is_over)
    assert saving.state.phase is SavePhase.FAILED
    assert "3 times" in saving.state.reason
    hold(shim, places(tmp_path))
    folder = hold_up_writers(tmp_path)
    saving = SaveAttempt(Save(id=1), [shim], dict(os.environ), lambda: None)
    saving.start()
    wait_until(lambda: (folder / "extra.safetensors").exists())
    saving.cancel()
    wait_until(lambda: saving.is_over)
    assert saving.state.phase is SavePhase.WRITING
    assert not writers()


def test_a_client_writes_what_the_server_orders_and_says_so(start_client, server, tmp_path):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    hold(tmp_path / POD_DIR, places(tmp_path))
    server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))
    server.want(pod(want=DesiredState.HOLD, save=Save(id=4)))
    state = server.wait_state(
        "pod_0_0",
        lambda state: state.save is not None and state.save.phase is SavePhase.WRITTEN,
        "written",
    )
    assert state.save is not None
    assert (state.save.id, state.save.step) == (4, 12)
    assert weight_at(tmp_path / "checkpoint", 12) == 1.0
    server.want(pod(want=DesiredState.HOLD))
    server.wait_state("pod_0_0", lambda state: state.save is None, "not told to save")


@pytest.mark.parametrize("stopped", ["beside its pod", "after its pod"])
def test_a_shim_that_was_stopped_goes_on_so_that_its_state_can_be_written(
    start_client, server, tmp_path, stopped
):
    start_client()
    server.want_until(PodPhase.RUNNING, pod())
    hold(tmp_path / POD_DIR, places(tmp_path))
    shim = psutil.Process(json.loads((tmp_path / POD_DIR / "shim.json").read_text())["pid"])
    if stopped == "beside its pod":
        shim.suspend()
    assert server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD)).holds
    if stopped == "after its pod":
        shim.suspend()
    server.want(pod(want=DesiredState.HOLD, save=Save(id=4)))
    state = server.wait_state(
        "pod_0_0",
        lambda state: state.save is not None and state.save.phase is not SavePhase.WRITING,
        "written",
    )
    assert state.save is not None
    assert (state.save.phase, state.save.step) == (SavePhase.WRITTEN, 12), state.save.reason


def test_a_client_says_what_the_shim_of_an_ended_pod_holds_and_the_next_one_does(
    start_client, server, tmp_path
):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod())
    hold(tmp_path / POD_DIR, places(tmp_path))
    assert server.wait_phase("pod_0_0", PodPhase.RUNNING).snapshot is None
    ended = [server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD))]
    client.end(EndMode.KEEP)
    server.reports.clear()
    start_client()
    ended.append(server.wait_phase("pod_0_0", PodPhase.EXITED))
    assert [each.snapshot and each.snapshot.step for each in ended] == [12, 12]


def test_a_client_that_is_ended_writes_the_newest_state_and_the_next_one_knows(
    start_client, server, tmp_path
):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(last_save=True))
    hold(tmp_path / POD_DIR, places(tmp_path))
    client.end()
    assert weight_at(tmp_path / "checkpoint", 12) == 1.0
    assert {each.stranger for each in server.reports[-2].slots} == {"its client, which is ending"}
    goodbye = server.reports[-1]
    assert goodbye.leaving
    (state,) = goodbye.pods
    assert not state.holds
    assert state.save is not None
    assert (state.save.id, state.save.step) == (0, 12)
    # As after a power cut before the goodbye: the folder is all that the next client has.
    (tmp_path / POD_DIR / "released").unlink()
    start_client()
    later = server.wait_phase("pod_0_0", PodPhase.EXITED)
    assert (later.save, later.holds) == (state.save, False)


def test_a_new_pod_knows_nothing_of_what_was_written_for_an_earlier_one_of_its_id(
    start_client, server, tmp_path
):
    """Else its job would go on from the state of another one."""
    client = start_client()
    server.want(pod(last_save=True, submitted_at=1.0))
    server.wait_phase("pod_0_0", PodPhase.RUNNING)
    hold(tmp_path / "log" / "pods" / "pod_0_0", places(tmp_path))
    client.end()
    server.want(pod(submitted_at=2.0))
    start_client()
    state = server.wait_phase("pod_0_0", PodPhase.RUNNING)
    assert state.submitted_at == 2.0
    assert all(
        each.save is None
        for report in server.reports
        for each in report.pods
        if each.submitted_at == 2.0
    )


@pytest.mark.parametrize("when", ["the server writes nothing", "the server is away"])
def test_what_a_client_wrote_at_its_end_is_told_by_the_next_one_if_the_server_was_not(
    start_client, server, tmp_path, when
):
    client = start_client()
    server.want(pod(last_save=True))
    server.wait_phase("pod_0_0", PodPhase.RUNNING)
    hold(tmp_path / "log" / "pods" / "pod_0_0", places(tmp_path))
    if when == "the server is away":
        server.go_away()
    else:
        server.refuse_reports = StoreTrouble("the server's database cannot be written", 0.05)
    client.end()
    assert weight_at(tmp_path / "checkpoint", 12) == 1.0
    assert not any(each.leaving for each in server.reports)
    server.refuse_reports = None
    server.come_back()
    server.want()  # it does not wait for this pod any more
    before = len(server.reports)
    start_client()
    server.wait_state("pod_0_0", lambda state: state.save is not None, "reported", before)
    wait_until(lambda: server.state("pod_0_0") is None)
    assert (tmp_path / "log" / "pods" / "pod_0_0" / "released").exists()


def test_a_goodbye_with_news_is_repeated_while_the_server_cannot_take_it(
    start_client, server, tmp_path
):
    client = start_client()
    server.want(pod(last_save=True))
    server.wait_phase("pod_0_0", PodPhase.RUNNING)
    hold(tmp_path / "log" / "pods" / "pod_0_0", places(tmp_path))
    server.refuse_reports = StoreTrouble("the server's database cannot be written", 0.05)
    server.refusals_left = 3
    client.end()
    (state,) = server.reports[-1].pods
    assert server.reports[-1].leaving
    assert state.save is not None


def test_a_client_that_was_started_while_the_server_is_away_writes_what_its_pods_hold(
    start_client, server, tmp_path
):
    client = start_client(job_id="job")
    server.want_until(PodPhase.RUNNING, pod(last_save=True))
    hold(tmp_path / POD_DIR, places(tmp_path))
    server.go_away()
    client.end(EndMode.KEEP)
    start_client(job_id="job").end()
    (checkpoint,) = (tmp_path / "run").glob("checkpoint*")
    assert weight_at(checkpoint, 12) == 1.0
    assert not (tmp_path / "checkpoint").exists()  # another node may write there
    server.come_back()
    start_client(job_id="job")
    state = server.wait_state("pod_0_0", lambda state: state.save is not None, "reported")
    assert state.save.step == 12


@pytest.mark.parametrize("told", [False, True])
def test_a_client_that_is_killed_or_not_told_to_writes_nothing_and_says_what_is_lost(
    start_client, server, tmp_path, caplog, told
):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(last_save=told))
    hold(tmp_path / POD_DIR, places(tmp_path))
    with caplog.at_level(logging.ERROR):
        client.end(EndMode.KILL if told else EndMode.STOP)
    assert not (tmp_path / "checkpoint").exists()
    assert ("held in memory is lost" in caplog.text) == told


def test_a_client_that_is_ended_tells_what_it_wrote_at_last_though_an_order_had_failed(
    start_client, server, tmp_path
):
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(last_save=True))
    nowhere = tmp_path / "run"
    nowhere.write_text("a file where the run folder is to be")
    hold(tmp_path / POD_DIR, SaveTarget.of(None, 3, nowhere))
    server.want(pod(want=DesiredState.HOLD, save=Save(id=4), last_save=True))
    server.wait_state(
        "pod_0_0",
        lambda state: state.save is not None and state.save.phase is SavePhase.FAILED,
        "not written",
    )
    nowhere.unlink()
    client.end()
    (state,) = server.reports[-1].pods
    assert state.save is not None
    assert (state.save.id, state.save.phase, state.save.step) == (0, SavePhase.WRITTEN, 12)


def test_a_client_that_is_ended_amid_an_order_to_write_has_one_writer_at_a_time(
    start_client, server, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    client = start_client()
    server.want_until(PodPhase.RUNNING, pod(last_save=True))
    hold(tmp_path / POD_DIR, places(tmp_path))
    folder = hold_up_writers(tmp_path)
    server.want_until(PodPhase.EXITED, pod(want=DesiredState.HOLD, save=Save(id=4), last_save=True))
    wait_until(lambda: bool(writers()) and (folder / "extra.safetensors").exists())
    (first,) = writers()
    ending = threading.Thread(target=client.end)
    ending.start()
    wait_until(lambda: len(writers()) > 1 or "a second signal" in caplog.text)
    (folder / "train_status.json").unlink()
    assert writers() == [first]
    first.kill()  # begun again, and nothing holds it now
    ending.join(30)
    assert not ending.is_alive()
    assert weight_at(tmp_path / "checkpoint", 12) == 1.0
    (state,) = server.reports[-1].pods
    assert state.save is not None
    assert (state.save.id, state.save.phase, state.save.step) == (0, SavePhase.WRITTEN, 12)
