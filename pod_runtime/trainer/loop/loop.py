"""The elastic loop: epochs and steps of a training whose trainers may change at any step."""

import linecache
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from pod_runtime.activity import Doing
from pod_runtime.channel_wire import Done
from pod_runtime.env import TrainerEnv
from pod_runtime.shim_wire import CLAIM
from pod_runtime.trainer.data.readers import ReadFrom, ShardSource
from pod_runtime.trainer.data.sampling import SampledOrders
from pod_runtime.trainer.data.source import make_source
from pod_runtime.trainer.data.step import Epoch, EpochPosition, Step
from pod_runtime.trainer.data.streams import (
    BeginOfEpoch,
    borrowed_numbers,
    seed_end,
    seed_epoch,
)
from pod_runtime.trainer.errors import PeerLost, StageChanged, StateError, UsageError
from pod_runtime.trainer.frameworks.choose import make_framework
from pod_runtime.trainer.frameworks.plain_values import as_list, is_of_script, to_float
from pod_runtime.trainer.loop.carried_names import carried_names
from pod_runtime.trainer.loop.evaluation import Fn, evaluate
from pod_runtime.trainer.loop.measure import MeasuringStep, smallest_shard
from pod_runtime.trainer.loop.rehearsal import Rehearsal, RehearsalOver
from pod_runtime.trainer.loop.script_changes import ScriptChanges
from pod_runtime.trainer.loop.stage_steps import StageSteps, TrainingStep, shortened
from pod_runtime.trainer.loop.warmup import WarmupStep
from pod_runtime.trainer.membership.link import StageStart
from pod_runtime.trainer.membership.restore import own_state
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.membership.stage import StageJoiner, TrainerStage
from pod_runtime.trainer.membership.termination import on_sigterm, was_told_to_end
from pod_runtime.trainer.membership.terms import script_values
from pod_runtime.trainer.progress.best import BestCheckpoint, check_metric, find_best
from pod_runtime.trainer.progress.loop_status import LoopsBefore
from pod_runtime.trainer.progress.scaling import Policy
from pod_runtime.trainer.progress.shard_choice import choose_shards, sizes_to_measure

logger = logging.getLogger(__name__)

# What frameworks and Python say where sizes do not fit: `mat1 and mat2 shapes`, `input batch_size
# (5) to match`, `iteration over a 0-d tensor`, `got 1D input`, `not enough values to unpack`.
_SIZES = re.compile(
    r"shape|dimension|sizes?\b|\blength|InvalidArgument|broadcast|\b\d-?D\b"
    r"|out of (?:range|bounds)|values to unpack|\belements?\b",
    re.I,
)
# `for i, step in enumerate(epoch):` counts what this process makes of a training.
_COUNTS = re.compile(r"\bin enumerate\(\s*[\w.]+(?:\(\))?\s*(?:,\s*(?:start\s*=\s*)?\d+\s*)?\)\s*:")
# PyTorch's and Paddle's words for a second backward pass over what the first has freed.
_GRAPH_IS_GONE = re.compile(r"the graph a second time|backward twice for the same subgraph")

# gloo's words where a rank has called what the others have not.
_WAITED = re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation")

_SEE_END_S = 0.5  # how soon a thread that waits for the stage sees that the script has ended


