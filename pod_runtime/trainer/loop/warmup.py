"""One step on a few samples before a stage begins: what is slow the first time is done by then.

The trainers of a stage that is prepared beside an older one have time, and no state yet. Their
script runs the body of its loop once on the first samples of the data: forward and backward pass
and the optimizer find their memory and their kernels. Nothing of it counts: the state is loaded
afterwards. Nothing in it waits for another rank, so that each may end it whenever its script asks
for something that only the real stage knows.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pod_runtime.trainer.data.readers import ShardRange
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.step import Step
from pod_runtime.trainer.data.streams import KeyedDataset, SampleFetcher
from pod_runtime.trainer.data.worker_errors import CarryingCollate, raise_if_failed
from pod_runtime.trainer.frameworks.adapter import Adapter


def warmup_step(
    adapter: Adapter,
    source: DataSource,
    *,
    shards: int,
    seed: int,
    loss: str,
    number: Callable[[], int],
    index: Callable[[], int],
    is_over: Callable[[], bool],
) -> Step | None:
    """Return a step over one shard that only this rank makes; None for data without indices.

    Args:
        shards: V, as far as it is known.
        number, index: asked by the script; each ends the warm-up step.
        is_over: whether the real state has come: the update is then left out.
    """
    if source.dataset is None or source.length is None:
        return None
    samples = min(source.length, -(-source.batch_size // shards))
    shard_range = ShardRange(epoch=0, step=0, shard=0, start=0, stop=samples)

    def fetch(_place: ShardRange) -> Any:
        return adapter.to_batch(_read(adapter, source, samples, seed))

    def update(_step: Step) -> None:
        if not is_over():
            adapter.apply(filled_shards=1, lr_factor=1.0)

    adapter.begin_step()
    return Step(
        number=number,
        index=index,
        ranges=[shard_range],
        samples=samples,
        ids=lambda _place: [],  # none of them counts
        adapter=adapter,
        loss=loss,
        fetch=fetch,
        update=update,
        is_warmup=True,
    )


def _read(adapter: Adapter, source: DataSource, samples: int, seed: int) -> Any:
    if source.num_workers == 0:
        collate = source.collate or adapter.collate
        return collate(SampleFetcher(source.dataset, adapter, seed).fetch(0, range(samples)))
    # In a worker: a dataset may keep a file open from its first sample on, which must not happen
    # in this process, from which the workers of the real stage are forked.
    wanted: Iterator[list[Any]] = iter([[(0, sample) for sample in range(samples)]])
    loader = adapter.loader(
        KeyedDataset(source.dataset, adapter, seed),
        wanted,
        collate=CarryingCollate(source.collate or adapter.collate),
        options={**source.worker_options, "num_workers": 1},
    )
    batch = next(loader)
    next(loader, None)  # nothing is left: here the framework ends the worker, and not before
    return raise_if_failed(batch)
