"""The original's calls: a training that is stopped and started again, by whole epochs.

train_status = load_checkpoint(exe, path, fs=fs, trainer_id=rank, model=model, optimizer=optimizer)
for epoch in range((train_status or TrainStatus()).next(), epochs):
    train(epoch)
    if rank == 0:
        save_checkpoint(exe, path, train_status=TrainStatus(epoch), fs=fs, model=model, ...)

After PaddlePaddle 1.8's collective fleet, whose arguments are accepted by name.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pod_runtime.env import TrainerEnv
from pod_runtime.trainer.epochs.epoch_store import EpochState, EpochStore
from pod_runtime.trainer.epochs.file_systems import storage_for
from pod_runtime.trainer.errors import CheckpointError, UsageError
from pod_runtime.trainer.state.host_state import room_for

if TYPE_CHECKING:
    from pod_runtime.trainer.epochs.paddle_epochs import State

logger = logging.getLogger(__name__)

KEEP = 3
process_stages: dict[str, int] = {}  # storage's name -> stage that this process writes under


@dataclass(slots=True)
class TrainStatus:
    """The last epoch that is completed; -1: none is.

    After the class of this name of PaddlePaddle 1.8's collective fleet. A state of the elastic loop
    says more: `loop_status.LoopStatus`.
    """

    epoch_no: int = -1

    def __post_init__(self) -> None:
        if type(self.epoch_no) is not int or self.epoch_no < -1:
            raise UsageError(
                f"epoch_no: expected the number of the last completed epoch, from 0 on, or -1 for "
                f"none, got {self.epoch_no!r}"
            )

    def next(self) -> int:
        """Return the number of the first epoch that is left to train."""
        return self.epoch_no + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a training goes on."""

    epoch_no: int  # last completed epoch; -1: none
    step: int  # steps of the next epoch that are done
    more: dict[str, Any]  # what was given to `save_state`


def load_checkpoint(
    exe: Any = None,
    path: str | os.PathLike[str] = "",
    trainer_id: int | None = None,
    *,
    fs: Any = None,
    train_status: TrainStatus | None = None,
    main_program: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    local_cache_path: str | None = None,
    ignore_empty: bool = True,
) -> TrainStatus | None:
    """Restore the newest intact checkpoint; every trainer calls it, after the model is built.

    Args:
        exe: the executor of a static graph, with `main_program`; ignored in dynamic graph.
        path: folder that all nodes share, or an fsspec URL, or a path in `fs`.
        trainer_id: ignored: every trainer reads.
        fs: the file system: `LocalFS()`, `HDFSClient(...)`, one of fsspec or its URL, or an object
            with the methods of Paddle's `fs` classes. None: `path` is a local folder or a URL.
        train_status: is set to what was found, where given.
        model, optimizer: of the training, dynamic graph; a `DataParallel` counts as what it wraps.
        scaler: the loss scaler, where there is one.
        extra: other objects with state_dict and set_state_dict, by name.
        local_cache_path: ignored: nothing is cached.
        ignore_empty: whether a path without checkpoints is no error.

    Returns:
        The status that was saved with it; None: there is no checkpoint yet.

    Raises:
        UsageError: an argument is wrong, or the trainers found different checkpoints.
        StateError: the checkpoint belongs to another model or optimizer.
        CheckpointError: there are checkpoints, and none is intact, or they cannot be reached.
    """
    del trainer_id, local_cache_path
    state = _open_state(exe, main_program, model, optimizer, scaler, extra)
    loaded = load_state(storage_path(path, fs), state)
    if loaded is None:
        if not ignore_empty:
            raise CheckpointError(f"path: {os.fspath(path)} holds no checkpoint")
        return None
    if loaded.step:
        logger.warning(
            "the checkpoint was made after %d steps of epoch %d, which is trained from its start",
            loaded.step,
            loaded.epoch_no + 1,
        )
    found = train_status if train_status is not None else TrainStatus()
    found.epoch_no = loaded.epoch_no
    return found


