"""Open a client for a teacher, with the protocol that its endpoint names or that it answers."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from distill_reader.errors import BadRequest, DistillError, TeacherGone, TeacherTimeout, UsageError
from distill_reader.model.specs import ModelSpec
from distill_reader.student.clients.access import TeacherAccess
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.clients.endpoints import ProtocolMismatch, Target, parse_endpoint
from distill_reader.student.clients.fast_client import open_fast
from distill_reader.student.clients.http_connection import HttpClientConnection
from distill_reader.tokens import read_student_token

if TYPE_CHECKING:
    from distill_reader.student.clients.grpc_connection import GrpcClientConnection

logger = logging.getLogger(__name__)

_ORDER = ("fast-shm", "oip-grpc", "oip-http", "serving-http", "serving-grpc")  # of the trials
_TRIAL_S = 3.0  # for a step of a trial: a server of another protocol may just not answer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What every protocol needs to open a client."""

    target: Target
    token: str
    access: TeacherAccess
    timeout_s: float
    config: ModelSpec | None  # from a client prototxt; None: there is none
    is_trial: bool  # whether the teacher speaks this protocol is unknown
    mixes_versions: bool = False

    @property
    def step_s(self) -> float:
        """Seconds for an answer while connecting."""
        return min(self.timeout_s, _TRIAL_S) if self.is_trial else self.timeout_s


_found: dict[tuple[str, int], str] = {}  # address -> protocol that answered


def connect(
    endpoint: str,
    *,
    model: str | None = None,
    protocol: str | None = None,
    connect_timeout_s: float = 5.0,
    config: ModelSpec | None = None,
    token: str | None = None,
    access: TeacherAccess = TeacherAccess(),  # noqa: B008 - frozen
    mixes_versions: bool = False,
) -> TeacherClient:
    """Connect to a teacher.

    Args:
        endpoint: `HOST:PORT` (finds out the protocol), or with a scheme: `fast://`, `grpc://` and
            `http://` (Open Inference Protocol), `grpcs://` and `https://` (the same by TLS; without
            a port it is 443), `serving://` and `serving+grpc://` (Paddle Serving); with `/NAME` at
            its end if the teacher serves several models, and `/PATH/NAME` behind a path of HTTP.
        model: the same as `/NAME`; None: as the endpoint says.
        protocol: as in a client's attribute `protocol`; None: as the endpoint says.
        connect_timeout_s: for each step of connecting.
        config: from a client prototxt, for Paddle Serving, which has no metadata; None: there is
            none, so the client's spec is empty there.
        access: headers, and certificates that are trusted.
        mixes_versions: whether answers may come of another model than it has told, as by a gateway
            before several teachers.
        token: of the teacher; None: from EDL_TEACHER_TOKEN_FILE or EDL_TEACHER_TOKEN; "": none.

    Raises:
        UsageError: the endpoint is malformed; or the teacher speaks another protocol, has another
            token, or does not list its models.
        ModelNotFound: it has no such model.
        TeacherGone, TeacherTimeout: no server answers there, or none with a known protocol.
        TeacherBusy: it does not accept connections now.
    """
    target = parse_endpoint(endpoint, model=model, protocol=protocol)
    call = _Call(
        target=target,
        token=read_student_token(os.environ) if token is None else token,
        access=access,
        timeout_s=connect_timeout_s,
        config=config,
        is_trial=target.protocol is None,
        mixes_versions=mixes_versions,
    )
    if access.headers and (target.protocol or "").startswith("fast"):
        raise UsageError(
            f"{endpoint}: the fast path has no headers, and such are set (set_teacher_access): use "
            "http://, https://, grpc:// or grpcs://"
        )
    if target.protocol is None:
        return _find_out(call)
    try:
        return _open(target.protocol, call)
    except ProtocolMismatch as error:
        if error.is_certain:
            text = f"{error}: give the endpoint without a protocol, or with another one"
            raise UsageError(text) from error
        raise TeacherGone(str(error)) from error


def forget(endpoint: str) -> None:
    """Let the next `connect` find out again which protocol an endpoint speaks."""
    _found.pop(parse_endpoint(endpoint).address, None)


