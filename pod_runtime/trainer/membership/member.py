"""Agree with the other ranks of a stage: on steps, on cuts, and on when to park."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from pod_runtime.activity import Doing, own_activity
from pod_runtime.channel_wire import PEER_LOST_EXIT_CODE
from pod_runtime.trainer.errors import (
    LinkError,
    PeerLost,
    StageChanged,
    UsageError,
)
from pod_runtime.trainer.frameworks.framework import FrameworkGroup, FrameworkStep
from pod_runtime.trainer.membership.link import LauncherLink
from pod_runtime.trainer.membership.next_group import NextGroupFormer
from pod_runtime.trainer.membership.open_files import flush_files
from pod_runtime.trainer.membership.state_manager import RETRY_S, StateManager
from pod_runtime.trainer.progress.agreement import (
    HEADER_SIZE,
    ExchangeResult,
    SnapshotRequest,
    alone,
    make_ballot,
    make_comparison,
    make_header,
    read_ballots,
    read_comparison,
    read_header,
)
from pod_runtime.trainer.progress.best import BestCheckpoint

logger = logging.getLogger(__name__)

# Where ranks come together outside of a step's exchange, as users know these places.
PLACES = ("loop.evaluate", "loop.save_best", "the end of an epoch")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0  # of a rank that waits at a barrier
_PEERS_WAIT_S = 8.0  # a waiting rank shows itself so often: Paddle's gloo gives peers up after 30 s


class StageMember:
    """Agreement with the other ranks, over their process group."""

    def __init__(
        self,
        group: FrameworkGroup,
        step: FrameworkStep,
        state_manager: StateManager,
        link: LauncherLink | None,
        rank: int,
        world_size: int,
        next_group: NextGroupFormer | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group, self._step = group, step
        self._state_manager = state_manager
        self._link = link  # None: outside EDL, where there are no cuts
        self._next_group = next_group  # None: as above
        self.activity = own_activity()
        self._waiting_since: float | None = None  # None: not waiting for data
        self._is_to_end = False
        self._gate = threading.Lock()  # around `_waits`; kept by a thread that ends the process
        self._waits = False  # in an exchange: the state is the committed one
        self._is_amid_updates = False  # in the exchange of a further update: it is not

    def exchange(
        self,
        samples: int,
        drawn: int | None = None,
        of: Sequence[int] = (),
        *,
        stops: bool = False,
    ) -> ExchangeResult:
        """Sum gradients over all ranks; return when all have contributed.

        Args:
            samples: number that this rank computed.
            drawn: sum of their hashes; None: they have none.
            of: the optimizers whose gradients are meant, see `FrameworkStep`.
            stops: the script has ended the training after this epoch.

        Raises:
            PeerLost: a rank is gone; the local state is the last committed one.
        """
        self.activity.begin(Doing.EXCHANGING)
        while True:
            verdict = self._exchange(samples, drawn, void=False, of=of, stops=stops)
            if not verdict.void:
                self.activity.begin(Doing.STEPPING)
                return verdict
            if verdict.cut:
                self._park_within_step()

    def exchange_again(self, of: Sequence[int]) -> None:
        """Sum the gradients of a further update in the same step.

        Its samples are counted, and no rank can wait for data or park: the state is between two
        committed ones.

        Raises:
            PeerLost: a rank is gone.
        """
        self._end_if_told()
        with self._gate:
            self._waits = self._is_amid_updates = True
        self.activity.begin(Doing.EXCHANGING)
        try:
            self._step.exchange([0.0] * HEADER_SIZE, contribute=True, of=of)
        finally:
            with self._gate:
                self._waits = self._is_amid_updates = False
        self.activity.begin(Doing.STEPPING)

    def wait_for_data(self) -> None:
        """Call while no data come: park with the other ranks when a cut is due."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        long = self.world_size > 1 and now - self._waiting_since > _PEERS_WAIT_S
        interrupts = self.is_cut and not self._is_patient
        if not (interrupts or long):
            return
        self._waiting_since = now
        if self._exchange(0, None, void=True).cut:
            self._park_within_step()

    def have_data(self) -> None:
        """The wait is over."""
        self._waiting_since = None

    def meet(self, *, may_move: bool) -> None:
        """Let all ranks notice a cut at a point that all of them pass, between steps.

        Args:
            may_move: new trainers of the next stage pass this point, too. If not, a cut waits if
                this trainer would go on in the next stage.

        Raises:
            StageChanged: it goes on in the next stage.
        """
        self._end_if_told()
        if self.any_of_us(self.is_cut and (may_move or not self._is_patient)):
            self.park()

    def come_together(self, place: str) -> None:
        """See that all ranks are at the same place of the script. All ranks call it.

        What they exchange there is not what they would exchange elsewhere.

        Args:
            place: one of PLACES.

        Raises:
            UsageError: they are not.
        """
        if self.world_size == 1:
            return
        here = np.array([float(each == place) for each in PLACES])
        self._group.all_reduce(here)
        found = {each: round(count) for each, count in zip(PLACES, here.tolist(), strict=True)}
        if found[place] < self.world_size:
            first, *others = [each for each in PLACES if found[each]]
            raise UsageError(
                f"{first}: {found[first]} of {self.world_size} trainers have come there, "
                + ", ".join(f"{found[each]} to {each}" for each in others)
                + "; all of them call loop.evaluate and loop.save_best: do not call them for one "
                "rank alone (`if loop.rank == 0:`)"
            )

    def any_of_us(self, mine: bool) -> bool:
        """Whether `mine` is true on any rank. All ranks call it."""
        votes = np.array([float(mine)])
        self._group.all_reduce(votes)
        return bool(votes[0])

    def agree_on_shards(self, mine: int | None) -> int | None:
        """Return the number of shards that rank 0 has chosen; None: on some rank it is fixed.

        All ranks call it.
        """
        votes = np.array([float((mine or 0) if self.rank == 0 else 0), float(mine is None)])
        self._group.all_reduce(votes)
        return None if votes[1] else round(votes[0])

    def end_epoch(self, stop: bool) -> tuple[bool, SnapshotRequest]:
        """Agree on whether it was the last epoch, and on what is done then. All ranks call it."""
        request = self._state_manager.request_after_epoch()
        votes = np.array([float(stop), request.snapshot, float(request.renew)])
        self._group.all_reduce(votes)
        return bool(votes[0]), SnapshotRequest(snapshot=float(votes[1] >= 1), renew=bool(votes[2]))

    def agree(self, value: float) -> float | None:
        """Return `value` if it is the same on all ranks, else None. All ranks call it."""
        first = np.array([value])
        self._group.broadcast(first.view(np.uint8), 0)
        mine = np.array([value])
        return None if self.any_of_us(first.tobytes() != mine.tobytes()) else value

    def first_difference(self, values: Sequence[float]) -> int | None:
        """Return the index of the first number that is not about the same on all ranks.

        None: all are. All ranks call it.
        """
        sums = make_comparison(values)
        self._group.all_reduce(sums)
        return read_comparison(sums, self.world_size)

    def keep_best(self, best: BestCheckpoint) -> bool:
        """Have rank 0 write the committed state as the best of a metric, and wait for it.

        A process that trains on could be ended before it is written. All ranks call it, and watch
        each other meanwhile. Returns whether it was written; if not, rank 0 has logged why.

        Raises:
            PeerLost: a rank is gone, or this one has to end.
            InUseError: on rank 0; another training has taken over the folder of checkpoints.
        """
        with self.activity.during(Doing.SAVING):
            self._state_manager.start_best(best)
            self._wait_while(lambda: self._state_manager.is_writing_best)
            return not self.any_of_us(self._state_manager.has_best_failed)

    def write_final(self) -> None:
        """Have rank 0 write the last checkpoint, and try again until it is there.

        Without it the training would be lost. A full disk can be mended, and the user can end the
        job. All ranks call it; they watch each other meanwhile, and park between two tries when a
        cut is due.

        Raises:
            StageChanged: it goes on in the next stage, which tries again.
            PeerLost: a rank is gone, or this one has to end.
            InUseError: on rank 0; another training has taken over the folder of checkpoints.
        """
        self.activity.begin(Doing.SAVING)
        while True:
            self._state_manager.start_final()
            self._wait_while(lambda: self._state_manager.is_writing)
            if not self.any_of_us(self._state_manager.has_failed):
                return
            if self._state_manager.has_failed:
                logger.error(
                    "the training is complete, but its last checkpoint is not written (see above); "
                    "make room or mend the path: it is tried again every %g s until it is there, "
                    "or until you end the job (Ctrl-C, edl stop)", RETRY_S,
                )  # fmt: skip
            self.activity.live()  # the next try
            again_at = time.monotonic() + RETRY_S
            self._wait_while(
                lambda: time.monotonic() < again_at and not self.is_cut  # noqa: B023  called at once
            )
            self.meet(may_move=True)

    def _wait_while(self, is_busy: Callable[[], bool]) -> None:
        def look() -> bool:
            self._end_if_told()
            return is_busy()

        barrier(self._group, look)

    @property
    def is_cut(self) -> bool:
        """This rank was told to drain."""
        if self._link is None:
            return False
        self._link.poll()
        if self._next_group is not None:
            self._next_group.poll()
        return self._link.cut is not None

    @property
    def _is_patient(self) -> bool:
        cut = None if self._link is None else self._link.cut
        return cut is not None and cut.patient

    def park(self) -> None:
        """Agree with all ranks on the cut, and stay parked until it is off. All ranks call it.

        Returns at once if every rank knows by now that the cut is off.

        Raises:
            StageChanged: this trainer goes on in the next stage.
        """
        cut = None
        if self._link is not None:
            self._link.poll()
            cut = self._link.cut
        ballot = make_ballot(
            self.rank,
            self.world_size,
            None if cut is None else cut.id,
            cut is not None and cut.durable,
            "" if cut is None else cut.halt,
        )
        votes = np.array([*ballot, float(self._state_manager.wants_renewal)])
        self._group.all_reduce(votes)
        *ballots, renew = votes.tolist()
        agreed = read_ballots(ballots)
        if agreed is None:
            logger.info("the cut is off before any rank parked")
            return
        if self._link is None:
            raise LinkError("a peer was told to drain, and this trainer has no launcher")
        with self.activity.during(Doing.PARKED):
            start = self._state_manager.park(agreed, renew > 0)
        if start is not None:
            raise StageChanged(start)

    def _park_within_step(self) -> None:
        try:
            self.park()
        except StageChanged as change:
            text = "go: this trainer was parked in the middle of a step, which it cannot leave"
            raise LinkError(text) from change

    def end_soon(self) -> None:
        """End this trainer as a victim: now, or when its state is next known to be whole.

        For a signal handler. Between two lines of the script, the model may be half updated; in an
        exchange it is always the committed one.
        """
        if self._state_manager.is_kept:
            os._exit(PEER_LOST_EXIT_CODE)
        self._is_to_end = True

    def end_if_waiting(self) -> None:
        """End this trainer as a victim if it waits in an exchange. For another thread."""
        with self._gate:
            if self._waits:
                self._leave()

    def _leave(self) -> NoReturn:
        try:
            if not self._is_amid_updates:
                self._state_manager.rescue()
        except LinkError as lost:
            logger.error("%s", lost)
        exit_as_victim()

    def _end_if_told(self) -> None:
        if self._is_to_end:
            raise PeerLost("told to end, as another trainer of the stage has ended")

    def end_after_peer_lost(self, error: PeerLost, *, state_is_committed: bool) -> NoReturn:
        """Take a snapshot of the last committed state, and exit as a victim.

        Args:
            state_is_committed: no update has changed the state since the last commit.

        Raises:
            PeerLost: outside EDL, where no launcher would restart this trainer.
        """
        if self._link is None:
            raise error
        logger.error("peer lost: %s", error)
        try:
            if state_is_committed:
                self._step.drop()
                self._state_manager.rescue()
        except LinkError as lost:
            logger.error("%s", lost)
        exit_as_victim()

    def _exchange(
        self,
        samples: int,
        drawn: int | None,
        *,
        void: bool,
        of: Sequence[int] = (),
        stops: bool = False,
    ) -> ExchangeResult:
        self._end_if_told()
        request = SnapshotRequest() if void else self._state_manager.snapshot_request()
        cut = self.is_cut
        patient = cut and self._is_patient
        if self.world_size == 1:
            self._sum([0.0] * HEADER_SIZE, contribute=not void, of=of)
            return alone(
                cut=cut,
                void=void,
                samples=samples,
                request=request,
                patient=patient,
                drawn=drawn,
                stops=stops,
            )
        header = make_header(
            cut=cut,
            void=void,
            samples=samples,
            request=request,
            patient=patient,
            drawn=drawn,
            stops=stops,
        )
        return read_header(self._sum(header, contribute=not void, of=of))

    def _sum(self, header: list[float], *, contribute: bool, of: Sequence[int]) -> list[float]:
        with self._gate:
            self._waits = True
        try:
            return self._step.exchange(header, contribute=contribute, of=of)
        finally:
            with self._gate:
                self._waits = False


def exit_as_victim() -> NoReturn:
    """End the process at once: in an orderly exit the group's threads may hang for ever."""
    try:
        flush_files()
        logging.shutdown()
        for name in ("stdout", "stderr"):  # a script may have put an object of its own there
            with contextlib.suppress(Exception):
                getattr(sys, name).flush()
    finally:
        os._exit(PEER_LOST_EXIT_CODE)


def barrier(group: FrameworkGroup, is_busy: Callable[[], bool]) -> None:
    """Return when no rank is busy any more. All ranks call it, the busy one too.

    The ranks show themselves meanwhile: one that waited in the next exchange would give the others
    up after Paddle's 30 s.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        busy = np.array([float(is_busy())])
        group.all_reduce(busy)
        if not busy[0]:
            return
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
