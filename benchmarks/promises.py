"""Compare the loop's steps with a plain loop's, or with the framework's own data parallel training.

    python benchmarks/promises.py --framework torch --model resnet18 --trainers 2 --json FILE

All ways train the same network over the same data, each in processes of its own, whose blocks of
steps take turns. Each trainer has one core. The loop's processes have the settings of EDL's
trainers: of the allocator, and collections of garbage leave out what was imported. A `plain` loop
has none, as users start it, and `plain, settings` has the same. `plain, 3 shards` takes as many
pieces as the loop, and accumulates. A figure is the ratio of blocks of the same round; the interval
is a bootstrap over the rounds.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
os.environ.setdefault("PYTHONWARNINGS", "ignore:No ccache found")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import HOST, block, free_port, interval
from pod_runtime.env import ALLOCATOR

WAY, RANK = "PROMISES_WAY", "PROMISES_RANK"
ANSWER = "seconds of a step:"
SHAPES = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32)}
BATCHES_OF_DATA = 200


class Torch:
    """The parts of a training with PyTorch."""

    def __init__(self, model: str, batch: int, trainers: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.model, self.batch, self.trainers = torch, model, batch, trainers

    def make(self) -> tuple[Any, Any]:
        from benchmarks.elasticity.train_torch import make_network
        from benchmarks.resnet18_torch import resnet18

        network = make_network() if self.model == "lenet" else resnet18()
        return network, self.torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)

    def data(self) -> Any:
        images, labels = make_data(self.model, self.batch)
        tensors = self.torch.from_numpy(images), self.torch.from_numpy(labels)
        return self.torch.utils.data.TensorDataset(*tensors)

    def loss(self, network: Any, images: Any, labels: Any) -> Any:
        return self.torch.nn.functional.cross_entropy(network(images), labels)

    def plain(self, shards: int) -> Iterator[None]:
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        network, optimizer = self.make()
        size, data = self.batch // self.trainers // shards, self.data()
        if self.trainers > 1:
            self.torch.distributed.init_process_group("gloo")
            network = DistributedDataParallel(network)
            loader = DataLoader(data, batch_size=size, sampler=DistributedSampler(data))
        else:
            loader = DataLoader(data, batch_size=size, shuffle=True)
        while True:
            for number, (images, labels) in enumerate(loader, 1):
                (self.loss(network, images, labels) / shards).backward()
                if number % shards == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    yield


class Paddle:
    """The parts of a training with Paddle."""

    def __init__(self, model: str, batch: int, trainers: int) -> None:
        import paddle

        self.paddle, self.model, self.batch, self.trainers = paddle, model, batch, trainers

    def make(self) -> tuple[Any, Any]:
        from benchmarks.loop_overhead import lenet

        resnet18 = self.paddle.vision.models.resnet18
        network = lenet() if self.model == "lenet" else resnet18(num_classes=10)
        momentum = self.paddle.optimizer.Momentum(0.001, parameters=network.parameters())
        return network, momentum

    def data(self) -> Any:
        return self.paddle.io.TensorDataset(
            [self.paddle.to_tensor(each) for each in make_data(self.model, self.batch)]
        )

    def loss(self, network: Any, images: Any, labels: Any) -> Any:
        return self.paddle.nn.functional.cross_entropy(network(images), labels.flatten())

    def plain(self, shards: int) -> Iterator[None]:
        io = self.paddle.io
        network, optimizer = self.make()
        size, data = self.batch // self.trainers // shards, self.data()
        if self.trainers > 1:
            self.paddle.distributed.init_parallel_env()
            network = self.paddle.DataParallel(network)
            sampler = io.DistributedBatchSampler(data, size, shuffle=True)
            loader = io.DataLoader(data, batch_sampler=sampler)
        else:
            loader = io.DataLoader(data, batch_size=size, shuffle=True)
        while True:
            for number, (images, labels) in enumerate(loader, 1):
                (self.loss(network, images, labels) / shards).backward()
                if number % shards == 0:
                    optimizer.step()
                    optimizer.clear_grad()
                    yield


def make_data(model: str, batch: int) -> tuple[Any, Any]:
    import numpy as np

    state, count = np.random.RandomState(1), batch * BATCHES_OF_DATA
    images = state.randn(count, *SHAPES[model]).astype("float32")
    return images, state.randint(0, 10, count).astype("int64")


def elastic_steps(parts: Torch | Paddle, **arguments: Any) -> Iterator[None]:
    """An endless training by the loop; one item per step."""
    from pod_runtime import elastic

    network, optimizer = parts.make()
    loop = elastic.Loop(
        network, optimizer, parts.data(), batch_size=parts.batch, epochs=1_000_000, **arguments
    )
    for epoch in loop.epochs():
        for step in epoch:
            for images, labels in step:
                step.backward(parts.loss(network, images, labels))
            step.update()
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train."""

    is_elastic: bool
    shards: int | None = None  # None: a trainer's share in one piece
    settings: bool = True  # of the allocator and the collector, as EDL's trainers have them

    @property
    def name(self) -> str:
        kind = "plain" if not self.is_elastic else "rounding" if self.shards else "statistics"
        shards = f", {self.shards} shards" if self.shards else ""
        return kind + shards + ", settings" * (self.settings and not self.is_elastic)

    def steps(self, parts: Torch | Paddle) -> Iterator[None]:
        if not self.is_elastic:
            return parts.plain(self.shards or 1)
        if self.shards:
            return elastic_steps(parts, shards=self.shards)
        return elastic_steps(parts, promise="statistics")


