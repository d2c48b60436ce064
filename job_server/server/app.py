"""The HTTP face of the server: routes that check what comes in and pass it on."""

import contextlib
import gc
import importlib.metadata
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from flask import Flask, Request, Response, render_template, request
from werkzeug.exceptions import HTTPException

from job_server.api import wire
from job_server.api.codec import from_json, to_json
from job_server.api.errors import BadRequest, JobServerError, Rejected, Retryable, Unauthorized
from job_server.cluster.change_script import timeline
from job_server.server.guard import PAGE_PATH, Guard
from job_server.server.openapi import build_openapi
from job_server.server.page import page_context
from job_server.server.polls import JsonReply
from job_server.server.service import JobService
from job_server.training.events import (
    KillAsked,
    PauseAsked,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    StopAsked,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
View = TypeVar("View", bound=Callable[..., Response])

MAX_EVENTS = 1000  # in one answer
_one_at_a_time = threading.Lock()  # or the first to end would enable what the other disabled


def create_app(service: JobService, guard: Guard) -> Flask:
    """Return the WSGI application. `service` is started and closed by the caller."""
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = wire.MAX_BODY_BYTES
    app.url_map.strict_slashes = False
    app.before_request(lambda: guard.check(request))
    with _no_garbage_collection():
        _add_server_routes(app, service)
        _add_job_routes(app, service)
        _add_service_routes(app, service)
        _add_pod_routes(app, service)
        _add_node_routes(app, service)
        _add_legacy_routes(app, service)
        _add_page(app, service)
    _add_error_handlers(app)
    return app


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # Werkzeug compiles each route by `ast.parse`. CPython 3.11 raises SystemError from it when a
    # collection amid that runs code that uses `ast` itself, or lets a thread that does take over:
    # formatting a traceback is enough.
    with _one_at_a_time:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def _route(app: Flask, method: str, path: str) -> Callable[[View], View]:
    # No automatic OPTIONS: every method that a route has is in the OpenAPI file.
    return app.route(path, methods=[method], provide_automatic_options=False)


def _add_server_routes(app: Flask, service: JobService) -> None:
    description = to_json(build_openapi())

    @_route(app, "GET", "/api/v1/health")
    def health() -> Response:
        trouble = service.clock_trouble()
        if trouble:
            raise Retryable(trouble)
        return _json({"server_id": service.server_id, "version": version(), "now": service.now()})

    @_route(app, "GET", "/api/v1/openapi.json")
    def openapi() -> Response:
        return _send(JsonReply(body=description))


def _add_job_routes(app: Flask, service: JobService) -> None:
    @_route(app, "GET", "/api/v1/jobs")
    def list_jobs() -> Response:
        return _send(service.jobs())

    @_route(app, "POST", "/api/v1/jobs")
    def submit() -> Response:
        answer, created = service.submit(_body(wire.JobSpec))
        return _send(answer, 201 if created else 200)

    @_route(app, "POST", "/api/v1/jobs/preview")
    def preview() -> Response:
        spec = _body(wire.JobSpec)
        return _json({"timeline": timeline(spec.script, spec)})

    @_route(app, "GET", "/api/v1/jobs/<job_id>")
    def get_job(job_id: str) -> Response:
        return _send(service.job(job_id, *_poll_args()))

    @_route(app, "DELETE", "/api/v1/jobs/<job_id>")
    def delete(job_id: str) -> Response:
        return _send(service.delete(job_id, discard=_discard_arg()))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/resize")
    def resize(job_id: str) -> Response:
        return _send(service.ask(job_id, ResizeAsked(_body(wire.Resize))))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/pause")
    def pause(job_id: str) -> Response:
        return _send(service.ask(job_id, PauseAsked()))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/resume")
    def resume(job_id: str) -> Response:
        return _send(service.ask(job_id, ResumeAsked()))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/stop")
    def stop(job_id: str) -> Response:
        return _send(service.ask(job_id, StopAsked(discard=_discard_arg())))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/kill")
    def kill(job_id: str) -> Response:
        return _send(service.ask(job_id, KillAsked(_body(wire.Kill))))

    @_route(app, "GET", "/api/v1/jobs/<job_id>/events")
    def events(job_id: str) -> Response:
        after = _int_arg("after", 0, 0, 2**53)
        limit = _int_arg("limit", 100, 1, MAX_EVENTS)
        answer = service.events(job_id, after=after, limit=limit, timeout_s=_timeout_arg())
        return _send(answer)


def _add_service_routes(app: Flask, service: JobService) -> None:
    @_route(app, "POST", "/api/v1/services/<name>/demand")
    def demand(name: str) -> Response:
        return _send(service.demand(name, _body(wire.Demand)))


def _add_pod_routes(app: Flask, service: JobService) -> None:
    @_route(app, "POST", "/api/v1/jobs/<job_id>/pods/<pod_id>/attach")
    def attach(job_id: str, pod_id: str) -> Response:
        return _send(service.attach(job_id, pod_id, _body(wire.Attach)))

    @_route(app, "GET", "/api/v1/jobs/<job_id>/pods/<pod_id>/orders")
    def orders(job_id: str, pod_id: str) -> Response:
        return _send(service.orders(job_id, pod_id, *_poll_args()))

    @_route(app, "POST", "/api/v1/jobs/<job_id>/pods/<pod_id>/report")
    def report(job_id: str, pod_id: str) -> Response:
        return _send(service.report(job_id, pod_id, _body(wire.PodReport)))


def _add_node_routes(app: Flask, service: JobService) -> None:
    @_route(app, "GET", "/api/v1/nodes")
    def list_nodes() -> Response:
        return _send(service.nodes())

    @_route(app, "POST", "/api/v1/nodes")
    def register() -> Response:
        return _send(service.register(_body(wire.Node)))

    @_route(app, "GET", "/api/v1/nodes/<node_id>/plan")
    def plan(node_id: str) -> Response:
        return _send(service.plan(node_id, *_poll_args()))

    @_route(app, "POST", "/api/v1/nodes/<node_id>/report")
    def report_node(node_id: str) -> Response:
        return _send(service.report_node(node_id, _body(wire.NodeReport)))


def _add_legacy_routes(app: Flask, service: JobService) -> None:
    """Add the original's two routes, for its clients."""

    @_route(app, "GET", "/rest/1.0/get/query_pods")
    def query_pods() -> Response:
        job_id, flag, pods = service.legacy_pods(request.args.get("job_id"))
        listed = [
            {
                "pod_id": pod.pod_id,
                "running": True,
                "addr": pod.addr,
                "pod_port": pod.ports[0] if pod.ports else 0,
                "trainer_ports": list(pod.ports),
                "gpus": list(pod.slots),
            }
            for pod in pods
        ]
        return _json({"job_id": job_id, "job_stage_flag": flag, "pods": listed})

    @_route(app, "POST", "/rest/1.0/post/job_runtime_static")
    def job_runtime_static() -> Response:
        told = _body(wire.RunTime)
        service.ask(told.job_id, RunTimeStatic(told.estimated_run_time))
        return _json(told)


def _add_page(app: Flask, service: JobService) -> None:
    @_route(app, "GET", PAGE_PATH)
    def page() -> Response:
        response = Response(render_template("page.html", **page_context(service, version())))
        # The page needs nothing but its own style; whatever slipped into it could do nothing.
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        )
        return response


