"""A callback that makes `paddle.Model.fit` go on after a restart where it stood.

    model.fit(train_set, epochs=10, callbacks=[ElasticCheckpoint("ckpt", save_steps=200)])

For scripts that use the high-level API. The elastic loop can do more; docs/epoch-checkpoints.md
says what.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.hapi.callbacks import CallbackList

from pod_runtime.trainer.epochs.epoch_checkpoint import KEEP, load_state, save_state, storage_path
from pod_runtime.trainer.epochs.paddle_epochs import open_state
from pod_runtime.trainer.errors import CheckpointError, UsageError

logger = logging.getLogger(__name__)

STOPPED = 128 + signal.SIGTERM  # what the job server reads as "was asked to go"
_ended_fits: set[str] = set()  # names of the storages of fits that have ended in this process


def _list_that_calls() -> Any:
    """Return the list of callbacks that has called one; it knows that by no other way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # a derived class may stand between
        if isinstance(found := frame.f_locals.get("self"), CallbackList):
            return found
        frame = frame.f_back
    return None


class ElasticCheckpoint(paddle.callbacks.Callback):  # type: ignore[misc]  # Paddle has no types
    """A callback of `paddle.Model.fit` that saves, and goes on from the newest checkpoint.

    It saves at the end of every epoch and every `save_steps` steps.
    Epochs that are done are passed over: neither data nor other callbacks see them. An epoch that
    was interrupted goes on after the steps that are done, or after the same share of them when
    the number of trainers is another. SIGTERM ends the training at the next step, on all trainers
    at the same one, with a checkpoint and exit code 143.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        save_steps: int | None = None,
        keep_checkpoints: int = KEEP,
        fs: Any = None,
    ) -> None:
        """Nothing is read before `fit` begins.

        Args:
            path: folder that all nodes share, or an fsspec URL, or a path in `fs`.
            save_steps: None: only at the ends of epochs.
            keep_checkpoints: how many stay, the newest ones.
            fs: the file system, as for `load_checkpoint`.

        Raises:
            UsageError: an argument is wrong.
            CheckpointError: what the file system needs is not installed.
        """
        super().__init__()
        if save_steps is not None:
            _check_whole("save_steps", save_steps)
        _check_whole("keep_checkpoints", keep_checkpoints)
        self._save_steps = save_steps
        self._keep = keep_checkpoints
        self._store = storage_path(path, fs)
        self._rank = dist.get_rank()
        self._state: Any = None  # None: outside fit
        # Of the newest checkpoint, or of what was restored.
        self._saved: Any = None  # epoch_no, step, stopped_early, plain values; None: outside fit
        self._restored: dict[str, Any] | None = None  # plain values; None: training goes on
        self._muted: tuple[Any, list[Any]] | None = None  # None: nothing is passed over now
        self._sigterm_before: Any = None  # None: not ours to handle
        self._first_epoch = 0
        self._first_step = 0  # of the first epoch
        self._epoch = 0
        self._offset = 0  # steps of this epoch that were done before a restart
        self._steps: int | None = None  # of an epoch; None: the data does not say
        self._newest_epoch: int | None = None  # that has ended here; None: none
        self._asked_to_stop = False

    @property
    def initial_epoch(self) -> int:
        """The epoch that training went on with; known once `fit` has begun."""
        return self._first_epoch

    # --- what Paddle calls

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        model = self.model
        if not paddle.in_dynamic_mode():
            raise UsageError(
                "ElasticCheckpoint: works in dynamic graph only; call paddle.disable_static()"
            )
        self._steps = self.params["steps"]
        self._state = open_state(
            None, None, model.network, model._optimizer, getattr(model, "_scaler", None), {}
        )
        self._restore()
        goes_on = self._first_epoch or self._first_step  # else the script has removed its state
        if goes_on and self._store.storage.name in _ended_fits:
            self._say_second_fit()
        everyone = _list_that_calls()
        if everyone is not None:
            # The end of an epoch is saved before others hear that the next one begins.
            everyone.callbacks = [self, *(each for each in everyone.callbacks if each is not self)]
            if self._first_epoch:
                self._mute(everyone)
        model._run_one_epoch = self._run_what_is_left
        if threading.current_thread() is threading.main_thread():
            self._sigterm_before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._save_epoch()
        self._epoch = epoch
        self._offset = self._first_step if epoch == self._first_epoch else 0
        self._undo()
        if epoch >= self._first_epoch and not self._saved[1]:
            self._restored = None  # what callbacks do as this epoch begins was not done before
        if epoch >= self._first_epoch:
            self._unmute("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        # Not at the end of the step before: Paddle's scheduler of the learning rate comes last.
        del logs
        self._undo()
        self._restored = None
        done = self._offset + step
        at_update = step % getattr(self.model, "_accumulate", 1) == 0
        if not at_update:
            return
        if self._all_stop():
            if done:  # else it is saved, as it was before this epoch began
                self._save(self._epoch - 1, done)
            self._end_stopped()
        if step and self._save_steps is not None and done % self._save_steps == 0:
            self._save(self._epoch - 1, done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        if epoch >= self._first_epoch:
            self._newest_epoch = epoch

    def on_eval_begin(self, logs: Any = None) -> None:
        del logs
        self._save_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        self._unmute("on_train_end", logs)
        self._save_epoch()
        _ended_fits.add(self._store.storage.name)
        del self.model.__dict__["_run_one_epoch"]
        if self._sigterm_before is not None:
            signal.signal(signal.SIGTERM, self._sigterm_before)
            if self._asked_to_stop:
                self._end_stopped()
        self._state = self._sigterm_before = None

    # --- resuming

    def _restore(self) -> None:
        loaded = load_state(self._store, self._state)
        self._first_epoch = self._first_step = 0
        self._newest_epoch = self._muted = self._restored = None
        self._saved = -1, 0, False, self._plain_values()
        if loaded is None:
            return
        self._first_epoch = loaded.epoch_no + 1
        before = loaded.more.get("steps")
        self._first_step = loaded.step
        if loaded.step and type(before) is int and self._steps:
            # Another number of trainers cuts an epoch into another number of steps.
            self._first_step = loaded.step * self._steps // before
        stopped_early = bool(loaded.more.get("stopped_early"))
        self._restored = self._plain_values()
        self._saved = loaded.epoch_no, loaded.step, stopped_early, self._restored
        if loaded.more.get("stopped_early") and self.params["epochs"] <= loaded.more["epochs"]:
            self._first_epoch = self.params["epochs"]
        logger.info("going on with epoch %d, step %d", self._first_epoch, self._first_step)

    def _say_second_fit(self) -> None:
        """Raises UsageError: it would train nothing."""
        text = (
            f"ElasticCheckpoint: {self._store.storage.name} is the path of a fit before in this "
            f"script, whose epochs count as done ({self._first_epoch} of "
            f"{self.params['epochs']}); give each fit a path of its own"
        )
        if self._first_epoch >= self.params["epochs"]:
            raise UsageError(text)
        logger.warning("%s", text)

    def _run_what_is_left(self, data: Any, callbacks: Any, mode: str, *args: Any) -> Any:
        """Stand in for the model's `_run_one_epoch`."""
        if self._epoch < self._first_epoch:
            if self._muted is None:
                self._mute(callbacks)
            return {}
        if mode == "train":
            set_epoch = getattr(getattr(data, "batch_sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)  # the order of a fresh process would begin at epoch 0
            if self._offset:
                data = _Rest(data, self._offset)
        return type(self.model)._run_one_epoch(self.model, data, callbacks, mode, *args)

    def _undo(self) -> None:
        """Undo what callbacks have done again to the learning rate, as this process began."""
        if self._restored is not None:
            self._state.load_rates(self._restored)

    def _mute(self, callbacks: Any) -> None:
        """Have the other callbacks hear nothing."""
        self._muted = callbacks, callbacks.callbacks
        callbacks.callbacks = [self]

    def _unmute(self, event: str, *args: Any) -> None:
        """Call the other callbacks again, for this event too."""
        if self._muted is None:
            return
        callbacks, everyone = self._muted
        self._muted = None
        callbacks.callbacks = everyone
        for each in everyone:
            if each is not self:
                getattr(each, event)(*args)

    # --- saving and stopping

    def _save_epoch(self) -> None:
        """Save the end of an epoch, once all callbacks have had their part in it.

        Before its evaluation, and after it where a callback has ended the training by that, or has
        changed the learning rate.
        """
        if self._newest_epoch is not None:
            self._save(self._newest_epoch, 0)

    def _save(self, epoch_no: int, step: int) -> None:
        stopped_early = bool(self.model.stop_training)
        now = epoch_no, step, stopped_early, self._plain_values()
        if self._rank != 0 or now == self._saved:
            return
        more = {
            "steps": self._steps,
            "epochs": self.params["epochs"],
            "stopped_early": stopped_early,
        }
        try:
            save_state(
                self._store, self._state, epoch_no=epoch_no, step=step, more=more, keep=self._keep
            )
        except CheckpointError as error:
            logger.error("training goes on without this checkpoint: %s", error)
        else:
            self._saved = now

    def _plain_values(self) -> dict[str, Any]:
        """Return learning rate, schedule and loss scaler, as JSON types."""
        found: dict[str, Any] = self._state.scalars()
        return {name: each for name, each in found.items() if name != "traits"}

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._asked_to_stop = True

    def _all_stop(self) -> bool:
        """Whether any trainer has been asked to stop; the same answer on all, at the same step.

        One that left alone would take the others down in the middle of their next step.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._asked_to_stop
        asked = paddle.to_tensor(np.array([self._asked_to_stop], np.int32))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked.item())

    def _end_stopped(self) -> None:
        logger.info("stopped by SIGTERM, as asked")
        raise SystemExit(STOPPED)


def _check_whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}")


class _Rest:
    """The batches of a loader after the first `skipped`."""

    def __init__(self, loader: Any, skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skipped)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number >= self._skipped:
                yield batch
