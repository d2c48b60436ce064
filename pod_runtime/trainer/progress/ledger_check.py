"""Prove from a ledger that each sample of each epoch counted exactly once. Pure.

A state's lineage is the chain of stages that led to it: the newest stage began from a step of an
earlier one, whose later rows are superseded, and so on back to a fresh start. What counts is what
the rows of this chain cover; it has to be every step once, and every place of every epoch's order
once. The order is a permutation, so places stand for samples; and the sums of what trainers drew
show that they drew what the order says.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pod_runtime.trainer.progress.batches import Ids, permutation
from pod_runtime.trainer.progress.drawn import add, from_text, hash_samples, subtract, to_text
from pod_runtime.trainer.progress.ledger import Row, RunInfo, StageEntry, split_row, start_of_row

_CHUNK = 1 << 20  # samples that are hashed at once


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

    @property
    def is_proven(self) -> bool:
        return not self.problems and not self.gaps


def check_ledger(run: RunInfo, stages: Mapping[int, StageEntry]) -> LedgerCheck:
    """Follow the lineage back from the highest stage, and check what it covers.

    Args:
        stages: by number, each with all of its rows.
    """
    problems: list[str] = []
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
    _check_steps(counted, kept, problems)
    gaps, complete, partial = _check_epochs(run, counted, kept)
    undrawn = tuple(_check_drawn(run, claims, problems))
    return LedgerCheck(
        lineage=tuple(lineage),
        superseded=superseded,
        complete_epochs=complete,
        last_epoch_samples=partial,
        steps=counted[-1].row.last_step if counted else 0,
        problems=tuple(problems),
        gaps=tuple(gaps),
        undrawn=undrawn,
    )


def _lineage(
    stages: Mapping[int, StageEntry], problems: list[str]
) -> tuple[list[StageEntry], list[_Claim]]:
    chain: list[StageEntry] = []
    claims: list[list[_Claim]] = []
    number: int | None = max(stages, default=None)
    upto: int | None = None  # None: all rows of the newest stage count
    drawn: int | None = None  # by the rows up to there; None: not known
    while number is not None:
        entry = stages.get(number)
        if entry is None:
            problems.append(
                f"stage {chain[-1].stage} began from stage {number}, step {upto}, of which the "
                f"ledger has nothing"
            )
            break
        claims.append(list(_claims(entry, upto, drawn)))
        if upto is not None:
            rows = [
                start_of_row(row, entry, upto)
                for row in _by_epoch(entry.rows, entry)
                if row.first_step <= upto
            ]
            entry = replace(entry, rows=tuple(rows))
        chain.append(entry)
        if entry.restored_stage is not None and entry.restored_stage >= entry.stage:
            problems.append(f"stage {number} says that it began from stage {entry.restored_stage}")
            break
        # A stage may have begun from a state that an earlier one restored and never moved.
        upto, drawn = entry.restored_step, from_text(entry.restored_drawn)
        number = entry.restored_stage
    return chain[::-1], [claim for of_stage in claims[::-1] for claim in of_stage]


def _claims(entry: StageEntry, upto: int | None, drawn: int | None) -> Iterator[_Claim]:
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
            parts = tuple(start_of_row(part, entry, upto) for part in parts
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
    counted: Sequence[Counted], kept: Mapping[int, StageEntry], problems: list[str]
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
        batch = kept[each.stage].batch_size
        steps = -(-(row.last_offset - row.first_offset) // batch)
        if steps != row.last_step - row.first_step + 1:
            problems.append(
                f"stage {each.stage}, steps {row.first_step}-{row.last_step}: "
                f"{row.last_offset - row.first_offset} samples are {steps} batches of {batch}"
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
    run: RunInfo, counted: Sequence[Counted], kept: Mapping[int, StageEntry]
) -> tuple[list[Gap], int, int]:
    """Return what is wrong, how many epochs are complete, and the samples of the next."""
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
        if at > entry.epoch_samples and not run.drop_last:
            gaps.append(Gap(epoch=epoch, start=entry.epoch_samples, stop=at, times=1))
        if _reaches_end(run, entry, at):
            complete = epoch + 1 if complete == epoch else complete
        elif epoch < last_epoch:
            gaps.append(Gap(epoch=epoch, start=at, stop=entry.epoch_samples, times=0))
        else:
            partial = at
    return gaps, complete, partial


def _check_drawn(run: RunInfo, claims: Iterable[_Claim], problems: list[str]) -> Iterator[Counted]:
    """Compare what was drawn with the order; yield rows for which it is not known."""
    if run.dataset_length is None:
        return
    order = functools.lru_cache(maxsize=2)(
        lambda epoch: permutation(run.seed, epoch, run.dataset_length or 0, run.shuffle)
    )
    for claim in claims:
        if claim.drawn is None:
            yield from (Counted(stage=claim.stage, row=row) for row in claim.rows)
            continue
        expected = add(sum(_expected(run.dataset_length, row, order) for row in claim.rows), 0)
        if expected != claim.drawn:
            first, last = claim.rows[0], claim.rows[-1]
            epochs = f"epoch {first.epoch}"
            if last.epoch > first.epoch:
                epochs = f"epochs {first.epoch}-{last.epoch}"
            problems.append(
                f"stage {claim.stage}, {epochs}, steps {first.first_step}-{last.last_step}: the "
                f"samples that trainers drew are not those of the order: their sum is "
                f"{to_text(claim.drawn)}, expected {to_text(expected)}; did a trainer have "
                f"another seed, other data or another's share?"
            )


def _expected(length: int, row: Row, order: Callable[[int], Ids]) -> int:
    """Return the sum of the samples that should have been drawn for a row of one epoch."""
    start, stop = row.first_offset, min(row.last_offset, length)
    # Of a whole epoch the order does not matter.
    whole = None if stop - start == length else order(row.epoch)
    total = 0
    for at in range(start, stop, _CHUNK):
        end = min(at + _CHUNK, stop)
        total += hash_samples(row.epoch, np.arange(at, end) if whole is None else whole[at:end])
    return total


def _reaches_end(run: RunInfo, entry: StageEntry, offset: int) -> bool:
    if run.drop_last and run.dataset_length is not None:
        return run.dataset_length - offset < entry.batch_size  # what is left is no whole batch
    return offset >= entry.epoch_samples
