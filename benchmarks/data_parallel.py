"""Compare the digits example on two trainers with the framework's own data parallel.

    python benchmarks/data_parallel.py --framework torch --runs 7 --json FILE [--promise statistics]

Two processes of one thread each train the example's LeNet at the same global batch: once by
torch's DistributedDataParallel (or paddle.DataParallel) with a DistributedSampler, once by `edl
run` with the elastic loop at a world of two. The two take turns. A run's figure is the median of
its epochs' images per second, without start-up and without evaluation; on a busy machine the
processor time of rank 0, in ms per image, says more. A run of 60 epochs takes some 15 s: in the
first five of them each pod's spare imports the framework beside the training. `--max 3` is what
the quickstart does: a job of up to three trainers, of which two are there.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import ROOT, free_port, machine_used

EXAMPLES = {"paddle": ROOT / "examples" / "digits", "torch": ROOT / "examples" / "digits_torch"}
LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=sorted(EXAMPLES), required=True)
    parser.add_argument("--runs", type=int, default=7, help="of each kind")
    parser.add_argument(
        "--epochs", type=int, default=60, help="of a run; the first two are left out"
    )
    parser.add_argument("--batch_size", type=int, default=64, help="of both trainers together")
    parser.add_argument("--max", type=int, default=3, help="most trainers that the job may have")
    parser.add_argument("--promise", help="of the elastic loop; without, its default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["elastic", "parallel"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epochs < 3:
        parser.error(f"argument --epochs: the first two are left out: give 3, not {args.epochs}")
    if args.child:
        sys.path.insert(0, str(EXAMPLES[args.framework]))
        train = train_elastic if args.child == "elastic" else train_parallel
        train(args, Side(args.framework, args.child == "parallel"))
        return
    found: dict[str, list[tuple[float, float]]] = {"elastic": [], "parallel": []}
    for number in range(args.runs):
        order = sorted(found, reverse=number % 2 == 1)
        for kind in order:
            used = machine_used()
            found[kind].append(measure(kind, args))
            print(
                f"run {number + 1}: {kind:<8} {found[kind][-1][0]:8,.0f} images/s, "
                f"{found[kind][-1][1]:.3f} ms of rank 0's processor time per image "
                f"(others used {used:.0%} of the machine)",
                flush=True,
            )
    pairs = list(zip(found["elastic"], found["parallel"], strict=True))
    ratios = [mine[0] / own[0] for mine, own in pairs]
    report = {
        "framework": args.framework,
        "images_per_s": {
            kind: statistics.median(rate for rate, _ in runs) for kind, runs in found.items()
        },
        "cpu_ms_per_image": {
            kind: statistics.median(cpu for _, cpu in runs) for kind, runs in found.items()
        },
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "promise": args.promise,
        "max": args.max,
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(kind: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return medians of one run's epochs: images/s, and rank 0's processor ms per image."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = [
            str(Path(__file__).resolve()), "--child", kind, "--framework", args.framework,
            "--epochs", str(args.epochs), "--batch_size", str(args.batch_size),
            "--max", str(args.max), "--out", str(folder / "rates.json"),
            *(["--promise", args.promise] if args.promise else []),
        ]  # fmt: skip
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "EDL_NO_GPU": "1"}
        if kind == "elastic":
            command = [
                sys.executable, "-m", "edl", "run", "--pods", "2", "--max", str(args.max),
                "--cpu_slots", str(args.max), *child,
            ]  # fmt: skip
            ranks = [(command, env)]
        else:
            port = free_port()
            ranks = [([sys.executable, *child], env | addresses(rank, port)) for rank in (0, 1)]
        with contextlib.ExitStack() as running:
            log = running.enter_context((folder / "log").open("wb"))
            started = [
                running.enter_context(
                    subprocess.Popen(argv, env=each, cwd=folder, stdout=log, stderr=log)
                )
                for argv, each in ranks
            ]
            try:
                codes = [process.wait(LIMIT_S) for process in started]
            finally:
                for process in started:
                    process.terminate()
        if any(codes):
            sys.exit(f"{kind} ended with {codes}:\n{(folder / 'log').read_text()[-4000:]}")
        epochs = json.loads((folder / "rates.json").read_text())[2:]
    return (
        statistics.median(rate for rate, _ in epochs),
        statistics.median(cpu for _, cpu in epochs),
    )


def addresses(rank: int, port: int) -> dict[str, str]:
    """Return what a rank of two is told, as torchrun and Paddle's launcher tell it."""
    endpoints = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank], "PADDLE_DISTRI_BACKEND": "gloo",
    }  # fmt: skip


