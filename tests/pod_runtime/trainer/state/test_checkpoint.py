"""Checkpoints: what is on disk is whole or refused, and nothing is lost to retention."""

import errno
import json
import logging
import os
import re
import stat
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.progress.best import BestCheckpoint
from pod_runtime.trainer.state import stage_folders
from pod_runtime.trainer.state.best_checkpoints import best_store, read_best
from pod_runtime.trainer.state.checkpoint import CheckpointId, CheckpointStore
from pod_runtime.trainer.state.checkpoint_writer import CheckpointWriter
from pod_runtime.trainer.state.host_state import HostState, SaveTarget
from pod_runtime.trainer.state.last_save import write_host_state
from pod_runtime.trainer.state.storage import Storage, open_storage
from tests.disks import small_disk
from tests.pod_runtime.trainer.states import make_host_state
from tests.support import nothing_writable, wait_until


def fill_of(store: CheckpointStore) -> float:
    found = store.load_newest()
    assert found is not None
    return float(np.frombuffer(found[0].data, np.float32, count=1)[0])


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "ckpt")
    return open_storage(f"memory://{uuid.uuid4()}/ckpt")


def test_a_state_comes_back_byte_by_byte(storage):
    store = CheckpointStore(storage)
    host_state = make_host_state(stage=2, step=7, fill=3.5)
    assert store.write(host_state) == CheckpointId(2, 7)
    found = store.load_newest()
    assert found is not None
    loaded, where = found
    assert where == CheckpointId(2, 7)
    assert (loaded.status, loaded.scalars) == (host_state.status, host_state.scalars)
    assert loaded.layout == host_state.layout
    assert bytes(loaded.data) == bytes(host_state.data)


def test_other_programs_can_read_the_files_by_structured_names(tmp_path):
    store = CheckpointStore(open_storage(tmp_path))
    folder = tmp_path / store.write(make_host_state(step=1, fill=2.0)).folder
    assert folder.name == "step_0000000001"
    assert folder.parent.name == "stage_00000001"
    tensors = safetensors.numpy.load_file(folder / "optimizer.safetensors")
    assert list(tensors) == ["weight.velocity"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {
        "model.safetensors", "optimizer.safetensors", "extra.safetensors", "train_status.json"
    }  # fmt: skip
    status = json.loads((folder / "train_status.json").read_text())
    assert status["status"]["cursor"]["global_step"] == 1


@pytest.mark.parametrize("name", ["model.safetensors", "train_status.json", "manifest.json"])
def test_a_flipped_byte_falls_back_to_the_newest_intact_one_and_says_so(tmp_path, caplog, name):
    store = CheckpointStore(open_storage(tmp_path))
    store.write(make_host_state(step=1, fill=1.0))
    folder = tmp_path / store.write(make_host_state(step=2, fill=2.0)).folder
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 0x10
    (folder / name).write_bytes(content)
    with caplog.at_level(logging.INFO):
        assert fill_of(store) == 1.0
    assert "stage_00000001/step_0000000002 refused" in caplog.text
    assert "falling back to checkpoint stage_00000001/step_0000000001" in caplog.text


@pytest.mark.parametrize(("old", "new"), [("sha256", "sha254"), ("size_bytes", "size_bytec")])
def test_a_manifest_of_good_json_and_a_damaged_key_is_refused_like_any(tmp_path, caplog, old, new):
    store = CheckpointStore(open_storage(tmp_path))
    store.write(make_host_state(step=1, fill=1.0))
    manifest = tmp_path / store.write(make_host_state(step=2)).folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    assert fill_of(store) == 1.0
    assert "manifest.json: damaged: KeyError" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_file_that_is_missing_or_short_is_refused(tmp_path, caplog, damage):
    store = CheckpointStore(open_storage(tmp_path))
    store.write(make_host_state(step=1, fill=1.0))
    victim = tmp_path / store.write(make_host_state(step=2)).folder / "optimizer.safetensors"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    assert fill_of(store) == 1.0
    assert "optimizer.safetensors: " in caplog.text


def test_without_any_intact_one_training_does_not_silently_begin_afresh(tmp_path):
    store = CheckpointStore(open_storage(tmp_path))
    folder = tmp_path / store.write(make_host_state(step=2)).folder
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of its checkpoints is intact.*another check"):
        store.load_newest()


class Away:
    """A storage of which some files cannot be read for a while."""

    def __init__(self, inner: Storage, name: str, times: int, error: OSError) -> None:
        self.name, self.folders, self.files = inner.name, inner.folders, inner.files
        self.write, self.commit, self.remove = inner.write, inner.commit, inner.remove
        self._inner, self._name, self._error = inner, name, error
        self.left = times

    def read(self, path: str) -> bytes:
        if path.endswith(self._name) and self.left:
            self.left -= 1
            raise self._error
        return self._inner.read(path)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), OSError("EndpointConnectionError: away")]
)
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_waited_for(
    storage, caplog, monkeypatch, name, error
):
    monkeypatch.setattr(stage_folders, "_AGAIN_S", 0.01)
    store = CheckpointStore(storage)
    store.write(make_host_state(step=1, fill=1.0))
    made = store.write(make_host_state(step=2, fill=2.0))
    away = Away(storage, f"{made.folder}/{name}", 3, error)
    assert fill_of(CheckpointStore(away)) == 2.0, "what was trained since is not thrown away"
    assert away.left == 0
    assert caplog.text.count("step_0000000002 cannot be read, trying again for 60 s") == 1


