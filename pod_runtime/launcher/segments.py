"""Hand snapshot segments from a trainer to the shims that outlive it, and back.

A segment goes to the writer's own shim. If the node has another pod in the stage, it goes to that
pod's shim as well, so that no state is lost with one pod.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from job_server.api.wire import Order, RestoreFrom, SnapshotRef, StagePlan, Way
from pod_runtime.channel_wire import SegmentMade, SnapshotMade
from pod_runtime.launcher.channel import close_all
from pod_runtime.launcher.state import own_pod
from pod_runtime.segment_header import SlotHeader, Stamp, read_newest
from pod_runtime.shim_wire import HeldSegment, ShimError, request

logger = logging.getLogger(__name__)


class NodeSegments:
    """This pod's view of the shims on its node; their folders are siblings of `pod_dir`."""

    def __init__(self, pod_id: str, pod_dir: Path) -> None:
        self._pod_id = pod_id
        self._pod_dir = pod_dir
        self._announced: SnapshotRef | None = None  # None: no trainer of ours has made one
        self._dropped_below = 0
        self._at_hand: tuple[int, ...] = ()  # descriptors of segments
        self._at_hand_from = ""  # the pod whose shim they are from

    def keep(self, plan: StagePlan, made: SegmentMade, fd: int) -> None:
        """Have the shims hold a trainer's segment; `fd` stays open here."""
        segment = HeldSegment(
            pod_id=self._pod_id,
            stage=made.stage,
            size_bytes=made.size_bytes,
            digest=made.digest,
        )
        for pod_id in (self._pod_id, *self._neighbours(plan)[:1]):
            try:
                request(self._dir(pod_id), {"op": "put", "segment": asdict(segment)}, (fd,))
            except ShimError as error:
                logger.warning("stage %d: segment not held by %s: %s", made.stage, pod_id, error)

    def complete(self, plan: StagePlan, made: SnapshotMade) -> None:
        """A slot is complete; with a stage's first one, earlier stages' states are dropped."""
        self._announced = SnapshotRef(
            stage=made.stage, step=made.step, digest=made.digest, serial=made.serial
        )
        if made.stage <= self._dropped_below:
            return
        self._dropped_below = made.stage
        for pod_id in (self._pod_id, *self._neighbours(plan)):
            try:
                request(self._dir(pod_id), {"op": "drop", "below_stage": made.stage})
            except ShimError as error:
                logger.warning("stage %d: nothing dropped by %s: %s", made.stage, pod_id, error)

    def announced(self) -> SnapshotRef | None:
        """Return the newest snapshot that a trainer of this pod has announced."""
        return self._announced

    def have_at_hand(self, plan: StagePlan) -> None:
        """Fetch what this node holds of a stage that is cut: later there is no time for it."""
        for pod_id in (self._pod_id, *self._neighbours(plan)):
            self._at_hand = self._fetch(pod_id, plan.stage)
            if self._at_hand:
                self._at_hand_from = pod_id
                return

    def let_go(self) -> None:
        """Drop what is at hand: a segment's memory is free once no process holds it."""
        close_all(self._at_hand)
        self._at_hand, self._at_hand_from = (), ""

    def confirm(self, parked_as: SnapshotRef) -> SnapshotRef | None:
        """Return the newest snapshot that this pod's shim holds.

        That should be `parked_as`, as trainers say. The shim is asked only where the segments at
        hand hold another one: a segment may be newer than they are.
        """
        if any(_ref(header) == parked_as for fd in self._at_hand if (header := read_newest(fd))):
            return parked_as if self._at_hand_from == self._pod_id else None
        return self.newest()

    def show(self, wanted: SnapshotRef) -> tuple[int, ...]:
        """Return the descriptor of the segment at hand that holds `wanted`; (): none does.

        It stays this object's; do not close it.
        """
        headers = ((fd, read_newest(fd)) for fd in self._at_hand)
        return tuple(fd for fd, header in headers if header and _ref(header) == wanted)

    def newest(self) -> SnapshotRef | None:
        """Ask this pod's shim for the newest complete snapshot that it holds. Any thread."""
        try:
            _, fds = request(self._pod_dir, {"op": "get", "stage": None})
        except ShimError as error:
            logger.warning("cannot ask the shim what it holds: %s", error)
            return None
        try:
            found = [header for fd in fds if (header := read_newest(fd)) is not None]
        finally:
            close_all(fds)
        if not found:
            return None
        return _ref(max(found, key=lambda header: header.stamp))

    def for_restore(self, plan: StagePlan) -> tuple[int, ...]:
        """Return descriptors of the segments that hold the state to start from.

        They come from this pod's shim, or from the shim of another pod on this node that the plan
        names. (): neither has any; the trainer gets its state from other nodes, or from a
        checkpoint. The caller closes the descriptors.
        """
        source = plan.restore_from
        if source is None:
            return self._for_check(plan) if plan.order is Order.PREPARE else ()
        found = tuple(os.dup(fd) for fd in self._at_hand if _has(fd, source))
        silent = ""
        others = [pod_id for pod_id in source.pods if pod_id != self._pod_id]
        for pod_id in (self._pod_id, *others):
            if found:
                break
            if (self._dir(pod_id) / "sock").exists():  # else it is on another node, or gone
                try:
                    found = self._ask(pod_id, source.stage)
                except ShimError as error:
                    logger.warning("no state of stage %d from %s: %s", source.stage, pod_id, error)
                    # One that is gone refuses at once.
                    is_silent = isinstance(error.__cause__, TimeoutError | BlockingIOError)
                    silent = pod_id if is_silent and pod_id in source.pods else silent
            if source.local_on_all_nodes:
                unfit = [fd for fd in found if not _has(fd, source)]
                found = tuple(fd for fd in found if fd not in unfit)
                close_all(unfit)
        # What all nodes have, trainers may have loaded ahead; else they say that it is lost.
        replaces = plan.way is Way.REPLACE and not source.local_on_all_nodes
        needs_it = plan.order is Order.START or replaces
        if silent and not found and needs_it and not self._is_elsewhere(plan):
            raise ShimError(
                f"the shim of {silent}, which has the state of step {source.step} in memory, does "
                f"not answer: it is stopped, or this node is too busy"
            )
        return found

    def _is_elsewhere(self, plan: StagePlan) -> bool:
        """Whether the state that a plan starts from can be had without this node's shims."""
        source, mine = plan.restore_from, own_pod(self._pod_id, plan)
        if source is None or source.path:
            return True
        return any(p.pod_id in source.pods and p.node_id != mine.node_id for p in plan.pods)

    def _for_check(self, plan: StagePlan) -> tuple[int, ...]:
        """Return descriptors of the newest state on this node, whatever its stage; (): none.

        The state that a stage in preparation will start from does not exist yet. By this one its
        trainers check that their script can continue it.
        """
        held = (self._fetch(each, None) for each in (self._pod_id, *self._neighbours(plan)))
        return next((each for each in held if each), ())

    def _fetch(self, pod_id: str, stage: int | None) -> tuple[int, ...]:
        """Return descriptors of the segments of a stage (None: of all) that a shim holds.

        The caller closes them.
        """
        try:
            return self._ask(pod_id, stage)
        except ShimError as error:
            which = "any stage" if stage is None else f"stage {stage}"
            logger.warning("no state of %s from %s: %s", which, pod_id, error)
            return ()

    def _ask(self, pod_id: str, stage: int | None) -> tuple[int, ...]:
        """As `_fetch`.

        Raises:
            ShimError: the shim is gone, or gives no answer.
        """
        _, fds = request(self._dir(pod_id), {"op": "get", "stage": stage})
        return fds

    def _neighbours(self, plan: StagePlan) -> list[str]:
        """Return the other pods of `plan` on this node, lowest rank first."""
        mine = own_pod(self._pod_id, plan)
        others = [p for p in plan.pods if p.node_id == mine.node_id and p.pod_id != mine.pod_id]
        return [pod.pod_id for pod in sorted(others, key=lambda pod: pod.pod_rank)]

    def _dir(self, pod_id: str) -> Path:
        return self._pod_dir if pod_id == self._pod_id else self._pod_dir.parent / pod_id


def _has(fd: int, source: RestoreFrom) -> bool:
    """Whether a segment's newest state is exactly `source`."""
    header = read_newest(fd)
    wanted = Stamp(stage=source.stage, step=source.step, serial=source.serial)
    return header is not None and header.stamp == wanted


def _ref(header: SlotHeader) -> SnapshotRef:
    stamp = header.stamp
    return SnapshotRef(
        stage=stamp.stage, step=stamp.step, digest=header.digest, serial=stamp.serial
    )


def highest_stage(checkpoint: Path) -> int:
    """Return the highest stage that has a folder in a local checkpoint path; 0: none has."""
    try:
        names: Iterable[str] = os.listdir(checkpoint)
    except OSError:
        return 0
    numbers = [
        name.removeprefix("stage_")
        for name in names
        if name.startswith("stage_") and name.removeprefix("stage_").isdecimal()
    ]
    return max((int(number) for number in numbers), default=0)
