"""ImageNet, or any folder of images, as two datasets that decode an item when it is read.

DIR/train.txt, DIR/val.txt            a line per image: path, blank, label (a number from 0 on)
DIR/train/CLASS/*, DIR/val/CLASS/*    or folders; the label is the class's place in their order

python images.py --check DIR          reads all of them, and names those that cannot be decoded
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import digits
import numpy as np
from transforms import BROKEN_IMAGE, Recipe, decode, spread

from pod_runtime.cgroups import usable_cores

logger = logging.getLogger(__name__)

SUFFIXES = (b".jpeg", b".jpg", b".png", b".bmp", b".gif", b".webp", b".tif", b".tiff", b".ppm")
SHARED_MEMORY = "/dev/shm"
PREFETCH = 2  # batches per worker: Paddle's default


class DataError(ValueError):
    """The data are not as they should be; the text names file, line and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Which images there are.

    Paths are one long text, not a list: a list's reference counts are written to whenever a worker
    looks something up, so that each worker would soon have its own copy of all of them.
    """

    source: str  # the list file or folder that they come from, for messages
    base: bytes  # folder that paths are relative to
    paths: bytes  # all of them, one after the other
    ends: np.ndarray  # (N,) int64: where in `paths` each one ends
    labels: np.ndarray  # (N,) int64
    lines: np.ndarray | None  # (N,) int32: of a list file, from 1 on; None: not from a list

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return os.path.join(self.base, self.paths[start : self.ends[index]])

    def describe(self, index: int) -> str:
        """Return where an image stands, for messages."""
        line = "" if self.lines is None else f"{self.source}, line {self.lines[index]}: "
        return line + printable(self.path(index))


class Images:
    """A map-style dataset. Each item: image float32 (3, H, W) or (H, W, 3), label int64."""

    def __init__(
        self, listing: Listing, recipe: Recipe, *, augmented: bool, chosen: Any = slice(None)
    ) -> None:
        """`chosen`: which of the images; a slice or their indices."""
        self._listing = listing
        self._indices = np.arange(len(listing))[chosen]
        self._transform = recipe.augment if augmented else recipe.evaluate

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        place = int(self._indices[index])
        try:
            # At one go: a network file system answers one large read sooner than several.
            with open(self._listing.path(place), "rb") as file:
                image = self._transform(file.read())
        except BROKEN_IMAGE as error:
            raise DataError(
                f"{self._listing.describe(place)} cannot be read: {what_failed(error)}. "
                f"`python images.py --check DIR` names all such files; repair them or take them "
                f"out"
            ) from error
        return image, self._listing.labels[place]


def make_sets(options: Any) -> tuple[Any, Any]:
    """Return the training and the validation set: digits if there is no `data_dir`.

    Raises:
        ValueError: an option is wrong; DataError: the data are. The text says what and where.
    """
    if not options.data_dir:
        return digits.make_sets(options)
    recipe = Recipe.of(options)
    train, val = find_images(options.data_dir, options.class_dim)
    chosen = spread(len(train), options.total_images)
    return (
        Images(train, recipe, augmented=True, chosen=chosen),
        Images(val, recipe, augmented=False),
    )


def train_loader_args(
    options: Any, environ: Mapping[str, str] = os.environ, shared_memory: str = SHARED_MEMORY
) -> dict[str, Any]:
    """Return how many processes decode, as arguments of `paddle.io.DataLoader`."""
    workers = options.num_threads
    if workers is None and not options.data_dir:
        workers = 0  # digits are in memory: handing them over would cost more than making them
    if workers is None:
        trainers = trainers_of_node(environ)
        # A core for each trainer itself; with no more cores than trainers they have to share.
        workers = max(1, usable_cores() // trainers - 1)
    if workers == 0:
        return {"num_workers": 0}
    batch_bytes = shard_size(options, environ) * 4 * int(np.prod(options.image_shape))
    needed = batch_bytes * (workers * PREFETCH + 2)  # two more wait in the loop's own queue
    needed *= trainers_of_node(environ)  # they start together: each finds all of it free
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCH,
        "use_shared_memory": _has_room(shared_memory, needed),
    }


def shard_size(options: Any, environ: Mapping[str, str]) -> int:
    """Return how many images are handed over at once, at most."""
    if not options.total_batch_size:
        return options.batch_size
    most = int(environ.get("EDL_MAX_TRAINERS") or environ.get("PADDLE_TRAINERS_NUM") or 1)
    return -(-options.total_batch_size // most)


def trainers_of_node(environ: Mapping[str, str]) -> int:
    """Return how many trainers share this node's cores, by the addresses of the stage."""
    hosts = [
        each.rpartition(":")[0] for each in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    ]
    mine = environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    return max(1, hosts.count(mine))


