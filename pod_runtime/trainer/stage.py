"""Become a member of a stage: meet the launcher, form the group, take over the state."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from job_server.wire import RestoreFrom
from pod_runtime.env import TrainerEnv
from pod_runtime.orphans import note_forks
from pod_runtime.trainer.adapter import Adapter, GroupSpec
from pod_runtime.trainer.agreement import HEADER_SIZE
from pod_runtime.trainer.checkpoint import CheckpointStore
from pod_runtime.trainer.errors import PeerLost, StateError, UsageError
from pod_runtime.trainer.keeper import Keeper
from pod_runtime.trainer.ledger import LedgerFile, RunInfo
from pod_runtime.trainer.link import Link, Welcome
from pod_runtime.trainer.member import Member, exit_as_victim
from pod_runtime.trainer.progress import Progress, fresh_status, scaling_for
from pod_runtime.trainer.restore import Restored, restore
from pod_runtime.trainer.settings import LoopSettings
from pod_runtime.trainer.source import DataSource
from pod_runtime.trainer.storage import open_storage
from pod_runtime.trainer.train_status import TrainStatus, check_same_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a trainer holds while it trains."""

    adapter: Adapter
    progress: Progress
    keeper: Keeper
    member: Member
    link: Link | None  # None: outside EDL
    is_saved: bool  # nothing was left to train, and the state came from an intact checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """This trainer's place in its stage."""

    rank: int
    world_size: int
    stage: int  # outside EDL only rank 0's counts
    max_trainers: int
    master: str  # "addr:port" of rank 0; "" outside EDL, where the framework knows
    wanted: RestoreFrom | None  # None: a checkpoint, or afresh
    policy: str  # of the job
    link: Link | None
    is_writer: bool
    fds: tuple[int, ...]


def enter_stage(
    settings: LoopSettings,
    source: DataSource,
    env: TrainerEnv,
    make_adapter: Callable[[int], Adapter],
) -> Stage:
    """Return when the stage is committed and training may begin.

    Raises:
        UsageError: an argument does not fit the model or the stage.
        StateError, CheckpointError: the state that is there cannot be continued.
        LinkError: the launcher is gone.
        PeerLost: outside EDL, another rank is gone.
    """
    adapter = make_adapter(HEADER_SIZE)
    link = None
    if env.channel is not None:
        link = Link(env.channel, rank=env.rank, stage=env.stage or 0, pid=os.getpid())
        if env.pod_dir is not None:
            note_forks(env.pod_dir)
    try:
        return _enter(settings, source, env, adapter, link)
    except PeerLost as error:
        if link is None:
            raise
        logger.error("peer lost while the stage was formed: %s", error)
        exit_as_victim()


def _enter(
    settings: LoopSettings, source: DataSource, env: TrainerEnv, adapter: Adapter, link: Link | None
) -> Stage:
    store = _open_store(settings, env.rank)
    place = _find_place(env, link, store)
    adapter.form_group(
        GroupSpec(
            rank=place.rank,
            world_size=place.world_size,
            master=place.master,
            generation=place.stage,
        )
    )
    run = RunInfo(
        seed=settings.seed,
        epochs=settings.epochs,
        dataset_length=source.length,
        shuffle=source.shuffle,
        drop_last=source.drop_last,
    )
    restored = restore(
        adapter,
        rank=place.rank,
        world_size=place.world_size,
        stage=place.stage,
        wanted=place.wanted,
        fds=place.fds,
        store=store,
        fresh=fresh_status(
            run=run,
            batch_size=source.batch_size,
            shards=settings.shards or place.max_trainers,
            reference_world=place.world_size,
        ),
    )
    for fd in place.fds:
        os.close(fd)
    status = _continued(restored.status, settings, source, run)
    return _begin(settings, env, adapter, place, restored, status, store)