def test_one_that_stays_unreadable_is_passed_over_and_none_that_can_be_read_is_said(
    storage, caplog, monkeypatch
):
    monkeypatch.setattr(stage_folders, "_AGAIN_S", 0.01)
    monkeypatch.setattr(stage_folders, "_AWAY_S", 0.05)
    store = CheckpointStore(storage)
    store.write(make_host_state(step=1, fill=1.0))
    made = store.write(make_host_state(step=2, fill=2.0))
    bad = OSError(errno.EIO, "Input/output error")  # of a sector, say
    away = Away(storage, f"{made.folder}/model.safetensors", 10**6, bad)
    assert fill_of(CheckpointStore(away)) == 1.0
    assert "falling back to checkpoint stage_00000001/step_0000000001" in caplog.text
    # A file's rights do not change by themselves.
    denied = Away(storage, f"{made.folder}/model.safetensors", 1, PermissionError("no"))
    assert fill_of(CheckpointStore(denied)) == 1.0
    away = Away(storage, "model.safetensors", 10**6, bad)
    text = (
        "none of its checkpoints can be read .*Input/output error.*; bring it back, or start afresh"
    )
    with pytest.raises(CheckpointError, match=text):
        CheckpointStore(away).load_newest()


def test_a_folder_without_a_manifest_was_never_committed(storage, caplog):
    store = CheckpointStore(storage)
    store.write(make_host_state(step=1, fill=1.0))
    made = store.write(make_host_state(step=2, fill=2.0))
    storage.remove(f"{made.folder}/manifest.json")
    assert fill_of(store) == 1.0
    assert "refused" not in caplog.text
    assert CheckpointStore(open_storage("memory://nowhere-yet")).load_newest() is None


def test_a_higher_stage_counts_for_more_than_a_higher_step(storage):
    store = CheckpointStore(storage)
    store.write(make_host_state(stage=1, step=9, fill=1.0))
    store.write(make_host_state(stage=2, step=5, fill=2.0))
    assert fill_of(store) == 2.0
    assert store.highest_stage() == 2


def test_retention_keeps_n_and_removes_torn_folders_of_older_stages(storage):
    store = CheckpointStore(storage, keep=2)
    store.write(make_host_state(stage=1, step=1))
    torn = store.write(make_host_state(stage=1, step=2))
    storage.remove(f"{torn.folder}/manifest.json")
    store.write(make_host_state(stage=2, step=3))
    store.write(make_host_state(stage=3, step=4))
    assert store.found() == [CheckpointId(2, 3), CheckpointId(3, 4)]
    assert storage.folders("") == ["stage_00000002", "stage_00000003"]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 8])
def test_as_many_stay_as_were_asked_for(storage, keep):
    store = CheckpointStore(storage, keep=keep)
    for step in range(1, 11):
        store.write(make_host_state(step=step))
        assert [each.step for each in store.found()] == list(
            range(max(1, step - keep + 1), step + 1)
        )


def test_retention_never_touches_what_is_newer(storage):
    CheckpointStore(storage).write(make_host_state(stage=5, step=9))
    CheckpointStore(storage, keep=1).write(make_host_state(stage=4, step=20))  # a fenced-off stage
    assert CheckpointId(5, 9) in CheckpointStore(storage).found()


