"""The OpenAPI description of every route, made of the routes and the wire types."""

from typing import Any

import msgspec

from job_server.api import wire
from job_server.api.codec import from_json, to_json
from job_server.api.routes import ROUTES, QueryParameter, Route

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_TYPES = {int: "integer", float: "number", str: "string"}


def build_openapi() -> Schema:
    """Return the whole description as plain JSON types."""
    kinds: set[type[Any]] = {wire.ErrorText, *(route.answer for route in ROUTES)}
    kinds |= {route.body for route in ROUTES if route.body is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    found, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, found, strict=True))
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe(route, schemas)
    description = {
        "openapi": "3.1.0",
        "info": {
            "title": "EDL job server",
            "version": "1",
            "description": "Errors are {error: text}; the text names the field and the remedy.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],  # a server on loopback may run without a token
    }
    return from_json(Schema, to_json(description))  # some defaults are tuples


def _describe(route: Route[Any], schemas: dict[type, Schema]) -> Schema:
    media = "text/html" if route.answer is str else "application/json"
    good = {"description": "as asked", "content": {media: {"schema": schemas[route.answer]}}}
    error = {
        "description": "refused",
        "content": {"application/json": {"schema": schemas[wire.ErrorText]}},
    }
    responses = {"200": good}
    if route.creates:
        responses["201"] = good
    # 503: the database cannot be written; the request may be repeated as it is.
    for status in (400, 401, 403, *route.errors, 503):
        responses[str(status)] = error
    described: Schema = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": responses,
    }
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.ids
    ]
    if in_path or route.query:
        described["parameters"] = [*in_path, *map(_query_parameter, route.query)]
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _query_parameter(parameter: QueryParameter) -> Schema:
    schema: Schema = {"type": _TYPES[parameter.kind]}
    if parameter.kind is not str:
        schema |= {"minimum": parameter.low, "maximum": parameter.high}
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.summary,
        "schema": schema,
    }
