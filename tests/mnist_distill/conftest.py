"""Put the example's flat modules on the path, and make small data."""

import gzip
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "mnist_distill"
sys.path.insert(0, str(FOLDER))


def idx_bytes(values: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of folders with MNIST's four files; each image shows its label's number."""

    def make(*, train: int = 40, test: int = 20, gzipped: bool = True) -> Path:
        folder = tmp_path / "mnist"
        folder.mkdir(exist_ok=True)
        for name, count in (("train", train), ("t10k", test)):
            labels = np.arange(count) % 10
            images = np.repeat(labels, 28 * 28).reshape(count, 28, 28)
            for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
                data = idx_bytes(values)
                path = folder / f"{name}-{kind}-ubyte"
                if gzipped:
                    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
                else:
                    path.write_bytes(data)
        return folder

    return make
