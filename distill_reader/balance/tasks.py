"""End asyncio tasks and loops reliably.

A cancellation can get lost in a library that handles a timeout of its own at that moment, as
redis-py does sometimes while it reads from a channel.

asyncio looks up names in a few threads, and waits for them when the loop ends. While a name server
does not answer, each look-up holds one of them for up to half a minute: soon no name is looked up
any more, even if the name server is back, and no program ends. So `run` looks them up in threads
of its own, which nobody waits for.

Nor does asyncio try a name's second address before the first one fails, which takes two minutes if
that is silent: longer than any connection here may take. So `run` tries each soon after another.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohappyeyeballs import start_connection

T = TypeVar("T")

_AGAIN_S = 0.2
_LOOK_UP_AGAIN_S = 1.0  # for a name whose look-up has not ended
_LOOK_UPS = 8  # of one name at the same time
_NEXT_ADDRESS_S = 0.25  # until the next address is tried, too: as RFC 8305 has it

_Addresses = list[Any]  # as socket.getaddrinfo returns them


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, as asyncio.run does, in a loop that no name server can hold."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, called in a thread that neither loop nor process wait for.

    Raises:
        RuntimeError: the system has no more threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where `work` is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=call, name="in-thread", daemon=True).start()
    return await future


@dataclass(slots=True)
class _LookUp:
    """Who waits for the addresses of a name, and the threads that look it up."""

    waiting: "set[asyncio.Future[_Addresses]]" = field(default_factory=set)
    threads: "set[asyncio.Task[None]]" = field(default_factory=set)
    began_s: float = float("-inf")  # of the newest thread


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that looks up names by `in_thread`, and tries all addresses of a name."""

    def __init__(self) -> None:
        super().__init__()
        self._look_ups: dict[tuple[object, ...], _LookUp] = {}

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Connect to whichever of a name's addresses answers first."""
        if host is None:
            return await super().create_connection(protocol_factory, host, port, **options)
        found = await self.getaddrinfo(
            host,
            port,
            type=socket.SOCK_STREAM,
            **{name: options.pop(name) for name in ("family", "proto", "flags") if name in options},
        )
        # asyncio's own way leaves a socket open where it is cancelled as that is connected.
        sock = await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        if options.get("ssl"):
            options.setdefault("server_hostname", host)
        return await super().create_connection(protocol_factory, sock=sock, **options)

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> _Addresses:
        """Return the addresses. Whoever asks for a name gets the first answer that comes."""
        asked = (host, port, family, type, proto, flags)
        look_up = self._look_ups.setdefault(asked, _LookUp())
        future: asyncio.Future[_Addresses] = self.create_future()
        look_up.waiting.add(future)
        now = time.monotonic()
        if not look_up.threads or (
            len(look_up.threads) < _LOOK_UPS and now - look_up.began_s > _LOOK_UP_AGAIN_S
        ):
            look_up.began_s = now
            task = self.create_task(self._look_up(asked, look_up))
            look_up.threads.add(task)
        try:
            return await future
        finally:
            look_up.waiting.discard(future)

    async def _look_up(self, asked: tuple[Any, ...], look_up: _LookUp) -> None:
        failure: Exception | None = None
        found: _Addresses = []
        try:
            found = await in_thread(lambda: socket.getaddrinfo(*asked))
        except Exception as error:  # noqa: BLE001 - raised where the name is asked for
            failure = error
        task = asyncio.current_task()
        look_up.threads.discard(task)
        if failure is not None and look_up.threads:
            return  # another thread may still find it
        for future in look_up.waiting:
            if future.done():
                continue
            if failure is None:
                future.set_result(found)
            else:
                future.set_exception(failure)
        if not look_up.threads:
            self._look_ups.pop(asked, None)


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
