"""Talk to the job server: register, follow the plan, report.

Two threads with a connection each: one waits in the long poll, the other reports. The pods go on
whatever goes wrong with the server.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from job_client import ports
from job_client.errors import FatalError, JobClientError, SetupError
from job_server.api.backoff import Backoff
from job_server.api.errors import (
    Conflict,
    JobServerError,
    NotFound,
    Rejected,
    Retryable,
    Unauthorized,
)
from job_server.api.wire import (
    Acknowledgement,
    JobKind,
    JobStatus,
    Node,
    NodePlan,
    NodeReport,
)

logger = logging.getLogger(__name__)

POLL_S = 25.0
MAX_BACKOFF_S = 5.0
NO_JOB_S = 0.5
LAST_REPORT_S = 5.0  # how long a goodbye waits for the report under way


class NodeApi(Protocol):
    """The calls of `job_server.api.api_client.ApiClient` that a client needs."""

    def register_node(self, node: Node) -> NodePlan: ...
    def node_plan(self, node_id: str, revision: int, timeout_s: float, client: str) -> NodePlan: ...
    def node_report(self, report: NodeReport) -> Acknowledgement: ...
    def jobs(self) -> tuple[JobStatus, ...]: ...


def _backoff() -> Backoff:
    return Backoff(first_s=0.1, last_s=MAX_BACKOFF_S)


def find_job(
    api: NodeApi, wait: Callable[[float], bool], known: Collection[str] = ()
) -> str | None:
    """Return the only job of the server that has not ended; wait for one where there is none.

    Where there is a training, jobs of teachers do not count.

    Args:
        wait: sleeps for so many seconds, and returns whether to give up.
        known: jobs that this node has served; the only one of these comes before others.

    Returns:
        None: given up.

    Raises:
        SetupError: there are several.
        FatalError: the server refuses this client.
    """
    backoff, logged = _backoff(), ""
    delay_s, heard = 0.0, False
    while True:
        try:
            jobs = [job.spec for job in api.jobs() if not job.state.ended]
            trainings = [spec for spec in jobs if spec.kind is JobKind.TRAINING]
            names = [spec.job_id for spec in trainings or jobs]
            served = [spec.job_id for spec in jobs if spec.job_id in known]
            names = served if len(served) == 1 else names
        except Retryable as error:
            if error.status == 404 and not heard:  # not a job server's, which has this route
                raise FatalError(f"--job_server: no job server: {error}") from None
            names, text = [], f"the job server does not answer, trying again: {error}"
            delay_s = backoff.next_s()
        except Rejected as error:
            raise FatalError(f"--job_server: refused: {error}") from None
        else:
            text = "the job server has no job to run; waiting for one (see `edl submit`)"
            backoff.reset()
            delay_s, heard = NO_JOB_S, True
        if len(names) > 1:
            shown = ", ".join(sorted(names))
            raise SetupError(f"PADDLE_JOB_ID: the server has several jobs, name one of: {shown}")
        if names:
            return names[0]
        if text != logged:
            logger.info("%s", text)
            logged = text
        if wait(delay_s):
            return None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions of the agent that the link calls from its threads."""

    node: Callable[[], Node]  # what to register; asks the hardware
    address: Callable[[], str]  # of the node, which may be another one by now
    plan: Callable[[NodePlan], None]
    report: Callable[[bool], NodeReport | None]  # True: with fresh figures; None: say nothing
    reported: Callable[[NodeReport, Acknowledgement], None]  # the server has it
    contact: Callable[[float], None]  # monotonic time at which an answered request was sent
    fatal: Callable[[JobClientError], None]