def test_a_state_of_another_training_is_neither_taken_for_this_one_nor_replaced(storage, tmp_path):
    def of(run_id: str, fill: float) -> HostState:
        made = make_host_state(stage=1, step=4, fill=fill)
        return replace(made, status=replace(made.status, run_id=run_id))

    store = CheckpointStore(storage)
    store.write(of("first", 1.0))
    store.write(of("first", 1.0))
    with pytest.raises(CheckpointError, match="not written: another training's is there"):
        store.write(of("second", 2.0))
    assert fill_of(store) == 1.0
    # In a run folder, which an earlier job of the same name had, it goes beside that.
    target = SaveTarget.of(None, 3, tmp_path / "run")
    for run_id, fill, name in (
        ("first", 1.0, "checkpoint"),
        ("second", 2.0, "checkpoint-second"),
        ("second", 2.0, "checkpoint-second"),
        ("first", 1.0, "checkpoint"),
    ):
        said = write_host_state(of(run_id, fill), target, spare=False, report=lambda _bytes: None)
        assert said == (str(tmp_path / "run" / name), True)
        assert fill_of(CheckpointStore(open_storage(said[0]))) == fill


def test_a_state_goes_to_the_run_folder_while_its_object_store_is_away(tmp_path, monkeypatch):
    class AwayError(Exception):
        """As libraries of object stores have their own, which are no OSErrors."""

    def call(*_args: object, **_options: object) -> None:
        raise AwayError("could not connect to the endpoint")

    url = f"memory://{uuid.uuid4()}/ckpt"
    filesystem = open_storage(url).filesystem  # type: ignore[attr-defined]
    for name in ("ls", "cat_file", "open", "makedirs", "rm"):
        monkeypatch.setattr(type(filesystem), name, call)
    target = SaveTarget(checkpoint=url, run_dir=str(tmp_path), job_id="j", submitted_at=1.0)
    state = make_host_state(step=3, fill=2.0)
    said = write_host_state(state, target, spare=False, report=lambda _bytes: None)
    assert said == (str(tmp_path / "checkpoint"), True)
    assert fill_of(CheckpointStore(open_storage(said[0]))) == 2.0
    with pytest.raises(CheckpointError, match="not written: AwayError: could not connect"):
        CheckpointStore(open_storage(url)).write(state)


def test_an_object_store_that_is_away_for_a_moment_is_waited_for(storage, monkeypatch, caplog):
    store = CheckpointStore(storage)
    store.write(make_host_state(stage=3, step=4, fill=1.0))
    there: Callable[[str], list[str]] = storage.folders
    tries: list[str] = []

    def away(path: str) -> list[str]:
        tries.append(path)
        if len(tries) < 3:
            raise OSError("EndpointConnectionError: could not connect")
        return there(path)

    monkeypatch.setattr("pod_runtime.trainer.state.checkpoint._AGAIN_S", 0.01)
    monkeypatch.setattr(storage, "folders", away)
    with pytest.raises(OSError, match="EndpointConnectionError"):
        store.highest_stage()
    assert store.highest_stage(patience_s=120) == 3
    assert "cannot be listed, trying again: EndpointConnectionError" in caplog.text


@pytest.mark.parametrize("end", ["", "/"])
def test_a_best_checkpoint_is_where_it_is_said_to_be_below_a_url(end):
    url = f"memory://{uuid.uuid4()}/ckpt"
    best = BestCheckpoint(metric="score", mode="max", value=1.0, stage=1, step=4, epoch=0)
    state = make_host_state(stage=1, step=4)
    best_store(CheckpointStore(open_storage(url + end)), best).write(state)
    assert "model.safetensors" in open_storage(url).files(best.folder)
    assert [folder for folder, _head in read_best(open_storage(url + end))] == [best.folder]


def test_a_path_that_can_be_written_is_left_as_it_was_found(storage):
    CheckpointStore(storage).check_writable()
    assert (storage.files(""), storage.folders("")) == ([], [])


def test_a_path_that_cannot_be_written_is_said_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("no folder")
    store = CheckpointStore(open_storage(tmp_path / "file" / "ckpt"))
    with pytest.raises(CheckpointError, match=r"file/ckpt cannot be written: Not a directory; "):
        store.check_writable()


def test_a_store_that_denies_deletes_alone_is_said_to(tmp_path):
    store = CheckpointStore(open_storage(tmp_path))

    def denied(path: str) -> None:
        raise PermissionError("Access Denied")

    store.storage.remove = denied  # type: ignore[method-assign]
    text = r"cannot be cleaned of old checkpoints: Access Denied; allow to delete there, or give"
    with pytest.raises(CheckpointError, match=text):
        store.check_writable()


