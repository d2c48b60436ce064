"""The OpenAPI description of every route, made from the wire types themselves."""

from dataclasses import dataclass
from typing import Any

import msgspec

from job_server.api import wire
from job_server.api.codec import from_json, to_json

Schema = dict[str, Any]

_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_REVISION: Schema = {
    "name": "revision",
    "in": "query",
    "description": "Answer as soon as ours is not this one; -1: at once.",
    "schema": {"type": "integer", "minimum": -1, "default": -1},
}
_TIMEOUT: Schema = {
    "name": "timeout_s",
    "in": "query",
    "description": "How long to wait for that.",
    "schema": {"type": "number", "minimum": 0, "maximum": wire.MAX_POLL_S, "default": 0},
}
_AFTER: Schema = {
    "name": "after",
    "in": "query",
    "description": "Only events with a higher number.",
    "schema": {"type": "integer", "minimum": 0, "default": 0},
}
_LIMIT: Schema = {
    "name": "limit",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
}
_DISCARD: Schema = {
    "name": "discard",
    "in": "query",
    "description": "1: at once; what is only in memory is not written but lost.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 1, "default": 0},
}
_LEGACY_JOB_ID: Schema = {
    "name": "job_id",
    "in": "query",
    "description": "May be left out where there is only one job.",
    "schema": {"type": "string"},
}
_POLL = (_REVISION, _TIMEOUT)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_INTEGER: Schema = {"type": "integer"}
_HEARD = _object(server_id=_STRING)
_RUN_TIME = _object(job_id=_STRING, estimated_run_time=_NUMBER)
_LEGACY_PODS = _object(
    job_id=_STRING,
    job_stage_flag=_INTEGER,
    pods=_list(
        _object(
            pod_id=_STRING,
            running={"type": "boolean"},
            addr=_STRING,
            pod_port=_INTEGER,
            trainer_ports=_list(_INTEGER),
            gpus=_list(_INTEGER),
        )
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route."""

    name: str
    method: str
    path: str  # as OpenAPI writes it: /jobs/{job_id}
    summary: str
    answer: Schema | None  # None: HTML
    body: Schema | None = None  # None: it takes none
    query: tuple[Schema, ...] = ()
    created: bool = False  # 201 for something new, 200 for what was there
    errors: tuple[int, ...] = ()  # beside 400, 401, 403


_JOB = f"{wire.API}/jobs/{{job_id}}"
_POD = f"{_JOB}/pods/{{pod_id}}"
_NODE = f"{wire.API}/nodes/{{node_id}}"
_SERVICE = f"{wire.API}/services/{{name}}"
_STATUS = _ref(wire.JobStatus)


def _on_job(
    name: str, summary: str, body: type | None = None, *, query: tuple[Schema, ...] = ()
) -> Operation:
    return Operation(
        name=name,
        method="post",
        path=f"{_JOB}/{name}",
        summary=summary,
        query=query,
        body=None if body is None else _ref(body),
        answer=_STATUS,
        errors=(404, 409) if body is None else (404, 409, 413),
    )


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="health",
        method="get",
        path=f"{wire.API}/health",
        summary="Is the server there, and is it still the same one?",
        answer=_object(server_id=_STRING, version=_STRING, now=_NUMBER),
    ),
    Operation(
        name="openapi",
        method="get",
        path=f"{wire.API}/openapi.json",
        summary="This description.",
        answer={"type": "object"},
    ),
    Operation(
        name="list_jobs",
        method="get",
        path=f"{wire.API}/jobs",
        summary="All jobs, in the order of submission.",
        answer=_object(jobs=_list(_STATUS)),
    ),
    Operation(
        name="submit",
        method="post",
        path=f"{wire.API}/jobs",
        summary="Add a job. The same spec again is no error; another one under a taken id is.",
        body=_ref(wire.JobSpec),
        answer=_STATUS,
        created=True,
        errors=(409, 413),
    ),
    Operation(
        name="preview",
        method="post",
        path=f"{wire.API}/jobs/preview",
        summary="What a job's change script would do, without adding the job.",
        body=_ref(wire.JobSpec),
        answer=_object(timeline=_list(_STRING)),
        errors=(413,),
    ),
    Operation(
        name="get_job",
        method="get",
        path=_JOB,
        summary="One job; a long poll with timeout_s.",
        query=_POLL,
        answer=_STATUS,
        errors=(404,),
    ),
    Operation(
        name="delete",
        method="delete",
        path=_JOB,
        summary="Stop a job, and forget it when it has ended.",
        query=(_DISCARD,),
        answer=_STATUS,
        errors=(404,),
    ),
    _on_job("resize", "Change the number of pods; null: of teachers, by demand.", wire.Resize),
    _on_job("pause", "Write the newest state and free the slots, or go on and say why."),
    _on_job("resume", "Go on after a pause."),
    _on_job("stop", "Write the newest state and end the job.", query=(_DISCARD,)),
    _on_job("kill", "SIGKILL a pod or a trainer, as a test.", wire.Kill),
    Operation(
        name="events",
        method="get",
        path=f"{_JOB}/events",
        summary="A job's events, oldest first; with timeout_s it waits for one after `after`.",
        query=(_AFTER, _LIMIT, _TIMEOUT),
        answer=_object(events=_list(_ref(wire.JobEvent))),
        errors=(404,),
    ),
    Operation(
        name="demand",
        method="post",
        path=f"{_SERVICE}/demand",
        summary="What the students of a service report; the number of its teachers follows it.",
        body=_ref(wire.Demand),
        answer=_ref(wire.DemandAnswer),
        errors=(404, 413),
    ),
    Operation(
        name="attach",
        method="post",
        path=f"{_POD}/attach",
        summary="A launcher's whole truth.",
        body=_ref(wire.Attach),
        answer=_ref(wire.PodOrders),
        errors=(404, 410, 413),
    ),
    Operation(
        name="orders",
        method="get",
        path=f"{_POD}/orders",
        summary="What a pod should do; a long poll.",
        query=_POLL,
        answer=_ref(wire.PodOrders),
        errors=(404, 410),
    ),
    Operation(
        name="report",
        method="post",
        path=f"{_POD}/report",
        summary="What a launcher tells.",
        body=_ref(wire.PodReport),
        answer=_HEARD,
        errors=(404, 410, 413),
    ),
    Operation(
        name="list_nodes",
        method="get",
        path=f"{wire.API}/nodes",
        summary="All registered nodes.",
        answer=_object(nodes=_list(_ref(wire.NodeStatus))),
    ),
    Operation(
        name="register",
        method="post",
        path=f"{wire.API}/nodes",
        summary="Add a node, or replace what it said before.",
        body=_ref(wire.Node),
        answer=_ref(wire.NodePlan),
        errors=(409, 413),
    ),
    Operation(
        name="plan",
        method="get",
        path=f"{_NODE}/plan",
        summary="The pods of a node; a long poll.",
        query=_POLL,
        answer=_ref(wire.NodePlan),
        errors=(404,),
    ),
    Operation(
        name="report_node",
        method="post",
        path=f"{_NODE}/report",
        summary="A node's heartbeat.",
        body=_ref(wire.NodeReport),
        answer=_HEARD,
        errors=(404, 413),
    ),
    Operation(
        name="query_pods",
        method="get",
        path="/rest/1.0/get/query_pods",
        summary="The original's: the pods of the running stage.",
        query=(_LEGACY_JOB_ID,),
        answer=_LEGACY_PODS,
        errors=(404,),
    ),
    Operation(
        name="job_runtime_static",
        method="post",
        path="/rest/1.0/post/job_runtime_static",
        summary="The original's: a client's estimate of the job's run time.",
        body=_RUN_TIME,
        answer=_RUN_TIME,
        errors=(404, 413),
    ),
    Operation(name="page", method="get", path="/", summary="The status page.", answer=None),
)


def build_openapi() -> Schema:
    """Return the whole description as plain JSON types."""
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "EDL job server",
            "version": "1",
            "description": "Errors are {error: text}; the text names the field and the remedy.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **_component_schemas()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],  # a server on loopback may run without a token
    }


def _describe(operation: Operation) -> Schema:
    if operation.answer is None:
        content = {"text/html": {"schema": _STRING}}
    else:
        content = {"application/json": {"schema": operation.answer}}
    good = {"description": "as asked", "content": content}
    error = {
        "description": "refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    responses = {"200": good}
    if operation.created:
        responses["201"] = good
    # 503: the database cannot be written; the request may be repeated as it is.
    for status in (400, 401, 403, *operation.errors, 503):
        responses[str(status)] = error
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }
    in_path = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": _STRING}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    if in_path or operation.query:
        described["parameters"] = [*in_path, *operation.query]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": operation.body}},
        }
    return described


def _component_schemas() -> dict[str, Schema]:
    """Return a schema for every message and enum of the contract."""
    kinds = [
        kind
        for kind in vars(wire).values()
        if isinstance(kind, type) and kind.__module__ == wire.__name__
    ]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return from_json(dict[str, Schema], to_json(schemas))  # its defaults are tuples
