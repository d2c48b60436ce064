"""Folders and lists of images, good and bad, and the same batches whoever reads them."""

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
from images import DataError, Listing, find_images, make_sets, printable, train_loader_args

from pod_runtime.trainer.data.readers import (
    InlineReader,
    ShardOrder,
    ShardReader,
    ThreadReader,
    loader_items,
)
from pod_runtime.trainer.data.source import make_source
from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor, rank_shards
from pod_runtime.trainer.progress.ledger import RunInfo
from tests.resnet50.conftest import CLASSES, FOLDER, encoded, picture


def names(listing: Listing, root: Path) -> list[tuple[str, int]]:
    return [
        (os.path.relpath(os.fsdecode(listing.path(index)), root), int(label))
        for index, label in enumerate(listing.labels)
    ]


def break_file(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


# --- which images there are


def test_class_folders_are_labelled_in_their_order(tree):
    (tree / "train" / "bee" / ".hidden.jpg").touch()
    (tree / "train" / "bee" / "notes.txt").touch()
    (tree / "train" / ".cache").mkdir()
    train, val = find_images(str(tree), 3)
    assert names(train, tree) == [
        (f"train/{name}/{number}.jpg", label)
        for label, name in enumerate(CLASSES)
        for number in range(4)
    ]
    assert len(val) == 6


def test_a_class_without_validation_images_keeps_the_labels_of_the_others(tree):
    for path in (tree / "val" / "ant").iterdir():
        path.unlink()
    (tree / "val" / "ant").rmdir()
    _train, val = find_images(str(tree), 3)
    assert [label for _name, label in names(val, tree)] == [1, 1, 2, 2]


def test_lists_go_before_folders(listed):
    (listed / "train.txt").write_text("train/cat/3.jpg 7\ntrain/ant/0.jpg\t2\n")
    train, _val = find_images(str(listed), 10)
    assert names(train, listed) == [("train/cat/3.jpg", 7), ("train/ant/0.jpg", 2)]
    assert train.describe(1) == f"{listed}/train.txt, line 2: {listed}/train/ant/0.jpg"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("ant/0.jpg 0\n", "train/ant/0.jpg", id="relative to train/"),
        pytest.param("{root}/train/bee/1.jpg 0\n", "train/bee/1.jpg", id="absolute"),
        pytest.param("train/ant/0.jpg 0", "train/ant/0.jpg", id="no last newline"),
        pytest.param("\n\n  train/ant/0.jpg 0\r\n\r\n", "train/ant/0.jpg", id="blank lines, CRLF"),
        pytest.param("\ufefftrain/ant/0.jpg 0\n", "train/ant/0.jpg", id="byte order mark"),
        pytest.param("train/ant/a b.jpg  0\n", "train/ant/a b.jpg", id="a blank in a name"),
    ],
)
def test_lists_are_read_as_people_write_them(listed, text, found):
    (listed / "train" / "ant" / "a b.jpg").write_bytes(encoded(picture(40, 40)))
    (listed / "train.txt").write_text(text.format(root=listed), encoding="utf-8")
    train, _val = find_images(str(listed), 3)
    assert names(train, listed) == [(found, 0)]


def test_names_need_not_be_utf8(tree, make_options):
    strange = os.fsencode(tree) + b"/train/ant/caf\xe9.jpg"
    with open(strange, "wb") as file:
        file.write(encoded(picture(40, 40)))
    for listing in (False, True):
        if listing:
            (tree / "train.txt").write_bytes(b"train/ant/caf\xe9.jpg 0\n")
            (tree / "val.txt").write_bytes(b"val/ant/0.jpg 0\n")
        train_set, _val = make_sets(make_options(data_dir=str(tree)))
        train, _val = find_images(str(tree), 3)
        place = [train.path(index) for index in range(len(train))].index(strange)
        assert train_set[place][0].shape == (3, 32, 32)
        assert train.describe(place).endswith(r"train/ant/caf\xe9.jpg")
        train.describe(place).encode()  # any terminal takes it
    assert printable("é".encode()) == "é"


def edit(path: str, text: str | None):
    """Return a change of a tree: write a file, or (None) remove one."""

    def change(root: Path) -> None:
        if text is None:
            (root / path).unlink()
        else:
            (root / path).write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "class_dim", "text"),
    [
        (edit("val.txt", None), 3, r"has train.txt but no val.txt; write it, or take train.txt "),
        (edit("train.txt", None), 3, r"has val.txt but no train.txt"),
        (edit("train.txt", ""), 3, r"train.txt: no image is in it"),
        (edit("train.txt", "train/ant/0.jpg 0\nx.jpg\n"), 3, r"line 2: expected .* got 'x.jpg'"),
        (edit("train.txt", "train/ant/0.jpg one\n"), 3, r"line 1: .* got 'train/ant/0.jpg one'"),
        (edit("train.txt", "train/ant/0.jpg -1\n"), 3, r"line 1: expected .* a number from 0 on"),
        (
            edit("train.txt", "train/ant/0.jpg 0\n\ntrain/ant/1.jpg 3\ntrain/ant/2.jpg 9\n"),
            3,
            r"train.txt, line 3: label 3 is not below class_dim, 3; .* pass --class_dim 10",
        ),
        (
            edit("train.txt", "nowhere/0.jpg 0\n"),
            3,
            r"its first image, nowhere/0.jpg, is neither in .* nor in .*train; paths are relative",
        ),
    ],
)
def test_what_is_wrong_with_a_list_is_said(listed, change, class_dim, text):
    change(listed)
    with pytest.raises(DataError, match=text):
        find_images(str(listed), class_dim)


