"""Prove from a ledger that each sample of each epoch counted exactly once. Pure.

A state's lineage is the chain of stages that led to it: the newest stage began from a step of an
earlier one, whose later rows are superseded, and so on back to a fresh start. What counts is what
the rows of this chain cover; it has to be every step once, and every place of every epoch's order
once. The order is a permutation, so places stand for samples; and the sums of what trainers drew
show that they drew what the order says.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pod_runtime.trainer.progress.batches import permutation
from pod_runtime.trainer.progress.drawn import add, from_text, subtract, to_text
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord, sum_of
from pod_runtime.trainer.progress.ledger import Row, RunInfo, StageEntry, split_row, start_of_row

_ReadOrder = Callable[[OrderRecord], EpochOrder | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A row that counts, or one that was superseded."""

    stage: int
    row: Row  # of one epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """Rows that follow each other, and the sum of what was drawn for them."""

    stage: int
    rows: tuple[Row, ...]  # each of one epoch
    drawn: int | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Samples of one epoch that do not count exactly once, by their positions in its order."""

    epoch: int
    start: int
    stop: int
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCheck:
    """The result of checking a ledger."""

    lineage: tuple[StageEntry, ...]  # first stage first; rows cut where the next one began
    superseded: tuple[Counted, ...]
    complete_epochs: int  # epochs 0 .. this - 1 are complete
    last_epoch_samples: int  # that count in the epoch after those
    steps: int
    problems: tuple[str, ...]
    gaps: tuple[Gap, ...] = field(default=())
    undrawn: tuple[Counted, ...] = ()  # they count, but what was drawn for them is not known
    unlisted: tuple[int, ...] = ()  # epochs begun whose list is not there, by which to check them

    @property
    def is_proven(self) -> bool:
        return not self.problems and not self.gaps


def check_ledger(
    run: RunInfo,
    stages: Mapping[int, StageEntry],
    orders: Mapping[int, OrderRecord] | None = None,
    read_order: _ReadOrder = lambda _record: None,
) -> LedgerCheck:
    """Follow the lineage back from the highest stage, and check what it covers.

    Args:
        stages: by number, each with all of its rows.
        orders: of a sampler, by epoch.
        read_order: returns the list that the sampler drew; None: it is not there.
    """
    problems: list[str] = []
    known = _Orders(run, orders or {}, read_order)
    lineage, claims = _lineage(stages, problems)
    counted = [
        Counted(stage=entry.stage, row=row)
        for entry in lineage
        for row in _by_epoch(entry.rows, entry)
    ]
    kept = {entry.stage: entry for entry in lineage}
    superseded = tuple(
        Counted(stage=stage, row=row)
        for stage in sorted(stages)
        for row in _superseded(stages[stage], kept.get(stage))
    )
    _check_steps(counted, kept, known, problems)
    gaps, complete, partial = _check_epochs(known, counted, kept)
    undrawn = tuple(_check_drawn(known, claims, complete, problems))
    return LedgerCheck(
        lineage=tuple(lineage),
        superseded=superseded,
        complete_epochs=complete,
        last_epoch_samples=partial,
        steps=counted[-1].row.last_step if counted else 0,
        problems=tuple(problems),
        gaps=tuple(gaps),
        undrawn=undrawn,
        unlisted=tuple(epoch for epoch in sorted(known.unlisted) if epoch >= complete),
    )


class _Orders:
    """What is known of the epochs' orders."""

    def __init__(
        self, run: RunInfo, records: Mapping[int, OrderRecord], read_order: _ReadOrder
    ) -> None:
        self.run = run
        self.records = records
        self.unlisted: set[int] = set()  # epochs that were asked for, and whose list is not there
        self.drawn = functools.lru_cache(maxsize=2)(
            lambda epoch: read_order(records[epoch]) if epoch in records else None
        )
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: permutation(run.seed, epoch, run.dataset_length or 0, run.shuffle)
        )

    def samples(self, epoch: int, entry: StageEntry) -> int:
        """Return how many samples count in an epoch."""
        record = self.records.get(epoch)
        if record is None:
            return entry.epoch_samples
        if self.run.drop_last and record.batches is None:
            return record.samples // entry.batch_size * entry.batch_size
        return record.samples

    def sum(self, row: Row) -> int | None:
        """Return the sum of the samples that should have been drawn for a row of one epoch.

        None: the list is not there by which a sampler's could be said.
        """
        start, stop = row.first_offset, row.last_offset
        if self.run.sampler is None:
            length = self.run.dataset_length or 0
            # Of a whole epoch the order does not matter.
            whole = start == 0 and stop >= length
            order = np.arange(length) if whole else self._permutation(row.epoch)
            return sum_of(row.epoch, order[start:stop])
        record = self.records.get(row.epoch)
        if record is not None and (start, stop) == (0, record.samples):
            return from_text(record.drawn)
        found = self.drawn(row.epoch)
        if found is None:
            self.unlisted.add(row.epoch)
            return None
        return sum_of(row.epoch, found.ids[start:stop])

    def steps(self, row: Row, entry: StageEntry) -> int | None:
        """Return how many batches a row's samples make; None: not known without the list."""
        record = self.records.get(row.epoch)
        if record is None or record.batches is None:
            return -(-(row.last_offset - row.first_offset) // entry.batch_size)
        if (row.first_offset, row.last_offset) == (0, record.samples):
            return record.batches
        found = self.drawn(row.epoch)
        if found is None or found.ends is None:
            return None
        ends = found.ends.tolist()
        return bisect_right(ends, row.last_offset) - bisect_right(ends, row.first_offset)


def _lineage(
    stages: Mapping[int, StageEntry], problems: list[str]
) -> tuple[list[StageEntry], list[_Claim]]:
    chain: list[StageEntry] = []
    claims: list[list[_Claim]] = []
    number: int | None = max(stages, default=None)
    upto: int | None = None  # None: all rows of the newest stage count
    offset: int | None = None  # of its epoch's samples up to there; None: not known
    drawn: int | None = None  # by the rows up to there; None: not known
    while number is not None:
        entry = stages.get(number)
        if entry is None:
            problems.append(
                f"stage {chain[-1].stage} began from stage {number}, step {upto}, of which the "
                f"ledger has nothing"
            )
            break
        claims.append(list(_claims(entry, upto, offset, drawn)))
        if upto is not None:
            rows = [
                start_of_row(row, entry, upto, offset)
                for row in _by_epoch(entry.rows, entry)
                if row.first_step <= upto
            ]
            entry = replace(entry, rows=tuple(rows))
        chain.append(entry)
        if entry.restored_stage is not None and entry.restored_stage >= entry.stage:
            problems.append(f"stage {number} says that it began from stage {entry.restored_stage}")
            break
        # A stage may have begun from a state that an earlier one restored and never moved.
        upto, offset = entry.restored_step, entry.restored_offset
        drawn = from_text(entry.restored_drawn)
        number = entry.restored_stage
    return chain[::-1], [claim for of_stage in claims[::-1] for claim in of_stage]


def _claims(
    entry: StageEntry, upto: int | None, offset: int | None, drawn: int | None
) -> Iterator[_Claim]:
    """Yield what the rows of `entry` say was drawn, `drawn` in all up to step `upto`."""
    expected = entry.restored_step + 1  # the first step of the row that follows
    for row in sorted(entry.rows, key=lambda each: each.first_step):
        if upto is not None and row.first_step > upto:
            return
        if row.first_step != expected:
            drawn = None  # rows are missing, which is reported elsewhere
        expected = row.last_step + 1
        parts = tuple(split_row(row, entry))
        if upto is None or row.last_step <= upto:
            yield _Claim(stage=entry.stage, rows=parts, drawn=from_text(row.drawn))
            drawn = subtract(drawn, from_text(row.drawn))
        else:  # the state had less of this row than was written of it later
            parts = tuple(start_of_row(part, entry, upto, offset) for part in parts
                          if part.first_step <= upto)  # fmt: skip
            yield _Claim(stage=entry.stage, rows=parts, drawn=drawn)


def _by_epoch(rows: Iterable[Row], entry: StageEntry) -> list[Row]:
    parts = [part for row in rows for part in split_row(row, entry)]
    return sorted(parts, key=lambda row: (row.first_step, row.last_step))


def _superseded(entry: StageEntry, kept: StageEntry | None) -> list[Row]:
    rows = _by_epoch(entry.rows, entry)
    if kept is None:
        return rows
    last = max((row.last_step for row in kept.rows), default=0)
    if not kept.rows:
        return rows
    return [row if row.first_step > last else replace(row, first_step=last + 1, drawn=None)
            for row in rows if row.last_step > last]  # fmt: skip


def _check_steps(
    counted: Sequence[Counted],
    kept: Mapping[int, StageEntry],
    orders: _Orders,
    problems: list[str],
) -> None:
    expected = 1
    for each in counted:
        row = each.row
        if row.first_step > expected:
            problems.append(
                f"steps {expected}-{row.first_step - 1} are missing before stage {each.stage}'s "
                f"step {row.first_step}"
            )
        elif row.first_step < expected:
            last = min(row.last_step, expected - 1)
            problems.append(f"steps {row.first_step}-{last} count twice, in stage {each.stage} too")
        entry = kept[each.stage]
        steps = orders.steps(row, entry)
        if steps not in (None, row.last_step - row.first_step + 1):
            record = orders.records.get(row.epoch)
            made = "the batch sampler"
            if record is None or record.batches is None:
                made = str(entry.batch_size)
            problems.append(
                f"stage {each.stage}, steps {row.first_step}-{row.last_step}: "
                f"{row.last_offset - row.first_offset} samples are {steps} batches of {made}"
            )
        expected = max(expected, row.last_step + 1)
    # A stage that began from a step that nothing covers.
    for entry in kept.values():
        if entry.restored_step >= expected:
            problems.append(
                f"steps {expected}-{entry.restored_step} are missing: stage {entry.stage} began "
                f"after them"
            )
            expected = entry.restored_step + 1


def _check_epochs(
    orders: _Orders, counted: Sequence[Counted], kept: Mapping[int, StageEntry]
) -> tuple[list[Gap], int, int]:
    """Return what is wrong, how many epochs are complete, and the samples of the next."""
    run = orders.run
    by_epoch: dict[int, list[Counted]] = {}
    for each in counted:
        by_epoch.setdefault(each.row.epoch, []).append(each)
    gaps: list[Gap] = []
    complete = partial = 0
    last_epoch = max(by_epoch, default=-1)
    for epoch in range(last_epoch + 1):
        rows = sorted(by_epoch.get(epoch, []), key=lambda each: each.row.first_offset)
        entry = kept[rows[-1].stage] if rows else next(iter(kept.values()))
        at = 0
        for each in rows:
            row = each.row
            if row.first_offset > at:
                gaps.append(Gap(epoch=epoch, start=at, stop=row.first_offset, times=0))
            elif row.first_offset < at:
                stop = min(at, row.last_offset)
                gaps.append(Gap(epoch=epoch, start=row.first_offset, stop=stop, times=2))
            at = max(at, row.last_offset)
        samples = orders.samples(epoch, entry)
        if at > samples and not run.drop_last:
            gaps.append(Gap(epoch=epoch, start=samples, stop=at, times=1))
        # A stage whose batches are larger than what was left has ended it without a step.
        following = by_epoch.get(epoch + 1)
        last = following[0].stage if following else max(kept)
        batch_size = max(
            each.batch_size
            for each in kept.values()
            if each is entry or entry.stage < each.stage <= last
        )
        if _reaches_end(orders, replace(entry, batch_size=batch_size), epoch, at):
            complete = epoch + 1 if complete == epoch else complete
        elif epoch < last_epoch:
            gaps.append(Gap(epoch=epoch, start=at, stop=samples, times=0))
        else:
            partial = at
    return gaps, complete, partial


def _check_drawn(
    orders: _Orders, claims: Iterable[_Claim], complete: int, problems: list[str]
) -> Iterator[Counted]:
    """Compare what was drawn with the order; yield rows for which it is not known.

    Args:
        complete: epochs that are; of a sampler whose list is not there only these can be compared.
    """
    if orders.run.dataset_length is None:
        return
    by_epoch: dict[int, list[_Claim]] = {}  # of epochs without a list
    for claim in claims:
        if claim.drawn is None:
            yield from (Counted(stage=claim.stage, row=row) for row in claim.rows)
            continue
        sums = [orders.sum(row) for row in claim.rows]
        if None in sums:
            by_epoch.setdefault(claim.rows[0].epoch, []).append(claim)
            continue
        expected: int | None = 0
        for each in sums:
            expected = add(expected, each)
        _compare(claim.stage, claim.rows, claim.drawn, expected, problems)
    for epoch, parts in by_epoch.items():
        rows = [row for claim in parts for row in claim.rows]
        record = orders.records.get(epoch)
        if record is None:
            problems.append(f"epoch {epoch}: nothing says what the sampler drew for it")
            continue
        # Rows that are left out below were yielded above: what was drawn for them is not known.
        is_whole = sum(row.last_offset - row.first_offset for row in rows) == record.samples
        if epoch < complete and is_whole:
            total: int | None = 0
            for claim in parts:
                total = add(total, claim.drawn)
            _compare(parts[-1].stage, rows, total, from_text(record.drawn), problems)


def _compare(
    stage: int, rows: Sequence[Row], drawn: int | None, expected: int | None, problems: list[str]
) -> None:
    if expected == drawn:
        return
    first, last = rows[0], rows[-1]
    epochs = f"epoch {first.epoch}"
    if last.epoch > first.epoch:
        epochs = f"epochs {first.epoch}-{last.epoch}"
    problems.append(
        f"stage {stage}, {epochs}, steps {first.first_step}-{last.last_step}: the "
        f"samples that trainers drew are not those of the order: their sum is "
        f"{to_text(drawn)}, expected {to_text(expected)}; did a trainer have "
        f"another seed, other data or another's share?"
    )


def _reaches_end(orders: _Orders, entry: StageEntry, epoch: int, offset: int) -> bool:
    run, record = orders.run, orders.records.get(epoch)
    length = run.dataset_length if record is None else record.samples
    is_cut = record is None or record.batches is None
    if run.drop_last and length is not None and is_cut:
        return length - offset < entry.batch_size  # what is left is no whole batch
    return offset >= orders.samples(epoch, entry)
