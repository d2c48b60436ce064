"""Compare the loop's steps with a plain loop's, or with the framework's own data parallel training.

    python benchmarks/promises.py --framework torch --model resnet18 --trainers 2 --json FILE

All ways train the same network over the same data in the same processes, in alternating blocks: the
group that the loop forms serves DistributedDataParallel or paddle.DataParallel as well. Each
trainer has one core. `plain` computes a trainer's share of a batch in one piece; `plain, 3 shards`
takes as many pieces as the loop, and accumulates. A figure is the ratio of blocks of the same
round; the interval is a bootstrap over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
os.environ.setdefault("PYTHONWARNINGS", "ignore:No ccache found")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import HOST, block, free_port, interval

RANK = "PROMISES_RANK"
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


def measure(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Return the medians of each way, and its ratios to what it is compared with."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    kind = Torch if args.framework == "torch" else Paddle
    parts = kind(args.model, args.batch, args.trainers)
    ways = {"statistics": elastic_steps(parts, promise="statistics")}
    against = {"statistics": ["plain"]}
    for shards in args.shards:
        name = f"rounding, {shards} shards"
        ways[name] = elastic_steps(parts, shards=shards)
        against[name] = ["plain"]
        if args.trainers == 1 and args.batch % shards == 0:
            against[name].append(f"plain, {shards} shards")
    for way in list(ways.values()):  # they form the group, and have looked for what trains beside
        block(way, 4)
    ways |= {"plain": parts.plain(1)}
    for names in list(against.values()):
        for name in names[1:]:
            ways[name] = parts.plain(int(name.split()[1]))
    for way in ways.values():
        block(way, args.warm)
    rows: list[dict[str, tuple[float, float]]] = []
    for number in range(args.rounds):
        order = list(ways) if number % 2 else list(reversed(ways))
        rows.append({name: block(ways[name], args.steps) for name in order})
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
            for name in ways
        },
        # Steps' times; of images per second the inverse.
        "ratios": {
            f"{name} to {other}": {
                unit: interval([row[name][index] / row[other][index] for row in rows])
                for index, unit in enumerate(("wall", "cpu"))
            }
            for name, others in against.items()
            for other in others
        },
    }


def report(found: dict[str, Any]) -> str:
    """Return the figures as lines."""
    lines = ["{framework}, {model}, batch {batch}, {trainers} trainers".format(**found)]
    for name, way in found["ways"].items():
        lines.append(
            f"  {name:22} {way['ms']:8.2f} ms a step, {way['images_per_s']:8.1f} images/s, "
            f"processor {way['cpu_ms']:8.2f} ms"
        )
    for name, units in found["ratios"].items():
        texts = (
            f"{unit} {100 * (ratio - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
            for unit, (ratio, low, high) in units.items()
        )
        lines.append(f"  {name}: {', '.join(texts)}")
    return "\n".join(lines)


def launch(trainers: int) -> int:
    """Run this program once for each trainer; return its exit code."""
    ends = [f"{HOST}:{free_port()}" for _ in range(trainers)]
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                RANK: str(rank),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(trainers),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": ends[0].rpartition(":")[2],
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(trainers),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": ends[rank],
            },
        )
        for rank in range(trainers)
    ]
    return max(abs(process.wait()) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=("torch", "paddle"), required=True)
    parser.add_argument("--model", choices=sorted(SHAPES), default="lenet")
    parser.add_argument("--trainers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--batch", type=int, default=96, help="of all trainers")
    parser.add_argument("--shards", type=int, nargs="*", default=[3], help="of rounding")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20, help="of each way in a round")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rank = os.environ.get(RANK)
    if rank is None:
        sys.exit(launch(args.trainers))
    found = measure(args, int(rank))
    if int(rank) == 0:
        print(report(found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    os._exit(0)  # the group's threads wait for each other in an orderly end


if __name__ == "__main__":
    main()
