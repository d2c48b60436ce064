"""The job server's API as a Python object, for job clients, launchers, commands and tests.

An `ApiClient` keeps one connection open and belongs to one thread; give each thread its own.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self, TypeVar
from urllib.parse import urlsplit

import requests

from job_server.api import routes, task_wire, wire
from job_server.api.codec import from_json, to_json
from job_server.api.command_line import DEFAULT_PORT
from job_server.api.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    JobServerError,
    NotFound,
    Rejected,
    Retryable,
    ServerAway,
    Unauthorized,
)
from job_server.api.routes import Route

__all__ = [
    "ApiClient",
    "ApiError",
    "BadRequest",
    "Conflict",
    "Forbidden",
    "Gone",
    "NotFound",
    "Rejected",
    "Retryable",
    "ServerAway",
    "Unauthorized",
]

A = TypeVar("A")
P = TypeVar("P")

ApiError = JobServerError  # its name for those who only call

CONNECT_TIMEOUT_S = 5.0
_AGAIN_S = 1.0
_GATEWAY_TIMEOUT = 504
_LEAST_POLL_S = 1.0  # a proxy that waits for less is no way to a server
MAX_NAME_CHARS = 200  # of a metric; with MAX_METRICS far below what a body may hold
_REJECTED: Mapping[int, type[Rejected]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
}
# Unless they come in a job server's words: they are of what stands before it, such as a proxy that
# has no route while the server is started again, or that bounds how often one may ask.
_OF_PROXIES = frozenset({404, 408, 410, 425, 429})


class ApiClient:
    """One method per route.

    Raises (all methods):
        ServerAway: no answer, or none of ours; try again later.
        Rejected: the server refused (see job_server.api.errors for the kinds); its text says why.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 15.0) -> None:
        """Connect lazily.

        Args:
            url: `http://HOST:PORT`; `HOST:PORT` means the same.
            token: the server's; None: it has none.
            timeout_s: for an answer, beyond what a long poll waits.

        Raises:
            ValueError: `url` is no URL of a server.
        """
        self.url = server_url(url)
        self.patience_s = 0.0  # for a server that is away: what only reads is asked again so long
        self._longest_poll_s = math.inf  # that a proxy before the server waits for
        self._timeout_s = timeout_s
        self._session = requests.Session()
        # Proxies of the environment are never used for our own calls, nor is ~/.netrc.
        self._session.trust_env = False
        # Of a company's own authority, say; as OpenSSL and curl have it.
        self._session.verify = os.environ.get("SSL_CERT_FILE") or True
        self.use_token(token)

    def use_token(self, token: str | None) -> None:
        """Show this token from now on; None: none."""
        self._session.headers.pop("Authorization", None)
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- the server -----------------------------------------------------------------------------

    def health(self) -> wire.Health:
        return self._call(routes.HEALTH)

    def page(self) -> str:
        """Return the status page's HTML, as a copy to keep."""
        return self._request("GET", routes.PAGE.path, {"refresh": 0}).text

    def page_link(self) -> str:
        """Return a URL that opens the status page in a browser, once."""
        return self.url + self._call(routes.PAGE_LINK).path

    # --- jobs, for users ------------------------------------------------------------------------

    def jobs(self) -> tuple[wire.JobStatus, ...]:
        return self._call(routes.LIST_JOBS).jobs

    def submit(self, spec: wire.JobSpec) -> wire.JobStatus:
        """Add a job. Conflict: another spec has its id; the same spec again is no error.

        BadRequest: also where the server is of a version before, and does not know all that is set.
        """
        self._check_known(spec)
        return self._call(routes.SUBMIT, body=spec)

    def _check_known(self, spec: wire.JobSpec) -> None:
        """Refuse what the server would leave out in silence: fields of versions after its own.

        Raises:
            BadRequest: there is such a field.
        """
        usual = wire.encode(wire.JobSpec(job_id=spec.job_id))
        given = [name for name, value in wire.encode(spec).items() if value != usual[name]]
        try:
            described = self._call(routes.OPENAPI)["components"]["schemas"]["JobSpec"]["properties"]
        except (NotFound, LookupError):  # it does not say what it knows
            return
        unknown = [name for name in given if name not in described]
        if unknown:
            raise BadRequest(
                f"{', '.join(unknown)}: the job server at {self.url} is of a version that does not "
                "know this; update it, or leave it out"
            )

    def preview(self, spec: wire.JobSpec) -> list[str]:
        """Return what the job's change script would do, as lines."""
        return list(self._call(routes.PREVIEW, body=spec).timeline)

    def status(self, job_id: str) -> wire.JobStatus:
        return self._call(routes.GET_JOB, job_id)

    def watch(self, job_id: str, revision: int, timeout_s: float) -> wire.JobStatus:
        """Return the status as soon as its revision is not `revision`, else after `timeout_s`."""
        return self._poll(routes.GET_JOB, job_id, revision=revision, timeout_s=timeout_s)

    def events(
        self, job_id: str, *, after: int = 0, limit: int = 100, timeout_s: float = 0.0
    ) -> tuple[wire.JobEvent, ...]:
        """Return events whose number is above `after`, oldest first; wait if there are none."""
        query = {"after": after, "limit": limit, "timeout_s": timeout_s}
        return self._call(routes.EVENTS, job_id, query=query, wait_s=timeout_s).events

    def resize(self, job_id: str, pods: int | None, *, assume_dead: bool = False) -> wire.JobStatus:
        """Change the number of pods; None: that of teachers follows the demand again."""
        return self._call(
            routes.RESIZE, job_id, body=wire.Resize(pods=pods, assume_dead=assume_dead)
        )

    def pause(self, job_id: str) -> wire.JobStatus:
        return self._call(routes.PAUSE, job_id)

    def resume(self, job_id: str) -> wire.JobStatus:
        return self._call(routes.RESUME, job_id)

    def stop(self, job_id: str, *, discard: bool = False) -> wire.JobStatus:
        """End the job once its newest state is written; `discard`: at once, without that."""
        return self._call(routes.STOP, job_id, query={"discard": int(discard)})

    def delete(self, job_id: str, *, discard: bool = False) -> wire.JobStatus:
        """Stop the job, as `stop`, and have it forgotten when it has ended."""
        return self._call(routes.DELETE, job_id, query={"discard": int(discard)})

    def kill(
        self, job_id: str, *, pod_id: str | None = None, rank: int | None = None
    ) -> wire.JobStatus:
        """SIGKILL a pod or a trainer; name exactly one."""
        return self._call(routes.KILL, job_id, body=wire.Kill(pod_id=pod_id, rank=rank))

    # --- services, for discovery ----------------------------------------------------------------

    def demand(self, demand: wire.Demand) -> wire.DemandAnswer:
        """Report what the students of a service need; NotFound: no job has its teachers."""
        return self._call(routes.DEMAND, demand.service, body=demand)

    # --- nodes, for job clients -----------------------------------------------------------------

    def nodes(self) -> tuple[wire.NodeStatus, ...]:
        return self._call(routes.LIST_NODES).nodes

    def limit_node(
        self, node_id: str, slots: int | None, *, drain: bool = False, also: Sequence[str] = ()
    ) -> wire.NodeStatus:
        """Let shared jobs have at most so many slots of a node; None: all. NotFound: no such.

        Args:
            drain: the pods of all jobs leave the node; `slots` is 0.
            also: further nodes, limited so at the same time: jobs leave all of them by one change.
        """
        limit = wire.NodeLimit(slots=slots, drain=drain, also=tuple(also))
        return self._call(routes.NODE_LIMIT, node_id, body=limit)

    def order_slot(self, node_id: str, order: wire.SlotOrder) -> wire.NodeStatus:
        """Put a slot in quarantine, or take it back; Conflict: what is wrong lasts."""
        return self._call(routes.SLOT_ORDER, node_id, body=order)

    def sharing(self) -> wire.Sharing:
        """Return how jobs share the cluster."""
        return self._call(routes.SHARING)

    def register_node(self, node: wire.Node) -> wire.NodePlan:
        """Register; Conflict: another client has its id, or uses its ports on the same address."""
        return self._call(routes.REGISTER_NODE, body=node)

    def node_plan(
        self, node_id: str, revision: int = -1, timeout_s: float = 0, client: str = ""
    ) -> wire.NodePlan:
        """Return the plan as soon as its revision is not `revision`; NotFound: register again.

        Args:
            client: who asks, as in Node; "": whoever has the node.
        """
        return self._poll(
            routes.NODE_PLAN, node_id, revision=revision, timeout_s=timeout_s, client=client
        )

    def node_report(self, report: wire.NodeReport) -> wire.Acknowledgement:
        """Send a heartbeat; NotFound: register again."""
        return self._call(routes.NODE_REPORT, report.node_id, body=report)

    # --- queues of tasks, for readers -----------------------------------------------------------

    def queues(self) -> tuple[task_wire.TaskQueueStatus, ...]:
        return self._call(routes.LIST_QUEUES).queues

    def make_queue(self, spec: task_wire.TaskQueueSpec) -> task_wire.TaskQueueStatus:
        """Make a queue. Conflict: another one has its name; the same one again is no error."""
        return self._call(routes.MAKE_QUEUE, body=spec)

    def queue(self, name: str) -> task_wire.TaskQueueStatus:
        return self._call(routes.GET_QUEUE, name)

    def delete_queue(self, name: str) -> task_wire.TaskQueueStatus:
        return self._call(routes.DELETE_QUEUE, name)

    def lease_task(self, name: str, asked: task_wire.LeaseAsked) -> task_wire.Lease:
        """Return a task, or why there is none; NotFound: the queue was deleted."""
        return self._call(routes.LEASE_TASK, name, body=asked)

    def report_task(self, name: str, report: task_wire.TaskReport) -> bool:
        """Report on a task; return whether it is still the reader's."""
        return self._call(routes.REPORT_TASK, name, body=report).held

    # --- pods, for launchers --------------------------------------------------------------------

    def attach(self, job_id: str, pod_id: str, attach: wire.Attach) -> wire.PodOrders:
        """Report all that a launcher knows; Gone: the pod is not wanted."""
        return self._call(routes.ATTACH, job_id, pod_id, body=attach)

    def orders(
        self, job_id: str, pod_id: str, revision: int = -1, timeout_s: float = 0
    ) -> wire.PodOrders:
        """Return the orders as soon as their revision is not `revision`; Gone: as attach."""
        return self._poll(routes.ORDERS, job_id, pod_id, revision=revision, timeout_s=timeout_s)

    def report(self, job_id: str, pod_id: str, report: wire.PodReport) -> str:
        """Send a report; return the server's id.

        Metrics that are not finite are left out: JSON has no such numbers, and a loss of NaN must
        not lose the report. Nor must too many metrics.
        """
        if report.metrics is not None:
            sent = (
                (name[:MAX_NAME_CHARS], value)
                for name, value in report.metrics.items()
                if math.isfinite(value)
            )
            report = replace(report, metrics=dict(itertools.islice(sent, wire.MAX_METRICS)))
        if report.metric_epochs is not None:
            named = ((name[:MAX_NAME_CHARS], at) for name, at in report.metric_epochs.items())
            report = replace(report, metric_epochs=dict(itertools.islice(named, wire.MAX_METRICS)))
        return self._call(routes.REPORT, job_id, pod_id, body=report).server_id

    def query_pods(self, job_id: str) -> wire.OriginalPods:
        """Return the pods of a job's running stage, as clients of the original ask for them."""
        return self._call(routes.QUERY_PODS, query={"job_id": job_id})

    # --- HTTP -----------------------------------------------------------------------------------

    def _poll(self, route: Route[P], *ids: str, revision: int, timeout_s: float, **more: str) -> P:
        query: dict[str, float | str] = {"revision": revision, "timeout_s": timeout_s, **more}
        return self._call(route, *ids, query=query, wait_s=timeout_s)

    def _call(
        self,
        route: Route[A],
        *ids: str,
        query: Mapping[str, float | str] | None = None,
        body: wire.Message | None = None,
        wait_s: float = 0.0,
    ) -> A:
        response = self._request(route.method, route.url(*ids), query, body, wait_s)
        try:
            answer = from_json(route.answer, response.content)
        except wire.WireError as error:
            raise ServerAway(
                f"{self.url} answers, but not as a job server of this version does: {error}"
            ) from None
        if "Retry-After" in response.headers and wait_s and _is_old(answer, query or {}):
            # So many poll that the server did not wait for news: the waiting is done here.
            time.sleep(min(_retry_after_s(response), wait_s))
        return answer

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, float | str] | None = None,
        body: wire.Message | None = None,
        wait_s: float = 0.0,
    ) -> requests.Response:
        deadline = time.monotonic() + wait_s + self.patience_s
        while True:
            if wait_s > self._longest_poll_s:
                wait_s = self._longest_poll_s
                query = {**(query or {}), "timeout_s": wait_s}
            began = time.monotonic()
            try:
                return self._request_once(method, path, query, body, wait_s)
            except ServerAway as error:
                waited_s = time.monotonic() - began
                if error.status == _GATEWAY_TIMEOUT and _LEAST_POLL_S < waited_s < 1.2 * wait_s:
                    # A proxy has given up a poll, which says nothing of the server: it may have
                    # answered just then. If it gives up a shorter one as late, none is there.
                    self._longest_poll_s = 0.8 * waited_s
                    continue
                if method != "GET" or not self.patience_s or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def _request_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, float | str] | None,
        body: wire.Message | None,
        wait_s: float,
    ) -> requests.Response:
        try:
            response = self._session.request(
                method,
                self.url + path,
                params=query,
                data=None if body is None else to_json(body),
                headers=None if body is None else {"Content-Type": "application/json"},
                timeout=(CONNECT_TIMEOUT_S, self._timeout_s + wait_s),
                allow_redirects=False,
            )
        except OSError as error:  # all of requests' are, and that SSL_CERT_FILE cannot be read
            text = f"no answer from {self.url}: {_cause(error)}"
            if isinstance(error, requests.exceptions.SSLError):
                text += " (SSL_CERT_FILE names the certificates to check against)"
            raise ServerAway(text) from error
        if response.ok and not response.is_redirect:
            return response
        told = _told(response)
        text = told or f"HTTP {response.status_code} {response.reason}"
        if response.is_redirect:  # never followed: a POST would become a GET
            text += f", to {response.headers['Location'][:200]}"
        if told is not None or response.status_code not in _OF_PROXIES:
            refusal = text if told else f"{self.url}: {text}{_of_proxy(response.status_code)}"
            if response.status_code in _REJECTED:
                raise _REJECTED[response.status_code](refusal)
            if 400 <= response.status_code < 500:
                raise BadRequest(refusal, response.status_code)
        away = ServerAway(f"{self.url}: {text}", _retry_after_s(response))
        away.answers = response.status_code == 503 and told is not None
        away.status = response.status_code
        raise away