def test_a_checkpoint_that_fails_does_not_cost_those_before(tmp_path):
    store = CheckpointStore(open_storage(tmp_path), keep=1)
    store.write(make_host_state(step=1, fill=1.0))

    def full(path: str, chunks: object) -> None:
        raise OSError(28, os.strerror(28))

    store.storage.write = full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"step_0000000002: not written: No space left"):
        store.write(make_host_state(step=2))
    assert store.found() == [CheckpointId(1, 1)]
    assert fill_of(store) == 1.0


@pytest.fixture
def full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as folder:
        yield folder


def test_a_full_disk_is_an_error_in_the_log_and_the_next_save_tries_again(full_disk, caplog):
    store = CheckpointStore(open_storage(full_disk / "ckpt"))
    writer = CheckpointWriter(store)
    before = writer.trouble
    assert before is None
    ballast = full_disk / "ballast"
    with ballast.open("wb") as file:
        file.write(bytes(60 << 10))
    writer.start(make_host_state(step=1))
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.finish()
    assert re.search(r"step 1 failed, training goes on.*No space left", caplog.text)
    assert re.match(
        r"checkpoint of step 1 failed, training goes on, .*No space left", str(writer.trouble)
    )
    assert store.found() == []
    ballast.unlink()
    writer.start(make_host_state(step=2))
    writer.finish()
    assert writer.trouble == ""
    assert store.found() == [CheckpointId(1, 2)]


def test_a_checkpoint_that_takes_very_long_is_said_until_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pod_runtime.trainer.state.checkpoint_writer._LONG_S", 0.0)
    writer, goes_on = CheckpointWriter(CheckpointStore(open_storage(tmp_path))), threading.Event()

    def take() -> HostState:
        assert goes_on.wait(60)
        return make_host_state(step=1)

    writer.start_from(take)
    wait_until(lambda: "a checkpoint has been in writing for" in (writer.trouble or ""), 30)
    goes_on.set()
    writer.finish()
    assert writer.trouble == ""


@pytest.mark.parametrize(("refusal", "is_error"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_syncs_no_folders_keeps_checkpoints(
    tmp_path, monkeypatch, refusal, is_error
):
    real = os.fsync

    def sync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    store = CheckpointStore(open_storage(tmp_path / "ckpt"))
    if is_error:
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.write(make_host_state(step=1))
    else:
        store.write(make_host_state(step=1, fill=2.5))
        assert fill_of(store) == 2.5


def test_the_same_state_again_is_left_as_it_is(tmp_path):
    store = CheckpointStore(open_storage(tmp_path), keep=1)
    made = store.write(make_host_state(step=1, fill=1.0))
    written = (tmp_path / made.folder / "manifest.json").stat().st_mtime_ns
    assert store.write(make_host_state(step=1, fill=1.0)) == made
    assert (tmp_path / made.folder / "manifest.json").stat().st_mtime_ns == written


def test_a_url_that_nothing_understands_is_refused():
    with pytest.raises(CheckpointError, match="checkpoint: 'nosuch://bucket' cannot be opened"):
        open_storage("nosuch://bucket")


def test_files_of_strangers_in_the_path_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "stage_1").mkdir()
    store = CheckpointStore(open_storage(tmp_path), keep=1)
    store.write(make_host_state(step=1))
    store.write(make_host_state(step=2))
    assert (tmp_path / "notes").is_dir()
    assert (tmp_path / "stage_1").is_dir()


def test_a_checkpoint_that_is_there_outlives_a_disk_too_full_to_say_that_it_is_ours(tmp_path):
    class Full:
        """An owner that cannot write that its training lives."""

        def check(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage = open_storage(tmp_path)
    CheckpointStore(storage).write(make_host_state(step=3, fill=2.5))
    store = CheckpointStore(storage, owner=Full())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="step_0000000003: not written: No space left"):
        store.write(make_host_state(step=3, fill=9.0))
    assert fill_of(CheckpointStore(storage)) == 2.5


def test_a_file_that_finds_no_room_leaves_the_one_before_and_nothing_else(tmp_path):
    storage = open_storage(tmp_path)
    storage.commit("owner.json", b"before")
    with nothing_writable(), pytest.raises(OSError, match="too large"):
        storage.commit("owner.json", b"after")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
