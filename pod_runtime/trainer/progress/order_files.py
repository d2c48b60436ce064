"""Keep the orders that a sampler drew beside the ledger, one file an epoch, for `edl verify`."""

import io
import logging
import os
import zipfile
from pathlib import Path

import numpy as np

from pod_runtime.trainer.progress.batches import Ids
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord, make_order

logger = logging.getLogger(__name__)

FOLDER = "orders"
_MOST_WAITING = 4  # orders that are kept in memory while the disk is full


class OrderFiles:
    """`RUN_DIR/orders/`, written by rank 0; a file is there whole, or not at all.

    Where they cannot be written, training goes on; the newest ones are tried again. Of an epoch
    without a file the state has the sums, which prove the epoch as a whole.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._waiting: list[EpochOrder] = []
        self._is_behind = False  # the newest attempt to write has failed

    def put(self, order: EpochOrder) -> None:
        """Write an order, unless it is there."""
        self._waiting = [*self._waiting, order][-_MOST_WAITING:]
        self.settle()

    def settle(self) -> None:
        """Write what waits, as far as that is possible now."""
        while self._waiting:
            path = self._folder / _name(self._waiting[0].record)
            try:
                _write(path, self._waiting[0])
            except OSError as error:
                if not self._is_behind:
                    logger.error(
                        "%s cannot be written: %s; training goes on, and it is tried again",
                        path, error.strerror or error,
                    )  # fmt: skip
                self._is_behind = True
                return
            del self._waiting[0]
            self._is_behind = False


def read_order(run_dir: Path, record: OrderRecord) -> EpochOrder | None:
    """Return the order of which `record` speaks; None: no whole file of it is there."""
    try:
        data = io.BytesIO((run_dir / FOLDER / _name(record)).read_bytes())
        with np.load(data, allow_pickle=False) as found:
            ids = found["ids"].astype(np.int64)
            ends = np.cumsum(found["sizes"].astype(np.int64)) if "sizes" in found.files else None
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if ids.ndim != 1:
        return None
    order = make_order(record.epoch, ids, ends)
    return order if order.record == record else None


def _name(record: OrderRecord) -> str:
    return f"{record.epoch:06d}-{record.digest}.npz"


def _write(path: Path, order: EpochOrder) -> None:
    if path.exists():
        return
    arrays = {"ids": _small(order.ids)}
    if order.ends is not None:
        arrays["sizes"] = _small(np.diff(order.ends, prepend=0))
    data = io.BytesIO()
    np.savez(data, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for options
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(data.getbuffer())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _small(values: Ids) -> np.ndarray:
    """Return whole numbers from 0 on in the smallest type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max())))
