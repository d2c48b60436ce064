"""Sum gradients bucket by bucket while the backward pass of a step's last shard still runs.

Buckets are filled from the model's end on, as gradients become final in that order; hooks see
when. A bucket is sent when it and all before it are complete, so that every rank sends the same in
the same order; `run` sends the rest, then the header. On the host a thread sends, because gloo
works in the thread that calls it, and because there a lost peer is an error that can be handled: in
a hook it would end the process. On a device the framework's communication stream sends.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from pod_runtime.trainer.frameworks.paddle.flat import (
    DeviceFlat,
    Flat,
    HostFlat,
    Slice,
    flat_dtype,
    lay_out,
)
from pod_runtime.trainer.frameworks.paddle.gradients import (
    GradientExchange,
    ShardBuffers,
    scatter_gradients,
)
from pod_runtime.trainer.frameworks.paddle.tensors import dtype_name

logger = logging.getLogger(__name__)

BUCKET_BYTES = 8 << 20

Reduce = Callable[[Any], None]


class AsyncReducer(Protocol):
    """Sums tensors over the ranks, one after the other, while the caller goes on."""

    def send(self, tensor: Any) -> None:
        """Sum this one in place, later."""

    def wait(self) -> None:
        """Return when all that was sent is summed. Raises what the first failure raised."""


class ThreadReducer:
    """Sends from a thread of its own."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._tensors: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._sent = 0
        self._thread: threading.Thread | None = None  # None: nothing was sent yet

    def send(self, tensor: Any) -> None:
        if self._thread is None:
            # A daemon: what waits for a lost peer must not keep a script from ending.
            self._thread = threading.Thread(target=self._work, name="all-reduce", daemon=True)
            self._thread.start()
        self._sent += 1
        self._tensors.put(tensor)

    def wait(self) -> None:
        failed = None
        while self._sent:
            self._sent -= 1
            failed = failed or self._results.get()
        if failed is not None:
            raise failed

    def _work(self) -> None:
        failed: Exception | None = None
        while True:
            tensor = self._tensors.get()
            try:
                if failed is None:  # after a failure the ranks are out of step
                    self._reduce(tensor)
            except Exception as error:  # noqa: BLE001  raised in the training's thread, by `wait`
                failed = error
            self._results.put(failed)


class TaskReducer:
    """Sends by the framework's own asynchronous operations, as devices have them."""

    def __init__(self, start: Callable[[Any], Any], wait: Callable[[Any], None]) -> None:
        """`start` begins and returns a task that `wait` waits for."""
        self._start, self._wait = start, wait
        self._tasks: list[Any] = []

    def send(self, tensor: Any) -> None:
        self._tasks.append(self._start(tensor))

    def wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._wait(task)


class Bucket:
    """Parameters of one type whose gradients travel together."""

    def __init__(self, indices: list[int], parameters: Sequence[Any], dtype: str, on_host: bool):
        self.indices = indices
        self.slices: list[Slice]
        self.slices, size = lay_out([parameters[index] for index in indices], dtype)
        self.flat: Flat = (HostFlat if on_host else DeviceFlat)(size, dtype)
        self.missing: set[int] = set()  # whose gradients are not final yet
        self.is_sent = False


