"""MNIST by its four IDX files, by Paddle's download, or 1,797 smaller digits without either.

Which images have a label is decided here, too: distillation can learn from those that have none.
"""

import fcntl
import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paddle.io import Dataset

CLASSES = 10
SIDE = 28  # pixels
NO_LABEL = -1
DIGITS_TEST_IMAGES = 360  # a fifth

PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UINT8 = 0x08  # IDX's number for it; MNIST has no other type


class DataError(Exception):
    """The data cannot be used; the text names the file or folder, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """One part of the data."""

    images: np.ndarray  # (N, 28, 28) uint8
    labels: np.ndarray  # (N,) int64, NO_LABEL where there is none

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: np.ndarray) -> "Images":
        return Images(images=self.images[ids], labels=self.labels[ids])

    def without_labels(self) -> "Images":
        return Images(images=self.images, labels=np.full_like(self.labels, NO_LABEL))

    def __add__(self, more: "Images") -> "Images":
        return Images(
            images=np.concatenate([self.images, more.images]),
            labels=np.concatenate([self.labels, more.labels]),
        )


class ImageSet(Dataset):
    """What a loop reads. Each item: image (1, 28, 28) float32 in [-1, 1], label int64."""

    def __init__(self, part: Images) -> None:
        self._part = part

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        image = self._part.images[index][np.newaxis].astype(np.float32)
        return image / 127.5 - 1, self._part.labels[index]


def load(data_dir: str | None) -> tuple[Images, Images]:
    """Return the training and the test part.

    Args:
        data_dir: folder of the IDX files; "paddle": where Paddle keeps them, downloaded if need
            be; None: the digits that come inside scikit-learn.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    if data_dir is None:
        return load_digits()
    if data_dir == "paddle":
        return load_by_paddle()
    folder = Path(data_dir)
    train, test = (
        read_part(*(find_file(folder, name) for name in PARTS[part])) for part in ("train", "test")
    )
    return train, test


def find_file(folder: Path, name: str) -> Path:
    """Return `name`, or `name`.gz, in `folder`.

    Raises:
        DataError: neither is there.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"--data_dir {folder}: {name} is missing, also as {name}.gz; put MNIST's four files there, "
        f"or say --data_dir paddle to download them"
    )


def read_part(images_path: Path, labels_path: Path) -> Images:
    """Read images and their labels.

    Raises:
        DataError: a file is broken, is of something else, or the two do not belong together.
    """
    images = read_idx(images_path, axes=3)
    labels = read_idx(labels_path, axes=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{images_path}: its images have {images.shape[1]}x{images.shape[2]} pixels, MNIST's "
            f"have {SIDE}x{SIDE}; use MNIST's file"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: {len(labels)} labels for the {len(images)} images of "
            f"{images_path.name}; get both from one place"
        )
    if not len(labels):
        raise DataError(f"{labels_path}: it is empty; get it again")
    if labels.max() >= CLASSES:
        raise DataError(
            f"{labels_path}: label {labels.max()} is above {CLASSES - 1}; use MNIST's file"
        )
    return Images(images=images, labels=labels.astype(np.int64))


def read_idx(path: Path, *, axes: int) -> np.ndarray:
    """Return what an IDX file of bytes holds; it may be compressed by gzip, whatever its name is.

    The format: two zero bytes, a byte for the type, one for the number of axes, the length of each
    as 4 bytes with the highest first, then the values (yann.lecun.com/exdb/mnist).

    Raises:
        DataError: it cannot be read, or does not have this many axes.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}; get it again") from error
    head = 4 + 4 * axes
    if len(data) < head or data[:2] != b"\0\0":
        raise DataError(f"{path}: this is no IDX file; get it again")
    if data[2] != _UINT8 or data[3] != axes:
        raise DataError(
            f"{path}: expected bytes with {axes} axes, it has type 0x{data[2]:02x} with "
            f"{data[3]}; are images and labels mixed up?"
        )
    shape = struct.unpack(f">{axes}I", data[4:head])
    if len(data) - head != math.prod(shape):
        raise DataError(
            f"{path}: {len(data) - head} bytes follow the head, its shape {list(shape)} needs "
            f"{math.prod(shape)}; get it again"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def load_by_paddle() -> tuple[Images, Images]:
    """Return MNIST from Paddle's cache, which it fills by a download of 11 MB.

    Raises:
        DataError: the download fails.
    """
    from paddle.dataset.common import DATA_HOME
    from paddle.vision.datasets import MNIST

    parts = []
    try:
        Path(DATA_HOME).mkdir(parents=True, exist_ok=True)
        # One trainer downloads, the others of this machine find it done.
        with open(Path(DATA_HOME, "mnist.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for mode in ("train", "test"):
                files = MNIST(mode=mode, download=True)
                parts.append(read_part(Path(files.image_path), Path(files.label_path)))
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"--data_dir paddle: the download failed: {error}; get MNIST's four files in another "
            f"way and name their folder, or leave --data_dir out"
        ) from error
    return parts[0], parts[1]


def load_digits() -> tuple[Images, Images]:
    """Return scikit-learn's digits, 8x8 pixels made 28x28: the same split, always.

    Raises:
        DataError: a package is missing.
    """
    try:
        import sklearn.datasets
        from PIL import Image
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            f"without --data_dir this needs scikit-learn and pillow ({error}); pip install both, "
            f"or name a folder with MNIST"
        ) from error

    digits = sklearn.datasets.load_digits()
    small = np.minimum(digits.images * 16, 255).astype(np.uint8)  # values are from 0 to 16
    images = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
            for image in small
        ]
    )
    whole = Images(images=images, labels=digits.target.astype(np.int64))
    train_ids, test_ids = train_test_split(
        np.arange(len(whole)), test_size=DIGITS_TEST_IMAGES, stratify=whole.labels, random_state=0
    )
    return whole.take(train_ids), whole.take(test_ids)


def choose(part: Images, labelled: int | None, unlabelled: int | None, seed: int) -> Images:
    """Return what a student trains on: some images with their labels, then others without.

    Args:
        labelled: how many have a label, as evenly over the classes as can be; None: all.
        unlabelled: how many of the others follow; None: all of them.
        seed: other images for another seed.

    Raises:
        DataError: there are not as many.
    """
    order = spread_over_classes(part.labels, seed)
    count = len(part) if labelled is None else labelled
    others = len(part) - count if unlabelled is None else unlabelled
    if count + others > len(part):
        raise DataError(
            f"--labelled {count} and --unlabelled {others}: there are {len(part)} images to train "
            f"on; ask for fewer"
        )
    chosen = part.take(order[:count])
    return chosen + part.take(order[count : count + others]).without_labels() if others else chosen


def spread_over_classes(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return an order of all ids, of which any first part has each class about equally often."""
    random = np.random.RandomState(seed)
    shuffled = random.permutation(len(labels))
    turns = np.zeros(len(labels), np.int64)  # the how-manieth of its class each one is
    for label in np.unique(labels):
        mine = shuffled[labels[shuffled] == label]
        turns[mine] = np.arange(len(mine))
    return shuffled[np.argsort(turns[shuffled], kind="stable")]
