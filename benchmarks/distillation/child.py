"""Read from one reader, ours or the original, as fast as it goes. Started by benchmarks/distill.py.

    python -m benchmarks.distillation.child ours --teachers HOST:PORT,... --shape 1x28x28 \
        --batch 64 --json FILE

Writes samples per second behind the time for warming up, and whether each answer
belonged to its image. For the original, `--original DIR` is where `paddle_edl` was installed.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distillation import raw
from benchmarks.harness import busy_s, tree_cpu_s

POOL_BYTES = 96 << 20  # different batches, so that not all of it stays in the processor's cache


def batches(shape: tuple[int, ...], batch: int) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """Return an endless generator of (images, labels); each image begins with its label."""
    size = 4 * batch * int(np.prod(shape))
    count = max(2, min(64, POOL_BYTES // size))
    pool = []
    for number in range(count):
        images = np.random.default_rng(number).random((batch, *shape), np.float32)
        labels = np.arange(number * batch, (number + 1) * batch)
        images.reshape(batch, -1)[:, 0] = labels
        pool.append((images, labels))

    def generate() -> Iterator[tuple[Any, Any]]:
        return itertools.cycle(pool)

    return generate


def failing(generate: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    """Return a generator that ends with an error soon."""

    def fail() -> Iterator[Any]:
        yield from itertools.islice(generate(), 100)
        raise ValueError("a broken image")

    return fail


def original_reader(folder: str, teachers: str, shape: tuple[int, ...], batch: int) -> Any:
    """Return a reader of paddle_edl 0.3.1."""
    sys.path.insert(0, folder)
    raw.install_client()
    from paddle_edl.distill import distill_reader

    if not Path(distill_reader.__file__).is_relative_to(Path(folder).absolute()):
        raise SystemExit(f"--original {folder}: holds no paddle_edl: EDL's own would be measured")
    with tempfile.NamedTemporaryFile(prefix="edl-conf-", delete=False) as file:
        config = Path(file.name)
    raw.write_config(config, shape)
    reader: Any = distill_reader.DistillReader(ins=["image", "label"], predicts=["score"])
    reader.set_serving_conf_file(str(config))
    reader.set_teacher_batch_size(batch)
    reader.set_fixed_teacher(teachers)
    return reader


def our_reader(teachers: str) -> Any:
    """Return one of ours, with its defaults."""
    from distill_reader import DistillReader

    return DistillReader(ins=["image", None], predicts=["score"]).set_fixed_teacher(teachers)


def ends_wrong(labels: Any, scores: Any) -> int:
    """Return 1 if the first or the last answer is another image's.

    Two samples of each batch tell: a batch is answered whole, and at batch 1 all are seen.
    """
    return int(scores[0, 0] != labels[0] or scores[-1, 0] != labels[-1])


def measure(
    items: Iterator[Any],
    warm_s: float,
    seconds: float,
    pids: Sequence[int],
    count_wrong: Callable[[Any, Any], int] = ends_wrong,
) -> dict[str, float]:
    """Read for `warm_s` and then for `seconds`; return what the second part brought.

    Args:
        pids: processes beside this one that belong to the measurement: the teachers.
        count_wrong: how many of a batch's answers do not belong to its labels.
    """
    pids = (os.getpid(), *pids)
    wrong = samples = 0
    cpu_s = machine_s = 0.0
    begin: float | None = None  # of what counts
    first = last = time.perf_counter()
    for number, (_, labels, scores) in enumerate(items):
        last = time.perf_counter()
        wrong += count_wrong(labels, scores)
        if number == 0:
            first = last
        if begin is None:
            if last - first >= warm_s:
                cpu_s, machine_s = tree_cpu_s(pids), busy_s()
                begin = time.perf_counter()
            continue
        samples += len(labels)
        if last - begin >= seconds:
            break
    assert begin is not None
    cpu_s, machine_s = tree_cpu_s(pids) - cpu_s, busy_s() - machine_s
    all_s = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    return {
        "samples_per_s": samples / (last - begin),
        "wrong": float(wrong),
        "cpu_us_per_sample": 1e6 * cpu_s / samples,
        "others_used": max(0.0, machine_s - cpu_s) / all_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("side", choices=["ours", "original"])
    parser.add_argument("--teachers", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm_s", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="of the teachers")
    parser.add_argument("--fail", action="store_true", help="let the generator fail in between")
    parser.add_argument("--original", metavar="DIR")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split("x")))
    if args.side == "original":
        reader = original_reader(args.original, args.teachers, shape, args.batch)
    else:
        reader = our_reader(args.teachers)
    generate = batches(shape, args.batch)
    reader.set_batch_generator(failing(generate) if args.fail else generate)
    items = reader()
    found = measure(items, args.warm_s, args.seconds, args.pids)
    args.json.write_text(json.dumps(found))
    if args.side == "original":
        os._exit(0)  # a break is nothing that it can end from; whoever started us ends the rest
    items.close()


if __name__ == "__main__":
    main()