class OverlappedExchange:
    """Replaces `GradientExchange`: the same sums, sent as they become known."""

    def __init__(
        self,
        parameters: Sequence[Any],
        buffers: ShardBuffers,
        header_size: int,
        on_host: bool,
        reducer: AsyncReducer,
        bucket_bytes: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._header_size = header_size
        self._reducer = reducer
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._on_host = on_host
        self._unused: set[int] = set()  # had a step without a gradient on any rank
        self._fill_buckets()
        # Header, buffers, and what the ranks need to know of each other's gradients: whether any
        # came too late, and whether each is there.
        self._tail = GradientExchange([], buffers, header_size + 1 + len(self.parameters), on_host)
        self._armed = False  # the backward pass of the last shard is running, or was
        self._sent = 0  # buckets
        self._late = False  # a gradient changed after it was sent
        self.gives_up = False  # sends all at the end, as gradients came too late
        self._presence: list[float] = []

    @property
    def is_open(self) -> bool:
        """Buckets are on their way: nothing else may be sent before `run`."""
        return self._sent > 0

    def arm(self) -> None:
        """Send buckets as their gradients become final: the last backward pass begins.

        A second one in the same shard changes gradients that were sent: all are sent again then,
        and from then on at the end, as such a script does so in every step.
        """
        if self._armed or self.gives_up:
            return
        self._armed = True
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)

    def ready(self, index: int) -> None:
        """The gradient of parameter `index` has changed; called by its hook."""
        if not self._armed:
            return
        bucket = self._bucket_of[index]
        if bucket.is_sent:
            self._late = self.gives_up = True
            return
        bucket.missing.discard(index)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(contribute=True)

    def run(self, header: Sequence[float], contribute: bool, reduce: Reduce) -> list[float]:
        """As `GradientExchange.run`."""
        while True:
            while self._sent < len(self._buckets):
                self._send(contribute)
            self._reducer.wait()
            grads = [each.grad if contribute else None for each in self.parameters]
            present = [0.0 if grad is None else 1.0 for grad in grads]
            late, self._late = self._late, False
            if late:
                logger.warning(
                    "gradients changed after they were sent: step.backward was called more than "
                    'once in a shard; this trainer sends them after it, as all_reduce="flat" does'
                )
            sums = self._tail.run([*header, float(late), *present], contribute, reduce)
            self.reset()
            self._presence = sums[self._header_size + 1 :]
            if sums[self._header_size] == 0:
                return sums[: self._header_size]

    def put_back(self, filled_shards: int) -> None:
        """As `GradientExchange.put_back`."""
        for bucket in self._buckets:
            scatter_gradients(
                self.parameters, bucket.indices, bucket.slices, bucket.flat, self._presence
            )
        self._tail.put_back(filled_shards)

        # What a backward pass does not always reach must not hold up the rest. Same on all ranks.
        unused = self._unused.union(i for i, count in enumerate(self._presence) if count == 0)
        if unused != self._unused:
            self._unused = unused
            self._fill_buckets()

    def start_over(self) -> None:
        """Forget the steps before: a rank of the group that is formed now has not made them."""
        self.reset()
        if self._unused:
            self._unused = set()
            self._fill_buckets()

    def reset(self) -> None:
        """Forget what was sent: it was summed, or the step is dropped."""
        self._armed, self._sent = False, 0
        for bucket in self._buckets:
            bucket.is_sent = False

    def _fill_buckets(self) -> None:
        self._buckets = make_buckets(
            self.parameters, self._unused, self._bucket_bytes, self._on_host
        )
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    def _send(self, contribute: bool) -> None:
        bucket = self._buckets[self._sent]
        grads = [self.parameters[index].grad if contribute else None for index in bucket.indices]
        bucket.flat.gather(grads, bucket.slices)
        self._sent += 1
        bucket.is_sent = True
        self._reducer.send(bucket.flat.tensor)


def make_buckets(
    parameters: Sequence[Any], unused: Collection[int], bucket_bytes: int, on_host: bool
) -> list[Bucket]:
    """Put parameters into buckets of that size: the model's last ones first, unused ones last."""
    buckets: list[Bucket] = []
    indices: list[int] = []
    size, dtype = 0, ""

    def close() -> None:
        if indices:
            buckets.append(Bucket(list(indices), parameters, dtype, on_host))
            indices.clear()

    order = sorted(range(len(parameters)), key=lambda index: (index in unused, -index))
    for index in order:
        kind = flat_dtype(dtype_name(parameters[index]))
        nbytes = math.prod(parameters[index].shape) * (8 if kind == "float64" else 4)
        starts_unused = index in unused and indices and indices[-1] not in unused
        if indices and (kind != dtype or size + nbytes > bucket_bytes or starts_unused):
            close()
        if not indices:
            size, dtype = 0, kind
        indices.append(index)
        size += nbytes
    close()
    return buckets


class Hooks:
    """One hook per parameter for the life of the process: Paddle cannot remove hooks."""

    def __init__(self) -> None:
        self._hooked: set[int] = set()
        self._exchange: OverlappedExchange | None = None  # None: no exchange listens
        self._index: dict[int, int] = {}

    def listen_with(self, exchange: OverlappedExchange) -> None:
        """Call `exchange`, and no other, for gradients of its parameters from now on."""
        self._exchange = exchange
        self._index = {id(each): index for index, each in enumerate(exchange.parameters)}
        for parameter in exchange.parameters:
            key = id(parameter)
            if key not in self._hooked:
                self._hooked.add(key)
                parameter._register_backward_hook(lambda key=key: self._call(key))

    def _call(self, key: int) -> None:
        index = self._index.get(key)
        if index is not None and self._exchange is not None:
            self._exchange.ready(index)
