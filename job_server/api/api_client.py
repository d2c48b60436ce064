"""The job server's API as a Python object, for job clients, launchers, commands and tests.

An `ApiClient` keeps one connection open and belongs to one thread; give each thread its own.
"""

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, TypedDict, TypeVar
from urllib.parse import quote, urlsplit

import requests

from job_server.api import wire
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

__all__ = [
    "ApiClient",
    "ApiError",
    "BadRequest",
    "Conflict",
    "Forbidden",
    "Gone",
    "Health",
    "NotFound",
    "Rejected",
    "Retryable",
    "ServerAway",
    "Unauthorized",
]

T = TypeVar("T")

ApiError = JobServerError  # its name for those who only call

CONNECT_TIMEOUT_S = 5.0
MAX_METRICS, MAX_NAME_CHARS = 500, 200  # of one report, far below what a body may hold
_REJECTED: Mapping[int, type[Rejected]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
}


class Health(TypedDict):
    server_id: str  # changes when the server restarts
    version: str
    now: float  # seconds since 1970


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
        self._timeout_s = timeout_s
        self._session = requests.Session()
        # Proxies of the environment are never used for our own calls, nor is ~/.netrc.
        self._session.trust_env = False
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- the server -----------------------------------------------------------------------------

    def health(self) -> Health:
        data = self._get("/health")
        if "server_id" not in data:
            raise ServerAway(f"{self.url} answers, but is no job server")
        return Health(
            server_id=str(data["server_id"]),
            version=str(data.get("version", "")),
            now=float(data.get("now", 0.0)),
        )

    def page(self) -> str:
        """Return the status page's HTML."""
        return self._request("GET", "/").text

    # --- jobs, for users ------------------------------------------------------------------------

    def jobs(self) -> tuple[wire.JobStatus, ...]:
        return _items(self._get("/jobs"), "jobs", wire.JobStatus)

    def submit(self, spec: wire.JobSpec) -> wire.JobStatus:
        """Add a job. Conflict: another spec has its id; the same spec again is no error."""
        return _decode(wire.JobStatus, self._post("/jobs", spec))

    def preview(self, spec: wire.JobSpec) -> list[str]:
        """Return what the job's change script would do, as lines."""
        return [str(line) for line in self._post("/jobs/preview", spec)["timeline"]]

    def status(self, job_id: str) -> wire.JobStatus:
        return _decode(wire.JobStatus, self._get(f"/jobs/{_part(job_id)}"))

    def watch(self, job_id: str, revision: int, timeout_s: float) -> wire.JobStatus:
        """Return the status as soon as its revision is not `revision`, else after `timeout_s`."""
        return _decode(wire.JobStatus, self._poll(f"/jobs/{_part(job_id)}", revision, timeout_s))

    def events(
        self, job_id: str, *, after: int = 0, limit: int = 100, timeout_s: float = 0.0
    ) -> tuple[wire.JobEvent, ...]:
        """Return events whose number is above `after`, oldest first; wait if there are none."""
        query = {"after": after, "limit": limit, "timeout_s": timeout_s}
        data = self._get(f"/jobs/{_part(job_id)}/events", query, wait_s=timeout_s)
        return _items(data, "events", wire.JobEvent)

    def resize(self, job_id: str, pods: int | None, *, assume_dead: bool = False) -> wire.JobStatus:
        """Change the number of pods; None: that of teachers follows the demand again."""
        return self._ask(job_id, "resize", wire.Resize(pods=pods, assume_dead=assume_dead))

    def pause(self, job_id: str) -> wire.JobStatus:
        return self._ask(job_id, "pause")

    def resume(self, job_id: str) -> wire.JobStatus:
        return self._ask(job_id, "resume")

    def stop(self, job_id: str, *, discard: bool = False) -> wire.JobStatus:
        """End the job once its newest state is written; `discard`: at once, without that."""
        return self._ask(job_id, f"stop{_discard(discard)}")

    def delete(self, job_id: str, *, discard: bool = False) -> wire.JobStatus:
        """Stop the job, as `stop`, and have it forgotten when it has ended."""
        path = f"/jobs/{_part(job_id)}{_discard(discard)}"
        return _decode(wire.JobStatus, self._json("DELETE", path))

    def kill(
        self, job_id: str, *, pod_id: str | None = None, rank: int | None = None
    ) -> wire.JobStatus:
        """SIGKILL a pod or a trainer; name exactly one."""
        return self._ask(job_id, "kill", wire.Kill(pod_id=pod_id, rank=rank))

    def _ask(self, job_id: str, verb: str, body: object = None) -> wire.JobStatus:
        return _decode(wire.JobStatus, self._post(f"/jobs/{_part(job_id)}/{verb}", body))

    # --- services, for discovery ----------------------------------------------------------------

    def demand(self, demand: wire.Demand) -> wire.DemandAnswer:
        """Tell what the students of a service report; NotFound: no job has its teachers."""
        path = f"/services/{_part(demand.service)}/demand"
        return _decode(wire.DemandAnswer, self._post(path, demand))

    # --- nodes, for job clients -----------------------------------------------------------------

    def nodes(self) -> tuple[wire.NodeStatus, ...]:
        return _items(self._get("/nodes"), "nodes", wire.NodeStatus)

    def register_node(self, node: wire.Node) -> wire.NodePlan:
        """Register; Conflict: another node on the same address deals the same ports."""
        return _decode(wire.NodePlan, self._post("/nodes", node))

    def node_plan(self, node_id: str, revision: int = -1, timeout_s: float = 0) -> wire.NodePlan:
        """Return the plan as soon as its revision is not `revision`; NotFound: register again."""
        path = f"/nodes/{_part(node_id)}/plan"
        return _decode(wire.NodePlan, self._poll(path, revision, timeout_s))

    def node_report(self, report: wire.NodeReport) -> str:
        """Send a heartbeat; return the server's id. NotFound: register again."""
        return str(self._post(f"/nodes/{_part(report.node_id)}/report", report)["server_id"])

    # --- pods, for launchers --------------------------------------------------------------------

    def attach(self, job_id: str, pod_id: str, attach: wire.Attach) -> wire.PodOrders:
        """Tell a launcher's whole truth; Gone: the pod is not wanted."""
        return _decode(wire.PodOrders, self._post(f"{_pod(job_id, pod_id)}/attach", attach))

    def orders(
        self, job_id: str, pod_id: str, revision: int = -1, timeout_s: float = 0
    ) -> wire.PodOrders:
        """Return the orders as soon as their revision is not `revision`; Gone: as attach."""
        path = f"{_pod(job_id, pod_id)}/orders"
        return _decode(wire.PodOrders, self._poll(path, revision, timeout_s))

    def report(self, job_id: str, pod_id: str, report: wire.PodReport) -> str:
        """Send a report; return the server's id. Metrics that are no finite numbers are left out:
        JSON has none, and a loss of NaN must not lose the report; nor must too many of them.
        """
        if report.metrics is not None:
            sent = (
                (name[:MAX_NAME_CHARS], value)
                for name, value in report.metrics.items()
                if math.isfinite(value)
            )
            report = replace(report, metrics=dict(itertools.islice(sent, MAX_METRICS)))
        return str(self._post(f"{_pod(job_id, pod_id)}/report", report)["server_id"])

    # --- HTTP -----------------------------------------------------------------------------------

    def _get(self, path: str, query: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> Any:
        return self._json("GET", path, query=query, wait_s=wait_s)

    def _post(self, path: str, body: object = None) -> Any:
        return self._json("POST", path, body=body)

    def _poll(self, path: str, revision: int, timeout_s: float) -> Any:
        query = {"revision": revision, "timeout_s": timeout_s}
        return self._json("GET", path, query=query, wait_s=timeout_s, revision=revision)

    def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        wait_s: float = 0.0,
        revision: int | None = None,
    ) -> Any:
        response = self._request(method, wire.API + path, query=query, body=body, wait_s=wait_s)
        try:
            data = response.json()
        except requests.JSONDecodeError:
            raise ServerAway(f"{self.url} answers, but not as a job server does") from None
        if not isinstance(data, dict):
            raise ServerAway(f"{self.url} answers, but not as a job server does")
        if "Retry-After" in response.headers and wait_s and data.get("revision") == revision:
            # So many poll that the server did not wait for news: the waiting is done here.
            time.sleep(min(_retry_after_s(response), wait_s))
        return data

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        wait_s: float = 0.0,
    ) -> requests.Response:
        try:
            response = self._session.request(
                method,
                self.url + path,
                params=query,
                json=None if body is None else wire.encode(body),
                timeout=(CONNECT_TIMEOUT_S, self._timeout_s + wait_s),
                allow_redirects=False,
            )
        except requests.exceptions.InvalidJSONError as error:
            raise BadRequest(f"body: {error}") from None
        except requests.RequestException as error:
            raise ServerAway(f"no answer from {self.url}: {_cause(error)}") from error
        if response.ok and not response.is_redirect:
            return response
        text = _error_text(response)
        if response.status_code in _REJECTED:
            raise _REJECTED[response.status_code](text)
        if 400 <= response.status_code < 500:
            raise BadRequest(text, response.status_code)
        raise ServerAway(f"{self.url}: {text}", _retry_after_s(response))


