"""A sampler's orders in a stage: the same on all ranks, and as the state has it."""

from dataclasses import replace

import numpy as np

from pod_runtime.trainer.data.sampling import REMEDY, SampledOrders
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.membership.terms import check_same_order
from pod_runtime.trainer.progress.epoch_order import EpochOrder
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.progress.scaling import Policy


class StageOrders:
    """The epochs' orders of this process, through all stages that it is in."""

    def __init__(self, framework: Framework, source: DataSource, settings: LoopSettings) -> None:
        self._group = framework.group
        self._drawn: SampledOrders | None = None  # None: the data have no sampler of their own
        self._makes_batches = False
        self._counts_steps = ""  # what has as many steps in an epoch as was said; "": nothing
        if source.length is None:
            self._counts_steps = "stream" if source.is_stream else "reader without a dataset"
        sampling = source.sampling
        if sampling is not None:
            steps = settings.steps_per_epoch
            self._makes_batches = sampling.makes_batches
            if steps is not None:
                steps *= (
                    settings.accumulation_steps if sampling.makes_batches else source.batch_size
                )
            self._drawn = SampledOrders(
                sampling,
                framework.data,
                seed=settings.seed,
                length=source.length or 0,
                least=source.batch_size if source.drop_last else 1,
                most=steps,
                at_once=settings.accumulation_steps,
            )

    def with_batch_size(self, source: DataSource) -> DataSource:
        """Let the largest batch of the first epoch stand for a batch sampler's unknown size."""
        if self._drawn is None or source.batch_size:
            return source
        ends = self._drawn.of(0).ends
        assert ends is not None
        return replace(source, batch_size=int(np.diff(ends, prepend=0).max()))

    def check_policy(self, policy: Policy, batch_size: int, base_batch_size: int) -> None:
        """Refuse a policy that decides how large batches are where something else does.

        Args:
            batch_size: by the policy, at the world size that there is.

        Raises:
            UsageError: that is the case.
        """
        if policy != "linear" and batch_size == base_batch_size:
            return
        if self._counts_steps:
            raise UsageError(
                f"policy: a {self._counts_steps} counts the steps of an epoch, which would be "
                f"others once batches have grown with the number of trainers; use "
                f"policy='fixed_global', or give the loop a map-style dataset"
            )
        if self._makes_batches:
            assert self._drawn is not None
            raise UsageError(
                f"policy: the batch sampler {self._drawn.name} decides how large batches are, so "
                f"they cannot follow the number of trainers; use policy='fixed_global', or a "
                f"sampler that yields single indices with batch_size="
            )

    def known(self, status: LoopStatus) -> EpochOrder | None:
        """Return the order of the epoch that `status` is in; None: it knows of none.

        Raises:
            StateError: the sampler draws another one here than the state was made with.
            UsageError: what it draws cannot be read.
        """
        record = status.order
        if self._drawn is None or record is None:
            return None
        order = self._drawn.of(record.epoch)
        if order.record != record:
            raise StateError(
                f"train_set: the state of step {status.step} was made with other samples in epoch "
                f"{record.epoch} than the DataLoader's {self._drawn.name} draws here "
                f"({record.samples} then, {order.record.samples} now). If the script was edited, "
                f"start afresh with another checkpoint path; otherwise: {REMEDY}"
            )
        return order

    def check_unchanged(self, epoch: int) -> None:
        """See that the script has not changed the sampler since it drew an epoch.

        Raises:
            UsageError: it has.
        """
        if self._drawn is not None:
            self._drawn.check_unchanged(epoch)

    def of_stage(
        self, status: LoopStatus, *, is_fresh: bool, rank: int, world_size: int
    ) -> EpochOrder | None:
        """Return the order of the epoch that a stage begins in. All ranks call it.

        Returns:
            None: the data have no sampler of their own, or nothing is left to train.

        Raises:
            StateError: as `known`.
            UsageError, PeerLost: as `agreed`.
        """
        if self._drawn is None or status.is_finished:
            return None
        if is_fresh:
            self._drawn.check_repeats(status.run.epochs)
        return self.known(status) or self.agreed(status.epoch, rank=rank, world_size=world_size)

    def agreed(self, epoch: int, *, rank: int, world_size: int) -> EpochOrder | None:
        """Return the order of an epoch of which no state says what it is. All ranks call it.

        Returns:
            None: the data have no sampler of their own.

        Raises:
            UsageError: ranks draw different ones, or what is drawn cannot be read.
            PeerLost: a rank is gone.
        """
        if self._drawn is None:
            return None
        order = self._drawn.of(epoch)
        check_same_order(
            self._group, self._drawn.name, order.record, rank=rank, world_size=world_size
        )
        return order
