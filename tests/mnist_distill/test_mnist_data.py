"""MNIST in its forms, files that are broken, and which images have a label."""

import gzip
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from mnist_data import NO_LABEL, DataError, Images, ImageSet, choose, load

pytest.importorskip("paddle", reason="its sets are data sets of Paddle")

REAL = Path(os.environ.get("EDL_TEST_DATA", Path(__file__).parents[3] / "shared/data")) / "mnist"


@pytest.mark.parametrize("gzipped", [True, False])
def test_the_four_files_are_read_gzipped_or_not(mnist_folder, gzipped):
    train, test = load(str(mnist_folder(gzipped=gzipped)))
    assert (len(train), len(test)) == (40, 20)
    assert train.images.shape == (40, 28, 28)
    assert (train.images[:, 5, 7] == train.labels).all()


def test_a_gzipped_file_without_that_ending_is_read_too(mnist_folder):
    folder = mnist_folder()
    for path in folder.iterdir():
        path.rename(path.with_suffix(""))
    assert len(load(str(folder))[0]) == 40


def test_an_item_is_an_image_between_minus_one_and_one_and_its_label():
    images = np.zeros((2, 28, 28), np.uint8)
    images[1] = 255
    items = ImageSet(Images(images=images, labels=np.array([3, NO_LABEL])))
    assert len(items) == 2
    assert [(image.shape, image.dtype) for image, _ in items] == [((1, 28, 28), np.float32)] * 2
    assert [(image.min(), label) for image, label in items] == [(-1.0, 3), (1.0, NO_LABEL)]


