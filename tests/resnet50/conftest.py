"""Put the example's flat modules on the path, and make small data."""

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "resnet50"
sys.path.insert(0, str(FOLDER))

CLASSES = ("ant", "bee", "cat")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth picture, as photographs are, of its own colours."""
    noise = np.random.RandomState(seed).randint(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def make_options() -> Callable[..., argparse.Namespace]:
    """Return what the command line gives, for images of 32 pixels, with changes."""

    def make(**changes: object) -> argparse.Namespace:
        options = {
            "data_dir": None, "image_shape": (3, 32, 32), "crop_size": 32, "class_dim": 10,
            "resize_short_size": 36, "lower_scale": 0.08, "lower_ratio": 3 / 4,
            "upper_ratio": 4 / 3, "interpolation": None, "data_format": "NCHW",
            "total_images": None, "num_threads": 0, "batch_size": 16, "total_batch_size": None,
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "seed": 0,
            "use_distill_service": False, "distill_wire_dtype": "float32",
        }  # fmt: skip
        assert options.keys() >= changes.keys()
        return argparse.Namespace(**(options | changes))

    return make


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of 3 classes, with 4 images of each to train and 2 to validate, and no lists."""
    root = tmp_path / "data"
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                size = (60 + 20 * number, 90 - 10 * number)
                (folder / f"{number}.jpg").write_bytes(
                    encoded(picture(*size, seed=10 * label + number))
                )
    return root


@pytest.fixture
def listed(tree: Path) -> Path:
    """The same with train.txt and val.txt."""
    for part in ("train", "val"):
        lines = [
            f"{path.relative_to(tree)} {CLASSES.index(path.parent.name)}\n"
            for path in sorted((tree / part).glob("*/*.jpg"))
        ]
        (tree / f"{part}.txt").write_text("".join(lines))
    return tree
