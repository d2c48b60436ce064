"""How soon jobs end when they share a cluster, by policy: in virtual time, so no machine's noise.

Each row is the mean of several seeds, as a part of rigid FIFO with the same jobs: strictly in
order, each with the trainers that its user asked for. Loads, tails and seeds were chosen before any
policy was tried, and no parameter of a policy was tuned by them.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from job_server.sharing.resources import NodeRoom, Resources
from job_server.simulation.baselines import CONTENDERS
from job_server.simulation.simulator import simulate
from job_server.simulation.summary import Summary, summarize
from job_server.simulation.workload import synthetic

LOADS = (0.7, 0.9, 1.1)
SIGMAS = {1.5: "lognormal", 2.5: "heavy tail"}
SEEDS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="of each node")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nodes = [
        NodeRoom(node_id=f"node{index}", capacity=Resources(slots=args.slots))
        for index in range(args.nodes)
    ]
    rows = []
    print("durations   load  policy      mean  p99   waiting s  longest s  used  unfair  changes")
    for sigma, name in SIGMAS.items():
        for load in LOADS:
            found = run(args.jobs, nodes, load, sigma)
            for policy, summaries in found.items():
                row: dict[str, Any] = {"durations": name, "load": load, "policy": policy}
                row |= figures(summaries, found["fifo"])
                rows.append(row)
                print(text(row), flush=True)
    began = time.process_time()
    nodes = [NodeRoom(node_id=f"node{i}", capacity=Resources(slots=8)) for i in range(1000)]
    simulate(CONTENDERS["goodput"].policy, synthetic(10_000, seed=1, load=0.9, slots=8000), nodes)
    took = time.process_time() - began
    print(f"goodput, 10,000 jobs on 1,000 nodes of 8 slots: {took:.0f} s of processor time")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "large_cpu_s": took}, indent=2))


def run(count: int, nodes: list[NodeRoom], load: float, sigma: float) -> dict[str, list[Summary]]:
    """Return each policy's figures, by seed."""
    found: dict[str, list[Summary]] = {name: [] for name in CONTENDERS}
    slots = sum(node.capacity.slots for node in nodes)
    for seed in SEEDS:
        jobs = synthetic(count, seed=seed, load=load, slots=slots, sigma=sigma)
        for name, each in CONTENDERS.items():
            result = simulate(each.policy, jobs, nodes, rigid=each.rigid, seed=seed)
            found[name].append(summarize(result))
    return found


def figures(mine: list[Summary], rigid: list[Summary]) -> dict[str, float]:
    """Return ratios to rigid FIFO of the same seed, and means of the rest."""
    found = {
        name: mean(asdict(each)[name] for each in mine)
        for name in ("mean_waiting_s", "used", "p99_unfairness", "changes_per_job")
    }
    found["longest_waiting_s"] = max(each.longest_waiting_s for each in mine)
    for name in ("mean_completion_s", "p99_completion_s"):
        found[name] = mean(
            asdict(each)[name] / asdict(base)[name] for each, base in zip(mine, rigid, strict=True)
        )
    return found


def text(row: dict[str, Any]) -> str:
    return (
        f"{row['durations']:<10}  {row['load']:<4}  {row['policy']:<10}  "
        f"{row['mean_completion_s']:.2f}  {row['p99_completion_s']:.2f}  "
        f"{row['mean_waiting_s']:9.0f}  {row['longest_waiting_s']:9.0f}  {row['used']:4.0%}  "
        f"{row['p99_unfairness']:6.1f}  {row['changes_per_job']:7.1f}"
    )


if __name__ == "__main__":
    main()
