"""Prove by model and ledger that each sample of a training counted once."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np

from pod_runtime.verify import main as verify


def check_counts(folder: Path) -> None:
    """Every sample has counted as many times as there were epochs, of which the ledger tells.

    Args:
        folder: where tests/e2e/count_train.py has left its samples' counts, ledger and checkpoint.
    """
    ledger = _proof(folder / "log" / "run")
    if (folder / "checkpoint").exists():  # else the training has no path for them
        _proof(folder / "checkpoint")
    found = re.search(r"^epochs? (?:0-)?(\d+): \D", ledger, re.MULTILINE)  # the whole ones
    assert found, ledger
    epochs = int(found[1]) + 1
    seen = np.load(folder / "seen.npy")
    assert np.abs(seen - epochs).max() < 1e-6, (epochs, seen)


def _proof(path: Path) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = verify([str(path)])
    assert code == 0, said.getvalue()
    return said.getvalue()
