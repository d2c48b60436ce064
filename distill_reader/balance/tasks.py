"""End tasks for certain: a cancellation may get lost in a library that is just handling a timeout
of its own, as redis-py's reading of a channel does now and then."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_AGAIN_S = 0.2


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks until they have ended; what they raise is seen.

    Raises:
        CancelledError: this task was cancelled meanwhile; the others have ended all the same.
    """
    left = {task for task in tasks if not task.done()}
    cancelled: asyncio.CancelledError | None = None
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
        left = {task for task in left if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio complains that nobody has looked
    if cancelled is not None:
        raise cancelled


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, which has an end, however often this task is cancelled meanwhile: for goodbyes.

    Raises:
        CancelledError: this task was cancelled meanwhile; the work is done all the same.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
