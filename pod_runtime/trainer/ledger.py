"""What was committed, by stage, and which state each stage began from.

The ledger is part of a training's state, so a state that is restored brings exactly the rows that
led to it; rank 0 also writes every row to `RUN_DIR/ledger.jsonl`, superseded ones included, from
which `pod_runtime.verify` proves that each sample counted once.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from job_server.codec import encode

LEDGER_NAME = "ledger.jsonl"
_LINE_BYTES = 256  # divides a page: a line that is rewritten in place is never torn


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Consecutive committed steps of one stage; within one epoch, or whole epochs."""

    epoch: int
    last_epoch: int  # above `epoch` only for whole epochs
    first_step: int  # global, 1-based
    last_step: int
    first_offset: int  # samples of `epoch` before these
    last_offset: int  # samples of `last_epoch` up to and with these


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """A stage, and the state that it began from."""

    stage: int
    restored_stage: int | None  # None: began afresh
    restored_step: int
    world_size: int
    batch_size: int
    epoch_samples: int  # that count in an epoch
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What decides which samples a global batch holds."""

    seed: int
    epochs: int
    dataset_length: int | None  # None: a stream
    shuffle: bool
    drop_last: bool
    subset: int | None = None  # checksum of which samples of a larger dataset; None: not known


class Ledger:
    """The rows of a training's lineage, extended step by step. Every rank keeps an equal one."""

    def __init__(self, stages: tuple[StageEntry, ...] = ()) -> None:
        self._closed = list(stages)  # all but the current stage
        self._entry: StageEntry | None = None  # None: no stage has begun here yet
        self._rows: list[Row] = []  # of the current stage, without the open one
        self._open: list[int] | None = None  # the fields of a Row; None: no step in it yet
        self._file: LedgerFile | None = None
        self._prefix: str | None = None  # JSON of all but the open row; None: to be made anew

    def begin(self, entry: StageEntry, file: "LedgerFile | None" = None) -> None:
        """Start the rows of a stage; from here on `file` gets them as well."""
        self._entry, self._rows, self._open, self._file = entry, [], None, file
        self._prefix = None
        if file is not None:
            file.add({"kind": "stage", **_entry_json(entry)})

    def commit(self, *, epoch: int, step: int, start: int, stop: int) -> None:
        """Note that global step `step` committed samples [start, stop) of `epoch`."""
        current = self._open
        if current is not None and current[0] == epoch:
            current[3] = step
            current[5] = stop
            return
        self._close()
        self._open = [epoch, epoch, step, step, start, stop]

    def flush(self) -> None:
        """Bring the file up to date; call before anything durable covers these steps."""
        if self._file is not None and self._open is not None:
            self._file.put(self._row_json(_row(self._open)))

    def note_done(self, step: int) -> None:
        """Write that the training is complete."""
        self.flush()
        if self._file is not None and self._entry is not None:
            self._file.add({"kind": "done", "stage": self._entry.stage, "step": step})

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
        rows = tuple(self._rows) + ((_row(self._open),) if self._open else ())
        return (*self._closed, replace(self._entry, rows=rows))

    def to_json(self) -> str:
        """Return the lineage as JSON text; cheap to call after every step."""
        if self._prefix is None:
            self._prefix = self._make_prefix()
        if self._entry is None:
            return self._prefix + "]"
        if self._open is None:
            return self._prefix + "]}]"
        separator = ", " if self._rows else ""
        return f"{self._prefix}{separator}{json.dumps(encode(_row(self._open)))}]}}]"

    def _make_prefix(self) -> str:
        parts = [json.dumps(encode(entry)) for entry in self._closed]
        if self._entry is not None:
            head = json.dumps(_entry_json(self._entry))[:-1]
            rows = ", ".join(json.dumps(encode(row)) for row in self._rows)
            parts.append(f'{head}, "rows": [{rows}')
        return "[" + ", ".join(parts)

    def _close(self) -> None:
        if self._open is None:
            return
        row, self._open, self._prefix = _row(self._open), None, None
        assert self._entry is not None
        if self._file is not None:
            self._file.put(self._row_json(row))
            self._file.finish()
        whole = row.first_offset == 0 and row.last_offset == self._entry.epoch_samples
        before = self._rows[-1] if self._rows else None
        joins = (
            whole
            and before is not None
            and before.first_offset == 0
            and before.last_offset == self._entry.epoch_samples
            and before.last_epoch + 1 == row.epoch
        )
        if joins and before is not None:
            self._rows[-1] = replace(
                before, last_epoch=row.epoch, last_step=row.last_step, last_offset=row.last_offset
            )
        else:
            self._rows.append(row)

    def _row_json(self, row: Row) -> dict[str, Any]:
        assert self._entry is not None
        return {"kind": "row", "stage": self._entry.stage, **encode(row)}


