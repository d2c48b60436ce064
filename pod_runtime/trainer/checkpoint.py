"""The durable state: one folder per (stage, step), whose manifest, written last, is the commit.

PATH/stage_%08d/step_%010d/model.safetensors       parameters and buffers, by structured name
                           optimizer.safetensors   accumulators and master weights
                           extra.safetensors       tensors of `extra=`, where there are any
                           train_status.json       progress, ledger, scheduler, loss scaler
                           manifest.json           sizes and SHA-256 of all of these
"""

import logging
import re
from dataclasses import dataclass

from pod_runtime.trainer.checkpoint_files import MANIFEST, read_files, write_files
from pod_runtime.trainer.errors import CheckpointError, StateError
from pod_runtime.trainer.image import StateImage
from pod_runtime.trainer.loop_status import LoopStatus
from pod_runtime.trainer.stage_folders import (
    highest_stage,
    remove_checkpoint,
    remove_older,
    stage_folders,
)
from pod_runtime.trainer.storage import Storage

logger = logging.getLogger(__name__)

_PROBE = "writable.probe"
_STEP = re.compile(r"step_(\d{10,})\Z")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Ordered as checkpoints supersede each other: by stage, then by step."""

    stage: int
    step: int

    @property
    def folder(self) -> str:
        return f"stage_{self.stage:08d}/step_{self.step:010d}"


class CheckpointStore:
    """The checkpoints of one training, under one path."""

    def __init__(self, storage: Storage, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep_checkpoints: must be at least 1, got {keep}")
        self.storage = storage
        self.keep = keep

    def highest_stage(self) -> int:
        """Return the highest stage that has a folder, torn ones included; 0 if none has."""
        return highest_stage(self.storage)

    def found(self) -> list[CheckpointId]:
        """Return all folders of checkpoints, whole or torn, oldest first."""
        ids = []
        for stage, name in stage_folders(self.storage):
            for folder in self.storage.folders(name):
                match = _STEP.match(folder)
                if match:
                    ids.append(CheckpointId(stage, int(match[1])))
        return sorted(ids)

    def write(self, image: StateImage) -> CheckpointId:
        """Write one checkpoint and remove those that nobody needs any more.

        One of this stage and step that is there already stays as it is: it is the same state, but
        for what the script did since that step, which it does again after a restore.

        Raises:
            CheckpointError: it could not be written; what was begun is removed.
        """
        made = CheckpointId(image.status.stage, image.status.step)
        if MANIFEST in self.storage.files(made.folder):
            return made
        try:
            write_files(
                self.storage,
                made.folder,
                layout=image.layout,
                data=image.data,
                status={"status": image.status.to_json(), "scalars": image.scalars},
                head={"stage": made.stage, "step": made.step},
            )
        except OSError as error:
            remove_checkpoint(self.storage, made)
            raise CheckpointError(
                f"{self.storage.name}/{made.folder}: not written: {error.strerror or error}"
            ) from error
        self._clean(made)
        return made

    def check_writable(self) -> None:
        """Write and remove a small file: a training that begins would keep nothing otherwise.

        Raises:
            CheckpointError: nothing can be written there.
        """
        try:
            self.storage.write(_PROBE, [b"made to see whether checkpoints can be written\n"])
            self.storage.remove(_PROBE)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: {self.storage.name} cannot be written: {error.strerror or error}; "
                f"make it writable, or give another path"
            ) from error

    def load_newest(self) -> tuple[StateImage, CheckpointId] | None:
        """Return the newest intact checkpoint; None if there is none.

        Those that are refused on the way are logged with the reason.

        Raises:
            CheckpointError: there are complete checkpoints, and none is intact: to start afresh
                now would throw the training away silently.
        """
        refused = []
        for each in reversed(self.found()):
            try:
                image = self.load(each)
            except FileNotFoundError as error:
                if str(error) == MANIFEST:  # torn: it was never committed
                    logger.info("checkpoint %s is not complete; skipped", each.folder)
                    continue
                refused.append(f"{each.folder}: {error}")
                logger.error("checkpoint %s refused: %s", each.folder, error)
                continue
            except (CheckpointError, StateError, OSError) as error:
                refused.append(str(error))
                logger.error("checkpoint %s refused: %s", each.folder, error)
                continue
            if refused:
                logger.warning("falling back to checkpoint %s, which is intact", each.folder)
            return image, each
        if refused:
            raise CheckpointError(
                f"{self.storage.name}: none of its checkpoints is intact ({'; '.join(refused)}); "
                f"repair it, or start afresh with another checkpoint path"
            )
        return None

    def load(self, each: CheckpointId) -> StateImage:
        """Read and verify one checkpoint.

        Raises:
            FileNotFoundError: with MANIFEST as text where that is missing.
            CheckpointError, StateError: it is damaged; the text says which file and how.
        """
        status, layout, data = read_files(self.storage, each.folder)
        return StateImage(
            status=LoopStatus.from_json(status["status"]),
            scalars=status["scalars"],
            layout=layout,
            data=data,
        )

    def _clean(self, newest: CheckpointId) -> None:
        """Remove what is older than `newest`, which is intact, but for the last `keep` - 1."""
        try:
            remove_older(self.storage, [each for each in self.found() if each < newest], self.keep)
        except OSError as error:
            logger.warning("old checkpoints in %s stay: %s", self.storage.name, error)
