"""Serve HTTP with gevent: a connection, and a poll that waits on it, cost a greenlet each.

Threads of the server are greenlets as well, once `gevent.monkey.patch_all()` has been called.
"""

import errno
import io
import logging
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import gevent
from flask import Flask
from gevent import monkey
from gevent.pywsgi import WSGIHandler, WSGIServer

from job_server.api.codec import to_json
from job_server.api.errors import ConfigError
from job_server.api.wire import MAX_BODY_BYTES

IDLE_S = 180.0  # between two requests, above the longest poll: idle connections stay usable
REQUEST_S = 10.0  # for a request to come; and for the first of a connection to begin
LAST_ANSWERS_S = 2.0  # for the answers to who waits when the server ends
OTHER_FILES = 200  # descriptors for users' connections, the database, the log
HUNG_UP = "edl.hung_up"  # in the environment of a request: says whether its client is gone
_SLACK_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


class _SlowRequestError(OSError):
    """A request did not come in time."""


class _TooLongRequestError(ValueError):
    """Its body is longer than any that the server reads."""


class _Handler(WSGIHandler):  # type: ignore[misc]  # gevent has no types
    """One connection. What is not HTTP, too long or too slow is refused, as JSON."""

    _idle_s = REQUEST_S

    def read_requestline(self) -> str:
        with gevent.Timeout(self._idle_s, _SlowRequestError("nothing came")):
            self.rfile.peek(1)
        with gevent.Timeout(REQUEST_S, _SlowRequestError("the request line is slow")):
            return str(super().read_requestline())

    def read_request(self, raw_requestline: str) -> bool:
        with gevent.Timeout(REQUEST_S, _SlowRequestError("the headers are slow")):
            found = bool(super().read_request(raw_requestline))
        if (self.content_length or 0) > MAX_BODY_BYTES + _SLACK_BYTES:
            raise _TooLongRequestError(f"the body is longer than {MAX_BODY_BYTES} bytes")
        return found

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()
        with gevent.Timeout(REQUEST_S, _SlowRequestError("the body is slow")):
            body = self.wsgi_input.read(MAX_BODY_BYTES + _SLACK_BYTES + 1)
        if len(body) > MAX_BODY_BYTES + _SLACK_BYTES:  # it did not say its length
            raise _TooLongRequestError("too long a body")
        environ["wsgi.input"] = io.BytesIO(body)
        environ[HUNG_UP] = self._hung_up
        return environ

    def handle(self) -> None:
        try:
            super().handle()
        except (_SlowRequestError, _TooLongRequestError) as error:
            self.log_error("%s", error)

    def handle_one_response(self) -> None:
        self.server.answering += 1
        try:
            super().handle_one_response()
        finally:
            self.server.answering -= 1
        if self.code is not None and 200 <= self.code < 300:
            self._idle_s = IDLE_S  # it is no stranger

    def log_error(self, msg: str, *args: object) -> None:
        logger.info(msg, *args)

    def _handle_client_error(self, ex: Exception) -> tuple[str, bytes]:
        text = {
            _SlowRequestError: "408 Request Timeout",
            _TooLongRequestError: "413 Content Too Large",
        }
        status = text.get(type(ex), "400 Bad Request")
        body = to_json({"error": f"{status}: {ex}"[:1000]})
        head = (
            f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return status.split()[0], head.encode() + body

    def _hung_up(self) -> bool:
        try:
            peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return bool(self.socket._sock.recv(1, peek) == b"")
        except BlockingIOError:
            return False
        except OSError:
            return True


class _Server(WSGIServer):  # type: ignore[misc]  # gevent has no types
    answering = 0  # requests that the application has and has not answered


class HttpServer:
    """A listening server; run() serves until SIGTERM or SIGINT."""

    def __init__(self, app: Flask, *, bind: str, port: int, max_watchers: int) -> None:
        """Bind and listen.

        Raises:
            ConfigError: the address cannot be bound, or there are too few descriptors.
        """
        # Each client and each launcher has two connections, and one of them polls.
        _allow_files(2 * max_watchers + OTHER_FILES, max_watchers)
        sock = _listen(bind, port)
        self.port: int = sock.getsockname()[1]
        names = {"SERVER_NAME": bind, "wsgi.multithread": True}  # or gevent asks the DNS for it
        self._server = _Server(
            sock, app, log=None, error_log=logger, handler_class=_Handler, environ=names
        )

    def run(self, on_stop: Callable[[], None]) -> None:
        """Serve until a signal. `on_stop`, called then, answers waiting polls."""
        assert monkey.is_module_patched("threading"), "run it as `python -m job_server`"

        def stop() -> None:
            on_stop()
            with gevent.Timeout(LAST_ANSWERS_S, False):
                while self._server.answering:
                    gevent.sleep(0.01)
            self._server.stop()

        for signum in (signal.SIGTERM, signal.SIGINT):
            gevent.signal_handler(signum, stop)
        self._server.serve_forever()


def _allow_files(count: int, max_watchers: int) -> None:
    """Raise this process's limit of open files, which many systems set to 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(
            f"the job server needs {count} open files for {max_watchers} watchers, and may have "
            f"{hard}; raise the limit (ulimit -Hn), or start it with fewer --max_watchers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of connections, too: headers and body are sent one after the other, and neither is to wait.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((bind, port))
        # Two servers may both bind with SO_REUSEADDR; only one of them may listen.
        sock.listen(1024)
        sock.setblocking(False)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--server_port: {port} on {bind} is in use; `edl status --server "
                f"http://{bind}:{port}` tells whether it is a job server, `ss -ltnp` whose it is; "
                "stop that one or choose another port"
            ) from None
        raise ConfigError(f"--bind: cannot listen on {bind} port {port}: {error}") from None
    return sock
