"""A gRPC channel to a teacher that carries bytes. Proxies of the environment are never used."""

import functools
import re
import socket
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    UsageError,
)
from distill_reader.listening import bracketed
from distill_reader.protocols import gateways
from distill_reader.student.clients.access import TeacherAccess
from distill_reader.student.clients.connection_guard import ConnectionGuard
from distill_reader.student.clients.endpoints import ProtocolMismatch, Target
from distill_reader.tls import start_tls, trusted_certificates

_MAX_MESSAGE_BYTES = 512 << 20
_LARGE_BLOCK_BYTES = 31 << 20  # glibc does not adapt to blocks of 32 MiB and more
_HTTP_STATUS = re.compile(r"Received http2 header with status: (\d+)")
_NOT_FOUND, _TOO_LARGE = 404, 413
# Triton's own queue, of a model with `max_queue_size` or a timeout. By HTTP it is 503.
_FULL = ("Exceeds maximum queue size", "Request timeout expired")
_TORN = "Received RST_STREAM"  # by a gateway whose own connection ended
_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, not shared among clients
    ("grpc.enable_retries", 0),
)


class GrpcClientConnection:
    """One thread may call at a time; any may close. TeacherGone and TeacherTimeout close it."""

    def __init__(
        self, target: Target, *, token: str, access: TeacherAccess, connect_timeout_s: float
    ) -> None:
        """Prepare the channel; it connects with the first call.

        Raises:
            TeacherGone: no server listens there, with TLS.
            UsageError: its certificate is not trusted, or it does not speak TLS.
        """
        _keep_memory_of_messages()
        self.endpoint = endpoint = target.endpoint
        address = f"{bracketed(target.host)}:{target.port}"
        options: list[tuple[str, int | str]] = [*_OPTIONS]
        if access.host is not None:
            options.append(("grpc.default_authority", access.host))
        if target.is_tls:
            credentials = _credentials(target, access, connect_timeout_s)
            self._channel = grpc.secure_channel(address, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(address, options=options)
        shown = access.shown(token)
        self._metadata = tuple((name.lower(), value) for name, value in shown.items())
        self._calls: dict[str, Callable[..., bytes]] = {}
        self._guard = ConnectionGuard(endpoint, wake=self._channel.close, close=self._channel.close)

    def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Call "/service/method"; return the answer's bytes.

        Raises:
            ProtocolMismatch: the server does not know the method.
            TeacherGone, TeacherTimeout, TeacherBusy, BadRequest, UsageError.
        """
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self._channel.unary_unary(method)
        with self._guard:
            try:
                answer = call(request, timeout=timeout_s, metadata=self._metadata)
                gateways.answered.add(self.endpoint)
                return answer
            except grpc.RpcError as error:
                meaning = _meaning(self.endpoint, error, timeout_s)
                is_broken = isinstance(meaning, TeacherGone | TeacherTimeout)
                if is_broken and not isinstance(meaning, TeacherFailed):
                    self.close()
                raise meaning from error
            except ValueError as error:
                if not self._guard.is_closed:
                    raise
                raise TeacherGone(f"{self.endpoint}: the connection is closed") from error

    def close(self) -> None:
        self._guard.close()


def _credentials(target: Target, access: TeacherAccess, timeout_s: float) -> Any:
    """Return the credentials, once the server's certificate was seen and is trusted.

    gRPC itself would only say that it cannot connect, and try again.
    """
    context = access.context()
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(target.address, timeout_s) as sock,
            start_tls(sock, context, access.server_name(target.host), target.endpoint),
        ):
            pass
    except OSError as error:
        raise TeacherGone(f"{target.endpoint}: {error}") from error
    return grpc.ssl_channel_credentials(trusted_certificates(context))


@functools.cache
def _keep_memory_of_messages() -> None:
    """Make the C library reuse the memory of a message for the next one.

    glibc returns freed blocks of megabytes to the system, and the next block costs a page fault per
    4 KiB, a third of the cost of a request here. Once a large block was freed, it keeps blocks up
    to that size. With another C library this has no effect.
    """
    block = np.empty(_LARGE_BLOCK_BYTES, np.uint8)  # never touched, so it takes no memory
    del block


def _meaning(endpoint: str, error: Any, timeout_s: float) -> DistillError:
    code, details = error.code(), str(error.details() or "")[:2000]
    text = f"{endpoint}: gRPC {code.name}: {details}"
    statuses = grpc.StatusCode
    if code is statuses.DEADLINE_EXCEEDED:
        return TeacherTimeout(f"{endpoint}: no answer within {timeout_s:g} s")
    found = _HTTP_STATUS.search(details)  # of a gateway: gRPC gives many such no code
    status = 0 if found is None else int(found[1])
    if status == _NOT_FOUND and endpoint in gateways.answered:
        return TeacherGone(text)
    if code is statuses.UNIMPLEMENTED:
        return ProtocolMismatch(text)
    if code is statuses.RESOURCE_EXHAUSTED:
        if "larger than max" in details:
            return RequestTooLarge(f"{text}: send fewer samples at once, or raise its bound")
        return TeacherBusy(text, delay_s=0.1)
    if code is statuses.UNAVAILABLE and any(each in details for each in _FULL):
        return TeacherBusy(text, delay_s=0.1)
    if code is statuses.NOT_FOUND:
        return ModelNotFound(text)
    if code is statuses.OUT_OF_RANGE:
        return RequestTooLarge(text)
    if code in (statuses.INVALID_ARGUMENT, statuses.FAILED_PRECONDITION):
        return BadRequest(text)
    if code in (statuses.UNAUTHENTICATED, statuses.PERMISSION_DENIED):
        return UsageError(
            f"{text}; set EDL_TEACHER_TOKEN as on the teacher, or what an ingress wants by "
            "set_teacher_access(headers=...)"
        )
    if status == _TOO_LARGE:
        return RequestTooLarge(f"{text}: send fewer samples at once, or raise its bound")
    if _TORN in details or status in gateways.UNREACHED | gateways.TIMED_OUT:
        return TeacherGone(text)
    if code in (statuses.INTERNAL, statuses.UNKNOWN, statuses.ABORTED, statuses.DATA_LOSS):
        return TeacherFailed(text)
    return TeacherGone(text)
