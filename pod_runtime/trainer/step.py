"""Epoch and step, as a training script sees them."""

from collections.abc import Callable, Iterator
from typing import Any

from pod_runtime.trainer.adapter import Adapter
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.readers import ShardOrder, ShardPlace

WEIGHTS = ("mean", "sum")


class Epoch:
    """One pass over the data. Iterate over it once: it yields the steps that are left."""

    def __init__(self, number: int, first_step: int, steps: int, run: Callable[[], Any]) -> None:
        self.number = number  # 0-based
        self.first_step = first_step  # of the epoch, 0-based: above 0 after a restore
        self.steps = steps  # global batches of the epoch, those before `first_step` included
        self._run = run

    def __iter__(self) -> Iterator["Step"]:
        steps: Iterator[Step] = self._run()
        return steps

    def __len__(self) -> int:
        return self.steps - self.first_step


class Step:
    """One global batch. Iterate over it for this rank's shards, then call `update`."""

    def __init__(
        self,
        *,
        number: int,
        places: list[ShardPlace],
        samples: int,
        order: ShardOrder,
        adapter: Adapter,
        loss: str,
        fetch: Callable[[ShardPlace], Any],
        update: Callable[["Step"], None],
    ) -> None:
        self.number = number  # global steps before this one
        self.samples = samples  # of the global batch
        self.is_updated = False
        self.samples_done = 0  # by this rank
        self._places = places
        self._order = order
        self._adapter = adapter
        self._loss = loss
        self._fetch = fetch
        self._update = update
        self._at = 0  # shards that were handed out
        self._open = False  # the newest of them is being computed
        self._shard_samples = 0
        self._weighed = 0  # shards whose loss went through `backward`

    @property
    def sample_ids(self) -> list[int]:
        """Ids of this rank's samples of the global batch, in order."""
        return [sample for place in self._places for sample in self._order.ids(place)]

    def __iter__(self) -> Iterator[Any]:
        """Yield each of this rank's shards, collated."""
        while self._at < len(self._places):
            place = self._places[self._at]
            batch = self._fetch(place)
            self._at += 1
            self._shard_samples = place.samples
            self._open = True
            yield batch
            self._close_shard()
        self._close_shard()

    def backward(self, loss: Any) -> None:
        """Accumulate the gradient of this shard's loss, weighed by its share of the global batch.

        The loss is the mean over the shard, or the sum with `Loop(loss="sum")`.

        Raises:
            UsageError: no shard is being computed.
        """
        if not self._open:
            raise UsageError(
                "step.backward(loss): call it inside `for batch in step:`, once per shard or more"
            )
        samples = self._shard_samples if self._loss == "mean" else 1
        self._adapter.backward(loss, samples / self.samples)
        self._weighed = self._at

    def update(self) -> None:
        """Sum the gradients over all ranks, let the optimizer step, clear the gradients.

        Raises:
            UsageError: it was called before, or before all shards were computed.
        """
        if self.is_updated:
            raise UsageError("step.update(): called twice in one step")
        if self._at < len(self._places):
            raise UsageError(
                f"step.update(): {self._at} of this rank's {len(self._places)} shards were "
                f"computed; finish `for batch in step:` before it, without break"
            )
        self._close_shard()
        if self._weighed < self._at:
            raise UsageError(
                "step.update(): no gradient came from this step's last shard; write "
                "step.backward(loss) instead of loss.backward()"
            )
        self._update(self)
        self.is_updated = True

    def _close_shard(self) -> None:
        if self._open:
            self._open = False
            self.samples_done += self._shard_samples
            self._adapter.end_shard()