def test_what_is_wrong_with_folders_is_said(tree, tmp_path):
    with pytest.raises(DataError, match=r"class_dim: 2 is less than the 3 class folders"):
        find_images(str(tree), 2)
    (tree / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"val/dog: there is no such class in the training part"):
        find_images(str(tree), 3)
    (tree / "val" / "dog").rmdir()
    (tree / "train" / "aardvark").mkdir()
    with pytest.raises(DataError, match=r"train/aardvark: no image is in it, though it counts"):
        find_images(str(tree), 4)
    empty = tmp_path / "empty"
    for missing in (empty, empty / "train", empty / "val"):
        missing.mkdir()
        text = r"no class folder is in it" if missing.name == "val" else r"has neither train.txt"
        with pytest.raises(DataError, match=text):
            find_images(str(empty), 3)
    for part in ("train", "val"):
        (empty / part / "ant").mkdir()
    with pytest.raises(DataError, match=r"no image is in its class folders; files count that end"):
        find_images(str(empty), 3)


# --- items


def test_items_are_augmented_for_training_and_fixed_for_validation(listed, make_options):
    train, val = make_sets(make_options(data_dir=str(listed), data_format="NHWC"))
    assert (len(train), len(val)) == (12, 6)
    image, label = train[5]
    assert (image.shape, image.dtype, label) == ((32, 32, 3), np.float32, 1)
    assert label.dtype == np.int64
    assert not np.array_equal(train[5][0], train[5][0])
    np.testing.assert_array_equal(val[5][0], val[5][0])


def test_total_images_takes_fewer_of_every_class(listed, make_options):
    train, val = make_sets(make_options(data_dir=str(listed), total_images=6))
    assert [int(train[index][1]) for index in range(len(train))] == [0, 0, 1, 1, 2, 2]
    assert len(val) == 6


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (break_file, r"train.txt, line 7: .*train/bee/2.jpg cannot be read: image file is trunc"),
        (Path.unlink, r"train.txt, line 7: .*train/bee/2.jpg cannot be read: No such file or dir"),
        (lambda path: path.write_bytes(b""), r"line 7: .* cannot be read: cannot identify image"),
        (lambda path: (path.unlink(), path.mkdir()), r"line 7: .* cannot be read: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(listed, make_options, spoil, text):
    spoil(listed / "train" / "bee" / "2.jpg")
    train, _val = make_sets(make_options(data_dir=str(listed)))
    with pytest.raises(DataError, match=text + r".*`python images.py --check DIR` names all"):
        train[6]
    assert train[5][1] == 1


def test_without_a_folder_there_are_digits(make_options):
    train, test = make_sets(make_options(data_dir=None))
    assert (len(train), len(test)) == (1437, 360)


# --- python images.py --check DIR


def check(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "images.py", "--check", *args, "--workers", "2"]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, check=False
    )


def test_the_check_names_all_broken_files_and_no_others(listed):
    whole = check(listed, "--class_dim", 3)
    assert (whole.returncode, whole.stdout) == (0, "all images can be read\n")
    break_file(listed / "train" / "ant" / "1.jpg")
    (listed / "val" / "cat" / "1.jpg").unlink()
    found = check(listed)
    first, second, last = found.stdout.splitlines()
    assert first.startswith(f"{listed}/train.txt, line 2: {listed}/train/ant/1.jpg: image file is")
    assert second == f"{listed}/val.txt, line 6: {listed}/val/cat/1.jpg: No such file or directory"
    assert (found.returncode, last) == (1, "2 images cannot be read")


def test_the_check_says_what_is_wrong_with_a_list(listed):
    found = check(listed, "--class_dim", 2)
    assert found.returncode == 2
    assert "label 2 is not below class_dim, 2" in found.stderr
    assert "Traceback" not in found.stderr


# --- how they are read


def test_workers_are_as_many_as_asked_for(make_options, tmp_path):
    assert train_loader_args(make_options(num_threads=0)) == {"num_workers": 0}
    found = train_loader_args(make_options(num_threads=3), {}, str(tmp_path))
    assert found == {"num_workers": 3, "prefetch_factor": 2, "use_shared_memory": True}


