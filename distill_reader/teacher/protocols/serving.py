"""What the forms of Paddle Serving's protocol have in common: its requests name no model.

The original answers with one ModelOutput per engine of a graph. Here a request is for one model:
the first of the command line, or the one that the client names beside the message (in the path of
HTTP, in the metadata of gRPC), which clients of the original cannot and need not do.
"""

import time

from distill_reader.errors import BadRequest, DistillError, ModelNotFound, TeacherBusy
from distill_reader.model.output_encodings import split_name
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.serving_messages import ServingRequest, ServingResponse, ServingTensor
from distill_reader.teacher.service.requests import (
    Array,
    InferAnswer,
    InferenceService,
    InferRequest,
)

METHODS = ("inference", "debug")

# Codes of the original: predictor/common/constant.h.
_ERR_OVERFLOW = -5002  # more than the server takes now
_ERR_FRAMEWORK = -5000  # the message itself is wrong
_ERR_INFERENCE = -5100  # what it asks for is


def error_code(error: DistillError, *, is_readable: bool = True) -> int:
    """Return what `err_no` and `x-bd-error-code` say of an error."""
    if isinstance(error, TeacherBusy):
        return _ERR_OVERFLOW
    return _ERR_INFERENCE if is_readable else _ERR_FRAMEWORK


def find_model(service: InferenceService, name: str) -> ModelSpec:
    """Return the model that a request is for; "": it names none.

    Raises:
        ModelNotFound: there is none of this name; lists those there are.
    """
    models = service.models()
    if not name:
        return next(iter(models.values()))
    if name not in models:
        raise ModelNotFound(f"no model {name!r} is served here; there is {', '.join(models)}")
    return models[name]


def infer_request(request: ServingRequest, spec: ModelSpec, protocol: str) -> InferRequest:
    """Return the request for the service.

    Raises:
        BadRequest: a tensor came twice or is none of the model's.
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
    """Return the response; its arrays are those of the answer.

    Args:
        began_us: `now_us` when the request came.
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
    """Return the time in microseconds, as profiles have it."""
    return time.time_ns() // 1000


def _input_name(tensor: ServingTensor, spec: ModelSpec) -> str:
    """Return the model's name of a tensor, which comes with an alias, its own name, or both."""
    for name in (tensor.alias_name, tensor.name):
        if any(name in (wanted.name, wanted.variable) for wanted in spec.inputs):
            return spec.input(name).name
    return spec.input(tensor.label).name  # says which there are
