"""Take the snapshots of this rank's node together with the node's other ranks.

The first of them makes the segment and hands it to the launcher; the others open it through the
maker's process. Every rank of the stage takes part in every snapshot, so each node holds the same
states. A snapshot is known to be complete once all ranks have met again after it.
"""

import json
import logging
import time
from collections.abc import Sequence

import numpy as np

from job_server.api.wire import SnapshotRef, StagePlan
from pod_runtime.cgroups import freed_since_peak, peak_memory
from pod_runtime.channel_wire import SegmentMade, SnapshotMade
from pod_runtime.segment_header import Stamp, read_newest
from pod_runtime.trainer.errors import SnapshotError
from pod_runtime.trainer.frameworks.framework import FrameworkGroup, FrameworkState
from pod_runtime.trainer.layout import StateLayout
from pod_runtime.trainer.membership.link import LauncherLink
from pod_runtime.trainer.progress.progress import TrainingProgress
from pod_runtime.trainer.state.host_state import HostState, SaveTarget, meta_bytes
from pod_runtime.trainer.state.snapshot import META_RESERVE, Handle, SnapshotSegment, read_snapshot

logger = logging.getLogger(__name__)

_ANNOUNCE_PERIOD_S = 0.2
_SMOOTHING = 0.5  # weight of the newest stall
_RETRY_S = 10.0  # after there was no room for a segment
_DIGEST_DIGITS = 12  # of a layout's digest, hexadecimal: as many as a float64 holds exactly


