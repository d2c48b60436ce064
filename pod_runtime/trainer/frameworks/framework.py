"""What the elastic loop needs of a framework: four small parts, which one value holds.

The calls follow the life of a trainer: form a group; capture, load and broadcast a state; per step
seed, convert, weigh, exchange, apply; leave. `exchange` changes nothing local, and the
buffers hold the step's first values whenever no shard is being computed: so the last committed
state can be captured at every point where ranks wait for each other.

All parts are used by one thread, unless a method says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pod_runtime.trainer.frameworks.beside import Beside
from pod_runtime.trainer.frameworks.reads import Reads
from pod_runtime.trainer.layout import StateLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The process group of one stage."""

    rank: int
    world_size: int
    master: str  # "addr:port" of rank 0; "": as the framework's own launcher says
    generation: int  # differs between groups that one process forms


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgroup:
    """Some ranks of a group, which can go on without the others."""

    ranks: tuple[int, ...]  # ascending; the first becomes rank 0
    addr: str  # of the first


class FrameworkGroup(Protocol):
    """The process group of this trainer, as it changes from stage to stage."""

    def form(self, spec: GroupSpec) -> None:
        """Join the group; returns when all have. A world of one forms none."""

    def form_subgroups(self, parts: Sequence[Subgroup]) -> None:
        """Form, beside the group of all, one of each part. All ranks call it. Raises PeerLost."""

    def use_subgroup(self, index: int, spec: GroupSpec) -> None:
        """Go on in one of the parts, which others may have left meanwhile, as `spec` says."""

    def why_no_second_group(self) -> str:
        """Return why no second group can be formed while one is in use; "": it can."""

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> Any:
        """Form another group while the one in use goes on working. Any thread.

        Raises:
            CalledOffError: `is_off()` has become true before all its ranks were there.
            PeerLost: it could not be formed.
        """

    def adopt(self, group: Any) -> None:
        """Use the group that `form_next` returned from now on, and let go of the one before."""

    def all_reduce(self, values: npt.NDArray[np.float64]) -> None:
        """Sum `values` over all ranks, in place. Raises PeerLost."""

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        """Overwrite `data` on every rank by that of `source`. Raises PeerLost."""

    def calls(self) -> int:
        """Return how many collectives the script has begun, and perhaps others between steps."""


class FrameworkState(Protocol):
    """The state of a training: model, optimizer, and what belongs to them."""

    def layout(self) -> StateLayout:
        """Return the layout of the state as it is now."""

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        """Copy the state's bytes from `start` to `stop` (None: the end) to the same in `target`.

        Laid out as the last `layout()` said; `start` and `stop` are whole multiples of
        `layout.ALIGN`, or the end.
        """

    def scalars(self, *, committed: bool = False) -> dict[str, Any]:
        """Return what else belongs to the state, as JSON types.

        `committed`: learning rates, schedulers and options are those that were noted last, if they
        ever were.
        """

    def note_committed(self, *, of_epoch: bool = False) -> None:
        """Remember learning rates, schedulers and options: a step or an epoch is committed.

        A rank may have to put the committed state away amid the next step, where the script has
        set them for that; whoever goes on from there runs these lines again.

        Raises:
            UsageError: the script has given an optimizer parameters since it was passed.
        """

    def note_open_step(self, *, amid_epoch: bool) -> None:
        """See what else the script has changed since the last commit; before an update.

        Args:
            amid_epoch: the step is not the epoch's first.
        """

    def changed_in_step(self) -> str:
        """Return which part of the state the script changes between a commit and the next update.

        Tensors and objects, of which `note_committed` keeps nothing. "": none.
        """

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        """Take over a state; nothing has changed when this raises StateError."""

    def watch(self) -> None:
        """Begin to see which layers' modes (training or evaluation) the script sets, and more."""

    def watched(self) -> tuple[dict[str, bool], bool]:
        """Stop watching. Return what the script has set since.

        Returns:
            By layer, whether it trains; and whether any other plain part of the state changed.
        """

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        """Set the modes of these layers."""

    def reads(self, tell: Callable[[], None]) -> Reads:
        """Return what calls `tell` before the script reads the model's tensors."""

    def fingerprints(self, *, of_model: bool) -> dict[str, float]:
        """Return numbers that are the same on all ranks as long as their states are.

        By what they are of: the optimizers' plain part; with `of_model`, each of the model's
        tensors, and all of those in `extra`.
        """

    def numbers_of_layers(self) -> dict[str, float]:
        """Return the numbers that layers have as attributes, by what to call them."""

    def constants(self) -> list[str]:
        """Return what layers keep outside of a state, each with a checksum."""

    def uncarried_changes(self) -> list[str]:
        """Return what has changed since the first call, and no state can carry; each once."""

    def unowned(self) -> list[str]:
        """Return which trainable parameters of the model no optimizer has: they are not trained."""

    def check_unowned(self) -> None:
        """See that these are as they were. Raises UsageError: the script has changed one."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it the model evaluates: no gradients, evaluation mode."""