def broken(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        pytest.param(IMAGES, b"", "this is no IDX file; get it again", id="empty"),
        pytest.param(IMAGES, b"<html>404</html>", "this is no IDX file", id="an error page"),
        pytest.param(IMAGES, b"\0\0\x08\x03\0\0", "this is no IDX file", id="half a head"),
        pytest.param(IMAGES, b"\x1f\x8bnothing", "cannot be read: ", id="not gzip's"),
        pytest.param(
            IMAGES, gzip.compress(bytes(5000))[:-9], "cannot be read: ", id="cut in gzip"
        ),
        pytest.param(
            IMAGES, struct.pack(">BBBBI", 0, 0, 8, 1, 40) + bytes(40),
            "expected bytes with 3 axes, it has type 0x08 with 1; are images and labels mixed up?",
            id="labels for images",
        ),
        pytest.param(
            LABELS, struct.pack(">BBBBI", 0, 0, 0x0D, 1, 40) + bytes(160),
            "expected bytes with 1 axes, it has type 0x0d with 1", id="floats",
        ),
        pytest.param(
            LABELS, struct.pack(">BBBBI", 0, 0, 8, 1, 40) + bytes(39),
            "39 bytes follow the head, its shape [40] needs 40", id="a byte is missing",
        ),
        pytest.param(
            LABELS, struct.pack(">BBBBI", 0, 0, 8, 1, 0xFFFFFFFF) + bytes(40),
            "its shape [4294967295] needs 4294967295", id="a length that is not there",
        ),
        pytest.param(
            LABELS, struct.pack(">BBBBI", 0, 0, 8, 1, 39) + bytes(39),
            "39 labels for the 40 images of train-images-idx3-ubyte; get both from one place",
            id="too few labels",
        ),
        pytest.param(
            LABELS, struct.pack(">BBBBI", 0, 0, 8, 1, 40) + bytes([10] * 40),
            "label 10 is above 9", id="another set's labels",
        ),
        pytest.param(
            IMAGES, struct.pack(">BBBBIII", 0, 0, 8, 3, 40, 8, 8) + bytes(40 * 64),
            "its images have 8x8 pixels, MNIST's have 28x28", id="another set's images",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(mnist_folder, name, data, said):
    folder = mnist_folder(gzipped=False)
    path = broken(folder, name, data)
    with pytest.raises(DataError) as caught:
        load(str(folder))
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_empty_parts_are_refused(mnist_folder):
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: it is empty; get it again"):
        load(str(mnist_folder(train=0, gzipped=False)))


def test_a_file_that_is_missing_is_named_with_the_remedy(mnist_folder):
    folder = mnist_folder()
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte is missing.*--data_dir paddle"):
        load(str(folder))


def test_what_paddle_has_downloaded_is_read(mnist_folder, monkeypatch):
    """With a class in the place of Paddle's, which would download."""
    folder = mnist_folder()

    class Downloaded:
        def __init__(self, mode: str, download: bool) -> None:
            name = {"train": "train", "test": "t10k"}[mode]
            self.image_path = str(folder / f"{name}-images-idx3-ubyte.gz")
            self.label_path = str(folder / f"{name}-labels-idx1-ubyte.gz")

    monkeypatch.setattr("paddle.vision.datasets.MNIST", Downloaded)
    monkeypatch.setattr("paddle.dataset.common.DATA_HOME", str(folder / "cache"))
    assert [len(part) for part in load("paddle")] == [40, 20]


def test_a_download_that_fails_is_said_with_the_remedy(tmp_path, monkeypatch):
    def fail(mode: str, download: bool) -> None:
        raise RuntimeError("Cannot download it")

    monkeypatch.setattr("paddle.vision.datasets.MNIST", fail)
    monkeypatch.setattr("paddle.dataset.common.DATA_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"paddle: the download failed: Cannot.*name their folder"):
        load("paddle")


def test_digits_come_in_mnist_size_with_the_same_split_always():
    train, test = load(None)
    assert train.images.shape == (1437, 28, 28)
    assert test.images.shape == (360, 28, 28)
    assert set(test.labels) == set(range(10))
    assert 200 < train.images.max() <= 255
    again, _ = load(None)
    assert (again.images == train.images).all()


@pytest.mark.skipif(not REAL.is_dir(), reason="no mnist: set EDL_TEST_DATA")
def test_the_real_files_are_read():
    train, test = load(str(REAL))
    assert (len(train), len(test)) == (8000, 2000)
    assert np.bincount(train.labels).min() > 600


# --- who has a label


@pytest.fixture(scope="module")
def digits() -> Images:
    return load(None)[0]


def test_labels_are_spread_over_the_classes(digits):
    chosen = choose(digits, 105, 0, seed=1)
    counts = np.bincount(chosen.labels)
    assert (len(chosen), counts.min(), counts.max()) == (105, 10, 11)


def test_the_others_follow_without_labels_and_nobody_comes_twice(digits):
    numbered = Images(images=np.arange(len(digits))[:, None, None], labels=digits.labels)
    chosen = choose(numbered, 100, None, seed=1)
    assert len(chosen) == len(digits)
    assert sorted(chosen.images.ravel()) == list(range(len(digits)))
    assert (chosen.labels[:100] != NO_LABEL).all()
    assert (chosen.labels[100:] == NO_LABEL).all()
    assert len(choose(numbered, 100, 30, seed=1)) == 130


def test_those_with_labels_depend_on_the_seed_and_not_on_the_others(digits):
    one, other = choose(digits, 50, 0, seed=1), choose(digits, 50, None, seed=1)
    assert (one.images == other.images[:50]).all()
    assert (choose(digits, 50, 0, seed=2).images != one.images).any()


def test_all_are_trained_on_where_nothing_is_said(digits):
    chosen = choose(digits, None, 0, seed=1)
    assert (np.bincount(chosen.labels) == np.bincount(digits.labels)).all()


@pytest.mark.parametrize(("labelled", "unlabelled"), [(1438, 0), (1000, 438), (None, 1)])
def test_more_images_than_there_are_are_refused(digits, labelled, unlabelled):
    with pytest.raises(DataError, match="there are 1437 images to train on; ask for fewer"):
        choose(digits, labelled, unlabelled, seed=1)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="without --data_dir this needs scikit-learn and pillow"):
        load(None)
