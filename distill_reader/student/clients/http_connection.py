"""A kept-alive HTTP connection to a teacher. Proxies of the environment are never used."""

import contextlib
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from distill_reader.errors import (
    BadRequest,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    UsageError,
)
from distill_reader.protocols import gateways, stream
from distill_reader.student.clients.access import TeacherAccess
from distill_reader.student.clients.connection_guard import ConnectionGuard
from distill_reader.student.clients.endpoints import Target
from distill_reader.tls import start_tls

_MAX_ANSWER_BYTES = 4 << 30
_CLOSED = (  # by the server, between two requests
    ConnectionError,
    http.client.BadStatusLine,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)
# The teacher cannot be asked now: what it speaks, has and computes does not follow.
_OUTAGES = frozenset({408, 429, 503}) | gateways.UNREACHED | gateways.TIMED_OUT
_MAX_TEXT = 2000  # characters of an error's body
_JOIN_BUFFERS = 16  # more buffers are copied into one, which costs less than a system call each


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer of any status."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: memoryview

    def text(self) -> str:
        """Return the body as a shortened text; of {"error": TEXT} only TEXT."""
        return (self.error or self._body)[:_MAX_TEXT]

    @property
    def error(self) -> str:
        """TEXT, if the body is {"error": TEXT}, as the protocol has it; "": it is not."""
        try:
            document = json.loads(self._body)
        except (ValueError, RecursionError):
            return ""
        error = document.get("error") if isinstance(document, dict) else None
        return error if isinstance(error, str) else ""

    @property
    def _body(self) -> str:
        return bytes(self.body[: 4 * _MAX_TEXT]).decode(errors="replace").strip()