# --- in the trainers


class Side:
    """The example's parts in one framework."""

    def __init__(self, framework: str, is_parallel: bool) -> None:
        import digits

        self.is_torch = framework == "torch"
        self.data = digits.Digits("train") if self.is_torch else digits.Digits("train", 1)
        if self.is_torch:
            import torch

            self.cross_entropy: Any = torch.nn.functional.cross_entropy
            self.model: Any = digits.LeNet()
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
            if is_parallel:
                torch.distributed.init_process_group("gloo")
                self.parallel: Any = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            import paddle

            self.cross_entropy = paddle.nn.functional.cross_entropy
            self.model = digits.LeNet()
            self.optimizer = paddle.optimizer.Momentum(0.02, parameters=self.model.parameters())
            if is_parallel:
                paddle.distributed.init_parallel_env()
                self.parallel = paddle.DataParallel(self.model)

    def loader(self, batch_size: int) -> Any:
        """Return a loader whose batches are this rank's of two."""
        if self.is_torch:
            from torch.utils.data import DataLoader, DistributedSampler

            sampler: Any = DistributedSampler(self.data, shuffle=True)
            return DataLoader(self.data, batch_size=batch_size, sampler=sampler)
        from paddle.io import DataLoader as PaddleLoader
        from paddle.io import DistributedBatchSampler

        batches = DistributedBatchSampler(self.data, batch_size, shuffle=True)
        return PaddleLoader(self.data, batch_sampler=batches)

    def clear(self) -> None:
        self.optimizer.zero_grad() if self.is_torch else self.optimizer.clear_grad()


def train_parallel(args: argparse.Namespace, side: Side) -> None:
    loader = side.loader(args.batch_size // 2)
    rates: list[tuple[float, float]] = []
    for epoch in range(args.epochs):
        (loader.sampler if side.is_torch else loader.batch_sampler).set_epoch(epoch)
        side.model.train()
        with timed(rates, len(side.data)):
            for images, labels in loader:
                side.cross_entropy(side.parallel(images), labels).backward()
                side.optimizer.step()
                side.clear()
    if os.environ["RANK"] == "0":
        args.out.write_text(json.dumps(rates))


def train_elastic(args: argparse.Namespace, side: Side) -> None:
    from edl import elastic

    more = {"promise": args.promise} if args.promise else {}
    loop = elastic.Loop(
        side.model, side.optimizer, side.data, batch_size=args.batch_size, epochs=args.epochs,
        checkpoint=args.out.parent / "checkpoint", **more,
    )  # fmt: skip
    rates: list[tuple[float, float]] = []
    for epoch in loop.epochs():
        side.model.train()
        with timed(rates, len(side.data)):
            for step in epoch:
                for images, labels in step:
                    step.backward(side.cross_entropy(side.model(images), labels))
                step.update()
    if loop.rank == 0:
        args.out.write_text(json.dumps(rates))


@contextlib.contextmanager
def timed(rates: list[tuple[float, float]], images: int) -> Iterator[None]:
    began, used = time.perf_counter(), time.process_time()
    yield
    cpu_s = time.process_time() - used
    rates.append((images / (time.perf_counter() - began), 1000 * cpu_s / images))


if __name__ == "__main__":
    main()
