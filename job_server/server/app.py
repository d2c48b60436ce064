"""The HTTP face of the server: checks what comes in by its route and passes it to the service."""

import contextlib
import gc
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flask import Flask, Request, Response, render_template, request
from werkzeug.exceptions import HTTPException

from job_server.api import routes, wire
from job_server.api.codec import from_json, to_json
from job_server.api.command_line import version
from job_server.api.errors import BadRequest, JobServerError, Rejected, Retryable, Unauthorized
from job_server.api.routes import QueryParameter, Route
from job_server.cluster.change_script import timeline
from job_server.jobs.events import (
    KillAsked,
    PauseAsked,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    StopAsked,
)
from job_server.server.guard import Guard
from job_server.server.http_server import HUNG_UP
from job_server.server.openapi import build_openapi
from job_server.server.page import page_context
from job_server.server.page_login import COOKIE_S, LINK_S, cookie_name
from job_server.server.polls import JsonReply, hung_up
from job_server.server.service import JobService

logger = logging.getLogger(__name__)

# Gets the ids of the path, then the body, then the values of the query, as its route lists them.
Handler = Callable[..., JsonReply | wire.Message | Response]

_one_at_a_time = threading.Lock()  # or the first to end would enable what the other disabled


def create_app(service: JobService, guard: Guard) -> Flask:
    """Return the WSGI application. `service` is started and closed by the caller."""
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = wire.MAX_BODY_BYTES
    app.url_map.strict_slashes = False
    app.before_request(lambda: guard.check(request))
    handlers = _handlers(service, guard)
    with _no_garbage_collection():
        for route in routes.ROUTES:
            app.add_url_rule(
                re.sub(r"{(\w+)}", r"<\1>", route.path),
                route.name,
                _view(route, handlers[route.name]),
                methods=[route.method],
                provide_automatic_options=False,  # every method of a path is in the OpenAPI file
            )
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


def _handlers(service: JobService, guard: Guard) -> Mapping[str, Handler]:
    """Return what answers each route, by its name."""
    description = JsonReply(body=to_json(build_openapi()))
    return {
        "health": lambda: _health(service, guard),
        "openapi": lambda: description,
        "list_jobs": service.jobs,
        "submit": service.submit,
        "preview": lambda spec: wire.ScriptPreview(timeline=tuple(timeline(spec.script, spec))),
        "get_job": service.job,
        "delete": lambda job_id, discard: service.delete(job_id, discard=discard == 1),
        "resize": lambda job_id, resize: service.ask(job_id, ResizeAsked(resize)),
        "pause": lambda job_id: service.ask(job_id, PauseAsked()),
        "resume": lambda job_id: service.ask(job_id, ResumeAsked()),
        "stop": lambda job_id, discard: service.ask(job_id, StopAsked(discard=discard == 1)),
        "kill": lambda job_id, kill: service.ask(job_id, KillAsked(kill)),
        "events": service.events,
        "demand": service.demand,
        "list_nodes": service.nodes,
        "limit_node": service.limit_node,
        "order_slot": service.order_slot,
        "sharing": service.sharing,
        "register": service.register,
        "plan": service.plan,
        "report_node": service.report_node,
        "attach": service.attach,
        "orders": service.orders,
        "report": service.report,
        "list_queues": service.tasks.list_queues,
        "make_queue": service.tasks.make_queue,
        "get_queue": service.tasks.get_queue,
        "delete_queue": service.tasks.delete_queue,
        "lease_task": service.tasks.lease_task,
        "report_task": service.tasks.report_task,
        "query_pods": service.legacy_pods,
        "job_runtime_static": lambda run_time: _note_run_time(service, run_time),
        "page_link": lambda: wire.PageLink(path=_page_link(guard)),
        "open_page": lambda code: _open_page(guard, code),
        "page": lambda refresh: _page(service, refreshes=refresh == 1),
    }


def _health(service: JobService, guard: Guard) -> wire.Health:
    trouble = service.clock_trouble()
    if trouble:
        raise Retryable(trouble)
    is_stranger = guard.token is not None and "Authorization" not in request.headers
    return wire.Health(
        server_id=service.server_id,
        version=version(),
        now=service.now(),
        warnings=() if is_stranger else service.warnings(),
    )


def _note_run_time(service: JobService, run_time: wire.RunTime) -> wire.RunTime:
    service.ask(run_time.job_id, RunTimeStatic(run_time.estimated_run_time))
    return run_time


def _page_link(guard: Guard) -> str:
    if guard.token is None:
        return routes.PAGE.path
    return routes.OPEN_PAGE.url(guard.login.make_code())


