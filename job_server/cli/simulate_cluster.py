"""`edl simulate --nodes ...`: many jobs on one cluster under several policies, in virtual time."""

import argparse
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

from job_server.api.errors import ConfigError
from job_server.api.text import duration, table
from job_server.sharing.resources import NodeRoom, Resources
from job_server.simulation.baselines import CONTENDERS
from job_server.simulation.simulator import USUAL_COSTS, Costs, simulate
from job_server.simulation.summary import Summary, plot, summarize
from job_server.simulation.workload import SimulatedJob, WorkloadError, read_trace, synthetic

_NODES = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,3})\Z")


def main(argv: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: a flag or a trace is wrong.
    """
    args = _parser().parse_args(argv)
    slots = sum(node.capacity.slots for node in args.nodes)
    names = list(dict.fromkeys(args.policy or CONTENDERS))
    try:
        jobs = _jobs(args, slots)
        costs = Costs(start_s=args.start_cost_s, change_s=args.change_cost_s)
        found = {}
        for name in names:
            contender = CONTENDERS[name]
            result = simulate(
                contender.policy,
                jobs,
                args.nodes,
                costs=costs,
                rigid=contender.rigid,
                seed=args.seed,
            )
            found[name] = (summarize(result), plot(result))
    except WorkloadError as error:
        raise ConfigError(str(error)) from None
    if args.json:
        print(json.dumps({name: asdict(summary) for name, (summary, _) in found.items()}, indent=2))
        return 0
    print(f"{len(jobs)} jobs on {len(args.nodes)} nodes with {slots} slots\n")
    print(_table({name: summary for name, (summary, _) in found.items()}))
    print("\nslots in use, from the first arrival to the last end")
    for name, (_, bars) in found.items():
        print(f"{name:>10} |{bars}|")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl simulate",
        description="Run many jobs on one cluster under several policies, in virtual time.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=_nodes, required=True, metavar="COUNTxSLOTS", help="such as 16x8")
    add(
        "--policy",
        action="append",
        choices=sorted(CONTENDERS),
        help="may be given several times; all, if not given. fifo and shortest are rigid",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="CSV, or Philly's JSON")
    what.add_argument("--synthetic", type=int, metavar="N", help="make up so many jobs")
    add("--load", type=_amount, default=0.9, help="of made-up jobs (0.9)")
    add("--sigma", type=_amount, default=1.5, help="of their lognormal durations (1.5)")
    add("--seed", type=int, default=0, help="of made-up jobs, and of the noise (0)")
    costs = USUAL_COSTS
    start_help = f"that a job loses by a start ({costs.start_s:g})"
    change_help = f"that a job loses by a change ({costs.change_s:g})"
    add("--start_cost_s", type=_amount, default=costs.start_s, metavar="S", help=start_help)
    add("--change_cost_s", type=_amount, default=costs.change_s, metavar="S", help=change_help)
    add("--json", action="store_true", help="print the figures as JSON")
    return parser


def _jobs(args: argparse.Namespace, slots: int) -> list[SimulatedJob]:
    if args.trace is not None:
        return read_trace(args.trace, slots=slots)
    if args.synthetic < 1:
        raise ConfigError(f"--synthetic: expected at least 1, got {args.synthetic}")
    return synthetic(args.synthetic, seed=args.seed, load=args.load, slots=slots, sigma=args.sigma)


def _amount(text: str) -> float:
    amount = float(text)
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return amount


def _nodes(text: str) -> list[NodeRoom]:
    match = _NODES.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected COUNTxSLOTS, such as 16x8, got {text!r}")
    count, slots = int(match[1]), int(match[2])
    return [
        NodeRoom(node_id=f"node{index}", capacity=Resources(slots=slots)) for index in range(count)
    ]


def _table(found: dict[str, Summary]) -> str:
    heads = ("policy", "mean", "p99", "waiting", "longest", "used", "p99 unfair", "changes/job")
    rows = [
        (
            name,
            duration(each.mean_completion_s),
            duration(each.p99_completion_s),
            duration(each.mean_waiting_s),
            duration(each.longest_waiting_s),
            f"{each.used:.0%}",
            f"{each.p99_unfairness:.1f}",
            f"{each.changes_per_job:.1f}",
        )
        for name, each in found.items()
    ]
    return table(heads, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