def server_url(text: str) -> str:
    """Return `text` as http://HOST:PORT; HOST alone has the usual port.

    Raises:
        ValueError: it is no server's URL.
    """
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        name = parts.hostname or ""
        labels = name.strip().removesuffix(".").split(".")
        valid = parts.scheme in ("http", "https") and parts.port != 0
        valid = valid and all(1 <= len(label) <= 63 for label in labels)  # as DNS has them
        if parts.port is None and name.isdecimal() and int(name) < 2**16:
            valid = False  # a port without its host; containers have longer numbers as names
        port = f":{DEFAULT_PORT}" if "://" not in text and parts.port is None else ""
    except ValueError:
        valid, port = False, ""
    odd = parts.path.strip("/") or parts.query or parts.fragment or len(url.split()) != 1
    if not valid or odd:
        raise ValueError(f"{text!r} is no server's URL; write HOST:PORT or http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{port}"


def _is_old(answer: object, query: Mapping[str, float | str]) -> bool:
    """Whether a poll's answer is what the caller has; events have no revision, and count as old."""
    return getattr(answer, "revision", None) == query.get("revision")


def _told(response: requests.Response) -> str | None:
    """Return what a job server says of a refusal; None: it is not one of its answers."""
    try:
        data = response.json()
    except requests.JSONDecodeError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        return str(data["error"])
    return None


def _of_proxy(status: int) -> str:
    """Return what is said of a refusal that is not in a job server's words."""
    remedy = ": have it pass on 2 MiB (client_max_body_size of nginx)" if status == 413 else ""
    return f", which are no job server's words, but of a proxy before it, say{remedy}"


def _retry_after_s(response: requests.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0


def _cause(error: BaseException) -> str:
    """Return the innermost reason: `Connection refused`, not five layers around it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__
