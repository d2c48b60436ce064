"""The elastic loop: epochs and steps of a training whose trainers may change at any step."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from pod_runtime.env import TrainerEnv
from pod_runtime.trainer.data.readers import (
    FedReader,
    InlineReader,
    ReadFrom,
    ShardBatch,
    ShardOrder,
    ShardRange,
    ShardReader,
    ShardSource,
    factory_items,
    loader_items,
)
from pod_runtime.trainer.data.source import make_source
from pod_runtime.trainer.data.step import Epoch, EpochPosition, Step
from pod_runtime.trainer.data.streams import seed_shard
from pod_runtime.trainer.errors import PeerLost, StageChanged, StateError, UsageError
from pod_runtime.trainer.frameworks.adapter import Adapter
from pod_runtime.trainer.loop.evaluation import Fn, evaluate
from pod_runtime.trainer.loop.warmup import warmup_step
from pod_runtime.trainer.membership.link import StageStart
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.membership.stage import StageJoiner, TrainerStage
from pod_runtime.trainer.membership.termination import on_sigterm
from pod_runtime.trainer.progress.agreement import ExchangeResult
from pod_runtime.trainer.progress.batches import rank_shards
from pod_runtime.trainer.progress.drawn import add
from pod_runtime.trainer.progress.scaling import Policy

logger = logging.getLogger(__name__)

_WAIT_S = 0.05  # how long a rank waits for data before it looks after its launcher
_SIZES = re.compile(r"shape|dimension|\bsizes?\b|\blength|InvalidArgument|broadcast", re.I)
_SMOOTHING = 0.1  # weight of the newest step in the mean step time
_FIRST_STEPS = 3  # after each of which the script is checked; later, where the state is read


class Loop:
    """Runs in every trainer; see README for the ten lines that it takes."""

    _newest: ClassVar["Loop | None"] = None  # None: this process has not made any
    # Also of one whose making failed:
    _finished = False
    _stage: TrainerStage | None = None  # None: prepared beside an older stage, which trains on
    _open_step: Step | None = None  # None: between two steps

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        train_set: Any = None,
        *,
        epochs: int,
        batch_size: int | None = None,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        save_steps: int = 200,
        keep_checkpoints: int = 3,
        shards: int | None = None,
        loss: str = "mean",
        scaler: Any | None = None,
        policy: Policy | None = None,
        lr_warmup_steps: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        reader: Callable[[ReadFrom], Any] | None = None,
        steps_per_epoch: int | None = None,
        snapshot_steps: int | str = "auto",
        all_reduce: str = "flat",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Join the stage, take over its state, and return when training may begin.

        Args:
            train_set: a map-style dataset, or a `paddle.io.DataLoader`, whose dataset, batch size
                (as the global one), order, collate_fn and workers are taken over.
            epochs: passes over the data, those before a restore included.
            batch_size: of the global batch, over all trainers.
            checkpoint: folder or fsspec URL; None: no checkpoints.
            shards: V, into how many a global batch is cut; fixed for the run. None: as stored,
                else the most trainers that the job may have.
            loss: "mean" if the loss is the mean over a shard, "sum" if it is the sum.
            policy: "fixed_global", "linear", or a callable (old_world, new_world) -> Scale;
                None: the job's, "fixed_global" unless it was submitted with another.
            lr_warmup_steps: for "linear", after a jump of the world size.
            reader: called as reader(ReadFrom), returns an iterator of (epoch, step, shard,
                fields...) in order; called again after every cut-over.
            steps_per_epoch: for a reader without a dataset.
            snapshot_steps: steps between snapshots in memory; "auto": as many as keep the stall
                below 1 % of the time.
            all_reduce: "flat" sums all gradients at once after the last shard; "overlapped" sums
                them bucket by bucket while the last shard's backward pass still runs.
            extra: objects with state_dict and set_state_dict that belong to the state.

        Raises:
            UsageError: an argument is wrong; the text says what would be right.
            StateError, CheckpointError: the state that is there cannot be continued.
        """
        settings = LoopSettings(
            epochs=epochs,
            seed=seed,
            checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            save_steps=save_steps,
            keep_checkpoints=keep_checkpoints,
            shards=shards,
            loss=loss,
            policy=policy,
            lr_warmup_steps=lr_warmup_steps,
            steps_per_epoch=steps_per_epoch,
            snapshot_steps=snapshot_steps,
            all_reduce=all_reduce,
        )
        before, Loop._newest = Loop._newest, self
        if before is not None and before._finished:
            before._let_go()
        self._settings = settings
        self._source = make_source(
            train_set,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            has_reader=reader is not None,
        )
        if self._source.length is None and steps_per_epoch is None:
            raise UsageError(
                "steps_per_epoch: a reader without a dataset needs it; it says when an epoch ends"
            )
        self._reader_factory = reader
        self._reader: ShardReader | None = None  # None: nothing has been read yet
        self._open_step = None
        self._drawn: int | None = 0  # this step, by this rank: sum of hashes; None: not known
        # What `shards` has drawn for the script's own reader, by (epoch, step, shard). Another one
        # for each reader: the one before may still read ahead.
        self._drawn_ahead: dict[tuple[int, int, int], int | None] = {}
        self._step_s = 0.0  # smoothed; 0: no step yet
        self._verdict: ExchangeResult | None = None  # of the newest exchange; None: there was none
        self._evaluated_at = -1  # version of the progress at the last evaluation
        self._finished = False
        self._stop_asked = False
        self._is_warming_up = False
        self._is_restored = False  # and the script has not come to where the state goes on
        self._watches_modes = False
        self._modes: dict[str, bool] = {}  # that the body of the epoch set before the state came
        self._has_set_more = False  # and not only these
        self._is_noted = False  # what the model is like before the first step
        self._epoch: Epoch | None = None  # None: none was asked for
        self._stage = None
        env = TrainerEnv.read(os.environ)
        self._joiner = StageJoiner(
            settings,
            self._source,
            env,
            make_adapter=lambda header_size: _paddle_adapter(
                model,
                optimizer,
                header_size=header_size,
                scaler=scaler,
                extra=extra,
                all_reduce=all_reduce,
                join_on_gpu=env.join_on_gpu,
            ),
        )
        self._adapter: Adapter = self._joiner.adapter
        if not self._joiner.overlaps:
            self._enter()

    def _enter(self) -> TrainerStage:
        """Become a member of the stage, if that has not happened yet; may wait for its commit."""
        if self._stage is None:
            self._note_modes()
            self._adopt(self._joiner.enter())
            self._is_restored = self._progress.cursor.global_step > 0
            if self._epoch is not None:
                self._begin_amid_body()
            if not self._is_warming_up:
                self._joiner.settled()
            if self._epoch is not None:
                self._epoch.find()  # before any of its steps is made
        assert self._stage is not None
        return self._stage

    # A state from between two epochs goes on with the body of the next one, any other with the
    # steps that are left. What the script does to the plain part of the state before that point
    # is undone there: a new process comes by lines that others have behind them.

    def _go_on(self, *, with_steps: bool) -> None:
        """The script has come to the body of an epoch, or to its steps."""
        if self._is_restored and with_steps == (self._progress.cursor.step > 0):
            self._is_restored = False
            self._adapter.load_again()

    def _note_modes(self) -> None:
        if self._watches_modes:
            self._watches_modes = False
            self._modes, self._has_set_more = self._adapter.watched()

    def _begin_amid_body(self) -> None:
        """The state has just been loaded, and the body of its epoch has begun before that."""
        if self._progress.cursor.step:
            return
        if self._has_set_more and self._progress.cursor.global_step:
            raise StateError(
                f"before its first step, epoch {self._progress.cursor.epoch} has set the learning "
                f"rate, a scheduler, flags or options, and the state that it begins from has come "
                f"after that; the prepared trainers are started again without preparation"
            )
        self._is_restored = False
        self._adapter.set_modes(self._modes)

    def _adopt(self, stage: TrainerStage) -> None:
        self._stage, self._progress, self._member = stage, stage.progress, stage.member
        batches = stage.progress.batches
        self._order = ShardOrder(
            stage.progress.run,
            batches,
            rank_shards(self.rank, self.world_size, batches.shards),
        )
        self._committed_at = time.monotonic()
        self._evaluated_at = -1
        unowned = self._adapter.unowned()
        if unowned and self.rank == 0 and stage.progress.cursor.global_step == 0:
            logger.warning(
                "no optimizer has %s: not trained; freeze what shall stay as it is "
                "(stop_gradient = True), or give it to the optimizer",
                _few(unowned),
            )
        if stage.link is not None:
            on_sigterm(stage.member.end_soon, stage.member.end_if_waiting)

    def _move(self, start: StageStart) -> None:
        """Go on in the next stage, amid this script: the launcher has committed it."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._adopt(self._joiner.move(self._enter(), start))
        self._step_s = 0.0
        if self._epoch is not None:
            self._epoch.moved(self._find_epoch())

    # --- what a script asks

    @property
    def rank(self) -> int:
        return self._joiner.rank

    @property
    def world_size(self) -> int:
        return self._joiner.world_size

    @property
    def step_count(self) -> int:
        """Global steps committed since the training began."""
        return self._enter().progress.cursor.global_step

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0 on; an epoch is over when the next is asked for."""
        return self._enter().progress.cursor.epoch

    @property
    def shards_per_batch(self) -> int:
        """V: into how many shards a global batch is cut."""
        return self._enter().progress.batches.shards

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left; an interrupted one goes on amid its steps.

        An epoch is committed, with a checkpoint, when the next one is asked for. That at the end
        of the training is written again and again until it is there.

        Raises:
            UsageError: an epoch was left before its last step.
        """
        while self._stage is None or not self._progress.is_finished:
            epoch = self._epoch = Epoch(self._find_epoch, self._steps)
            if self._stage is not None:
                epoch.find()
                self._go_on(with_steps=False)
            else:
                self._watches_modes = True
                self._adapter.watch()
            yield epoch
            progress = self._enter().progress
            if progress.is_finished:  # as it was when this stage began, and it had a warm-up step
                break
            if not progress.epoch_is_over:
                raise UsageError(
                    f"epoch {epoch.number} was left after {progress.cursor.step} of "
                    f"{epoch.steps} steps; run all of them, without break (loop.stop() ends "
                    f"the training after this epoch)"
                )
            with self._surviving():
                stop, request = self._member.end_epoch(self._stop_asked)
                progress.commit_epoch()
                if stop:
                    progress.stop()
                self._enter().state_manager.after_epoch(request)
        with self._surviving():
            self._finish()

    def stop(self) -> None:
        """End the training after this epoch, for early stopping; do not leave the loop by `break`.

        It is enough that one rank calls it. The final checkpoint is written as at the last epoch.
        """
        self._stop_asked = not self._is_warming_up

    def evaluate(
        self, test_set: Any, fn: Fn, *, batch_size: int | None = None, collate_fn: Any = None
    ) -> dict[str, float]:
        """Return the sums over `test_set` of what `fn(*batch)` returns, over all ranks.

        Every rank calls it. The model evaluates without gradients. A cut-over that comes within
        starts it again in the next stage. Of a `paddle.io.DataLoader`, dataset, batch size,
        drop_last, collate_fn and workers are taken over.
        """
        source = make_source(
            test_set,
            batch_size=batch_size,
            shuffle=False,
            drop_last=None,  # a loader's
            collate_fn=collate_fn,
            num_workers=None,
            has_reader=False,
            name="evaluate",
        )
        self._enter()
        with self._surviving():
            while True:
                try:
                    found = evaluate(
                        self._adapter,
                        source,
                        fn,
                        rank=self.rank,
                        world_size=self.world_size,
                        meet=self._meet_between_steps,
                    )
                except StageChanged as change:
                    self._move(change.start)
                else:
                    self._evaluated_at = self._progress.version
                    return found

    def log(self, **metrics: float) -> None:
        """Show these numbers with the job's progress; those of rank 0 count."""
        if self._is_warming_up:
            return
        link = self._enter().link
        values = {name: self._adapter.to_float(value) for name, value in metrics.items()}
        if self.rank == 0:
            logger.info(
                "epoch %d, step %d: %s",
                self._progress.cursor.epoch,
                self.step_count,
                ", ".join(f"{name} {value:.6g}" for name, value in values.items()),
            )
        if link is not None:
            link.set_metrics(values)
            self._tell_step(at_once=True)

    def shards(self, dataset: Any, *, with_ids: bool = False) -> ShardSource:
        """Return this rank's shards of `dataset` from the cursor on, for a reader of one's own.

        Samples are cut as those of the training set: `dataset` has as many. Of a
        `paddle.io.DataLoader`, dataset and workers are taken over, and batches stay in the host's
        memory. `with_ids`: the samples' ids, (N,) int64, come before the fields.
        """
        source = make_source(
            dataset,
            batch_size=self._source.batch_size,
            shuffle=self._source.shuffle,
            drop_last=self._source.drop_last,
            collate_fn=self._source.collate,
            num_workers=None,  # a loader's; else none
            has_reader=False,
            name="shards",
        )
        subsets = {source.subset, self._source.subset}
        if source.length != self._source.length or (None not in subsets and len(subsets) > 1):
            raise UsageError(
                f"shards: the dataset has {source.length} samples, the training set "
                f"{self._source.length}, or they are others; pass the same to Loop as train_set"
            )
        cursor = self._enter().progress.cursor
        return ShardSource(
            source,
            self._order,
            cursor,
            self._adapter,
            with_ids=with_ids,
            note=partial(_note, self._drawn_ahead) if self._reader_factory is not None else None,
        )

    # --- steps

    def _find_epoch(self) -> EpochPosition:
        progress = self._enter().progress
        cursor = progress.cursor
        left = 0 if progress.is_finished else progress.batches.steps_left(cursor.offset)
        return EpochPosition(number=cursor.epoch, first_step=cursor.step, steps=cursor.step + left)

    def _make_warmup_step(self) -> Step | None:
        if self._reader_factory is not None:  # it may make more of the samples than they are
            return None
        return warmup_step(
            self._adapter,
            self._source,
            shards=self._joiner.shards,
            seed=self._settings.seed,
            loss=self._settings.loss,
            number=lambda: self._enter().progress.cursor.global_step,
            index=lambda: self._enter().progress.cursor.step,
            is_over=lambda: self._stage is not None,
        )

    def _warm_up(self) -> Iterator[Step]:
        """Yield one step that does not count, while an older stage trains; then enter this one."""
        step = self._make_warmup_step()
        if step is not None:
            self._open_step, self._is_warming_up = step, True
            yield step
            self._open_step, self._is_warming_up = None, False
        if self._stage is None:
            self._enter()
        else:
            self._joiner.load_again()  # what the rest of the body did to the state is undone
            self._begin_amid_body()
        self._joiner.settled()
        self._committed_at = time.monotonic()

    def _steps(self) -> Iterator[Step]:
        if self._open_step is not None:
            raise UsageError("epoch: iterated over twice; use one `for step in epoch:`")
        if not self._is_noted:
            self._is_noted = True
            self._adapter.news()
        if self._stage is None:
            self._note_modes()
            yield from self._warm_up()
        else:
            self._go_on(with_steps=True)
        self._is_restored = False
        adapter = self._adapter
        while not self._progress.is_finished and not self._progress.epoch_is_over:
            progress = self._progress  # another one where the trainer has moved
            cursor = progress.cursor
            start, stop = progress.batches.batch(cursor.offset)
            step = self._open_step = Step(
                number=partial(int, cursor.global_step),
                index=partial(int, cursor.step),
                ranges=self._order.of_batch(cursor.epoch, cursor.step, cursor.offset),
                samples=stop - start,
                ids=self._order.ids,
                adapter=adapter,
                loss=self._settings.loss,
                fetch=self._fetch,
                update=self._update,
            )
            self._drawn = 0
            adapter.begin_step()
            yield step
            if not step.is_updated:
                raise UsageError(
                    f"step {step.number}: step.update() is missing; call it once per step, after "
                    f"`for batch in step:`"
                )
            self._open_step = None
            with self._surviving():
                self._commit()

    def _fetch(self, shard_range: ShardRange) -> Any:
        if self._reader is None:
            self._reader = self._start_reader()
        taken = self._reader.take(shard_range, _WAIT_S)
        while taken is None:
            with self._surviving():
                self._member.wait_for_data()
            taken = self._reader.take(shard_range, _WAIT_S)
        self._member.have_data()
        drawn = self._drawn_ahead.pop(
            (shard_range.epoch, shard_range.step, shard_range.shard), taken.drawn
        )
        self._drawn = add(self._drawn, drawn)
        seed_shard(
            self._adapter,
            self._progress.run.seed,
            shard_range.epoch,
            shard_range.step,
            shard_range.shard,
        )
        return self._adapter.to_batch(taken.batch)

    def _update(self, step: Step) -> None:
        with self._surviving():
            verdict = self._member.exchange(step.samples_done, self._drawn)
            self._verdict = verdict
            if verdict.samples != step.samples:
                raise UsageError(
                    f"step {step.number}: {verdict.samples} samples were computed, its batch has "
                    f"{step.samples}; all trainers must run the same script over the same data"
                )
            self._adapter.apply(
                filled_shards=self._progress.batches.filled_shards(step.samples),
                lr_factor=self._progress.scaling.lr_factor(step.number),
            )

    def _commit(self) -> None:
        assert self._verdict is not None
        self._progress.commit_step(self._verdict.drawn)
        if (
            self._verdict.request.snapshot
            or self._progress.epoch_is_over
            or self._progress.cursor.global_step <= _FIRST_STEPS
        ):
            self._check_script()
        now = time.monotonic()
        took = now - self._committed_at
        self._committed_at = now
        self._step_s = took if not self._step_s else (
            (1 - _SMOOTHING) * self._step_s + _SMOOTHING * took
        )  # fmt: skip
        self._tell_step(at_once=False)  # before a snapshot, which may take longer the first time
        self._enter().state_manager.after_step(self._step_s, self._verdict.request)
        if self._verdict.cut:
            try:
                self._member.park()
            except StageChanged as change:
                self._move(change.start)
            self._committed_at = time.monotonic()

    def _check_script(self) -> None:
        self._adapter.check_unowned()
        news = self._adapter.news()
        if news and self.rank == 0:
            logger.warning(
                "changed since the first step, and no state can carry it: %s. A trainer that is "
                "started anew builds model and optimizer without that; do it before the loop",
                _few(news),
            )

    def _meet_between_steps(self) -> None:
        # Within a step the update is made and not committed: no state to put away. The cut waits.
        if self._open_step is None:
            # A trainer that comes new into the stage begins with the first evaluation after the
            # last committed step; so must those who move.
            self._member.meet(may_move=self._evaluated_at != self._progress.version)

    def _tell_step(self, *, at_once: bool) -> None:
        link = self._enter().link
        if link is not None:
            link.tell_step(
                step=self._progress.cursor.global_step,
                epoch=self._progress.cursor.epoch,
                total_steps=self._progress.total_steps,
                step_s=self._step_s,
                at_once=at_once,
            )

    def _start_reader(self) -> ShardReader:
        cursor, order, source = self._progress.cursor, self._order, self._source
        if self._reader_factory is not None:
            factory = self._reader_factory
            self._drawn_ahead = {}
            where = ReadFrom(
                epoch=cursor.epoch,
                step=cursor.step,
                offset=cursor.offset,
                global_step=cursor.global_step,
                rank=self.rank,
                world_size=self.world_size,
                first_shard=order.shards.start,
                stop_shard=order.shards.stop,
                micro_batch=order.batches.micro_batch,
            )
            made = factory(where)  # here, not in the thread: it may start worker processes
            return FedReader(lambda: factory_items(made))
        if source.num_workers > 0:
            items = loader_items(source, order, cursor, self._adapter)
            return FedReader(lambda: items)
        return InlineReader(source, order, self._adapter)

    # --- the end

    def _finish(self) -> None:
        """Have the final checkpoint on disk, and say that the training is done."""
        if self._finished:
            return
        if self._reader is not None:
            self._reader.close()
        stage = self._enter()
        while not stage.is_saved:
            try:
                self._member.write_final()
            except StageChanged as change:
                self._move(change.start)
                stage = self._enter()
            else:
                break
        self._joiner.close()
        self._finished = True
        stage.state_manager.note_account()
        self._progress.note_done()
        if stage.link is not None:
            stage.link.say("done", step=self.step_count)

    def _let_go(self) -> None:
        """Close what this loop has open, as the script begins another one."""
        if self._reader is not None:
            self._reader.close()
        if self._stage is not None:
            self._stage.state_manager.close()
            self._stage.progress.close()
            if self._stage.link is not None:
                self._stage.link.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """End this trainer as a victim when a peer is lost in what is done within."""
        try:
            yield
        except PeerLost as error:
            step = self._open_step
            self._member.end_after_peer_lost(
                error, state_is_committed=step is None or not step.is_updated
            )


def _few(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"


def _note(drawn: dict[tuple[int, int, int], int | None], item: ShardBatch) -> None:
    drawn[item[:3]] = item.drawn


def _paddle_adapter(*args: Any, **kwargs: Any) -> Adapter:
    from pod_runtime.trainer.frameworks.paddle.adapter import PaddleAdapter

    return PaddleAdapter(*args, **kwargs)


# --- what `trainer_main` asks when the script has raised


def committed_step() -> int | None:
    """Return how many steps are committed; None: this process is in no stage."""
    loop = Loop._newest
    if loop is None or loop._stage is None:
        return None
    return loop._stage.progress.cursor.global_step


def explain_error(error: BaseException) -> str:
    """Return what may explain an error in the body of the loop; "": nothing does.

    A body that passes alone, where the shard is the whole batch, fails where it takes the batch
    size for the size of what it has.
    """
    loop = Loop._newest
    step = None if loop is None else loop._open_step
    here = None if step is None else step.shard_samples
    if step is None or here is None or here == step.samples or not _SIZES.search(str(error)):
        return ""
    return (
        f"the batch of {step.samples} is cut into shards, and the loop's body has one of {here} "
        f"here: take sizes from the shard (len), not from the batch size"
    )
