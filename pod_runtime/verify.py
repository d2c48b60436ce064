"""Prove that each sample of each epoch counted exactly once, or say which did not.

    python -m pod_runtime.verify RUN_DIR       the whole ledger, superseded work included
    python -m pod_runtime.verify CHECKPOINT    the lineage of the newest intact checkpoint

Exit codes: 0 proven, 1 not, 2 nothing that could be checked.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from job_server.api.wire import encode
from pod_runtime.trainer.epochs.epoch_store import EpochStore
from pod_runtime.trainer.errors import ElasticError
from pod_runtime.trainer.progress.batches import permutation
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord
from pod_runtime.trainer.progress.ledger import (
    LEDGER_NAME,
    RunInfo,
    StageEntry,
    read_content,
    split_row,
)
from pod_runtime.trainer.progress.ledger_check import Gap, LedgerCheck, check_ledger
from pod_runtime.trainer.progress.order_files import read_order
from pod_runtime.trainer.state.best_checkpoints import read_best
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.storage import open_storage

_SHOWN_IDS = 10


class NothingToVerifyError(Exception):
    """The path has no ledger; the text says what was expected there."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verify", description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="a run folder, a ledger.jsonl, or a checkpoint path or URL")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    try:
        account = read_account(args.path)
    except NothingToVerifyError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    result = check_account(account)
    if args.json:
        print(json.dumps(_as_json(account, result), indent=1))
    else:
        print("\n".join([*_as_text(args.path, account, result), *_best(args.path)]))
    return 0 if result.is_proven else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAccount:
    """What a training says about itself."""

    run: RunInfo
    stages: Mapping[int, StageEntry]
    orders: Mapping[int, OrderRecord]  # what a sampler drew, by epoch
    damaged: tuple[str, ...] = ()  # lines of a ledger that cannot be read
    run_dir: Path | None = None  # where a sampler's lists are; None: a checkpoint has none

    def read_order(self, record: OrderRecord) -> EpochOrder | None:
        return None if self.run_dir is None else read_order(self.run_dir, record)


def check_account(account: LedgerAccount) -> LedgerCheck:
    """Check what an account says."""
    result = check_ledger(account.run, account.stages, account.orders, account.read_order)
    return replace(result, problems=(*account.damaged, *result.problems))


def read_ledger(path: str) -> tuple[RunInfo, Mapping[int, StageEntry]]:
    """Return the run and its stages, as `read_account` does."""
    account = read_account(path)
    return account.run, account.stages


def read_account(path: str) -> LedgerAccount:
    """Return what a run folder or the newest intact checkpoint says.

    Raises:
        NothingToVerifyError: there is neither, or it cannot be read.
    """
    local = Path(path)
    try:
        for file in (local, local / LEDGER_NAME):
            if file.is_file():
                return _from_file(file)
        if "://" not in path and not local.exists():
            raise NothingToVerifyError(f"{path}: does not exist")
    except OSError as error:  # in a folder that this user may not enter, say
        raise NothingToVerifyError(f"{path}: {error.strerror}") from error
    try:
        storage = open_storage(path)
        found = CheckpointStore(storage).load_newest()
        is_of_epochs = found is None and bool(EpochStore(storage).found())
    except (ElasticError, OSError) as error:
        raise NothingToVerifyError(str(error)) from error
    if is_of_epochs:
        raise NothingToVerifyError(
            f"{path}: checkpoints by epoch (ElasticCheckpoint, save_checkpoint), which do not say "
            f"what samples were drawn: only a training by elastic.Loop can be verified"
        )
    if found is None:
        raise NothingToVerifyError(
            f"{path}: neither a run folder (no {LEDGER_NAME}) nor a checkpoint path (no folder "
            f"stage_*/step_* with a manifest)"
        )
    status = found[0].status
    return LedgerAccount(
        run=status.run,
        stages={entry.stage: entry for entry in status.ledger},
        orders={record.epoch: record for record in status.orders},
    )


def _from_file(file: Path) -> LedgerAccount:
    try:
        content = read_content(file)
    except OSError as error:
        raise NothingToVerifyError(f"{file}: {error.strerror or error}") from error
    if content.run is None or not content.stages:
        why = "; ".join(content.damaged) or f"{file}: no stage has begun yet"
        raise NothingToVerifyError(why)
    return LedgerAccount(
        run=content.run,
        stages=content.stages,
        orders=content.orders,
        damaged=tuple(
            f"{text}; the rest is judged without this line: delete it if nothing else is wrong"
            for text in content.damaged
        ),
        run_dir=file.parent,
    )


