"""Become a member of a stage: connect to the launcher, form the group, take over the state."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from job_server.api.wire import Order, StagePlan, Way
from pod_runtime.activity import Doing, own_activity
from pod_runtime.channel_wire import Prepared, StageTooLow, StateLoaded
from pod_runtime.env import TrainerEnv, own_rank, plan_outside_edl, stage_environment
from pod_runtime.orphans import note_forks
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.errors import LinkError, PeerLost, SnapshotError, StateError, UsageError
from pod_runtime.trainer.frameworks.framework import Framework, GroupSpec, Subgroup
from pod_runtime.trainer.membership.link import LauncherLink, StageStart, StatePreview
from pod_runtime.trainer.membership.member import StageMember, exit_as_victim
from pod_runtime.trainer.membership.next_group import NextGroupFormer, group_spec
from pod_runtime.trainer.membership.node_snapshots import NodeSnapshots, make_segment, nodes_of
from pod_runtime.trainer.membership.restore import LoadedAhead, Restored, StateRestore
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.membership.stage_orders import StageOrders
from pod_runtime.trainer.membership.state_manager import CarriedState, StateManager
from pod_runtime.trainer.membership.terms import (
    check_same_terms,
    check_terms_of_state,
    other_checksums,
    script_arrays,
    script_sources,
    to_text,
)
from pod_runtime.trainer.progress.agreement import HEADER_SIZE
from pod_runtime.trainer.progress.epoch_order import EpochOrder
from pod_runtime.trainer.progress.ledger import LedgerFile, RunInfo
from pod_runtime.trainer.progress.loop_status import (
    LoopOrigin,
    LoopsBefore,
    LoopStatus,
    check_same_run,
    continued_promise,
)
from pod_runtime.trainer.progress.progress import TrainingProgress, fresh_status, scaling_for
from pod_runtime.trainer.progress.scaling import Policy, Scaling
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.checkpoint_writer import CheckpointWriter
from pod_runtime.trainer.state.host_state import SaveTarget
from pod_runtime.trainer.state.owner import Owner, this_holder
from pod_runtime.trainer.state.owner_record import State
from pod_runtime.trainer.state.snapshot import SnapshotSegment, newest_status, read_snapshot
from pod_runtime.trainer.state.storage import absolute, check_outlives_pod, open_storage

logger = logging.getLogger(__name__)

_STORE_AWAY_S = 120.0  # for which a training that goes on waits for its object store
_CONSTANTS = "constants of the model"  # among the terms: what layers keep outside of a state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStage:
    """What a trainer holds while it trains."""

    framework: Framework
    progress: TrainingProgress
    state_manager: StateManager
    member: StageMember
    link: LauncherLink | None  # None: outside EDL
    is_saved: bool  # nothing was left to train, and the state came from an intact checkpoint
    # The numbers of trainers that the job may have, where the number of shards is to be chosen for
    # them before the first step. None: it is settled.
    worlds: range | None = None


class StageJoiner:
    """Makes this process a member of a stage: of its group first, then with its state.

    In between, while an older stage trains, there is time for a warm-up step.
    """

    def __init__(
        self,
        settings: LoopSettings,
        source: DataSource,
        env: TrainerEnv,
        make_framework: Callable[[int], Framework],
        before: LoopsBefore = LoopsBefore(),  # noqa: B008  it cannot be changed
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to the launcher, and form the group.

        Args:
            before: the loops that this process had made before.
            values: tensors and arrays of the script, by its names, that all trainers should have.

        Raises:
            UsageError: an argument does not fit the model or the stage.
            StateError: the script was edited, and cannot continue the training that runs.
            EnvError: this trainer is not in the stage's plan.
            LinkError: the launcher is gone.
            PeerLost: outside EDL, another rank is gone.
        """
        self._settings, self._env = settings, env
        self._checkpoint: str | None = None  # where it is, wherever the script changes to
        if settings.checkpoint is not None:
            check_outlives_pod(settings.checkpoint, os.environ)
            self._checkpoint = absolute(settings.checkpoint)
        self._before = before
        self._origin = LoopOrigin(
            number=before.number,
            checkpoint=settings.checkpoint or "",
            folder=self._checkpoint or "",
        )
        self._activity = own_activity()
        self._activity.begin(Doing.STARTING)
        self.framework = make_framework(HEADER_SIZE)
        self._orders = StageOrders(self.framework, source, settings)
        self.source = self._orders.with_batch_size(source)
        self._link: LauncherLink | None = None  # None: outside EDL
        self._next_group: NextGroupFormer | None = None  # None: outside EDL
        self._joined_group: Any | None = None  # None: all ranks formed it together
        self._fds: tuple[int, ...] = ()  # segments to restore from
        if env.channel is None:
            self._rank = env.rank
            self._plan = plan_outside_edl(env)
        else:
            self._connect(env.channel)
        self._overlaps = self._plan.order is Order.PREPARE
        self._joins = self._overlaps and self._plan.way is Way.JOIN  # others stay, and train
        self._store = self._open_store()
        self._settle_stage_number()
        self._segment: SnapshotSegment | None = None  # None: not made ahead of the first snapshot
        self.running_epoch = 0  # when this trainer was prepared, as far as it is known
        self._restored: Restored | None = None  # None: not yet
        self._loaded: LoadedAhead | None = None  # ahead of the commit; None: nothing was
        self._arrays, self._said = script_arrays(values or {}), set[str]()
        self._sources = script_sources()
        self._terms = self._make_terms()  # as the script made them, before a state is loaded
        with self._as_victim():
            if self.overlaps:
                self._check_running_state()
            self._form_group()

    def _connect(self, channel: str) -> None:
        env = self._env
        self._link = LauncherLink(
            channel,
            rank=env.rank,
            stage=env.stage or 0,
            pid=os.getpid(),
            # Not in a later loop: new trainers begin with the script's first one.
            joins=not (self._before.number or self.framework.group.why_no_second_group()),
            goes_on=self._before.number > 0 and self._before.are_kept,
            adapter=self.framework.module,
        )
        self._next_group = NextGroupFormer(self.framework.group, self.framework.state, self._link)
        if env.pod_dir is not None:
            note_forks(env.pod_dir)
        self._take_start(self._link.wait_start())
        source = self._plan.restore_from
        if source is not None:
            # Only a later `Loop` of a script says hello in a stage that is training already. What
            # this stage began from may be a state of one before, or on no node any more.
            is_of_before = source.step <= self._before.steps and self._before.number > 0
            source = None if is_of_before else replace(source, local_on_all_nodes=False)
            self._plan = replace(self._plan, restore_from=source)

    def _take_start(self, start: StageStart, rank: int | None = None) -> None:
        """Become a member of the stage of `start`, also in the environment that the script sees.

        Args:
            rank: in that stage; None: it follows from the place in the pod, which never changes.
        """
        self._plan, self._fds = start.plan, start.fds
        self._rank = own_rank(start.plan, self._env) if rank is None else rank
        os.environ.update(stage_environment(start.plan, self._rank, os.environ))

    def _close_segments(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def _settle_stage_number(self) -> None:
        """Outside EDL choose the stage's number; in EDL refuse one that is too low.

        It must be above those of the checkpoints that are there, or these would count for more.
        """
        if self._store is None:
            return
        # The store may be away for the very reason for which the stage before has ended.
        patience_s = _STORE_AWAY_S if self._plan.restore_from is not None else 0.0
        owner, highest = self._store.owner, self._store.highest_stage(patience_s=patience_s)
        if self._link is None:
            self._plan = replace(self._plan, stage=highest + 1)
        elif highest >= self._plan.stage:
            if owner is not None:
                owner.refuse_early()  # a higher number would not help
            # The server chooses a higher number, and this process is ended.
            self._link.send(StageTooLow(highest_stage=highest))
            self._link.wait_for_the_end()
        if owner is not None:
            owner.stage = self._plan.stage

    def _check_running_state(self) -> None:
        """Check that this script can continue the running training, before that is cut.

        Raises:
            StateError: it cannot, as the script was edited; the change is called off.
            UsageError: nor with so many trainers.
        """
        status = newest_status(self._fds)
        self._close_segments()
        if status is not None and self._is_ours(status):
            status = self._continue(status)
            order = self._orders.known(status)
            self._progress(status, self._scaling(status), self._plan.stage, order)
            self.running_epoch = status.cursor.epoch

    def _is_ours(self, status: LoopStatus) -> bool:
        """Whether a state is not of another loop of the script."""
        return status.origin.is_of(self._origin, is_finished=status.is_finished)

    def _form_group(self) -> None:
        plan, rank, group = self._plan, self._rank, self.framework.group
        if self._joins:
            # By `form_next`, as the trainers that stay do: they are in the middle of a step. Until
            # `go` this trainer is a world of one.
            self._joined_group = group.form_next(group_spec(plan, rank), lambda: False)
            return
        group.form(
            GroupSpec(
                rank=rank, world_size=plan.world_size, master=plan.master, generation=plan.stage
            )
        )
        check_same_terms(group, self._terms, rank=rank, world_size=plan.world_size)
        both = self._arrays | self._sources
        others = other_checksums(group, both, rank=rank, world_size=plan.world_size)
        arrays = [each for each in others if each in self._arrays]
        self._say_others(arrays, "not the same on all trainers")
        sources = [each for each in others if each in self._sources]
        if sources and rank == 0:
            logger.warning(
                "not the same on all trainers, which train a mix of both: %s. Have the same files "
                "and versions on all nodes, and start the job anew where that matters",
                ", ".join(sources),
            )
        if self.overlaps:
            # Set up now what the first exchange sets up; no rank contributes anything.
            self.framework.step.begin()
            self.framework.step.exchange([0.0] * HEADER_SIZE, contribute=False)
            if plan.survivable_failures:
                group.form_subgroups([_subgroup(plan, lost) for lost in plan.survivable_failures])

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._plan.world_size

    @property
    def overlaps(self) -> bool:
        """An older stage trains while this one is prepared."""
        return self._overlaps

    @property
    def joins(self) -> bool:
        """It began among trainers that stay, and has been in no other stage since."""
        return self._joins

    @property
    def shards(self) -> int:
        """The number of shards, V, before the state is known; a stored one is preferred."""
        settings = self._settings
        shards = settings.shards or self._plan.max_trainers
        if settings.promise == "statistics":
            shards = self._plan.world_size
        return shards * settings.accumulation_steps

    def enter(self) -> TrainerStage:
        """Return when the stage is committed and training may begin.

        Raises:
            StateError, CheckpointError: the state that is there cannot be continued.
            and as the constructor.
        """
        with self._as_victim():
            if self.overlaps:
                self._wait_for_start()
            restored = self._restored = self._restore(None)
            self._close_segments()
            if self.overlaps:
                self._check_clean(restored)
            if self._joins:
                check_terms_of_state(restored.status.terms, self._terms, rank=self._rank)
            status = replace(
                self._continue(restored.status),
                steps_before=self._before.steps,
                terms=to_text(self._terms),
                arrays=json.dumps(self._arrays),
                origin=self._origin,
            )
            return self._begin(restored, status)

    def move(self, old: TrainerStage, start: StageStart) -> TrainerStage:
        """Go on in the next stage, with the state that this trainer has.

        Raises:
            UsageError: an argument does not fit the new stage.
            LinkError: this trainer was not invited to that stage, or the launcher is gone.
        """
        assert self._next_group is not None
        rank, group, self._segment = self._next_group.take(start.plan)
        self._take_start(start, rank)
        self._close_segments()
        self.framework.group.adopt(group)
        self._overlaps = self._joins = False
        if rank != 0:
            self._let_go_of_store()
        elif self._store is None:
            self._store = self._open_store()
        carried = old.state_manager.carried()
        with self._as_victim():
            restored = self._restore(carried)
        old.progress.close()
        old.state_manager.close()
        plan = self._plan
        logger.info("goes on as rank %d of %d in stage %d", rank, plan.world_size, plan.stage)
        return self._begin(restored, carried.status, writer=old.state_manager.writer)

    def next_order(self, epoch: int) -> EpochOrder | None:
        """Return the order of the epoch that begins, as `StageOrders.agreed`. All ranks call it."""
        return self._orders.agreed(epoch, rank=self._rank, world_size=self._plan.world_size)

    def check_data(self, epoch: int) -> None:
        """See that the script has changed neither what its sampler draws nor how much data is.

        Raises:
            UsageError: it has.
        """
        dataset, length = self.source.dataset, self.source.length
        if dataset is not None and length is not None and len(dataset) != length:
            raise UsageError(
                f"train_set: it has {len(dataset)} samples now, and had {length} when the Loop was "
                f"made, by which epochs are counted; give the Loop all samples that there will be, "
                f"and let a sampler say which of them an epoch has"
            )
        self._orders.check_unchanged(epoch)

    def close(self) -> None:
        """The training is complete; no stage follows."""
        if self._next_group is not None:
            self._next_group.close()
        if self._store is not None and self._store.owner is not None:
            self._store.owner.leave(State.OVER)

    def _let_go_of_store(self) -> None:
        """Another rank writes checkpoints now."""
        if self._store is not None and self._store.owner is not None:
            self._store.owner.close()
        self._store = None

    def _open_store(self) -> CheckpointStore | None:
        """Only rank 0 reads and writes checkpoints; the others get the state from it."""
        settings, env = self._settings, self._env
        plan = None if self._link is None else self._plan
        if self._checkpoint is None or self._rank != 0:
            return None
        storage = open_storage(self._checkpoint)
        owner = Owner(
            storage,
            this_holder(plan=plan, server=env.job_server or ""),
            take_over=env.take_over if plan is None else plan.take_over,
        )
        return CheckpointStore(storage, keep=settings.keep_checkpoints, owner=owner)

    def _save_target(self) -> SaveTarget:
        """Return where a process that knows no script writes the state if the job ends."""
        return SaveTarget.of(
            self._checkpoint,
            self._settings.keep_checkpoints,
            self._env.run_dir,
            server=self._env.job_server or "",
            job_id=self._plan.job_id,
            submitted_at=self._plan.submitted_at,
        )

    def load_again(self) -> None:
        """Load the state once more, which undoes what the script has done to it since."""
        host_state = None if self._restored is None else self._restored.host_state
        assert host_state is not None
        self.framework.step.drop()
        self.framework.state.load(host_state.layout, host_state.data, host_state.scalars)

    def settled(self) -> None:
        """Drop the memory of the state that was loaded."""
        self._loaded = None
        if self._restored is not None:
            self._restored = replace(self._restored, host_state=None)

    def _restore(self, carried: CarriedState | None) -> Restored:
        plan = self._plan
        return StateRestore(
            group=self.framework.group,
            state=self.framework.state,
            rank=self._rank,
            world_size=plan.world_size,
            stage=plan.stage,
            wanted=plan.restore_from,
            fds=self._fds,
            store=self._store,
            fresh=fresh_status(
                run=self._run(),
                batch_size=self.source.batch_size,
                shards=self.shards,
                reference_world=plan.world_size,
                promise=self._settings.promise,
                origin=self._origin,
            ),
            carried=carried,
            loaded=self._loaded,
            joins=self._joins,
            path=self._checkpoint or "",
        ).run()

    def _wait_for_start(self) -> None:
        assert self._link is not None
        self.framework.step.drop()
        prepared = self._plan
        node = next(ranks for ranks in nodes_of(prepared) if self._rank in ranks)
        if self._rank == node[0]:
            layout = self.framework.state.layout()
            try:
                self._segment = make_segment(prepared.stage, len(node), layout)
            except SnapshotError as error:
                logger.warning("%s", error)  # tried again, and logged again, at the first snapshot
        self._link.send(Prepared())
        with self._activity.during(Doing.PARKED):
            start = self._link.wait_start(self._load_ahead)
        self._take_start(start)
        if self._joined_group is not None:
            self.framework.group.adopt(self._joined_group)
        if self._plan.missing_pods:
            self._go_on_in_subgroup(prepared)

    def _load_ahead(self, preview: StatePreview) -> None:
        """Load the state that the stage will begin from, before the change is committed."""
        host_state = read_snapshot(preview.fds, preview.stamp)
        if host_state is not None and self._is_ours(host_state.status):
            self.framework.state.load(host_state.layout, host_state.data, host_state.scalars)
            self._loaded = LoadedAhead(stamp=preview.stamp, host_state=host_state)

    def _go_on_in_subgroup(self, prepared: StagePlan) -> None:
        """Go on without pods that have been lost since the stage was prepared."""
        plan = self._plan
        if plan.missing_pods not in prepared.survivable_failures:
            raise LinkError(f"go: no group was formed without {', '.join(plan.missing_pods)}")
        spec = GroupSpec(
            rank=self._rank, world_size=plan.world_size, master=plan.master, generation=plan.stage
        )
        index = prepared.survivable_failures.index(plan.missing_pods)
        self.framework.group.use_subgroup(index, spec)
        logger.info("goes on as rank %d of %d", self._rank, plan.world_size)
        if self._store is None:
            self._store = self._open_store()

    def _check_clean(self, restored: Restored) -> None:
        """Check that the restored state has overwritten all that a warm-up step made.

        Raises:
            StateError: it has not; this trainer is then started again.
        """
        host_state = restored.host_state
        loaded = set() if host_state is None else {spec.name for spec in host_state.layout.specs}
        surplus = sorted({spec.name for spec in self.framework.state.layout().specs} - loaded)
        if surplus:
            raise StateError(
                f"the state that stage {self._plan.stage} begins from lacks {surplus[0]}, which "
                f"the prepared trainers have; they are started again without preparation"
            )

    def _make_terms(self) -> dict[str, Any]:
        source = self.source
        return {
            **self._settings.terms(),
            "dataset_length": source.length,
            "subset": source.subset,
            "train_set": f"samples with checksum {source.values}",
            "batch_size": source.batch_size,
            "shuffle": source.shuffle,
            "drop_last": source.drop_last,
            **({} if source.sampling is None else {"sampler": source.sampling.name}),
            **({"stream": type(source.dataset).__name__} if source.is_stream else {}),
            **self.framework.terms(),
            _CONSTANTS: self.framework.state.constants(),
        }

    def _run(self) -> RunInfo:
        source = self.source
        return RunInfo(
            seed=self._settings.seed,
            epochs=self._settings.epochs,
            dataset_length=source.length,
            shuffle=source.shuffle,
            drop_last=source.drop_last,
            subset=source.subset,
            values=source.values,
            sampler=None if source.sampling is None else source.sampling.name,
        )

    def _continue(self, status: LoopStatus) -> LoopStatus:
        """Return the status to continue from, with this script's number of epochs.

        Raises:
            StateError: the state was made with another seed, other data or other batches.
        """
        run, shards, where = self._run(), self._settings.shards, f"the state of step {status.step}"
        check_same_run(
            status,
            run=run,
            batch_size=self.source.batch_size,
            where=where,
            seeding=self.framework.seeding,
            accumulation_steps=self._settings.accumulation_steps,
        )
        self._check_constants(status, where)
        promise = continued_promise(status, self._settings.promise, where)
        if promise != status.promise:
            logger.info("promise: %s was made with %r, goes on with %r",
                        where, status.promise, promise)  # fmt: skip
        said = None if shards is None else shards * self._settings.accumulation_steps
        if said not in (None, status.shards):
            raise StateError(
                f"shards: {where} was made with {status.shards} per update, this script says "
                f"{said}; V is fixed for a run: leave it out, or start afresh with another "
                f"checkpoint path"
            )
        self._orders.known(status)
        self._say_other_folder(status.origin.folder)
        return replace(status.for_run(run), promise=promise)

    @property
    def _policy(self) -> Policy:
        policy: Policy | None = self._settings.policy
        return self._plan.policy if policy is None else policy

    def _scaling(self, status: LoopStatus) -> Scaling:
        """Return batch size and learning rate with which `status` goes on in this stage."""
        return scaling_for(
            status,
            self._policy,
            world_size=self._plan.world_size,
            warmup_steps=self._settings.lr_warmup_steps,
        )

    def _progress(
        self, status: LoopStatus, scaling: Scaling, stage: int, order: EpochOrder | None
    ) -> TrainingProgress:
        """Return where the training of `status` stands in this stage.

        Raises:
            UsageError: by the policy a batch has more samples than an epoch, and `drop_last`
                leaves these out.
        """
        progress = TrainingProgress(
            status,
            scaling,
            stage=stage,
            steps_per_epoch=self._settings.steps_per_epoch,
            accumulation_steps=self._settings.accumulation_steps,
            order=order,
        )
        batches = progress.batches
        if batches.epoch_samples < 1 and not progress.is_finished:
            raise UsageError(
                f"policy: with {self._plan.world_size} trainers a batch has {batches.batch_size} "
                f"samples, and an epoch {batches.dataset_length}, of which drop_last=True makes no "
                f"batch; have fewer trainers (edl resize, --max), or begin a training with "
                f"drop_last=False"
            )
        return progress

    def _say_other_folder(self, before: str) -> None:
        """Say where the checkpoints of this job go from process to process.

        Nodes may have paths of their own for what all of them see, but not the other's then.
        """
        here = self._checkpoint
        is_seen = "://" in before or os.path.isdir(before)
        if self._rank or self._link is None or not before or here in (None, before) or not is_seen:
            return
        if self._plan.restore_from is None and not self.overlaps:
            return  # another job's, whose folder was copied
        if before in self._said:
            return
        self._said.add(before)
        logger.warning(
            "checkpoint: %s here, and %s in the process that made the state. A path that is made "
            "anew in each process, as by the time of its start, or is relative to a folder that is "
            "another one in each, scatters the checkpoints, and no later start goes on from "
            "them: make it once, and pass it to the script", here, before,
        )  # fmt: skip

    def _check_constants(self, status: LoopStatus, where: str) -> None:
        """See that layers hold outside of the state what those that made it hold.

        Raises:
            StateError: they do not, in the job that has made it: each process has its own.
        """
        arrays = json.loads(status.arrays)
        others = [each for each, now in self._arrays.items() if arrays.get(each, now) != now]
        self._say_others(others, f"not the same as where {where} was made")
        before = json.loads(status.terms or "{}").get(_CONSTANTS)
        if before is None or before == json.loads(to_text(self._terms))[_CONSTANTS]:
            return
        text = (
            f"model: {where} was made with other values of what layers keep in no state_dict (a "
            f"permutation, random features); what is drawn for the model differs in every process: "
            f"call {self.framework.seeding} before it is built, or make it a buffer of the state "
            f"(register_buffer)"
        )
        if self._plan.restore_from is not None:
            raise StateError(text)
        logger.warning("%s", text)  # a script may be edited between two jobs

    def _say_others(self, names: list[str], what: str) -> None:
        names = [each for each in names if each not in self._said]
        self._said.update(names)
        if names and self._rank == 0:
            logger.warning(
                "of the script, %s: %s. Where the steps use values that a process draws for itself "
                "(random features, prototypes), trainers train on others each: call %s, and "
                "numpy.random.seed, before they are drawn, or keep them in extra={...}",
                ", ".join(names), what, self.framework.seeding,
            )  # fmt: skip

    @contextmanager
    def _as_victim(self) -> Iterator[None]:
        """End this trainer as a victim if a peer is lost within the block."""
        try:
            yield
        except PeerLost as error:
            if self._link is None:
                raise
            logger.error("peer lost while the stage was formed: %s", error)
            exit_as_victim()
        except BaseException:
            self._let_go_of_store()  # a script may catch this, and go on with something else
            raise

    def _begin(
        self,
        restored: Restored,
        status: LoopStatus,
        *,
        writer: CheckpointWriter | None = None,
    ) -> TrainerStage:
        settings, plan, link, rank = self._settings, self._plan, self._link, self._rank
        policy = self._policy
        if (
            status.promise == "rounding"
            and policy == "fixed_global"
            and plan.max_trainers > status.shards
        ):
            raise UsageError(
                f"shards: {status.shards} are too few for the {plan.max_trainers} trainers that "
                f"the job may have; start the training with shards={plan.max_trainers} or more, "
                f"or the job with --max so that there are at most {status.shards} trainers"
            )
        scaling = self._scaling(status)
        self._orders.check_policy(policy, scaling.batch_size, status.batch_size)
        order = self._orders.of_stage(
            status, is_fresh=restored.came_from is None, rank=rank, world_size=plan.world_size
        )
        progress = self._progress(status, scaling, restored.stage, order)
        # At a fresh start nothing depends on V yet.
        is_open = (
            restored.came_from is None
            and status.promise == "rounding"
            and policy == "fixed_global"
            and settings.shards is None
            and settings.accumulation_steps == 1
            and 0 < plan.min_trainers < plan.max_trainers
        )
        worlds = range(plan.min_trainers, plan.max_trainers + 1) if is_open else None
        if rank == 0 and worlds is None:
            logger.info("promise: %s", progress.promise)
        auto = settings.snapshot_steps == "auto"
        framework = self.framework
        snapshots = NodeSnapshots(
            framework.group,
            framework.state,
            progress,
            link,
            rank=rank,
            nodes=nodes_of(plan),
            segment=self._segment,
            save_target=self._save_target(),
        )
        state_manager = StateManager(
            framework.state,
            progress,
            link=link,
            snapshots=snapshots,
            store=self._store,
            writer=writer,
            save_steps=settings.save_steps,
            snapshot_steps=None if auto else int(settings.snapshot_steps),
        )
        member = StageMember(
            framework.group,
            framework.step,
            state_manager,
            link,
            rank,
            plan.world_size,
            self._next_group,
        )
        run_dir = self._env.run_dir
        file = LedgerFile(run_dir) if rank == 0 and run_dir is not None else None
        if link is not None:
            # Of a loop that is complete, `Done` says the step: a later one may be further.
            step = 0 if progress.is_finished else status.step
            link.send(StateLoaded(step=step, epoch=status.epoch))
            with self._activity.during(Doing.PARKED):
                link.wait_go()
        if self._store is not None and self._store.owner is not None:
            self._store.owner.run_id, self._store.owner.stage = status.run_id, restored.stage
            self._store.owner.hold()
        # Only after `go`: a stage that is never committed must not appear in the ledger.
        progress.begin_stage(restored.came_from, file)
        self._activity.begin(Doing.BETWEEN)
        return TrainerStage(
            framework=framework,
            progress=progress,
            state_manager=state_manager,
            member=member,
            link=link,
            is_saved=progress.is_finished and restored.from_checkpoint,
            worlds=worlds,
        )


def _subgroup(plan: StagePlan, lost: tuple[str, ...]) -> Subgroup:
    """Return which ranks of a stage are left without some of its pods."""
    left = [pod for pod in plan.pods if pod.pod_id not in lost]
    return Subgroup(ranks=tuple(rank for pod in left for rank in pod.ranks), addr=left[0].addr)
