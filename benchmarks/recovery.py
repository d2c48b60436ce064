"""Measure what a crash costs with EDL, torchrun and Paddle's own launcher, in one run.

    python benchmarks/recovery.py --json FILE [--only ROW[,ROW]] [--rounds 5] [--resume]
        [--torch_python PATH] [--paddle_python PATH]

Rows, all with a small CNN on 2 trainers unless they say otherwise:

    kill-...     kill -9 of a trainer, until the slowest rank has made its first step again:
                 kill-newest (hot standby, a snapshot after every step), kill-standby (hot standby,
                 the loop's own snapshots), kill-spares, kill-cold, the same -resnet50,
                 kill-torchrun-default, -tuned, -tuned-own-store, kill-paddle-default, -tuned
    node-...     all processes of one of two nodes, killed at once: node-standby, -standby2,
                 -spares, -cold, and the peers
    after-...    kill -9 of a trainer 0.5, 2 and 5 s after a change from 1 to 2 trainers
                 (-replace, -drain, -join), of the other one a step after the recovery from that,
                 and of one 0.5 s after a change was asked for; with spares alone
    shim         kill -9 of a pod's shim, in quiet and 2 s after a change; until training goes on
                 ("first step"), and until it is as many trainers as before ("regained")
    server       the job server is killed and comes back after --server_away_s 30
    bad-node     a third trainer is wanted, on a node whose script fails
    stall, stall-resnet50   the share of its time that a training stands still for snapshots

-torch: with PyTorch under EDL. A word that is no row stands for all rows that begin so. Every
trainer writes down when its steps end; all figures but the phases follow from that. The exit code
is 0 whether aims are reached or missed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.elasticity import ours
from benchmarks.elasticity.command import Bench, check, finish, make_parser, measure_all, runnable
from benchmarks.elasticity.jobs import Job
from benchmarks.elasticity.ours import EdlJob, NodeSpec, Options, crash_phases
from benchmarks.elasticity.peer_setup import peers, probe, why_not
from benchmarks.elasticity.report import (
    Aim,
    Record,
    at_most,
    count_at_most,
    spread,
    table,
)
from benchmarks.elasticity.stamps import Generation, change, longest_gap, stall_share, steps_redone

TWO_NODES = (NodeSpec(slots=1), NodeSpec(slots=1))
KILLS = {
    "kill-newest": Options(standby=1, snapshot_steps="1"),
    "kill-standby": Options(standby=1),
    "kill-spares": Options(spares=1),
    "kill-cold": Options(),
    "kill-newest-resnet50": Options(standby=1, snapshot_steps="1"),
    "kill-standby-resnet50": Options(standby=1),
    "kill-spares-resnet50": Options(spares=1),
    "kill-cold-resnet50": Options(),
    "kill-spares-torch": Options(spares=1, framework="torch"),
}
NODES = {
    "node-standby": Options(standby=1, nodes=TWO_NODES),
    "node-standby2": Options(standby=2, nodes=TWO_NODES),
    "node-spares": Options(spares=1, nodes=TWO_NODES),
    "node-cold": Options(nodes=TWO_NODES),
}
AFTER = {
    f"after-{way}{suffix}": Options(spares=1, overlap=overlap, framework=framework)
    for suffix, framework in (("", "paddle"), ("-torch", "torch"))
    for way, overlap in (("replace", "on"), ("drain", "off"), ("join", "join"))
    if (framework, way) != ("torch", "join")
}
SHIMS = {
    "shim": Options(spares=1),
    "shim-torch": Options(spares=1, framework="torch"),
}
DELAYS_S = (0.5, 2.0, 5.0)
BAD_NODE = Options(nodes=(NodeSpec(slots=2), NodeSpec(slots=1, script_fails=True)))
STALLS = ("stall", "stall-resnet50")
ENDLESS = 100_000  # steps
WARM_STEPS = 20
_PHASES = ("notice", "stop", "start", "first step")
_AFTER_S = 10.0  # what is looked at after the server's return
_ABOUT_S = {"after-": 90, "shim": 60,
            "node-": 30, "server": 60, "bad-node": 30, "stall": 40, "kill-paddle": 70,
            "kill-torchrun": 45, "node-paddle": 90, "node-torchrun": 70, "kill-": 50}  # fmt: skip


class RecoveryBench(Bench):
    def figures(self, row: str, turn: int) -> Iterator[tuple[str, dict[str, float]]]:
        if row in AFTER or row in SHIMS:
            for after, values in self.after(row) if row in AFTER else self.shims(row):
                yield f"{row} {after}", values
            return
        task: Callable[[str, int], list[dict[str, float]]] = {
            "server": self.server, "bad-node": self.bad_node, "stall": self.stall,
            "stall-resnet50": self.stall,
        }.get(row, self.kill_node if row.startswith("node-") else self.kill_trainers)  # fmt: skip
        for values in task(row, turn):
            yield row, values

    def _job(self, row: str, options: Options | None, most: int = 2) -> Job:
        folder = self.next_folder(row)
        if options is None:
            peer = self._peers[row.partition("-")[2]]
            return peer.job(folder, task="lenet", steps=ENDLESS, most=most)
        return EdlJob(folder, task=task_of(row), steps=ENDLESS, options=options)

    # --- kill -9 of a trainer

    def kill_trainers(self, row: str, turn: int) -> list[dict[str, float]]:
        """Kill rank 0 and rank 1, one after the other."""
        options = KILLS.get(row)
        found = []
        with self._job(row, options) as job:
            job.start(2)
            job.wait_world(2, steps=WARM_STEPS)
            for rank in (turn % 2, 1 - turn % 2):
                if isinstance(job, EdlJob):
                    job.wait_warm(2 if options is not None and options != Options() else 0)
                job.wait_more(2 + 3 * turn)  # so that kills do not all come after a checkpoint
                killed = job.kill_trainer(rank)
                found.append(_recovered(job, 2 if options is not None else None, killed))
                if found[-1]["trainers"] < 2:  # peers may lose a node by it
                    break
        return found

    def kill_node(self, row: str, turn: int) -> list[dict[str, float]]:
        options = NODES.get(row)
        with self._job(row, options) as job:
            job.start(2)
            job.wait_world(2, steps=WARM_STEPS)
            if isinstance(job, EdlJob):
                job.wait_warm(0 if options == NODES["node-cold"] else 2)
            job.wait_more(2 + 3 * turn)
            killed = time.monotonic()
            job.kill_node()
            return [_recovered(job, 1, killed)]

    # --- crashes soon after a change, and during one

    def after(self, row: str) -> Iterator[tuple[str, dict[str, float]]]:
        with self._job(row, AFTER[row]) as job:
            assert isinstance(job, EdlJob)
            _begin_alone(job)
            for delay_s in DELAYS_S:
                _grow_to_two(job)
                time.sleep(delay_s)
                yield f"{delay_s:g} s", _recovered(job, 2, job.kill_trainer(0))
                if delay_s == DELAYS_S[-1]:
                    yield "a crash", _recovered(job, 2, job.kill_trainer(1))
                _shrink_to_one(job)
            job.grow()
            time.sleep(DELAYS_S[0])
            killed = job.kill_trainer(0)
            yield "the request", _recovered(job, None, killed)
            job.wait_world(2, steps=2, after=killed)  # the change is made after all

    def shims(self, row: str) -> Iterator[tuple[str, dict[str, float]]]:
        with self._job(row, SHIMS[row]) as job:
            assert isinstance(job, EdlJob)
            _begin_alone(job)
            for name, delay_s in (("2 s", 2.0), ("quiet", 10.0)):
                _grow_to_two(job)
                time.sleep(delay_s)
                killed = job.kill_shim()
                values = _recovered(job, None, killed)
                whole = job.wait_world(2, steps=2, after=killed)
                yield name, values | {"regained_s": whole.began_at - killed}
                _shrink_to_one(job)

    # --- a control plane that dies

    def server(self, row: str, _turn: int) -> list[dict[str, float]]:
        away_s = self._args.server_away_s
        with EdlJob(self.next_folder(row), task="lenet", steps=ENDLESS, options=Options()) as job:
            job.start(2)
            job.wait_world(2, steps=WARM_STEPS)
            before = job.newest().done_step
            killed = job.kill_server()
            time.sleep(away_s)
            began = time.monotonic()
            job.start_server()
            listens = time.monotonic()
            reached = job.newest().done_step
            job.wait_status(lambda now: now.step >= reached)
            attached = time.monotonic()
            time.sleep(min(_AFTER_S, away_s))
            order, until = job.stamps.generations(), time.monotonic()
            return [
                {
                    "redone": float(steps_redone(order)),
                    "generations": float(len(order)),
                    "gap_s": longest_gap(job.stamps.stamps(), killed, until),
                    "steps_meanwhile": float(reached - before),
                    "start_s": listens - began,
                    "attached_s": attached - listens,
                }
            ]

    # --- a node that is no good

    def bad_node(self, row: str, _turn: int) -> list[dict[str, float]]:
        with EdlJob(self.next_folder(row), task="lenet", steps=ENDLESS, options=BAD_NODE) as job:
            job.start(2)
            job.wait_world(2, steps=WARM_STEPS)
            stage = job.status().stage
            asked = time.monotonic()
            job.add_node(1)
            job.grow()
            job.wait_status(
                lambda now: any(s.stage > stage and "abandoned" in s.outcome for s in now.stages)
            )
            abandoned = time.monotonic()
            job.wait_more(WARM_STEPS)
            order, until = job.stamps.generations(), time.monotonic()
            return [
                {
                    "redone": float(steps_redone(order)),
                    "generations": float(len(order)),
                    "gap_s": longest_gap(job.stamps.stamps(), asked, until),
                    "step_s": order[-1].step_s or 0.0,
                    "abandoned_s": abandoned - asked,
                }
            ]

    # --- snapshots

    def stall(self, row: str, _turn: int) -> list[dict[str, float]]:
        slower = 10 if task_of(row) == "resnet50" else 1
        options = Options(save_steps=200 // slower)
        steps = self._args.stall_steps // slower
        with self._job(row, options) as job:
            job.start(2)
            job.wait_world(2, steps=WARM_STEPS)
            job.wait_step(WARM_STEPS + steps, 60 + 3.0 * steps)
            generation = job.stamps.generations()[-1]
            share = stall_share(_without(generation, WARM_STEPS // 2))
            return [{"share": share or 0.0, "step_s": generation.step_s or 0.0}]


def task_of(row: str) -> str:
    return "resnet50" if row.endswith("-resnet50") else "lenet"


def _without(generation: Generation, steps: int) -> Generation:
    """Return it without its first steps, in which memory is found for snapshots."""
    return Generation(tuple(member[steps:] for member in generation.members))


def _begin_alone(job: EdlJob) -> None:
    job.start(1)
    job.wait_world(1, steps=WARM_STEPS)
    job.wait_warm(1)


def _grow_to_two(job: EdlJob) -> None:
    asked = time.monotonic()
    job.grow()
    job.wait_world(2, steps=1, after=asked)


def _shrink_to_one(job: EdlJob) -> None:
    job.wait_more(WARM_STEPS)
    asked = time.monotonic()
    job.shrink()
    job.wait_world(1, steps=WARM_STEPS, after=asked)


def _recovered(job: Job, world: int | None, killed: float) -> dict[str, float]:
    """Return what a crash cost, once there are `world` trainers again, or any at all."""
    new = job.wait_world(world, steps=2, after=killed)
    # Not those of the moment of the kill: the others may have ended the step that was under way.
    old = [g for g in job.stamps.generations() if g.members[0][0].at < killed][-1]
    job.wait_step(old.last_step + 1, job.limit_s)
    regained = job.stamps.generations()[-1].reached(old.last_step + 1)
    values = {
        "again_s": new.began_at - killed,
        "redone": float(change(old, new).redone),
        "trainers": float(new.world),
    }
    if regained is not None:
        values["regained_s"] = regained - killed
    if isinstance(job, EdlJob):
        phases = crash_phases(job, killed=killed, began=new.began_at)
        values |= {f"phase {name}": took for name, took in phases.items()}
    return values


def _parts(rows: Sequence[str]) -> list[str]:
    """Return the names under which these rows are kept."""
    found = []
    for row in rows:
        parts = ["2 s", "quiet"] if row in SHIMS else [*(f"{at:g} s" for at in DELAYS_S)]
        if row in AFTER:
            parts += ["a crash", "the request"]
        found += [f"{row} {part}" for part in parts] if row in (*AFTER, *SHIMS) else [row]
    return found


def show(record: Record, rows: Sequence[str]) -> None:
    """Print what there is of these rows."""
    lines, phases = [], []
    for row in _parts(rows):
        values, failures = record.values(row, "again_s"), record.failures(row)
        if values or (failures and row.startswith(("kill-", "node-"))):
            lines.append(
                (
                    row,
                    str(len(values)),
                    str(len(failures) or "-"),
                    spread(values),
                    spread(record.values(row, "redone"), digits=1),
                    spread(record.values(row, "regained_s")),
                    spread(record.values(row, "trainers"), digits=1),
                )
            )
        took = [record.values(row, f"phase {phase}") for phase in _PHASES]
        if any(took):
            phases.append((row, *(spread(each, 1e3) for each in took)))
    if lines:
        print(
            "\nCrashes: seconds from the kill, median (range). First step: made by all ranks again;"
            "\nregained: training is where it was"
        )
        print(
            table(("", "n", "failed", "first step", "steps redone", "regained", "trainers"), lines)
        )
    if phases:
        print("\nWhere EDL's time goes, ms")
        print(table(("", *_PHASES), phases))
    _show_others(record)
    for row in rows:
        for why in record.failures(row):
            print(f"  {row} failed: {why}")


def _show_others(record: Record) -> None:
    def of(row: str, name: str, scale: float = 1.0, digits: int = 3) -> str:
        return spread(record.values(row, name), scale, digits)

    if record.values("server", "gap_s"):
        print(
            f"\nserver: {of('server', 'steps_meanwhile')} steps while it was away, "
            f"{of('server', 'redone')} redone, longest time without a step "
            f"{of('server', 'gap_s', 1e3)} ms; its start took {of('server', 'start_s')} s, "
            f"all were attached again {of('server', 'attached_s')} s after that"
        )
    if record.values("bad-node", "gap_s"):
        print(
            f"\nbad-node: given up after {of('bad-node', 'abandoned_s')} s, "
            f"{of('bad-node', 'redone')} steps redone, longest time without a step "
            f"{of('bad-node', 'gap_s', 1e3)} ms, where a step takes "
            f"{of('bad-node', 'step_s', 1e3)} ms"
        )
    for row in STALLS:
        if record.values(row, "share"):
            print(
                f"\n{row}: {of(row, 'share', 100, 2)} % of the time, steps of "
                f"{of(row, 'step_s', 1e3)} ms"
            )


def aims(record: Record) -> list[Aim]:
    def of(row: str, name: str) -> list[float]:
        return record.values(row, name)

    first = "kill -9 to first step again, "
    generations = of("bad-node", "generations")
    best_node = min(
        (statistics.median(v) for row in NODES if (v := of(row, "again_s"))), default=None
    )
    return [
        at_most(f"{first}standby, newest snapshot", of("kill-newest", "again_s"), 0.1, "s"),
        at_most(f"{first}standby", of("kill-standby", "again_s"), 0.3, "s"),
        count_at_most("   its steps redone", of("kill-standby", "redone"), 1),
        at_most(f"{first}spares", of("kill-spares", "again_s"), 0.6, "s"),
        at_most(f"{first}spares, PyTorch", of("kill-spares-torch", "again_s"), 0.6, "s"),
        *(
            at_most(f"{first}{row}, the worst median", _worst_median(record, row), 1.0, "s")
            for row in (*AFTER, *SHIMS)
        ),
        at_most(f"{first}ResNet50, standby", of("kill-standby-resnet50", "again_s"), 0.8, "s"),
        at_most(f"{first}ResNet50, spares", of("kill-spares-resnet50", "again_s"), 2.6, "s"),
        count_at_most("steps redone after kill -9",
                      [r for row in KILLS for r in of(row, "redone")], 1),
        at_most("a node killed, to first step again",
                [] if best_node is None else [best_node], 6.0, "s"),
        count_at_most("a node's script fails: steps lost", of("bad-node", "redone"), 0),
        Aim(
            what="   training never stops: same trainers",
            aim="always",
            value=max(generations, default=None),
            shown="-" if not generations else "always" if max(generations) == 1 else "not always",
            is_met=bool(generations) and max(generations) == 1,
        ),
        count_at_most("job server killed: steps lost", of("server", "redone"), 0),
        at_most("   attached again after its return", of("server", "attached_s"), 5.0, "s"),
        at_most("snapshot stall, small CNN", of("stall", "share"), 0.01, "%"),
        at_most("snapshot stall, ResNet50", of("stall-resnet50", "share"), 0.01, "%"),
    ]  # fmt: skip


def _worst_median(record: Record, row: str) -> list[float]:
    medians = [
        statistics.median(values)
        for name in _parts([row])
        if (values := record.values(name, "again_s"))
    ]
    return [max(medians)] if medians else []


def all_rows() -> list[str]:
    every = list(peers(argparse.Namespace(torch_python=None, paddle_python=None)))
    return [
        *KILLS,
        *AFTER,
        *SHIMS,
        *(f"kill-{peer}" for peer in every),
        *NODES,
        *(f"node-{peer}" for peer in every),
        "server",
        "bad-node",
        *STALLS,
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--server_away_s", type=float, default=30.0, help="of the row server (30)")
    add("--stall_steps", type=int, default=600, help="of stall (600); stall-resnet50: a tenth")
    args = parser.parse_args(argv)
    if args.stall_steps < 200:
        parser.error(f"--stall_steps: must be at least 200, got {args.stall_steps}")
    if not 0.5 <= args.server_away_s <= 3600:
        parser.error(f"--server_away_s: must be 0.5 to 3600, got {args.server_away_s:g}")
    check(parser, args, all_rows())
    return args


def about_s(row: str, args: argparse.Namespace) -> float:
    """Return how long a round of this row takes on two cores, roughly."""
    kind = max((kind for kind in _ABOUT_S if row.startswith(kind)), key=len)
    slower = 2.0 if task_of(row) == "resnet50" else 1.0
    return _ABOUT_S[kind] * slower + (args.server_away_s if row == "server" else 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    record = Record(args.json, resume=args.resume, about={"benchmark": "recovery"})
    known, every = probe(args), peers(args)

    def why_not_row(row: str) -> str:
        peer = every.get(row.partition("-")[2])
        if peer is not None:
            return why_not(peer, known)
        options = {**KILLS, **NODES, **AFTER, **SHIMS}.get(row, Options())
        return ours.why_not(options)

    rows = runnable(args.rows, why_not_row)
    todo = [
        (row, turn)
        for turn in range(args.rounds)
        for row in rows
        if not (record.has(row, turn) or record.has(_parts([row])[-1], turn))
    ]
    measure_all(
        args,
        todo,
        lambda row: about_s(row, args),
        lambda folder: RecoveryBench(args, record, folder).measure,
    )
    show(record, rows)
    with_peers = any(row.partition("-")[2] in every for row in rows)
    finish(record, aims(record), with_peers=with_peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