class NodeLink:
    """Both threads, and what they share."""

    def __init__(
        self, make_api: Callable[[], NodeApi], callbacks: Callbacks, *, choose_ports: bool
    ) -> None:
        self._make_api = make_api
        self._do = callbacks
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._plan: NodePlan | None = None  # None: not registered, or to be registered again
        self._ever = False  # was accepted once
        self._node: Node | None = None  # as registered last; None: never
        self._report_now = threading.Event()
        self._registered = threading.Event()
        every = ports.blocks(ports.ephemeral_range()) if choose_ports else []
        self._blocks = ports.PortBlocks(every)
        # None: the ports that the node itself names
        self._ports = self._blocks.next() or next(iter(every), None)
        self._polls = self._thread("plan", self._follow_plan)
        self._reports = self._thread("report", self._keep_reporting)

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)

    def start(self) -> None:
        self._polls.start()
        self._reports.start()

    def close(self) -> None:
        """Send nothing more. A request under way is not waited for."""
        self._closing.set()
        self._report_now.set()
        self._blocks.close()

    def wake_report(self) -> None:
        """Report the pods' states at once."""
        self._report_now.set()

    def say_goodbye(self, report: NodeReport, *, patience_s: float = 0.0) -> bool:
        """Close, and report that this client ends; return whether the server knows.

        A report under way must come first: after the goodbye it would register the node again.

        Args:
            patience_s: for how long it is tried again where the server is away or cannot write.
        """
        self.close()
        if self._reports.ident is not None:
            self._reports.join(LAST_REPORT_S)
        api, backoff = self._make_api(), _backoff()
        deadline = time.monotonic() + patience_s
        while True:
            try:
                answer = api.node_report(report)
            except Retryable as error:
                trouble: JobServerError = error
            except JobServerError as error:
                trouble, deadline = error, 0.0
            else:
                self._do.reported(report, answer)
                return True
            if time.monotonic() >= deadline:
                logger.warning("the server does not know that this client ends: %s", trouble)
                return False
            time.sleep(backoff.next_s())

    # --- plan

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except JobClientError as error:
            self._do.fatal(error)
        # The outermost loop of this thread: without it the client would lose the server unnoticed.
        except Exception as error:
            logger.exception("the conversation with the job server failed")
            self._do.fatal(FatalError(f"internal error: {error}"))

    def _follow_plan(self) -> None:
        api, backoff = self._make_api(), _backoff()
        while not self._closing.is_set():
            try:
                self._next_plan(api)
                backoff.reset()
            except NotFound:
                self._register_again("the server does not know this node")
            except Retryable as error:
                self._register_again(f"the server is away, pods go on: {error}")
                self._closing.wait(max(backoff.next_s(), min(error.delay_s, 1.0) / 2))
            except Rejected as error:
                self._refused(error)
                self._closing.wait(max(1.0, backoff.next_s()))
                if isinstance(error, Unauthorized):
                    api = self._make_api()  # the token's file may have the server's new one

    def _next_plan(self, api: NodeApi) -> None:
        known = self._current()
        sent_at = time.monotonic()
        if known is None:
            self._register(api)
            return
        node = self._registered_as()
        plan = api.node_plan(node.node_id, known.revision, POLL_S, node.client)
        self._do.contact(sent_at)
        if plan.server_id != known.server_id:
            self._register_again("the server has restarted")
        else:
            self._accept(plan)
        if plan.revision == known.revision and time.monotonic() - sent_at < 1.0:
            self._closing.wait(1.0)  # too many poll: it answered without waiting

    def _register(self, api: NodeApi) -> None:
        node = self._do.node()
        if self._ports is not None:
            node = replace(node, port_low=self._ports[0], port_high=self._ports[1])
        if self._closing.is_set():  # asking the hardware may have taken its time
            return
        sent_at = time.monotonic()
        try:
            plan = api.register_node(node)
        except Conflict as error:
            ports_taken = not self._ever and str(error).startswith("port_low")
            block = self._blocks.next() if ports_taken else None
            if block is None:
                raise
            self._ports = block
            logger.info("ports %d-%d: %s; trying others", node.port_low, node.port_high, error)
            return
        self._do.contact(sent_at)
        if not self._ever or self._node != node:
            logger.info(
                "registered as node %s at %s: %d %s slots (%d usable), ports %d-%d",
                node.node_id, node.addr, len(node.slots), node.slots[0].kind.value,
                sum(slot.usable for slot in node.slots), node.port_low, node.port_high,
            )  # fmt: skip
        with self._lock:
            self._node, self._ever = node, True
        self._accept(plan)
        self._registered.set()
        self._report_now.set()

    def _registered_as(self) -> Node:
        with self._lock:
            assert self._node is not None
            return self._node

    def _current(self) -> NodePlan | None:
        with self._lock:
            return self._plan

    def _accept(self, plan: NodePlan) -> None:
        with self._lock:
            before = self._plan
            if before and before.server_id == plan.server_id and before.revision > plan.revision:
                return  # the other thread has a newer plan
            self._plan = plan
            self._do.plan(plan)

    def _register_again(self, reason: str) -> None:
        with self._lock:
            first, self._plan = self._plan is not None, None
            self._registered.clear()
        logger.log(logging.WARNING if first else logging.DEBUG, "%s", reason)

    def _refused(self, error: Rejected) -> None:
        """Before the first registration a refusal is fatal; later the pods go on."""
        if self._ever:
            self._register_again(f"the server refuses this node: {error}")
            logger.warning("the server refuses this node, pods go on: %s", error)
        elif isinstance(error, Conflict):
            raise SetupError(f"this node is refused: {error}")
        else:
            raise FatalError(f"--job_server: it refuses this node: {error}")

    # --- reports

    def _keep_reporting(self) -> None:
        api, backoff = self._make_api(), _backoff()
        next_beat = 0.0
        while not self._closing.is_set():
            plan = self._current()
            if plan is None:  # not registered
                self._registered.wait(1.0)
                continue
            self._report_now.clear()
            beat = time.monotonic() >= next_beat
            try:
                sent_at = self._report(api, plan, fresh=beat)
                backoff.reset()
            except Retryable as error:
                logger.debug("report not taken: %s", error)
                self._closing.wait(backoff.next_s())
                continue
            except Rejected as error:
                logger.warning("the server refuses a report: %s", error)
                self._closing.wait(1.0)
                if isinstance(error, Unauthorized):
                    api = self._make_api()
                continue
            if beat:
                next_beat = sent_at + plan.heartbeat_s
            if not self._closing.is_set():
                self._report_now.wait(max(0.0, next_beat - time.monotonic()))

    def _report(self, api: NodeApi, plan: NodePlan, *, fresh: bool) -> float:
        """Report once; return when it was sent. Registers again if the server has forgotten us."""
        report = self._do.report(fresh)
        sent_at = time.monotonic()
        if report is None:
            return sent_at
        if fresh:
            self._register_address(api)
        try:
            answer = api.node_report(report)
        except NotFound:
            server_id = ""
        else:
            server_id = answer.server_id
            self._do.contact(sent_at)
            self._do.reported(report, answer)
        if self._closing.is_set():
            return sent_at
        if server_id != plan.server_id:
            self._register_again("the server has restarted")
            self._register(api)
        elif fresh:
            self._register_changes(api)
        return sent_at

    def _register_address(self, api: NodeApi) -> None:
        """Register again when the node has another address, before the server takes it for back."""
        with self._lock:
            node = self._node
        address = self._do.address()
        if node is not None and address != node.addr:
            logger.warning("the address of this node is %s now, and was %s", address, node.addr)
            self._register(api)

    def _register_changes(self, api: NodeApi) -> None:
        """Register again when a slot has become usable or unusable, or a job by folder has come."""
        with self._lock:
            before = self._node
        if before is None:
            return
        node = self._do.node()
        if node.folders != before.folders:
            logger.info("jobs by folder: %s", ", ".join(node.folders) or "none")
        elif node.slots == before.slots:
            return
        for slot in node.slots:
            if not slot.usable and slot not in before.slots:
                logger.warning("slot %d is not usable: %s", slot.index, slot.reason)
        self._register(api)
