"""Measure whether decoding images slows the training of resnet50/.

    python benchmarks/images.py decode --data DIR --json FILE
    python benchmarks/images.py train --data DIR --json FILE

`decode` measures what an image costs on one core, stage by stage, beside what PIL's decoding alone
costs (the limit of anything that reads whole images) and beside `paddle.vision.transforms`.
`train` runs resnet50/train_with_fleet.py elastically, with pods that come and go, and prints for
each stage the images per second, and the share of the time that its trainers waited for data.
"""

import argparse
import importlib
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")

ROOT = Path(__file__).resolve().parents[1]

# --- decode


def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return a row per kind of file, size and stage."""
    sys.path.insert(0, str(ROOT / "resnet50"))
    listing, _val = importlib.import_module("images").find_images(str(args.data))
    every = max(1, len(listing) // args.images)
    paths = [Path(os.fsdecode(listing.path(index))) for index in range(0, len(listing), every)]
    small = [path.read_bytes() for path in paths[: args.images]]
    rows = []
    for kind, files in (("as they are", small), ("four in one", mosaics(small))):
        for pixels in args.pixels:
            rows += decode_rows(kind, files, pixels, args.rounds)
    return rows


def mosaics(files: Sequence[bytes]) -> list[bytes]:
    """Return images of 500x375, ImageNet's usual size, with four of `files` in each."""
    from PIL import Image

    made = []
    for first in range(0, len(files) - 3, 4):
        whole = Image.new("RGB", (500, 376))
        for place, file in enumerate(files[first : first + 4]):
            part = Image.open(io.BytesIO(file)).convert("RGB").resize((250, 188))
            whole.paste(part, (250 * (place % 2), 188 * (place // 2)))
        out = io.BytesIO()
        whole.save(out, "JPEG", quality=92)
        made.append(out.getvalue())
    return made


def decode_rows(
    kind: str, files: Sequence[bytes], pixels: int, rounds: int
) -> list[dict[str, Any]]:
    stages = make_stages(pixels)
    spent: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, stage in stages.items():
            random.seed(number)  # the same crops for all
            begun = time.process_time()
            for file in files:
                stage(file)
            if number:  # the first round only warms up
                spent[name].append((time.process_time() - begun) / len(files))
    kilobytes = statistics.mean(map(len, files)) / 1024
    print(f"\n{len(files)} JPEGs {kind}, {kilobytes:.0f} KiB each, to {pixels} pixels")
    print(f"  {'':44} {'ms/image':>9} {'images/s':>9} {'of PIL alone':>13}")
    rows = []
    alone = statistics.median(spent["PIL: decode all of it, no more"])
    for name, seconds in spent.items():
        each = statistics.median(seconds)
        print(f"  {name:44} {1e3 * each:9.2f} {1 / each:9.0f} {each / alone:12.0%}")
        rows.append(
            {"files": kind, "pixels": pixels, "stage": name, "ms": 1e3 * each, "per_s": 1 / each}
        )
    return rows


def make_stages(pixels: int) -> dict[str, Callable[[bytes], Any]]:
    """Return what is measured: each takes the bytes of a file."""
    import numpy as np
    import paddle.vision.transforms as T  # noqa: N812
    from PIL import Image

    transforms = importlib.import_module("transforms")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    recipe = transforms.Recipe(
        size=(pixels, pixels),
        resize_short=pixels * 8 // 7,
        area=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        resample=Image.Resampling.BILINEAR,
        mean=mean,
        std=std,
        channels_last=False,
    )
    paddles = T.Compose(
        [
            T.RandomResizedCrop(pixels),
            T.RandomHorizontalFlip(),
            T.Transpose(),
            T.Normalize([255 * each for each in mean], [255 * each for each in std]),
        ]
    )

    def choose(size: tuple[int, int]) -> Any:
        return transforms.random_crop_box(size, recipe.area, recipe.ratio)

    def whole(file: bytes) -> None:
        Image.open(io.BytesIO(file)).load()

    def scaled(file: bytes) -> None:
        image = Image.open(io.BytesIO(file))
        factor = transforms.reduction(choose(image.size), recipe.size)
        image.draft(image.mode, (image.width // factor, image.height // factor))
        image.load()

    def cropped(file: bytes) -> None:
        transforms.load_crop(file, choose, recipe.size, recipe.resample)

    def by_paddle(file: bytes) -> None:
        np.asarray(paddles(Image.open(io.BytesIO(file)).convert("RGB")), np.float32)

    return {
        "PIL: decode all of it, no more": whole,
        "header, crop, decode as far as needed": scaled,
        "  + crop, resize, RGB": cropped,
        "  + mirror, normalise: a training sample": recipe.augment,
        "an evaluation sample": recipe.evaluate,
        "paddle.vision.transforms: a training sample": by_paddle,
    }


# --- train


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run the training; print and return a row per stage."""
    out = args.out or Path(tempfile.mkdtemp(prefix="edl_images_"))
    (out / "measured").mkdir(parents=True)
    command = train_command(args, out)
    env = {**os.environ, "EDL_BENCHMARK_OUT": str(out / "measured"), "PYTHONPATH": str(ROOT)}
    env["PYTHONWARNINGS"] = "ignore:No ccache found"
    print(f"{' '.join(command)}\nfolder: {out}", flush=True)
    begun = time.monotonic()
    with (out / "edl_run.log").open("w") as log:
        run = subprocess.Popen(command, env=env, cwd=out, stdout=log, stderr=subprocess.STDOUT)
    try:
        status = follow(run, out / "edl_run.log")
    finally:
        run.terminate()  # asks it to stop the job; nothing if it has ended
        code = run.wait()
    if code:
        tail = (out / "edl_run.log").read_text().splitlines()[-15:]
        raise SystemExit("\n".join([*tail, f"edl run ended with {code}"]))
    rows = stage_rows(out / "measured", status, args.batch)
    decoding = decoding_cost(out / "measured")
    show_train(rows, decoding)
    verify = [sys.executable, "-m", "pod_runtime.verify", str(out / "checkpoint")]
    verified = subprocess.run(verify, env=env, capture_output=True, text=True, check=False)
    print("\n" + (verified.stdout + verified.stderr).strip())
    return {
        "command": command[2:],
        "seconds": time.monotonic() - begun,
        "load_average": os.getloadavg(),
        "stages": rows,
        "decoding": decoding,
        "verified": verified.returncode == 0,
    }


def train_command(args: argparse.Namespace, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "pod_runtime.run",
        "--min", "1", "--max", str(args.trainers), "--pods", str(args.trainers),
        "--log_dir", str(out / "run"),
        "--change_script", "alternate", "--interval_s", f"{args.change_every_s:g}",
        str(Path(__file__).with_name("images_trainer.py")),
        "--data_dir", str(args.data.absolute()), "--class_dim", str(args.class_dim),
        "--image_shape", f"3,{args.pixels[0]},{args.pixels[0]}",
        "--total_batch_size", str(args.batch), "--num_epochs", str(args.epochs),
        "--num_threads", str(args.num_threads), "--lr", "0.02", "--lr_strategy", "cosine_decay",
        "--do_test", "False", "--checkpoint", str(out / "checkpoint"),
        "--model_save_dir", str(out / "output"),
    ]  # fmt: skip


def follow(run: subprocess.Popen[bytes], log: Path) -> Any:
    """Return the job's last status, as its server told it; None if it never did."""
    from job_server.api.api_client import ApiClient
    from job_server.api.errors import JobServerError

    status, seen = None, 0
    while run.poll() is None:
        time.sleep(0.5)
        address = re.search(r"watch it at (http://\S+?)/?\n", log.read_text())
        if address is None:
            continue
        try:
            token = (log.parent / "run" / "latest" / "token").read_text().strip()
            with ApiClient(address[1], token) as api:
                status = api.status("run")
        except JobServerError:
            continue  # it has gone, or is not there yet
        if len(status.stages) != seen:
            seen = len(status.stages)
            print(f"stage {status.stage}: {status.stages[-1].reason}", flush=True)
    return status


def stage_rows(folder: Path, status: Any, batch: int) -> list[dict[str, Any]]:
    """Return a row per stage: what its trainers measured, and the pause that the server saw."""
    pauses = {each.stage: each.pause_s for each in status.stages} if status else {}
    stages: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("steps.*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            stages.setdefault(row["stage"], []).append(row)
    rows = []
    for stage, steps in sorted(stages.items()):
        first = {row["rank"]: row for row in reversed(steps)}
        last = {row["rank"]: row for row in steps}
        # From the end of each rank's first step on: what comes before is the change's pause.
        later = [row for row in steps if row is not first[row["rank"]]]
        seconds = {rank: last[rank]["at"] - first[rank]["at"] for rank in first}
        count = max(row["step"] for row in steps) - min(row["step"] for row in steps)
        trained = max(seconds.values())
        cpu_s = sum(last[rank]["cpu_s"] - first[rank]["cpu_s"] for rank in first)
        rows.append(
            {
                "stage": stage,
                "trainers": len(first),
                "first_step": min(row["step"] for row in steps),
                "last_step": max(row["step"] for row in steps),
                "images_per_s": batch * count / trained if count else None,
                "waiting": sum(row["waited_s"] for row in later) / max(sum(seconds.values()), 1e-9),
                "first_wait_s": max(row["waited_s"] for row in first.values()),
                "trainer_cpu_ms_per_image": 1e3 * cpu_s / (batch * count) if count else None,
                "pause_s": pauses.get(stage),
            }
        )
    return rows


def decoding_cost(folder: Path) -> dict[str, float]:
    rows = [json.loads(path.read_text()) for path in folder.glob("decoded.*.json")]
    images = sum(row["images"] for row in rows)
    return {"images": images, "cpu_ms": 1e3 * sum(row["cpu_s"] for row in rows) / max(images, 1)}


def show_train(rows: Sequence[dict[str, Any]], decoding: dict[str, float]) -> None:
    head = ("stage", "trainers", "steps", "images/s", "waiting", "first wait", "step", "pause")
    print("\n{:>6}{:>9}{:>13}{:>10}{:>9}{:>12}{:>16}{:>9}".format(*head))
    for row in rows:
        steps = f"{row['first_step']} to {row['last_step']}"
        one = row["images_per_s"] is None  # step: no time between two commits was measured
        speed = "-" if one else f"{row['images_per_s']:.1f}"
        waiting = "-" if one else f"{row['waiting']:.2%}"
        cpu = "-" if one else f"{row['trainer_cpu_ms_per_image']:.0f}"
        pause = "-" if row["pause_s"] is None else f"{row['pause_s']:.2f} s"
        print(
            f"{row['stage']:>6}{row['trainers']:>9}{steps:>13}{speed:>10}"
            f"{waiting:>9}{row['first_wait_s']:>10.2f} s{cpu:>9} ms/img{pause:>9}"
        )
    print(
        "waiting: share of the trainers' time, after the first step of a stage; first wait: of the "
        f"first step,\nwhile its workers start; step: processor time of the trainers.\n"
        f"Decoding: {decoding['images']:.0f} images read, {decoding['cpu_ms']:.2f} ms of processor "
        f"time each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["decode", "train"])
    parser.add_argument("--data", type=Path, required=True, help="as --data_dir of the example")
    parser.add_argument("--pixels", type=int, nargs="+", help="decode: 64 160 224; train: 64")
    parser.add_argument("--images", type=int, default=200, help="decode: so many files")
    parser.add_argument("--rounds", type=int, default=5, help="decode: median of so many")
    parser.add_argument("--class_dim", type=int, default=10, help="train: classes")
    parser.add_argument("--trainers", type=int, default=2, help="train: at most")
    parser.add_argument("--batch", type=int, default=16, help="train: global batch")
    parser.add_argument("--epochs", type=int, default=3, help="train: passes over the images")
    parser.add_argument("--num_threads", type=int, default=1, help="train: workers of a trainer")
    parser.add_argument(
        "--change_every_s", type=float, default=60.0, help="train: a pod more, less"
    )
    parser.add_argument("--out", type=Path, help="train: folder for all files (a temporary one)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.pixels is None:
        args.pixels = [64, 160, 224] if args.part == "decode" else [64]
    result = decode(args) if args.part == "decode" else train(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
