"""Compare the word2vec tutorial's error rate over the passes: one process, elastic, task queue.

    python benchmarks/word2vec.py --data TEXT --json word2vec.json

For each seed `word2vec/train_local.py`, and `word2vec/train.py` as a job of a real server: once
with its own data, where each n-gram counts once in a pass, and once by the task queue. Both jobs
are resized twice, and a trainer of theirs is killed twice (SIGKILL), at the same steps. Printed are
error rates and costs on the same tenth of the text, side by side, and the neighbours of some words.
The exit code says whether, in each pass, each form's mean error rate is within a point of local's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import ROOT
from benchmarks.shared_cluster import SharedCluster
from job_server.api.errors import Rejected
from job_server.api.wire import JobSpec, JobStatus

SCRIPTS = ROOT / "word2vec"
FORMS = ("local", "elastic", "queue")
PODS = 3
# part of the training that is over -> what is done to it then; a kill is of a rank
DONE = ((0.2, "resize", 1), (0.4, "kill", 0), (0.5, "resize", 3), (0.8, "kill", 1))
ALLOWED_POINTS = 1.0
_TESTED = re.compile(
    r"Pass \d+, Testing metrics \{'classification_error_evaluator': ([0-9.]+)\}, cost ([0-9.]+)"
)
_NEIGHBOURS = re.compile(r"\w+: \w+ [0-9.]+, ")
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    form: str
    seed: int
    errors: list[float]  # of each pass, 0 to 1
    costs: list[float]
    neighbours: list[str]
    wall_s: float
    said: str  # of what happened to it


def words(args: argparse.Namespace, seed: int, output: Path) -> list[str]:
    return [
        *data_words(args), "--passes", str(args.passes), "--batch_size", str(args.batch_size),
        "--lr", str(args.lr), "--seed", str(seed), "--output", str(output),
    ]  # fmt: skip


def data_words(args: argparse.Namespace) -> list[str]:
    plain = ["--plain"] if args.plain else []
    return ["--data", str(args.data), "--min_word_freq", str(args.min_word_freq), *plain]


def train_local(args: argparse.Namespace, seed: int, folder: Path) -> Curve:
    began = time.monotonic()
    command = [sys.executable, str(SCRIPTS / "train_local.py"), *words(args, seed, folder)]
    text = _output_of(command, folder)
    tested = _TESTED.findall(text)
    return Curve(
        form="local", seed=seed, errors=[float(rate) for rate, _ in tested],
        costs=[float(cost) for _, cost in tested], neighbours=neighbours(text),
        wall_s=time.monotonic() - began, said="one process",
    )  # fmt: skip


def train_job(args: argparse.Namespace, form: str, seed: int, folder: Path) -> Curve:
    """Train as a job that is resized and whose trainers are killed."""
    told = words(args, seed, folder)
    if form == "queue":
        shards = folder / "shards"
        convert = [sys.executable, str(SCRIPTS / "convert.py"), *data_words(args)]
        _output_of([*convert, "--shards", str(shards)], folder)
        told += ["--shards", *map(str, sorted(shards.glob("*.npy")))]
    began = time.monotonic()
    with SharedCluster(PODS) as cluster:
        job = cluster.jobs_dir / "words"
        job.mkdir()
        launch = f"{sys.executable} -m pod_runtime.launch --log_dir {folder}/log"
        (job / "train.sh").write_text(f'exec {launch} {SCRIPTS / "train.py"} "$@"\n')
        cluster.wait_for_slots()
        cluster.submit(
            JobSpec(
                job_id="words", folder="words", max_pods=PODS, pods=2, spares=1, args=tuple(told)
            )
        )
        tested, status = follow(cluster, args.passes)
        kills = sum(what == "kill" for _, what, _ in DONE)
        said = f"{status.resizes} resizes, {kills} trainers killed, {len(status.stages)} stages"
        said += f", {status.redone_steps} steps redone"
        for queue in cluster.api.queues():
            again = sum(each.records_again for each in queue.passes)
            said += f", {again} n-grams read again"
    if form == "elastic":  # by the queue, records come at least once
        verify = [sys.executable, "-m", "pod_runtime.verify", str(folder / "checkpoint")]
        said += f"; {_output_of(verify, folder).splitlines()[-1]}"
    logs = sorted(folder.glob("log/**/*.log"), key=lambda log: log.stat().st_mtime)
    text = "\n".join(log.read_text() for log in logs)
    return Curve(
        form=form, seed=seed, errors=[rate for rate, _ in tested],
        costs=[cost for _, cost in tested], neighbours=neighbours(text),
        wall_s=time.monotonic() - began, said=said,
    )  # fmt: skip


def follow(cluster: SharedCluster, passes: int) -> tuple[list[tuple[float, float]], JobStatus]:
    """Do what is to be done to the job; return its error rates and costs, and its last status."""
    found: dict[int, tuple[float, float]] = {}
    waiting = list(DONE)
    while True:
        status = cluster.api.status("words")
        over = status.metric_epochs.get("test_error")
        if over is not None:
            found[over] = status.metrics["test_error"], status.metrics["test_cost"]
        if status.state.ended:
            break
        if waiting and status.total_steps and status.step >= waiting[0][0] * status.total_steps:
            _, what, number = waiting[0]
            try:
                if what == "resize":
                    cluster.api.resize("words", number)
                else:
                    cluster.api.kill("words", rank=number)
                waiting.pop(0)
            except Rejected:  # such as a kill amid a change: it is tried again
                pass
        time.sleep(_LOOK_S)
    tested = [found[number] for number in sorted(found)]
    if len(tested) != passes or waiting:
        raise SystemExit(
            f"the job is {status.state.value} ({status.reason}) with {len(tested)} of {passes} "
            f"passes tested; not done to it: {waiting}\n{cluster.log('job_client')}"
        )
    return tested, status


def neighbours(text: str) -> list[str]:
    return [line for line in text.splitlines() if _NEIGHBOURS.match(line)]


def _output_of(command: Sequence[str], folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def differences(curves: Sequence[Curve], form: str) -> list[float]:
    """Return by how many points the form's mean error rate exceeds the local one, in each pass."""
    means = {
        each: [
            fmean(rates)
            for rates in zip(*(c.errors for c in curves if c.form == each), strict=True)
        ]
        for each in ("local", form)
    }
    return [100 * (own - local) for own, local in zip(means[form], means["local"], strict=True)]