class HttpClientConnection:
    """Only one thread may ask at a time; any may close. TeacherGone and TeacherTimeout close it."""

    def __init__(
        self, target: Target, *, token: str, access: TeacherAccess, connect_timeout_s: float
    ) -> None:
        """Connect.

        Raises:
            TeacherGone: no server listens there.
            UsageError: its certificate is not trusted, or it does not speak TLS.
        """
        self.endpoint = endpoint = target.endpoint
        self.prefix = target.prefix
        self._headers = access.shown(token)
        self._host = access.host
        self._name = access.server_name(target.host)
        self._context = access.context() if target.is_tls else None
        self._connection = http.client.HTTPConnection(*target.address, timeout=connect_timeout_s)
        self._connection.response_class = self._response  # type: ignore[assignment]
        self._deadline_s = 0.0  # of the answer that is waited for
        self._sock: socket.socket | None = (
            None  # of the connection, also while it is read to its end
        )
        self._guard = ConnectionGuard(endpoint, wake=self._wake, close=self._free)
        try:
            self._connect()
        except OSError as error:
            self._connection.close()
            raise TeacherGone(f"{endpoint}: {error}") from error

    def request(
        self,
        method: str,
        path: str,
        buffers: Sequence[Any] = (),
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> HttpAnswer:
        """Send a request whose body is `buffers` one after the other; return the answer.

        Args:
            timeout_s: for the whole answer; a large body may take longer while bytes flow.

        Raises:
            TeacherGone, TeacherTimeout.
            UsageError: it was connected again, and the certificate is not trusted now.
        """
        if len(buffers) > _JOIN_BUFFERS:
            buffers = [b"".join(buffers)]
        all_headers = {**self._headers, **(headers or {})}
        with self._guard:
            try:
                try:
                    was_used = self._sock is not None and self._connection.sock is not None
                    return self._exchange(method, path, buffers, all_headers, timeout_s)
                except _CLOSED:
                    # Servers close idle connections: connect again, that is not a failure.
                    if not was_used or self._guard.is_closed:
                        raise
                    self._connection.close()
                    return self._exchange(method, path, buffers, all_headers, timeout_s)
            except TimeoutError as error:
                self.close()
                text = f"{self.endpoint}: no answer within {timeout_s:g} s"
                raise TeacherTimeout(text) from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise TeacherGone(
                    f"{self.endpoint}: {str(error) or type(error).__name__}"
                ) from error
            except BaseException:  # KeyboardInterrupt in the middle of an exchange
                self.close()
                raise

    def close(self) -> None:
        self._guard.close()

    def refuse(self, answer: HttpAnswer) -> NoReturn:
        """Raise the error of an answer whose status is not 200."""
        status = answer.status
        text = f"{self.endpoint}: HTTP {status}: {answer.text()}"
        if status in (401, 403):
            raise UsageError(
                f"{text}; set EDL_TEACHER_TOKEN as on the teacher, or what an ingress wants by "
                "set_teacher_access(headers=...)"
            )
        if 300 <= status < 400:
            where = answer.headers.get("location", "elsewhere")
            raise UsageError(f"{text}; it sends requests to {where}: name that as the endpoint")
        if status in (429, 503):
            raise TeacherBusy(text, delay_s=_delay_of(answer.headers.get("retry-after", "")))
        if status == 408 or status in gateways.TIMED_OUT:
            raise TeacherTimeout(text)
        if status in gateways.UNREACHED:  # as if its own connection had ended
            raise TeacherGone(text)
        if status == 404:
            self.check_found(answer)
            raise ModelNotFound(text)
        if status == 413:
            raise RequestTooLarge(f"{text}: send fewer samples at once, or raise its bound")
        if 400 <= status < 500:
            raise BadRequest(text)
        raise TeacherFailed(text)

    def check_reached(self, answer: HttpAnswer) -> None:
        """Raise the error of an answer that tells an outage, whatever else its status may say."""
        if answer.status in _OUTAGES:
            self.refuse(answer)

    def check_gateway(self, answer: HttpAnswer) -> None:
        """Raise the error of an answer by which a gateway tells an outage.

        A router may say 503 to each path that it does not hand on.
        """
        if answer.status in gateways.UNREACHED | gateways.TIMED_OUT:
            self.refuse(answer)

    def check_found(self, answer: HttpAnswer) -> None:
        """Raise TeacherGone for a 404 of a gateway before a teacher that has answered once."""
        if answer.status == 404 and self.endpoint in gateways.answered and not answer.error:
            raise TeacherGone(f"{self.endpoint}: HTTP 404: {answer.text()}")

    def _connect(self) -> None:
        self._connection.connect()
        stream.keep_alive(self._connection.sock)
        if self._context is not None:
            self._connection.sock = start_tls(
                self._connection.sock, self._context, self._name, self.endpoint
            )
        self._sock = self._connection.sock
        if self._guard.is_closed:  # closed while it connected, and could not be woken
            raise ConnectionAbortedError("the connection is closed")

    def _exchange(
        self,
        method: str,
        path: str,
        buffers: Sequence[Any],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> HttpAnswer:
        connection = self._connection
        if connection.sock is not None and not _is_silent(connection.sock):
            connection.close()  # else what came unasked would pass for the next answer
        if connection.sock is None:
            self._connect()
        size = sum(map(len, buffers))
        self._deadline_s = time.monotonic() + timeout_s + size / stream.MIN_RATE
        connection.putrequest(method, self.prefix + path, skip_host=self._host is not None)
        if self._host is not None:
            connection.putheader("Host", self._host)
        for name, value in headers.items():
            connection.putheader(name, value)
        if buffers or method == "POST":
            connection.putheader("Content-Length", str(size))
        try:
            self._set_time_left()
            connection.endheaders()
            for buffer in buffers:
                self._set_time_left()
                connection.send(buffer)
        except ConnectionError:
            # A gateway may refuse a large request, and hang up, before it has read it all.
            if (response := self._refusal()) is None:
                raise
        else:
            response = connection.getresponse()
        try:
            if response.length is not None:
                self._deadline_s += response.length / stream.MIN_RATE
            body = _read(response)
        finally:
            response.close()
        if method == "POST" and response.status == 200:
            gateways.answered.add(self.endpoint)
        return HttpAnswer(
            status=response.status,
            headers={name.lower(): value for name, value in response.getheaders()},
            body=body,
        )

    def _refusal(self) -> http.client.HTTPResponse | None:
        """Return the error that has come although the request could not be sent; None: none."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            response = self._connection.getresponse()
            if response.status >= 400:
                return response
        return None

    def _set_time_left(self) -> None:
        """Limit the next call on the socket to the time that is left for the answer."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._sock is not None:
            self._sock.settimeout(left_s)

    def _response(self, sock: socket.socket, *args: Any, **options: Any) -> Any:
        return http.client.HTTPResponse(_Timed(sock, self._set_time_left), *args, **options)  # type: ignore[arg-type]

    def _wake(self) -> None:
        if self._sock is not None:
            stream.end(self._sock)

    def _free(self) -> None:
        self._connection.close()


class _Timed:
    """A socket for http.client that limits each read to the time that is left for the answer."""

    def __init__(self, sock: socket.socket, set_time_left: Callable[[], None]) -> None:
        self._sock = sock
        self._set_time_left = set_time_left

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock.makefile("rb", 0), self._set_time_left))


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: socket.SocketIO, set_time_left: Callable[[], None]) -> None:
        self._raw = raw
        self._set_time_left = set_time_left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._set_time_left()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _is_silent(sock: socket.socket) -> bool:
    """Return whether nothing has come on an idle connection, not even its end."""
    try:
        sock.settimeout(0)
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False


def _read(response: http.client.HTTPResponse) -> memoryview:
    length = response.length
    if length is None:  # in chunks
        data = response.read(_MAX_ANSWER_BYTES + 1)
        if len(data) > _MAX_ANSWER_BYTES:
            raise http.client.HTTPException(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
        return memoryview(data)
    if length > _MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"the answer has {length} bytes")
    body = stream.bytes_of(np.empty(length, np.uint8))
    got = 0
    while got < length:
        count = response.readinto(body[got:])
        if not count:
            raise http.client.IncompleteRead(b"", length - got)
        got += count
    return body


def _delay_of(retry_after: str) -> float:
    try:
        return min(max(float(retry_after), 0.0), 60.0)
    except ValueError:  # missing, or a date
        return 0.1
