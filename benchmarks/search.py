"""Compare searches whose trials share a machine elastically with fixed equal shares and a queue.

    python benchmarks/search.py --json search.json                          # 40 trials, three seeds
    python benchmarks/search.py --trials 12 --seeds 1 --sample_s 0.02       # a smaller form

A real job server and client, real trainers (search_trainer.py: samples cost time, hardly any
processor time). All modes have the same pruner, as many trials at a time, and, as the sampler is
random and seeded, the same trials:

    elastic   1 trainer to all slots, promising trials may have more
    even      the same, with `weigh: false`: the job server alone chooses
    fixed     each trial has an equal share of the slots; the next one waits for the end of one

Said are the wall clock of the study, and when the trial that is its best was complete.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.shared_cluster import SharedCluster
from search.run import Progress, Search
from search.store import StudyStore
from search.study_file import FloatRange, PrunerSpec, SamplerSpec, StudySpec
from search.text import best_trial

TRAINER = Path(__file__).with_name("search_trainer.py")
MODES = ("elastic", "even", "fixed")


def study(mode: str, seed: int, args: argparse.Namespace) -> StudySpec:
    spec = StudySpec(
        name=f"{mode}-{seed}", folder="trial", metric="accuracy", maximize=True,
        parameters={
            "quality": FloatRange(low=0.5, high=1.0),
            "rate": FloatRange(low=0.1, high=1.0, log=True),
        },
        trials=args.trials, parallel=args.parallel, epochs=args.epochs, seed=seed,
        max_pods=args.slots, weigh=mode == "elastic", sampler=SamplerSpec(kind=args.sampler),
        pruner=PrunerSpec(kind="median", startup_trials=4, min_epochs=2),
    )  # fmt: skip
    if mode == "fixed":
        share = args.slots // args.parallel
        return replace(spec, min_pods=share, max_pods=share)
    return spec


def run(mode: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a study from its beginning to its end; return its figures."""
    spec, complete_s = study(mode, seed, args), dict[int, float]()
    with SharedCluster(args.slots) as cluster:
        folder = cluster.jobs_dir / "trial"
        folder.mkdir()
        words = [sys.executable, "-m", "pod_runtime.launch", "--log_dir", "log", str(TRAINER)]
        words += ["--sample_s", str(args.sample_s), "--checkpoint"]
        path = f'"{cluster.folder}/checkpoints/$PADDLE_JOB_ID"'
        (folder / "train.sh").write_text(f'exec {shlex.join(words)} {path} "$@"\n')
        cluster.wait_for_slots()
        began = time.monotonic()

        def note(progress: Progress) -> None:
            for trial in progress.trials:
                if trial.value is not None:
                    complete_s.setdefault(trial.number, time.monotonic() - began)

        with StudyStore(cluster.folder / "study", spec) as store:
            Search(spec, store, cluster.api).run(
                note, lambda line: print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)
            )
            wall_s, trials = time.monotonic() - began, store.trials()
        best = best_trial(spec, trials)
        jobs = cluster.api.jobs()
    if best is None or best.value is None or len(jobs) != spec.trials:
        raise SystemExit(f"{spec.name}: {len(jobs)} jobs, best trial {best}\n")
    return {
        "mode": mode,
        "seed": seed,
        "wall_s": wall_s,
        "best_s": complete_s[best.number],
        "best": best.value,
        "trial": best.number,
        "ends": Counter(trial.state.value for trial in trials),
        "stages": sum(len(job.stages) for job in jobs),
        "redone_steps": sum(job.redone_steps for job in jobs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--sample_s", type=float, default=0.06, help="times 192 is an epoch")
    parser.add_argument("--sampler", choices=("random", "tpe"), default="random")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.slots % args.parallel:
        parser.error(f"--slots: {args.slots} are no equal shares for {args.parallel} trials")
    rows = []
    for seed in args.seeds:
        for mode in args.modes:
            rows.append(run(mode, seed, args))
            print(json.dumps(rows[-1]), flush=True)
    for mode in args.modes:
        own = [row for row in rows if row["mode"] == mode]
        wall_s, best_s = (mean(row[key] for row in own) for key in ("wall_s", "best_s"))
        print(f"{mode:8} wall clock {wall_s:7.1f} s, best trial after {best_s:7.1f} s (means)")
    if args.json:
        found: dict[str, Any] = {
            "options": {key: str(value) for key, value in vars(args).items()},
            "runs": rows,
        }
        found |= {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
