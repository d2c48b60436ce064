"""Clients of the Open Inference Protocol (KServe v2): Triton, KServe, MLServer, and our teachers.

Source: https://github.com/kserve/open-inference-protocol. The spec comes from a model's metadata.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from google.protobuf.message import DecodeError

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TransientFailure,
    UsageError,
)
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols import oip_json, oip_messages, protobuf_wire
from distill_reader.protocols.oip_messages import OipResponse
from distill_reader.student.clients.client import Array, Bounds
from distill_reader.student.clients.endpoints import ProtocolMismatch
from distill_reader.student.clients.http_connection import HttpAnswer, HttpClientConnection
from distill_reader.student.clients.rows import find_outputs, gather, pick_outputs

if TYPE_CHECKING:  # clients over HTTP do not load gRPC
    from distill_reader.student.clients.grpc_connection import GrpcClientConnection

_SERVICE = f"/{oip_messages.SERVICE}/"
_READY = "READY"  # state of a model in Triton's repository index
_READY_AGAIN_S = 0.5  # until a teacher is asked again of whose models none is ready
_BYTES = "binary_tensor_data"  # the extension by which tensors go as bytes over HTTP
_NOT_READ = frozenset({400, 415, 422, 500})  # HTTP statuses of a server that takes JSON alone
_INVALID = 400  # HTTP's status of a request that the model does not take


class OipGrpcClient:
    """A TeacherClient over gRPC, with raw contents."""

    protocol = "oip-grpc"

    def __init__(
        self,
        connection: "GrpcClientConnection",
        model: str,
        *,
        timeout_s: float,
        mixes_versions: bool = False,
    ) -> None:
        """Ask for the model's metadata.

        Args:
            model: "": the only one that the teacher lists.
            mixes_versions: whether answers may be of models with other digests.

        Raises:
            ProtocolMismatch: the server speaks gRPC, but not this protocol.
            DistillError: as `predict`; UsageError if the model must be named.
        """
        self.endpoint = connection.endpoint
        self._connection = connection
        self._model = model or _only(self.endpoint, self._list_models(timeout_s))
        self._spec = self._describe(timeout_s)
        self._served = _ServedVersion(
            self.endpoint, self._spec, self._describe, mixes_versions=mixes_versions
        )
        self.bounds = Bounds(most_samples=self._max_batch_size(timeout_s))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        """See TeacherClient."""
        inputs = {row.name: row.arrays for row in gather(self._spec, feeds)}
        wanted = find_outputs(self._spec, fetch)
        request = oip_messages.encode_request(self._model, inputs, _distinct(wanted))
        try:
            answer = self._connection.call(f"{_SERVICE}ModelInfer", request, timeout_s=timeout_s)
        except ProtocolMismatch as error:
            raise TeacherGone(str(error)) from error
        except BadRequest as error:
            if type(error) is BadRequest:
                _check_bounds(self, self._max_batch_size(timeout_s))
            raise
        try:
            response = oip_messages.decode_response(answer)
        except BadRequest as error:
            raise TeacherGone(f"{self.endpoint}: its answer: {error}") from error
        self._served.check(response, timeout_s)
        return pick_outputs(self.endpoint, wanted, response.outputs)

    def close(self) -> None:
        """See TeacherClient."""
        self._connection.close()

    def _describe(self, timeout_s: float) -> ModelSpec:
        request = oip_messages.MESSAGES["ModelMetadataRequest"](name=self._model)
        answer = self._connection.call(
            f"{_SERVICE}ModelMetadata", request.SerializeToString(), timeout_s=timeout_s
        )
        return oip_messages.decode_metadata(answer)

    def _list_models(self, timeout_s: float) -> list[tuple[str, str]]:
        """Return the models with their states, as Triton's extension lists them; []: no list."""
        try:
            answer = self._connection.call(f"{_SERVICE}RepositoryIndex", b"", timeout_s=timeout_s)
        except ProtocolMismatch:
            # A server of the plain protocol has no such list, but has ServerLive.
            self._connection.call(f"{_SERVICE}ServerLive", b"", timeout_s=timeout_s)
            return []
        models = []
        for number, _, model in protobuf_wire.read_fields(memoryview(answer)):
            if number == 1:
                fields = {
                    field: protobuf_wire.read_text(value)
                    for field, _, value in protobuf_wire.read_fields(model)
                }
                models.append((fields.get(1, ""), fields.get(3, _READY)))
        return models

    def _max_batch_size(self, timeout_s: float) -> int | None:
        """Return the most samples of a request; None: not announced. Triton's extension."""
        if self._spec.takes_encodings:  # a teacher of ours, which splits larger requests itself
            return None
        request = oip_messages.MESSAGES["ModelConfigRequest"](name=self._model)
        try:
            answer = self._connection.call(
                f"{_SERVICE}ModelConfig", request.SerializeToString(), timeout_s=timeout_s
            )
            config = oip_messages.MESSAGES["ModelConfigResponse"].FromString(answer).config
        except (ProtocolMismatch, BadRequest, TeacherFailed, DecodeError):
            return None  # a server of the plain protocol
        return int(config.max_batch_size) if config.max_batch_size > 0 else None