def _as_text(path: str, account: LedgerAccount, result: LedgerCheck) -> list[str]:
    run = account.run
    chain = " -> ".join(str(entry.stage) for entry in result.lineage)
    lines = [f"{path}: lineage of stages {chain}"]
    for entry in result.lineage:
        steps = "no step"
        if entry.rows:
            steps = f"steps {entry.rows[0].first_step}-{entry.rows[-1].last_step}"
        origin = "afresh"
        if entry.restored_stage is not None:
            origin = f"from stage {entry.restored_stage}, step {entry.restored_step}"
        lines.append(
            f"  stage {entry.stage}: {steps}, {entry.world_size} trainers, "
            f"batch {entry.batch_size}, promise {entry.promise or 'rounding'}, began {origin}"
        )
    for each in result.superseded:
        row = each.row
        lines.append(
            f"  superseded: stage {each.stage}, steps {row.first_step}-{row.last_step} "
            f"of epoch {row.epoch} (done again, do not count)"
        )
    if result.complete_epochs:
        samples = _samples(account, result.complete_epochs)
        last = result.complete_epochs - 1
        lines.append(f"epochs 0-{last}: {samples}" if last else f"epoch 0: {samples}")
    if result.last_epoch_samples:
        lines.append(
            f"epoch {result.complete_epochs}: {result.last_epoch_samples} so far"
            + _of_how_many(account, result.complete_epochs)
        )
    if run.dataset_length is None:
        samples_read = sum(
            row.last_offset - row.first_offset
            for entry in result.lineage
            for joined in entry.rows
            for row in split_row(joined, entry)
        )
        lines.append(
            f"a stream: {samples_read} samples read, at least once each; which ones is not proven"
        )
    lines += _unknown_draws(result)
    lines += [
        f"epoch {epoch}: the list of what {run.sampler} drew is not here, so samples are compared "
        f"by their sum when the epoch is over (a run folder has the list)"
        for epoch in result.unlisted
    ]
    lines += [f"NOT PROVEN: {problem}" for problem in result.problems]
    lines += [f"NOT PROVEN: {_describe(account, gap)}" for gap in result.gaps]
    if result.is_proven:
        lines.append(f"OK: {result.steps} steps, each counted once")
    return lines


def _best(path: str) -> list[str]:
    """Name the best checkpoints of a checkpoint path."""
    try:
        storage = open_storage(path)
        found = read_best(storage)
    except (ElasticError, OSError) as error:
        return [f"best checkpoints: cannot be read: {error}"]
    return [
        f"best {head.get('metric')}: {head.get('value')} at step {head.get('step')}, epoch "
        f"{head.get('epoch')}: {storage.name}/{folder}"
        for folder, head in found
    ]


def _unknown_draws(result: LedgerCheck) -> list[str]:
    spans: list[list[int]] = []  # stage, first step, last step
    for each in result.undrawn:
        if spans and spans[-1][0] == each.stage and spans[-1][2] + 1 == each.row.first_step:
            spans[-1][2] = each.row.last_step
        else:
            spans.append([each.stage, each.row.first_step, each.row.last_step])
    return [
        f"stage {stage}, steps {first}-{last}: which samples were drawn was not written down (by "
        f"an earlier version, or with a reader of the script's own); the order is taken on trust"
        for stage, first, last in spans
    ]


def _samples(account: LedgerAccount, epochs: int) -> str:
    run = account.run
    if run.dataset_length is None:
        return "every step counted once; samples of a stream are at-least-once"
    if run.sampler is not None:
        counts = [account.orders[epoch].samples for epoch in range(epochs)]
        few, many = min(counts), max(counts)
        text = f"{few}" if few == many else f"{few} to {many}"
        return (
            f"each of {text} samples counted exactly as often as {run.sampler} drew it"
            + (", but for each last batch (drop_last)" if run.drop_last else "")
        )  # fmt: skip
    if run.drop_last:
        return f"samples of {run.dataset_length} counted once, but for each last batch (drop_last)"
    return f"each of {run.dataset_length} samples counted exactly once"


def _of_how_many(account: LedgerAccount, epoch: int) -> str:
    if account.run.sampler is not None:
        record = account.orders.get(epoch)
        return "" if record is None else f" of {record.samples} that {account.run.sampler} drew"
    return f" of {account.run.dataset_length}" if account.run.dataset_length else ""


def _describe(account: LedgerAccount, gap: Gap) -> str:
    times = "never" if gap.times == 0 else "more than once" if gap.times > 1 else "too often"
    text = f"epoch {gap.epoch}: {gap.stop - gap.start} samples count {times}"
    ids = _ids(account, gap)
    if ids:
        more = ", ..." if gap.stop - gap.start > len(ids) else ""
        text += f": ids {', '.join(map(str, ids))}{more}"
    return text


def _ids(account: LedgerAccount, gap: Gap) -> list[int]:
    run = account.run
    if run.dataset_length is None:
        return []
    if run.sampler is None:
        order = permutation(run.seed, gap.epoch, run.dataset_length, run.shuffle)
    else:
        record = account.orders.get(gap.epoch)
        drawn = None if record is None else account.read_order(record)
        if drawn is None:
            return []
        order = drawn.ids
    found: list[int] = order[gap.start : min(gap.stop, gap.start + _SHOWN_IDS)].tolist()
    return found


def _as_json(account: LedgerAccount, result: LedgerCheck) -> dict[str, Any]:
    return {
        "proven": result.is_proven,
        "run": encode(account.run),
        "orders": encode(tuple(account.orders.values())),
        "complete_epochs": result.complete_epochs,
        "last_epoch_samples": result.last_epoch_samples,
        "steps": result.steps,
        "lineage": encode(result.lineage),
        "superseded": encode(result.superseded),
        "undrawn": encode(result.undrawn),
        "problems": [*result.problems, *(_describe(account, gap) for gap in result.gaps)],
    }


if __name__ == "__main__":
    raise SystemExit(main())