def _has_room(folder: str, needed: int) -> bool:
    """Whether batches fit into shared memory: a worker that finds it full is killed by SIGBUS."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = 0
    if free < needed:
        logger.warning(
            "%s has %d MiB free, and %d MiB are needed to hand over batches: they go through "
            "pipes, which is slower. Start a container with --shm-size",
            folder, free >> 20, needed >> 20,
        )  # fmt: skip
    return free >= needed


# --- which images there are


def find_images(data_dir: str, class_dim: int | None = None) -> tuple[Listing, Listing]:
    """Return the training and the validation images.

    Args:
        class_dim: labels must be below it; None: any.

    Raises:
        DataError: something is missing or wrong.
    """
    root = os.fsencode(data_dir)
    lists = [os.path.isfile(os.path.join(root, name)) for name in (b"train.txt", b"val.txt")]
    folders = [os.path.isdir(os.path.join(root, name)) for name in (b"train", b"val")]
    if all(lists):
        return read_list(root, b"train", class_dim), read_list(root, b"val", class_dim)
    if any(lists):
        there, missing = ("train.txt", "val.txt") if lists[0] else ("val.txt", "train.txt")
        raise DataError(
            f"data_dir: {data_dir} has {there} but no {missing}; write it, or take {there} away "
            f"to go by the class folders"
        )
    if not all(folders):
        raise DataError(
            f"data_dir: {data_dir} has neither train.txt and val.txt (lines of path and label) nor "
            f"class folders train/CLASS and val/CLASS; give the folder that holds them"
        )
    classes = class_names(os.path.join(root, b"train"))
    if class_dim is not None and len(classes) > class_dim:
        raise DataError(
            f"class_dim: {class_dim} is less than the {len(classes)} class folders in "
            f"{printable(os.path.join(root, b'train'))}; pass --class_dim {len(classes)}"
        )
    train = read_folders(os.path.join(root, b"train"), classes)
    counts = np.bincount(train.labels, minlength=len(classes))
    if not counts.all():
        empty = os.path.join(root, b"train", classes[int(counts.argmin())])
        raise DataError(
            f"{printable(empty)}: no image is in it, though it counts as a class; remove or fill it"
        )
    return train, read_folders(os.path.join(root, b"val"), classes)


def read_list(root: bytes, part: bytes, class_dim: int | None) -> Listing:
    """Read `part`.txt. Paths are relative to its folder, or to the folder `part` in it."""
    file = os.path.join(root, part + b".txt")
    name = printable(file)
    with open(file, "rb") as opened:
        text = opened.read().removeprefix(b"\xef\xbb\xbf")  # as editors on Windows write
    paths, labels, numbers = [], [], []
    for number, line in enumerate(text.split(b"\n"), 1):
        fields = line.rsplit(None, 1)
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                f"{name}, line {number}: expected a path, a blank and a label, a number from 0 on; "
                f"got {printable(line.strip())!r}"
            )
        paths.append(fields[0].lstrip())
        labels.append(int(fields[1]))
        numbers.append(number)
    if not paths:
        raise DataError(f"{name}: no image is in it")
    highest = max(range(len(labels)), key=labels.__getitem__)
    if class_dim is not None and labels[highest] >= class_dim:
        first = next(index for index, label in enumerate(labels) if label >= class_dim)
        raise DataError(
            f"{name}, line {numbers[first]}: label {labels[first]} is not below class_dim, "
            f"{class_dim}; labels count from 0: pass --class_dim {labels[highest] + 1} if the list "
            f"is right"
        )
    return make_listing(name, base_of(root, part, paths[0], name), paths, labels, numbers)


def base_of(root: bytes, part: bytes, path: bytes, name: str) -> bytes:
    """Return the folder that the paths of a list are relative to, found by the first of them."""
    for base in (root, os.path.join(root, part)):
        if os.path.exists(os.path.join(base, path)):
            return base
    raise DataError(
        f"{name}: its first image, {printable(path)}, is neither in {printable(root)} nor in "
        f"{printable(os.path.join(root, part))}; paths are relative to one of these, or absolute"
    )


def class_names(folder: bytes) -> list[bytes]:
    """Return the class folders, sorted: a class's label is its place in this list."""
    with os.scandir(folder) as entries:
        found = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(b"."))
    if not found:
        raise DataError(f"{printable(folder)}: no class folder is in it")
    return found