class LedgerFile:
    """`ledger.jsonl`, written by rank 0: lines are added, and the newest one is rewritten in place.

    A stage that was fenced off may still rewrite its own last line while a later stage adds: each
    knows the place of its line, and new lines go to the end atomically.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = self._path = run_dir / LEDGER_NAME
        self._append = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rewrite = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._at: int | None = None  # where the open row stands; None: none has been written
        self._line = b""

    def begin_run(self, run: RunInfo, lineage: tuple[StageEntry, ...]) -> None:
        """Write what decides the batches (the newest such line holds), and what the file lacks.

        The file may be a new one beside an old checkpoint, or its last writer may have been killed
        just before it wrote a step whose snapshot another node already had.
        """
        known = _last_steps(self._path)
        self.add({"kind": "run", **encode(run)})
        for entry in lineage:
            if entry.stage not in known:
                self.add({"kind": "stage", **_entry_json(entry)})
            for row in entry.rows:
                for part in split_row(row, entry):
                    if part.last_step > known.get(entry.stage, 0):
                        rest = rest_of_row(part, entry, known.get(entry.stage, 0))
                        self.add({"kind": "row", "stage": entry.stage, **encode(rest)})

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line that stays."""
        self._add(_padded(line))

    def put(self, row: Mapping[str, Any]) -> None:
        """Write the open row: a new line at first, the same line afterwards."""
        data = _padded(row)
        if data == self._line:
            return
        if self._at is None or len(data) != len(self._line):  # a row always fits one line
            self._at = self._add(data)
        else:
            os.pwrite(self._rewrite, data, self._at)
        self._line = data

    def finish(self) -> None:
        """Leave the open row as it is; the next `put` starts another."""
        self._at, self._line = None, b""

    def close(self) -> None:
        os.close(self._append)
        os.close(self._rewrite)

    def _add(self, data: bytes) -> int:
        os.write(self._append, data)
        return os.lseek(self._append, 0, os.SEEK_CUR) - len(data)


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


def rest_of_row(row: Row, entry: StageEntry, step: int) -> Row:
    """Return what follows `step` in a row of one epoch."""
    if step < row.first_step:
        return row
    done = (step - row.first_step + 1) * entry.batch_size
    return replace(row, first_step=step + 1, first_offset=row.first_offset + done)


def start_of_row(row: Row, entry: StageEntry, step: int) -> Row:
    """Return a row of one epoch up to and with `step`."""
    if step >= row.last_step:
        return row
    done = (step - row.first_step + 1) * entry.batch_size
    return replace(row, last_step=step, last_offset=row.first_offset + done)


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a ledger file.

    Raises:
        ValueError: a line is not a JSON object; the text names it.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected an object")
        yield number, value


def _last_steps(path: Path) -> dict[int, int]:
    """Return the last step that the file has of each stage that it knows."""
    known: dict[int, int] = {}
    for _number, line in read_lines(path):
        stage = line.get("stage")
        if isinstance(stage, int) and line.get("kind") in ("stage", "row"):
            last = line.get("last_step", 0)
            known[stage] = max(known.get(stage, 0), last if isinstance(last, int) else 0)
    return known


def _row(fields: list[int]) -> Row:
    epoch, last_epoch, first_step, last_step, first_offset, last_offset = fields
    return Row(
        epoch=epoch,
        last_epoch=last_epoch,
        first_step=first_step,
        last_step=last_step,
        first_offset=first_offset,
        last_offset=last_offset,
    )


def _entry_json(entry: StageEntry) -> dict[str, Any]:
    value: dict[str, Any] = encode(entry)
    del value["rows"]
    return value


def _padded(line: Mapping[str, Any]) -> bytes:
    data = json.dumps(line).encode()
    size = -(-(len(data) + 1) // _LINE_BYTES) * _LINE_BYTES
    return data.ljust(size - 1) + b"\n"