class NodeSnapshots:
    """One rank's part. Without a link there are no snapshots: outside EDL no shim holds them."""

    def __init__(
        self,
        group: FrameworkGroup,
        state: FrameworkState,
        progress: TrainingProgress,
        link: LauncherLink | None,
        *,
        rank: int,
        nodes: Sequence[Sequence[int]],
        segment: SnapshotSegment | None = None,
        save_target: SaveTarget | None = None,
    ) -> None:
        """
        Args:
            nodes: the ranks of the stage by node, each node's in ascending order.
            segment: made in advance, by the first rank of its node.
            save_target: where the state is written if the job ends; None: nowhere.
        """
        self._group, self._state = group, state
        self._progress, self._link = progress, link
        self._save_target = "null" if save_target is None else json.dumps(save_target.to_json())
        self._rank = rank
        self._world_size = sum(len(ranks) for ranks in nodes)
        self._node = next(tuple(ranks) for ranks in nodes if rank in ranks)
        self.share = 1 / len(nodes)  # of a decision that all nodes have to agree to
        self._are_alone = all(len(ranks) == 1 for ranks in nodes)
        self._prepared = segment  # None: none was made in advance, or it is in use
        self._segment: SnapshotSegment | None = (
            None  # None: there is none, or this rank does not write it
        )
        self._index = -1  # among the writers
        self._split = False  # several ranks write one: they have to meet before it is complete
        self._taken: Stamp | None = None  # the newest of which this rank has written its part
        self._unsaid: Stamp | None = None  # the newest that the launcher does not know of
        self._given = False  # the launcher has the segment
        self._said_at = 0.0
        self._wants_renewal = link is not None
        self._retry_at: float | None = None  # None: there was room
        self._trouble: str | None = None  # as of `trouble`, of this node
        self.stall_s = 0.0  # how long a snapshot takes; 0: not known
        self.count, self.total_s = 0, 0.0  # of this stage, with the making of segments

    @property
    def is_first(self) -> bool:
        """This rank is the first of its node's writers."""
        return self._link is not None and self._rank == self._node[0]

    @property
    def wants_renewal(self) -> bool:
        """A segment must be made before the next snapshot.

        One that had no room is tried again, but where other nodes would make theirs anew with it.
        """
        again = self._retry_at is not None and time.monotonic() >= self._retry_at
        return self._wants_renewal or (again and self.share == 1)

    @property
    def can_take(self) -> bool:
        """This node has a segment, or may get one."""
        return self._segment is not None or self.wants_renewal

    @property
    def can_rescue(self) -> bool:
        """The committed state is in no snapshot, and `rescue` may put it into one."""
        return (self.can_take or self.is_first) and self.complete != self.now

    @property
    def trouble(self) -> str | None:
        """Why rank 0's node has no snapshots; "": it has. None: not known yet, or another rank."""
        return self._trouble if self._rank == 0 else None

    @property
    def taken(self) -> Stamp | None:
        """The newest state of which this rank has taken a snapshot; None: none."""
        return self._taken

    @property
    def now(self) -> Stamp:
        """The stamp of the committed state."""
        progress = self._progress
        return Stamp(stage=progress.stage, step=progress.step, serial=progress.version)

    def take(self, renew: bool) -> None:
        """Write this rank's part of a snapshot. All ranks of the stage call it.

        Args:
            renew: some rank wants renewal; the same on all ranks.
        """
        if self._link is None:
            return
        begun = time.monotonic()
        layout = self._state.layout()
        if renew:
            self._renew(layout)
        copied_since = time.monotonic()
        if self._segment is not None and self._taken != self.now:
            self._write(self._segment, layout)
            self.count += 1
            spent = time.monotonic() - copied_since
            self.stall_s += (spent - self.stall_s) * (_SMOOTHING if self.stall_s else 1.0)
        self.total_s += time.monotonic() - begun
        if not self._split:
            self.settle()

    def settle(self, *, at_once: bool = False) -> None:
        """Report what is complete to the launcher. All ranks have met since the last `take`."""
        if self._link is None or self._segment is None or not self.is_first or not self._unsaid:
            return
        now = time.monotonic()
        if self._given and not at_once and now - self._said_at < _ANNOUNCE_PERIOD_S:
            return
        newest = read_newest(self._segment.fd)
        if newest is None or newest.stamp < self._unsaid:
            logger.error(
                "the snapshot of step %d is incomplete: the ranks of this node disagree about the "
                "state's layout; do all run the same script?",
                self._unsaid.step,
            )
            self._unsaid, self._wants_renewal = None, True
            return
        self._give(newest.digest)
        self._said_at, self._unsaid = now, None
        stamp = newest.stamp
        self._link.send(
            SnapshotMade(
                stage=stamp.stage, step=stamp.step, serial=stamp.serial, digest=newest.digest
            )
        )

    def meet(self) -> bool:
        """Return when all ranks have written their parts of a snapshot. All ranks call it.

        Returns:
            Whether it is incomplete on some rank, whose segment the state has outgrown.
        """
        votes = np.array([float(self.wants_renewal)])
        self._group.all_reduce(votes)
        self.settle(at_once=True)
        return bool(votes[0])

    @property
    def complete(self) -> Stamp | None:
        """The newest complete snapshot of this node; None: there is none."""
        return None if self._segment is None else self._segment.newest()

    def reference(self) -> SnapshotRef | None:
        """Return the committed state's snapshot as the server names it; None: none."""
        newest = None if self._segment is None else read_newest(self._segment.fd)
        if newest is None or newest.stamp != self.now:
            return None
        stamp = newest.stamp
        return SnapshotRef(
            stage=stamp.stage, step=stamp.step, digest=newest.digest, serial=stamp.serial
        )

    @property
    def fd(self) -> int:
        """The segment's descriptor; only while `complete` is not None."""
        assert self._segment is not None
        return self._segment.fd

    def host_state(self) -> HostState | None:
        """Return the committed state as it stands in the segment; None if it is not complete."""
        return None if self._segment is None else read_snapshot([self.fd], self.now)

    def rescue(self) -> None:
        """Take a snapshot of the committed state alone, as another rank is gone."""
        if self._link is None:
            return
        # A complete one was taken at the end of the step. The script may have begun the next one
        # since: what it has changed there, say the learning rate, is changed again after a restore.
        if self.complete != self.now:
            self._write_rescued()
        newest = None if self._segment is None else read_newest(self._segment.fd)
        if self.is_first and self._segment is not None and newest is not None:
            self._give(newest.digest)
            self._segment.flush()

    def _write_rescued(self) -> None:
        """Write the committed state, if it is still there and there is room for it."""
        changed = self._state.changed_in_step()
        if changed:
            newest = self.complete
            logger.warning(
                "the step that is lost has changed %s before its update: what was committed is "
                "gone, and training goes on from %s. Change it after step.update() to lose one "
                "step only",
                changed,
                "the last checkpoint" if newest is None else f"the snapshot of step {newest.step}",
            )
            return
        layout = self._state.layout()
        meta = self._meta(layout)
        if self._segment is None and self.is_first:
            # The trainers that follow need the memory that those who are gone have left.
            spare = len(self._node) * peak_memory()
            self._segment = self._make(layout, meta, writers=1, spare=spare, or_file=True)
            self._index = 0
        if self._segment is not None and self._segment.fits(len(meta), layout.total_bytes):
            self._segment.write_whole(self._state, layout, self.now, meta)

    def close(self) -> None:
        for segment in (self._segment, self._prepared):
            if segment is not None:
                segment.close()
        self._segment = self._prepared = None

    # --- the segment

    def _write(self, segment: SnapshotSegment, layout: StateLayout) -> None:
        meta = self._meta(layout) if self._index == 0 else b""
        if not segment.fits(len(meta), layout.total_bytes):
            self._wants_renewal = True  # before the next snapshot; this one stays incomplete
            return
        segment.write_part(self._state, layout, self.now, index=self._index, meta=meta)
        self._taken = self._unsaid = self.now

    def _renew(self, layout: StateLayout) -> None:
        """Make a segment for the state's present size, and find out which ranks can write it."""
        self._wants_renewal, self._given, self._taken = False, False, None
        old, self._segment = self._segment, None
        # What the node's next steps will need again. No rank is amid a step once all have met.
        freed = np.zeros(self._world_size)
        freed[self._rank] = freed_since_peak()
        if not self._are_alone:
            self._group.all_reduce(freed)
        if self.is_first:
            meta, spare = self._meta(layout), int(freed[list(self._node)].sum())
            self._segment = self._make(layout, meta, writers=len(self._node), spare=spare)
        joined = [self._rank] if self._segment is not None else []
        if not self._are_alone:
            joined = self._join(layout)
        if self._segment is not None:
            self._index = joined.index(self._rank)
            if self._index == 0:
                self._segment.set_writers(len(joined))
                if old is None:  # no older one would be lost: the shims may have it at once
                    self._give(layout.digest)
            else:
                self._segment.follow_writers(len(joined))
                self._segment.populate(layout, self._index)
        if old is not None:
            old.close()

    def _make(
        self, layout: StateLayout, meta: bytes, *, writers: int, spare: int, or_file: bool = False
    ) -> SnapshotSegment | None:
        """Return a segment for the state's present size; None: there is no room, which is said."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            if prepared.fits(len(meta), layout.total_bytes):
                prepared.set_writers(writers)
                self._trouble = ""
                return prepared
            prepared.close()
        try:
            made = make_segment(
                self._progress.stage, writers, layout, len(meta), spare=spare, or_file=or_file
            )
        except SnapshotError as error:
            if str(error) != self._trouble:
                logger.error("%s", error)
            self._trouble, self._retry_at = str(error), time.monotonic() + _RETRY_S
            return None
        self._trouble, self._retry_at = "", None
        return made

    def _join(self, layout: StateLayout) -> list[int]:
        """Open the segment of this node's first rank; return which ranks of the node write it."""
        mine = self._segment.handle if self._segment is not None else None
        digest = int(layout.digest[:_DIGEST_DIGITS], 16)
        handles = np.zeros((self._world_size, 5))
        if mine is not None:
            handles[self._rank] = (mine.pid, mine.fd, mine.inode, mine.size_bytes, digest)
        self._group.all_reduce(handles.reshape(-1))
        pid, fd, inode, size_bytes, wanted = (int(value) for value in handles[self._node[0]])
        if not self.is_first and pid and wanted == digest:
            handle = Handle(pid=pid, fd=fd, inode=inode, size_bytes=size_bytes)
            self._segment = SnapshotSegment.join(handle)
            if self._segment is None:
                logger.warning(
                    "rank %d cannot open the segment of rank %d, which writes this rank's part of "
                    "the snapshots as well",
                    self._rank,
                    self._node[0],
                )
        writes = np.zeros(self._world_size)
        writes[self._rank] = self._segment is not None
        self._group.all_reduce(writes)
        self._split = int(writes.sum()) > int(np.count_nonzero(handles[:, 0]))
        return [rank for rank in self._node if writes[rank]]

    def _give(self, digest: str) -> None:
        """Give the segment to the shims; it replaces an older one of this stage."""
        if self._given or self._segment is None or self._link is None:
            return
        self._given = True
        size = self._segment.handle.size_bytes
        stage = self._progress.stage
        self._link.send(SegmentMade(stage=stage, size_bytes=size, digest=digest), (self.fd,))

    def _meta(self, layout: StateLayout) -> bytes:
        scalars = json.dumps(self._state.scalars(committed=True))
        return meta_bytes(self._progress.status_json(), scalars, layout, self._save_target)


def nodes_of(plan: StagePlan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, in ascending order."""
    found: dict[str, list[int]] = {}
    for pod in plan.pods:
        found.setdefault(pod.node_id, []).extend(pod.ranks)
    return tuple(tuple(sorted(ranks)) for ranks in found.values())


def make_segment(
    stage: int,
    writers: int,
    layout: StateLayout,
    meta_size: int = 0,
    *,
    spare: int | None = None,
    or_file: bool = False,
) -> SnapshotSegment:
    """Return a new segment for a stage's snapshots.

    Args:
        spare: as of `allocate`; None: what so many trainers as this one have freed.
        or_file: as of `allocate`.

    Raises:
        SnapshotError: there is no room for it.
    """
    meta_size = max(meta_size, len(layout.text) + META_RESERVE)
    return SnapshotSegment.make(
        f"edl-snapshot-{stage}",
        writers=writers,
        meta_bytes=meta_size,
        data_bytes=layout.total_bytes,
        spare=writers * freed_since_peak() if spare is None else spare,
        or_file=or_file,
    )
