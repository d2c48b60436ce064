"""Keeps the committed state safe: snapshots in memory, checkpoints on disk, and parking."""

import json
import logging
import math
import time

from pod_runtime.trainer.adapter import Adapter
from pod_runtime.trainer.checkpoint import CheckpointStore
from pod_runtime.trainer.checkpoint_writer import CheckpointWriter
from pod_runtime.trainer.errors import CheckpointError, SnapshotError
from pod_runtime.trainer.image import StateImage
from pod_runtime.trainer.link import Link
from pod_runtime.trainer.progress import Progress
from pod_runtime.trainer.snapshot import SegmentWriter, read_snapshot

logger = logging.getLogger(__name__)

_STALL_SHARE = 0.01  # of the training's time that snapshots may take with snapshot_steps="auto"
_FLUSH_PERIOD_S = 1.0
_ANNOUNCE_PERIOD_S = 0.2
_RETRY_S = 10.0


class Keeper:
    """Decides after every commit what is due, and does it. One per trainer."""

    def __init__(
        self,
        adapter: Adapter,
        progress: Progress,
        *,
        link: Link | None,
        is_writer: bool,
        segment: SegmentWriter | None = None,
        store: CheckpointStore | None,
        save_steps: int,
        snapshot_steps: int | None,
    ) -> None:
        """
        Args:
            link: None outside EDL, where nobody could hold a snapshot.
            is_writer: this trainer makes the snapshots of its node.
            segment: made ahead; None: at the first snapshot.
            store: None: no checkpoints, or not this rank's task.
            snapshot_steps: None: as often as keeps the stall below 1 % of the time.
        """
        self._adapter = adapter
        self._progress = progress
        self._link = link
        self._segment = (segment or SegmentWriter(progress.stage)) if link and is_writer else None
        self._writer = CheckpointWriter(store) if store else None
        self._save_steps = save_steps
        self._snapshot_steps = snapshot_steps
        self._snapshot_version = -1  # progress.version of the newest complete slot
        self._snapshot_step: int | None = None  # its step; None: there is none
        self._stall_s = 0.0  # of the newest snapshot but the first
        self._next_save = _next_multiple(progress.cursor.global_step, save_steps)
        self._save_due = False
        self._buffer = bytearray()
        self._flushed_at = time.monotonic()
        self._announced_at = 0.0

    # --- while training

    def after_step(self, step_s: float) -> None:
        """Do what is due after a committed step; `step_s` is how long steps take."""
        now = time.monotonic()
        if now - self._flushed_at > _FLUSH_PERIOD_S:
            self._flushed_at = now
            self._progress.flush_ledger()
        step = self._progress.cursor.global_step
        if self._segment is not None and (
            self._snapshot_step is None
            or step - self._snapshot_step >= self._interval(step_s)
            or self._progress.epoch_is_over
        ):
            # At the end of an epoch always: what the script does between its last step and the
            # next epoch (scheduler, evaluation with other weights) is done again after a restore.
            self.snapshot()
        if step >= self._next_save:
            self._next_save = _next_multiple(step, self._save_steps)
            self._save_due = True
        if self._save_due and not self._progress.epoch_is_over:  # the epoch's own one comes soon
            self.start_checkpoint()

    def after_epoch(self) -> None:
        """An epoch has been committed."""
        if not self._progress.is_finished:  # the final one follows
            self._save_due = True
            self.start_checkpoint()

    def snapshot(self) -> bool:
        """Have the newest committed state in memory; False where this rank or machine cannot.

        The state must be the committed one: no call between an update and its commit.
        """
        if self._segment is None or self._link is None:
            return False
        if self._snapshot_version == self._progress.version:
            return True
        begun = time.monotonic()
        self._progress.flush_ledger()
        step = self._progress.cursor.global_step
        try:
            written = self._segment.write(
                self._adapter,
                step=step,
                status_json=self._progress.status_json(),
                scalars_json=json.dumps(self._adapter.scalars()),
            )
        except SnapshotError as error:
            logger.error("%s", error)
            self._segment = None
            return False
        if not written.new_segment:
            self._stall_s = time.monotonic() - begun
        self._snapshot_version, self._snapshot_step = self._progress.version, step
        if written.new_segment:
            self._link.say(
                "segment",
                (self._segment.fd,),
                stage=self._progress.stage,
                size_bytes=self._segment.size_bytes,
                digest=written.digest,
            )
        self._announce(written.digest, always=written.new_segment)
        return True

    def start_checkpoint(self) -> None:
        """Begin a checkpoint of the state as it is now, or leave it due while one is written."""
        if self._writer is None:
            self._save_due = False
            return
        if self._writer.busy:
            return
        self._save_due = False
        self._progress.flush_ledger()
        self._writer.start(self._capture())

    # --- at the end of a stage

    def start_final(self) -> None:
        """Begin the checkpoint of a training that is complete."""
        if self._writer is not None:
            self._settle()
            self._progress.flush_ledger()
            self._writer.start(self._capture())

    def write_checkpoint(self) -> None:
        """Write the committed state and wait for it; nothing to do for other ranks than 0.

        Raises:
            CheckpointError: it failed.
        """
        if self._writer is None:
            return
        self._settle()
        self._progress.flush_ledger()
        self._writer.start(self._snapshot_image() or self._capture())
        self._writer.finish()

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.busy

    @property
    def has_failed(self) -> bool:
        """The newest checkpoint was not written."""
        return self._writer is not None and self._writer.has_failed

    def finish_writing(self) -> None:
        """Wait for a checkpoint in progress. Raises CheckpointError."""
        if self._writer is not None:
            self._writer.finish()

    def park(self, cut_id: int, durable: bool) -> None:
        """Put the committed state away, say so, and wait until the cut is off (or for the end)."""
        assert self._link is not None
        step = self._progress.cursor.global_step
        self._progress.flush_ledger()
        kept = self.snapshot()
        if kept and self._segment is not None:
            self._announce(self._adapter.layout().digest, always=True)
        if self._writer is not None and (durable or not kept):
            self._write_until_done(cut_id)
        self._link.say("drained", step=step, id=cut_id)
        logger.info("parked after step %d for cut %d", step, cut_id)
        self._link.wait_resume(cut_id)
        logger.info("cut %d is off, training goes on after step %d", cut_id, step)

    def _settle(self) -> None:
        """Wait for the checkpoint in progress, whatever becomes of it."""
        assert self._writer is not None
        try:
            self._writer.finish()
        except CheckpointError:
            logger.debug("the checkpoint before this one had failed, as was said then")

    def _write_until_done(self, cut_id: int) -> None:
        """Write a checkpoint that must exist before `drained` may be said."""
        assert self._link is not None
        while self._link.resumed_id < cut_id:
            try:
                self.write_checkpoint()
            except CheckpointError as error:
                logger.error(
                    "drained only when a checkpoint is written; again in %g s: %s", _RETRY_S, error
                )
                self._link.wait(_RETRY_S)
            else:
                return

    def _interval(self, step_s: float) -> int:
        if self._snapshot_steps is not None:
            return self._snapshot_steps
        if step_s <= 0:
            return 1
        return max(1, math.ceil(self._stall_s / (_STALL_SHARE * step_s)))

    def _announce(self, digest: str, *, always: bool) -> None:
        assert self._link is not None
        now = time.monotonic()
        if always or now - self._announced_at >= _ANNOUNCE_PERIOD_S:
            self._announced_at = now
            step = self._snapshot_step
            self._link.say("snapshot", stage=self._progress.stage, step=step, digest=digest)

    def _snapshot_image(self) -> StateImage | None:
        """Return the newest snapshot if it is of the committed state."""
        segment, step = self._segment, self._snapshot_step
        if segment is None or step is None or self._snapshot_version != self._progress.version:
            return None
        return read_snapshot([segment.fd], self._progress.stage, step)

    def _capture(self) -> StateImage:
        layout = self._adapter.layout()
        if len(self._buffer) != layout.total_bytes:
            self._buffer = bytearray(layout.total_bytes)
        self._adapter.copy_out(memoryview(self._buffer))
        return StateImage(
            status=self._progress.status(),
            scalars=self._adapter.scalars(),
            layout=layout,
            data=memoryview(self._buffer),
        )


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every