class FrameworkStep(Protocol):
    """The gradients and the buffers of a step.

    `of` says which optimizers are meant, by their index. It counts where there are several.
    """

    @property
    def optimizers(self) -> Sequence[Any]:
        """The training's optimizers."""

    def begin(self) -> None:
        """Remember the buffers: every shard starts from these values. And those `unowned`.

        The step's loss starts from 0.
        """

    def end_shard(self) -> None:
        """Note how this shard changed the buffers, and put them back."""

    def check_shard(self) -> None:
        """See that this shard can be put together with others. Raises UsageError."""

    def check_buffers(self) -> None:
        """See that none was set since then: `apply` would put it back. Raises UsageError."""

    def backward(
        self, loss: Any, weight: float, is_last: bool = False, of: Sequence[int] = ()
    ) -> None:
        """Accumulate the gradient of `loss` times `weight`, and that number itself.

        Only in the parameters of these optimizers.

        Args:
            is_last: of the step's last shard, so that gradients may be sent from now on.

        Raises:
            UsageError: gradients were touched since the last call. So does `exchange`.
        """

    def exchange(
        self, header: Sequence[float], contribute: bool, of: Sequence[int] = ()
    ) -> list[float]:
        """Sum gradients, buffer changes, loss and `header` over all ranks.

        Returns the header's sums. Leaves the local gradients as they were, so that it can be
        called again. Without `contribute`, this rank adds zeros. Raises PeerLost.
        """

    def loss(self, of: Sequence[int] = ()) -> Any:
        """Return the sum of what went through `backward`, a tensor without dimensions.

        Over all ranks as the last `exchange` summed it; before one, that of this rank. It is on the
        model's device, and nothing has waited for it there.
        """

    def apply(
        self,
        *,
        filled_shards: int,
        lr_factor: float,
        max_norm: float | None = None,
        of: Sequence[int] = (),
    ) -> None:
        """Take over what was exchanged, let the optimizer step, clear the gradients.

        Args:
            filled_shards: of the global batch; buffers move by the mean over these.
            lr_factor: multiplies the learning rate of this step.
            max_norm: clip the summed gradients at this global norm; None: do not.
        """

    def end(self) -> None:
        """The step has had its last update, and is committed now."""

    def drop(self) -> None:
        """Forget gradients and put the buffers back: the state is the last committed one."""

    def clear(self) -> None:
        """Clear gradients that something else than a step has left, as an evaluation may."""


class FrameworkData(Protocol):
    """Batches on the training's device, and random numbers."""

    def seed(self, key: int) -> None:
        """Seed the framework's generators."""

    def probe(self) -> Any:
        """Return what is the same after `seed` with the same key, unless a number was drawn since.

        Of the host's generator. It may draw itself.
        """

    def rng_state(self) -> Any:
        """Return where the framework's generators are."""

    def set_rng_state(self, state: Any) -> None:
        """Put them back to where `rng_state` found them."""

    def worker_info(self) -> Any | None:
        """Return what the framework tells a loader's worker about itself; None: it is none."""

    def collate(self, samples: list[Any]) -> Any:
        """Make one batch of samples as the framework's loader does by default."""

    def to_batch(self, fields: Any) -> Any:
        """Return `fields` with every array as a tensor on the device."""

    def loader(
        self,
        dataset: Any,
        index_batches: Iterator[list[Any]],
        *,
        collate: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
        on_host: bool = False,
    ) -> Iterator[Any]:
        """Return the framework's loader with worker processes over these lists of indices.

        Args:
            on_host: leave batches in the host's memory, for a reader that sends them elsewhere.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One model, its optimizer and the device they live on, as the loop sees them."""

    module: str  # which a process that is kept for a later trainer imports ahead
    axis: str  # by which argument its functions call a dimension
    seeding: str  # how a script seeds its generators
    freezing: str  # how it freezes a parameter
    # Returns what has to be the same of model and optimizer on all ranks, as JSON types.
    terms: Callable[[], dict[str, Any]]
    group: FrameworkGroup
    state: FrameworkState
    beside: Beside
    step: FrameworkStep
    data: FrameworkData