def _find_place(env: TrainerEnv, link: Link | None, store: CheckpointStore | None) -> _Place:
    highest = store.highest_stage() if store is not None else 0
    if link is None:
        return _Place(
            rank=env.rank,
            world_size=env.world_size,
            stage=highest + 1,
            max_trainers=env.max_trainers or env.world_size,
            master="",
            wanted=None,
            policy="fixed_global",
            link=None,
            is_writer=False,
            fds=(),
        )
    welcome: Welcome = link.wait_welcome()
    plan = welcome.plan
    if plan.world_size != env.world_size:
        raise UsageError(
            f"PADDLE_TRAINERS_NUM: {env.world_size}, the launcher's plan has {plan.world_size} "
            f"trainers; leave the variables that the launcher sets alone"
        )
    if highest >= plan.stage:
        # Its checkpoints would be superseded by those that are there: the server deals a higher
        # number, and this process is ended.
        link.say("stage_too_low", highest_stage=highest)
        link.wait_for_the_end()
    return _Place(
        rank=env.rank,
        world_size=env.world_size,
        stage=plan.stage,
        max_trainers=plan.max_trainers,
        master=plan.master,
        wanted=plan.restore_from,
        policy=plan.policy,
        link=link,
        is_writer=welcome.writer,
        fds=welcome.fds,
    )


def _continued(
    status: TrainStatus, settings: LoopSettings, source: DataSource, run: RunInfo
) -> TrainStatus:
    """Return the status that training goes on from, with this script's number of epochs."""
    check_same_run(
        status, run=run, batch_size=source.batch_size, where=f"the state of step {status.step}"
    )
    if settings.shards is not None and settings.shards != status.shards:
        raise StateError(
            f"shards: the state of step {status.step} was made with {status.shards}, this script "
            f"says {settings.shards}; V is fixed for a run: leave it out, or start afresh with "
            f"another checkpoint path"
        )
    return status.for_run(run)


def _begin(
    settings: LoopSettings,
    env: TrainerEnv,
    adapter: Adapter,
    place: _Place,
    restored: Restored,
    status: TrainStatus,
    store: CheckpointStore | None,
) -> Stage:
    policy = place.policy if settings.policy is None else settings.policy
    if policy == "fixed_global" and place.max_trainers > status.shards:
        raise UsageError(
            f"shards: {status.shards} are too few for the {place.max_trainers} trainers that the "
            f"job may have; start the training with shards={place.max_trainers} or more, or the "
            f"job with --max so that there are at most {status.shards} trainers"
        )
    progress = Progress(
        status,
        scaling_for(
            status,
            policy,
            world_size=place.world_size,
            warmup_steps=settings.lr_warmup_steps,
        ),
        stage=restored.stage,
        steps_per_epoch=settings.steps_per_epoch,
    )
    keeper = Keeper(
        adapter,
        progress,
        link=place.link,
        is_writer=place.is_writer,
        store=store,
        save_steps=settings.save_steps,
        snapshot_steps=None if settings.snapshot_steps == "auto" else int(settings.snapshot_steps),
    )
    member = Member(adapter, keeper, place.link, place.rank, place.world_size)
    is_first = place.rank == 0
    file = LedgerFile(env.run_dir) if is_first and env.run_dir is not None else None
    if place.link is not None:
        place.link.say("loaded", step=status.step, epoch=status.epoch)
        place.link.wait_go()
    # Not before `go`: a stage that is never committed must not appear in the ledger.
    progress.begin_stage(restored.came_from, file)
    return Stage(
        adapter=adapter,
        progress=progress,
        keeper=keeper,
        member=member,
        link=place.link,
        is_saved=progress.is_finished and restored.from_checkpoint,
    )


def _open_store(settings: LoopSettings, rank: int) -> CheckpointStore | None:
    """Only rank 0 reads and writes checkpoints; the others get the state from it."""
    if settings.checkpoint is None or rank != 0:
        return None
    return CheckpointStore(open_storage(settings.checkpoint), keep=settings.keep_checkpoints)
