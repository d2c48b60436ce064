"""Best checkpoints: one for each metric, in folders beside those from which a training goes on.

PATH/best/METRIC/stage_%08d/step_%010d/...    as any checkpoint; its manifest says metric and value

Nothing looks for the newest state there, and retention leaves them alone.
"""

from collections.abc import Mapping
from typing import Any

from pod_runtime.trainer.progress.best import FOLDER, BestCheckpoint, metric_folder
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.checkpoint_files import read_head
from pod_runtime.trainer.state.storage import Storage, open_storage


def best_store(store: CheckpointStore, best: BestCheckpoint) -> CheckpointStore:
    """Return where the best checkpoint of a metric goes; an older one is removed by it."""
    folder, owner = metric_folder(best.metric), store.owner

    def commit(path: str, content: bytes) -> None:
        assert owner is not None
        owner.commit(f"{folder}/{path}", content)

    return CheckpointStore(
        open_storage(f"{store.storage.name}/{folder}"),
        keep=1,
        commit=None if owner is None else commit,
        head={
            "metric": best.metric,
            "mode": best.mode,
            "value": best.value,
            "epoch": best.epoch,
        },
    )


def read_best(storage: Storage) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the best checkpoints below a path: the folder of each, and its manifest's head.

    Raises:
        OSError: as the storage does.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for metric in storage.folders(FOLDER):
        path = metric_folder(metric)
        newest = CheckpointStore(open_storage(f"{storage.name}/{path}")).newest_whole()
        if newest is not None:
            folder = f"{path}/{newest.folder}"
            found.append((folder, read_head(storage, folder)))
    return found