class Loop:
    """The training loop of a script, which goes on while trainers come and go.

        loop = elastic.Loop(model, optimizer, train_set, batch_size=64, epochs=10, checkpoint="c")
        for epoch in loop.epochs():
            model.train()
            for step in epoch:
                for images, labels in step:
                    step.backward(loss_of(model(images), labels))
                step.update()
            loop.log(accuracy=...)

    Every trainer makes one. Alone, without a launcher, it is a world of one.
    """

    _before: ClassVar[LoopsBefore] = LoopsBefore()  # the next one
    _newest: ClassVar["Loop | None"] = None  # None: this process has not made any
    _folders: ClassVar[set[str]] = set()  # of checkpoints, of the loops that it has made
    # Ids of the tensors of the script that the steps of loops before have left, by its names.
    _of_steps: ClassVar[dict[str, int]] = {}
    _rehearsal: ClassVar[Rehearsal | None] = None  # None: this process trains
    # Also of one whose making failed:
    _finished = False
    _has_left_stop_out = False
    _steps: StageSteps | None = None  # None: prepared while an older stage trains
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
        promise: str = "rounding",
        shards: int | None = None,
        accumulation_steps: int = 1,
        loss: str = "mean",
        scheduler: Any | None = None,
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
            model: what is trained, a torch.nn.Module or a paddle.nn.Layer; several: a list, or a
                dict by names.
            optimizer: of its parameters, of the same framework; several, which may be updated one
                by one: a list.
            train_set: a map-style dataset (`len` and an item for each index), or the framework's
                DataLoader, whose dataset, batch size (as the global one), order or sampler,
                collate_fn and workers are taken over; or an IterableDataset, alone or in a
                DataLoader. None: `reader` alone knows the data.
            epochs: passes over the data, those before a restore included.
            batch_size: samples of the global batch, over all trainers.
            seed: of the data's order and of the random streams; the same on all trainers.
            checkpoint: folder or fsspec URL, from whose newest checkpoint the training goes on;
                None: no checkpoints.
            save_steps: steps between two checkpoints; the ends of epochs have one anyway.
            keep_checkpoints: how many of this training stay, the newest ones.
            promise: what holds when the number of trainers changes. "rounding": the result depends
                on it by rounding only. "statistics": as with data parallel training, at its speed:
                each trainer computes its share of a batch in one piece.
            shards: V, into how many a global batch is cut; fixed for the run. None: as stored; at a
                fresh start the most trainers that the job may have, or more where fewer trainers
                would often wait for each other: what shards cost is then measured, and logged.
            accumulation_steps: batches that make one update. It takes all of them as its global
                batch, in so many times the shards; steps, `steps_per_epoch` and `save_steps` count
                updates. At an epoch's end an update may take fewer; `drop_last` leaves these out.
                With "statistics" a trainer computes its share of an update in so many pieces.
            loss: "mean" if the loss is the mean over a shard, "sum" if it is the sum, which is then
                divided by the size of the global batch: what is trained is the mean in both cases.
                Multiply a learning rate that was found for sums by `batch_size`.
            scheduler: the optimizer's learning rate scheduler, or a list of them; of PyTorch, where
                an optimizer does not know its own.
            scaler: the framework's loss scaler, of mixed precision.
            policy: "fixed_global", "linear", or a callable (old_world, new_world) -> Scale;
                None: the job's, "fixed_global" unless it was submitted with another.
            lr_warmup_steps: for "linear", after a jump of the world size.
            shuffle: whether each epoch has an order of its own. None: as the DataLoader has it,
                else it has.
            drop_last: whether a short batch at an epoch's end is left out. None: as the DataLoader
                has it, else it is not.
            collate_fn: makes a batch of a list of samples. None: as the DataLoader has it, else the
                framework's own.
            num_workers: processes that read. None: as the DataLoader has it, else none.
            reader: reads the data in place of the loop: called as reader(ReadFrom), returns an
                iterator of (epoch, step, shard, fields...) in order, as `shards` gives them; called
                again whenever the trainers change.
            steps_per_epoch: for a reader without a dataset, a stream, or a sampler without an end;
                a dataset without a sampler says itself when an epoch ends.
            snapshot_steps: steps between snapshots in memory; "auto": as many as keep the stall
                below 1 % of the time.
            all_reduce: "flat" sums all gradients at once after the last shard; "overlapped" sums
                them bucket by bucket while the last shard's backward pass still runs.
            extra: by name, other objects that belong to the state, with state_dict and
                set_state_dict.

        Raises:
            UsageError: an argument is wrong; the text says what would be right.
            StateError, CheckpointError: the state that is there cannot be continued.
        """
        for argument, value, is_right, expected in (
            ("reader", reader, callable(reader), "a function that returns an iterator"),
            ("scaler", scaler, hasattr(scaler, "scale"), "the framework's GradScaler"),
            ("checkpoint", checkpoint, isinstance(checkpoint, str | os.PathLike), "a path"),
        ):
            if value is not None and not is_right:
                raise UsageError(f"{argument}: expected {expected}, got {value!r}")
        settings = LoopSettings(
            epochs=epochs,
            seed=seed,
            checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            save_steps=save_steps,
            keep_checkpoints=keep_checkpoints,
            promise=promise,
            shards=shards,
            loss=loss,
            policy=policy,
            lr_warmup_steps=lr_warmup_steps,
            steps_per_epoch=steps_per_epoch,
            snapshot_steps=snapshot_steps,
            all_reduce=all_reduce,
            accumulation_steps=accumulation_steps,
        )
        if self._rehearsal is not None:  # it writes nothing, and reads in this process
            self._rehearsal.begin()
            settings = replace(settings, checkpoint=None, **self._rehearsal.settings(settings))
            num_workers = 0
        _show_log()
        self._thread, self._has_entered = threading.get_ident(), threading.Event()
        before, Loop._newest = Loop._newest, self
        if before is not None and before._finished:
            before._let_go()
        self._settings = settings
        self._models = as_list(model)
        self._has_checkpoint = checkpoint is not None
        self._source = make_source(
            train_set,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            has_reader=reader is not None,
            accumulation_steps=settings.accumulation_steps,
        )
        if self._source.length is None and steps_per_epoch is None:
            what = "a stream" if self._source.is_stream else "a reader without a dataset"
            raise UsageError(f"steps_per_epoch: {what} needs it; it says when an epoch ends")
        if steps_per_epoch is not None and self._source.knows_epochs:
            raise UsageError(
                f"steps_per_epoch: got {steps_per_epoch}, but the {self._source.length} samples of "
                f"the dataset say when an epoch ends; leave it out. For shorter epochs pass a "
                f"DataLoader whose sampler draws fewer: RandomSampler(dataset, num_samples=...)"
            )
        self._reader_factory = reader
        self._smallest_shard = smallest_shard(as_list(model))
        self._shards_asked = False  # the script knows V
        self._has_come_to_steps = False  # and what the model is like is noted
        self._epoch: Epoch | None = None  # None: none was asked for
        self._number = Loop._before.number  # among those of this process
        env = TrainerEnv.read(os.environ)
        self._is_in_job = env.channel is not None
        is_alone = env.pod_id is not None and not self._is_in_job
        if is_alone and "EDL_SERVICE" not in os.environ and not _is_trained(env.pod_dir):
            raise UsageError(
                "the pod's script has started this program by itself, and each pod would train "
                "alone; let it call the launcher: `python -m pod_runtime.launch SCRIPT`"
            )
        if settings.checkpoint is not None:
            self._take_folder(settings.checkpoint)
        values = script_values()
        self._values = {name: id(each) for name, each in values.items()}  # as the loop was made
        self._joiner = StageJoiner(
            settings,
            self._source,
            env,
            make_framework=lambda header_size: make_framework(
                model,
                optimizer,
                header_size=header_size,
                schedulers=as_list(scheduler),
                scaler=scaler,
                extra=extra,
                all_reduce=all_reduce,
                join_on_gpu=env.join_on_gpu,
            ),
            before=Loop._before,
            # A batch, and what is made of it, is this trainer's own.
            values={k: v for k, v in values.items() if Loop._of_steps.get(k) != id(v)},
        )
        Loop._before = replace(Loop._before, number=self._number + 1)
        self._source = self._joiner.source
        self._framework = self._joiner.framework
        self._framework.step.drop()  # gradients of before: of a first batch that built layers
        self._changes = ScriptChanges(
            self._framework.state, self._joiner.load_again, lambda: self._entered().cursor
        )
        if not self._joiner.overlaps:
            self._entered()

    def _entered(self) -> StageSteps:
        """Return the steps of this trainer's stage.

        Enters the stage first if that has not happened, which may wait for its commit. Another
        thread of the script waits until the one that trains has done that.

        Raises:
            UsageError: in a job, the script has made another loop, and has not ended this one.
        """
        if self._is_in_job and not self._finished and Loop._newest is not self:
            raise UsageError(
                "two loops at once: the script has made another one since, and in a job one trains "
                "at a time. Train them one after the other, or both models by one loop: "
                "Loop([a, b], [optimizer_a, optimizer_b], ...)"
            )
        if self._steps is None and threading.get_ident() != self._thread:
            while not self._has_entered.wait(_SEE_END_S):
                if not threading.main_thread().is_alive():
                    raise SystemExit  # the script has ended by an error, and waits for its threads
        if self._steps is None:
            self._changes.note()
            with borrowed_numbers(self._framework.data):
                steps = self._adopt(self._joiner.enter())
            self._changes.state_loaded(steps.cursor)
            if self._epoch is not None:
                self._changes.state_loaded_in_body(steps.cursor)
                if not self._has_come_to_steps:
                    self._changes.body_goes_on()
                if self._open_step is None and not self._changes.has_drawn:
                    self._seed_outside_of_steps(0)
            if not (self._is_warming_up or self._changes.is_pending):
                self._settle()
            if self._epoch is not None:
                self._epoch.find()  # before any of its steps is made
            self._has_entered.set()
        assert self._steps is not None
        return self._steps

    def _adopt(self, stage: TrainerStage) -> StageSteps:
        self._steps = self._make_steps(stage)
        if stage.progress.cursor.global_step == 0:  # later it is done with every commit
            self._framework.state.note_committed()
        unowned = self._framework.state.unowned()
        is_first = self.rank == 0 and stage.progress.cursor.global_step == 0
        if is_first and self._source.is_stream:
            logger.info(
                "train_set: %s is a stream: every epoch opens it and reads its first %d samples, "
                "each at least once, which nothing can prove",
                type(self._source.dataset).__name__, stage.progress.batches.epoch_samples,
            )  # fmt: skip
        if unowned and is_first:
            logger.warning(
                "no optimizer has %s: not trained; freeze what shall stay as it is (%s), or give "
                "it to the optimizer",
                shortened(unowned),
                self._framework.freezing,
            )
        if stage.link is not None:
            on_sigterm(stage.member.end_soon, stage.member.end_if_waiting)
        return self._steps

    def _make_steps(self, stage: TrainerStage) -> StageSteps:
        return StageSteps(
            stage, self._source, loss=self._settings.loss, factory=self._reader_factory
        )

    def _move(self, start: StageStart) -> None:
        """Go on in the next stage, in the middle of this script: the launcher has committed it."""
        steps = self._entered()
        steps.feed.close()
        self._adopt(self._joiner.move(steps.stage, start))
        if self._epoch is not None:
            self._epoch.moved(self._find_epoch())

    @property
    def _is_warming_up(self) -> bool:
        return self._open_step is not None and self._open_step.is_warmup

    @property
    def _is_begun_too_late(self) -> bool:
        """The body of an epoch was begun before the state came, and the training is complete."""
        is_begun = self._epoch is not None and not self._finished
        return is_begun and self._entered().stage.progress.is_finished

    @property
    def _counts(self) -> bool:
        """What the script does now is part of its training: no rehearsal, and no warm-up."""
        return self._rehearsal is None and not self._is_warming_up

    def _settle(self) -> None:
        """Drop the memory of the state that was loaded, unless it has to be loaded once more."""
        if not self._is_begun_too_late:
            self._joiner.settled()

    # --- what a script asks

    @property
    def rank(self) -> int:
        """Of this trainer, from 0 on. Do not keep it: it may change with the world size."""
        return self._joiner.rank

    @property
    def world_size(self) -> int:
        """How many trainers there are now."""
        return self._joiner.world_size

    @property
    def step_count(self) -> int:
        """Steps that the training has behind it, in all processes and epochs."""
        return self._entered().cursor.global_step

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0 on; an epoch is over when the next is asked for."""
        epoch = self._entered().cursor.epoch
        return epoch - 1 if self._is_begun_too_late else epoch

    @property
    def shards_per_batch(self) -> int:
        """V: into how many shards a global batch is cut."""
        self._shards_asked = True
        return self._entered().stage.progress.batches.shards

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left; an interrupted one goes on with the steps it still has.

        An epoch is committed, with a checkpoint, when the next one is asked for. The checkpoint at
        the end of the training is written again and again until it is there.

        Raises:
            UsageError: an epoch was left before its last step.
        """
        self._thread = threading.get_ident()  # may be another one than made the loop
        self._warn_of_count("epochs", "epoch.number")
        self._warn_of_carried()
        while self._steps is None or not self._steps.stage.progress.is_finished:
            epoch = self._epoch = Epoch(self._find_epoch, self._run_epoch)
            if self._steps is None:
                guess = self._joiner.running_epoch
                seed = self._settings.seed
                self._changes.watch(BeginOfEpoch(self._framework.data, seed, guess))
            else:
                self._seed_outside_of_steps(0)
                epoch.find()
                self._changes.body_reached(self._steps.cursor)
                if not self._changes.is_pending:
                    self._joiner.settled()
                if not self._has_come_to_steps:
                    self._changes.body_goes_on()
            yield epoch
            self._changes.end_reads()
            progress = self._entered().stage.progress
            if self._is_begun_too_late:
                self._joiner.load_again()  # what the body has done behind the steps is undone
                self._joiner.settled()
                break
            if not progress.epoch_is_over:
                raise UsageError(
                    f"epoch {epoch.number} was left after {progress.cursor.step} of "
                    f"{epoch.steps} steps; run all of them, without break (loop.stop() ends "
                    f"the training after this epoch)"
                )
            with self._surviving():
                self._end_epoch(self._entered())
            if self._rehearsal is not None:
                raise RehearsalOver
        if self._epoch is None and self.rank == 0:
            logger.warning(
                "the training was complete before this process began: the body of `for epoch in "
                "loop.epochs():` does not run here. What the script needs of it is computed after "
                "the loop (loop.evaluate), not taken from a variable that the body sets"
            )
        with self._surviving():
            self._finish()

    def _end_epoch(self, steps: StageSteps) -> None:
        stage = steps.stage
        stage.member.come_together("the end of an epoch")
        stop, request = stage.member.end_epoch(stage.progress.stops)
        stage.progress.commit_epoch()
        stage.framework.state.note_committed(of_epoch=True)
        if stop:
            stage.progress.stop()
        if not stage.progress.is_finished:
            steps.begin_epoch(self._joiner.next_order(stage.progress.cursor.epoch))
        stage.state_manager.after_epoch(request)

    def stop(self) -> None:
        """End the training after this epoch, for early stopping; do not leave the loop by `break`.

        It is enough that one rank calls it, and a crash or a change does not undo it. The final
        checkpoint is written as at the last epoch. In a trainer that its launcher ends (SIGTERM, to
        a handler that the script has set before the loop), it does nothing: the others go on.
        """
        if self._is_warming_up:
            return
        stage = self._entered().stage
        if stage.link is not None and was_told_to_end():
            if not self._has_left_stop_out:
                self._has_left_stop_out = True
                logger.warning(
                    "loop.stop() after SIGTERM is left out: that ends this trainer, and the "
                    "training goes on without it. `edl stop` ends the job"
                )
            return
        stage.progress.stops = True

    def save_best(self, metric: str, value: float, *, mode: str = "max") -> BestCheckpoint:
        """Keep a checkpoint of the present state if `value` is the best so far; return the best.

        It is in `checkpoint`/best/METRIC, until a better one replaces it, and nothing goes on from
        there by itself. Which value is the best is part of the state. All ranks call it with the
        same value, such as sums of `evaluate` give; within a step, after `step.update()`. It
        returns when the checkpoint is written. One that cannot be written is logged and returned
        all the same, but does not count: the next call compares with the one written before.

        Args:
            metric: its name; one that `log` shows, say.
            mode: "max" if a higher value is better, "min" if a lower one is.

        Raises:
            UsageError: an argument is wrong, or ranks have different values.
        """
        try:
            check_metric(metric, mode)
        except ValueError as error:
            raise UsageError(f"save_best: {error}") from error
        if not self._has_checkpoint:
            raise UsageError("save_best: it needs Loop(checkpoint=...), below which it writes")
        steps, step = self._entered(), self._open_step
        self._changes.end_reads()
        number = to_float(value)
        found = BestCheckpoint(
            metric=metric,
            mode=mode,
            value=number,
            stage=steps.stage.progress.stage,
            step=steps.stage.progress.step + (step is not None),
            epoch=self.epoch,
        )
        if self._is_warming_up:
            return found
        if step is not None and not step.is_updated:
            raise UsageError("save_best: call it after step.update(), or after the epoch's steps")
        before = find_best(steps.stage.progress.best, metric)
        if before is not None and before.mode != mode:
            raise UsageError(f"save_best: {metric} was kept with mode={before.mode!r} so far")
        self._check_meets("loop.save_best")
        with self._surviving():
            steps.stage.member.come_together("loop.save_best")
            if step is None:
                steps.came_together_at = steps.stage.progress.version
            if steps.stage.member.agree(number) is None:
                raise UsageError(
                    f"save_best: {metric} is not the same on all trainers (here {number:g}); give "
                    f"it what loop.evaluate has summed over all of them"
                )
            if isinstance(step, TrainingStep):
                before = step.best.get(metric, before)
            if not found.beats(before):
                return found if before is None else before
            if isinstance(step, TrainingStep):
                step.best[metric] = found  # when it is committed
            else:
                steps.keep_best(found)
        return found

    def evaluate(
        self, test_set: Any, fn: Fn, *, batch_size: int | None = None, collate_fn: Any = None
    ) -> dict[str, float]:
        """Return the sums over `test_set` of what `fn(*batch)` returns, over all trainers.

        Every trainer calls it, and computes its part of the set. The model is in evaluation mode
        meanwhile, without gradients, and its buffers are as before afterwards. If the trainers
        change within, it is made again.

        Args:
            test_set: a map-style dataset, or a DataLoader, whose dataset, batch size, collate_fn,
                workers, and a sampler that decides which samples come, are taken over.
            fn: gets a batch as the model's framework has it, and returns a dict of sums (not
                means) over its samples: {"hits": (scores.argmax(1) == labels).sum()}.
            batch_size: samples of a batch, for a dataset.
            collate_fn: makes a batch of a list of samples; None: the framework's own.

        Raises:
            UsageError: an argument is wrong, or `fn` returns something else.
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
        if source.drop_last:
            raise UsageError(
                "evaluate: the DataLoader leaves the last batch out (drop_last=True), so sums over "
                "it are not those of the set; make it with drop_last=False"
            )
        order = None
        if source.sampling is not None:  # the same samples in every evaluation
            order = SampledOrders(
                source.sampling, self._framework.data, seed=self._settings.seed,
                length=source.length or 0,
            ).of(0)  # fmt: skip
        self._entered()
        self._changes.end_reads()
        self._check_meets("loop.evaluate")
        if self._rehearsal is not None:
            source = self._rehearsal.few(source)
        with self._surviving():
            while True:
                try:
                    member = self._entered().stage.member
                    with member.activity.during(Doing.EVALUATING):
                        member.come_together("loop.evaluate")
                        found = evaluate(
                            self._framework,
                            source,
                            fn,
                            order=order,
                            seed=self._settings.seed,
                            epoch=self.epoch,
                            rank=self.rank,
                            world_size=self.world_size,
                            meet=self._meet,
                        )
                except StageChanged as change:
                    self._move(change.start)
                else:
                    steps = self._entered()
                    steps.came_together_at = steps.stage.progress.version
                    return found

    def log(self, **metrics: float) -> None:
        """Show these numbers with the job's progress: `edl status`, the status page, the log.

        Those of rank 0 count. A value is a number, or a tensor with one.
        The training loss of the newest step is shown beside them, as `train_loss`.
        """
        if self._is_warming_up:
            return
        steps = self._entered()
        values = {name: to_float(value) for name, value in metrics.items()}
        shown = steps.log(values)
        if self.rank == 0:
            logger.info(
                "epoch %d, step %d: %s",
                self.epoch,
                steps.cursor.global_step,
                ", ".join(f"{name} {value:.6g}" for name, value in shown.items()),
            )
        steps.report(at_once=True)

    def shards(self, dataset: Any, *, with_ids: bool = False) -> ShardSource:
        """Return this trainer's shards of `dataset`, from where the training is, for `reader=`.

        What is returned may be iterated over, or called as a generator function, as
        `DistillReader.set_batch_generator` wants it. It yields (epoch, step, shard, fields...):
        three numbers to be handed on as they are, then the collated samples of one shard.

        Args:
            dataset: as many samples as the training set has, in the same order. Of a DataLoader,
                dataset and workers are taken over. Batches stay in the host's memory.
            with_ids: whether the samples' ids, (N,) int64, come before the fields.

        Raises:
            UsageError: the dataset is another than the training set.
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
        ours, theirs = (None if each.sampling is None else each.sampling.name
                        for each in (self._source, source))  # fmt: skip
        if theirs is not None and theirs != ours:
            raise UsageError(
                f"shards: the DataLoader's {theirs} decides which samples come, and the training "
                f"set has {ours or 'no such sampler'}; pass the same to Loop as train_set"
            )
        subsets = {source.subset, self._source.subset}
        if source.length != self._source.length or (None not in subsets and len(subsets) > 1):
            raise UsageError(
                f"shards: the dataset has {source.length} samples, the training set "
                f"{self._source.length}, or they are others; pass the same to Loop as train_set"
            )
        self._shards_asked = True
        return self._entered().feed.shards(source, with_ids=with_ids)

    def _check_meets(self, place: str) -> None:
        """See that the trainers that stay come to this place as well, if this one is new to them.

        Raises:
            StateError: they are in the steps that follow it, or beyond.
        """
        if not self._joiner.joins or self._has_come_to_steps or self._finished:
            return
        progress = self._entered().stage.progress
        cursor = progress.cursor
        is_before_epochs = self._epoch is None and cursor.global_step > 0
        if cursor.step or progress.is_finished or is_before_epochs:
            raise StateError(
                f"{place}: this trainer joins others after step {cursor.global_step - 1}, and its "
                f"script calls it before its first step, where they have been; all are started "
                f"again. Call it after the epoch's steps, or start without --overlap join"
            )

    # --- steps

    def _find_epoch(self) -> EpochPosition:
        progress = self._entered().stage.progress
        cursor = progress.cursor
        if progress.is_finished:  # it begins behind the last epoch's steps, as after a crash there
            steps = progress.batches.steps_left(0)
            return EpochPosition(number=cursor.epoch - 1, first_step=steps, steps=steps)
        left = progress.batches.steps_left(cursor.offset)
        return EpochPosition(number=cursor.epoch, first_step=cursor.step, steps=cursor.step + left)

    def _run_epoch(self) -> Iterator[Step]:
        self._changes.end_reads()
        if self._open_step is not None:
            raise UsageError("epoch: iterated over twice; use one `for step in epoch:`")
        if not self._has_come_to_steps:
            self._has_come_to_steps = True
            self._warn_of_count("steps", "step.index or step.number")
            self._framework.state.uncarried_changes()  # remembers what the model is like
        if self._steps is None:
            self._changes.note()
            yield from self._warm_up()
            self._changes.steps_reached_with_state()
        else:
            self._changes.steps_reached(self._steps.cursor)
            self._settle()
        if self._entered().stage.worlds is not None:
            yield from self._choose_shards(self._entered().stage)
        if self._rehearsal is not None:
            yield from self._rehearse(self._rehearsal)
        steps = self._entered()
        if not steps.stage.progress.is_finished:
            self._joiner.check_data(steps.cursor.epoch)
        steps.stage.member.activity.begin(Doing.STEPPING)
        while not (steps.stage.progress.is_finished or steps.stage.progress.epoch_is_over):
            step = self._open_step = steps.begin()
            yield step
            step.check_complete()
            self._open_step = None
            try:
                self._commit(steps, step)
            except PeerLost as error:
                self._end_after_peer_lost(error)
            steps = self._entered()  # a new object if the trainer has moved to the next stage
            steps.stage.member.activity.begin(Doing.STEPPING)
        steps.stage.member.activity.begin(Doing.BETWEEN)
        self._seed_outside_of_steps(1)

    def _take_folder(self, checkpoint: str) -> None:
        """Raises UsageError: in a job, a loop before has had this folder."""
        if checkpoint in Loop._folders:
            text = (
                f"checkpoint: {checkpoint!r} is that of a loop before in this script, whose "
                f"training it holds; give each loop of a script a folder of its own"
            )
            if self._is_in_job:
                raise UsageError(text)
            logger.warning("%s", text)
        Loop._folders.add(checkpoint)

    def _warn_of_count(self, of: str, instead: str) -> None:
        """Say what a count of the script's is of, if it counts what the caller yields."""
        frame = sys._getframe(1).f_back
        if frame is None or self.rank != 0:
            return
        file, number, line = _line_of(frame)
        if _COUNTS.search(line):
            logger.warning(
                "%s:%d: enumerate counts the %s of this process, and begins anew in a trainer that "
                "starts later; where more than a printed line depends on it, take %s",
                file, number, of, instead,
            )  # fmt: skip

    def _warn_of_carried(self) -> None:
        """Name the script's variables that its epochs hand on, which no state carries."""
        frame = _of_script(sys._getframe(1).f_back)
        names = [] if frame is None or self.rank != 0 else carried_names(frame)
        if frame is not None and names:
            logger.warning(
                "%s:%d: %s: an epoch or a step reads what the one before has left there, and no "
                "state carries it: a trainer that starts later, as after a change or a crash, has "
                "it as it was before the loop. Take step.number and epoch.number for counts, "
                "loop.save_best for what was best and for patience, and extra={...} for the rest",
                frame.f_code.co_filename, frame.f_lineno, ", ".join(names),
            )  # fmt: skip

    def _seed_outside_of_steps(self, part: int) -> None:
        epoch = self._entered().cursor.epoch
        seed_epoch(self._framework.data, self._settings.seed, epoch, part)

    def _rehearse(self, rehearsal: Rehearsal) -> Iterator[Step]:
        """Yield steps that do not count, and go on at the epoch's last batch."""
        progress, source = self._entered().stage.progress, self._source
        if source.length is None or self._reader_factory is not None:
            rehearsal.notes.append(
                "data that come by reader= or as a stream are rehearsed by one step in shards; "
                "nothing is compared"
            )
            step = self._open_step = self._entered().begin()
            yield step
            step.check_complete()
            raise RehearsalOver
        found = rehearsal.steps(
            self._framework,
            source,
            self._models,
            seed=self._settings.seed,
            loss=self._settings.loss,
        )
        for each in found:
            self._open_step = each
            yield each
            each.check_complete()
            self._open_step = None
        progress.cursor = rehearsal.last_batch(progress.batches)

    @classmethod
    def rehearse(cls, rehearsal: Rehearsal | None) -> None:
        """Have this process rehearse its next loop, instead of training; None: no more."""
        cls._rehearsal = rehearsal

    def _commit(self, steps: StageSteps, step: TrainingStep) -> None:
        try:
            steps.commit(step)
        except StageChanged as change:
            self._move(change.start)

    def _warm_up(self) -> Iterator[Step]:
        """Yield one step that does not count, while an older stage trains; then enter this one."""
        is_known = self._source.dataset is not None and self._source.length is not None
        # The script's own reader may transform samples: read directly they could be other inputs.
        if is_known and self._reader_factory is None:
            self._open_step = WarmupStep(
                self._framework,
                self._source,
                shards=self._joiner.shards,
                seed=self._settings.seed,
                loss=self._settings.loss,
                enter=lambda: self._entered().cursor,
                is_over=lambda: self._steps is not None,
            )
            yield self._open_step
            self._open_step = None
        if self._steps is None:
            self._entered()
        else:
            self._joiner.load_again()  # what the rest of the body did to the state is undone
            self._changes.state_loaded_in_body(self._steps.cursor)
        self._settle()
        self._entered().restart_clock()

    def _choose_shards(self, stage: TrainerStage) -> Iterator[Step]:
        """Settle V; yield a step that does not count, if costs are to be measured for that."""
        progress, source, worlds = stage.progress, self._source, stage.worlds
        assert worlds is not None
        usual, batch_size = progress.batches.shards, progress.batches.batch_size
        sizes = sizes_to_measure(batch_size, worlds, self._smallest_shard)
        shards, why = usual, ""
        if sizes is None:
            pass  # no other number suits these worlds better
        elif len(self._framework.step.optimizers) > 1:
            why = "the most trainers: with several optimizers no shard is measured"
        elif _enumerates(sys._getframe()):
            why = "the most trainers: a step that measures would be one more for enumerate"
        elif self._reader_factory is not None or source.length is None:
            why = "the most trainers: streams and what comes by reader= are not read for measuring"
        elif source.length < sizes[1]:
            why = "the most trainers: there is less data than a batch"
        else:
            before = own_state(self._framework.state, progress.status())
            step = self._open_step = MeasuringStep(
                self._framework,
                source,
                sizes=sizes,
                shards=usual,
                seed=self._settings.seed,
                loss=self._settings.loss,
                cursor=lambda: progress.cursor,
            )
            yield step
            self._open_step = None
            self._framework.step.drop()
            self._framework.state.load(before.layout, before.data, before.scalars)
            choice = choose_shards(batch_size, worlds, step.cost, smallest=sizes[0])
            shards, why = choice.shards, f"measured: {choice}"
        with self._surviving():
            agreed = stage.member.agree_on_shards(None if self._shards_asked else shards)
        progress.choose_shards(usual if agreed is None else agreed)
        if self.rank == 0:
            if agreed is None:
                why = "the most trainers, as the script asked for it before the first step"
            logger.info("promise: %s%s", progress.promise, why and f" ({why})")
        self._steps = self._make_steps(replace(stage, worlds=None))

    def _meet(self) -> None:
        """Meet the other ranks amid an evaluation: who waits long for one takes it for lost."""
        steps = self._entered()
        member = steps.stage.member
        member.activity.live()
        if self._open_step is not None:
            # The update is made and not committed: there is no state to put away. A cut waits.
            member.any_of_us(False)
            return
        # A trainer that comes new into the stage begins with the first evaluation, or best
        # checkpoint, after the last committed step; so must those who move.
        member.meet(may_move=steps.came_together_at != steps.stage.progress.version)

    # --- the end

    def _finish(self) -> None:
        """Have the final checkpoint on disk, and report that the training is done."""
        if self._finished:
            return
        steps = self._entered()
        steps.feed.close()
        while not steps.stage.is_saved:
            try:
                steps.stage.member.write_final()
            except StageChanged as change:
                self._move(change.start)
                steps = self._entered()
            else:
                break
        self._joiner.close()
        self._finished = True
        before = Loop._before
        Loop._before = replace(
            before,
            steps=steps.stage.progress.step if self._is_in_job else 0,
            are_kept=before.are_kept and self._has_checkpoint,
        )
        Loop._of_steps = {
            name: id(each)
            for name, each in script_values().items()
            if id(each) != self._values.get(name) or id(each) == Loop._of_steps.get(name)
        }
        seed_end(self._framework.data, self._settings.seed, self._number)
        stage = steps.stage
        stage.member.activity.begin(Doing.DONE)
        stage.state_manager.note_account()
        stage.progress.note_done()
        steps.report_end()
        if stage.link is not None:
            stage.link.send(Done(step=stage.progress.step))

    def _let_go(self) -> None:
        """Close what this loop has open, as the script begins another one."""
        if self._steps is not None:
            self._steps.feed.close()
            stage = self._steps.stage
            stage.state_manager.close()
            stage.progress.close()
            if stage.link is not None:
                stage.link.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """End this trainer as a victim when a peer is lost in what is done within."""
        try:
            yield
        except PeerLost as error:
            self._end_after_peer_lost(error)

    def _end_after_peer_lost(self, error: PeerLost) -> NoReturn:
        step = self._open_step
        self._entered().stage.member.end_after_peer_lost(
            error, state_is_committed=step is None or not step.is_updated
        )


