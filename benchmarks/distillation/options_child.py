"""Read from a reader with options as fast as it goes. Started by benchmarks/distill_options.py.

    python -m benchmarks.distillation.options_child wire --teachers HOST:PORT,... --option NAME ...
    python -m benchmarks.distillation.options_child cache --folder DIR ...

`wire` counts the bytes that go through the sockets, and samples per second; `cache` reads two
epochs. Whether each answer belongs to its image is checked in both.
"""

import argparse
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distillation.child import measure
from benchmarks.distillation.options_backend import MEAN, NORMALIZATION, STD
from distill_reader import DistillReader
from distill_reader.model.normalization import Normalization
from distill_reader.protocols import stream
from distill_reader.student import reader as reader_module
from distill_reader.student.clients.connect import connect

OPTIONS: dict[str, Callable[[DistillReader], DistillReader]] = {
    "float32": lambda reader: reader,
    "float16": lambda reader: reader.set_wire_dtype(predicts="float16"),
    "uint8": lambda reader: reader.set_wire_dtype(ins="uint8"),
    "top-10": lambda reader: reader.set_top_k(10),
    "uint8, top-10 float16": lambda reader: reader.set_wire_dtype(
        ins="uint8", predicts="float16"
    ).set_top_k(10),
}
_POOL = 12  # batches that differ
_COUNTED_ROUNDS = 4  # of those, for the bytes


class Counted:
    """The bytes that this process has sent and received on the fast path."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        send, receive = stream.send, stream.receive

        def counted_send(sock: Any, buffers: Any, size_bytes: int, timeout_s: float) -> None:
            send(sock, buffers, size_bytes, timeout_s)
            self.sent += size_bytes

        def counted_receive(sock: Any, view: memoryview, timeout_s: float) -> None:
            receive(sock, view, timeout_s)
            self.received += len(view)

        stream.send, stream.receive = counted_send, counted_receive


def pool(shape: tuple[int, ...], batch: int, option: str) -> list[tuple[Any, Any]]:
    """Return batches of images, as the option wants them, and their first pixels."""
    found = []
    for number in range(_POOL):
        pixels = np.random.default_rng(number).integers(0, 256, (batch, *shape), dtype=np.uint8)
        images: Any = pixels if option.startswith("uint8") else _normalized(pixels)
        found.append((images, pixels.reshape(batch, -1)[:, 0].astype(np.int64)))
    return found


def _normalized(pixels: Any) -> Any:
    is_colour = pixels.shape[1] == 3
    how = NORMALIZATION if is_colour else Normalization(mean=MEAN[:1], std=STD[:1])
    return how.apply(pixels, "float32")


def wire(args: argparse.Namespace) -> dict[str, float]:
    """Count the bytes of a few batches, then read without end; return what came behind `warm_s`."""
    counted = Counted()
    if args.tcp:  # on one host a reader finds something better by itself
        vars(reader_module)["connect"] = partial(connect, protocol="fast-tcp")
    reader = DistillReader(["image", None], ["score"]).set_fixed_teacher(args.teachers)
    batches = pool(args.shape, args.batch, args.option)
    OPTIONS[args.option](reader).set_batch_generator(batches * _COUNTED_ROUNDS)
    counted_samples = sum(len(pixels) for _, pixels, _ in reader())
    sent, received = counted.sent / counted_samples, counted.received / counted_samples
    items = reader.set_batch_generator(lambda: itertools.cycle(batches))()
    found = measure(items, args.warm_s, args.seconds, args.pids, largest_wrong)
    items.close()
    return found | {"sent_bytes_per_sample": sent, "received_bytes_per_sample": received}


def largest_wrong(pixels: Any, score: Any) -> int:
    """Return how many answers do not name the first pixel of their image."""
    return int((score.argmax(1) != pixels).sum())


def cache(args: argparse.Namespace) -> dict[str, float]:
    """Read two epochs, and one more with SQLite in place of our files."""
    batches = pool(args.shape, args.batch, args.option)
    count = args.samples // args.batch

    def generate() -> Iterator[Any]:
        for number, (images, pixels) in zip(range(count), itertools.cycle(batches), strict=False):
            yield images, np.arange(number * args.batch, (number + 1) * args.batch), pixels

    reader = DistillReader(["image", "id", None], ["score"]).set_fixed_teacher(args.teachers)
    reader = OPTIONS[args.option](reader).set_cache(args.folder).set_batch_generator(generate)
    rates, cpus, wrong = [], [], 0
    for _ in range(3):
        begin, cpu_s = time.perf_counter(), time.process_time()
        for *_, pixels, score in reader():
            wrong += int((score[[0, -1]].argmax(1) != pixels[[0, -1]]).sum())
        rates.append(count * args.batch / (time.perf_counter() - begin))
        cpus.append(1e6 * (time.process_time() - cpu_s) / (count * args.batch))
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    row_bytes = (args.folder / next(args.folder.glob("labels-*")).name / "rows").stat().st_size
    return {
        "first_samples_per_s": rates[0],
        "second_samples_per_s": max(rates[1:]),
        "second_cpu_us_per_sample": min(cpus[1:]),
        "disk_bytes_per_sample": size / (count * args.batch),
        "wrong": float(wrong),
        **_sqlite(args.folder / "sqlite", row_bytes // (count * args.batch), count, args.batch),
    }


def _sqlite(path: Path, row_bytes: int, count: int, batch: int) -> dict[str, float]:
    """Look up the same rows in SQLite, batch by batch, with nothing else done to them."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE labels (id INTEGER PRIMARY KEY, row BLOB)")
    row = bytes(row_bytes)
    with connection:
        connection.executemany(
            "INSERT INTO labels VALUES (?, ?)", ((number, row) for number in range(count * batch))
        )
    query = f"SELECT id, row FROM labels WHERE id IN ({','.join('?' * batch)})"
    begin, cpu_s = time.perf_counter(), time.process_time()
    for number in range(count):
        ids = list(range(number * batch, (number + 1) * batch))
        found = dict(connection.execute(query, ids))
        np.frombuffer(b"".join([found[one] for one in ids]), np.uint8)
    elapsed_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
    connection.close()
    return {
        "sqlite_samples_per_s": count * batch / elapsed_s,
        "sqlite_cpu_us_per_sample": 1e6 * cpu_s / (count * batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["wire", "cache"])
    parser.add_argument("--teachers", required=True)
    parser.add_argument("--option", choices=list(OPTIONS), required=True)
    parser.add_argument("--shape", default="3x224x224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--warm_s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--samples", type=int, default=100_000, help="of an epoch")
    parser.add_argument("--folder", type=Path, help="of the cache")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="of the teachers")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.shape = tuple(map(int, args.shape.split("x")))
    args.json.write_text(json.dumps((wire if args.what == "wire" else cache)(args)))


if __name__ == "__main__":
    main()
