"""The launcher's two threads that talk to the job server, so that its main thread never waits.

One attaches and long-polls the orders, the other sends reports. A server that is away stops
neither the trainers nor the launcher: both threads try again until it is back. The first one then
attaches again with the launcher's whole status.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from job_server.api.backoff import Backoff
from job_server.api.errors import Gone, NotFound, Rejected, Retryable, Unauthorized
from job_server.api.wire import Attach, Order, PodOrders, PodReport

logger = logging.getLogger(__name__)

POLL_S = 5.0  # after a cut of the network the answer of a poll may be lost
_FIRST_STEP_S = 0.05  # after `go` the trainers need the cores: the next poll can wait so long


class JobServerApi(Protocol):
    """The calls of `job_server.api.api_client.ApiClient` that a launcher needs."""

    def attach(self, job_id: str, pod_id: str, attach: Attach, /) -> PodOrders: ...

    def orders(
        self, job_id: str, pod_id: str, /, *, revision: int, timeout_s: float
    ) -> PodOrders: ...

    def report(self, job_id: str, pod_id: str, report: PodReport, /) -> str: ...


@dataclass(frozen=True, slots=True)
class AttachAnswered:
    orders: PodOrders


@dataclass(frozen=True, slots=True)
class OrdersChanged:
    orders: PodOrders


@dataclass(frozen=True, slots=True)
class NotWanted:
    """The server does not want this pod any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class LauncherRefused:
    """The launcher cannot work with this server at all."""

    reason: str


LinkEvent = AttachAnswered | OrdersChanged | NotWanted | LauncherRefused


def _backoff() -> Backoff:
    return Backoff(first_s=0.05, last_s=1.0)


class ServerLink:
    """Calls `deliver` with `LinkEvent`s from its own threads, and takes reports from any thread."""

    def __init__(
        self,
        *,
        connect: Callable[[], JobServerApi],  # by each thread, and again where none answers it
        job_id: str,
        pod_id: str,
        status: Callable[[], Attach],  # called by the polling thread
        deliver: Callable[[LinkEvent], None],
    ) -> None:
        self._connect, self._status, self._deliver = connect, status, deliver
        self._job_id, self._pod_id = job_id, pod_id
        self._server_id = ""
        self._attach_again = threading.Event()
        self._closed = threading.Event()
        self._outbox: dict[tuple[object, ...], PodReport] = {}
        self._changed = threading.Condition()

    def start(self) -> None:
        for name, work in (("orders", self._poll), ("reports", self._send_reports)):
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True).start()

    def send(self, report: PodReport) -> None:
        """Queue a report. It replaces one of the same kind that was not sent yet."""
        name = (report.kind, report.stage, report.attempt, report.rank)
        with self._changed:
            self._outbox.pop(name, None)
            self._outbox[name] = report
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all reports have been taken; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._outbox, timeout_s)

    def close(self) -> None:
        """Stop both threads; one that waits for the server ends with its wait."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # outermost loop: without this thread the launcher would be deaf
            logger.exception("the link to the job server broke")
            self._deliver(LauncherRefused(f"internal error: {error!r}"))

    # --- orders -------------------------------------------------------------------------------

    def _poll(self) -> None:
        api, backoff, known, away = self._connect(), _backoff(), False, False
        refused = ""  # why, as it was logged last
        while not self._closed.is_set():
            try:
                self._attach_again.clear()
                orders = api.attach(self._job_id, self._pod_id, self._status())
                self._server_id = orders.server_id
                if away or not known:
                    logger.info("attached to server %s", orders.server_id)
                known, away, refused = True, False, ""
                backoff.reset()
                self._deliver(AttachAnswered(orders))
                self._follow(api, orders)
                continue
            except Gone as error:
                self._deliver(NotWanted(str(error)))
                return
            except (Retryable, NotFound) as error:
                if not away:
                    logger.warning("no job server, training goes on: %s", error)
                away = True
                api = self._connect()  # it may have moved, and the client say where to
            except Rejected as error:
                if not known:
                    self._deliver(LauncherRefused(str(error)))
                    return
                if str(error) != refused:
                    logger.error("the job server refuses us, training goes on: %s", error)
                refused = str(error)
                if isinstance(error, Unauthorized):
                    api = self._connect()  # the token's file may have the server's new one
            self._closed.wait(backoff.next_s())

    def _follow(self, api: JobServerApi, orders: PodOrders) -> None:
        """Deliver every change of the orders, until it is time to attach again."""
        while not (self._closed.is_set() or self._attach_again.is_set()):
            asked_at = time.monotonic()
            answer = api.orders(
                self._job_id,
                self._pod_id,
                revision=orders.revision,
                timeout_s=POLL_S,
            )
            if answer.server_id != self._server_id:
                return
            if answer.revision != orders.revision:
                self._deliver(OrdersChanged(answer))
                if _is_new_go(orders, answer):
                    self._closed.wait(_FIRST_STEP_S)
                orders = answer
            elif time.monotonic() - asked_at < POLL_S / 2:
                self._closed.wait(min(1.0, orders.heartbeat_s))  # the server holds no more polls

    # --- reports ------------------------------------------------------------------------------

    def _send_reports(self) -> None:
        api, backoff = self._connect(), _backoff()
        while (head := self._head()) is not None:
            name, report = head
            try:
                server_id = api.report(self._job_id, self._pod_id, report)
            except Gone as error:
                self._deliver(NotWanted(str(error)))
                self._done(name, report)
            except NotFound:
                self._attach_again.set()  # then all reports are made again
                self._done(name, report)
                api = self._connect()
            except Retryable:
                self._closed.wait(backoff.next_s())
                api = self._connect()
            except Unauthorized:  # the other thread says so
                self._closed.wait(backoff.next_s())
                api = self._connect()
            except Rejected as error:
                logger.error("a report was refused: %s: %s", report.kind.value, error)
                self._done(name, report)
            else:
                backoff.reset()
                self._done(name, report)
                if self._server_id and server_id != self._server_id:
                    self._attach_again.set()

    def _head(self) -> tuple[tuple[object, ...], PodReport] | None:
        """Wait for the oldest report; None once the link is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closed.is_set())
            if self._closed.is_set():
                return None
            return next(iter(self._outbox.items()))

    def _done(self, name: tuple[object, ...], report: PodReport) -> None:
        with self._changed:
            if self._outbox.get(name) is report:  # else a newer one has replaced it
                del self._outbox[name]
            self._changed.notify_all()


def _is_new_go(before: PodOrders, now: PodOrders) -> bool:
    begun = {plan.stage for plan in before.plans if plan.order is Order.GO}
    return any(plan.order is Order.GO and plan.stage not in begun for plan in now.plans)
