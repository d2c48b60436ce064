"""Delete the folders of runs that are long over: those of `edl run`, in its --log_dir."""

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pod_runtime.shim_wire import holds_state

logger = logging.getLogger(__name__)

KEEP_RUNS = 200
KEEP_DAYS = 30.0
_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4,8}")  # as `run.read_config` names them; 4 before


def drop_old_runs(log_dir: Path, keep: int, now: float) -> list[Path]:
    """Delete all but the newest `keep` runs where nothing was written for 30 days; return those.

    A run that holds a training's state stays, and so does what cannot be deleted.

    Args:
        now: seconds since 1970.
    """
    try:
        runs = sorted(path for path in log_dir.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    dropped = []
    for path in runs[: max(0, len(runs) - keep)]:
        try:
            if (
                path.is_symlink()
                or holds_state(path)
                or _written_at(path) > now - 86400 * KEEP_DAYS
            ):
                continue
            shutil.rmtree(path)
        except OSError as error:  # another user's, say
            logger.warning("%s: this folder of an old run stays: %s", path, error)
            continue
        dropped.append(path)
    return dropped


def _written_at(run: Path) -> float:
    return max(path.stat().st_mtime for path in _files(run))


def _files(run: Path) -> Iterator[Path]:
    """Yield what a run that goes on writes to every now and then."""
    yield run
    yield from (path for path in run.iterdir() if path.is_file())
    yield from run.glob("run/ledger.jsonl")
