"""How every rank of a new stage gets the same state, from wherever it is nearest."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from job_server.api.wire import RestoreFrom
from pod_runtime.segment_header import Stamp
from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.frameworks.adapter import Adapter
from pod_runtime.trainer.membership.together import barrier
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.state.checkpoint import CheckpointId, CheckpointStore
from pod_runtime.trainer.state.host_state import HostState, host_state_from
from pod_runtime.trainer.state.owner import new_run_id
from pod_runtime.trainer.state.snapshot import newest_stamp, read_snapshot
from pod_runtime.trainer.state.storage import open_storage

logger = logging.getLogger(__name__)

_Read = Callable[[], HostState | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    status: LoopStatus
    stage: int  # of this stage, as rank 0 says; outside EDL only rank 0 knows it beforehand
    came_from: tuple[int, int] | None  # (stage, step); None: a fresh start
    from_checkpoint: bool  # what was loaded is an intact checkpoint of exactly this state
    host_state: HostState | None = None  # what was loaded; None: nothing, or no longer kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """The state of a rank that stays from one stage to the next: what its model holds."""

    status: LoopStatus
    stamp: Stamp
    is_in_snapshot: bool  # of this rank's node
    host_state: Callable[[], HostState | None]  # reads it there


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAhead:
    """What the model holds already, before it was known that the stage begins from it."""

    stamp: Stamp
    host_state: HostState


def restore(
    adapter: Adapter,
    *,
    rank: int,
    world_size: int,
    stage: int,
    wanted: RestoreFrom | None,
    fds: tuple[int, ...],
    store: CheckpointStore | None,
    fresh: LoopStatus,
    kept: CarriedState | None = None,
    loaded: LoadedAhead | None = None,
) -> Restored:
    """Load the state of `wanted`, else the newest intact checkpoint, else rank 0's fresh model.

    Args:
        stage: of this stage; only rank 0's counts.
        wanted: a later step of its stage is as good; with `path`, a checkpoint there. None: the
            newest checkpoint of `store`, or afresh.
        fds: segments that this rank was given.
        store: where checkpoints are; only rank 0 looks.
        kept: this rank goes on with the state that it has; None: it has none.
        loaded: what was loaded ahead; None: nothing was.

    Raises:
        StateError, CheckpointError: a state is there and does not fit, or is damaged.
        InUseError: on rank 0; another training has the folder of checkpoints.
        PeerLost: another rank is gone.
    """
    if wanted is not None and wanted.local_on_all_nodes:
        return _restore_here(adapter, wanted, fds, stage=stage, kept=kept, loaded=loaded)
    newest = newest_stamp(fds, wanted.stage) if wanted else None
    have = np.zeros((world_size, 3))
    have[rank] = (-1, -1, 0) if newest is None else (newest.step, newest.serial, 1)
    if kept is not None:
        have[rank] = (kept.stamp.step, kept.stamp.serial, kept.is_in_snapshot)
    adapter.all_reduce(have.reshape(-1))
    # The stage may have come further than the server had heard when all of its launchers died.
    best = max(have.tolist())
    step = int(best[0])
    holders = (have[:, :2] == best[:2]).all(axis=1) & (step >= (wanted.step if wanted else 0))
    host_state = read_snapshot(fds, newest) if newest is not None and holders[rank] else None
    if holders.all() and kept is not None:
        return _kept(kept, stage)
    if holders.all() and host_state is not None:
        adapter.load(host_state.layout, host_state.data, host_state.scalars)
        return _restored(host_state, stage, from_checkpoint=False)
    if holders.any():
        # A snapshot rather than a model that trains: its script may have touched that since, as a
        # scheduler does at the end of an epoch.
        source, from_checkpoint = have.tolist().index(best), False
        if kept is not None and source == rank:
            host_state = kept.host_state() or _own_state(adapter, kept.status)
    else:
        if wanted is not None and not wanted.path:
            logger.error(
                "no pod of this stage holds the snapshot of stage %d, step %d; "
                "falling back to checkpoints: steps may be redone",
                wanted.stage,
                wanted.step,
            )
        mine = store if rank == 0 else None
        source, read = _find_on_disk(adapter, rank, world_size, wanted, mine)
        from_checkpoint = wanted is None or not wanted.spare
        host_state = _read_together(adapter, read)
        if rank == 0 and source == 0 and host_state is None:
            if mine is not None:
                mine.check_writable()  # now nothing is lost; later, training goes on without
            fresh = replace(fresh, run_id=new_run_id())
    if world_size == 1:
        if host_state is None:
            return _fresh(fresh, stage)
        adapter.load(host_state.layout, host_state.data, host_state.scalars)
        return _restored(host_state, stage, from_checkpoint=from_checkpoint)
    return _broadcast(
        adapter, host_state, rank=rank, source=source, stage=stage, fresh=fresh,
        from_checkpoint=from_checkpoint, kept=kept,
    )  # fmt: skip


def _restore_here(
    adapter: Adapter,
    wanted: RestoreFrom,
    fds: tuple[int, ...],
    *,
    stage: int,
    kept: CarriedState | None,
    loaded: LoadedAhead | None,
) -> Restored:
    """Load exactly what every node has: nobody has to be asked, or waited for.

    Raises:
        StateError: this node has it no longer.
    """
    stamp = Stamp(stage=wanted.stage, step=wanted.step, serial=wanted.serial)
    if kept is not None and kept.stamp == stamp:
        return _kept(kept, stage)
    if loaded is not None and loaded.stamp == stamp:
        return _restored(loaded.host_state, stage, from_checkpoint=False)
    host_state = read_snapshot(fds, stamp)
    if host_state is None:
        raise StateError(
            f"stage {stage} begins from step {stamp.step} of stage {stamp.stage}, whose snapshot "
            f"this node has lost since it was told of; trainers start again from another node's"
        )
    adapter.load(host_state.layout, host_state.data, host_state.scalars)
    return _restored(host_state, stage, from_checkpoint=False)


def _find_on_disk(
    adapter: Adapter,
    rank: int,
    world_size: int,
    wanted: RestoreFrom | None,
    store: CheckpointStore | None,
) -> tuple[int, _Read | None]:
    """Return the rank that reads the newest checkpoint for all, and how, where it is this one.

    That is rank 0, which knows the script's path, unless the state was written, as the job was
    paused, to a folder that only one node sees.

    Raises:
        StateError: no rank sees what the stage is to begin from, nor any other checkpoint.
    """
    newest = None if store is None else _newest_of(store)
    if wanted is None or not wanted.path:
        return 0, newest
    named = CheckpointStore(open_storage(wanted.path))
    told = CheckpointId(wanted.stage, wanted.step)
    read = None
    have = np.full((world_size, 2), 0.0)
    if named.is_whole(told):
        read = (lambda: named.load(told)) if wanted.spare else _newest_of(named)
        have[rank] = told.stage, told.step
    found = None if store is None else store.newest_whole()
    if found is not None and (read is None or found >= told):
        read, have[rank] = newest, (found.stage, found.step)
    adapter.all_reduce(have.reshape(-1))
    best = max(have.tolist())
    if not best[0]:
        raise StateError(
            f"no trainer sees step {told.step} of stage {told.stage} in {wanted.path}, where it "
            f"was written; bring that folder back, or start afresh as another job"
        )
    if best < [told.stage, told.step]:
        logger.error("%s/%s is gone: steps are redone", wanted.path, told.folder)
    source = have.tolist().index(best)
    return source, read if source == rank else None


def _newest_of(store: CheckpointStore) -> _Read:
    def read() -> HostState | None:
        found = store.continue_newest()
        return None if found is None else found[0]

    return read


def _read_together(adapter: Adapter, read: _Read | None) -> HostState | None:
    """Claim its folder, read and verify a checkpoint; the other ranks wait for minutes."""
    with ThreadPoolExecutor(1, "checkpoint-reader") as pool:
        reading = None if read is None else pool.submit(read)
        barrier(adapter, lambda: reading is not None and not reading.done())
        return None if reading is None else reading.result()


def _broadcast(
    adapter: Adapter,
    host_state: HostState | None,
    *,
    rank: int,
    source: int,
    stage: int,
    fresh: LoopStatus,
    from_checkpoint: bool,
    kept: CarriedState | None,
) -> Restored:
    """Send the state of `source` to all: its sizes, its description, and one flat run of bytes."""
    head = np.zeros(4, np.int64)
    is_fresh = False
    if rank == source:
        is_fresh = host_state is None
        if host_state is None:
            host_state = _own_state(adapter, fresh)
        meta = np.frombuffer(host_state.meta(), np.uint8).copy()
        data = np.frombuffer(host_state.data, np.uint8).copy()
        head[:] = (meta.size, data.size, is_fresh, stage)
    adapter.broadcast(head.view(np.uint8), source)
    meta_size, data_size, fresh_flag, stage = (int(value) for value in head)
    if rank != source:
        meta, data = np.zeros(meta_size, np.uint8), np.zeros(data_size, np.uint8)
    adapter.broadcast(meta, source)
    adapter.broadcast(data, source)
    if kept is not None:
        return _kept(kept, stage)
    received = host_state_from(meta.tobytes(), data.data)
    if rank != source or not fresh_flag:
        adapter.load(received.layout, received.data, received.scalars)
    if fresh_flag:
        return _fresh(replace(fresh, run_id=received.status.run_id), stage)
    return _restored(received, stage, from_checkpoint=from_checkpoint)


def _own_state(adapter: Adapter, status: LoopStatus) -> HostState:
    layout = adapter.layout()
    data = bytearray(layout.total_bytes)
    adapter.copy_out(memoryview(data))
    scalars = json.loads(json.dumps(adapter.scalars()))
    return HostState(status=status, scalars=scalars, layout=layout, data=memoryview(data))


def _kept(kept: CarriedState, stage: int) -> Restored:
    status = kept.status
    return Restored(
        status=status, stage=stage, came_from=(status.stage, status.step), from_checkpoint=False
    )


def _fresh(status: LoopStatus, stage: int) -> Restored:
    return Restored(status=status, stage=stage, came_from=None, from_checkpoint=False)


def _restored(host_state: HostState, stage: int, *, from_checkpoint: bool) -> Restored:
    status = host_state.status
    if status.stage >= stage:
        raise StateError(
            f"stage: the state was made by stage {status.stage}, this is stage {stage}; "
            f"a stage continues only from a lower one"
        )
    logger.info("restored step %d of stage %d", status.step, status.stage)
    return Restored(
        status=status,
        stage=stage,
        came_from=(status.stage, status.step),
        from_checkpoint=from_checkpoint,
        host_state=host_state,
    )
