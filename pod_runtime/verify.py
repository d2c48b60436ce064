"""Prove that each sample of each epoch counted exactly once, or say which did not.

    python -m pod_runtime.verify RUN_DIR       the whole ledger, superseded work included
    python -m pod_runtime.verify CHECKPOINT    the lineage of the newest intact checkpoint

Exit codes: 0 proven, 1 not, 2 nothing that could be checked.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from job_server.api.wire import encode
from pod_runtime.trainer.errors import ElasticError
from pod_runtime.trainer.progress.batches import permutation
from pod_runtime.trainer.progress.ledger import LEDGER_NAME, RunInfo, StageEntry, read_content
from pod_runtime.trainer.progress.ledger_check import Gap, LedgerCheck, check_ledger
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
        run, stages, damaged = read_all(args.path)
    except NothingToVerifyError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    result = check_ledger(run, stages)
    result = replace(result, problems=(*damaged, *result.problems))
    if args.json:
        print(json.dumps(_as_json(run, result), indent=1))
    else:
        print("\n".join([*_as_text(args.path, run, result), *_best(args.path)]))
    return 0 if result.is_proven else 1


def read_ledger(path: str) -> tuple[RunInfo, Mapping[int, StageEntry]]:
    """Return the run and its stages, as `read_all` does."""
    run, stages, _damaged = read_all(path)
    return run, stages


def read_all(path: str) -> tuple[RunInfo, Mapping[int, StageEntry], tuple[str, ...]]:
    """Return the run and its stages, from a run folder or from the newest intact checkpoint.

    The third value names lines of a run folder's ledger that cannot be read; the others can be
    checked all the same.

    Raises:
        NothingToVerifyError: there is neither, or it cannot be read.
    """
    local = Path(path)
    for file in (local, local / LEDGER_NAME):
        if file.is_file():
            return _from_file(file)
    if "://" not in path and not local.exists():
        raise NothingToVerifyError(f"{path}: does not exist")
    try:
        found = CheckpointStore(open_storage(path)).load_newest()
    except (ElasticError, OSError) as error:
        raise NothingToVerifyError(str(error)) from error
    if found is None:
        raise NothingToVerifyError(
            f"{path}: neither a run folder (no {LEDGER_NAME}) nor a checkpoint path (no folder "
            f"stage_*/step_* with a manifest)"
        )
    status = found[0].status
    return status.run, {entry.stage: entry for entry in status.ledger}, ()


def _from_file(file: Path) -> tuple[RunInfo, Mapping[int, StageEntry], tuple[str, ...]]:
    try:
        content = read_content(file)
    except OSError as error:
        raise NothingToVerifyError(f"{file}: {error.strerror or error}") from error
    if content.run is None or not content.stages:
        why = "; ".join(content.damaged) or f"{file}: no stage has begun yet"
        raise NothingToVerifyError(why)
    return (
        content.run,
        content.stages,
        tuple(
            f"{text}; the rest is judged without this line: delete it if nothing else is wrong"
            for text in content.damaged
        ),
    )


def _as_text(path: str, run: RunInfo, result: LedgerCheck) -> list[str]:
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
    samples = _samples(run)
    if result.complete_epochs:
        last = result.complete_epochs - 1
        lines.append(f"epochs 0-{last}: {samples}" if last else f"epoch 0: {samples}")
    if result.last_epoch_samples:
        lines.append(
            f"epoch {result.complete_epochs}: {result.last_epoch_samples} so far"
            + (f" of {run.dataset_length}" if run.dataset_length else "")
        )
    lines += _unknown_draws(result)
    lines += [f"NOT PROVEN: {problem}" for problem in result.problems]
    lines += [f"NOT PROVEN: {_describe(run, gap)}" for gap in result.gaps]
    if result.is_proven:
        lines.append(f"OK: {result.steps} steps, each counted once")
    return lines


def _best(path: str) -> list[str]:
    """Name the best checkpoints of a checkpoint path."""
    try:
        found = read_best(open_storage(path))
    except (ElasticError, OSError) as error:
        return [f"best checkpoints: cannot be read: {error}"]
    return [
        f"best {head.get('metric')}: {head.get('value')} at step {head.get('step')}, epoch "
        f"{head.get('epoch')}: {path}/{folder}"
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


def _samples(run: RunInfo) -> str:
    if run.dataset_length is None:
        return "every step counted once; samples of a stream are at-least-once"
    if run.drop_last:
        return f"samples of {run.dataset_length} counted once, but for each last batch (drop_last)"
    return f"each of {run.dataset_length} samples counted exactly once"


def _describe(run: RunInfo, gap: Gap) -> str:
    times = "never" if gap.times == 0 else "more than once" if gap.times > 1 else "too often"
    text = f"epoch {gap.epoch}: {gap.stop - gap.start} samples count {times}"
    ids = _ids(run, gap)
    if ids:
        more = ", ..." if gap.stop - gap.start > len(ids) else ""
        text += f": ids {', '.join(map(str, ids))}{more}"
    return text


def _ids(run: RunInfo, gap: Gap) -> list[int]:
    if run.dataset_length is None:
        return []
    order = permutation(run.seed, gap.epoch, run.dataset_length, run.shuffle)
    found: list[int] = order[gap.start : min(gap.stop, gap.start + _SHOWN_IDS)].tolist()
    return found


def _as_json(run: RunInfo, result: LedgerCheck) -> dict[str, Any]:
    return {
        "proven": result.is_proven,
        "run": encode(run),
        "complete_epochs": result.complete_epochs,
        "last_epoch_samples": result.last_epoch_samples,
        "steps": result.steps,
        "lineage": encode(result.lineage),
        "superseded": encode(result.superseded),
        "undrawn": encode(result.undrawn),
        "problems": [*result.problems, *(_describe(run, gap) for gap in result.gaps)],
    }


if __name__ == "__main__":
    raise SystemExit(main())