def _find_out(call: _Call) -> TeacherClient:
    """Try all protocols, first the one that answered last time."""
    address = call.target.address
    known = _found.get(address)
    order = [known] if known else []
    order += [protocol for protocol in _ORDER if protocol != known]
    if call.access.headers:  # the fast path has none
        order = [protocol for protocol in order if not protocol.startswith("fast")]
    tried: list[str] = []
    is_certain = True
    for protocol in order:
        began = time.monotonic()
        logger.debug("%s: trying %s", call.target.endpoint, protocol)
        try:
            client = _open(protocol, call)
        except ProtocolMismatch as error:
            is_certain = is_certain and error.is_certain
            tried.append(f"{protocol} ({error}; {time.monotonic() - began:.1f} s)")
            continue
        if protocol != known and is_certain:
            logger.info("%s: speaks %s", call.target.endpoint, client.protocol)
            _found[address] = protocol
        return client
    _found.pop(address, None)
    raise TeacherGone(
        f"{call.target.endpoint}: a server listens there, but answers in no protocol of a "
        f"teacher; tried: {', '.join(tried)}"
    )


def _open(protocol: str, call: _Call) -> TeacherClient:
    """Open a client of one protocol. Raises: ProtocolMismatch, and what `connect` raises."""
    try:
        return _OPENERS[protocol](call)
    except BadRequest as error:  # what it says of its model, which may be a page of an ingress
        if call.target.endpoint in str(error):
            raise
        raise type(error)(f"{call.target.endpoint}: {error}") from error
    except DistillError:
        raise
    except Exception as error:
        # Whatever one teacher says of its model must not end a reader that has others.
        raise TeacherGone(
            f"{call.target.endpoint}: what it says of itself cannot be read: {error!r:.200}"
        ) from error


def _open_fast(transport: str, call: _Call) -> TeacherClient:
    target = call.target
    return open_fast(
        target.endpoint,
        target.address,
        model=target.model,
        token=call.token,
        timeout_s=call.timeout_s,
        hello_timeout_s=call.step_s,
        transport=transport,
    )


# The other clients are imported when they are used. gRPC and protobuf take half a second to load,
# and a student whose teachers speak the fast path needs neither.


def _open_oip_grpc(call: _Call) -> TeacherClient:
    from distill_reader.student.clients.oip_client import OipGrpcClient

    connection = _grpc_connection(call)
    return _make(
        call,
        lambda: OipGrpcClient(
            connection,
            call.target.model,
            timeout_s=call.step_s,
            mixes_versions=call.mixes_versions,
        ),
        connection.close,
    )


def _open_oip_http(call: _Call) -> TeacherClient:
    from distill_reader.student.clients.oip_client import OipHttpClient

    connection = _http_connection(call)
    return _make(
        call,
        lambda: OipHttpClient(
            connection,
            call.target.model,
            timeout_s=call.step_s,
            mixes_versions=call.mixes_versions,
        ),
        connection.close,
    )


def _open_serving_http(call: _Call) -> TeacherClient:
    from distill_reader.student.clients.serving_client import ServingHttpClient

    connection = _http_connection(call)
    client = ServingHttpClient(connection, call.config)
    ask = client.probe if call.is_trial else client.find
    _make(call, lambda: ask(timeout_s=call.step_s), connection.close)
    return client


def _open_serving_grpc(call: _Call) -> TeacherClient:
    from distill_reader.student.clients.serving_client import ServingGrpcClient

    connection = _grpc_connection(call)
    client = ServingGrpcClient(connection, call.config)
    _make(call, lambda: client.probe(timeout_s=call.step_s), connection.close)
    return client


def _http_connection(call: _Call) -> HttpClientConnection:
    return HttpClientConnection(
        call.target, token=call.token, access=call.access, connect_timeout_s=call.timeout_s
    )


def _grpc_connection(call: _Call) -> "GrpcClientConnection":
    from distill_reader.student.clients.grpc_connection import GrpcClientConnection

    return GrpcClientConnection(
        call.target, token=call.token, access=call.access, connect_timeout_s=call.timeout_s
    )


def _make(call: _Call, make: Callable[[], T], close: Callable[[], None]) -> T:
    """Return `make()`; close the connection if it fails.

    Raises:
        ProtocolMismatch: also if a trial ends with a broken connection or a timeout.
    """
    try:
        return make()
    except BaseException as error:
        close()
        if call.is_trial and isinstance(error, TeacherGone | TeacherTimeout):
            is_certain = isinstance(error, TeacherGone)
            raise ProtocolMismatch(str(error), is_certain=is_certain) from error
        raise


_OPENERS: Mapping[str, Callable[[_Call], TeacherClient]] = {
    "fast-shm": partial(_open_fast, "shm"),
    "fast-unix": partial(_open_fast, "unix"),
    "fast-tcp": partial(_open_fast, "tcp"),
    "oip-grpc": _open_oip_grpc,
    "oip-http": _open_oip_http,
    "serving-http": _open_serving_http,
    "serving-grpc": _open_serving_grpc,
}