def _is_trained(pod_dir: Path | None) -> bool:
    """Whether a pod's launcher has ended with a complete training: its script has other lines."""
    try:
        return pod_dir is not None and (pod_dir / CLAIM).stat().st_size > 0
    except OSError:  # no launcher has been there
        return False


def _line_of(frame: FrameType) -> tuple[str, int, str]:
    """Return the file, the number and the text of the line that a frame is at."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return file, number, linecache.getline(file, number)


def _of_script(frame: FrameType | None) -> FrameType | None:
    """Return the script's frame that leads to this one, perhaps through a progress bar."""
    while frame is not None and not is_of_script(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


def _enumerates(frame: FrameType | None) -> bool:
    """Whether the script's line that leads to a frame counts."""
    frame = _of_script(frame)
    return frame is not None and "enumerate(" in _line_of(frame)[2]


def _show_log() -> None:
    """Show what the loop logs, epochs and metrics above all, where nobody has set up logging.

    Paddle does so when it is imported; PyTorch does not. Where a script has (`dictConfig`), that
    has disabled the loggers of what was imported before, unless it said otherwise.
    """
    for name, each in [*logging.root.manager.loggerDict.items()]:
        if name.startswith("pod_runtime.") and isinstance(each, logging.Logger):
            each.disabled = False
    ours = logging.getLogger("pod_runtime")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


# --- for others in this process: `trainer_main` asks when the script has raised


def current_stage() -> TrainerStage | None:
    """Return the stage that this process is in; None: it is in none."""
    loop = Loop._newest
    return None if loop is None or loop._steps is None else loop._steps.stage


def committed_step() -> int | None:
    """Return how many steps are committed; None: this process is in no stage."""
    stage = current_stage()
    return None if stage is None else stage.progress.step


def explain_error(error: BaseException) -> str:
    """Return what may explain an error in the body of the loop; "": nothing does.

    A body that passes alone, where the shard is the whole batch, fails where it takes the batch
    size for the size of what it has. One with two losses fails where both are of one forward pass.
    What all trainers compute together waits in vain where it is called on one.
    What follows an epoch may run where no step of it was made, and what follows a loop where no
    epoch was.
    """
    loop = Loop._newest
    if loop is not None and not isinstance(error, PeerLost) and _WAITED.search(str(error)):
        return (
            "the trainers are a process group, by which a library computes over all of them, as "
            "torchmetrics in compute(): call it on all trainers, above `if loop.rank == 0:`"
        )
    step = None if loop is None else loop._open_step
    epoch = None if loop is None or loop._steps is None else loop._epoch
    is_of_body = loop is not None and loop._finished and epoch is None
    if isinstance(error, NameError) and is_of_body:
        return (
            "the training was complete before this process began, and the body of `for epoch in "
            "loop.epochs():` did not run: what only that sets is not there; compute it after the "
            "loop, as by loop.evaluate"
        )
    if isinstance(error, NameError) and epoch is not None and step is None and not len(epoch):
        return (
            f"this process goes on after the last step of epoch {epoch.number}, which another one "
            f"made: what only the body of `for step in epoch:` sets is not there; set it before"
        )
    if step is not None and _GRAPH_IS_GONE.search(str(error)):
        return (
            "step.backward(loss) frees what its loss was computed by: add up losses that have a "
            "part of that in common and call it once, or compute that part again for the second"
        )
    here = None if step is None else step.shard_samples
    if step is None or here is None or here == step.samples or not _SIZES.search(str(error)):
        return ""
    if here == 1 and "more than 1 value per channel" in str(error):
        return (
            f"a shard of a batch of {step.samples} has one sample, of which batch norm can "
            f"make no statistics: leave short batches out (drop_last=True), or take another "
            f"batch_size"
        )
    hint = (
        f"the batch of {step.samples} is cut into shards, and the loop's body has one of {here} "
        f"here: take sizes from the shard (len), not from the batch size"
    )
    if loop is not None and here == 1:
        axis = loop._framework.axis
        hint += (
            f"; and name the dimension that squeeze() takes out, squeeze({axis}): without a name "
            f"it takes out that of the samples as well, where there is one sample"
        )
    return hint