def server_url(text: str) -> str:
    """Return `text` as http://HOST:PORT; raise ValueError when it is no such thing."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    odd = parts.path.strip("/") or parts.query or parts.fragment or len(url.split()) != 1
    if not valid or odd:
        raise ValueError(f"{text!r} is no server's URL; write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def _part(text: str) -> str:
    # A dot-only part would be taken for a step in the path, and leave the route.
    if not text or set(text) == {"."}:
        raise BadRequest(f"{text!r} is not an id")
    return quote(text, safe="")


def _discard(asked: bool) -> str:
    return "?discard=1" if asked else ""


def _pod(job_id: str, pod_id: str) -> str:
    return f"/jobs/{_part(job_id)}/pods/{_part(pod_id)}"


def _decode(kind: type[T], data: object) -> T:
    try:
        return wire.decode(kind, data)
    except wire.WireError as error:
        raise ServerAway(f"the server's answer does not fit this version: {error}") from None


def _items(data: Mapping[str, Any], key: str, kind: type[T]) -> tuple[T, ...]:
    return tuple(_decode(kind, item) for item in data.get(key, ()))


def _error_text(response: requests.Response) -> str:
    try:
        data = response.json()
    except requests.JSONDecodeError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        return str(data["error"])
    return f"HTTP {response.status_code} {response.reason}"


def _retry_after_s(response: requests.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0


def _cause(error: BaseException) -> str:
    """Return the innermost reason: `Connection refused`, not five layers around it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__
