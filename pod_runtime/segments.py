"""Snapshot segments: hand them from a trainer to the shims that outlive it, and back.

The launcher holds none itself. A segment goes to the writer's own shim and, where the node has
another pod in the stage, to that pod's shim too, so that the loss of one pod loses no state.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from job_server.wire import SnapshotRef, StagePlan
from pod_runtime.channel import close_all
from pod_runtime.channel_wire import SegmentMade, SnapshotMade
from pod_runtime.launcher_state import own_pod
from pod_runtime.segment_header import read_newest
from pod_runtime.shim_wire import Segment, ShimError, request, segment_json

logger = logging.getLogger(__name__)


class Segments:
    """This pod's view of the shims on its node; their folders are siblings of `pod_dir`."""

    def __init__(self, pod_id: str, pod_dir: Path) -> None:
        self._pod_id = pod_id
        self._pod_dir = pod_dir
        self._announced: SnapshotRef | None = None  # None: no trainer of ours has made one
        self._dropped_below = 0

    def keep(self, plan: StagePlan, made: SegmentMade, fd: int) -> None:
        """Have the shims hold a trainer's segment; `fd` stays open here."""
        segment = Segment(
            pod_id=self._pod_id,
            stage=made.stage,
            size_bytes=made.size_bytes,
            digest=made.digest,
        )
        for pod_id in (self._pod_id, *self._neighbours(plan)[:1]):
            try:
                request(self._dir(pod_id), {"op": "put", "segment": segment_json(segment)}, (fd,))
            except ShimError as error:
                logger.warning("stage %d: segment not held by %s: %s", made.stage, pod_id, error)

    def complete(self, plan: StagePlan, made: SnapshotMade) -> None:
        """A slot is complete; with a stage's first, the states of earlier stages are let go."""
        self._announced = SnapshotRef(stage=made.stage, step=made.step, digest=made.digest)
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

    def newest(self) -> SnapshotRef | None:
        """Return the newest complete snapshot that this pod's shim holds; asks it. Any thread."""
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
        newest = max(found, key=lambda header: header.stamp)
        return SnapshotRef(stage=newest.stamp.stage, step=newest.stamp.step, digest=newest.digest)

    def for_restore(self, plan: StagePlan) -> tuple[list[dict[str, object]], tuple[int, ...]]:
        """Return the segments that hold the state to start from, and their descriptors.

        From the own shim, else from another one on this node that the plan names; ([], ()) where
        there is none: the trainer gets its state from other nodes, or from a checkpoint. The
        caller closes the descriptors.
        """
        source = plan.restore_from
        if source is None:
            return [], ()
        others = [pod_id for pod_id in source.pods if pod_id != self._pod_id]
        for pod_id in (self._pod_id, *others):
            folder = self._dir(pod_id)
            if not (folder / "sock").exists():
                continue  # on another node, or gone
            try:
                answer, fds = request(folder, {"op": "get", "stage": source.stage})
            except ShimError as error:
                logger.warning("stage %d: no state from %s: %s", plan.stage, pod_id, error)
                continue
            if fds:
                return list(answer["segments"]), fds
        return [], ()

    def _neighbours(self, plan: StagePlan) -> list[str]:
        """Return the other pods of `plan` on this node, lowest rank first."""
        mine = own_pod(self._pod_id, plan)
        others = [p for p in plan.pods if p.node_id == mine.node_id and p.pod_id != mine.pod_id]
        return [pod.pod_id for pod in sorted(others, key=lambda pod: pod.pod_rank)]

    def _dir(self, pod_id: str) -> Path:
        return self._pod_dir if pod_id == self._pod_id else self._pod_dir.parent / pod_id


def highest_stage(checkpoint: Path) -> int:
    """Return the highest stage that a local checkpoint path has a folder of; 0 for none."""
    try:
        names: Iterable[str] = os.listdir(checkpoint)
    except OSError:
        return 0
    numbers = [
        name.removeprefix("stage_")
        for name in names
        if name.startswith("stage_") and name.removeprefix("stage_").isdigit()
    ]
    return max((int(number) for number in numbers), default=0)
