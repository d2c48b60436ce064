"""End asyncio tasks reliably.

A cancellation can get lost in a library that handles a timeout of its own at that moment, as
redis-py does sometimes while it reads from a channel.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

_AGAIN_S = 0.2


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks until they have ended. Their exceptions are retrieved and dropped.

    Raises:
        CancelledError: this task was cancelled meanwhile; the others have still ended.
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
            task.exception()  # else asyncio warns that it was never retrieved
    if cancelled is not None:
        raise cancelled


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, even if this task is cancelled meanwhile. For short farewells.

    Raises:
        CancelledError: this task was cancelled meanwhile; the work is still done.
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
