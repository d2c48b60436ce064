"""Encode and decode messages of the Open Inference Protocol (KServe v2) over gRPC.

Source: https://github.com/kserve/open-inference-protocol; RepositoryIndex, ModelConfig and
ModelStatistics are Triton's extensions (model repository, model configuration, statistics), with
the fields that we have. Tensors are sent as raw contents; typed contents are understood, too.
`oip_json.py` has the HTTP side.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import DecodeError

from distill_reader.errors import BadRequest
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.model.tensors import (
    BFLOAT16,
    MAX_AXES,
    NUMPY_TO_OIP,
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
from distill_reader.protocols import protobuf_wire as pb
from distill_reader.protocols.protobuf_schema import message_classes
from distill_reader.protocols.protobuf_wire import PackedNumbers, ProtobufError

SERVICE = "inference.GRPCInferenceService"
MAX_TENSORS = 1024  # of a request or a response
# Our properties of a model; other servers have their own.
_FORMS, DIGEST, _ACCEPTS = "edl_takes_forms", "edl_digest", "edl_accepts"

_METADATA = "string name = 1; string datatype = 2; repeated int64 shape = 3"
# The small calls. ModelInfer is read and written by hand: protobuf_wire.py says why.
MESSAGES = message_classes(
    "inference",
    {
        "ServerLiveResponse": "bool live = 1",
        "ServerReadyResponse": "bool ready = 1",
        "ModelReadyRequest": "string name = 1; string version = 2",
        "ModelReadyResponse": "bool ready = 1",
        "ServerMetadataResponse": (
            "string name = 1; string version = 2; repeated string extensions = 3"
        ),
        "ModelMetadataRequest": "string name = 1; string version = 2",
        "ModelMetadataResponse": (
            "string name = 1; repeated string versions = 2; string platform = 3;"
            "repeated ModelMetadataResponse.TensorMetadata inputs = 4;"
            "repeated ModelMetadataResponse.TensorMetadata outputs = 5;"
            "map<string, string> properties = 6"
        ),
        "ModelMetadataResponse.TensorMetadata": _METADATA,
        "RepositoryIndexRequest": "string repository_name = 1; bool ready = 2",
        "RepositoryIndexResponse": "repeated RepositoryIndexResponse.ModelIndex models = 1",
        "RepositoryIndexResponse.ModelIndex": (
            "string name = 1; string version = 2; string state = 3; string reason = 4"
        ),
        "ModelConfigRequest": "string name = 1; string version = 2",
        "ModelConfigResponse": "ModelConfig config = 1",
        "ModelConfig": (
            "string name = 1; string platform = 2; int32 max_batch_size = 4;"
            "repeated ModelInput input = 5; repeated ModelOutput output = 6;"
            "ModelDynamicBatching dynamic_batching = 11"
        ),
        # Their data_type is an enumeration, which is sent as an int32: CONFIG_TYPES.
        "ModelInput": "string name = 1; int32 data_type = 2; repeated int64 dims = 4",
        "ModelOutput": "string name = 1; int32 data_type = 2; repeated int64 dims = 3",
        "ModelDynamicBatching": "uint64 max_queue_delay_microseconds = 2",
        "ModelStatisticsRequest": "string name = 1; string version = 2",
        "ModelStatisticsResponse": "repeated ModelStatistics model_stats = 1",
        "ModelStatistics": (
            "string name = 1; string version = 2; uint64 last_inference = 3;"
            "uint64 inference_count = 4; uint64 execution_count = 5;"
            "InferStatistics inference_stats = 6; repeated InferBatchStatistics batch_stats = 7"
        ),
        "InferStatistics": "; ".join(
            f"StatisticDuration {name} = {number}"
            for number, name in enumerate(
                (
                    "success",
                    "fail",
                    "queue",
                    "compute_input",
                    "compute_infer",
                    "compute_output",
                    "cache_hit",
                    "cache_miss",
                ),
                1,
            )
        ),
        "InferBatchStatistics": (
            "uint64 batch_size = 1; StatisticDuration compute_input = 2;"
            "StatisticDuration compute_infer = 3; StatisticDuration compute_output = 4"
        ),
        "StatisticDuration": "uint64 count = 1; uint64 ns = 2",
    },
)

# Triton's names and numbers of types in a model's configuration, by numpy's names.
CONFIG_TYPES = {
    "bool": ("TYPE_BOOL", 1), "uint8": ("TYPE_UINT8", 2), "uint16": ("TYPE_UINT16", 3),
    "uint32": ("TYPE_UINT32", 4), "uint64": ("TYPE_UINT64", 5), "int8": ("TYPE_INT8", 6),
    "int16": ("TYPE_INT16", 7), "int32": ("TYPE_INT32", 8), "int64": ("TYPE_INT64", 9),
    "float16": ("TYPE_FP16", 10), "float32": ("TYPE_FP32", 11), "float64": ("TYPE_FP64", 12),
}  # fmt: skip

# Typed contents: datatype -> field of InferTensorContents, and the type of its numbers.
_CONTENTS = {
    "BOOL": (1, "bool"),
    "INT8": (2, "int32"),
    "INT16": (2, "int32"),
    "INT32": (2, "int32"),
    "INT64": (3, "int64"),
    "UINT8": (4, "uint32"),
    "UINT16": (4, "uint32"),
    "UINT32": (4, "uint32"),
    "UINT64": (5, "uint64"),
    "FP32": (6, "float32"),
    "FP64": (7, "float64"),
}
# Parameters that change the meaning of a request: they must not be ignored.
_UNSUPPORTED = ("shared_memory_region", "classification")
_TENSORS, _WANTED, _RAW_INPUTS = 5, 6, 7  # fields of ModelInferRequest
_RAW_OUTPUTS = 6  # of ModelInferResponse; its tensors have the same number as the request's
_PARAMETERS = 4  # of ModelInferResponse; the digest of the model that answered is one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class OipRequest:
    """An inference request. Arrays are views of the message."""

    model: str
    version: str = ""  # "": any
    request_id: str = ""
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...] = ()  # the wanted ones; empty: all


@dataclass(frozen=True, slots=True, kw_only=True)
class OipResponse:
    """An inference response. Arrays are views of the message."""

    model: str
    version: str = ""
    digest: str = ""  # of the model that answered; "": not told
    request_id: str = ""
    outputs: Mapping[str, Array]


@dataclass(slots=True)
class _Tensor:
    """A tensor of a message, before its bytes are assigned."""

    name: str = ""
    datatype: str = ""
    shape: list[int] = field(default_factory=list)
    contents: list[memoryview] = field(default_factory=list)  # typed ones


def encode_request(
    model: str,
    inputs: Mapping[str, Rows],
    outputs: Sequence[str] = (),
    *,
    version: str = "",
    request_id: str = "",
) -> bytes:
    """Return a ModelInferRequest. Raises: BadRequest: a tensor cannot be sent; names it."""
    parts: list[Any] = [_encode_head(model, version, request_id)]
    raw: list[Any] = []
    for name, rows in inputs.items():
        parts.append(_encode_tensor(_TENSORS, name, rows, _RAW_INPUTS, raw))
    parts += [pb.write_bytes(_WANTED, pb.write_text(1, name)) for name in outputs]
    return b"".join([*parts, *raw])


def decode_request(message: bytes | memoryview) -> OipRequest:
    """Decode a ModelInferRequest.

    Raises:
        BadRequest: malformed or not supported; names the tensor.
    """
    found = _decode(message, _TENSORS, _RAW_INPUTS, _WANTED)
    del found["digest"]
    return OipRequest(**found)


def encode_response(
    model: str,
    outputs: Mapping[str, Array],
    *,
    version: str = "",
    digest: str = "",
    request_id: str = "",
) -> bytes:
    """Return a ModelInferResponse. Raises: BadRequest: a tensor cannot be sent; names it."""
    parts: list[Any] = [_encode_head(model, version, request_id)]
    if digest:
        value = pb.write_bytes(2, pb.write_text(3, digest))
        parts.append(pb.write_bytes(_PARAMETERS, pb.write_text(1, DIGEST) + value))
    raw: list[Any] = []
    for name, array in outputs.items():
        parts.append(_encode_tensor(_TENSORS, name, array, _RAW_OUTPUTS, raw))
    return b"".join([*parts, *raw])


def decode_response(message: bytes | memoryview) -> OipResponse:
    """Decode a ModelInferResponse. Raises: BadRequest: malformed; names the tensor."""
    found = _decode(message, _TENSORS, _RAW_OUTPUTS, None)
    del found["outputs"]
    return OipResponse(outputs=found.pop("inputs"), **found)


def encode_metadata(spec: ModelSpec, platform: str) -> bytes:
    """Return the ModelMetadataResponse of a model. Axis 0 of each tensor is -1."""
    tensor = MESSAGES["ModelMetadataResponse.TensorMetadata"]
    message = MESSAGES["ModelMetadataResponse"](
        name=spec.name,
        versions=[spec.version],
        platform=platform,
        inputs=[tensor(**metadata) for metadata in metadata_of(spec.inputs)],
        outputs=[tensor(**metadata) for metadata in metadata_of(spec.outputs)],
        properties=properties_of(spec),
    )
    return bytes(message.SerializeToString())


def decode_metadata(message: bytes) -> ModelSpec:
    """Return the model that a ModelMetadataResponse describes. Raises: BadRequest: malformed."""
    response = MESSAGES["ModelMetadataResponse"]()
    try:
        response.ParseFromString(message)
    except DecodeError as error:
        raise BadRequest(f"the teacher's metadata is malformed: {error}") from error
    spec = ModelSpec(
        name=response.name,
        version=response.versions[-1] if response.versions else "",
        inputs=tuple(
            spec_of(t.name, t.datatype, t.shape, is_output=False) for t in response.inputs
        ),
        outputs=tuple(
            spec_of(t.name, t.datatype, t.shape, is_output=True) for t in response.outputs
        ),
    )
    return with_properties(spec, dict(response.properties))


def metadata_of(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Return the name, datatype and shape of tensors, as in a model's metadata."""
    return [
        {
            "name": spec.name,
            "datatype": NUMPY_TO_OIP.get(spec.dtype, spec.dtype.upper()),
            "shape": [-1, *spec.shape],
        }
        for spec in specs
    ]


