"""Call the service from coroutines. If a client leaves, its memory is still given back."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from distill_reader.errors import TeacherBusy
from distill_reader.teacher.service.requests import (
    InferAnswer,
    InferenceService,
    InferRequest,
    abandon,
)

P = ParamSpec("P")
T = TypeVar("T")

_INLINE_BYTES = 256 << 10  # below this the loop does the work itself: a thread costs more
_THREADS = 4  # for work that would block the loop: copies of megabytes, JSON, gzip


class Calls:
    """Access to the service, and threads for long work, for protocols on the front's loop."""

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="front-work")
        self._one_thread = ThreadPoolExecutor(1, thread_name_prefix="front-json")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._one_thread.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of `function`, called in a thread if `size_bytes` of data are many.

        If the caller is cancelled, this raises only when the thread is done with the data.
        """
        work = functools.partial(function, *args, **kwargs)
        return work() if size_bytes < _INLINE_BYTES else await self._run_in(self._threads, work)

    async def run_alone(
        self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `run`, but one large call at a time: for work that needs much more memory."""
        work = functools.partial(function, *args, **kwargs)
        return work() if size_bytes < _INLINE_BYTES else await self._run_in(self._one_thread, work)

    async def _run_in(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        task = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The caller frees its memory next, and the function still reads it.
            if not task.done():
                await asyncio.wait([task])
            _abandon_result(task)
            raise

    async def infer(
        self,
        request: InferRequest,
        size_bytes: int,
        *,
        submitted: Callable[[], None] = lambda: None,
    ) -> InferAnswer:
        """Return the answer; the caller releases it.

        Args:
            size_bytes: of the inputs that the service must copy.
            submitted: called when the service has copied or refused them.

        Raises:
            BadRequest, ModelNotFound, TeacherBusy.
        """
        try:
            future = await self.run(size_bytes, self.service.submit, request)
        finally:
            submitted()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            is_stopped = future.cancelled()  # by the service, not by the waiting task
            abandon(future)
            task = asyncio.current_task()
            if is_stopped and task is not None and not task.cancelling():
                raise TeacherBusy("the teacher stops", delay_s=1.0) from None
            raise


def _abandon_result(task: "asyncio.Future[T]") -> None:
    if not task.cancelled() and task.exception() is None:
        result = task.result()
        if isinstance(result, Future):
            abandon(result)
