"""Encode and decode Paddle Serving's messages as JSON, as its server (brpc) does.

Fields have the names of the .proto file, 64-bit integers are numbers, bytes are base64, and unknown
fields are ignored.
"""

import base64
import binascii
import json
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.tensors import MAX_AXES, cast_numbers, raw_bytes, view_bytes
from distill_reader.protocols.serving_messages import (
    DATA_FIELD_OF,
    DATA_FIELDS,
    MAX_TENSORS,
    RawTensor,
    ServingRequest,
    ServingResponse,
    ServingTensor,
    elem_type_of,
)

_MAX_BRACKETS = 1 << 17  # lists and objects in a document: each takes a hundred bytes

_OTHER_DATA = ("uint32_data", "complex64_data", "complex128_data", "data")


def parse_json(text: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a JSON object. Raises: BadRequest: `text` is none."""
    data = bytes(text)
    if data.count(b"[") + data.count(b"{") > _MAX_BRACKETS:
        raise BadRequest(
            f"the body has more than {_MAX_BRACKETS} lists and objects; send flat lists of numbers"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(document).__name__}")
    return document


def decode_request(text: bytes | memoryview) -> ServingRequest:
    """Decode a Request.

    Raises:
        BadRequest: no JSON, or not a Request; names the field or the tensor.
    """
    document = parse_json(text)
    return ServingRequest(
        tensors=tuple(map(_decode_tensor, _get_list(document, "tensor", dict))),
        fetch=tuple(_get_list(document, "fetch_var_names", str)),
        profile_server=_get(document, "profile_server", bool, False),
        log_id=_get(document, "log_id", int, 0),
    )


def encode_response(response: ServingResponse) -> bytes:
    """Return a Response. Raises: BadRequest: a tensor cannot be sent; names it."""
    document: dict[str, Any] = {}
    if response.outputs:
        tensors = [_encode_tensor(tensor) for tensor in response.outputs]
        document["outputs"] = [{"tensor": tensors, "engine_name": response.engine_name}]
    if response.profile_time:
        document |= {"profile_time": list(response.profile_time), "profile_server": True}
    if response.log_id:
        document["log_id"] = response.log_id
    if response.err_no:
        document |= {"err_no": response.err_no, "err_msg": response.err_msg}
    return json.dumps(document, separators=(",", ":")).encode()


def _decode_tensor(document: dict[str, Any]) -> ServingTensor:
    tensor = RawTensor(
        elem_type=_get(document, "elem_type", int, 0),
        name=_get(document, "name", str, ""),
        alias_name=_get(document, "alias_name", str, ""),
        shape=_get_list(document, "shape", int, limit=MAX_AXES),
        lod=_get_list(document, "lod", int),
    )
    dtype = tensor.dtype()
    found = [name for name in DATA_FIELDS if document.get(name)]
    for name in _OTHER_DATA:
        if document.get(name):
            raise BadRequest(f"tensor {tensor.label}: {name} is not supported")
    content = _decode_content(tensor.label, _get(document, "tensor_content", str, ""))
    if content:
        tensor.check_data([*found, "tensor_content"], len(content) // dtype.itemsize)
        view = memoryview(content)
        return tensor.finish(view_bytes(tensor.label, view, dtype, tensor.shape))
    if not found:
        tensor.check_data([], 0)
        return tensor.finish(np.empty(0, dtype))
    numbers = document[found[0]]
    if not isinstance(numbers, list):
        raise BadRequest(f"tensor {tensor.label}: {found[0]} must be a list of numbers")
    tensor.check_data(found, len(numbers))
    array = cast_numbers(tensor.label, numbers, dtype)
    tensor.check_data(found, array.size)  # lists within the list
    return tensor.finish(array)


def _decode_content(label: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"tensor {label}: tensor_content is no base64: {error}") from error


def _encode_tensor(tensor: ServingTensor) -> dict[str, Any]:
    array = np.ascontiguousarray(tensor.array)
    document: dict[str, Any] = {}
    if array.dtype.name in DATA_FIELD_OF:
        if not np.isfinite(array).all():
            raise BadRequest(
                f"output {tensor.label}: has values that are infinite or not a number, which JSON "
                "cannot say: send the request in protobuf, with Content-Type: application/proto"
            )
        document[DATA_FIELD_OF[array.dtype.name]] = array.reshape(-1).tolist()
    else:
        document["tensor_content"] = base64.b64encode(raw_bytes(array)).decode()
    document["elem_type"] = elem_type_of(tensor.label, array.dtype)
    document["shape"] = list(array.shape)
    document["name"] = tensor.name
    document["alias_name"] = tensor.alias_name
    return document


def _get(document: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    value = document.get(name, default)
    if type(value) is not kind and value is not default:  # JSON true is not a number
        raise BadRequest(f"{name}: expected {kind.__name__}, got {str(value)[:80]!r}")
    return value


def _get_list(
    document: dict[str, Any], name: str, kind: type[Any], *, limit: int = MAX_TENSORS
) -> list[Any]:
    values = _get(document, name, list, [])
    if len(values) > limit:
        raise BadRequest(f"{name}: has {len(values)} elements, at most {limit} are taken")
    for value in values:
        if type(value) is not kind:
            raise BadRequest(f"{name}: expected {kind.__name__}, got {str(value)[:80]!r}")
    return list(values)
