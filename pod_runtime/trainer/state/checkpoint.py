"""The durable state: one folder per (stage, step), whose manifest, written last, is the commit.

PATH/stage_%08d/step_%010d/model.safetensors       parameters and buffers, by structured name
                           optimizer.safetensors   accumulators and master weights
                           extra.safetensors       tensors of `extra=`, where there are any
                           train_status.json       progress, ledger, scheduler, loss scaler
                           manifest.json           run, time, sizes and SHA-256 of all of these
PATH/best/METRIC/...       the best checkpoint of a metric, which is not one to go on from
PATH/owner.json            which training writes here, and that it lives
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from job_server.api.codec import decode, encode
from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.progress.loop_status import LoopOrigin, LoopStatus
from pod_runtime.trainer.state.checkpoint_files import MANIFEST, read_files, read_head, write_files
from pod_runtime.trainer.state.host_state import HostState
from pod_runtime.trainer.state.owner import Owner
from pod_runtime.trainer.state.stage_folders import (
    CheckpointFolder,
    highest_stage,
    newest_intact,
    remove_checkpoint,
    remove_older,
    stage_folders,
)
from pod_runtime.trainer.state.storage import Storage

logger = logging.getLogger(__name__)

_PROBE = "writable.probe"
_AGAIN_S = 2.0
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

    def __init__(
        self,
        storage: Storage,
        keep: int = 3,
        owner: Owner | None = None,
        *,
        commit: Callable[[str, bytes], None] | None = None,
        head: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            owner: of `storage`; None: this one only reads, or somebody else sees to that.
            commit: writes manifests where there is no owner; None: the storage does.
            head: what they say besides; None: nothing.
        """
        if keep < 1:
            raise ValueError(f"keep_checkpoints: must be at least 1, got {keep}")
        self.storage = storage
        self.keep = keep
        self.owner = owner
        self._commit = commit
        self._head = head or {}

    def highest_stage(self, *, patience_s: float = 0.0) -> int:
        """Return the highest stage that has a folder, torn ones included; 0 if none has.

        Another training's stage counts too: it may be about to make one.

        Args:
            patience_s: for which a path that cannot be listed is tried again.

        Raises:
            OSError: it cannot be listed.
        """
        deadline = time.monotonic() + patience_s
        while True:
            others = 0 if self.owner is None else self.owner.stage_of_others()
            try:
                return max(highest_stage(self.storage), others)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning(
                    "checkpoint: %s cannot be listed, trying again: %s", self.storage.name, error
                )
            time.sleep(_AGAIN_S)

    def found(self) -> list[CheckpointId]:
        """Return all folders of checkpoints, whole or torn, oldest first."""
        ids = []
        for stage, name in stage_folders(self.storage):
            for folder in self.storage.folders(name):
                match = _STEP.match(folder)
                if match:
                    ids.append(CheckpointId(stage, int(match[1])))
        return sorted(ids)

    def is_whole(self, each: CheckpointId) -> bool:
        """Whether it was committed; what is in it may be damaged since."""
        return MANIFEST in self.storage.files(each.folder)

    def newest_whole(self) -> CheckpointId | None:
        """Return the newest one that was committed; None: there is none."""
        return next((each for each in reversed(self.found()) if self.is_whole(each)), None)

    def write(self, host_state: HostState) -> CheckpointId:
        """Write one checkpoint and remove those that are not needed any more.

        One of this training, stage and step that is there already stays as it is: it is the same
        state, but for what the script did since that step, which it does again after a restore.
        The best one of a metric is replaced, where its manifest says another value.

        Raises:
            InUseError: another training has taken the folder; nothing more was written.
            CheckpointError: it could not be written; what was begun is removed. Or another
                training has one of this stage and step there, which stays.
        """
        made = CheckpointId(host_state.status.stage, host_state.status.step)
        try:
            if self.owner is not None:
                self.owner.check()
            if self.is_whole(made):
                if not self._is_of(made, host_state.status.run_id):
                    raise CheckpointError(
                        f"{self.storage.name}/{made.folder}: not written: another training's is "
                        f"there"
                    )
                if self._says_so(made):
                    return made
                self.storage.remove(f"{made.folder}/{MANIFEST}")  # half a folder is torn
        except OSError as error:  # nothing was begun: what is there may be whole
            raise self._not_written(made, error) from error
        try:
            write_files(
                self.storage,
                made.folder,
                layout=host_state.layout,
                data=host_state.data,
                status={"status": host_state.status.to_json(), "scalars": host_state.scalars},
                head={
                    "stage": made.stage,
                    "step": made.step,
                    "run_id": host_state.status.run_id,
                    "origin": encode(host_state.status.origin),
                    "written_at": round(time.time(), 3),
                    **self._head,
                },
                commit=self._commit if self.owner is None else self.owner.commit,
            )
        except OSError as error:
            remove_checkpoint(self.storage, made)
            raise self._not_written(made, error) from error
        self._clean(made, host_state.status.run_id)
        return made

    def _not_written(self, made: CheckpointId, error: OSError) -> CheckpointError:
        why = error.strerror or error
        return CheckpointError(f"{self.storage.name}/{made.folder}: not written: {why}")

    def check_writable(self) -> None:
        """Write and remove a small file: a training that begins would keep nothing otherwise.

        Raises:
            CheckpointError: nothing can be written there, or be deleted.
        """
        done, remedy = "written", "make it writable"
        try:
            self.storage.write(_PROBE, [b"made to see whether checkpoints can be written\n"])
            done, remedy = "cleaned of old checkpoints", "allow to delete there"
            self.storage.remove(_PROBE)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: {self.storage.name} cannot be {done}: {error.strerror or error}; "
                f"{remedy}, or give another path"
            ) from error

    def continue_newest(self) -> tuple[HostState, CheckpointId] | None:
        """Take the folder for this training, and return as `load_newest`; says what goes on.

        Raises:
            InUseError: another training has the folder.
            CheckpointError: as `load_newest`.
        """
        if self.owner is None:
            return self.load_newest()
        before = self.owner.claim()
        try:
            found = self.load_newest()
            self.owner.confirm()
        except CheckpointError:
            self.owner.close()
            raise
        if found is None:
            return None
        host_state, each = found
        # A checkpoint of an older version has no run id: it belongs to the run that continues it.
        run_id = host_state.status.run_id or self.owner.run_id
        if before:
            logger.warning(
                "checkpoint: goes on with run %s in %s, from step %d, written %s; %s",
                run_id, self.storage.name, each.step, self._written(each), before,
            )  # fmt: skip
        return replace(host_state, status=replace(host_state.status, run_id=run_id)), each

    def load_newest(self) -> tuple[HostState, CheckpointId] | None:
        """Return the newest intact checkpoint; as `newest_intact`."""
        return newest_intact(self.storage, self.found, self.load)

    def load(self, each: CheckpointId) -> HostState:
        """Read and verify one checkpoint.

        Raises:
            FileNotFoundError: with MANIFEST as text where that is missing.
            CheckpointError, StateError: it is damaged; the text says which file and how.
        """
        status, layout, data = read_files(self.storage, each.folder)
        return HostState(
            status=LoopStatus.from_json(status["status"]),
            scalars=status["scalars"],
            layout=layout,
            data=data,
        )

    def origin(self, each: CheckpointId) -> LoopOrigin:
        """Return which of its script's loops a checkpoint is of, without reading all of it."""
        try:
            return decode(LoopOrigin, read_head(self.storage, each.folder).get("origin", {}))
        except ValueError:  # damaged, which is said where it is loaded
            return LoopOrigin()

    def _written(self, each: CheckpointId) -> str:
        """Return when a checkpoint was written, in words."""
        at = read_head(self.storage, each.folder).get("written_at")
        if not isinstance(at, int | float):
            return "by a version before"
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def is_anothers(self, run_id: str) -> bool:
        """Whether there is a checkpoint of another training than this one."""
        return any(not self._is_of(each, run_id) for each in self.found())

    def _is_of(self, each: CheckpointFolder, run_id: str) -> bool:
        """Whether a checkpoint is of this training; one of an older version says nothing."""
        return read_head(self.storage, each.folder).get("run_id", "") in ("", run_id)

    def _says_so(self, each: CheckpointFolder) -> bool:
        """Whether the manifest of a checkpoint says what those of this store say besides."""
        said = read_head(self.storage, each.folder)
        return all(said.get(name) == value for name, value in self._head.items())

    def _clean(self, newest: CheckpointId, run_id: str) -> None:
        """Remove what is older than `newest`, which is intact, but for the last `keep` - 1."""

        try:
            older = [each for each in self.found() if each < newest]
            remove_older(self.storage, older, self.keep, lambda each: self._is_of(each, run_id))
        except OSError as error:
            logger.warning("old checkpoints in %s stay: %s", self.storage.name, error)
