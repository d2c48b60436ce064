"""Paddle Serving's GeneralModelService: what gRPC and HTTP share, and its gRPC service.

Its requests name no model, and the original answers with one ModelOutput per engine of a graph.
Here a request is for one model: the first of the command line, unless the client names another in
HTTP's path or in gRPC's metadata. Clients of the original cannot do that and need not.
`http_serving.py` has the HTTP side.
"""

import time

from distill_reader.errors import BadRequest, DistillError, TeacherBusy
from distill_reader.model.output_encodings import split_name
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import Array
from distill_reader.protocols import serving_messages
from distill_reader.protocols.serving_messages import ServingRequest, ServingResponse, ServingTensor
from distill_reader.teacher.protocols.grpc_server import Call, Method
from distill_reader.teacher.service.requests import (
    InferAnswer,
    InferenceService,
    InferRequest,
    get_model,
)

METHODS = ("inference", "debug")
MODEL_KEY = "edl-model"  # gRPC metadata that names the model

# Codes of the original: predictor/common/constant.h.
_ERR_OVERFLOW = -5002  # the server takes no more for now
_ERR_FRAMEWORK = -5000  # the message cannot be read
_ERR_INFERENCE = -5100  # the message can be read, but not answered


class ServingGrpc:
    """The gRPC service `baidu.paddle_serving.predictor.general_model.GeneralModelService`."""

    def __init__(self, service: InferenceService, max_request_bytes: int) -> None:
        self._service = service
        self._max_bytes = max_request_bytes

    def methods(self) -> dict[str, Method]:
        return dict.fromkeys(METHODS, self._inference)

    def _inference(self, message: bytes, call: Call) -> bytes:
        began_us = now_us()
        request = serving_messages.decode_request(message, max_bytes=self._max_bytes)
        spec = find_model(self._service, str(call.metadata.get(MODEL_KEY, "")))
        answer = call.infer(self._service, infer_request(request, spec, "serving-grpc"))
        try:
            return serving_messages.encode_response(response(request, spec, answer, began_us))
        finally:
            answer.release()


def error_code(error: DistillError, *, is_readable: bool = True) -> int:
    """Return the value of `err_no` and `x-bd-error-code` for an error.

    `is_readable`: whether the request could be decoded.
    """
    if isinstance(error, TeacherBusy):
        return _ERR_OVERFLOW
    return _ERR_INFERENCE if is_readable else _ERR_FRAMEWORK


def find_model(service: InferenceService, name: str) -> ModelSpec:
    """Return the model that a request is for; `name` is "" if it names none.

    Raises:
        ModelNotFound: no model has this name; lists the models.
    """
    models = service.models()
    return get_model(models, name) if name else next(iter(models.values()))


def infer_request(request: ServingRequest, spec: ModelSpec, protocol: str) -> InferRequest:
    """Return the request for the service.

    Raises:
        BadRequest: a tensor came twice, or is no input of the model.
    """
    inputs: dict[str, Array] = {}
    for tensor in request.tensors:
        name = _input_name(tensor, spec)
        if name in inputs:
            raise BadRequest(f"tensor {name}: came twice")
        inputs[name] = tensor.array
    return InferRequest(
        model=spec.name,
        inputs=inputs,
        fetch=tuple(dict.fromkeys(request.fetch)),
        protocol=protocol,
    )


def response(
    request: ServingRequest, spec: ModelSpec, answer: InferAnswer, began_us: int
) -> ServingResponse:
    """Return the response. It shares the arrays of `answer`.

    Args:
        began_us: the value of `now_us` when the request came.
    """
    outputs = []
    for name, array in answer.outputs.items():
        tensor, encoding = split_name(spec, name)
        labels = (name, name) if encoding else (tensor.variable, tensor.name)
        outputs.append(ServingTensor(name=labels[0], alias_name=labels[1], array=array))
    profile_time: tuple[int, ...] = ()
    if request.profile_server:  # of the operations reader, infer and response
        infer_us = began_us + answer.queued_us
        done_us = infer_us + answer.computed_us
        profile_time = (began_us, infer_us, infer_us, done_us, done_us, max(now_us(), done_us))
    return ServingResponse(outputs=tuple(outputs), profile_time=profile_time, log_id=request.log_id)


def now_us() -> int:
    """Return the time in microseconds, as used in profiles."""
    return time.time_ns() // 1000


def _input_name(tensor: ServingTensor, spec: ModelSpec) -> str:
    """Return the name of the input that a tensor is for, by its alias or its own name."""
    for name in (tensor.alias_name, tensor.name):
        if any(name in (wanted.name, wanted.variable) for wanted in spec.inputs):
            return spec.input(name).name
    return spec.input(tensor.label).name  # raises: lists the inputs
