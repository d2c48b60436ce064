"""Compare how soon jobs that share one machine end with what the simulator said they would.

    python benchmarks/sharing_prediction.py --minutes 15 --json sharing_prediction.json

Ten small jobs (waiting_trainer.py: real trainers, groups, changes and checkpoints, whose samples
cost time but hardly any processor time, so jobs do not fight for the cores) are submitted to a real
job server at times that a seed has drawn, and share the slots of one client. The simulator gets the
same jobs, times and policy, and the machine's own figures, measured before (sharing_curves.json).
The aim is a mean completion time (from submission to end) within 15 %. The exit code is 0 whether
it is reached or missed, and 1 if a job does not succeed.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.shared_cluster import SharedCluster
from benchmarks.waiting_trainer import BATCH
from job_server.api.wire import JobSpec, JobState, JobStatus, ScriptKind, ScriptSpec
from job_server.sharing.policies import POLICIES
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import fit
from job_server.simulation.simulator import Costs, simulate
from job_server.simulation.workload import SimulatedJob

AIM = 0.15
MIN_TRAINERS, MAX_TRAINERS = (1, 1, 1, 2), (4, 4, 6, 6)  # drawn from these
SIGMA = 0.7  # of the logarithm of a job's work
SOON_S = 1.0  # the server decides at once as jobs come and go
AGAIN_S = 5.0  # ... and otherwise so often
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A job as the seed has drawn it."""

    job_id: str
    submitted_s: float
    steps: int
    min_trainers: int
    max_trainers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What sharing_curves.py has measured."""

    step_s: dict[int, float]  # trainers -> seconds
    costs: Costs
    sample_s: float


def read_machine(path: Path) -> Machine:
    """Return the figures of the row `waiting`; raises SystemExit: they are not there."""
    try:
        row = json.loads(path.read_text())["waiting"]
        rates = {int(count): float(rate) for count, rate in row["samples_per_s"].items()}
        costs = Costs(
            start_s=row["start_s"], change_s=max(0.0, row["change_s"]), end_s=row["end_s"]
        )
        return Machine(
            step_s={count: BATCH / rate for count, rate in rates.items()},
            costs=costs,
            sample_s=float(row["sample_s"]),
        )
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise SystemExit(
            f"{path}: {error!r}; `python benchmarks/sharing_curves.py --json {path}` measures it"
        ) from None


def draw(
    count: int, minutes: float, load: float, slots: int, seed: int, step_s: float
) -> list[Drawn]:
    """Draw jobs that come in the first two thirds of the time and ask for `load` of the slots.

    Args:
        step_s: of one trainer.
    """
    rng = random.Random(seed)
    come_s = 60.0 * minutes * 2 / 3
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    sizes = [rng.lognormvariate(0.0, SIGMA) for _ in range(count)]
    work_s = load * slots * come_s
    jobs, at = [], -gaps[0]
    for number, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
        at += gap
        kind = rng.randrange(len(MIN_TRAINERS))
        jobs.append(
            Drawn(
                job_id=f"job{number}",
                submitted_s=at * come_s / sum(gaps),
                steps=max(20, round(work_s * size / sum(sizes) / step_s)),
                min_trainers=MIN_TRAINERS[kind],
                max_trainers=min(MAX_TRAINERS[kind], slots),
            )
        )
    return jobs


def predict(policy: str, jobs: Sequence[Drawn], machine: Machine, slots: int) -> dict[str, float]:
    """Return each job's completion time in seconds, as the simulator has it."""
    curve = fit(machine.step_s)
    simulated = [
        SimulatedJob(
            job_id=job.job_id,
            submitted_s=job.submitted_s,
            trainers=1,
            duration_s=job.steps * machine.step_s[1],
            min_trainers=job.min_trainers,
            max_trainers=job.max_trainers,
            step_time=curve,
        )
        for job in jobs
    ]
    nodes = [NodeRoom(node_id="here", capacity=Resources(slots=slots))]
    result = simulate(
        POLICIES[policy], simulated, nodes, costs=machine.costs, round_s=SOON_S, look_s=AGAIN_S
    )
    return {outcome.job.job_id: outcome.completion_s for outcome in result.outcomes}


