"""Record what was committed, by stage, and which state each stage began from.

The ledger is part of a training's state, so a state that is restored brings exactly the rows that
led to it; rank 0 also writes every row to `RUN_DIR/ledger.jsonl`, superseded ones included, from
which `pod_runtime.verify` proves that each sample counted once.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from job_server.api.codec import decode, encode
from pod_runtime.trainer.progress.drawn import add, from_text, to_text
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord
from pod_runtime.trainer.progress.order_files import OrderFiles

logger = logging.getLogger(__name__)

LEDGER_NAME = "ledger.jsonl"
_LINE_BYTES = 256  # divides a page: a line that is rewritten in place is never torn
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Consecutive committed steps of one stage; within one epoch, or whole epochs."""

    epoch: int
    last_epoch: int  # above `epoch` only for whole epochs
    first_step: int  # global, 1-based
    last_step: int
    first_offset: int  # samples of `epoch` before these
    last_offset: int  # samples of `last_epoch` up to and with these
    drawn: str | None = None  # the samples' sum, as `drawn.to_text` has it; None: not known

    def __post_init__(self) -> None:
        if not 0 <= self.last_epoch - self.epoch <= self.last_step - self.first_step:
            raise ValueError(
                f"steps {self.first_step}-{self.last_step} cannot be those of epochs "
                f"{self.epoch}-{self.last_epoch}"
            )
        from_text(self.drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """A stage, and the state that it began from."""

    stage: int
    restored_stage: int | None  # None: began afresh
    restored_step: int
    world_size: int
    batch_size: int
    epoch_samples: int  # that count in an epoch
    restored_drawn: str | None = None  # of all rows of `restored_stage` up to `restored_step`
    promise: str = ""  # in force; "": by an older version, "rounding"
    restored_offset: int | None = None  # samples of the epoch up to there; None: not known
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.epoch_samples < 1:
            raise ValueError(
                f"batches of {self.batch_size} of {self.epoch_samples} samples cannot be"
            )
        from_text(self.restored_drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What decides which samples a global batch holds."""

    seed: int
    epochs: int
    dataset_length: int | None  # None: a stream
    shuffle: bool
    drop_last: bool
    subset: int | None = None  # checksum of which samples of a larger dataset; None: not known
    values: int | None = None  # checksum of the order of values in memory; None: not known
    sampler: str | None = None  # that draws each epoch's order; None: by seed and `shuffle`


class Ledger:
    """The rows of a training's lineage, extended step by step. Every rank keeps an equal one."""

    def __init__(self, stages: tuple[StageEntry, ...] = ()) -> None:
        self._closed = list(stages)  # all but the current stage
        self._entry: StageEntry | None = None  # None: no stage has begun here yet
        self._rows: list[Row] = []  # of the current stage, without the open one
        self._open: list[int] | None = None  # a Row's numbers; None: no step in it yet
        self._drawn: int | None = None  # the open row's
        self._file: LedgerFile | None = None
        self._prefix: str | None = None  # JSON of all but the open row; None: to be made
        self._closed_json: list[str] | None = None  # of each stage that is over; None: to be made
        self._joins_epochs = True

    def begin(
        self, entry: StageEntry, file: "LedgerFile | None" = None, *, joins_epochs: bool = True
    ) -> None:
        """Start the rows of a stage; from here on `file` gets them as well.

        Args:
            joins_epochs: whole epochs are written as one row; they are all alike.
        """
        self._joins_epochs = joins_epochs
        self._entry, self._rows, self._open, self._file = entry, [], None, file
        self._prefix = None
        if file is not None:
            file.add({"kind": "stage", **_entry_json(entry)})

    def commit(
        self, *, epoch: int, step: int, start: int, stop: int, drawn: int | None = None
    ) -> None:
        """Note that global step `step` committed samples [start, stop) of `epoch`.

        Args:
            drawn: sum of the hashes of those that were drawn for them; None: not known.
        """
        current = self._open
        if current is not None and current[0] == epoch:
            current[3] = step
            current[5] = stop
            self._drawn = add(self._drawn, drawn)
            return
        self._close()
        self._open, self._drawn = [epoch, epoch, step, step, start, stop], drawn

    def flush(self) -> None:
        """Bring the file up to date; call before anything durable covers these steps."""
        if self._file is None:
            return
        if self._open is not None:
            self._file.put(self._row_json(self._open_row(self._open)))
        self._file.settle()

    def note_done(self, step: int) -> None:
        """Write that the training is complete."""
        self.flush()
        if self._file is not None and self._entry is not None:
            self._file.add({"kind": "done", "stage": self._entry.stage, "step": step})
            self._file.say_what_is_missing()

    def note_account(self, *, snapshots: int, stall_s: float, elapsed_s: float) -> None:
        """Write what this stage's snapshots have cost so far; says nothing about steps."""
        if self._file is not None and self._entry is not None:
            self._file.add(
                {"kind": "account", "stage": self._entry.stage, "snapshots": snapshots,
                 "stall_s": round(stall_s, 6), "elapsed_s": round(elapsed_s, 3)}
            )  # fmt: skip

    def close(self) -> None:
        """Write nothing more to the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def stages(self) -> tuple[StageEntry, ...]:
        """The lineage up to the last committed step."""
        if self._entry is None:
            return tuple(self._closed)
        rows = tuple(self._rows) + ((self._open_row(self._open),) if self._open else ())
        return (*self._closed, replace(self._entry, rows=rows))

    @property
    def newest_drawn(self) -> str | None:
        """The sum of all rows of the newest stage that is over; None: not known, or none is."""
        if not self._closed:
            return None
        total: int | None = 0
        for row in self._closed[-1].rows:
            total = add(total, from_text(row.drawn))
        return to_text(total)

    def to_json(self) -> str:
        """Return the lineage as JSON text; cheap to call after every step."""
        if self._prefix is None:
            self._prefix = self._make_prefix()
        if self._entry is None:
            return self._prefix + "]"
        if self._open is None:
            return self._prefix + "]}]"
        separator = ", " if self._rows else ""
        return f"{self._prefix}{separator}{json.dumps(encode(self._open_row(self._open)))}]}}]"

    def _make_prefix(self) -> str:
        if self._closed_json is None:  # once: a long training may have had thousands of stages
            self._closed_json = [json.dumps(encode(entry)) for entry in self._closed]
        parts = list(self._closed_json)
        if self._entry is not None:
            head = json.dumps(_entry_json(self._entry))[:-1]
            rows = ", ".join(json.dumps(encode(row)) for row in self._rows)
            parts.append(f'{head}, "rows": [{rows}')
        return "[" + ", ".join(parts)

    def _close(self) -> None:
        if self._open is None:
            return
        row, self._open, self._prefix = self._open_row(self._open), None, None
        assert self._entry is not None
        if self._file is not None:
            self._file.put(self._row_json(row))
            self._file.finish()
        whole = row.first_offset == 0 and row.last_offset == self._entry.epoch_samples
        before = self._rows[-1] if self._rows else None
        joins = (
            whole
            and self._joins_epochs
            and before is not None
            and before.first_offset == 0
            and before.last_offset == self._entry.epoch_samples
            and before.last_epoch + 1 == row.epoch
            and (before.drawn is None) == (row.drawn is None)
        )
        if joins and before is not None:
            self._rows[-1] = replace(
                before,
                last_epoch=row.epoch,
                last_step=row.last_step,
                last_offset=row.last_offset,
                drawn=to_text(add(from_text(before.drawn), from_text(row.drawn))),
            )
        else:
            self._rows.append(row)

    def _open_row(self, fields: list[int]) -> Row:
        epoch, last_epoch, first_step, last_step, first_offset, last_offset = fields
        return Row(
            epoch=epoch,
            last_epoch=last_epoch,
            first_step=first_step,
            last_step=last_step,
            first_offset=first_offset,
            last_offset=last_offset,
            drawn=to_text(self._drawn),
        )

    def _row_json(self, row: Row) -> dict[str, Any]:
        assert self._entry is not None
        return {"kind": "row", "stage": self._entry.stage, **encode(row)}


class _Line:
    """A line as it should stand in the file."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at: int | None = None  # where it stands, maybe in an older form; None: nowhere yet


class LedgerFile:
    """`ledger.jsonl`, written by rank 0: lines are added, and the newest one is rewritten in place.

    A stage that was fenced off may still rewrite its own last line while a later stage adds: each
    knows the place of its line, and new lines go to the end atomically.

    The file is an account of the training, not a part of it: where it cannot be written, as on a
    full disk, that is said once, lines wait here, and every later call tries again. What a stage
    could not write at all, the next one writes from the state.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEDGER_NAME
        self._fds: tuple[int, int] | None = None  # to append, to rewrite; None: not open yet
        self._waiting: list[_Line] = []  # in order
        self._open: _Line | None = None  # the open row; None: there is none
        self._is_behind = False  # the newest attempt to write has failed
        self._orders = OrderFiles(run_dir)

    def begin_run(
        self,
        run: RunInfo,
        lineage: tuple[StageEntry, ...],
        run_id: str = "",
        orders: tuple[OrderRecord, ...] = (),
    ) -> None:
        """Write what decides the batches (the newest such line holds), and what the file lacks.

        The file may be a new one beside an old checkpoint, or lines of it are damaged, or its last
        writer may have been killed just before it wrote a step whose snapshot another node already
        had.
        """
        known = self._read(run_id)
        self.add({"kind": "run", **encode(run), "run_id": run_id})
        for record in orders:
            if known is None or known.orders.get(record.epoch) != record:
                self.add_order(record)
        for entry in lineage:
            there = None if known is None else known.stages.get(entry.stage)
            if there is None:
                self.add({"kind": "stage", **_entry_json(entry)})
            spans = _spans(() if there is None else there.rows)
            for row in entry.rows:
                if not any(a <= row.first_step and row.last_step <= b for a, b in spans):
                    self.add({"kind": "row", "stage": entry.stage, **encode(row)})

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line that stays."""
        self._waiting.append(_Line(_padded(line)))
        self.settle()

    def add_order(self, record: OrderRecord) -> None:
        """Append what a sampler drew for an epoch, in short."""
        self.add({"kind": "order", **encode(record)})

    def put_order(self, order: EpochOrder) -> None:
        """Write what a sampler drew for an epoch, into a file of its own."""
        self._orders.put(order)

    def put(self, row: Mapping[str, Any]) -> None:
        """Write the open row: a new line at first, the same line afterwards."""
        data, line = _padded(row), self._open
        if line is not None and line.data == data:
            return
        if line is None or (line.at is not None and len(line.data) != len(data)):
            line = self._open = _Line(data)  # one that has outgrown its place is written again
        line.data = data
        if line not in self._waiting:
            self._waiting.append(line)
        self.settle()

    def finish(self) -> None:
        """Leave the open row as it is; the next `put` starts another."""
        self._open = None

    def settle(self) -> None:
        """Write what waits, as far as that is possible now."""
        self._orders.settle()
        if not self._waiting:
            return
        try:
            if self._fds is None:
                self._fds = self._open_file()
            while self._waiting:
                self._write(self._waiting[0], *self._fds)
                del self._waiting[0]
        except OSError as error:
            if not self._is_behind:
                logger.error(
                    "%s cannot be written: %s; training goes on, and what is missing there is "
                    "written when that is possible", self._path, error.strerror or error,
                )  # fmt: skip
            self._is_behind = True
            return
        if self._is_behind:
            self._is_behind = False
            logger.warning("%s is complete again", self._path)

    def say_what_is_missing(self) -> None:
        """Log that lines still wait when they are not going to be tried again."""
        if self._waiting:
            logger.error(
                "%s lacks its last %d lines, which could not be written; the state has all of "
                "them: `python -m pod_runtime.verify CHECKPOINT` proves the training",
                self._path, len(self._waiting),
            )  # fmt: skip

    def close(self) -> None:
        self.settle()
        if self._fds is not None:
            for fd in self._fds:
                os.close(fd)
            self._fds = None

    def _read(self, run_id: str) -> "LedgerContent | None":
        """Return what the file has of a run; None: nothing, or another one was begun since."""
        try:
            content = read_content(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.error("%s cannot be read: %s", self._path, error.strerror or error)
            return None
        if content.damaged:
            logger.error(
                "%d lines of the ledger are damaged, and are passed over: %s",
                len(content.damaged), "; ".join(content.damaged[:_SHOWN_LINES]),
            )  # fmt: skip
        is_other = content.run_id and run_id and content.run_id != run_id
        return None if is_other else content

    def _open_file(self) -> tuple[int, int]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        rewrite = os.open(self._path, flags, 0o644)
        try:
            append = os.open(self._path, flags | os.O_APPEND, 0o644)
        except OSError:
            os.close(rewrite)
            raise
        size = os.fstat(rewrite).st_size
        if size % _LINE_BYTES or (size and os.pread(rewrite, 1, size - 1) != b"\n"):
            # Half a line of a writer that was killed: it must not swallow the first of ours.
            self._waiting.insert(0, _Line(b"\n".rjust(_LINE_BYTES - size % _LINE_BYTES)))
        return append, rewrite

    def _write(self, line: _Line, append: int, rewrite: int) -> None:
        if line.at is not None:
            written = os.pwrite(rewrite, line.data, line.at)
        else:
            written = os.write(append, line.data)
            at = os.lseek(append, 0, os.SEEK_CUR) - written
            if written == len(line.data):
                line.at = at
            elif written:  # the next line must not look like the rest of this one
                os.pwrite(rewrite, b"\n".rjust(written), at)
        if written < len(line.data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def split_row(row: Row, entry: StageEntry) -> Iterator[Row]:
    """Yield `row` epoch by epoch."""
    if row.epoch == row.last_epoch:
        yield row
        return
    steps = -(-entry.epoch_samples // entry.batch_size)
    for number, epoch in enumerate(range(row.epoch, row.last_epoch + 1)):
        first = row.first_step + number * steps
        yield Row(
            epoch=epoch,
            last_epoch=epoch,
            first_step=first,
            last_step=first + steps - 1,
            first_offset=0,
            last_offset=entry.epoch_samples,
        )


def start_of_row(row: Row, entry: StageEntry, step: int, offset: int | None = None) -> Row:
    """Return a row of one epoch up to and with `step`; `offset`: where that ends, if known."""
    if step >= row.last_step:
        return row
    if offset is None:
        offset = row.first_offset + (step - row.first_step + 1) * entry.batch_size
    return replace(row, last_step=step, last_offset=offset, drawn=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContent:
    """The content of a ledger file."""

    run: RunInfo | None  # the newest; None: no line says it
    run_id: str  # its id; "": a version before did not say
    stages: Mapping[int, StageEntry]  # its own, with all rows but those that others contain
    orders: Mapping[int, OrderRecord]  # what a sampler drew, by epoch
    damaged: tuple[str, ...]  # each line that cannot be read, and why


def read_content(path: Path) -> LedgerContent:
    """Read what a ledger file has of its newest run, and pass over what is damaged.

    The file may have been another run's before, whose stages had the same numbers.

    Raises:
        OSError: the file cannot be read.
    """
    run: RunInfo | None = None
    run_id = ""
    stages: dict[int, StageEntry] = {}
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # rows, and where, by their stage
    rows: dict[int, list[Row]] = {}
    orders: dict[int, OrderRecord] = {}
    damaged: list[tuple[int, str]] = []
    for number, line in read_lines(path, damaged):
        try:
            match line.get("kind"):
                case "run":
                    run = decode(RunInfo, line)
                    before, run_id = run_id, decode(str, line.get("run_id", "")) or run_id
                    if before not in ("", run_id):
                        stages.clear()
                        found.clear()
                        orders.clear()
                case "order":
                    record = decode(OrderRecord, line)
                    orders[record.epoch] = record
                case "stage":
                    entry = decode(StageEntry, line)
                    stages[entry.stage] = entry
                case "row":
                    stage = decode(int, line.get("stage"), "stage")
                    found.setdefault(stage, []).append((number, line))
        except ValueError as error:
            damaged.append((number, str(error)))
    for stage, lines in found.items():
        if stage not in stages:
            text = f"a row of stage {stage}, which never began"
            damaged += [(number, text) for number, _line in lines]
            continue
        for number, line in lines:
            try:
                rows.setdefault(stage, []).append(decode(Row, line))
            except ValueError as error:
                damaged.append((number, str(error)))
    stages = {
        number: replace(entry, rows=tuple(_without_contained(rows.get(number, []), entry)))
        for number, entry in stages.items()
    }
    texts = tuple(f"{path}:{number}: {text}" for number, text in sorted(damaged))
    return LedgerContent(run=run, run_id=run_id, stages=stages, orders=orders, damaged=texts)


def read_lines(
    path: Path, damaged: list[tuple[int, str]] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a ledger file.

    Args:
        damaged: lines that are no JSON objects are passed over, and noted here with their
            numbers; None: they raise.

    Raises:
        ValueError: a line is not a JSON object; the text names it.
        OSError: the file cannot be read.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode())
            problem = "" if isinstance(value, dict) else "expected an object"
        except (ValueError, RecursionError) as error:
            problem = "only NUL bytes" if not line.strip(b"\0 ") else f"not JSON: {error}"
        if not problem:
            yield number, value
        elif damaged is None:
            raise ValueError(f"{path}:{number}: {problem}")
        else:
            damaged.append((number, problem))


def _without_contained(rows: Iterable[Row], entry: StageEntry) -> Iterator[Row]:
    """Leave out rows that another one contains: a row that was written again, and grew."""
    longest: Row | None = None
    for row in sorted(rows, key=lambda each: (each.first_step, -each.last_step)):
        if (
            longest is not None
            and row.last_step <= longest.last_step
            and _place_of(longest, entry, row.first_step) == (row.epoch, row.first_offset)
        ):
            continue
        if longest is None or row.last_step > longest.last_step:
            longest = row
        yield row


def _place_of(row: Row, entry: StageEntry, step: int) -> tuple[int, int]:
    """Return (epoch, offset) at which `step` of `row` begins."""
    epochs, steps = 0, step - row.first_step
    if row.last_epoch > row.epoch:
        epochs, steps = divmod(steps, -(-entry.epoch_samples // entry.batch_size))
    return row.epoch + epochs, row.first_offset + steps * entry.batch_size


def _spans(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return the (first, last) steps that rows cover without a gap, ascending."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted((row.first_step, row.last_step) for row in rows):
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], max(spans[-1][1], last)
        else:
            spans.append((first, last))
    return spans


def _entry_json(entry: StageEntry) -> dict[str, Any]:
    value: dict[str, Any] = encode(entry)
    del value["rows"]
    return value


def _padded(line: Mapping[str, Any]) -> bytes:
    data = json.dumps(line).encode()
    size = -(-(len(data) + 1) // _LINE_BYTES) * _LINE_BYTES
    return data.ljust(size - 1) + b"\n"
