"""The common command line and measuring loop of resize.py and recovery.py."""

import argparse
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.elasticity.jobs import OURS_PYTHON, NotInTime, warm_page_cache
from benchmarks.elasticity.peer_setup import TUNED, add_arguments, peers
from benchmarks.elasticity.report import Aim, Record, Sample, aims_table, choose, duration, load_now
from job_server.api.errors import JobServerError

Measure = Callable[[str, int], None]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", metavar="ROW[,ROW]", help="a word that is no row stands for all that begin so")
    add("--rounds", type=int, default=5, help="of each row (5)")
    add("--out", type=Path, help="folder for logs (a temporary one, removed at the end)")
    add("--json", type=Path, help="write the figures there, after each measurement")
    add("--resume", action="store_true", help="go on from what --json holds")
    add_arguments(parser)
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, rows: Sequence[str]) -> None:
    """Refuse what cannot be, and set `args.rows`."""
    if args.rounds < 1:
        parser.error(f"--rounds: must be at least 1, got {args.rounds}")
    if args.resume and args.json is None:
        parser.error("--resume: needs --json FILE, from which to go on")
    try:
        args.rows = choose(rows, args.only)
    except ValueError as error:
        parser.error(str(error))


class Bench(ABC):
    """Measures rows, and keeps what came of them: also that a training did not come to its end."""

    def __init__(self, args: argparse.Namespace, record: Record, folder: Path) -> None:
        self._args = args
        self._record = record
        self._folder = folder
        self._peers = peers(args)
        self._made = 0

    @abstractmethod
    def figures(self, row: str, turn: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Measure a row once; yield what is kept, and under which name."""

    def measure(self, row: str, turn: int) -> None:
        try:
            for name, values in self.figures(row, turn):
                self._record.add(Sample(row=name, turn=turn, values=values, load=load_now()))
        except (NotInTime, JobServerError) as error:
            self._record.add(Sample(row=row, turn=turn, failed=str(error), load=load_now()))

    def next_folder(self, row: str) -> Path:
        """Return a folder for one training, which is not there yet."""
        self._made += 1
        return self._folder / f"{self._made}-{row}"


def runnable(rows: Sequence[str], why_not: Callable[[str], str]) -> list[str]:
    """Return the rows that can be measured here; say why not of the others."""
    found = []
    for row in rows:
        if why := why_not(row):
            print(f"  {row}: left out: {why}")
        else:
            found.append(row)
    return found


def measure_all(
    args: argparse.Namespace,
    todo: Sequence[tuple[str, int]],
    about_s: Callable[[str], float],
    make: Callable[[Path], Measure],
) -> None:
    """Measure one after the other; SIGTERM and Ctrl-C leave no process behind."""
    signal.signal(signal.SIGTERM, _end)
    total = duration(sum(about_s(row) for row, _ in todo))
    print(f"  {len(todo)} measurements, about {total} on two quiet cores", flush=True)
    frameworks = [name for name in ("paddle", "torch") if find_spec(name) is not None]
    warm_page_cache(OURS_PYTHON, ", ".join([*frameworks, "pod_runtime.trainer.elastic"]))
    with tempfile.TemporaryDirectory(prefix="edl-benchmark-") as temporary:
        measure = make((args.out or Path(temporary)) / time.strftime("%Y%m%d-%H%M%S"))
        for row, turn in todo:
            print(f"  {row}, round {turn + 1}, load {load_now():.1f}", file=sys.stderr, flush=True)
            measure(row, turn)


def finish(record: Record, aims: Sequence[Aim], *, with_peers: bool) -> None:
    """Print the aims, and under which circumstances all this was measured."""
    print(f"\n{aims_table(aims)}\n\nload average: {record.load()}")
    if with_peers:
        print(TUNED)
    record.save(aims)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # through all `with` blocks, which end what they started
