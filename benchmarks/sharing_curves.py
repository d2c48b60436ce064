"""Measure what the simulator wants to know of this machine: speed-up curves, and costs of changes.

    python benchmarks/sharing_curves.py --json benchmarks/sharing_curves.json

Each training runs alone on a real server and client, and goes from one trainer to the most and
back. Rows: digits (examples/digits, Paddle), digits-torch, and waiting (waiting_trainer.py, whose
samples cost time and no processor time). A step's time is the mean over `--seconds`; a start is
from the submission to the first step's end, an end from the last step to the job's success. A
change costs what it took longer than steps that nothing slows: its pause, and its preparation.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import ROOT, machine_used
from benchmarks.shared_cluster import SharedCluster
from benchmarks.waiting_trainer import BATCH as WAITING_BATCH
from job_server.api.wire import JobSpec, JobState, JobStatus, ScriptKind, ScriptSpec, StageRecord
from job_server.sharing.speedup import fit

ENDLESS = 100_000
SAMPLE_S = 0.004
LIMIT_S = 180.0
ROWS = ("waiting", "digits", "digits-torch")


def add(cluster: SharedCluster, job_id: str, row: str, *, ends: bool) -> int:
    """Make the folder of a training that ends soon, or never; return the samples of a step."""
    if row == "waiting":
        cluster.add_waiting(job_id, steps=40 if ends else ENDLESS, sample_s=SAMPLE_S)
        return WAITING_BATCH
    script = ROOT / "examples" / row.replace("-", "_") / "train.py"
    args = ["--epochs", "1" if ends else str(ENDLESS), "--batch_size", "64"]
    cluster.add_training(job_id, script, *args)
    return 64


def spec(job_id: str, trainers: int, most: int) -> JobSpec:
    return JobSpec(
        job_id=job_id, folder=job_id, pods=trainers, max_pods=most,
        script=ScriptSpec(kind=ScriptKind.NONE),
    )  # fmt: skip


def trains_on(trainers: int, step: int) -> Any:
    """Return whether a job has made a step of its stage with so many trainers, at `step` or on."""

    def done(status: JobStatus) -> bool:
        record = status.stages[-1] if status.stages else None
        return (
            status.state is JobState.RUNNING
            and record is not None
            and record.pods == trainers
            and record.first_step_at is not None
            and status.step >= step
        )

    return done


def step_s(cluster: SharedCluster, job_id: str, trainers: int, seconds: float) -> float:
    """Return the seconds of a step, over so many seconds at least."""
    begin = cluster.wait(job_id, trains_on(trainers, 0), LIMIT_S, f"{trainers} trainers")
    warm = cluster.wait(job_id, trains_on(trainers, begin.step + 5), LIMIT_S, "five steps")
    # The server hears of steps at heartbeats: a mark is taken as it hears of one.
    first = cluster.wait(job_id, trains_on(trainers, warm.step + 1), LIMIT_S, "a step")
    began = time.monotonic()
    time.sleep(seconds)
    seen = cluster.api.status(job_id).step
    last = cluster.wait(job_id, trains_on(trainers, seen + 1), LIMIT_S, "a step")
    return (time.monotonic() - began) / (last.step - first.step)


def lost_s(before: StageRecord, after: StageRecord, best: dict[int, float]) -> float | None:
    """Return what a change cost: how much longer all took than steps that nothing slows.

    From the first step of the stage before to the first step after; so it holds the pause, and what
    the preparation slows the steps before it. None: one of the stages trained no step.
    """
    if None in (before.first_step, before.first_step_at, after.first_step_at):
        return None
    assert before.first_step is not None
    assert before.first_step_at is not None
    assert after.first_step_at is not None
    steps = (before.last_step or 0) - before.first_step
    ordinary_s = steps * best[before.pods] + best[after.pods]
    return after.first_step_at - before.first_step_at - ordinary_s


def measure(row: str, most: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return the figures of one training."""
    times: dict[int, list[float]] = {}
    starts: list[float] = []
    trained: list[tuple[float, int]] = []  # from the first step to the end: seconds, steps
    with SharedCluster(most) as cluster:
        cluster.wait_for_slots()
        for turn in range(rounds):
            job_id = f"{row}-ends{turn}"
            add(cluster, job_id, row, ends=True)
            cluster.submit(spec(job_id, 1, most))
            over = cluster.wait(job_id, lambda s: s.state.ended, LIMIT_S, "its end")
            if over.state is not JobState.SUCCEEDED:
                raise SystemExit(f"{job_id}: {over.state}: {over.reason}")
            first = over.stages[0]
            assert first.first_step_at is not None
            starts.append(first.first_step_at - over.submitted_at)
            trained.append((time.time() - first.first_step_at, over.step - 1))
        samples = add(cluster, row, row, ends=False)
        cluster.submit(spec(row, 1, most))
        for turn in range(rounds):
            way = range(1, most + 1) if turn % 2 == 0 else range(most, 0, -1)
            for trainers in way:
                if cluster.api.status(row).target_pods != trainers:
                    cluster.api.resize(row, trainers)
                times.setdefault(trainers, []).append(step_s(cluster, row, trainers, seconds))
        status = cluster.api.status(row)
        best = {trainers: statistics.median(found) for trainers, found in sorted(times.items())}
        changes = [lost_s(*pair, best) for pair in itertools.pairwise(status.stages)]
        cluster.api.stop(row, discard=True)
    curve = fit(best)
    return {
        **({"sample_s": SAMPLE_S} if row == "waiting" else {}),
        "samples_per_s": {str(n): round(samples / took, 1) for n, took in best.items()},
        "speedup": {str(n): round(best[1] / took, 2) for n, took in best.items()},
        "fitted": [round(part / (curve.divided + curve.fixed), 4) for part in
                   (curve.divided, curve.fixed, curve.per_trainer)],
        "start_s": round(statistics.median(starts), 2),
        "end_s": round(statistics.median(took - steps * best[1] for took, steps in trained), 2),
        "change_s": round(statistics.median(each for each in changes if each is not None), 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of these, parted by commas")
    parser.add_argument("--most", type=int, default=6, help="trainers of waiting")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="most of the others")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of trainers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = args.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"--rows: no {unknown[0]!r}; there are {', '.join(ROWS)}")
    found: dict[str, Any] = {"cores": os.cpu_count(), "others_use": round(machine_used(), 2)}
    for row in rows:
        most = args.most if row == "waiting" else args.cores
        found[row] = measure(row, most, args.seconds, args.rounds)
        print(row, json.dumps(found[row]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
