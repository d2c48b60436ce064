"""Clients of Paddle Serving's GeneralModelService, over HTTP with protobuf and over gRPC.

The protocol has no call for metadata. A client prototxt tells what the model takes; without one the
arrays are sent as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distill_reader.errors import BadRequest, ModelNotFound, TeacherFailed, TeacherGone
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols import serving_messages
from distill_reader.student.clients.client import Array, Bounds
from distill_reader.student.clients.endpoints import ProtocolMismatch
from distill_reader.student.clients.http_connection import HttpAnswer, HttpClientConnection
from distill_reader.student.clients.rows import find_outputs, gather, pick_outputs

if TYPE_CHECKING:  # clients over HTTP do not load gRPC
    from distill_reader.student.clients.grpc_connection import GrpcClientConnection

_PATH = "/GeneralModelService/inference"
_HEALTH = "/health"  # of brpc; any answer will do that is not a gateway's
_METHOD = f"/{serving_messages.SERVICE}/inference"
_PROTO = "application/proto"
_UNKNOWN = ModelSpec(name="serving", version="", inputs=(), outputs=())


class _Codec:
    """Encodes requests to one teacher, and decodes its answers."""

    def __init__(self, endpoint: str, config: ModelSpec | None) -> None:
        self.endpoint = endpoint
        self.spec = config or _UNKNOWN

    def encode(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str]
    ) -> tuple[bytes, dict[str, str]]:
        """Return the request, and the alias of each output wanted."""
        # A prototxt leaves out axes of open length, so its shapes are incomplete.
        rows = gather(self.spec, feeds, is_exact=False)
        wanted = find_outputs(self.spec, fetch)
        request = serving_messages.encode_request(
            {row.name: row.arrays for row in rows},
            list(dict.fromkeys(wanted.values())),
            names={tensor.name: tensor.variable for tensor in self.spec.inputs},
        )
        return request, wanted

    def decode(self, answer: bytes | memoryview, wanted: Mapping[str, str]) -> dict[str, Array]:
        try:
            response = serving_messages.decode_response(answer)
        except BadRequest as error:
            raise TeacherGone(f"{self.endpoint}: its answer: {error}") from error
        if response.err_no:
            raise TeacherFailed(f"{self.endpoint}: error {response.err_no}: {response.err_msg}")
        return pick_outputs(self.endpoint, wanted, response.arrays())


class ServingHttpClient:
    """A TeacherClient over HTTP. Nothing is compressed: tensors hardly shrink."""

    protocol = "serving-http"
    bounds = Bounds()  # the protocol announces none

    def __init__(self, connection: HttpClientConnection, config: ModelSpec | None) -> None:
        """
        Args:
            config: from the client prototxt; None: the model is unknown.
        """
        self.endpoint = connection.endpoint
        self._connection = connection
        self._codec = _Codec(connection.endpoint, config)

    @property
    def spec(self) -> ModelSpec:
        """See TeacherClient. Without inputs and outputs if there is no config."""
        return self._codec.spec

    def probe(self, *, timeout_s: float) -> None:
        """Find out whether the server speaks this protocol.

        Raises:
            ProtocolMismatch: it does not.
            TeacherGone, TeacherTimeout, TeacherBusy.
        """
        answer = self._post(b"", timeout_s)
        self._connection.check_reached(answer)
        if answer.status in (404, 405, 501):
            raise ProtocolMismatch(f"{self.endpoint}: HTTP {answer.status} for {_PATH}")

    def find(self, *, timeout_s: float) -> None:
        """Find out whether a gateway reaches the server; else it loses one request after the other.

        Raises:
            TeacherGone, TeacherTimeout, TeacherBusy.
        """
        answer = self._connection.request("GET", _HEALTH, timeout_s=timeout_s)
        self._connection.check_gateway(answer)

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        """See TeacherClient."""
        request, wanted = self._codec.encode(feeds, fetch)
        answer = self._post(request, timeout_s)
        if answer.status != 200:
            self._connection.refuse(_readable(answer))
        content_type = _content_type(answer)
        if content_type != _PROTO:
            raise TeacherGone(f"{self.endpoint}: its answer is {content_type!r}, not {_PROTO}")
        return self._codec.decode(answer.body, wanted)

    def close(self) -> None:
        """See TeacherClient."""
        self._connection.close()

    def _post(self, body: bytes, timeout_s: float) -> HttpAnswer:
        headers = {"Content-Type": _PROTO}
        return self._connection.request("POST", _PATH, [body], headers, timeout_s=timeout_s)


def _content_type(answer: HttpAnswer) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip()


def _readable(answer: HttpAnswer) -> HttpAnswer:
    """Return an error with the text alone, where it comes as a Response of protobuf."""
    if _content_type(answer) != _PROTO:
        return answer
    try:
        text = serving_messages.decode_response(answer.body).err_msg
    except BadRequest:
        return answer
    return replace(answer, body=memoryview(text.encode())) if text else answer


class ServingGrpcClient:
    """A TeacherClient over gRPC."""

    protocol = "serving-grpc"
    bounds = Bounds()  # the protocol announces none

    def __init__(self, connection: "GrpcClientConnection", config: ModelSpec | None) -> None:
        """
        Args:
            config: from the client prototxt; None: the model is unknown.
        """
        self.endpoint = connection.endpoint
        self._connection = connection
        self._codec = _Codec(connection.endpoint, config)

    @property
    def spec(self) -> ModelSpec:
        """See TeacherClient. Without inputs and outputs if there is no config."""
        return self._codec.spec

    def probe(self, *, timeout_s: float) -> None:
        """Find out whether the server speaks this protocol.

        Raises:
            ProtocolMismatch: it does not.
            DistillError: as `predict`, except for errors about the empty request.
        """
        try:
            self._connection.call(_METHOD, b"", timeout_s=timeout_s)
        except (BadRequest, TeacherFailed):  # the request is empty, but the method is known
            return

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        """See TeacherClient."""
        request, wanted = self._codec.encode(feeds, fetch)
        try:
            answer = self._connection.call(_METHOD, request, timeout_s=timeout_s)
        except ProtocolMismatch as error:
            raise ModelNotFound(str(error)) from error
        return self._codec.decode(answer, wanted)

    def close(self) -> None:
        """See TeacherClient."""
        self._connection.close()