def properties_of(spec: ModelSpec) -> dict[str, str]:
    """Return what only our students understand: the protocol has no fields for it."""
    accepts = {
        tensor.name: [[encoding.dtype, list(encoding.shape)] for encoding in tensor.accepts]
        for tensor in spec.inputs
        if tensor.accepts
    }
    properties = {
        _FORMS: "1" if spec.takes_encodings else "",
        DIGEST: spec.digest,
        _ACCEPTS: json.dumps(accepts) if accepts else "",
    }
    return {name: text for name, text in properties.items() if text}


def with_properties(spec: ModelSpec, properties: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the values of `properties_of`. Other servers have none."""
    try:
        accepts = json.loads(properties.get(_ACCEPTS) or "{}")
        inputs = tuple(
            replace(
                tensor,
                accepts=tuple(
                    InputEncoding(dtype=str(dtype), shape=tuple(map(int, shape)))
                    for dtype, shape in accepts.get(tensor.name, [])
                    if dtype in NUMPY_TO_OIP
                ),
            )
            for tensor in spec.inputs
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"the teacher's metadata: property {_ACCEPTS}: {error}") from error
    return replace(
        spec,
        inputs=inputs,
        takes_encodings=properties.get(_FORMS) == "1",
        digest=str(properties.get(DIGEST, "")),
    )


def spec_of(name: str, datatype: str, shape: Sequence[int], *, is_output: bool) -> TensorSpec:
    """Return the tensor that metadata describes. Axis 0 of `shape` counts samples.

    If it cannot be used, such as text, `unusable` says why: an error only for those who want it.
    """
    dtype, unusable = OIP_TO_NUMPY.get(datatype, "void"), ""
    if datatype == BFLOAT16 and is_output:
        dtype = "float32"
    if dtype == "void":
        unusable = f"is {datatype}, and only {', '.join(OIP_TO_NUMPY)} and outputs in BF16 are read"
    elif not shape or shape[0] not in (-1, 1):
        dtype = "void"
        unusable = (
            f"has shape {list(shape)}, and axis 0 does not count samples: serve the model "
            "with a batch axis (Triton: max_batch_size above 0, or -1 as the first of dims)"
        )
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(int(length) for length in shape[1:]),
        unusable=unusable,
    )


def _encode_head(model: str, version: str, request_id: str) -> bytes:
    return pb.write_text(1, model) + pb.write_text(2, version) + pb.write_text(3, request_id)


def _encode_tensor(number: int, name: str, rows: Rows, raw_number: int, raw: list[Any]) -> bytes:
    """Return the description of a tensor; add its bytes to `raw`."""
    dtype, shape, arrays = join_rows(name, rows)
    raw.append(pb.write_head(raw_number, sum(array.nbytes for array in arrays)))
    raw.extend(raw_bytes(array) for array in arrays)
    described = (
        pb.write_text(1, name)
        + pb.write_text(2, oip_datatype(name, dtype))
        + pb.write_ints(3, shape)
    )
    return pb.write_bytes(number, described)


def _decode(
    message: bytes | memoryview, tensor_number: int, raw_number: int, wanted_number: int | None
) -> dict[str, Any]:
    texts = {1: "", 2: "", 3: ""}
    tensors: list[_Tensor] = []
    raw: list[memoryview] = []
    wanted: list[str] = []
    digest = ""
    try:
        for number, _, value in pb.read_fields(memoryview(message)):
            if number in texts:
                texts[number] = pb.read_text(value)
            elif number == tensor_number:
                tensors.append(_decode_tensor(pb.read_bytes(value)))
            elif number == raw_number:
                raw.append(pb.read_bytes(value))
            elif number == wanted_number:
                wanted.append(_decode_wanted(pb.read_bytes(value)))
            elif number == _PARAMETERS and wanted_number is None:
                digest = digest or _decode_digest(pb.read_bytes(value))
            if max(len(tensors), len(raw), len(wanted)) > MAX_TENSORS:
                raise ProtobufError(f"more than {MAX_TENSORS} tensors")
        arrays = _find_arrays(tensors, raw, is_answer=wanted_number is None)
    except ProtobufError as error:
        raise BadRequest(f"the message is malformed: {error}") from error
    return {
        "model": texts[1],
        "version": texts[2],
        "request_id": texts[3],
        "digest": digest,
        "inputs": arrays,
        "outputs": tuple(wanted),
    }


def _decode_tensor(message: memoryview) -> _Tensor:
    tensor = _Tensor()
    for number, wire_type, value in pb.read_fields(message):
        if number == 1:
            tensor.name = pb.read_text(value)
        elif number == 2:
            tensor.datatype = pb.read_text(value)
        elif number == 3:
            pb.read_ints(wire_type, value, tensor.shape, limit=MAX_AXES)
        elif number == 4:
            _check_parameter(tensor.name, pb.read_bytes(value))
        elif number == 5:
            tensor.contents.append(pb.read_bytes(value))
    return tensor


def _decode_wanted(message: memoryview) -> str:
    name = ""
    for number, _, value in pb.read_fields(message):
        if number == 1:
            name = pb.read_text(value)
        elif number == 2:
            _check_parameter(name, pb.read_bytes(value))
    return name


def _decode_digest(parameter: memoryview) -> str:
    """Return the digest if this parameter of an answer is it, else ""."""
    name, value = "", memoryview(b"")
    for number, _, field_value in pb.read_fields(parameter):
        if number == 1:
            name = pb.read_text(field_value)
        elif number == 2:
            value = pb.read_bytes(field_value)
    if name != DIGEST:
        return ""
    texts = {number: text for number, _, text in pb.read_fields(value)}
    return pb.read_text(texts[3]) if 3 in texts else ""


def _check_parameter(tensor: str, entry: memoryview) -> None:
    for number, _, value in pb.read_fields(entry):
        if number == 1:
            check_parameter(tensor, pb.read_text(value))


def check_parameter(tensor: str, name: str) -> None:
    """Refuse a parameter that must not be ignored. Raises: BadRequest."""
    if name in _UNSUPPORTED:
        raise BadRequest(
            f"tensor {tensor}: parameter {name} is not supported; leave it out and send plain data"
        )


def _find_arrays(
    tensors: list[_Tensor], raw: list[memoryview], *, is_answer: bool
) -> dict[str, Array]:
    """Return the arrays by name. Unreadable ones of an answer are skipped: nobody wants them."""
    if raw and len(raw) != len(tensors):
        raise BadRequest(
            f"{len(tensors)} tensors have {len(raw)} raw contents; if one is raw, all must be"
        )
    arrays: dict[str, Array] = {}
    for place, tensor in enumerate(tensors):
        if tensor.name in arrays:
            raise BadRequest(f"tensor {tensor.name}: came twice")
        if is_answer and tensor.datatype == BFLOAT16 and raw:
            arrays[tensor.name] = view_bfloat16(tensor.name, raw[place], tensor.shape)
            continue
        if is_answer and tensor.datatype not in OIP_TO_NUMPY:
            continue
        dtype = numpy_dtype(tensor.name, tensor.datatype)
        if not raw:
            arrays[tensor.name] = _typed_contents(tensor)
        elif tensor.contents and any(tensor.contents):
            raise BadRequest(f"tensor {tensor.name}: has raw and typed contents")
        else:
            arrays[tensor.name] = view_bytes(tensor.name, raw[place], dtype, tensor.shape)
    return arrays


def _typed_contents(tensor: _Tensor) -> Array:
    dtype = numpy_dtype(tensor.name, tensor.datatype)
    if tensor.datatype not in _CONTENTS:
        raise BadRequest(f"tensor {tensor.name}: {tensor.datatype} must be sent as raw contents")
    wanted, held = _CONTENTS[tensor.datatype]
    numbers = PackedNumbers(held)
    for contents in tensor.contents:
        for number, wire_type, value in pb.read_fields(contents):
            if number == wanted:
                numbers.add(wire_type, value)
            elif number <= 8 and value:
                raise BadRequest(
                    f"tensor {tensor.name}: {tensor.datatype} has its contents in another field"
                )
    count = count_items(tensor.name, tensor.shape)
    if numbers.count() != count:
        raise BadRequest(
            f"tensor {tensor.name}: shape {tensor.shape} has {count} elements, "
            f"{numbers.count()} came"
        )
    array = numbers.array()
    if array.dtype != dtype:  # int32 and uint32 carry the narrow ones
        array = cast_numbers(tensor.name, array, dtype)
    return array.reshape(tensor.shape)
