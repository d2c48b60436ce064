"""Undo what a script changes before the point where its state goes on.

A state from between two epochs goes on with the body of the next one, any other with the steps that
are left. What the script does to the state before that point is undone: a new process runs lines
that the others have behind them. A prepared process comes to the body of an epoch before it has its
state. The modes that the body sets meanwhile are kept; if it sets more, a state that was made after
these lines cannot begin there. Nor can any state where the body has drawn random numbers meanwhile,
and the epoch is another one than was thought.

Where the body reads the model, the state comes first. Amid an epoch it is still not the state that
the others have read there: that is said.
"""

import logging
from collections.abc import Callable

from pod_runtime.trainer.data.streams import BeginOfEpoch
from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.frameworks.framework import FrameworkState
from pod_runtime.trainer.frameworks.plain_values import differ
from pod_runtime.trainer.progress.batches import Cursor

logger = logging.getLogger(__name__)


class ScriptChanges:
    """Follows the script from the loop's making to the first step of its stage."""

    def __init__(
        self, state: FrameworkState, load_again: Callable[[], None], enter: Callable[[], Cursor]
    ) -> None:
        """
        Args:
            load_again: loads the state that was loaded, once more.
            enter: has the state come now, if it has not, and returns where it goes on.
        """
        self._state, self._load_again, self._enter = state, load_again, enter
        self._reads = state.reads(self._read)
        self._is_pending = False  # a state was restored, and the script is not where it goes on
        self._watches = False
        self._modes: dict[str, bool] = {}  # that the body of the epoch set before the state came
        self._has_set_more = False  # and not only these
        self._tensors: dict[str, float] = {}  # marks of the model's, when it was begun to watch
        self._numbers: BeginOfEpoch | None = None  # None: the body begins with the state
        self._has_drawn = False  # before the state came

    def watch(self, numbers: BeginOfEpoch) -> None:
        """The body of an epoch begins, and the state is not there yet."""
        self._watches = True
        self._numbers = numbers
        self._tensors = self._state.fingerprints(of_model=True)
        self._state.watch()
        self._reads.begin()

    def body_goes_on(self) -> None:
        """The body of an epoch is at work, and the state is there."""
        self._reads.begin()

    def end_reads(self) -> None:
        """The model is not read by the script from now on."""
        self._reads.end()

    def _read(self) -> None:
        cursor = self._enter()
        if cursor.step or not cursor.global_step:
            logger.warning(
                "epoch %d, step %d: the script takes tensors of the model above the epoch's steps. "
                "If the steps need values from there (a frozen copy, labels): trainers may start "
                "amid an epoch, with the model of then; such values belong in extra={...}, and are "
                "made where epoch.first_step is 0",
                cursor.epoch,
                cursor.step,
            )

    def note(self) -> None:
        """The state comes now, or the steps begin: what was watched ends here."""
        self._reads.end()
        if self._watches:
            self._watches = False
            self._modes, self._has_set_more = self._state.watched()
            now = self._state.fingerprints(of_model=True)  # NaN, as of a mask of -inf, is as it was
            self._has_set_more |= any(
                differ(now.get(name), each) for name, each in self._tensors.items()
            )
            assert self._numbers is not None
            self._has_drawn = self._numbers.has_drawn()

    def state_loaded(self, cursor: Cursor) -> None:
        """A state was loaded that goes on at `cursor`."""
        self._is_pending = cursor.global_step > 0

    def state_loaded_in_body(self, cursor: Cursor) -> None:
        """A state was loaded, and the body of its epoch had begun before.

        Raises:
            StateError: the body has changed more than modes, or has drawn for another epoch.
        """
        if self._has_drawn and self._numbers is not None and cursor.epoch != self._numbers.guess:
            raise StateError(
                f"before its first step, an epoch has drawn random numbers, and it is epoch "
                f"{cursor.epoch}, not {self._numbers.guess} as when the trainers were prepared; "
                f"the prepared trainers are started again without preparation. What is drawn after "
                f"the script has asked for epoch.number is of the right epoch"
            )
        if cursor.step:
            return
        if self._has_set_more and cursor.global_step:
            raise StateError(
                f"before its first step, epoch {cursor.epoch} has set the learning rate, a "
                f"scheduler, flags, options or tensors, and the state that it begins from has come "
                f"after that; the prepared trainers are started again without preparation"
            )
        self._is_pending = False
        self._state.set_modes(self._modes)

    @property
    def has_drawn(self) -> bool:
        """The body of the epoch drew random numbers before the state came."""
        return self._has_drawn

    @property
    def is_pending(self) -> bool:
        """What the script does may still have to be undone."""
        return self._is_pending

    def body_reached(self, cursor: Cursor) -> None:
        """The script has come to the body of an epoch."""
        if self._is_pending and cursor.step == 0:
            self._is_pending = False
            self._load_again()

    def steps_reached(self, cursor: Cursor) -> None:
        """The script has come to the steps of an epoch."""
        if self._is_pending and cursor.step > 0:
            self._load_again()
        self._is_pending = False

    def steps_reached_with_state(self) -> None:
        """The script has come to the steps of an epoch, and the state was loaded there."""
        self._is_pending = False
