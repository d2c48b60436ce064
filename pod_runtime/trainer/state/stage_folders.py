"""The folders of both checkpoint formats: one per stage; which of them may be removed."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from pod_runtime.trainer.state.checkpoint_files import MANIFEST
from pod_runtime.trainer.state.storage import Storage

logger = logging.getLogger(__name__)

_STAGE = re.compile(r"stage_(\d{8,})\Z")


class CheckpointFolder(Protocol):
    """The folder of one checkpoint."""

    @property
    def stage(self) -> int: ...

    @property
    def folder(self) -> str:
        """Below the path of the checkpoints; its first part is the stage's folder."""


def stage_folders(storage: Storage) -> Iterator[tuple[int, str]]:
    """Yield each stage that has a folder, and the folder's name."""
    for name in storage.folders(""):
        match = _STAGE.match(name)
        if match:
            yield int(match[1]), name


def highest_stage(storage: Storage) -> int:
    """Return the highest stage that has a folder, torn ones included; 0 if none has."""
    return max((stage for stage, _name in stage_folders(storage)), default=0)


def remove_older(
    storage: Storage,
    older: Iterable[CheckpointFolder],
    keep: int,
    is_ours: Callable[[CheckpointFolder], bool] = lambda _folder: True,
) -> None:
    """Remove what is older than an intact checkpoint, except the last `keep` - 1 whole ones.

    Args:
        older: oldest first.
        is_ours: asked for whole ones; those of other trainings stay, and do not count.

    Raises:
        OSError: the storage cannot be listed. A failed removal is only logged.
    """
    folders = list(older)
    whole = [each for each in folders if MANIFEST in storage.files(each.folder)]
    ours = [each.folder for each in whole if is_ours(each)]
    stay = {each.folder for each in whole} - set(ours)
    stay.update(ours[-(keep - 1) :] if keep > 1 else ())
    for each in folders:
        if each.folder not in stay:
            remove_checkpoint(storage, each)


def remove_checkpoint(storage: Storage, each: CheckpointFolder) -> None:
    """Remove one, whole or torn, and its stage's folder with the last; a failure is logged."""
    try:
        storage.remove(f"{each.folder}/{MANIFEST}")  # first: half a folder is torn
        storage.remove(each.folder)
        stage_folder = each.folder.partition("/")[0]
        if not storage.folders(stage_folder) and each.stage < highest_stage(storage):
            storage.remove(stage_folder)
    except OSError as error:
        logger.warning("%s/%s stays: %s", storage.name, each.folder, error)