def _open_page(guard: Guard, code: str) -> Response:
    """Use up a link: answer with the cookie, and a page that leads on to the status page.

    No redirect: for a browser that came from another site's link, that would still be a request of
    the other site, which gets no cookie.
    """
    # HEAD is of programs that look at links before people do.
    cookie = None if request.method == "HEAD" else guard.login.redeem(code)
    is_open = cookie is not None or guard.token is None or guard.has_cookie(request)
    minutes = f"{LINK_S / 60:.0f}"
    response = _html(render_template("link.html", is_open=is_open, minutes=minutes))
    response.status_code = 200 if is_open else 401
    response.headers["Cache-Control"] = "no-store"
    response.headers["Referrer-Policy"] = "no-referrer"
    if cookie is not None:
        response.set_cookie(
            cookie_name(request.host),
            cookie,
            max_age=round(COOKIE_S),
            httponly=True,
            samesite="Strict",
        )
    return response


def _page(service: JobService, *, refreshes: bool) -> Response:
    context = page_context(service, version())
    return _html(render_template("page.html", **context, refreshes=refreshes))


def _html(text: str) -> Response:
    response = Response(text)
    # A page needs nothing but its own style; whatever slipped into it could do nothing.
    response.headers["Content-Security-Policy"] = (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    )
    return response


def _add_error_handlers(app: Flask) -> None:
    @app.errorhandler(JobServerError)
    def refused(error: JobServerError) -> Response:
        if isinstance(error, Retryable):
            response = _refuse(str(error), error.status)
            response.headers["Retry-After"] = str(max(1, round(error.delay_s)))
            return response
        response = _refuse(str(error), error.status if isinstance(error, Rejected) else 500)
        if isinstance(error, Unauthorized):
            scheme = "Basic" if request.path == routes.PAGE.path else "Bearer"
            response.headers["WWW-Authenticate"] = f'{scheme} realm="edl"'
        return response

    @app.errorhandler(wire.WireError)
    def does_not_fit(error: wire.WireError) -> Response:
        return _refuse(str(error), 400)

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        code = error.code or 500
        response = _refuse(_http_error_text(error, request), code)
        for name, value in error.get_headers():
            if name in ("Allow", "Retry-After"):
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    def broken(error: Exception) -> Response:  # the outermost loop of a request
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return _refuse("the server has a defect; its log says more", 500)


def _http_error_text(error: HTTPException, asked: Request) -> str:
    if error.code == 404:
        return f"no route {asked.path[:200]!r}; see /api/v1/openapi.json"
    if error.code == 405:
        return f"{asked.method[:20]} is not possible on {asked.path[:200]!r}"
    if error.code == 413:
        return f"body: at most {wire.MAX_BODY_BYTES} bytes are read; send less"
    return f"{error.name}: {error.description}"


# --- in and out ---------------------------------------------------------------------------------


def _view(route: Route[Any], handler: Handler) -> Callable[..., Response]:
    """Return the handler as Flask calls it."""

    def view(**ids: str) -> Response:
        if HUNG_UP in request.environ:
            hung_up.set(request.environ[HUNG_UP])
        args: list[object] = [ids[name] for name in route.ids]
        if route.body is not None:
            args.append(from_json(route.body, request.get_data(cache=False)))
        args.extend(_query_value(parameter) for parameter in route.query)
        answer = handler(*args)
        return answer if isinstance(answer, Response) else _send(answer)

    return view


def _query_value(parameter: QueryParameter) -> float | str | None:
    """Return a value of the request's query; raise BadRequest if it is out of bounds."""
    text = request.args.get(parameter.name)
    if text is None:
        return parameter.default
    if parameter.kind is str:
        return text
    value = math.nan
    # Not int() alone: it takes underscores, blanks and digits of other scripts as well.
    if parameter.kind is float or re.fullmatch(r"-?[0-9]{1,16}", text):
        with contextlib.suppress(ValueError):
            value = parameter.kind(text)  # type: ignore[assignment]  # int or float
    if not parameter.low <= value <= parameter.high:
        what = "a whole number" if parameter.kind is int else "seconds"
        raise BadRequest(
            f"{parameter.name}: expected {what} of {parameter.low:.0f} to {parameter.high:.0f}, "
            f"got {text[:60]!r}"
        )
    return value


def _send(answer: JsonReply | wire.Message, status: int = 200) -> Response:
    if not isinstance(answer, JsonReply):
        answer = JsonReply(body=to_json(answer), status=status)
    response = Response(answer.body, answer.status, content_type="application/json")
    if answer.busy:
        response.headers["Retry-After"] = "1"
    return response


def _refuse(text: str, status: int) -> Response:
    return _send(wire.ErrorText(error=text), status)
