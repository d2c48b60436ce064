"""What snapshots in memory take of the training's time, with `snapshot_steps="auto"`.

    python benchmarks/snapshots.py --model resnet50 --batch 12 --trainers 2 --steps 60 --json FILE

One job under `edl run`. Two figures: what the loop itself has measured (the lines of kind `account`
in the run's ledger: all snapshots, the first one and the making of the segment included), and,
beside it, what the script sees between the end of an update and the next step, in which snapshots
are taken: the mean with one less the median without one.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]


def train(args: argparse.Namespace) -> None:
    """The training script; each trainer writes when its updates and steps ended."""
    import paddle
    import paddle.nn.functional as F  # noqa: N812

    from benchmarks.all_reduce import images
    from benchmarks.loop_overhead import lenet
    from pod_runtime import elastic

    if args.model == "small":
        network, shape = lenet(), (1, 28, 28)
    else:
        network, shape = paddle.vision.models.resnet50(num_classes=10), (3, 32, 32)
    optimizer = paddle.optimizer.Momentum(0.001, parameters=network.parameters())
    loop = elastic.Loop(
        network, optimizer, images(args.batch * args.steps, shape), batch_size=args.batch, epochs=1,
        checkpoint=str(args.train / "checkpoint") if args.save_steps else None,
        save_steps=args.save_steps or 1,
    )  # fmt: skip
    rows, updated_at = [], 0.0
    for epoch in loop.epochs():
        for step in epoch:
            began_at = time.monotonic()
            for pixels, labels in step:
                step.backward(F.cross_entropy(network(pixels), labels.flatten()))
            step.update()
            rows.append((began_at - updated_at if updated_at else 0.0, time.monotonic()))
            updated_at = rows[-1][1]
    (args.train / f"rows.{loop.rank}.json").write_text(json.dumps(rows))


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "pod_runtime.run", "--cpu_slots", str(args.trainers), "--fixed",
        "--max", str(args.trainers), "--log_dir", str(folder / "log"),
        __file__, "--train", str(folder), "--model", args.model, "--batch", str(args.batch),
        "--steps", str(args.steps), "--save_steps", str(args.save_steps),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout.decode()[-3000:] + done.stderr.decode()[-3000:])
    (ledger,) = folder.glob("log/**/ledger.jsonl")
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    account = next(line for line in reversed(lines) if line["kind"] == "account")
    rows = json.loads((folder / "rows.0.json").read_text())
    ends = [at for _gap, at in rows]
    gaps = [gap for gap, _at in rows[1:]]
    usual = statistics.median(gaps)
    taken = sorted(gaps)[-account["snapshots"] :]
    return {
        "model": args.model,
        "trainers": args.trainers,
        "batch": args.batch,
        "steps": args.steps,
        "save_steps": args.save_steps,
        "step_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "snapshots": account["snapshots"],
        "percent": 100 * account["stall_s"] / account["elapsed_s"],
        "seen_ms": 1e3 * (statistics.median(taken) - usual),
        "seen_percent": 100 * sum(gap - usual for gap in taken) / (ends[-1] - ends[0]),
        "checkpoints": len(list(folder.glob("checkpoint/**/manifest.json"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("small", "resnet50"), default="small")
    parser.add_argument("--batch", type=int, default=96, help="of all trainers together")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save_steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
    print(
        f"{found['model']}, {found['trainers']} trainers, {found['steps']} steps of "
        f"{found['step_ms']:.1f} ms, {found['checkpoints']} checkpoints: {found['snapshots']} "
        f"snapshots took {found['percent']:.2f} % of the time; the script saw "
        f"{found['seen_ms']:.2f} ms each, {found['seen_percent']:.2f} %"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