class OipHttpClient:
    """A TeacherClient over HTTP, with binary tensors."""

    protocol = "oip-http"

    def __init__(
        self,
        connection: HttpClientConnection,
        model: str,
        *,
        timeout_s: float,
        mixes_versions: bool = False,
    ) -> None:
        """Ask for the model's metadata.

        Args:
            model: "": the only one that the teacher lists.
            mixes_versions: whether answers may be of models with other digests.

        Raises:
            ProtocolMismatch: the server speaks HTTP, but not this protocol.
            DistillError: as `predict`; UsageError if the model must be named.
        """
        self.endpoint = connection.endpoint
        self._connection = connection
        live = connection.request("GET", "/v2/health/live", timeout_s=timeout_s)
        connection.check_found(live)
        if live.status in (400, 404, 405, 501):
            raise ProtocolMismatch(
                f"{self.endpoint}: HTTP {live.status} for {connection.prefix}/v2/health/live "
                "(behind an ingress a path may be missing, as in http://HOST:PORT/PATH/MODEL, or "
                "the header Host, by set_teacher_access)"
            )
        if live.status != 200:
            connection.refuse(live)
        self._model = model or _only(self.endpoint, self._list_models(timeout_s))
        self._path = f"/v2/models/{quote(self._model, safe='')}"
        self._spec = self._describe(timeout_s)
        self._served = _ServedVersion(
            self.endpoint, self._spec, self._describe, mixes_versions=mixes_versions
        )
        self._requests = 0
        self._has_answered = False
        self.bounds = Bounds(most_samples=self._max_batch_size(timeout_s))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        """See TeacherClient."""
        inputs = {row.name: row.arrays for row in gather(self._spec, feeds)}
        wanted = find_outputs(self._spec, fetch)
        self._requests += 1
        request_id = str(self._requests)
        head_length, buffers = oip_json.encode_request(
            inputs, _distinct(wanted), request_id=request_id
        )
        headers = {
            "Content-Type": "application/octet-stream",
            oip_json.HEAD_LENGTH: str(head_length),
        }
        answer = self._connection.request(
            "POST", f"{self._path}/infer", buffers, headers, timeout_s=timeout_s
        )
        if answer.status != 200:
            if answer.status == _INVALID:
                _check_bounds(self, self._max_batch_size(timeout_s))
            self._connection.refuse(self._explained(answer, timeout_s))
        self._has_answered = True
        try:
            length = answer.headers.get(oip_json.HEAD_LENGTH.lower())
            response = oip_json.decode_response(
                answer.body, None if length is None else int(length)
            )
        except (BadRequest, ValueError) as error:
            raise TeacherGone(f"{self.endpoint}: its answer: {error}") from error
        if response.request_id not in ("", request_id):  # some servers do not repeat it
            raise TeacherGone(
                f"{self.endpoint}: its answer is to request {response.request_id[:40]!r}, not "
                f"{request_id!r}"
            )
        self._served.check(response, timeout_s)
        return pick_outputs(self.endpoint, wanted, response.outputs)

    def close(self) -> None:
        """See TeacherClient."""
        self._connection.close()

    def _explained(self, refusal: HttpAnswer, timeout_s: float) -> HttpAnswer:
        """Return a refusal, with the remedy before its text if the server may take JSON alone."""
        if self._has_answered or refusal.status not in _NOT_READ:
            return refusal
        server = self._connection.request("GET", "/v2", timeout_s=timeout_s)
        if server.status != 200 or _BYTES.encode() in bytes(server.body):
            return refusal
        text = (
            f"(tensors are sent as bytes, and it does not list {_BYTES}: if it takes JSON alone, "
            f"as MLServer does, name it by grpc:// and its port for that) {refusal.text()}"
        )
        return replace(refusal, body=memoryview(text.encode()))

    def _describe(self, timeout_s: float) -> ModelSpec:
        answer = self._connection.request("GET", self._path, timeout_s=timeout_s)
        if answer.status != 200:
            self._connection.refuse(answer)
        return oip_json.decode_metadata(bytes(answer.body))

    def _list_models(self, timeout_s: float) -> list[tuple[str, str]]:
        """Return the models with their states, as Triton's extension lists them; []: no list."""
        headers = {"Content-Type": "application/json"}
        answer = self._connection.request(
            "POST", "/v2/repository/index", [b"{}"], headers, timeout_s=timeout_s
        )
        self._connection.check_reached(answer)
        if answer.status != 200:
            return []
        try:
            models = json.loads(bytes(answer.body))
            return sorted((m["name"], m.get("state", _READY)) for m in models)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TeacherGone(f"{self.endpoint}: its list of models: {error}") from error

    def _max_batch_size(self, timeout_s: float) -> int | None:
        """Return the most samples of a request; None: not announced. Triton's extension."""
        if self._spec.takes_encodings:  # as for gRPC
            return None
        answer = self._connection.request("GET", f"{self._path}/config", timeout_s=timeout_s)
        self._connection.check_reached(answer)
        try:
            most = json.loads(bytes(answer.body))["max_batch_size"]
        except (ValueError, TypeError, KeyError):
            return None
        return most if answer.status == 200 and type(most) is int and most > 0 else None