def show(curves: Sequence[Curve], passes: int) -> bool:
    """Print the curves and the neighbours; return whether all are within what is allowed."""
    print("on the tested tenth: error rate in %, and cost")
    print("pass  " + "".join(f"{f'{each.form} {each.seed}':>18}" for each in curves))
    for number in range(passes):
        print(
            f"{number:>4}  "
            + "".join(f"{100 * c.errors[number]:10.2f}{c.costs[number]:8.4f}" for c in curves)
        )
    for each in curves:
        print(f"{each.form} {each.seed}: {each.wall_s:.0f} s; {each.said}")
        print("".join(f"    {line}\n" for line in each.neighbours), end="")
    worst = {form: max(differences(curves, form), key=abs) for form in FORMS[1:]}
    for form, points in worst.items():
        print(f"{form}: at most {points:+.2f} points from local in any pass (means of the seeds)")
    return all(abs(points) <= ALLOWED_POINTS for points in worst.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="a text, a sentence in each line")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--min_word_freq", type=int, default=50)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("edl_run/word2vec"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.data = args.data.absolute()
    out = args.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    curves = []
    for seed in args.seeds:
        for form in FORMS:
            folder = out / f"{form}{seed}"
            if form == "local":
                curves.append(train_local(args, seed, folder))
            else:
                curves.append(train_job(args, form, seed, folder))
            print(curves[-1], flush=True)
    holds = show(curves, args.passes)
    if args.json is not None:
        found = {"curves": [asdict(each) for each in curves], "holds": holds}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
