"""Measure what a planned change costs with EDL, torchrun and Paddle's own launcher, in one run.

    python benchmarks/resize.py --json FILE [--only ROW[,ROW]] [--rounds 5] [--resume]
        [--torch_python PATH] [--paddle_python PATH]

Rows: replace, drain, join (EDL by its ways), torchrun-default, -tuned, -tuned-own-store,
paddle-default, -tuned: a small CNN that goes from 2 trainers to 3 and back, everybody once in each
round; replace-resnet50, drain-resnet50, join-resnet50 (at 32 pixels); wall-replace, -drain, -join,
-torchrun (the same 2,000 steps with and without six changes); random (--changes 200 random ones,
one after the other). replace-torch, drain-torch, wall-replace-torch, random-torch: the same with
PyTorch under EDL, at the speed of data parallel training (promise="statistics"). A word stands for
all rows that begin so.

The pause is the time from the end of the last step before to the end of the first step after, each
on the slowest rank: it holds one ordinary step. Every trainer writes down when its steps end; all
figures but the phases follow from that. The exit code is 0 whether aims are reached or missed.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.elasticity import ours
from benchmarks.elasticity.command import Bench, check, finish, make_parser, measure_all, runnable
from benchmarks.elasticity.jobs import Job
from benchmarks.elasticity.ours import EdlJob, Options, planned_phases
from benchmarks.elasticity.peer_setup import peers, probe, why_not
from benchmarks.elasticity.report import (
    Aim,
    Record,
    at_most,
    count_at_most,
    spread,
    table,
)
from benchmarks.elasticity.stamps import Generation, change, steps_redone
from job_server.api.wire import JobState

OVERLAPS = {"replace": "on", "drain": "off", "join": "join"}
OURS = (
    "replace", "drain", "join", "replace-resnet50", "drain-resnet50", "join-resnet50",
    "replace-torch", "drain-torch",
)  # fmt: skip
WALL = {
    "wall-replace": "replace",
    "wall-drain": "drain",
    "wall-join": "join",
    "wall-replace-torch": "replace-torch",
    "wall-torchrun": "torchrun-tuned-own-store",
}
RANDOM = ("random", "random-torch")
ABOUT_S = {  # of one round on 2 cores
    "replace": 25, "drain": 20, "join": 25, "replace-resnet50": 100, "drain-resnet50": 80,
    "join-resnet50": 100, "torchrun-default": 110, "torchrun-tuned": 60,
    "torchrun-tuned-own-store": 40, "paddle-default": 100, "paddle-tuned": 40,
    "wall-replace": 300, "wall-drain": 300, "wall-join": 300, "wall-torchrun": 240,
    "replace-torch": 25, "drain-torch": 20, "wall-replace-torch": 200,
}  # fmt: skip
ENDLESS = 100_000  # steps
WALL_CHANGES = 6
_PHASES = ("ask", "prepare", "last steps", "hand over", "start", "first step")


class ResizeBench(Bench):
    def figures(self, row: str, turn: int) -> Iterator[tuple[str, dict[str, float]]]:
        if row in RANDOM:
            yield row, self.random(row)
        elif row in WALL:
            yield row, self.wall(row)
        else:
            for kind, values in self.changes(row):
                yield f"{row} {kind}", values

    def job(self, row: str, steps: int) -> Job:
        """Return a training of that row, not started yet."""
        folder = self.next_folder(row)
        if row in self._peers:
            return self._peers[row].job(folder, task="lenet", steps=steps)
        way, _, model = row.partition("-")
        return EdlJob(
            folder,
            task="resnet50" if model == "resnet50" else "lenet",
            steps=steps,
            options=options_of(row, OVERLAPS[way], self._args.spares),
        )

    # --- one change after the other

    def changes(self, row: str) -> Iterator[tuple[str, dict[str, float]]]:
        """Start on 2 trainers; one joins, one leaves."""
        with self.job(row, ENDLESS) as job:
            job.start(2)
            job.wait_world(2, steps=self._args.settle)
            for kind, world in (("join", 3), ("leave", 2)):
                yield kind, planned(job, world, self._args.settle)

    # --- the whole training

    def wall(self, row: str) -> dict[str, float]:
        """The same steps by 2 trainers, by 3, and by 2 and 3 in turn."""
        steps = self._args.wall_steps
        limit_s = 60 + 0.5 * steps
        unchanged = {world: self._unchanged(WALL[row], world, steps, limit_s) for world in (2, 3)}
        per_step = {world: step_s for world, (step_s, _) in unchanged.items()}
        with self.job(WALL[row], steps) as job:
            job.start(2)
            first = job.wait_world(2, steps=2)
            for number in range(WALL_CHANGES):
                job.wait_step(round(steps * (number + 1) / (WALL_CHANGES + 1)), limit_s)
                world = 3 if number % 2 == 0 else 2
                asked = time.monotonic()
                job.grow() if world == 3 else job.shrink()
                job.wait_world(world, steps=1, after=asked)
            job.wait_step(steps, limit_s)
            # A peer may have trained by one before all were there; that is its start.
            begin = first.members[0][0].at
            order = [g for g in job.stamps.generations() if g.members[0][0].at >= begin]
        took = order[-1].ended_at - order[0].began_at
        made = steps_by_world(order, steps)
        extra_s = took - sum(count * per_step[world] for world, count in made.items())
        return {
            "took_s": took,
            "startup_2_s": unchanged[2][1],
            "unchanged_2_s": per_step[2] * (steps - 1),
            "unchanged_3_s": per_step[3] * (steps - 1),
            "extra_s": extra_s,
            "extra_per_change_s": extra_s / WALL_CHANGES,
            "redone": float(steps_redone(order)),
        }

    def _unchanged(self, row: str, world: int, steps: int, limit_s: float) -> tuple[float, float]:
        """Return seconds per step, and from the start until the first one."""
        with self.job(row, steps) as job:
            begun = time.monotonic()
            job.start(world)
            job.wait_world(world, steps=2)
            job.wait_step(steps, limit_s)
            last = job.stamps.generations()[-1]
        per_step = (last.ended_at - last.began_at) / (last.last_step - last.first_step)
        return per_step, last.began_at - begun

    # --- many changes

    def random(self, row: str) -> dict[str, float]:
        """Changes among 1 to 3 trainers, at random moments; the proof of the ledger at the end."""
        args = self._args
        draw = random.Random(args.seed)
        pauses, excesses = [], []
        options = options_of(row, "on", args.spares)
        with EdlJob(self._folder / row, task="lenet", steps=ENDLESS, options=options) as job:
            world = 2
            job.start(world)
            job.wait_world(world, steps=5)
            for number in range(args.changes):
                world = draw.choice([each for each in (1, 2, 3) if each != world])
                asked = time.monotonic()
                job.resize(world)
                new = job.wait_world(world, steps=draw.randint(2, 12), after=asked)
                found = change(job.stamps.generations()[-2], new)
                pauses.append(found.pause_s)
                excesses.append(found.pause_s - (found.step_s or 0.0))
                if number % 20 == 19:
                    print(f"  {number + 1} changes, step {new.last_step}", file=sys.stderr)
            status = job.status()
            job.api.stop(status.job_id)
            job.wait_status(lambda now: now.state is JobState.STOPPED)
            proof = job.verify()
            return {
                "changes": float(status.resizes),
                "redone": float(steps_redone(job.stamps.generations())),
                "redone_by_server": float(status.redone_steps),
                "pause_s": statistics.median(pauses),
                "longest_pause_s": max(pauses),
                "excess_s": statistics.median(excesses),
                "proved": float(proof.startswith("OK")),
            }


def options_of(row: str, overlap: str, spares: int) -> Options:
    torch = row.endswith("-torch")
    return Options(
        overlap=overlap,
        spares=spares,
        framework="torch" if torch else "paddle",
        promise="statistics" if torch else "rounding",
    )


def planned(job: Job, world: int, settle: int) -> dict[str, float]:
    """Have the job change to `world` trainers; return what that cost."""
    asked = time.monotonic()
    job.grow() if world == 3 else job.shrink()
    new = job.wait_world(world, steps=settle, after=asked)
    # What trained last before it, which may be others than when it was asked.
    old = [g for g in job.stamps.generations() if g.members[0][0].at < new.members[0][0].at][-1]
    found = change(old, new)
    values = {
        "pause_s": found.pause_s,
        "redone": float(found.redone),
        "asked_s": new.began_at - asked,
    }
    if found.step_s is not None:
        values |= {"step_s": found.step_s, "excess_s": found.pause_s - found.step_s}
    if isinstance(job, EdlJob):
        phases = planned_phases(job, asked=asked, ended=old.ended_at, began=new.began_at)
        values |= {f"phase {name}": took for name, took in phases.items()}
    return values


def steps_by_world(order: Sequence[Generation], steps: int) -> dict[int, int]:
    """Return how many of the steps were made by how many trainers, each step counted once.

    The first step that there is is left out: the clock begins at its end.
    """
    made: dict[int, int] = {}
    ends = [generation.first_step for generation in order[1:]] + [steps + 1]
    for generation, end in zip(order, ends, strict=True):
        begin = max(order[0].first_step + 1, generation.first_step)
        made[generation.world] = made.get(generation.world, 0) + max(0, end - begin)
    return made


def show(record: Record, rows: Sequence[str]) -> None:
    """Print what there is of these rows."""
    lines, phases = [], []
    for row in (row for row in rows if row not in (*WALL, *RANDOM)):
        failures = len(record.failures(row))
        for kind in ("join", "leave"):
            name = f"{row} {kind}"
            values = record.values(name, "pause_s")
            if not values and not failures:
                continue
            lines.append(
                (
                    name,
                    f"{len(values)}",
                    f"{failures or '-'}",
                    spread(values, 1e3),
                    spread(record.values(name, "step_s"), 1e3),
                    spread(record.values(name, "excess_s"), 1e3),
                    spread(record.values(name, "redone"), digits=1),
                    spread(record.values(name, "asked_s")),
                )
            )
            took = [record.values(name, f"phase {phase}") for phase in _PHASES]
            if any(took):
                phases.append((name, *(spread(each, 1e3) for each in took)))
    if lines:
        print("\nPlanned changes: milliseconds, median (range)")
        head = ("", "n", "failed", "pause", "a step", "excess", "redone", "asked to done, s")
        print(table(head, lines))
    if phases:
        print("\nWhere EDL's time goes, ms; training pauses from `hand over` on")
        print(table(("", *_PHASES), phases))
    _show_wall(record, [row for row in rows if row in WALL])
    for row in (row for row in RANDOM if record.values(row, "changes")):
        names = ("changes", "redone", "redone_by_server", "pause_s", "longest_pause_s", "excess_s")
        got = {name: record.values(row, name)[-1] for name in names}
        proof = "proves" if record.values(row, "proved")[-1] else "DOES NOT PROVE"
        print(
            f"\n{row}: {got['changes']:.0f} changes: {got['redone']:.0f} steps redone by the "
            f"stamps, {got['redone_by_server']:.0f} by the server; pause "
            f"{1e3 * got['pause_s']:.0f} ms, at most {1e3 * got['longest_pause_s']:.0f} ms; "
            f"excess {1e3 * got['excess_s']:.0f} ms; the ledger {proof} that each step counts once"
        )
    for row in rows:
        for why in record.failures(row):
            print(f"  {row} failed: {why}")


def _show_wall(record: Record, rows: Sequence[str]) -> None:
    names = (
        "startup_2_s",
        "unchanged_2_s",
        "unchanged_3_s",
        "took_s",
        "extra_s",
        "extra_per_change_s",
        "redone",
    )
    lines = [
        (row, str(len(values)), *(spread(record.values(row, name)) for name in names))
        for row in rows
        if (values := record.values(row, "took_s"))
    ]
    if lines:
        print(
            "\nThe same steps without and with six changes, seconds; extra: more than these steps\n"
            "take at the speeds of 2 and of 3 trainers, so preparing and steps redone count"
        )
        head = (
            "",
            "n",
            "start-up of 2",
            "2 trainers",
            "3 trainers",
            "2-3-2-3-2-3-2",
            "extra",
            "per change",
            "redone",
        )
        print(table(head, lines))


def aims(record: Record) -> list[Aim]:
    def both(row: str, name: str) -> list[float]:
        return record.values(f"{row} join", name) + record.values(f"{row} leave", name)

    pauses = {row: both(row, "pause_s") for row in peers(_no_peers()) if row.startswith("torchrun")}
    best = min((statistics.median(values) for values in pauses.values() if values), default=None)
    mine = both("replace", "pause_s")
    ratio = best / statistics.median(mine) if best is not None and mine else None
    return [
        at_most("planned change, small CNN: beyond a step", both("replace", "excess_s"), 0.015),
        at_most("planned change, ResNet50: beyond a step",
                both("replace-resnet50", "excess_s"), 0.150),
        Aim(
            what="planned change: shorter than torchrun's best, times",
            aim="at least 50",
            value=ratio,
            shown="-" if ratio is None else f"{ratio:.1f}",
            is_met=ratio is not None and ratio >= 50,
        ),
        *_wall_aims(record),
        count_at_most("steps redone in random changes",
                      [n for row in RANDOM for n in record.values(row, "redone")], 0),
        count_at_most("steps redone in planned changes",
                      [r for row in OURS for r in both(row, "redone")], 0),
    ]  # fmt: skip


def _wall_aims(record: Record) -> list[Aim]:
    """The same steps with PyTorch, under EDL and under torchrun."""
    ours, theirs = (
        record.values(row, "unchanged_2_s") for row in ("wall-replace-torch", "wall-torchrun")
    )
    share = [statistics.median(ours) / statistics.median(theirs) - 1] if ours and theirs else []
    extra = record.values("wall-replace-torch", "extra_per_change_s")
    return [
        at_most("PyTorch, no change: longer than torchrun by", share, 0.03, "%"),
        at_most("PyTorch, extra for a change", extra, 1.2, "s"),
    ]


def _no_peers() -> argparse.Namespace:
    return argparse.Namespace(torch_python=None, paddle_python=None)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--settle", type=int, default=30, help="steps between two changes (30)")
    add("--wall_rounds", type=int, default=3, help="of the rows wall-... (3)")
    add("--wall_steps", type=int, default=2000, help="a multiple of 500 (2000)")
    add("--changes", type=int, default=200, help="of the row random (200)")
    add("--seed", type=int, default=1, help="of the row random (1)")
    add("--spares", type=int, default=0, help="warm spares of EDL's pods (0)")
    args = parser.parse_args(argv)
    for name in ("settle", "wall_rounds", "changes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be at least 1, got {getattr(args, name)}")
    if args.wall_steps < 500 or args.wall_steps % 500:
        parser.error(f"--wall_steps: must be a multiple of 500, got {args.wall_steps}")
    check(parser, args, (*OURS, *peers(args), *WALL, *RANDOM))
    return args


def plan(args: argparse.Namespace, rows: Sequence[str]) -> list[tuple[str, int]]:
    """Return what is to be measured, in order: everybody once in each round."""
    rounds = {row: args.wall_rounds if row in WALL else 1 if row in RANDOM else args.rounds
              for row in rows}  # fmt: skip
    most = max(rounds.values(), default=0)
    return [(row, turn) for turn in range(most) for row in rows if turn < rounds[row]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    about = {"benchmark": "resize", "spares": args.spares, "settle": args.settle}
    record = Record(args.json, resume=args.resume, about=about)
    known, every = probe(args), peers(args)

    def why_not_row(row: str) -> str:
        needs = WALL.get(row, row)
        if needs in every:
            return why_not(every[needs], known)
        way = "replace" if needs in RANDOM else needs.partition("-")[0]
        return ours.why_not(Options(overlap=OVERLAPS[way], spares=args.spares))

    rows = runnable(args.rows, why_not_row)
    todo = [
        (row, turn)
        for row, turn in plan(args, rows)
        if not (record.has(row, turn) or record.has(f"{row} leave", turn))
    ]
    measure_all(
        args,
        todo,
        lambda row: ABOUT_S.get(row, 3 * args.changes),
        lambda folder: ResizeBench(args, record, folder).measure,
    )
    show(record, rows)
    with_peers = any(WALL.get(row, row) in every for row in rows)
    finish(record, aims(record), with_peers=with_peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