class _ServedVersion:
    """Notices that another model answers than the one whose metadata was read.

    Triton can replace a model, a connection that was idle is made again without a word, and behind
    a gateway each request may go to another server.
    """

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec,
        describe: Callable[[float], ModelSpec],
        *,
        mixes_versions: bool,
    ) -> None:
        """
        Args:
            spec: as the connection began.
            describe: reads it again, within some seconds.
        """
        self._endpoint = endpoint
        self._spec = spec
        self._describe = describe
        self._digest = "" if mixes_versions else spec.digest
        self._version = ""  # of the answers so far; "": they name none

    def check(self, response: OipResponse, timeout_s: float) -> None:
        """Raises: TeacherGone: the model is another one now, so its metadata must be read again."""
        if response.digest and self._digest and response.digest != self._digest:
            raise TeacherGone(
                f"{self._endpoint}: answers by version {response.digest[:40]} of the model, "
                f"and was asked by {self._digest[:40]}"
            )
        version, before = response.version, self._version
        if version in ("", before):
            return
        if before or (version != self._spec.version and self._has_changed(timeout_s)):
            raise TeacherGone(
                f"{self._endpoint}: answers by version {version[:40]!r} of the model, and "
                f"{'did so' if before else 'was asked'} by {(before or self._spec.version)[:40]!r}"
            )
        self._version = version

    def _has_changed(self, timeout_s: float) -> bool:
        """Return whether the model was replaced; else any of the versions listed may answer."""
        try:
            return self._describe(timeout_s) != self._spec
        except TransientFailure:
            raise
        except DistillError as error:
            raise TeacherGone(f"{self._endpoint}: its model has changed: {error}") from error


def _check_bounds(client: OipGrpcClient | OipHttpClient, most: int | None) -> None:
    """Check, after a refusal, that the model takes as many samples of a request as it did.

    Raises:
        TeacherGone: it does not, as once its configuration was changed: it must be read again.
    """
    if most != client.bounds.most_samples:
        raise TeacherGone(
            f"{client.endpoint}: the model takes {most or 'any number of'} samples of a request, "
            f"and took {client.bounds.most_samples or 'any number'} before"
        )


def _only(endpoint: str, listed: Sequence[tuple[str, str]]) -> str:
    """Return the only model that is ready, of those listed with their states.

    Raises:
        ModelNotFound, UsageError: it must be named.
        TeacherBusy: none is ready, as while they are loaded, or the teacher drains.
    """
    names = sorted({name for name, state in listed if state == _READY})
    if len(names) == 1:
        return names[0]
    if names:
        raise ModelNotFound(
            f"{endpoint}: serves several models, name one, as {endpoint}/{names[0]}: "
            f"{', '.join(names)}"
        )
    if listed:
        states = ", ".join(sorted({f"{name} ({state})" for name, state in listed}))
        raise TeacherBusy(
            f"{endpoint}: none of its models is ready: {states}", delay_s=_READY_AGAIN_S
        )
    raise UsageError(
        f"{endpoint}: speaks the Open Inference Protocol and does not list its models: name the "
        f"model, as {endpoint}/NAME"
    )


def _distinct(wanted: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(wanted.values()))
