"""The Open Inference Protocol (KServe v2) over gRPC: what Triton's clients speak."""

from typing import Any

from google.protobuf.message import DecodeError

from distill_reader.errors import BadRequest
from distill_reader.protocols import oip_messages
from distill_reader.protocols.oip_messages import MESSAGES
from distill_reader.teacher.protocols import oip
from distill_reader.teacher.protocols.grpc_server import Call, Method
from distill_reader.teacher.service.requests import InferenceService


class OipGrpc:
    """The service `inference.GRPCInferenceService`."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def methods(self) -> dict[str, Method]:
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
        }

    def _server_live(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerLiveResponse", live=True)

    def _server_ready(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerReadyResponse", ready=self._service.is_ready)

    def _model_ready(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelReadyRequest", message)
        is_ready = oip.has_model(self._service, request.name, request.version)
        return _answer("ModelReadyResponse", ready=is_ready)

    def _server_metadata(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerMetadataResponse", **oip.metadata_answer())

    def _model_metadata(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelMetadataRequest", message)
        spec = oip.find_model(self._service, request.name, request.version)
        return oip_messages.encode_metadata(spec, oip.PLATFORM)

    def _repository_index(self, message: bytes, _: Call) -> bytes:
        _parse("RepositoryIndexRequest", message)
        return _answer("RepositoryIndexResponse", models=oip.repository_index(self._service))

    def _model_infer(self, message: bytes, call: Call) -> bytes:
        request = oip_messages.decode_request(message)
        spec = oip.find_model(self._service, request.model, request.version)
        answer = call.infer(self._service, oip.infer_request(request, spec, "oip-grpc"))
        try:
            return oip_messages.encode_response(
                spec.name,
                answer.outputs,
                version=spec.version,
                request_id=request.request_id,
            )
        finally:
            answer.release()


def _parse(name: str, message: bytes) -> Any:
    try:
        return MESSAGES[name].FromString(message)
    except DecodeError as error:
        raise BadRequest(f"the message is no {name}: {error}") from error


def _answer(name: str, /, **fields: object) -> bytes:
    return bytes(MESSAGES[name](**fields).SerializeToString())
