"""Keep the committed state safe: decide on snapshots and checkpoints, and park."""

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pod_runtime.activity import Doing, own_activity
from pod_runtime.channel_wire import Drained
from pod_runtime.segment_header import Stamp
from pod_runtime.trainer.errors import CheckpointError, InUseError
from pod_runtime.trainer.frameworks.framework import FrameworkState
from pod_runtime.trainer.membership.link import LauncherLink, StageStart
from pod_runtime.trainer.membership.node_snapshots import NodeSnapshots
from pod_runtime.trainer.membership.open_files import flush_files
from pod_runtime.trainer.progress.agreement import MUST, AgreedCut, SnapshotRequest
from pod_runtime.trainer.progress.best import BestCheckpoint, with_best
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.progress.progress import TrainingProgress
from pod_runtime.trainer.state.best_checkpoints import best_store
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.checkpoint_writer import CheckpointWriter
from pod_runtime.trainer.state.host_state import HostState, room_for
from pod_runtime.trainer.state.owner_record import State
from pod_runtime.trainer.state.snapshot import copy_newest

logger = logging.getLogger(__name__)

# Of the training's time that snapshots may take with snapshot_steps="auto"; with those for
# checkpoints, after first steps and at the ends of epochs it stays below 1 %.
_STALL_SHARE = 0.004
_FLUSH_PERIOD_S = 1.0
RETRY_S = 10.0  # between tries at a checkpoint without which nothing can go on


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """The state of a rank that goes on from one stage to the next: it is in its model."""

    status: LoopStatus
    stamp: Stamp
    is_in_snapshot: bool  # of this rank's node
    host_state: Callable[[], HostState | None]  # reads it there


