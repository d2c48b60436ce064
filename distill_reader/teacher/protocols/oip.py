"""The Open Inference Protocol (KServe v2): what gRPC and HTTP share, and its gRPC service.

Triton's clients speak it. `http_oip.py` has the HTTP side.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from distill_reader.errors import BadRequest, ModelNotFound
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols import oip_messages, serving_messages
from distill_reader.protocols.oip_messages import CONFIG_TYPES, MESSAGES, OipRequest
from distill_reader.teacher.protocols.grpc_server import Call, Method
from distill_reader.teacher.service.requests import InferenceService, InferRequest, get_model

SERVER_NAME = "edl-teacher"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics")
HEALTH_METHODS = ("ServerLive", "ServerReady", "ModelReady")  # probes call them without a token
PLATFORM = "paddlepaddle"  # some clients take "" for unknown
_INVALID = ("TYPE_INVALID", 0)
_TYPE_NUMBERS = dict((*CONFIG_TYPES.values(), _INVALID))


class OipGrpc:
    """The gRPC service `inference.GRPCInferenceService`."""

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
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
        }

    def _server_live(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerLiveResponse", live=True)

    def _server_ready(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerReadyResponse", ready=self._service.is_ready)

    def _model_ready(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelReadyRequest", message)
        is_ready = has_model(self._service, request.name, request.version)
        return _answer("ModelReadyResponse", ready=is_ready)

    def _server_metadata(self, _: bytes, __: Call) -> bytes:
        return _answer("ServerMetadataResponse", **metadata_answer())

    def _model_metadata(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelMetadataRequest", message)
        spec = find_model(self._service, request.name, request.version)
        return oip_messages.encode_metadata(spec, PLATFORM)

    def _repository_index(self, message: bytes, _: Call) -> bytes:
        _parse("RepositoryIndexRequest", message)
        return _answer("RepositoryIndexResponse", models=repository_index(self._service))

    def _model_config(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelConfigRequest", message)
        spec = find_model(self._service, request.name, request.version)
        config = model_config(self._service, spec)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = _TYPE_NUMBERS[tensor["data_type"]]
        return _answer("ModelConfigResponse", config=config)

    def _model_statistics(self, message: bytes, _: Call) -> bytes:
        request = _parse("ModelStatisticsRequest", message)
        document = statistics(self._service, request.name, request.version)
        return _answer("ModelStatisticsResponse", **document)

    def _model_infer(self, message: bytes, call: Call) -> bytes:
        request = oip_messages.decode_request(message)
        spec = find_model(self._service, request.model, request.version)
        answer = call.infer(self._service, infer_request(request, spec, "oip-grpc"))
        try:
            return oip_messages.encode_response(
                spec.name,
                answer.outputs,
                version=spec.version,
                digest=spec.digest,
                request_id=request.request_id,
            )
        finally:
            answer.release()


def find_model(service: InferenceService, name: str, version: str) -> ModelSpec:
    """Return the model that a request names.

    Raises:
        ModelNotFound: no model has this name or version; lists the models.
    """
    spec = get_model(service.models(), name)
    if version not in ("", spec.version):
        raise ModelNotFound(f"model {name} has version {spec.version}, not {version!r}")
    return spec


def has_model(service: InferenceService, name: str, version: str) -> bool:
    """Return whether the model is loaded and takes requests."""
    try:
        find_model(service, name, version)
    except ModelNotFound:
        return False
    return service.is_ready


def infer_request(request: OipRequest, spec: ModelSpec, protocol: str) -> InferRequest:
    """Return the request for the service. Raises: BadRequest: an output is named twice."""
    if len(set(request.outputs)) != len(request.outputs):
        raise BadRequest(f"outputs {', '.join(request.outputs)}: one is named twice")
    return InferRequest(
        model=spec.name, inputs=request.inputs, fetch=request.outputs, protocol=protocol
    )


def repository_index(service: InferenceService) -> list[dict[str, str]]:
    """Return the served models, as Triton's model repository extension lists them."""
    state = "READY" if service.is_ready else "UNAVAILABLE"
    return [
        {"name": spec.name, "version": spec.version, "state": state}
        for spec in service.models().values()
    ]


def model_config(service: InferenceService, spec: ModelSpec) -> dict[str, Any]:
    """Return a model's configuration as Triton's model configuration extension writes it."""

    def described(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "data_type": CONFIG_TYPES.get(tensor.dtype, _INVALID)[0],
                "dims": list(tensor.shape),
            }
            for tensor in tensors
        ]

    return {
        "name": spec.name,
        "platform": PLATFORM,
        "max_batch_size": service.max_batch,
        "input": described(spec.inputs),
        "output": described(spec.outputs),
        "dynamic_batching": {"max_queue_delay_microseconds": int(service.batch_timeout_s * 1e6)},
    }


def statistics(service: InferenceService, name: str, version: str) -> dict[str, Any]:
    """Return what a model has done as Triton's statistics extension writes it.

    Args:
        name: "": all models.

    Raises:
        ModelNotFound: no model has this name or version; lists the models.
    """
    specs = [find_model(service, name, version)] if name else service.models().values()
    return {"model_stats": [_statistics_of(service, spec) for spec in specs]}


def _statistics_of(service: InferenceService, spec: ModelSpec) -> dict[str, Any]:
    found = service.statistics(spec.name)
    none = {"count": 0, "ns": 0}  # predictors read and write rows in place: it takes no time
    computed = {"count": found.answered, "ns": found.computed_ns}
    return {
        "name": spec.name,
        "version": spec.version,
        "last_inference": found.last_ms,
        "inference_count": found.samples,
        "execution_count": found.batches,
        "inference_stats": {
            "success": {"count": found.answered, "ns": found.answered_ns},
            "fail": {"count": found.failed, "ns": found.failed_ns},
            "queue": {"count": found.answered, "ns": found.queued_ns},
            "compute_input": {"count": found.answered, "ns": 0},
            "compute_infer": computed,
            "compute_output": {"count": found.answered, "ns": 0},
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": {"count": batches, "ns": 0},
                "compute_infer": {"count": batches, "ns": took_ns},
                "compute_output": {"count": batches, "ns": 0},
            }
            for size, (batches, took_ns) in sorted(found.by_size.items())
        ],
    }


def is_serving(service: InferenceService, name: str) -> bool | None:
    """Return whether a service of gRPC's health protocol is ready; None: it is unknown.

    Args:
        name: "": the teacher; also one of its gRPC services, or a model.
    """
    is_known = name in ("", oip_messages.SERVICE, serving_messages.SERVICE)
    return service.is_ready if is_known or name in service.models() else None


def metadata_answer() -> Mapping[str, object]:
    """Return the metadata of the server."""
    try:
        version = importlib.metadata.version("edl")
    except importlib.metadata.PackageNotFoundError:
        version = "0"  # runs from a checkout that is not installed
    return {"name": SERVER_NAME, "version": version, "extensions": list(EXTENSIONS)}


def _parse(name: str, message: bytes) -> Any:
    try:
        return MESSAGES[name].FromString(message)
    except DecodeError as error:
        raise BadRequest(f"the message is no {name}: {error}") from error


def _answer(name: str, /, **fields: object) -> bytes:
    return bytes(MESSAGES[name](**fields).SerializeToString())
