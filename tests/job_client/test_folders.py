"""Which scripts a server may have us run."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from job_client.errors import PodStartError
from job_client.pods import pod_folder
from job_client.pods.folders import list_jobs, make_folder, recipe_for
from job_server.api.wire import SavePhase, SaveState
from pod_runtime import shim_wire
from pod_runtime.shim_wire import PodExit
from tests.job_client.conftest import pod
from tests.support import no_descriptor_free


@pytest.fixture
def jobs_config(tmp_path, make_config):
    jobs = tmp_path / "jobs"
    for name in ("a", "b"):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "train.sh").touch()
    (jobs / "b" / "package.sh").touch()
    (jobs / "empty").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "train.sh").touch()
    (jobs / "link").symlink_to(tmp_path / "outside")
    (jobs / "linked_script").mkdir()
    (jobs / "linked_script" / "train.sh").symlink_to(tmp_path / "outside" / "train.sh")
    return make_config(jobs_dir=jobs, script=None, job_id=None)


def test_only_real_subfolders_with_a_script_are_jobs(jobs_config):
    assert list_jobs(jobs_config.jobs_dir) == ("a", "b")


def test_links_that_lead_to_themselves_are_no_jobs_and_hide_no_others(jobs_config):
    jobs = jobs_config.jobs_dir
    (jobs / "loop").symlink_to("loop")
    (jobs / "looped_script").mkdir()
    (jobs / "looped_script" / "train.sh").symlink_to("train.sh")
    assert list_jobs(jobs) == ("a", "b")
    with pytest.raises(PodStartError, match=r"folder: loop .*in --jobs_dir"):
        recipe_for(jobs_config, pod(folder="loop"))


def test_a_link_that_a_package_script_has_made_may_lead_to_where_another_pod_runs(jobs_config):
    recipe = recipe_for(jobs_config, pod(folder="a"))
    (recipe.folder.parent / "code").mkdir(parents=True)
    recipe.folder.symlink_to("code")
    lock = shim_wire.lock_folder(recipe.folder)
    assert lock is not None
    make_folder(recipe, "pod_0_0", {}, jobs_config.cwd / "log", threading.Event())
    os.close(lock)


def test_a_job_may_have_a_package_script(jobs_config):
    assert recipe_for(jobs_config, pod(folder="a")).package_sh is None
    assert recipe_for(jobs_config, pod(folder="b")).package_sh is not None


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("../outside", "is not an id"),
        ("a/../../outside", "is not an id"),
        ("/etc", "is not an id"),
        ("..", "is not an id"),
        ("link", "is a link out of --jobs_dir"),
        ("linked_script", "is a link out of --jobs_dir"),
        ("empty", "has no train.sh"),
        ("missing", "has no train.sh"),
    ],
)
def test_a_server_cannot_name_what_is_not_a_job_of_ours(jobs_config, folder, reason):
    with pytest.raises(PodStartError, match=reason):
        recipe_for(jobs_config, pod(folder=folder))


def test_a_job_gives_its_args_to_the_script_behind_the_clients_own(jobs_config, make_config):
    args = ("--lr", "0.1")
    assert recipe_for(jobs_config, replace(pod(folder="a"), args=args)).args == args
    single = make_config(script_args=("x",))
    assert recipe_for(single, replace(pod(), args=args)).args == ("x", *args)


@pytest.mark.parametrize(
    "kept",
    [
        "saved.json",
        # As `last_save` has it, where a script's trainers log to its pod's folder.
        "trainers/run/checkpoint/stage_00000001/step_0000000008/manifest.json",
        "checkpoint/stage_00000001/step_0000000008/manifest.json",
    ],
)
def test_a_folder_of_an_old_pod_that_holds_a_state_stays(tmp_path, kept):
    for number, path in enumerate([kept, "trainers/run/ledger.jsonl", "log"]):
        folder = tmp_path / "job" / f"pod_{number}_0"
        for each in (folder / path, folder / "released"):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.touch()
        os.utime(folder / "released", (number, number))
    pod_folder.drop_oldest(tmp_path, keep=1)
    left = sorted(each.name for each in (tmp_path / "job").iterdir())
    assert left == ["pod_0_0", "pod_2_0"]


def test_a_folder_of_an_old_pod_that_cannot_be_deleted_keeps_no_other(tmp_path):
    pods = tmp_path / "pods"
    pods.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (pods / "pod_0_0").symlink_to(tmp_path / "elsewhere")  # moved by its user
    for number in range(4):
        folder = pods / f"pod_{number}_0"
        folder.mkdir(exist_ok=True)
        (folder / "released").touch()
        os.utime(folder / "released", (number, number))
    pod_folder.drop_oldest(pods, keep=1)
    assert sorted(each.name for each in pods.iterdir()) == ["pod_0_0", "pod_3_0"]


@pytest.mark.parametrize(
    "read", [pod_folder.read_exit, pod_folder.read_shim, pod_folder.read_saved]
)
def test_what_cannot_be_read_for_want_of_a_descriptor_is_read_later(tmp_path, read):
    pod_folder.write_exit(tmp_path, PodExit(code=7, signal=None, reason="", last_lines=()))
    shim_wire.write_json(tmp_path / "shim.json", {"pid": 1, "start_time": 2})
    pod_folder.write_saved(tmp_path, SaveState(id=0, phase=SavePhase.WRITTEN))
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(read(tmp_path)))
    with no_descriptor_free():
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
    reader.join(60)
    assert found
    assert found[0] is not None


def test_a_folder_that_is_used_again_tells_nothing_of_the_pod_before(tmp_path):
    folder = tmp_path / "pod_0_0"
    pod_folder.prepare(folder, pod())
    for name in (shim_wire.CLAIM, shim_wire.REFUSED, "exit.json", "log"):
        (folder / name).write_text("{}")
    pod_folder.prepare(folder, pod())
    assert [each.name for each in folder.iterdir()] == ["pod.json"]


def test_a_pod_whose_folder_cannot_be_read_for_a_moment_is_found(tmp_path, monkeypatch):
    pod_folder.prepare(tmp_path / "pod_0_0", pod())
    read_text = Path.read_text
    refused: list[Path] = []

    def scarce(path: Path, *args: object) -> str:
        if path.name == "pod.json" and not refused:
            refused.append(path)
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return read_text(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", scarce)
    assert [found for _folder, found in pod_folder.find(tmp_path)] == [pod()]
    assert refused


def test_a_client_with_one_script_runs_no_other(make_config):
    with pytest.raises(PodStartError, match="was started with one script"):
        recipe_for(make_config(), pod(folder="a"))


def test_a_pod_id_that_leaves_its_folder_is_no_pod():
    with pytest.raises(ValueError, match=r"pod_id: '\.\./x' is not an id"):
        pod("../x")
