"""A process that keeps labels until it is killed: row n of writer w is made of n alone.

python -m tests.distill_reader.student.cache_writer FOLDER FIRST COUNT [MAX_BYTES]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from distill_reader.student.batches.label_index import make_keys
from distill_reader.student.cache.label_store import Inputs, LabelStore
from distill_reader.student.labels.labels import ServedOutput

IDENTITY = {"version": "1"}
CLASSES = 50


def labels(ids: Any) -> list[Any]:
    """What the teacher says of these samples: large, so that a write takes its time."""
    ids = np.asarray(ids)
    return [(ids[:, None] * 7 + np.arange(CLASSES)).astype(np.float32), ids[:, None] % 3]


def add(store: LabelStore, ids: Any) -> int:
    served = (ServedOutput(dtype="float32"), ServedOutput(dtype="int64"))
    inputs = Inputs(layout=(("x", "int64", ()),), check=lambda row: 7 * int(ids[row]))
    return store.add(make_keys(ids, None, len(ids)), labels(ids), served, inputs)


def check(store: LabelStore, ids: Any) -> int:
    """Return how many of these are there; all of them must be right."""
    is_there, rows, inputs = store.find(make_keys(ids, None, len(ids)))
    for number, check in inputs.items():
        assert check == (7 * int(np.asarray(ids)[number]) or 1)
    if len(rows):
        layout = store.layout
        assert layout is not None
        found = layout.split(rows)
        for mine, expected in zip(found, labels(np.asarray(ids)[is_there]), strict=True):
            np.testing.assert_array_equal(mine, expected)
    return int(is_there.sum())


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    max_bytes = int(sys.argv[4]) if len(sys.argv) > 4 else 1 << 30
    store = LabelStore(folder, IDENTITY, max_bytes=max_bytes)
    print("ready", flush=True)
    for start in range(first, first + count, 64):
        ids = np.arange(start, min(start + 64, first + count))
        add(store, ids)
        assert check(store, ids) == len(ids) or max_bytes < 1 << 30
    print("done", flush=True)


if __name__ == "__main__":
    main()
