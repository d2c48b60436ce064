"""Bodies of the Open Inference Protocol over HTTP: a JSON head, then bytes of tensors.

Tensors are JSON lists in the head, or, by the binary tensor data extension, bytes after it. Then
the head has their `binary_data_size`, in the same order, and HEAD_LENGTH is its own length.

A field that is null is as one that is not there: KServe's own servers write all that they leave out
so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import (
    BFLOAT16,
    OIP_TO_NUMPY,
    Array,
    Rows,
    cast_numbers,
    count_items,
    join_rows,
    numpy_dtype,
    oip_datatype,
    raw_bytes,
    view_bfloat16,
    view_bytes,
)
from distill_reader.protocols.oip_messages import (
    DIGEST,
    MAX_TENSORS,
    OipRequest,
    OipResponse,
    check_parameter,
    metadata_of,
    properties_of,
    spec_of,
    with_properties,
)
from distill_reader.protocols.serving_json import parse_json

HEAD_LENGTH = "Inference-Header-Content-Length"  # an HTTP header: bytes of the JSON head


@dataclass(frozen=True, slots=True, kw_only=True)
class OipHttpRequest:
    """A request, and which outputs the client wants as bytes instead of JSON."""

    request: OipRequest
    is_binary: bool  # for outputs that `binary` does not name
    binary: Mapping[str, bool]


def encode_request(
    inputs: Mapping[str, Rows], outputs: Sequence[str] = (), *, request_id: str = ""
) -> tuple[int, list[Any]]:
    """Return the length of the head, and the buffers that form the body, without copying.

    It asks for all outputs as bytes.

    Raises:
        BadRequest: a tensor cannot be sent; names it.
    """
    head: dict[str, Any] = {"id": request_id} if request_id else {}
    body: list[Any] = []
    head["inputs"] = [_describe(name, rows, body) for name, rows in inputs.items()]
    if outputs:
        parameters = {"binary_data": True}
        head["outputs"] = [{"name": name, "parameters": parameters} for name in outputs]
    head["parameters"] = {"binary_data_output": True}
    text = json.dumps(head, separators=(",", ":")).encode()
    return len(text), [text, *body]


def decode_request(body: bytes | memoryview, head_length: int | None) -> OipHttpRequest:
    """Decode the body of a request. The model and its version are in the URL.

    Args:
        head_length: the value of HEAD_LENGTH; None: there is no such header, all is JSON.

    Raises:
        BadRequest: malformed; names the field or the tensor.
    """
    head, rest = _split(body, head_length)
    wanted: list[str] = []
    binary: dict[str, bool] = {}
    for output in _objects(head, "outputs"):
        name = _name_of(output, "outputs")
        wanted.append(name)
        for parameter, value in _parameters(output).items():
            check_parameter(name, parameter)
            if parameter == "binary_data":
                binary[name] = value is True
    return OipHttpRequest(
        request=OipRequest(
            model="",
            request_id=_text(head, "id"),
            inputs=_decode_tensors(head, "inputs", rest),
            outputs=tuple(wanted),
        ),
        is_binary=_parameters(head).get("binary_data_output") is True,
        binary=binary,
    )


def encode_response(
    model: str,
    outputs: Mapping[str, Array],
    *,
    asked: OipHttpRequest,
    version: str = "",
    digest: str = "",
) -> tuple[int | None, list[Any]]:
    """Return the length of the head, None if all is JSON, and the buffers of the body.

    Raises:
        BadRequest: a tensor cannot be sent so; names it.
    """
    head: dict[str, Any] = {"model_name": model, "model_version": version}
    if digest:
        head["parameters"] = {DIGEST: digest}
    if asked.request.request_id:
        head["id"] = asked.request.request_id
    body: list[Any] = []
    is_binary = False
    head["outputs"] = []
    for name, array in outputs.items():
        if asked.binary.get(name, asked.is_binary):
            head["outputs"].append(_describe(name, array, body))
            is_binary = True
        else:
            if not np.isfinite(array).all():
                raise BadRequest(
                    f"output {name}: has values that are infinite or not a number, which JSON "
                    'cannot say: ask for bytes, by the parameter "binary_data": true of the output '
                    'or "binary_data_output": true of the request'
                )
            head["outputs"].append(
                {
                    "name": name,
                    "datatype": oip_datatype(name, array.dtype),
                    "shape": list(array.shape),
                    "data": array.reshape(-1).tolist(),
                }
            )
    text = json.dumps(head, separators=(",", ":")).encode()
    return (len(text) if is_binary else None), [text, *body]


def decode_response(body: bytes | memoryview, head_length: int | None) -> OipResponse:
    """Decode the body of an answer. Raises: BadRequest: malformed."""
    head, rest = _split(body, head_length)
    parameters = head.get("parameters")  # of other servers it may be anything
    return OipResponse(
        model=_text(head, "model_name"),
        version=_text(head, "model_version"),
        digest=str(parameters.get(DIGEST, "")) if isinstance(parameters, dict) else "",
        request_id=_text(head, "id"),
        outputs=_decode_tensors(head, "outputs", rest),
    )


def encode_metadata(spec: ModelSpec, platform: str) -> dict[str, Any]:
    """Return the metadata of a model as a JSON document. Axis 0 of each tensor is -1."""
    return {
        "name": spec.name,
        "versions": [spec.version],
        "platform": platform,
        "inputs": metadata_of(spec.inputs),
        "outputs": metadata_of(spec.outputs),
        **({"properties": properties} if (properties := properties_of(spec)) else {}),
    }


def decode_metadata(body: bytes) -> ModelSpec:
    """Return the model that the metadata describes. Raises: BadRequest: malformed."""
    document = parse_json(body)
    versions = document.get("versions") or [""]
    tensors = {
        kind: tuple(
            spec_of(
                _name_of(tensor, kind),
                _text(tensor, "datatype"),
                _shape_of(tensor),
                is_output=kind == "outputs",
            )
            for tensor in _objects(document, kind)
        )
        for kind in ("inputs", "outputs")
    }
    spec = ModelSpec(
        name=_text(document, "name"),
        version=str(versions[-1]) if isinstance(versions, list) else "",
        inputs=tensors["inputs"],
        outputs=tensors["outputs"],
    )
    properties = document.get("properties")
    return with_properties(spec, properties) if isinstance(properties, dict) else spec


def _describe(name: str, rows: Rows, body: list[Any]) -> dict[str, Any]:
    """Return the description of a tensor for the head; add its bytes to `body`."""
    dtype, shape, arrays = join_rows(name, rows)
    body.extend(raw_bytes(array) for array in arrays)
    return {
        "name": name,
        "datatype": oip_datatype(name, dtype),
        "shape": list(shape),
        "parameters": {"binary_data_size": sum(array.nbytes for array in arrays)},
    }


def _split(body: bytes | memoryview, head_length: int | None) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(body)
    length = len(view) if head_length is None else head_length
    if not 0 <= length <= len(view):
        raise BadRequest(f"{HEAD_LENGTH}: is {length}, the body has {len(view)} bytes")
    return parse_json(view[:length]), view[length:]


def _decode_tensors(head: dict[str, Any], kind: str, rest: memoryview) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for tensor in _objects(head, kind):
        name = _name_of(tensor, kind)
        if name in arrays:
            raise BadRequest(f"tensor {name}: came twice")
        datatype = _text(tensor, "datatype")
        is_bfloat16 = kind == "outputs" and datatype == BFLOAT16
        # Outputs of other types are skipped: nobody asked for them.
        is_skipped = kind == "outputs" and datatype not in OIP_TO_NUMPY and not is_bfloat16
        unknown = np.dtype("float32" if is_bfloat16 else "void")
        dtype = unknown if is_bfloat16 or is_skipped else numpy_dtype(name, datatype)
        shape = _shape_of(tensor)
        parameters = _parameters(tensor)
        for parameter in parameters:
            check_parameter(name, parameter)
        if "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            if type(size) is not int or not 0 <= size <= len(rest):
                raise BadRequest(
                    f"tensor {name}: binary_data_size is {str(size)[:80]}, "
                    f"{len(rest)} bytes are left"
                )
            data, rest = rest[:size], rest[size:]
            if is_bfloat16:
                arrays[name] = view_bfloat16(name, data, shape)
            elif not is_skipped:
                arrays[name] = view_bytes(name, data, dtype, shape)
        elif not is_skipped:
            arrays[name] = _decode_data(name, tensor.get("data"), dtype, shape)
    if len(rest):
        raise BadRequest(f"{len(rest)} bytes are left after the last tensor")
    return arrays


def _decode_data(name: str, data: object, dtype: np.dtype[Any], shape: list[int]) -> Array:
    if not isinstance(data, list):
        raise BadRequest(f"tensor {name}: needs data, a list of numbers, or binary_data_size")
    array = cast_numbers(name, data, dtype)
    count = count_items(name, shape)
    if array.size != count:
        raise BadRequest(f"tensor {name}: shape {shape} has {count} elements, {array.size} came")
    return array.reshape(shape)


def _objects(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values = _given(document, name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise BadRequest(f"{name}: must be a list of objects")
    if len(values) > MAX_TENSORS:
        raise BadRequest(f"{name}: more than {MAX_TENSORS} tensors")
    return values


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    values = _given(document, "parameters", {})
    if not isinstance(values, dict):
        raise BadRequest("parameters: must be an object")
    return values


def _given(document: dict[str, Any], name: str, default: Any) -> Any:
    value = document.get(name)
    return default if value is None else value


def _text(document: dict[str, Any], name: str) -> str:
    value = _given(document, name, "")
    if not isinstance(value, str):
        raise BadRequest(f"{name}: expected text, got {str(value)[:80]}")
    return value


def _name_of(tensor: dict[str, Any], kind: str) -> str:
    name = _text(tensor, "name")
    if not name:
        raise BadRequest(f"{kind}: a tensor has no name")
    return name


def _shape_of(tensor: dict[str, Any]) -> list[int]:
    shape = tensor.get("shape")
    if not isinstance(shape, list) or any(type(length) is not int for length in shape):
        raise BadRequest(f"tensor {tensor.get('name')}: shape must be a list of integers")
    return shape
