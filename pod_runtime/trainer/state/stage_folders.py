"""Find, read and remove checkpoints of either format: each has a folder below its stage's."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pod_runtime.trainer.errors import CheckpointError, StateError
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


F = TypeVar("F", bound=CheckpointFolder)
T = TypeVar("T")


def stage_folders(storage: Storage) -> Iterator[tuple[int, str]]:
    """Yield each stage that has a folder, and the folder's name."""
    for name in storage.folders(""):
        match = _STAGE.match(name)
        if match:
            yield int(match[1]), name


def highest_stage(storage: Storage) -> int:
    """Return the highest stage that has a folder, torn ones included; 0 if none has."""
    return max((stage for stage, _name in stage_folders(storage)), default=0)


def newest_intact(
    storage: Storage, find: Callable[[], Sequence[F]], load: Callable[[F], T]
) -> tuple[T, F] | None:
    """Return the newest intact checkpoint and its folder; None if there is none.

    Those that are refused on the way are logged with the reason. If all are refused, it looks
    again: a writer that is still alive may have replaced them meanwhile.

    Args:
        find: returns the folders, whole or torn, oldest first.
        load: reads and verifies one; raises FileNotFoundError(MANIFEST) where it is torn.

    Raises:
        CheckpointError: there are complete checkpoints, and none is intact: to start afresh
            now would throw the training away silently.
    """
    folders = find()
    while True:
        refused = []
        for each in reversed(folders):
            try:
                state = load(each)
            except (CheckpointError, StateError, OSError, ValueError) as error:
                if isinstance(error, FileNotFoundError) and str(error) == MANIFEST:
                    logger.info("checkpoint %s is not complete; skipped", each.folder)
                    continue
                refused.append(f"{each.folder}: {error}")
                logger.error("checkpoint %s refused: %s", each.folder, error)
            else:
                if refused:
                    logger.warning("falling back to checkpoint %s, which is intact", each.folder)
                return state, each
        if not refused:
            return None
        before, folders = folders, find()
        if folders == before:  # else a writer that is still alive has cleaned up meanwhile
            raise CheckpointError(
                f"{storage.name}: none of its checkpoints is intact ({'; '.join(refused)}); "
                f"repair it, or start afresh with another checkpoint path"
            )


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