def _add_error_handlers(app: Flask) -> None:
    @app.errorhandler(JobServerError)
    def refused(error: JobServerError) -> Response:
        if isinstance(error, Retryable):
            response = _json({"error": str(error)}, error.status)
            response.headers["Retry-After"] = str(max(1, round(error.delay_s)))
            return response
        response = _json(
            {"error": str(error)}, error.status if isinstance(error, Rejected) else 500
        )
        if isinstance(error, Unauthorized):
            scheme = "Basic" if request.path == PAGE_PATH else "Bearer"
            response.headers["WWW-Authenticate"] = f'{scheme} realm="edl"'
        return response

    @app.errorhandler(wire.WireError)
    def does_not_fit(error: wire.WireError) -> Response:
        return _json({"error": str(error)}, 400)

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        code = error.code or 500
        response = _json({"error": _http_error_text(error, request)}, code)
        for name, value in error.get_headers():
            if name in ("Allow", "Retry-After"):
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    def broken(error: Exception) -> Response:  # the outermost loop of a request
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return _json({"error": "the server has a defect; its log says more"}, 500)


def _http_error_text(error: HTTPException, asked: Request) -> str:
    if error.code == 404:
        return f"no route {asked.path[:200]!r}; see /api/v1/openapi.json"
    if error.code == 405:
        return f"{asked.method[:20]} is not possible on {asked.path[:200]!r}"
    if error.code == 413:
        return f"body: at most {wire.MAX_BODY_BYTES} bytes are read; send less"
    return f"{error.name}: {error.description}"


def version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("edl")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a checkout that is not installed


# --- in and out ---------------------------------------------------------------------------------


def _body(kind: type[T]) -> T:
    """Return the request's body as a wire type; raise BadRequest or WireError if it is none."""
    return from_json(kind, request.get_data(cache=False))


def _poll_args() -> tuple[int, float]:
    return _int_arg("revision", -1, -1, 2**53), _timeout_arg()


def _timeout_arg() -> float:
    text = request.args.get("timeout_s", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= wire.MAX_POLL_S:
        raise BadRequest(
            f"timeout_s: expected seconds of 0 to {wire.MAX_POLL_S:g}, got {text[:60]!r}"
        )
    return timeout_s


def _discard_arg() -> bool:
    return _int_arg("discard", 0, 0, 1) == 1


def _int_arg(name: str, default: int, low: int, high: int) -> int:
    text = request.args.get(name)
    if text is None:
        return default
    # Not int() alone: it takes underscores, blanks and digits of other scripts as well.
    value = int(text) if re.fullmatch(r"-?[0-9]{1,16}", text) else None
    if value is None or not low <= value <= high:
        raise BadRequest(f"{name}: expected a whole number of {low} to {high}, got {text[:60]!r}")
    return value


def _json(data: object, status: int = 200) -> Response:
    return _send(JsonReply(body=to_json(data)), status)


def _send(answer: JsonReply, status: int = 200) -> Response:
    response = Response(answer.body, status, content_type="application/json")
    if answer.busy:
        response.headers["Retry-After"] = "1"
    return response