def all_ways(args: argparse.Namespace) -> tuple[list[Way], list[tuple[str, str]]]:
    """Return the ways to train, and the names of those that are compared."""
    plain = [Way(is_elastic=False, settings=settings) for settings in (False, True)]
    ways, pairs = [Way(is_elastic=True), *plain], [("statistics", each.name) for each in plain]
    for shards in args.shards:
        way = Way(is_elastic=True, shards=shards)
        others = plain
        if args.trainers == 1 and args.batch % shards == 0:
            others = [
                Way(is_elastic=False, shards=shards, settings=each.settings) for each in plain
            ]
        ways += [way, *(each for each in others if each not in ways)]
        pairs += [(way.name, each.name) for each in others]
    return ways, pairs


class Trainers:
    """The processes of one way, which wait until they are to make a block of steps."""

    def __init__(self, way: Way, count: int) -> None:
        ends = [f"{HOST}:{free_port()}" for _ in range(count)]
        common = {
            WAY: way.name,
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": ends[0].rpartition(":")[2],
            "PADDLE_TRAINERS_NUM": str(count),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
        } | (ALLOCATOR if way.settings else {})
        self._processes = []
        for rank, end in enumerate(ends):
            ranks = dict.fromkeys((RANK, "RANK", "LOCAL_RANK", "PADDLE_TRAINER_ID"), str(rank))
            process = subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, **common, **ranks, "PADDLE_CURRENT_ENDPOINT": end},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)

    def block(self, steps: int) -> tuple[float, float]:
        """Return (wall, processor) seconds of a step, of rank 0."""
        for each in self._processes:
            print(steps, file=each.stdin, flush=True)
        answers = [self._answer(each) for each in self._processes]
        wall, cpu = answers[0]
        return wall, cpu

    def _answer(self, process: "subprocess.Popen[str]") -> list[float]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                return [float(each) for each in line.removeprefix(ANSWER).split()]
        raise SystemExit(f"a trainer has ended with code {process.wait()}")

    def end(self) -> None:
        for each in self._processes:
            each.kill()
            each.communicate()


def train(args: argparse.Namespace, way: Way, rank: int) -> None:
    """Make blocks of steps, as many steps as each line of the standard input says."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    kind = Torch if args.framework == "torch" else Paddle
    parts = kind(args.model, args.batch, args.trainers)
    if way.settings:
        gc.collect()
        gc.freeze()
    steps = way.steps(parts)
    for line in sys.stdin:
        print(ANSWER, *block(steps, int(line)), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each way, and its ratios to what it is compared with."""
    ways, pairs = all_ways(args)
    trainers = {way.name: Trainers(way, args.trainers) for way in ways}
    try:
        for each in trainers.values():
            each.block(args.warm)
        rows: list[dict[str, tuple[float, float]]] = []
        for number in range(args.rounds):
            order = list(trainers) if number % 2 else list(reversed(trainers))
            rows.append({name: trainers[name].block(args.steps) for name in order})
    finally:
        for each in trainers.values():
            each.end()
    return {
        "framework": args.framework,
        "model": args.model,
        "trainers": args.trainers,
        "batch": args.batch,
        "rounds": args.rounds,
        "steps": args.steps,
        "ways": {
            name: {
                "ms": 1e3 * statistics.median(row[name][0] for row in rows),
                "cpu_ms": 1e3 * statistics.median(row[name][1] for row in rows),
                "images_per_s": args.batch / statistics.median(row[name][0] for row in rows),
            }
            for name in trainers
        },
        # Steps' times; of images per second the inverse.
        "ratios": {
            f"{name} to {other}": {
                unit: interval([row[name][index] / row[other][index] for row in rows])
                for index, unit in enumerate(("wall", "cpu"))
            }
            for name, other in pairs
        },
    }


def report(found: dict[str, Any]) -> str:
    """Return the figures as lines."""
    lines = ["{framework}, {model}, batch {batch}, {trainers} trainers".format(**found)]
    for name, way in found["ways"].items():
        lines.append(
            f"  {name:25} {way['ms']:8.2f} ms a step, {way['images_per_s']:8.1f} images/s, "
            f"processor {way['cpu_ms']:8.2f} ms"
        )
    for name, units in found["ratios"].items():
        texts = (
            f"{unit} {100 * (ratio - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
            for unit, (ratio, low, high) in units.items()
        )
        lines.append(f"  {name}: {', '.join(texts)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=("torch", "paddle"), required=True)
    parser.add_argument("--model", choices=sorted(SHAPES), default="lenet")
    parser.add_argument("--trainers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--batch", type=int, default=96, help="of all trainers")
    parser.add_argument("--shards", type=int, nargs="*", default=[3], help="of rounding")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20, help="of each way in a round")
    parser.add_argument("--warm", type=int, default=20, help="steps before the first round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if WAY in os.environ:
        ways = {way.name: way for way in all_ways(args)[0]}
        train(args, ways[os.environ[WAY]], int(os.environ[RANK]))
        os._exit(0)  # the group's threads wait for each other in an orderly end
    found = measure(args)
    print(report(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
