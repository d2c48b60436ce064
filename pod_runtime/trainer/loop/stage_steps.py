"""Make and commit the steps of one stage, on this rank."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from job_server.api.wire import TRAIN_LOSS
from pod_runtime.trainer.data.readers import ShardOrder, ShardRange
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.step import Step
from pod_runtime.trainer.data.streams import seed_shard, seed_step
from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.base_state import KEPT
from pod_runtime.trainer.frameworks.plain_values import is_of_script, to_float
from pod_runtime.trainer.loop.shard_counters import ShardCounters
from pod_runtime.trainer.loop.shard_feed import ReaderFactory, ShardFeed
from pod_runtime.trainer.membership.stage import TrainerStage
from pod_runtime.trainer.progress.agreement import MUST, ExchangeResult
from pod_runtime.trainer.progress.batches import Cursor, rank_shards
from pod_runtime.trainer.progress.best import BestCheckpoint, find_best
from pod_runtime.trainer.progress.drawn import add
from pod_runtime.trainer.progress.epoch_order import EpochOrder

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1  # weight of the newest step in the mean step time
_FIRST_STEPS = 3  # after each of which the script is checked
_CHECKED_EVERY = 50  # steps, later: the ranks meet for it once more, and that is not free


class StageSteps:
    """What the steps of a stage share: their order, their data, and how long they take."""

    def __init__(
        self, stage: TrainerStage, source: DataSource, *, loss: str, factory: ReaderFactory | None
    ) -> None:
        """`loss`, `factory`: the arguments of the loop."""
        progress = stage.progress
        self.stage = stage
        self.loss = loss
        self.seed = progress.run.seed
        self._source, self._factory = source, factory
        self.order, self.feed = self._read_from_cursor()
        # Version of the progress at the last evaluation or best checkpoint, where all ranks meet.
        self.came_together_at = -1
        self.counters = ShardCounters()
        self._loss: tuple[int, Any] | None = None  # a step's number and loss; None: none was made
        self._warned_of_loss = False  # that it is no number
        self._logged: dict[str, float] = {}  # by the script
        self._logged_at: dict[str, int] = {}  # name -> epochs that were over then
        self._step_s = 0.0  # smoothed; 0: no step yet
        self._committed_at = time.monotonic()

    @property
    def cursor(self) -> Cursor:
        """Where the training stands."""
        return self.stage.progress.cursor

    def _read_from_cursor(self) -> tuple[ShardOrder, ShardFeed]:
        member, progress = self.stage.member, self.stage.progress
        shards = rank_shards(member.rank, member.world_size, progress.batches.shards)
        order = ShardOrder(progress.run, progress.batches, shards, progress.order)
        return order, ShardFeed(self.stage, self._source, order, self._factory)

    def begin_epoch(self, drawn: EpochOrder | None) -> None:
        """Read the epoch at the cursor; readers and workers begin anew, unless they go on.

        Args:
            drawn: in this order; None: there is no sampler.
        """
        if drawn is None and not self.feed.is_of_one_epoch:
            return
        self.feed.close()
        if drawn is not None:
            self.stage.progress.begin_epoch(drawn)
        self.order, self.feed = self._read_from_cursor()

    def numbers_of_data(self) -> dict[str, float]:
        """Return the numbers that dataset and `collate_fn` have, by what to call them.

        Of the script's own classes; what workers count is theirs.
        """
        source = self._source
        readers = {id(each): each for each in (
            source.dataset, source.collate, getattr(source.collate, "__self__", None)
        ) if is_of_script(type(each).__module__)}  # fmt: skip
        return {
            f"{name} of {type(each).__name__}": value
            for each in readers.values()
            for name, value in getattr(each, "__dict__", {}).items()
            if type(value) in (int, float)
        }

    def begin(self) -> "TrainingStep":
        """Begin the step at the cursor."""
        self.stage.framework.step.clear()  # of an evaluation: a plain script does so here, too
        return TrainingStep(self)

    def commit(self, step: "TrainingStep") -> None:
        """Count an updated step; parks with the other ranks when they have agreed on a cut.

        Raises:
            StageChanged: this trainer goes on in the next stage.
            UsageError: the script has changed what only the optimizer may.
        """
        assert step.result is not None
        stage, result = self.stage, step.result
        stage.framework.step.end()
        stage.progress.commit_step(result.drawn)
        stage.framework.state.note_committed()
        stage.progress.stops |= result.stops
        stage.member.activity.count_step(step.samples_done)
        done = self.cursor.global_step
        is_over, is_first = stage.progress.epoch_is_over, done <= _FIRST_STEPS
        is_for_checkpoint = result.request.snapshot >= MUST
        if self.cursor.step == 1 and not is_first:
            # What the script replaces above an epoch's steps: a change may come before its end.
            self._check_script()
        if is_over or is_first or is_for_checkpoint or done % _CHECKED_EVERY == 0:
            self._check_script()
            if done == _FIRST_STEPS:
                self._check_counters()
            # What changes every other step has, between the first and the third.
            if done in (1, _FIRST_STEPS) or (is_over and stage.framework.beside.is_due):
                self._check_beside(is_first=is_first)
            # Of several optimizers a rank may have left out one, which the next exchange says:
            # nothing else may be exchanged in its place.
            if is_over or len(stage.framework.step.optimizers) == 1:
                self._check_same(of_model=is_over or is_first)
        now = time.monotonic()
        took = now - self._committed_at
        self._committed_at = now
        self._step_s += (took - self._step_s) * (_SMOOTHING if self._step_s else 1.0)
        self.report(at_once=False)  # before a snapshot, which may take longer the first time
        if step.best:
            for best in step.best.values():
                self.keep_best(best)
            self.restart_clock()
        stage.state_manager.after_step(self._step_s, result.request)
        if result.cut:
            stage.member.park()
            self.restart_clock()

    def keep_best(self, best: BestCheckpoint) -> None:
        """Keep a checkpoint of the committed state. All ranks call it."""
        progress = self.stage.progress
        before = find_best(progress.best, best.metric)
        if self.stage.member.keep_best(best):
            progress.note_best(best)
            if self.stage.member.rank == 0:
                logger.info(
                    "best %s so far: %.6g, kept in %s", best.metric, best.value, best.folder
                )
            self.log({f"best_{best.metric}": best.value})
            self.report(at_once=True)
        elif before is not None and before.folder == best.folder:
            progress.forget_best(best.metric)  # it was where this one should be

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's."""
        self._committed_at = time.monotonic()

    def report(self, *, at_once: bool) -> None:
        """Send the progress to the launcher."""
        link, progress = self.stage.link, self.stage.progress
        if link is not None:
            link.send_step(
                step=progress.step,
                epoch=progress.cursor.epoch,
                total_steps=progress.total_steps,
                step_s=self._step_s,
                promise=progress.promise,
                checkpoint_error=self.stage.state_manager.checkpoint_error,
                metrics=self.metrics,
                metric_epochs=self._logged_at or None,
                at_once=at_once,
            )

    def report_end(self) -> None:
        """Send the last step's loss, too, if this process has made it."""
        if self._loss is not None:
            self.report(at_once=True)

    def note_loss(self, step: int, loss: Any) -> None:
        """This is the newest training loss; it is read when it is shown."""
        self._loss = step, loss

    def log(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Show these numbers from now on; return them and the loss."""
        self._logged = {**self._logged, **metrics}
        epochs = self.cursor.epoch + self.stage.progress.epoch_is_over
        self._logged_at = {**self._logged_at, **dict.fromkeys(metrics, epochs)}
        return {**self._train_loss(), **metrics}

    def metrics(self) -> dict[str, float] | None:
        """Return what is shown; None: nothing."""
        return {**self._train_loss(), **self._logged} or None

    def _train_loss(self) -> dict[str, float]:
        """Read the loss of the newest step, which may wait for the device."""
        if self._loss is None:
            return {}
        step, tensor = self._loss
        loss = to_float(tensor)
        if not (math.isfinite(loss) or self._warned_of_loss):
            self._warned_of_loss = True
            logger.warning("step %d: the training loss is %g", step, loss)
        return {TRAIN_LOSS: loss}

    def _check_same(self, *, of_model: bool) -> None:
        """See that all ranks have the same state. All of them call it.

        Raises:
            UsageError: the script has changed something on one of them.
        """
        if self.stage.member.world_size == 1:
            return
        prints = self.stage.framework.state.fingerprints(of_model=of_model)
        first = self.stage.member.first_difference(list(prints.values()))
        if first is not None:
            name = list(prints)[first]
            if name.startswith(KEPT):
                raise UsageError(
                    f"{name}: not the same on all trainers after step "
                    f"{self.cursor.global_step - 1}. An optimizer that deals the parameters out to "
                    f"the ranks of torch.distributed, as Muon does, leaves each with a part of it, "
                    f"and a state has that of one: use its variant for one device "
                    f"(SingleDeviceMuon)"
                )
            raise UsageError(
                f"{name}: not the same on all trainers after step "
                f"{self.cursor.global_step - 1}. What the script sets besides step.update() has to "
                f"follow from what they all have (step.number, what step.update() or loop.evaluate "
                f"has returned), not from the loss of a shard; and it is set once in a step, not "
                f"for each shard"
            )

    def _check_script(self) -> None:
        state = self.stage.framework.state
        state.check_unowned()
        changes = state.uncarried_changes()
        if changes and self.stage.member.rank == 0:
            logger.warning(
                "changed since the first step, and no state can carry it: %s. A trainer that "
                "starts later builds model and optimizer without that; do it before the loop",
                shortened(changes),
            )

    def _check_counters(self) -> None:
        found = self.counters.found()
        if found and self.stage.member.rank == 0:
            logger.warning(
                "%s: moves with every shard that this trainer computes, of which a batch has %d "
                "over all trainers: it counts something else on each of them, and without shards. "
                "Make it a buffer, which moves once with a batch (register_buffer), or set it "
                "before `for batch in step:`, from step.number",
                shortened(found),
                self.stage.progress.batches.shards,
            )

    def _check_beside(self, *, is_first: bool) -> None:
        """See that nothing trains beside the loop that no state carries.

        Raises:
            UsageError: something does, and the training has just begun.
        """
        framework, member = self.stage.framework, self.stage.member
        changed = framework.beside.changed(copies=is_first)
        if self.cursor.global_step == 1 and member.world_size > 1:
            kinds, values = framework.beside.of_models()
            is_alike = member.first_difference([kinds]) is None
            if is_alike and values and member.first_difference(values) is not None:
                raise UsageError(
                    f"a model beside the loop's has not the same values on all trainers, as one "
                    f"(a teacher, a target) that is built of random numbers has in each process: "
                    f"call {framework.seeding} before it is built, or pass it in extra={{...}}, "
                    f"frozen: all of them have that of one then"
                )
        if not changed:
            return
        text = (
            f"{shortened(changed)}: it changes as the training goes on, and no state carries it: a "
            f"trainer that starts later has it as the script builds it. Pass what it belongs to "
            f"in extra={{...}}, frozen (a moving average, a target network), or to the loop with "
            f"its optimizer; what shall not change (a teacher) is put into evaluation mode"
        )
        if is_first:
            raise UsageError(text)
        if self.stage.member.rank == 0:
            logger.warning("%s", text)


class TrainingStep(Step):
    """A step that counts: it reads its shards, and all ranks make its update together."""

    def __init__(self, steps: StageSteps) -> None:
        progress = steps.stage.progress
        self._cursor = cursor = progress.cursor
        start, stop = progress.batches.batch(cursor.offset)
        super().__init__(
            steps.stage.framework,
            steps.order.of_batch(cursor.epoch, cursor.step, cursor.offset),
            samples=stop - start,
            loss=steps.loss,
        )
        self.result: ExchangeResult | None = None  # None: no update was made yet
        is_first = cursor.global_step < _FIRST_STEPS
        self._is_watched = progress.batches.shards > 1 and is_first
        self._sees_buffers = is_first or cursor.step == 0
        self.best: dict[str, BestCheckpoint] = {}  # its state is the best so far, by metric
        self._steps = steps
        self._updates = 0
        self._part = -1  # whose random numbers are drawn outside of shards
        self._seed_outside_of_shards(0)
        self._drawn: int | None = 0  # sum of the hashes of what was read; None: not known

    @property
    def number(self) -> int:
        return self._cursor.global_step

    @property
    def index(self) -> int:
        return self._cursor.step

    @property
    def sample_ids(self) -> list[int]:
        ids = self._steps.order.ids
        return [sample for each in self._ranges for sample in ids(each).tolist()]

    def _read(self, shard_range: ShardRange) -> Any:
        def read() -> Any:
            found = self._steps.feed.take(shard_range)
            self._drawn = add(self._drawn, found.drawn)
            return found.batch

        batch = self._read_once(read)
        seed_shard(self._framework.data, self._steps.seed, *shard_range.key, again=self._again)
        return self._framework.data.to_batch(batch)

    def _check_calls(self) -> None:
        # They may where each rank goes through as many shards, and will, as with "statistics".
        stage, plan = self._steps.stage, self._steps.stage.progress.batches
        is_even = plan.shards % stage.member.world_size == 0
        is_even &= plan.filled_shards(self.samples) == plan.shards
        may_change = stage.link is not None and not stage.progress.is_by_share
        if not is_even or (may_change and self.number < _FIRST_STEPS):
            super()._check_calls()

    def _begin(self) -> None:
        if not self._is_begun:
            self._note_open()
        super()._begin()

    def _note_open(self) -> None:
        self._framework.state.note_open_step(amid_epoch=self._cursor.step > 0)

    def _finish(self, of: tuple[int, ...]) -> Any:
        stage = self._steps.stage
        if not self.is_updated:
            self._note_open()
        try:
            if self.result is None:
                self.result = stage.member.exchange(
                    self.samples_done, self._drawn, of, stops=stage.progress.stops
                )
            else:
                stage.member.exchange_again(of)
        except PeerLost as error:
            stage.member.end_after_peer_lost(error, state_is_committed=not self.is_updated)
        result = self.result
        if result.samples != self.samples:
            raise UsageError(
                f"step {self.number}: {result.samples} samples were computed, its batch has "
                f"{self.samples}; all trainers must run the same script over the same data"
            )
        self._end_shards()  # a trainer without one may have left out the loop over them
        self._updates += 1
        self._framework.step.apply(
            filled_shards=stage.progress.batches.filled_shards(self.samples),
            lr_factor=stage.progress.scaling.lr_factor(self.number),
            max_norm=self.max_norm,
            of=of,
        )
        loss = self._framework.step.loss(of)
        self._steps.note_loss(self.number, loss)
        return loss

    def _watch_shards(self) -> None:
        self._steps.counters.begin(self._numbers())

    def _watch_shard(self) -> None:
        self._steps.counters.end_shard(self._numbers())

    def _numbers(self) -> dict[str, float]:
        """Return numbers that a shard may move: of layers, and of what reads its samples."""
        return self._framework.state.numbers_of_layers() | self._steps.numbers_of_data()

    def _end_shards(self) -> None:
        self._seed_outside_of_shards(1 + self._updates)

    def _seed_outside_of_shards(self, part: int) -> None:
        if part != self._part:
            self._part, cursor = part, self._cursor
            seed_step(self._framework.data, self._steps.seed, cursor.epoch, cursor.step, part)


def shortened(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"
