"""Find, read and remove checkpoints of either format: each has a folder below its stage's."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pod_runtime.trainer.errors import CheckpointError, StateError
from pod_runtime.trainer.state.checkpoint_files import MANIFEST
from pod_runtime.trainer.state.storage import Storage

logger = logging.getLogger(__name__)

_STAGE = re.compile(r"stage_(\d{8,})\Z")
_AWAY_S, _AGAIN_S = 60.0, 2.0  # for which what cannot be read is tried again, and how often
# Errors of a file or its rights, which will not change by themselves.
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


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

    One that cannot be read for a moment, as its object store or file server is away, is no damaged
    one: to take an older one at once would throw away what was trained since. It is tried again.

    Args:
        find: returns the folders, whole or torn, oldest first.
        load: reads and verifies one; raises FileNotFoundError(MANIFEST) where it is torn.

    Raises:
        CheckpointError: there are complete checkpoints, and none is intact, or can be read: to
            start afresh now would throw the training away silently.
    """
    folders, patience = find(), _Patience()
    while True:
        refused, is_away = [], False
        for each in reversed(folders):
            try:
                state = patience.load(each, load)
            except (CheckpointError, StateError, OSError, ValueError) as error:
                if isinstance(error, FileNotFoundError) and str(error) == MANIFEST:
                    logger.info("checkpoint %s is not complete; skipped", each.folder)
                    continue
                refused.append(f"{each.folder}: {error}")
                is_away |= isinstance(error, OSError)
                logger.error("checkpoint %s refused: %s", each.folder, error)
            else:
                if refused:
                    logger.warning("falling back to checkpoint %s, which is intact", each.folder)
                return state, each
        if not refused:
            return None
        before, folders = folders, find()
        if folders == before:  # else a writer that is still alive has cleaned up meanwhile
            what, remedy = "is intact", "repair it"
            if is_away:
                what, remedy = "can be read", "bring it back"
            raise CheckpointError(
                f"{storage.name}: none of its checkpoints {what} ({'; '.join(refused)}); "
                f"{remedy}, or start afresh with another checkpoint path"
            )


class _Patience:
    """Waits for checkpoints that cannot be read: for all of them together no longer than once."""

    def __init__(self) -> None:
        self._until: float | None = None  # by time.monotonic(); None: all could be read so far

    def load(self, each: F, load: Callable[[F], T]) -> T:
        """Return what `load(each)` does, which is called again as long as it may still succeed."""
        has_told = False
        while True:
            try:
                return load(each)
            except _LASTING:
                raise
            except OSError as error:
                now = time.monotonic()
                self._until = now + _AWAY_S if self._until is None else self._until
                if now >= self._until:
                    raise
                if not has_told:
                    logger.warning(
                        "checkpoint %s cannot be read, trying again for %g s: %s",
                        each.folder, self._until - now, error,
                    )  # fmt: skip
                has_told = True
            time.sleep(_AGAIN_S)


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
