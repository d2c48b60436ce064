"""Form the next stage's group in a trainer that stays, while it trains.

The group is formed in a thread. All else happens in the loop's own thread, which calls `poll` once
per step.
"""

import logging
import threading
from typing import Any

from job_server.api.wire import StagePlan
from pod_runtime.channel_wire import CannotJoin, Formed, Invitation
from pod_runtime.trainer.errors import LinkError, PeerLost, SnapshotError
from pod_runtime.trainer.frameworks.framework import FrameworkGroup, FrameworkState, GroupSpec
from pod_runtime.trainer.frameworks.meeting import CalledOffError
from pod_runtime.trainer.layout import StateLayout
from pod_runtime.trainer.membership.link import LauncherLink
from pod_runtime.trainer.membership.node_snapshots import make_segment, nodes_of
from pod_runtime.trainer.state.snapshot import SnapshotSegment

logger = logging.getLogger(__name__)

MOST_GROUPS = 20  # each leaves some 10 descriptors and 3 threads in the framework
_ATTEMPTS = 16  # numbers reserved for the attempts at one stage
_END_TIMEOUT_S = 35.0  # longer than the framework waits for a peer that has died


class _Attempt:
    """One group that is being formed."""

    def __init__(self, group: FrameworkGroup, invitation: Invitation, layout: StateLayout) -> None:
        """Start to form it; `layout`: of the state as it is now."""
        self.invitation = invitation
        self.reported = False  # the launcher knows how it ended
        self.error = ""
        self.group: Any | None = None  # None: not formed, or no longer wanted
        self.segment: SnapshotSegment | None = None  # None: none was made ahead
        self._framework_group, self._layout = group, layout
        self._off = threading.Event()
        self._gate = threading.Lock()  # around `_is_over` and `_drop`
        self._is_over = False  # the thread has nothing left to form
        self._thread = threading.Thread(target=self._form, name="join", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def call_off(self) -> None:
        """Drop the group; one that is still being formed is dropped when it is formed."""
        with self._gate:
            self._off.set()
            if self._is_over:
                self._drop()

    def join_thread(self) -> None:
        self._thread.join(_END_TIMEOUT_S)

    def _form(self) -> None:
        try:
            self._make_segment()
            spec = group_spec(self.invitation.plan, self.invitation.rank)
            self.group = self._framework_group.form_next(spec, self._off.is_set)
        except CalledOffError:
            pass
        except PeerLost as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001  the training must go on in any case
            self.error = f"{type(error).__name__}: {error}"
        with self._gate:
            self._is_over = True
            if self._off.is_set():
                self._drop()

    def _make_segment(self) -> None:
        """Make the next stage's segment, if this trainer is the first of its node then."""
        plan, rank = self.invitation.plan, self.invitation.rank
        node = next(ranks for ranks in nodes_of(plan) if rank in ranks)
        if rank != node[0]:
            return
        try:
            self.segment = make_segment(plan.stage, len(node), self._layout)
        except SnapshotError as error:
            logger.warning("%s", error)  # tried again, and logged again, at the first snapshot

    def _drop(self) -> None:
        self.group = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class NextGroupFormer:
    """Follows the launcher's invitations. One per process."""

    def __init__(self, group: FrameworkGroup, state: FrameworkState, link: LauncherLink) -> None:
        self._group, self._state, self._link = group, state, link
        self._attempt: _Attempt | None = None  # None: nothing is wanted
        self._called_off: list[_Attempt] = []  # whose threads may still run
        self._begun = 0

    def poll(self) -> None:
        """Begin, report or call off an attempt, as the newest invitation says. Once per step."""
        wanted = self._link.invitation
        attempt = self._attempt
        if attempt is not None and attempt.invitation is not wanted:
            logger.info("stage %d is off", attempt.invitation.plan.stage)
            attempt.call_off()
            self._called_off.append(attempt)
            self._attempt = attempt = None
        if wanted is not None and attempt is None:
            attempt = self._begin(wanted)
        if attempt is not None and attempt.is_done and not attempt.reported:
            attempt.reported = True
            plan = attempt.invitation.plan
            if attempt.group is None:
                self._refuse(plan, attempt.error)
            else:
                self._link.send(Formed(stage=plan.stage, attempt=plan.attempt))

    def take(self, plan: StagePlan) -> tuple[int, Any, SnapshotSegment | None]:
        """Return rank, group and segment in the stage of `plan`, which is committed.

        Raises:
            LinkError: it has not been formed.
        """
        attempt, self._attempt, self._link.invitation = self._attempt, None, None
        if attempt is None or attempt.group is None or attempt.invitation.plan.stage != plan.stage:
            raise LinkError(f"go: stage {plan.stage}, of which this trainer has formed no group")
        if self._begun >= MOST_GROUPS:
            self._link.send(CannotJoin(reason=_used_up()))
        return attempt.invitation.rank, attempt.group, attempt.segment

    def close(self) -> None:
        """End all threads: one that is still inside framework code can hang the process's exit."""
        attempts = [*self._called_off, *([self._attempt] if self._attempt is not None else [])]
        for attempt in attempts:
            attempt.call_off()
        for attempt in attempts:
            attempt.join_thread()

    def _begin(self, invitation: Invitation) -> _Attempt | None:
        plan = invitation.plan
        why = self._group.why_no_second_group()
        if self._begun >= MOST_GROUPS:
            why = _used_up()
        if why:
            self._link.invitation = None
            self._refuse(plan, why)
            return None
        self._begun += 1
        self._called_off = [each for each in self._called_off if not each.is_done]
        logger.info("forming stage %d's group, as rank %d", plan.stage, invitation.rank)
        self._attempt = _Attempt(self._group, invitation, self._state.layout())
        return self._attempt

    def _refuse(self, plan: StagePlan, why: str) -> None:
        logger.warning("stage %d cannot be joined: %s", plan.stage, why)
        self._link.send(CannotJoin(stage=plan.stage, attempt=plan.attempt, reason=why))


def group_spec(plan: StagePlan, rank: int) -> GroupSpec:
    """Return the group of `plan` for `form_next`: of trainers that stay and new ones."""
    return GroupSpec(
        rank=rank,
        world_size=plan.world_size,
        master=plan.master,
        generation=plan.stage * _ATTEMPTS + plan.attempt,
    )


def _used_up() -> str:
    return (
        f"this process has formed {MOST_GROUPS} groups, which the framework never quite frees; it "
        f"has to be replaced or restarted first"
    )