def read_folders(folder: bytes, classes: list[bytes]) -> Listing:
    """List the images of one part; `classes` are those of the training part."""
    unknown = sorted(set(class_names(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"{printable(os.path.join(folder, unknown[0]))}: there is no such class in the "
            f"training part, so that it has no label; move or remove it"
        )
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = images_in(os.path.join(folder, name))
        paths += [os.path.join(name, image) for image in images]
        labels += [label] * len(images)
    if not paths:
        raise DataError(
            f"{printable(folder)}: no image is in its class folders; files count that end in "
            f"{', '.join(suffix.decode() for suffix in SUFFIXES)}"
        )
    return make_listing(printable(folder), folder, paths, labels, None)


def images_in(folder: bytes) -> list[bytes]:
    """Return the names of the images in a folder, sorted; none where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:  # validation images of some classes may be missing
        return []
    return sorted(
        name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(b".")
    )


def make_listing(
    source: str, base: bytes, paths: list[bytes], labels: list[int], lines: list[int] | None
) -> Listing:
    return Listing(
        source=source,
        base=base,
        paths=b"".join(paths),
        ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
        labels=np.array(labels, np.int64),
        lines=None if lines is None else np.array(lines, np.int32),
    )


def printable(path: bytes) -> str:
    """Return a name that any terminal and log can take: names need not be UTF-8."""
    return path.decode(errors="backslashreplace")


def what_failed(error: BaseException) -> str:
    """Return an error's text without the path, which stands beside it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition(" <_io.")[0] or type(error).__name__


# --- python images.py --check DIR


def check(data_dir: str, class_dim: int | None, workers: int) -> Iterator[str]:
    """Decode all images in full; yield a line for each that cannot be.

    Raises:
        DataError: as `find_images`.
    """
    with ProcessPoolExecutor(workers) as pool:
        for listing in find_images(data_dir, class_dim):
            paths = (listing.path(index) for index in range(len(listing)))
            problems = pool.map(problem_of, paths, chunksize=64)
            for index, problem in enumerate(problems):
                if problem:
                    yield f"{listing.describe(index)}: {problem}"


def problem_of(path: bytes) -> str:
    """Return why an image cannot be decoded; empty: it can."""
    try:
        with open(path, "rb") as file:
            decode(file.read())
    except BROKEN_IMAGE as error:
        return what_failed(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Find images that cannot be decoded.")
    parser.add_argument("--check", metavar="DIR", required=True, help="what --data_dir will be")
    parser.add_argument("--class_dim", type=int, help="labels must be below it")
    parser.add_argument("--workers", type=int, default=usable_cores())
    args = parser.parse_args()
    broken = 0
    try:
        for line in check(args.check, args.class_dim, max(1, args.workers)):
            print(line, flush=True)
            broken += 1
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{broken} images cannot be read" if broken else "all images can be read")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