def train(
    policy: str, jobs: Sequence[Drawn], machine: Machine, slots: int, limit_s: float
) -> tuple[dict[str, float], dict[str, JobStatus]]:
    """Run the jobs; return each one's completion time and its last status.

    Raises:
        SystemExit: one did not succeed, or they took too long.
    """
    took: dict[str, float] = {}
    over: dict[str, JobStatus] = {}
    with SharedCluster(slots, ["--sharing", policy]) as cluster:
        for job in jobs:
            cluster.add_waiting(job.job_id, steps=job.steps, sample_s=machine.sample_s)
        cluster.wait_for_slots()
        began = time.time()
        waiting = list(jobs)
        while len(over) < len(jobs):
            now = time.time() - began
            while waiting and waiting[0].submitted_s <= now:
                cluster.submit(spec(waiting.pop(0)))
            for status in cluster.api.jobs():
                if status.state.ended and status.job_id not in over:
                    over[status.job_id] = status
                    took[status.job_id] = time.time() - status.submitted_at
                    print(f"{now:6.0f} s: {status.job_id} {status.state.value}", flush=True)
                    if status.state is not JobState.SUCCEEDED:
                        raise SystemExit(f"{status.job_id}: {status.reason}")
            if now > limit_s:
                raise SystemExit(f"{len(over)} of {len(jobs)} jobs have ended in {limit_s:.0f} s")
            time.sleep(_LOOK_S)
    return took, over


def spec(job: Drawn) -> JobSpec:
    return JobSpec(
        job_id=job.job_id,
        folder=job.job_id,
        share=True,
        min_pods=job.min_trainers,
        max_pods=job.max_trainers,
        script=ScriptSpec(kind=ScriptKind.NONE),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=15.0, help="about, in all")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--load", type=float, default=0.8, help="asked for while jobs come")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="goodput")
    parser.add_argument("--seed", type=int, default=1)
    curves = Path(__file__).with_name("sharing_curves.json")
    parser.add_argument("--curves", type=Path, default=curves, help="of sharing_curves.py")
    parser.add_argument("--only_predict", action="store_true", help="say it, and train nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = read_machine(args.curves)
    jobs = draw(args.jobs, args.minutes, args.load, args.slots, args.seed, machine.step_s[1])
    predicted = predict(args.policy, jobs, machine, args.slots)
    if args.only_predict:
        for job in jobs:
            print(job, f"{predicted[job.job_id]:.0f} s")
        print(f"mean {mean(predicted.values()):.1f} s")
        return 0
    took, over = train(args.policy, jobs, machine, args.slots, 180.0 * args.minutes)
    rows: list[dict[str, Any]] = [
        {
            "job": job.job_id,
            "submitted_s": job.submitted_s,
            "steps": job.steps,
            "predicted_s": predicted[job.job_id],
            "took_s": took[job.job_id],
            "waited_s": over[job.job_id].account.waiting_s,
            "changes": max(0, over[job.job_id].stage - 1),
            "redone_steps": over[job.job_id].redone_steps,
        }
        for job in jobs
    ]
    said, was = mean(predicted.values()), mean(took.values())
    for row in rows:
        print("  ".join(f"{v:8.1f}" if isinstance(v, float) else f"{v!s:>6}" for v in row.values()))
    print(
        f"mean completion: {was:.1f} s, predicted {said:.1f} s: off by {said / was - 1:+.1%} "
        f"(aim: within {AIM:.0%})"
    )
    if args.json:
        found = {"policy": args.policy, "slots": args.slots, "seed": args.seed, "jobs": rows}
        found |= {"mean_s": was, "predicted_mean_s": said, "off": said / was - 1}
        found |= {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
