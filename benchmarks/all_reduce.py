"""Compare steps whose gradients are summed flat, or overlapped with the backward pass.

    python benchmarks/all_reduce.py --model resnet50 --pairs 12 --steps 6 --json FILE

Both ways train the same network in the same two processes, in alternating blocks, on one core each
(or as `--cores` says). A pair's figure is the ratio of the two blocks that follow each other; the
interval is a bootstrap over the pairs.
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

from benchmarks.harness import block, free_port, interval

RANK = "ALL_REDUCE_RANK"
WORLD = 2


def images(samples: int, shape: tuple[int, ...]) -> Any:
    import numpy as np
    import paddle

    state = np.random.RandomState(1)
    pixels = state.randn(samples, *shape).astype("float32")
    labels = state.randint(0, 10, samples).astype("int64")
    return paddle.io.TensorDataset([paddle.to_tensor(pixels), paddle.to_tensor(labels)])


def steps(model: str, all_reduce: str, batch: int, bucket_bytes: int) -> Iterator[None]:
    """An endless training; one item per step."""
    import paddle
    import paddle.nn.functional as F  # noqa: N812

    from benchmarks.loop_overhead import lenet
    from pod_runtime import elastic
    from pod_runtime.trainer.frameworks.paddle import overlap as paddle_overlap

    paddle_overlap.BUCKET_BYTES = bucket_bytes
    paddle.seed(1)
    if model == "small":
        network, shape = lenet(), (1, 28, 28)
    else:
        network, shape = paddle.vision.models.resnet50(num_classes=10), (3, 32, 32)
    optimizer = paddle.optimizer.Momentum(0.001, parameters=network.parameters())
    loop = elastic.Loop(
        network, optimizer, images(batch * 16, shape), batch_size=batch, shards=WORLD,
        epochs=1_000_000, all_reduce=all_reduce,
    )  # fmt: skip
    for epoch in loop.epochs():
        for step in epoch:
            for pixels, labels in step:
                step.backward(F.cross_entropy(network(pixels), labels.flatten()))
            step.update()
            yield


def train(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    if args.cores:
        os.sched_setaffinity(0, {args.cores[rank % len(args.cores)]})
    ways = {
        way: steps(args.model, way, args.batch, args.bucket_mb * (1 << 20))
        for way in ("flat", "overlapped")
    }
    for way in ways.values():
        block(way, args.warm)
    rows: list[dict[str, tuple[float, float]]] = []
    for number in range(args.pairs):
        order = list(ways) if number % 2 else list(reversed(ways))
        rows.append({way: block(ways[way], args.steps) for way in order})
    ratio, low, high = interval([row["overlapped"][0] / row["flat"][0] for row in rows])
    medians = {
        f"{way}_{unit}": 1e3 * statistics.median(row[way][index] for row in rows)
        for way in ways
        for index, unit in enumerate(("ms", "cpu_ms"))
    }
    return {
        "model": args.model,
        "batch": args.batch,
        "bucket_mb": args.bucket_mb,
        **medians,
        "percent": 100 * (ratio - 1),
        "low_percent": 100 * (low - 1),
        "high_percent": 100 * (high - 1),
    }


def launch() -> int:
    ends = [f"127.0.0.1:{port}" for port in (free_port(), free_port())]
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                RANK: str(rank),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]]),
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(WORLD),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": ends[rank],
            },
        )
        for rank in range(WORLD)
    ]
    return max(abs(process.wait()) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("small", "resnet50"), default="small")
    parser.add_argument("--batch", type=int, default=96, help="of both trainers")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="in each block of a pair")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--bucket_mb", type=int, default=8)
    parser.add_argument("--cores", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rank = os.environ.get(RANK)
    if rank is None:
        sys.exit(launch())
    found = train(args, int(rank))
    if int(rank) == 0:
        print(
            f"{found['model']}, batch {found['batch']}: flat {found['flat_ms']:.2f} ms, overlapped "
            f"{found['overlapped_ms']:.2f} ms a step, {found['percent']:+.1f} % "
            f"(95 %: {found['low_percent']:+.1f} to {found['high_percent']:+.1f}); processor time "
            f"of rank 0: {found['flat_cpu_ms']:.1f} and {found['overlapped_cpu_ms']:.1f} ms",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    os._exit(0)  # the group's threads wait for each other in an orderly end


if __name__ == "__main__":
    main()
