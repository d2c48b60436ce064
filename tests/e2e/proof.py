"""Prove by model and ledger that each sample of a training counted once."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np


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
    proof = subprocess.run(
        [sys.executable, "-m", "pod_runtime.verify", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert proof.returncode == 0, proof.stdout + proof.stderr
    return proof.stdout