def save_checkpoint(
    exe: Any = None,
    path: str | os.PathLike[str] = "",
    trainer_id: int | None = None,
    train_status: TrainStatus | None = None,
    *,
    fs: Any = None,
    main_program: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    local_cache_path: str | None = None,
    remain_all_checkpoint: bool | None = None,
    keep_checkpoints: int = KEEP,
) -> tuple[str, int] | None:
    """Write a checkpoint, and return when it is durable. Trainers other than 0 do nothing.

    Args:
        train_status: the epoch that was just completed.
        trainer_id: the rank of the caller; None: as the environment says.
        remain_all_checkpoint: None: `keep_checkpoints` stay; True: all; False: this one alone.
        exe, path, fs, main_program, model, optimizer, scaler, extra, local_cache_path: as in
            `load_checkpoint`.

    Returns:
        (where it is, number of the completed epoch); None from trainers other than 0.

    Raises:
        UsageError: an argument is wrong.
        CheckpointError: it could not be written; older ones are as they were.
    """
    del local_cache_path
    if not isinstance(train_status, TrainStatus):
        raise UsageError(
            f"train_status: expected TrainStatus(epoch), got {train_status!r}; it says which "
            f"epoch is completed"
        )
    if type(keep_checkpoints) is not int or keep_checkpoints < 1:
        raise UsageError(
            f"keep_checkpoints: expected a whole number of at least 1, got {keep_checkpoints!r}"
        )
    rank = TrainerEnv.read(os.environ).rank if trainer_id is None else trainer_id
    if rank != 0:
        return None
    keep = {None: keep_checkpoints, True: None, False: 1}[remain_all_checkpoint]
    state = _open_state(exe, main_program, model, optimizer, scaler, extra)
    where = save_state(
        storage_path(path, fs), state, epoch_no=train_status.epoch_no, step=0, more={}, keep=keep
    )
    return where, train_status.epoch_no


def storage_path(path: str | os.PathLike[str], fs: Any) -> EpochStore:
    """Return the checkpoints of `path` in `fs`; see `file_systems.storage_for`."""
    return EpochStore(storage_for(path, fs))


def load_state(store: EpochStore, state: "State") -> ResumePoint | None:
    """Restore the newest intact checkpoint into `state`; None: there is none.

    Raises:
        UsageError, StateError, CheckpointError: as `load_checkpoint`.
    """
    from pod_runtime.trainer.epochs.paddle_epochs import check_all_ranks_have

    stage_of(store)  # before anything is written: it is to be above the stages of now
    try:
        found = store.load_newest()
        if found is None and store.holds_loop_checkpoints():
            raise CheckpointError(
                f"path: {store.storage.name} holds checkpoints of the elastic loop; continue them "
                f"with elastic.Loop, or give another path"
            )
    except OSError as error:
        raise CheckpointError(f"path: {store.storage.name} cannot be read: {error}") from error
    checkpoint = None if found is None else found.id
    check_all_ranks_have(
        None
        if checkpoint is None
        else (checkpoint.stage, checkpoint.epoch, checkpoint.step, checkpoint.token)
    )
    if found is None:
        return None
    status = _checked_status(found)
    state.load(found.layout, found.data, found.status["scalars"])
    logger.info("restored %s/%s", store.storage.name, found.id.folder)
    return status


def save_state(
    store: EpochStore,
    state: "State",
    *,
    epoch_no: int,
    step: int,
    more: Mapping[str, Any],
    keep: int | None,
) -> str:
    """Write `state` as of `step` of the epoch after `epoch_no`; return where it is.

    Raises:
        CheckpointError: it could not be written; older ones are as they were.
    """
    begun = time.monotonic()
    layout = state.layout()
    data = room_for(layout.total_bytes)
    state.copy_out(data)
    status = {
        "epoch_no": epoch_no,
        "step": step,
        "more": dict(more),
        "scalars": state.scalars(),
    }
    made = store.write(
        stage=stage_of(store),
        epoch=epoch_no + 1,
        step=step,
        layout=layout,
        data=data,
        status=status,
        keep=keep,
    )
    logger.info("checkpoint %s written in %.2f s", made.folder, time.monotonic() - begun)
    return f"{store.storage.name}/{made.folder}"


def stage_of(store: EpochStore) -> int:
    """Return the stage that this process writes under: above all that it found at first.

    Raises:
        CheckpointError: the path cannot be read.
    """
    name = store.storage.name
    if name not in process_stages:
        try:
            highest = store.highest_stage()
        except OSError as error:
            raise CheckpointError(f"path: {name} cannot be read: {error}") from error
        process_stages[name] = max(TrainerEnv.read(os.environ).stage or 0, highest + 1)
    return process_stages[name]


def _checked_status(found: EpochState) -> ResumePoint:
    match found.status:
        case {"epoch_no": int(epoch_no), "step": int(step), "more": dict(more), "scalars": dict()}:
            return ResumePoint(epoch_no=epoch_no, step=step, more=more)
    raise CheckpointError(f"{found.id.folder}: its train_status.json is not one of ours")


def _open_state(
    exe: Any,
    main_program: Any,
    model: Any,
    optimizer: Any,
    scaler: Any,
    extra: Mapping[str, Any] | None,
) -> "State":
    try:
        from pod_runtime.trainer.epochs.paddle_epochs import open_state
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        raise UsageError(
            "load_checkpoint and save_checkpoint are for Paddle, which is not installed here; a "
            "PyTorch script has its checkpoints by elastic.Loop(checkpoint=...)"
        ) from error

    return open_state(exe, main_program, model, optimizer, scaler, extra or {})
