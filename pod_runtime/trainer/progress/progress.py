"""Keep where a training stands: cursor, ledger and scaling, which commits move."""

import json
from dataclasses import replace

from job_server.api.wire import encode
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor, next_epoch
from pod_runtime.trainer.progress.best import BestCheckpoint, with_best
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord
from pod_runtime.trainer.progress.ledger import Ledger, LedgerFile, RunInfo, StageEntry
from pod_runtime.trainer.progress.loop_status import LoopOrigin, LoopStatus
from pod_runtime.trainer.progress.promises import promise_text
from pod_runtime.trainer.progress.scaling import Policy, Scaling, first_scaling, rescale, shards_for


class TrainingProgress:
    """The mutable part of `LoopStatus`. Every rank keeps an equal one."""

    def __init__(
        self,
        before: LoopStatus,
        scaling: Scaling,
        *,
        stage: int,
        steps_per_epoch: int | None,
        accumulation_steps: int = 1,
        order: EpochOrder | None = None,
    ) -> None:
        """Continue from `before` as stage `stage`, at the scaling that holds now.

        Args:
            order: what the sampler drew for the epoch; None: there is no sampler, or no epoch left.
        """
        self.stage = stage
        self.cursor = before.cursor
        self.scaling = scaling
        by_share = before.promise == "statistics"
        self.batches = BatchPlan(
            batch_size=scaling.batch_size,
            shards=scaling.world_size * accumulation_steps
            if by_share
            else shards_for(scaling, before.batch_size, before.shards),
            dataset_length=before.run.dataset_length,
            # Where no epoch is left, the length of the data says nothing about a sampler's.
            drop_last=before.run.drop_last and (order is not None or before.run.sampler is None),
            steps_per_epoch=steps_per_epoch,
            is_even=by_share,
        )
        self.version = 0  # +1 with every change of the committed state
        self._before = before
        self._samples_seen = before.samples_seen
        self._ledger = Ledger(before.ledger)
        self._stopped = before.stopped
        self.stops = before.stops  # the script has ended the training after this epoch
        self.best = before.best  # by metric
        self._orders = {each.epoch: each for each in before.orders}
        self._orders_json = ""  # of all of them; "": to be made
        self._file: LedgerFile | None = None  # None: another rank writes
        self.order: EpochOrder | None = None  # of the epoch at the cursor; None: no sampler
        if order is not None:
            self.begin_epoch(order)

    @property
    def run(self) -> RunInfo:
        return self._before.run

    def choose_shards(self, shards: int) -> None:
        """Cut batches into so many shards; only before the first step."""
        assert self.cursor.global_step == 0
        self._before = replace(self._before, shards=shards)
        self.batches = replace(self.batches, shards=shards)
        self.version += 1

    @property
    def promise(self) -> str:
        """What the training promises, and its number of shards, for people."""
        text = promise_text(self._before.promise, self.batches.shards)
        if self.run.dataset_length is None:
            text += "; a stream, each sample at least once"
        return text

    @property
    def is_by_share(self) -> bool:
        """Each trainer computes its share of a batch in one piece."""
        return self._before.promise == "statistics"

    @property
    def step(self) -> int:
        """As that of `LoopStatus`."""
        return self._before.steps_before + self.cursor.global_step

    @property
    def total_steps(self) -> int:
        """`step` at the end of this loop, if all epochs are as long as this one."""
        cursor = self.cursor
        epochs_after = max(0, self.run.epochs - cursor.epoch - 1)
        here = self.batches.steps_left(cursor.offset) if cursor.epoch < self.run.epochs else 0
        return self.step + here + epochs_after * self.batches.steps_left(0)

    def begin_stage(self, restored_from: tuple[int, int] | None, file: LedgerFile | None) -> None:
        """Open this stage in the ledger; call when the stage is committed, not before.

        Args:
            restored_from: (stage, step of this loop) of the state it began from; None: afresh.
            file: where rank 0 writes; None on the others.
        """
        entry = StageEntry(
            stage=self.stage,
            restored_stage=None if restored_from is None else restored_from[0],
            restored_step=0 if restored_from is None else restored_from[1],
            world_size=self.scaling.world_size,
            batch_size=self.scaling.batch_size,
            epoch_samples=self.batches.epoch_samples,
            restored_drawn=self._ledger.newest_drawn,
            promise=self._before.promise,
            restored_offset=self.cursor.offset,
        )
        if file is not None:
            file.begin_run(self.run, self._ledger.stages, self._before.run_id, self._records)
            self._file = file
            if self.order is not None:
                file.put_order(self.order)
        self._ledger.begin(entry, file, joins_epochs=self.run.sampler is None)

    def commit_step(self, drawn: int | None = None) -> None:
        """The global batch at the cursor counts.

        Args:
            drawn: sum of its samples' hashes, as all ranks drew them; None: not known.
        """
        before = self.cursor
        _start, stop = self.batches.batch(before.offset)
        self.cursor = self.batches.advance(before)
        self._samples_seen += stop - before.offset
        self._ledger.commit(
            epoch=before.epoch,
            step=self.cursor.global_step,
            start=before.offset,
            stop=stop,
            drawn=drawn,
        )
        self.version += 1

    def commit_epoch(self) -> None:
        """The epoch at the cursor is over."""
        self.cursor = next_epoch(self.cursor)
        self.version += 1

    def begin_epoch(self, order: EpochOrder) -> None:
        """Read the epoch at the cursor in the order that a sampler has drawn for it."""
        self.order = order
        self.batches = replace(
            self.batches,
            dataset_length=len(order.ids),
            ends=order.ends,
            is_even=self.batches.is_even or order.ends is not None,  # of whatever size they are
        )
        self._orders[order.record.epoch] = order.record
        self._orders_json = ""
        if self._file is not None:
            self._file.add_order(order.record)
            self._file.put_order(order)

    @property
    def _records(self) -> tuple[OrderRecord, ...]:
        return tuple(self._orders.values())

    def stop(self) -> None:
        """No further epoch is wanted."""
        self._stopped = True
        self.version += 1

    def note_best(self, best: BestCheckpoint) -> None:
        """A checkpoint of this state is kept.

        The version stays: a trainer that goes on from the step's snapshot evaluates again, and
        comes to the same.
        """
        self.best = with_best(self.best, best)

    def forget_best(self, metric: str) -> None:
        """The best checkpoint of a metric is gone."""
        self.best = tuple(each for each in self.best if each.metric != metric)

    @property
    def epoch_is_over(self) -> bool:
        return self.batches.steps_left(self.cursor.offset) == 0

    @property
    def is_finished(self) -> bool:
        return self._stopped or self.cursor.epoch >= self.run.epochs

    def flush_ledger(self) -> None:
        self._ledger.flush()

    def note_account(self, *, snapshots: int, stall_s: float, elapsed_s: float) -> None:
        """Write what this stage's snapshots have cost so far."""
        self._ledger.note_account(snapshots=snapshots, stall_s=stall_s, elapsed_s=elapsed_s)

    def note_done(self) -> None:
        self._ledger.note_done(self.cursor.global_step)

    def close(self) -> None:
        """Write nothing more to the ledger's file."""
        self._ledger.close()

    def status(self) -> LoopStatus:
        """Return the status of a state that is taken now."""
        return replace(self._bare(), ledger=self._ledger.stages, orders=self._records)

    def status_json(self) -> str:
        """Return `status()` as JSON text; the ledger's closed rows are encoded once."""
        text = json.dumps(encode(self._bare()))
        assert text.endswith("}")
        if not self._orders_json:
            self._orders_json = json.dumps(encode(self._records))
        return f'{text[:-1]}, "ledger": {self._ledger.to_json()}, "orders": {self._orders_json}}}'

    def _bare(self) -> LoopStatus:
        return replace(
            self._before,
            stage=self.stage,
            cursor=self.cursor,
            samples_seen=self._samples_seen,
            scaling=self.scaling,
            ledger=(),
            orders=(),
            stopped=self._stopped,
            stops=self.stops,
            best=self.best,
        )


def fresh_status(
    *,
    run: RunInfo,
    batch_size: int,
    shards: int,
    reference_world: int,
    promise: str = "rounding",
    origin: LoopOrigin = LoopOrigin(),  # noqa: B008  it cannot be changed
) -> LoopStatus:
    """Return the status of a training that has not begun."""
    return LoopStatus(
        stage=0,
        cursor=Cursor(),
        samples_seen=0,
        shards=shards,
        batch_size=batch_size,
        run=run,
        promise=promise,
        origin=origin,
        scaling=first_scaling(batch_size, reference_world),
    )


def scaling_for(
    before: LoopStatus, policy: Policy, *, world_size: int, warmup_steps: int
) -> Scaling:
    """Return the scaling with which the training of `before` goes on on `world_size` trainers."""
    return rescale(
        policy,
        before.scaling,
        base_batch_size=before.batch_size,
        world_size=world_size,
        step=before.cursor.global_step,
        warmup_steps=warmup_steps,
    )
