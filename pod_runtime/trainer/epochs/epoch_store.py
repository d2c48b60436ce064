"""Checkpoints of trainings that are stopped and started again: one folder per checkpoint.

PATH/stage_%08d/epoch_%08d_step_%010d_TOKEN/   the epoch and step from which training goes on
    model.safetensors optimizer.safetensors extra.safetensors train_status.json manifest.json

Each start of the program writes under a stage number of its own, above all that it found. So what a
program that was cut off still writes lies below what its successor writes, and the token keeps two
writers of the same step apart. Retention removes only what lies below the newest.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.layout import StateLayout
from pod_runtime.trainer.state.checkpoint_files import read_files, write_files
from pod_runtime.trainer.state.stage_folders import (
    highest_stage,
    newest_intact,
    remove_checkpoint,
    remove_older,
    stage_folders,
)
from pod_runtime.trainer.state.storage import Storage

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"epoch_(\d{8,})_step_(\d{10,})_([0-9a-f]{8})\Z")
_LOOP_STEP = re.compile(r"step_\d{10,}\Z")


@dataclass(frozen=True, slots=True, order=True)
class EpochCheckpointId:
    """Ordered as checkpoints supersede each other."""

    stage: int
    epoch: int  # the first that is not completed
    step: int  # of that epoch, from which training goes on
    token: str

    @property
    def folder(self) -> str:
        return f"stage_{self.stage:08d}/epoch_{self.epoch:08d}_step_{self.step:010d}_{self.token}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """What a checkpoint holds."""

    id: EpochCheckpointId
    status: dict[str, Any]  # JSON types
    layout: StateLayout
    data: memoryview


class EpochStore:
    """The checkpoints of one training, under one path."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def highest_stage(self) -> int:
        """Return the highest stage that has a folder; 0 if none has."""
        return highest_stage(self.storage)

    def found(self) -> list[EpochCheckpointId]:
        """Return all folders of checkpoints, whole or torn, oldest first."""
        ids = []
        for stage, name in stage_folders(self.storage):
            for folder in self.storage.folders(name):
                match = _FOLDER.match(folder)
                if match:
                    ids.append(EpochCheckpointId(stage, int(match[1]), int(match[2]), match[3]))
        return sorted(ids)

    def holds_loop_checkpoints(self) -> bool:
        """Whether the elastic loop, which has another format, has written here."""
        return any(
            _LOOP_STEP.match(folder)
            for _stage, name in stage_folders(self.storage)
            for folder in self.storage.folders(name)
        )

    def write(
        self,
        *,
        stage: int,
        epoch: int,
        step: int,
        layout: StateLayout,
        data: memoryview,
        status: Mapping[str, Any],
        keep: int | None,
    ) -> EpochCheckpointId:
        """Write one checkpoint, and remove those that are not needed any more.

        Args:
            keep: how many stay, this one included; None: all.

        Raises:
            CheckpointError: it could not be written; what was begun is removed.
        """
        made = EpochCheckpointId(stage, epoch, step, secrets.token_hex(4))
        try:
            write_files(
                self.storage,
                made.folder,
                layout=layout,
                data=data,
                status=status,
                head={"stage": stage, "epoch": epoch, "step": step},
            )
        except OSError as error:
            remove_checkpoint(self.storage, made)
            raise CheckpointError(
                f"{self.storage.name}/{made.folder}: not written: {error.strerror or error}"
            ) from error
        self._clean(made, keep)
        return made

    def load_newest(self) -> EpochState | None:
        """Return the newest intact checkpoint; as `newest_intact`."""
        found = newest_intact(self.storage, self.found, self._load)
        return None if found is None else found[0]

    def _load(self, each: EpochCheckpointId) -> EpochState:
        status, layout, data = read_files(self.storage, each.folder)
        return EpochState(id=each, status=status, layout=layout, data=data)

    def _clean(self, newest: EpochCheckpointId, keep: int | None) -> None:
        """Remove what `newest` replaces at its own step, and older ones but for `keep`."""
        at = (newest.stage, newest.epoch, newest.step)
        try:
            found = [each for each in self.found() if each != newest]
            for each in found:
                if (each.stage, each.epoch, each.step) == at:
                    remove_checkpoint(self.storage, each)
            if keep is not None:
                older = [each for each in found if (each.stage, each.epoch, each.step) < at]
                remove_older(self.storage, older, keep)
        except OSError as error:
            logger.warning("old checkpoints in %s stay: %s", self.storage.name, error)
