"""The server's routes, each written once: the server, its client, OpenAPI and docs/rest.md follow.

Standard library and the wire types only.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from job_server.api import task_wire, wire
from job_server.api.errors import BadRequest

A = TypeVar("A")

MAX_EVENTS = 1000  # in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """What may follow the `?` of a URL: a number within bounds, or a text."""

    name: str
    summary: str
    kind: type[int] | type[float] | type[str]
    low: float = 0
    high: float = 2**53
    default: float | None = 0  # None: of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[A]):
    """One method of one path."""

    name: str  # of the operation in OpenAPI, and of its handler in `server.app`
    method: str
    path: str  # ids in braces: /jobs/{job_id}
    who: str  # asks
    summary: str
    answer: type[A]  # a message; str: HTML; dict: an object of its own
    body: type[Any] | None = None  # None: it takes none
    query: tuple[QueryParameter, ...] = ()
    creates: bool = False  # 201 for something new, 200 for what was there
    errors: tuple[int, ...] = ()  # beside 400, 401, 403 and 503, which any route may answer

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the names of the path's ids, in order."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))

    def url(self, *ids: str) -> str:
        """Return the path with these ids in it.

        Raises:
            BadRequest: one of them would lead to another route.
        """
        return self.path.format(**dict(zip(self.ids, map(_part, ids), strict=True)))


def _part(text: str) -> str:
    # A dot-only part would be taken for a step in the path, and leave the route.
    if not text or set(text) == {"."}:
        raise BadRequest(f"{text!r} is not an id")
    return quote(text, safe="")


_REVISION = QueryParameter(
    name="revision",
    summary="Answer as soon as ours is not this one; -1: at once.",
    kind=int,
    low=-1,
    default=-1,
)
_TIMEOUT = QueryParameter(
    name="timeout_s", summary="How long to wait for that.", kind=float, high=wire.MAX_POLL_S
)
_POLL = (_REVISION, _TIMEOUT)
_CLIENT = QueryParameter(
    name="client", summary="Of whom, as in Node: 404 once it is another's.", kind=str, default=None
)
_DISCARD = QueryParameter(
    name="discard",
    summary="1: at once; what is only in memory is not written but lost.",
    kind=int,
    high=1,
)
_JOB = f"{wire.API}/jobs/{{job_id}}"
_POD = f"{_JOB}/pods/{{pod_id}}"
_NODE = f"{wire.API}/nodes/{{node_id}}"
_QUEUE = f"{wire.API}/task_queues/{{name}}"


def _job_action(
    name: str, summary: str, body: type[Any] | None = None, *query: QueryParameter
) -> Route[wire.JobStatus]:
    return Route(
        name=name,
        method="POST",
        path=f"{_JOB}/{name}",
        who="users",
        summary=summary,
        query=query,
        body=body,
        answer=wire.JobStatus,
        errors=(404, 409) if body is None else (404, 409, 413),
    )


HEALTH = Route(
    name="health",
    method="GET",
    path=f"{wire.API}/health",
    who="anyone",
    summary="Is the server there, and is it still the same one? 503: its clock stands still.",
    answer=wire.Health,
)
OPENAPI: Route[dict[str, Any]] = Route(
    name="openapi",
    method="GET",
    path=f"{wire.API}/openapi.json",
    who="anyone",
    summary="The description of all routes.",
    answer=dict,
)
LIST_JOBS = Route(
    name="list_jobs",
    method="GET",
    path=f"{wire.API}/jobs",
    who="users",
    summary="All jobs, in the order of submission.",
    answer=wire.JobList,
)
SUBMIT = Route(
    name="submit",
    method="POST",
    path=f"{wire.API}/jobs",
    who="users",
    summary="Add a job. The same spec again is no error; another one under a taken id is.",
    body=wire.JobSpec,
    answer=wire.JobStatus,
    creates=True,
    errors=(409, 413),
)
PREVIEW = Route(
    name="preview",
    method="POST",
    path=f"{wire.API}/jobs/preview",
    who="users",
    summary="What a job's change script would do, without adding the job.",
    body=wire.JobSpec,
    answer=wire.ScriptPreview,
    errors=(413,),
)
GET_JOB = Route(
    name="get_job",
    method="GET",
    path=_JOB,
    who="users",
    summary="One job; a long poll with `timeout_s`.",
    query=_POLL,
    answer=wire.JobStatus,
    errors=(404,),
)
DELETE = Route(
    name="delete",
    method="DELETE",
    path=_JOB,
    who="users",
    summary="Stop a job, and forget it when it has ended.",
    query=(_DISCARD,),
    answer=wire.JobStatus,
    errors=(404,),
)
RESIZE = _job_action(
    "resize", "Change the number of pods; null: of teachers, by demand.", wire.Resize
)
PAUSE = _job_action("pause", "Write the newest state and free the slots, or go on and say why.")
RESUME = _job_action("resume", "Go on after a pause.")
STOP = _job_action("stop", "Write the newest state and end the job.", None, _DISCARD)
KILL = _job_action("kill", "SIGKILL a pod or a trainer, as a test.", wire.Kill)
EVENTS = Route(
    name="events",
    method="GET",
    path=f"{_JOB}/events",
    who="users",
    summary="A job's events, oldest first; with `timeout_s` it waits for one after `after`.",
    query=(
        QueryParameter(name="after", summary="Only events with a higher number.", kind=int),
        QueryParameter(
            name="limit", summary="At most so many.", kind=int, low=1, high=MAX_EVENTS, default=100
        ),
        _TIMEOUT,
    ),
    answer=wire.EventList,
    errors=(404,),
)
DEMAND = Route(
    name="demand",
    method="POST",
    path=f"{wire.API}/services/{{name}}/demand",
    who="discovery",
    summary="What the students of a service report; the number of its teachers follows it.",
    body=wire.Demand,
    answer=wire.DemandAnswer,
    errors=(404, 413),
)
LIST_NODES = Route(
    name="list_nodes",
    method="GET",
    path=f"{wire.API}/nodes",
    who="users",
    summary="All registered nodes.",
    answer=wire.NodeList,
)
NODE_LIMIT = Route(
    name="limit_node",
    method="POST",
    path=f"{_NODE}/limit",
    who="users",
    summary="How many slots of a node shared jobs may have; null: all. It outlives the server.",
    body=wire.NodeLimit,
    answer=wire.NodeStatus,
    errors=(404, 413),
)
SLOT_ORDER = Route(
    name="order_slot",
    method="POST",
    path=f"{_NODE}/quarantine",
    who="users",
    summary="Put a slot in quarantine, or take it back; 409: it cannot be. It outlives the server.",
    body=wire.SlotOrder,
    answer=wire.NodeStatus,
    errors=(404, 409, 413),
)
SHARING = Route(
    name="sharing",
    method="GET",
    path=f"{wire.API}/sharing",
    who="users",
    summary="How jobs share the cluster: nodes, and the shared jobs in the queue's order.",
    answer=wire.Sharing,
)
REGISTER_NODE = Route(
    name="register",
    method="POST",
    path=f"{wire.API}/nodes",
    who="job client",
    summary="Add a node, or replace it; 409: another client has its id, or its ports.",
    body=wire.Node,
    answer=wire.NodePlan,
    errors=(409, 413),
)
NODE_PLAN = Route(
    name="plan",
    method="GET",
    path=f"{_NODE}/plan",
    who="job client",
    summary="The pods of a node; a long poll. 404: register again.",
    query=(*_POLL, _CLIENT),
    answer=wire.NodePlan,
    errors=(404,),
)
NODE_REPORT = Route(
    name="report_node",
    method="POST",
    path=f"{_NODE}/report",
    who="job client",
    summary="A node's heartbeat. 404: register again.",
    body=wire.NodeReport,
    answer=wire.Acknowledgement,
    errors=(404, 413),
)
ATTACH = Route(
    name="attach",
    method="POST",
    path=f"{_POD}/attach",
    who="launcher",
    summary="All that a launcher knows. 410: the pod is not wanted, exit.",
    body=wire.Attach,
    answer=wire.PodOrders,
    errors=(404, 410, 413),
)
ORDERS = Route(
    name="orders",
    method="GET",
    path=f"{_POD}/orders",
    who="launcher",
    summary="What a pod should do; a long poll. 410: as above.",
    query=_POLL,
    answer=wire.PodOrders,
    errors=(404, 410),
)
REPORT = Route(
    name="report",
    method="POST",
    path=f"{_POD}/report",
    who="launcher",
    summary="A launcher's report. 410: as above.",
    body=wire.PodReport,
    answer=wire.Acknowledgement,
    errors=(404, 410, 413),
)
LIST_QUEUES = Route(
    name="list_queues",
    method="GET",
    path=f"{wire.API}/task_queues",
    who="users",
    summary="All queues of tasks.",
    answer=task_wire.TaskQueueList,
)
MAKE_QUEUE = Route(
    name="make_queue",
    method="POST",
    path=f"{wire.API}/task_queues",
    who="readers",
    summary="Make a queue of tasks. The same one again is no error; another one under its name is.",
    body=task_wire.TaskQueueSpec,
    answer=task_wire.TaskQueueStatus,
    errors=(409, 413),
)
GET_QUEUE = Route(
    name="get_queue",
    method="GET",
    path=_QUEUE,
    who="users",
    summary="How far the tasks of a queue are.",
    answer=task_wire.TaskQueueStatus,
    errors=(404,),
)
DELETE_QUEUE = Route(
    name="delete_queue",
    method="DELETE",
    path=_QUEUE,
    who="users",
    summary="Forget a queue; its readers end with an error.",
    answer=task_wire.TaskQueueStatus,
    errors=(404,),
)
LEASE_TASK = Route(
    name="lease_task",
    method="POST",
    path=f"{_QUEUE}/lease",
    who="readers",
    summary="A task to read, if there is one.",
    body=task_wire.LeaseAsked,
    answer=task_wire.Lease,
    errors=(404, 413),
)
REPORT_TASK = Route(
    name="report_task",
    method="POST",
    path=f"{_QUEUE}/report",
    who="readers",
    summary="A task is still read, was read, cannot be read, or is given back.",
    body=task_wire.TaskReport,
    answer=task_wire.TaskAnswer,
    errors=(404, 413),
)
QUERY_PODS = Route(
    name="query_pods",
    method="GET",
    path="/rest/1.0/get/query_pods",
    who="original clients",
    summary="The pods of the running stage.",
    query=(
        QueryParameter(
            name="job_id",
            summary="May be left out where there is only one job.",
            kind=str,
            default=None,
        ),
    ),
    answer=wire.OriginalPods,
    errors=(404,),
)
RUN_TIME = Route(
    name="job_runtime_static",
    method="POST",
    path="/rest/1.0/post/job_runtime_static",
    who="original clients",
    summary="A client's estimate of the job's run time.",
    body=wire.RunTime,
    answer=wire.RunTime,
    errors=(404, 413),
)
PAGE_LINK = Route(
    name="page_link",
    method="POST",
    path="/api/v1/page_link",
    who="users",
    summary="A link that opens the status page in a browser, once.",
    answer=wire.PageLink,
)
OPEN_PAGE = Route(
    name="open_page",
    method="GET",
    path="/open/{code}",
    who="people",
    summary="Such a link: it answers with a cookie and leads to the status page.",
    answer=str,
)
PAGE = Route(
    name="page",
    method="GET",
    path="/",
    who="people",
    summary="The status page.",
    query=(
        QueryParameter(
            name="refresh",
            summary="0: a copy to keep, which does not ask again.",
            kind=int,
            high=1,
            default=1,
        ),
    ),
    answer=str,
)

ROUTES: tuple[Route[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Route)
)


def markdown_table() -> str:
    """Return the table of docs/rest.md."""
    lines = ["| route | body | answer | asked by | |", "|---|---|---|---|---|"]
    others = {OPENAPI.name: "OpenAPI", OPEN_PAGE.name: "HTML", PAGE.name: "HTML"}
    for route in ROUTES:
        query = "&".join(parameter.name for parameter in route.query)
        path = route.path + (f"?{query}" if query else "")
        body = "" if route.body is None else f"`{route.body.__name__}`"
        answer = others.get(route.name, f"`{route.answer.__name__}`")
        cells = (f"`{route.method} {path}`", body, answer, route.who, route.summary)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