class StateManager:
    """Decides after every commit what is due, and does it. One per trainer.

    All ranks write a snapshot together. The first rank of each node asks for it in the exchange of
    the step before (`snapshot_request`), and all ranks act on what any of them has asked for.
    """

    def __init__(
        self,
        state: FrameworkState,
        progress: TrainingProgress,
        *,
        link: LauncherLink | None,
        snapshots: NodeSnapshots,
        store: CheckpointStore | None,
        writer: CheckpointWriter | None = None,
        save_steps: int,
        snapshot_steps: int | None,
    ) -> None:
        """
        Args:
            link: None outside EDL, where no trainer parks.
            store: None: no checkpoints, or not this rank's task.
            writer: of `store`, from the stage before; it may still be writing.
            snapshot_steps: None: as often as keeps the stall below 1 % of the time.
        """
        self._state = state
        self._progress = progress
        self._link = link
        self._snapshots = snapshots
        self._writer = (writer or CheckpointWriter(store)) if store else None
        self._best_writer: CheckpointWriter | None = None  # None: there was no best one yet
        self._owner = None if store is None else store.owner
        self._save_steps = save_steps
        self._snapshot_steps = snapshot_steps
        self._activity = own_activity()
        self._step_s = 0.0  # how long steps take; 0: not known
        self._next_save = _next_multiple(progress.cursor.global_step, save_steps)
        self._save_due: Stamp | None = None  # since this state; None: no checkpoint is due
        self.when_parked: Callable[[], None] = lambda: None  # called when the state has been kept
        self._buffer = memoryview(b"")  # of the checkpoint that is written
        self._begun_at = self._flushed_at = time.monotonic()

    # --- while training

    def snapshot_request(self) -> SnapshotRequest:
        """Return what all ranks should do after the step that they exchange now."""
        snapshots, progress = self._snapshots, self._progress
        if not snapshots.is_first:
            return SnapshotRequest(renew=snapshots.wants_renewal)
        if not snapshots.can_take:
            return SnapshotRequest(snapshot=snapshots.share)
        after = progress.batches.advance(progress.cursor)
        taken = snapshots.taken
        # Always at the end of an epoch: what the script does between its last step and the next
        # epoch (scheduler, evaluation with other weights) is then done again after a restore.
        must = (
            taken is None
            or progress.batches.steps_left(after.offset) == 0
            or self._save_wants(taken, after.global_step)
        )
        may = taken is not None and progress.step + 1 - taken.step >= self._interval()
        wanted = MUST if must else snapshots.share if may else 0.0
        return SnapshotRequest(snapshot=wanted, renew=snapshots.wants_renewal)

    def request_after_epoch(self) -> SnapshotRequest:
        """Return what all ranks should do when the epoch has been committed."""
        due = self._writer is not None and self._snapshots.can_take
        return SnapshotRequest(snapshot=float(due), renew=self._snapshots.wants_renewal)

    def after_step(self, step_s: float, request: SnapshotRequest) -> None:
        """Do what is due after a committed step; `step_s` is how long steps take.

        Raises:
            InUseError: another training has taken over the folder of checkpoints.
        """
        self._step_s = step_s
        self._end_if_replaced()
        self._snapshots.settle()
        now = time.monotonic()
        if now - self._flushed_at > _FLUSH_PERIOD_S:
            self._flushed_at = now
            self._progress.flush_ledger()
        if request.snapshot:
            self._take(request)
        step = self._progress.cursor.global_step
        if step >= self._next_save:
            self._next_save = _next_multiple(step, self._save_steps)
            self._save_due = self._snapshots.now
        if not self._progress.epoch_is_over:  # else the epoch's own checkpoint comes soon
            self._start_if_due()

    def after_epoch(self, request: SnapshotRequest) -> None:
        """Do what is due after an epoch has been committed."""
        if self._progress.is_finished:  # the final checkpoint follows
            return
        if request.snapshot:
            self._take(request)
        self._save_due = self._snapshots.now
        self._start_if_due()

    def rescue(self) -> None:
        """Take a snapshot of the committed state although a rank is gone.

        Do not call it between an update and its commit.
        """
        self._progress.flush_ledger()
        self._snapshots.rescue()

    @property
    def is_kept(self) -> bool:
        """The committed state is in a snapshot, or cannot be put into one."""
        return not self._snapshots.can_rescue

    @property
    def kept_steps(self) -> int:
        """Steps of this loop that no crash of a trainer takes back: they are in a snapshot.

        Where none can be taken, all that are committed: of the others' state, after a crash.
        """
        complete, done = self._snapshots.complete, self._progress.cursor.global_step
        if complete is None:
            return 0 if self._snapshots.can_take else done
        return done - (self._progress.step - complete.step)

    # --- best checkpoints

    def start_best(self, best: BestCheckpoint) -> None:
        """Begin the checkpoint of the committed state as the best of a metric. Only rank 0 does.

        Raises:
            InUseError: another training has taken over the folder of checkpoints.
        """
        self._end_if_replaced()
        if self._writer is None:
            return
        self._best_writer = CheckpointWriter(best_store(self._writer.store, best))
        state = self._capture(is_own=True)  # the usual buffer may be on its way to the disk
        status = replace(state.status, best=with_best(state.status.best, best))
        self._best_writer.start(replace(state, status=status))

    @property
    def is_writing_best(self) -> bool:
        return self._best_writer is not None and self._best_writer.busy

    @property
    def has_best_failed(self) -> bool:
        """The newest best checkpoint was not written."""
        return self._best_writer is not None and self._best_writer.has_failed

    # --- at the end of a stage

    def start_final(self) -> None:
        """Begin the checkpoint of a training that is complete.

        Raises:
            InUseError: another training has taken over the folder of checkpoints.
        """
        self._end_if_replaced()
        if self._writer is not None:
            self._wait_for_last()
            self._progress.flush_ledger()
            self._writer.start(self._capture())

    def write_checkpoint(self) -> None:
        """Write the committed state and wait for it. Only rank 0 does anything.

        Raises:
            CheckpointError: it failed.
        """
        if self._writer is None:
            return
        self._wait_for_last()
        self._progress.flush_ledger()
        self._writer.start(self._snapshots.host_state() or self._capture())
        self._writer.finish()

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.busy

    @property
    def has_failed(self) -> bool:
        """The newest checkpoint was not written."""
        return self._writer is not None and self._writer.has_failed

    def checkpoint_error(self) -> str | None:
        """Return why a checkpoint, or a snapshot of rank 0's node, is not written; "": it is.

        None: there was none yet, or this is not this rank's task.
        """
        writers = [each for each in (self._writer, self._best_writer) if each is not None]
        troubles = [*(each.trouble for each in writers), self._snapshots.trouble]
        texts = [each for each in troubles if each is not None]
        return "; ".join(filter(None, texts)) if texts else None

    def finish_writing(self) -> None:
        """Wait for a checkpoint in progress. Raises CheckpointError."""
        if self._writer is not None:
            self._writer.finish()

    @property
    def wants_renewal(self) -> bool:
        """The segment is missing or too small; if it is on any rank, all pass `renew` to `park`."""
        return self._snapshots.wants_renewal

    def park(self, cut: AgreedCut, renew: bool) -> StageStart | None:
        """Take a snapshot of the committed state, report it, and wait until the cut is off.

        Returns the stage that this trainer has joined; None: the cut is off.
        """
        assert self._link is not None
        cut_id = cut.id
        step = self._progress.step
        self._take(SnapshotRequest(snapshot=1.0, renew=renew))
        if self._snapshots.meet():
            self._take(SnapshotRequest(snapshot=1.0, renew=True))
            self._snapshots.meet()
        kept = self._snapshots.reference()
        written = ""
        with self._activity.during(Doing.SAVING):
            if self._writer is not None and kept is None:
                written = self._write_until_done(cut_id)
            elif self._writer is not None and cut.durable:
                # Another process writes the snapshot to disk; no checkpoint may be written
                # meanwhile.
                self._wait_for_last()
        if self._owner is not None and cut.halt:
            self._owner.leave(State.PAUSED if cut.halt == "pause" else State.STOPPING)
        self.note_account()
        flush_files()
        self.when_parked()
        self._link.send(Drained(step=step, id=cut_id, snapshot=kept, durable=written))
        logger.info("parked after step %d for cut %d", step, cut_id)  # tests wait for it
        start = self._link.wait_resume(cut_id)
        if self._owner is not None and cut.halt:
            self._owner.hold()
        if start is None:
            logger.info("cut %d is off, training goes on after step %d", cut_id, step)
        return start

    @property
    def writer(self) -> CheckpointWriter | None:
        """Writes checkpoints; None: not this rank's task."""
        return self._writer

    def carried(self) -> CarriedState:
        """Return the committed state, for a rank that goes on in the next stage."""
        return CarriedState(
            status=self._progress.status(),
            stamp=self._snapshots.now,
            is_in_snapshot=self._snapshots.complete == self._snapshots.now,
            host_state=self._snapshots.host_state,
        )

    def note_account(self) -> None:
        """Enter into the ledger what snapshots have cost this stage so far."""
        snapshots, elapsed_s = self._snapshots, time.monotonic() - self._begun_at
        if snapshots.count:
            self._progress.note_account(
                snapshots=snapshots.count, stall_s=snapshots.total_s, elapsed_s=elapsed_s
            )
            logger.info(
                "%d snapshots have taken %.3f s of %.1f s",
                snapshots.count, snapshots.total_s, elapsed_s,
            )  # fmt: skip

    def close(self) -> None:
        """Close the segment; the shims hold it as long as it is needed."""
        self._snapshots.close()

    # --- private

    def _end_if_replaced(self) -> None:
        if self._owner is not None and self._owner.replaced_by:
            raise InUseError(self._owner.replaced_by) from None

    def _take(self, request: SnapshotRequest) -> None:
        with self._activity.during(Doing.SAVING):
            self._progress.flush_ledger()
            self._snapshots.take(request.renew)

    def _interval(self) -> int:
        """Return how many steps lie between two snapshots."""
        if self._snapshot_steps is not None:
            return self._snapshot_steps
        if self._step_s <= 0:
            return 1
        return max(1, math.ceil(self._snapshots.stall_s / (_STALL_SHARE * self._step_s)))

    def _save_wants(self, taken: Stamp, next_step: int) -> bool:
        """Whether a checkpoint is due for which no snapshot has been taken."""
        if self._writer is None or self._writer.busy:
            return False
        return next_step >= self._next_save or (
            self._save_due is not None and taken < self._save_due
        )

    def _start_if_due(self) -> None:
        """Begin the checkpoint that is due, unless one is written or its snapshot is missing."""
        if self._save_due is None or self._writer is None or self._writer.busy:
            return
        if not self._snapshots.can_take:
            self._progress.flush_ledger()
            self._writer.start(self._capture())
        else:
            complete = self._snapshots.complete
            if complete is None or complete < self._save_due:
                return
            fd = os.dup(self._snapshots.fd)  # this segment, even if another one replaces it
            self._writer.start_from(lambda: self._copy(fd))
        self._save_due = None

    def _copy(self, fd: int) -> HostState:
        """Return a copy of the newest snapshot, while trainers go on writing."""
        try:
            host_state = copy_newest(fd, self._room)
        finally:
            os.close(fd)
        if host_state is None:
            raise CheckpointError("snapshots followed each other too quickly to copy one")
        return host_state

    def _wait_for_last(self) -> None:
        """Wait for the checkpoint in progress, even if it fails."""
        assert self._writer is not None
        try:
            self._writer.finish()
        except CheckpointError:
            logger.debug("the checkpoint before this one failed, as logged then")

    def _write_until_done(self, cut_id: int) -> str:
        """Write a checkpoint that must exist before `drained` is sent; return its path.

        "": the cut was called off before that.
        """
        assert self._link is not None
        assert self._writer is not None
        while self._link.resumed_id < cut_id:
            try:
                self.write_checkpoint()
            except CheckpointError as error:
                self._end_if_replaced()
                logger.error(
                    "drained only once a checkpoint is written; trying again in %g s: %s",
                    RETRY_S,
                    error,
                )
                self._link.wait(RETRY_S)
            else:
                return self._writer.store.storage.name
        return ""

    def _capture(self, *, is_own: bool = False) -> HostState:
        """Return a copy of the state; `is_own`: in memory of its own."""
        layout = self._state.layout()
        data = room_for(layout.total_bytes) if is_own else self._room(layout.total_bytes)
        self._state.copy_out(data)
        return HostState(
            status=self._progress.status(),
            scalars=self._state.scalars(committed=True),
            layout=layout,
            data=data,
        )

    def _room(self, size: int) -> memoryview:
        if len(self._buffer) != size:
            self._buffer = memoryview(b"")  # not both at once
            self._buffer = room_for(size)
        return self._buffer


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every
