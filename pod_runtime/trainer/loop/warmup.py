"""The warm-up step: run the loop's body once before a stage begins, so that its first step is fast.

The trainers of a stage that is prepared while an older one trains have time, and no state yet.
Their script runs the body of its loop once on the first samples of the data: forward and backward
pass and the optimizer find their memory and their kernels. Nothing of it counts: the state is
loaded afterwards. No rank waits for another in it, so each may end it as soon as its script asks
for something that only the real stage knows.
"""

from collections.abc import Callable
from typing import Any

from pod_runtime.trainer.data.readers import ShardRange, keyed_loader
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.step import Step
from pod_runtime.trainer.data.streams import SampleFetcher, drawn_indices
from pod_runtime.trainer.data.worker_errors import raise_if_failed
from pod_runtime.trainer.frameworks.framework import Framework, FrameworkData
from pod_runtime.trainer.progress.batches import Cursor


class WarmupStep(Step):
    """A step over one shard that this rank makes alone."""

    is_warmup = True

    def __init__(
        self,
        framework: Framework,
        source: DataSource,
        *,
        shards: int,
        seed: int,
        loss: str,
        enter: Callable[[], Cursor],
        is_over: Callable[[], bool],
    ) -> None:
        """Begin a warm-up step.

        Args:
            source: has a map-style dataset.
            shards: V, as far as it is known.
            enter: waits for the real stage, and returns where that begins.
            is_over: whether the real state has come: the update is then left out.
        """
        assert source.length is not None
        samples = min(source.length, -(-source.batch_size // shards))
        first = ShardRange(epoch=0, step=0, shard=0, start=0, stop=samples)
        super().__init__(framework, [first], samples=samples, loss=loss)
        self._source, self._seed = source, seed
        self._enter, self._is_over = enter, is_over

    @property
    def number(self) -> int:
        return self._enter().global_step

    @property
    def index(self) -> int:
        return self._enter().step

    @property
    def sample_ids(self) -> list[int]:
        """Empty: no sample of this step counts."""
        return []

    def _check_calls(self) -> None:
        pass  # each trainer has one shard

    def _read(self, shard_range: ShardRange) -> Any:
        samples = range(shard_range.start, shard_range.stop)
        data = self._framework.data
        batch = self._read_once(lambda: _read(data, self._source, samples, self._seed))
        return data.to_batch(batch)

    def _finish(self, of: tuple[int, ...]) -> Any:
        loss = self._framework.step.loss(of)
        if not self._is_over():
            self._framework.step.apply(filled_shards=1, lr_factor=1.0, of=of)
        return loss


def _read(data: FrameworkData, source: DataSource, samples: range, seed: int) -> Any:
    if source.num_workers == 0:
        collate = source.collate or data.collate
        return collate(SampleFetcher(source.dataset, data, seed).fetch(0, samples))
    # In a worker: a dataset may keep a file open from its first sample on, which must not happen
    # in this process, from which the workers of the real stage are forked.
    wanted = iter([drawn_indices(0, samples, [])])
    loader = keyed_loader(source, wanted, data, seed, (0,), num_workers=1)
    batch = next(loader)
    next(loader, None)  # nothing is left: here the framework ends the worker, and not before
    return raise_if_failed(batch)