@pytest.mark.parametrize(
    ("cores", "endpoints", "workers"),
    [
        pytest.param(8, None, 7, id="alone: one core is the trainer's own"),
        pytest.param(8, ["a:1", "a:2", "b:1"], 3, id="two of this node"),
        pytest.param(2, ["a:1", "a:2"], 1, id="as many trainers as cores"),
        pytest.param(1, ["a:1", "a:2", "a:3"], 1, id="more"),
    ],
)
def test_the_cores_of_a_node_are_shared_by_its_trainers(
    monkeypatch, make_options, tmp_path, cores, endpoints, workers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    environ = {} if endpoints is None else {
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints), "PADDLE_CURRENT_ENDPOINT": endpoints[0]
    }  # fmt: skip
    options = make_options(num_threads=None, data_dir="imagenet")
    assert train_loader_args(options, environ, str(tmp_path))["num_workers"] == workers
    assert train_loader_args(make_options(num_threads=None), environ) == {"num_workers": 0}


def test_batches_go_through_pipes_where_shared_memory_is_too_small(make_options, caplog, tmp_path):
    large = make_options(num_threads=2, batch_size=10**9)
    assert train_loader_args(large, {}, str(tmp_path))["use_shared_memory"] is False
    assert "start a container with --shm-size" in caplog.text.lower()
    # A shard is what is handed over, not the global batch.
    shared = make_options(num_threads=2, batch_size=None, total_batch_size=10**9)
    assert train_loader_args(shared, {"EDL_MAX_TRAINERS": "100000000"}, str(tmp_path))[
        "use_shared_memory"
    ]
    assert not train_loader_args(shared, {}, str(tmp_path / "none"))["use_shared_memory"]


def test_shared_memory_has_to_do_for_all_trainers_of_the_node(monkeypatch, make_options):
    batch_bytes = 16 * 4 * 3 * 32 * 32
    free = batch_bytes * 6 * 2  # for two trainers with two workers each
    usage = argparse.Namespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    options = make_options(num_threads=2)
    for trainers, fits in ((1, True), (2, True), (3, False)):
        here = [f"a:{port}" for port in range(trainers)]
        environ = {
            "PADDLE_TRAINER_ENDPOINTS": ",".join([*here, "b:1", "b:2"]),
            "PADDLE_CURRENT_ENDPOINT": "a:0",
        }
        assert train_loader_args(options, environ)["use_shared_memory"] is fits


def read_all(train_set, world: int, workers: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all global batches of two epochs, put together from what each rank reads."""
    model = paddle.nn.Linear(1, 1)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    data = paddle_framework(model, optimizer, header_size=4).data
    source = make_source(
        train_set, batch_size=6, shuffle=True, drop_last=False, collate_fn=None,
        num_workers=workers, has_reader=False,
    )  # fmt: skip
    run = RunInfo(seed=7, epochs=2, dataset_length=len(train_set), shuffle=True, drop_last=False)
    plan = BatchPlan(batch_size=6, shards=3, dataset_length=len(train_set))
    parts = {}
    for rank in range(world):
        order = ShardOrder(run, plan, rank_shards(rank, world, 3))
        reader: ShardReader = InlineReader(source, order, data)
        if workers:
            items = loader_items(source, order, Cursor(), data)
            reader = ThreadReader(partial(iter, items))
        for shard_range in order.from_cursor(Cursor()):
            taken = reader.take(shard_range, 60.0)
            assert taken is not None
            images, labels = taken.batch
            parts[shard_range.key] = (np.array(images), np.array(labels))
        reader.close()
    batches = []
    for epoch, step in sorted({key[:2] for key in parts}):
        shards = [parts[epoch, step, shard] for shard in range(3)]
        images, labels = (np.concatenate(fields) for fields in zip(*shards, strict=True))
        batches.append((images, labels))
    return batches


@pytest.mark.parametrize(("world", "workers"), [(3, 0), (1, 2), (3, 2)])
def test_a_global_batch_is_the_same_bit_by_bit_whoever_reads_it(
    listed, make_options, world, workers
):
    train_set, _val = make_sets(make_options(data_dir=str(listed)))
    alone = read_all(train_set, 1, 0)
    others = read_all(train_set, world, workers)
    assert len(alone) == len(others) == 4
    for one, other in zip(alone, others, strict=True):
        assert one[0].tobytes() == other[0].tobytes()
        assert one[1].tolist() == other[1].tolist()
    by_image = [{image.tobytes() for image in batch[0]} for batch in alone]
    assert not set.union(*by_image[:2]) & set.union(*by_image[2:])  # each epoch augments anew


def test_real_photographs_are_read(make_options):
    root = Path(os.environ.get("EDL_TEST_DATA", FOLDER.parents[1] / "shared" / "data"))
    if not (root / "imagenette160").is_dir():
        pytest.skip("no imagenette160: set EDL_TEST_DATA")
    train, val = make_sets(make_options(data_dir=str(root / "imagenette160"), total_images=50))
    images = np.stack([train[index][0] for index in range(len(train))])
    assert np.isfinite(images).all()
    assert np.abs(images.mean(axis=(0, 2, 3))).max() < 0.5  # of ImageNet's mean and deviation
    assert 0.7 < images.std() < 1.3
    assert len(val) == 500
