"""Give every rank of a new stage the same state, from wherever it is nearest."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from job_server.api.wire import RestoreFrom
from pod_runtime.segment_header import Stamp
from pod_runtime.trainer.errors import ElsewhereError, StateError
from pod_runtime.trainer.frameworks.framework import FrameworkGroup, FrameworkState
from pod_runtime.trainer.membership.member import barrier
from pod_runtime.trainer.membership.state_manager import CarriedState
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.state.checkpoint import CheckpointId, CheckpointStore
from pod_runtime.trainer.state.host_state import HostState, host_state_from, room_for
from pod_runtime.trainer.state.owner import new_run_id
from pod_runtime.trainer.state.snapshot import newest_stamp, read_snapshot
from pod_runtime.trainer.state.storage import open_storage

logger = logging.getLogger(__name__)

_Read = Callable[[], HostState | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The state that a stage begins from."""

    status: LoopStatus
    stage: int  # of this stage, as rank 0 says; outside EDL only rank 0 knows it beforehand
    came_from: tuple[int, int] | None  # (stage, step of this loop); None: a fresh start
    from_checkpoint: bool  # what was loaded is an intact checkpoint of exactly this state
    host_state: HostState | None = None  # what was loaded; None: nothing, or no longer kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAhead:
    """What the model holds already, before it was known that the stage begins from it."""

    stamp: Stamp
    host_state: HostState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestore:
    """One rank's part in restoring the state. All ranks of the stage `run` theirs together."""

    group: FrameworkGroup
    state: FrameworkState
    rank: int
    world_size: int
    stage: int  # of this stage; only rank 0's counts
    # A later step of its stage is as good; with `path`, a checkpoint there. None: the newest
    # checkpoint of `store`, or a fresh start.
    wanted: RestoreFrom | None
    fds: tuple[int, ...]  # segments that this rank was given
    store: CheckpointStore | None  # where checkpoints are; None on other ranks than 0
    fresh: LoopStatus
    carried: CarriedState | None = None  # this rank goes on with the state that it has
    loaded: LoadedAhead | None = None  # None: nothing was loaded ahead
    joins: bool = False  # others go on with the state that they have
    path: str = ""  # of `store`, which another node may have a folder of its own at

    def run(self) -> Restored:
        """Load the state that is wanted, else the newest checkpoint, else rank 0's fresh model.

        Raises:
            StateError, CheckpointError: a state is there and does not fit, or is damaged.
            InUseError: on rank 0; another training has the folder of checkpoints.
            PeerLost: another rank is gone.
        """
        if self.wanted is not None and self.wanted.local_on_all_nodes:
            return self._load_local(self.wanted)
        newest = newest_stamp(self.fds, self.wanted.stage) if self.wanted else None
        snapshot = None if newest is None else read_snapshot(self.fds, newest)
        holders, source, is_anothers = self._find_holders(newest, snapshot)
        if is_anothers:
            return self._begin_apart()
        if not holders.any():
            return self._restore_from_disk()
        newer, is_newer = self._find_newer_on_disk(newest)
        if is_newer:
            return self._share(newer, 0, from_checkpoint=True)
        if holders.all() and self.carried is not None:
            return self._continue(self.carried)
        held = None
        if newest is not None and holders[self.rank]:
            held = snapshot
            if held is None:
                raise StateError(f"the snapshot of step {newest.step} cannot be read any more")
        if holders.all() and held is not None:
            return self._load(held)
        if source == self.rank and self.carried is not None:
            # A snapshot rather than the model itself: its script may have touched that since, as a
            # scheduler does at the end of an epoch.
            held = self.carried.host_state() or own_state(
                self.state, self.carried.status, committed=True
            )
        return self._share(held, source)

    def _load_local(self, wanted: RestoreFrom) -> Restored:
        """Load exactly what every node has: no other rank has to be asked, or waited for.

        Raises:
            StateError: this node has it no longer.
        """
        stamp = Stamp(stage=wanted.stage, step=wanted.step, serial=wanted.serial)
        if self.carried is not None and self.carried.stamp == stamp:
            return self._continue(self.carried)
        if self.loaded is not None and self.loaded.stamp == stamp:
            return self._restored(self.loaded.host_state)
        held = read_snapshot(self.fds, stamp)
        if held is not None and not self._is_ours(held.status):
            return self._begin_apart()
        if held is None:
            raise StateError(
                f"stage {self.stage} begins from step {stamp.step} of stage {stamp.stage}, whose "
                f"snapshot this node has lost since; trainers start again from another node's"
            )
        return self._load(held)

    def _find_holders(
        self, newest: Stamp | None, snapshot: HostState | None
    ) -> tuple[npt.NDArray[np.bool_], int, bool]:
        """Return which ranks hold the newest state in memory, and one that can send it.

        And whether that is one of another loop of the script. No rank holds it if that is older
        than what is wanted. A later step is as good: the stage may have come further than the
        server knew when all of its launchers died.
        """
        have = np.zeros((self.world_size, 4))  # step, serial, is in a snapshot, is another loop's
        have[self.rank, :3] = (-1, -1, 0) if newest is None else (newest.step, newest.serial, 1)
        if self.carried is not None:
            stamp = self.carried.stamp
            have[self.rank, :3] = (stamp.step, stamp.serial, self.carried.is_in_snapshot)
        elif snapshot is not None:
            have[self.rank, 3] = not self._is_ours(snapshot.status)
        self.group.all_reduce(have.reshape(-1))
        best = max(have[:, :3].tolist())
        wanted_step = self.wanted.step if self.wanted else 0
        holders = (have[:, :2] == best[:2]).all(axis=1) & (best[0] >= wanted_step)
        return holders, have[:, :3].tolist().index(best), bool(have[:, 3].any())

    def _find_newer_on_disk(self, newest: Stamp | None) -> tuple[HostState | None, bool]:
        """Return on rank 0 a checkpoint that is newer than what is in memory, and if there is one.

        There may be where the memory is that of a stage before the last: that one had no memory for
        snapshots, or has not come to its first.
        """
        wanted = self.wanted
        if wanted is None or wanted.stage >= self.stage - 1 or self.joins:
            return None, False
        known = (wanted.stage, wanted.step if newest is None else newest.step)
        store = self.store
        found = None if store is None else store.newest_whole()
        read = None
        if store is not None and found is not None and (found.stage, found.step) > known:
            is_ours = store.origin(found).is_of(self.fresh.origin, is_finished=False)
            read = _newest_of(store) if is_ours else None
        state = self._read_while_others_wait(read)
        # One that is damaged is passed over, and the one before may be older.
        is_newer = state is not None and (state.status.stage, state.status.step) > known
        said = np.array([float(is_newer)])
        self.group.all_reduce(said)
        return (state if is_newer else None), bool(said[0])

    def _is_ours(self, status: LoopStatus) -> bool:
        """Whether this loop made a state, and no other of the script's, in the process before."""
        return status.origin.is_of(self.fresh.origin, is_finished=status.is_finished)

    def _begin_apart(self) -> Restored:
        """Begin from this loop's own checkpoint, or afresh.

        Raises:
            StateError: those who stay are in another loop.
        """
        if self.joins and self.carried is None:
            raise StateError(
                "the trainers that stay are in another loop of the script, and this one is new: "
                "all are started again, from the script's top"
            )
        if self.carried is not None:
            return self._continue(self.carried)
        logger.info(
            "the state in memory is of another loop of this script: this one begins from its own "
            "checkpoint, if it has one"
        )
        return replace(self, wanted=None, fds=())._restore_from_disk()

    def _restore_from_disk(self) -> Restored:
        if self.wanted is not None and not self.wanted.path:
            logger.error(
                "no pod of this stage holds the snapshot of stage %d, step %d; "
                "falling back to checkpoints: steps may be redone",
                self.wanted.stage,
                self.wanted.step,
            )
        if self.wanted is None:
            self._check_shared()
        source, read = self._find_on_disk()
        read_state = self._read_while_others_wait(read)
        if self.store is not None and source == 0 and read_state is None:
            self.store.check_writable()  # now nothing is lost; later, training goes on without
        return self._share(
            read_state, source, from_checkpoint=self.wanted is None or not self.wanted.spare
        )

    def _check_shared(self) -> None:
        """See that no other node has a newer checkpoint, at this path, than the one that is read.

        Raises:
            StateError: one has, in a folder of its own.
        """
        if self.world_size == 1:
            return
        have = np.zeros((self.world_size, 2))
        if self.path and "://" not in self.path:
            with suppress(OSError):  # of rank 0's it is said where that reads
                found = CheckpointStore(open_storage(self.path)).newest_whole()
                have[self.rank] = (0, 0) if found is None else (found.stage, found.step)
        self.group.all_reduce(have.reshape(-1))
        ids = have.astype(int).tolist()
        best = max(ids)
        if best > ids[0]:
            mine = f"step {ids[0][1]} of stage {ids[0][0]}" if ids[0][0] else "none"
            raise StateError(
                f"checkpoint: at {self.path}, rank {ids.index(best)} sees step {best[1]} of stage "
                f"{best[0]}, and rank 0, which reads for all, {mine}: each node has a folder of "
                f"its own there. Copy what is newer to rank 0's node, or remove it if it is of "
                f"another training; a folder that all nodes see needs neither"
            )

    def _find_on_disk(self) -> tuple[int, _Read | None]:
        """Return the rank that reads the newest checkpoint for all, and how, if it is this one.

        That is rank 0, which knows the script's path, unless the state was written to a folder that
        only one node sees, when the job was paused.

        Raises:
            ElsewhereError: no rank sees what the stage is to begin from, and its node is away.
            StateError: no rank sees it, nor any other checkpoint.
        """
        wanted, store = self.wanted, self.store
        newest = None if store is None else _newest_of(store)
        if wanted is None or not wanted.path:
            return 0, newest
        named = CheckpointStore(open_storage(wanted.path))
        named_id = CheckpointId(wanted.stage, wanted.step)
        read = None
        have = np.zeros((self.world_size, 3))  # stage, step, is another loop's
        is_there = named.is_whole(named_id)
        here = self.fresh.origin
        if is_there and not named.origin(named_id).is_of(here, is_finished=False):
            have[self.rank, 2] = 1
        elif is_there:
            read = (lambda: named.load(named_id)) if wanted.spare else _newest_of(named)
            have[self.rank, :2] = named_id.stage, named_id.step
        found = None if store is None else store.newest_whole()
        if found is not None and (read is None or found >= named_id):
            read, have[self.rank, :2] = newest, (found.stage, found.step)
        self.group.all_reduce(have.reshape(-1))
        if have[:, 2].any():
            return 0, newest
        ids = have[:, :2].tolist()
        best = max(ids)
        if wanted.away and best < [named_id.stage, named_id.step]:
            raise ElsewhereError(
                f"no trainer sees step {named_id.step} of stage {named_id.stage} in {wanted.path}, "
                f"where another node has written it"
            )
        if not best[0]:
            raise StateError(
                f"no trainer sees step {named_id.step} of stage {named_id.stage} in {wanted.path}, "
                f"where it was written; bring that folder back, or start afresh as another job"
            )
        if best < [named_id.stage, named_id.step]:
            logger.error("%s/%s is gone: steps are redone", wanted.path, named_id.folder)
        source = ids.index(best)
        return source, read if source == self.rank else None

    def _read_while_others_wait(self, read: _Read | None) -> HostState | None:
        """Claim its folder, read and verify a checkpoint, which may take minutes."""
        with ThreadPoolExecutor(1, "checkpoint-reader") as pool:
            reading = None if read is None else pool.submit(read)
            barrier(self.group, lambda: reading is not None and not reading.done())
            return None if reading is None else reading.result()

    def _share(
        self, state: HostState | None, source: int, *, from_checkpoint: bool = False
    ) -> Restored:
        """Have all ranks load the state of `source`; None there: its fresh model, a new run.

        The rank sends sizes, description and one flat run of bytes.
        """
        fresh = self.fresh
        if self.rank == source and state is None:
            fresh = replace(fresh, run_id=new_run_id())
        if self.world_size == 1:
            if state is None:
                return self._fresh(fresh, self.stage)
            return self._load(state, from_checkpoint=from_checkpoint)
        head = np.zeros(4, np.int64)
        if self.rank == source:
            sent = state or own_state(self.state, fresh)
            meta = np.frombuffer(sent.meta(), np.uint8).copy()
            data = np.frombuffer(sent.data, np.uint8).copy()
            head[:] = (meta.size, data.size, state is None, self.stage)
        self.group.broadcast(head.view(np.uint8), source)
        meta_size, data_size, is_fresh, stage = (int(value) for value in head)
        if self.rank != source:
            meta, data = np.zeros(meta_size, np.uint8), np.zeros(data_size, np.uint8)
        self.group.broadcast(meta, source)
        self.group.broadcast(data, source)
        if self.carried is not None:
            return self._continue(self.carried, stage)
        received = host_state_from(meta.tobytes(), data.data)
        if self.joins and not self._is_ours(received.status):
            return self._begin_apart()
        if self.rank != source or not is_fresh:
            self.state.load(received.layout, received.data, received.scalars)
        if is_fresh:
            return self._fresh(replace(fresh, run_id=received.status.run_id), stage)
        return self._restored(received, stage, from_checkpoint=from_checkpoint)

    def _load(self, state: HostState, *, from_checkpoint: bool = False) -> Restored:
        self.state.load(state.layout, state.data, state.scalars)
        return self._restored(state, from_checkpoint=from_checkpoint)

    def _continue(self, carried: CarriedState, stage: int | None = None) -> Restored:
        status = carried.status
        return Restored(
            status=status,
            stage=self.stage if stage is None else stage,
            came_from=(status.stage, status.cursor.global_step),
            from_checkpoint=False,
        )

    def _fresh(self, status: LoopStatus, stage: int) -> Restored:
        return Restored(status=status, stage=stage, came_from=None, from_checkpoint=False)

    def _restored(
        self, state: HostState, stage: int | None = None, *, from_checkpoint: bool = False
    ) -> Restored:
        status, stage = state.status, self.stage if stage is None else stage
        if status.stage >= stage:
            raise StateError(
                f"stage: the state was made by stage {status.stage}, this is stage {stage}; "
                f"a stage continues only from a lower one"
            )
        logger.info("restored step %d of stage %d", status.step, status.stage)
        return Restored(
            status=status,
            stage=stage,
            came_from=(status.stage, status.cursor.global_step),
            from_checkpoint=from_checkpoint,
            host_state=state,
        )


def _newest_of(store: CheckpointStore) -> _Read:
    def read() -> HostState | None:
        found = store.continue_newest()
        return None if found is None else found[0]

    return read


def own_state(state: FrameworkState, status: LoopStatus, *, committed: bool = False) -> HostState:
    """Return this rank's state in memory of its own: as it is now, or as committed (`scalars`)."""
    layout = state.layout()
    data = room_for(layout.total_bytes)
    state.copy_out(data)
    scalars = json.loads(json.dumps(state.scalars(committed=committed)))
    return HostState(status=status, scalars=scalars, layout=layout, data=data)
