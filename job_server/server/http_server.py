"""Run waitress for many long polls: one process, one thread for each request that waits."""

import errno
import logging
import signal
import socket
import types
from collections.abc import Callable

from flask import Flask
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import ErrorTask

from job_server.api.codec import to_json
from job_server.api.errors import ConfigError
from job_server.api.wire import MAX_BODY_BYTES

RESERVE_THREADS = 32  # for requests that do not wait
_SLACK_BYTES = 64 * 1024


class _JsonErrorTask(ErrorTask):  # type: ignore[misc]  # waitress has no types
    """Answers as JSON what waitress itself refuses (no HTTP, too large)."""

    def execute(self) -> None:
        error = self.request.error
        body = to_json({"error": f"{error.reason}: {error.body}"})
        self.status = f"{error.code} {error.reason}"
        self.set_close_on_finish()
        self.content_length = len(body)
        self.response_headers.append(("Content-Length", str(len(body))))
        self.response_headers.append(("Content-Type", "application/json"))
        self.write(body)


class _Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    error_task_class = _JsonErrorTask


class WaitressServer:
    """A listening server; run() serves until SIGTERM or SIGINT."""

    def __init__(self, app: Flask, *, bind: str, port: int, max_watchers: int) -> None:
        """Bind and listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # bursts are expected
        sock = _listen(bind, port)
        self.port: int = sock.getsockname()[1]
        try:
            self._server = create_server(
                app,
                sockets=[sock],
                threads=max_watchers + RESERVE_THREADS,
                connection_limit=2 * max_watchers + 200,
                channel_timeout=180,  # above the longest poll: idle connections stay usable
                backlog=1024,
                asyncore_use_poll=True,
                max_request_body_size=MAX_BODY_BYTES + _SLACK_BYTES,
                ident=None,
                _start=False,
            )
        except RuntimeError as error:
            sock.close()
            raise ConfigError(
                f"--max_watchers: {max_watchers} need as many threads, which this machine does "
                f"not give ({error}); give fewer, or raise the limit of processes"
            ) from None
        self._server.channel_class = _Channel
        self._server.accept_connections()

    def run(self, on_stop: Callable[[], None]) -> None:
        """Serve in the main thread. `on_stop`, called at a signal, answers waiting polls."""

        def stop(_signum: int, _frame: types.FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            on_stop()
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        self._server.run()
        self._server.close()


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((bind, port))
        # Two servers may both bind with SO_REUSEADDR; only one of them may listen.
        sock.listen(1024)
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
