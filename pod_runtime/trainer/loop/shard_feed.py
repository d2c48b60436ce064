"""Feed a stage's steps with this rank's shards, from the cursor on."""

from collections.abc import Callable
from typing import Any

from pod_runtime.activity import Doing
from pod_runtime.trainer.data.readers import (
    InlineReader,
    KeptSteps,
    ReadFrom,
    ShardBatch,
    ShardOrder,
    ShardRange,
    ShardReader,
    ShardSource,
    ThreadReader,
    factory_items,
    loader_items,
)
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.membership.stage import TrainerStage

_WAIT_S = 0.05  # how long a rank waits for data before it looks after its launcher

ReaderFactory = Callable[[ReadFrom], Any]


class ShardFeed:
    """Reads by whatever the script has given: a dataset, a loader, or a reader of its own."""

    def __init__(
        self,
        stage: TrainerStage,
        source: DataSource,
        order: ShardOrder,
        factory: ReaderFactory | None,
    ) -> None:
        """`factory` makes the script's own reader; None: the source is read."""
        self._stage, self._source, self._order = stage, source, order
        self._factory = factory
        self._reader: ShardReader | None = None  # None: nothing has been read yet
        self._kept = KeptSteps()  # for the script's own reader, which has another thread
        # Hashes of what `shards` has read for the script's own reader, by (epoch, step, shard).
        self._drawn_ahead: dict[tuple[int, int, int], int | None] = {}

    def take(self, shard_range: ShardRange) -> ShardBatch:
        """Return a shard's batch; parks with the other ranks while data do not come."""
        activity = self._stage.member.activity
        activity.begin(Doing.READING)
        self._note_kept()
        while (found := self._take(shard_range)) is None:
            try:
                self._stage.member.wait_for_data()
            except PeerLost as error:
                self._stage.member.end_after_peer_lost(error, state_is_committed=True)
        self._stage.member.have_data()
        activity.begin(Doing.STEPPING)
        if self._drawn_ahead:
            return found._replace(drawn=self._drawn_ahead.pop(found[:3], found.drawn))
        return found

    def _take(self, shard_range: ShardRange) -> ShardBatch | None:
        if self._reader is None:
            self._reader = self._start_reader(shard_range)
        try:
            return self._reader.take(shard_range, _WAIT_S)
        except Exception:
            if self._factory is None:  # a script may catch it, and go on with this shard
                self._reader.close()
                self._reader = None
            raise

    def shards(self, source: DataSource, *, with_ids: bool) -> ShardSource:
        """Return this rank's shards of `source` from the cursor on, for the script's own reader."""
        return ShardSource(
            source,
            self._order,
            self._stage.progress.cursor,
            self._stage.framework.data,
            with_ids=with_ids,
            note=self._note_drawn if self._factory is not None else None,
        )

    @property
    def is_of_one_epoch(self) -> bool:
        """It ends with the epoch: its workers' copies of the dataset are as that began."""
        has_workers = self._factory is None and self._source.num_workers > 0
        return has_workers and not self._source.keeps_workers

    def close(self) -> None:
        if self._reader is not None:
            self._note_kept()
            self._reader.close()

    def _note_kept(self) -> None:
        if self._factory is not None:
            self._kept.steps = self._stage.state_manager.kept_steps

    def _note_parked(self) -> None:
        self._note_kept()
        self._kept.then()

    def _note_drawn(self, item: ShardBatch) -> None:
        self._drawn_ahead[item[:3]] = item.drawn

    def _start_reader(self, first: ShardRange) -> ShardReader:
        cursor, order, source = self._stage.progress.cursor, self._order, self._source
        if self._factory is not None:
            batches = order.batches
            bounds = [batches.shard(batches.batch_size, shard) for shard in order.shards]
            where = ReadFrom(
                epoch=cursor.epoch,
                step=cursor.step,
                offset=cursor.offset,
                global_step=cursor.global_step,
                rank=self._stage.member.rank,
                world_size=self._stage.member.world_size,
                first_shard=order.shards.start,
                stop_shard=order.shards.stop,
                micro_batch=batches.micro_batch,
                shard_samples=tuple(stop - start for start, stop in bounds),
                kept=self._kept,
            )
            self._stage.state_manager.when_parked = self._note_parked
            made = self._factory(where)  # here, not in the thread: it may start worker processes
            return ThreadReader(lambda: factory_items(made))
        if source.num_workers > 0:
            items = loader_items(
                source, order, cursor, self._stage.framework.data, first=first,
                to_epoch_end=not source.keeps_workers,
            )  # fmt: skip
            # Which samples are read is known; collate_fn may put them along any axis.
            return ThreadReader(lambda: items, counts_samples=False)
        return InlineReader(source, order, self._stage.framework.data)
