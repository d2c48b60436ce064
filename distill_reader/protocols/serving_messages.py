"""Encode and decode the messages of Paddle Serving's GeneralModelService.

The numbers of fields and types are from Paddle Serving 0.9 (general_model_service.proto).
`serving_json.py` has the same messages as JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.tensors import (
    MAX_AXES,
    Array,
    Rows,
    count_items,
    join_rows,
    raw_bytes,
    view_bytes,
)
from distill_reader.protocols import protobuf_wire as pb
from distill_reader.protocols.protobuf_wire import PackedNumbers, ProtobufError

SERVICE = "baidu.paddle_serving.predictor.general_model.GeneralModelService"
ENGINE = "general_infer_0"  # the original's name for the only model of a server
MAX_TENSORS = 1024
MAX_REQUEST_BYTES = 512 << 20  # the original's bound

ELEM_TYPES = {  # elem_type -> numpy's name; BF16 (6), COMPLEX and STRING (20) are not supported
    0: "int64",
    1: "float32",
    2: "int32",
    3: "float64",
    4: "int16",
    5: "float16",
    7: "uint8",
    8: "int8",
    9: "bool",
}
ELEM_TYPE_OF = {name: elem_type for elem_type, name in ELEM_TYPES.items()}
DATA_FIELDS = {  # field of Tensor -> number, type of its elements; others use tensor_content
    "int64_data": (1, "int64"),
    "float_data": (2, "float32"),
    "int_data": (3, "int32"),
    "float64_data": (4, "float64"),
    "bool_data": (6, "bool"),
}
DATA_FIELD_OF = {dtype: name for name, (_, dtype) in DATA_FIELDS.items() if dtype != "bool"}
_OTHER_DATA = (5, 7, 8, 9)  # fields of types that are not supported
_CONTENT = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTensor:
    """A tensor with the model's own name and the alias of the prototxt. Either may be empty."""

    name: str
    alias_name: str
    array: Array  # a view of the message if its bytes can be used as they are

    @property
    def label(self) -> str:
        """The name for messages to people."""
        return self.alias_name or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """A Request."""

    tensors: tuple[ServingTensor, ...]
    fetch: tuple[str, ...] = ()  # aliases; empty: all
    profile_server: bool = False
    log_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResponse:
    """A Response with the outputs of its first engine; the original may have several."""

    outputs: tuple[ServingTensor, ...] = ()
    engine_name: str = ENGINE
    profile_time: tuple[int, ...] = ()  # microseconds, start and end of each operation
    log_id: int = 0
    err_no: int = 0
    err_msg: str = ""

    def arrays(self) -> dict[str, Array]:
        """Return the outputs by alias."""
        return {tensor.label: tensor.array for tensor in self.outputs}


@dataclass(slots=True)
class RawTensor:
    """A Tensor without its data, which may be in one of several fields."""

    elem_type: int = 0
    name: str = ""
    alias_name: str = ""
    shape: list[int] = field(default_factory=list)
    lod: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.alias_name or self.name

    def dtype(self) -> np.dtype[Any]:
        """Return the type of the elements. Raises: BadRequest: it is not supported."""
        if self.elem_type not in ELEM_TYPES:
            known = ", ".join(f"{number} ({name})" for number, name in ELEM_TYPES.items())
            raise BadRequest(
                f"tensor {self.label}: elem_type {self.elem_type} is not supported; {known} are"
            )
        return np.dtype(ELEM_TYPES[self.elem_type]).newbyteorder("<")

    def check_data(self, found: Sequence[str], items: int) -> None:
        """Check that the data is in the field for its type, and as long as the shape says.

        Args:
            found: names of the fields that have data.
            items: the number of elements in them.

        Raises:
            BadRequest: names the tensor.
        """
        dtype = self.dtype().name
        allowed = {name for name, (_, held) in DATA_FIELDS.items() if held == dtype}
        for name in found:
            if name not in allowed and name != "tensor_content":
                where = " or ".join([*sorted(allowed), "tensor_content"])
                raise BadRequest(
                    f"tensor {self.label}: elem_type {self.elem_type} ({dtype}) has its data in "
                    f"{where}, but {name} came"
                )
        if len(found) > 1:
            raise BadRequest(f"tensor {self.label}: has data in {' and in '.join(found)}")
        if self.lod and (len(self.lod) > 2 or self.lod[0] != 0):
            raise BadRequest(
                f"tensor {self.label}: has LoD {self.lod[:8]}; only dense tensors are served"
            )
        count = count_items(self.label, self.shape)
        if items != count:
            raise BadRequest(
                f"tensor {self.label}: shape {self.shape} has {count} elements, {items} came"
            )

    def finish(self, array: Array) -> ServingTensor:
        return ServingTensor(
            name=self.name, alias_name=self.alias_name, array=array.reshape(self.shape)
        )


def encode_request(
    inputs: Mapping[str, Rows],
    fetch: Sequence[str] = (),
    *,
    names: Mapping[str, str] | None = None,
    profile_server: bool = False,
    log_id: int = 0,
) -> bytes:
    """Return a Request.

    Args:
        inputs: by alias.
        fetch: aliases of the outputs wanted; empty: all.
        names: alias -> the model's own name; None: the same.

    Raises:
        BadRequest: a tensor cannot be sent; names it.
    """
    parts: list[Any] = []
    for alias, rows in inputs.items():
        tensor = _encode_tensor((names or {}).get(alias, alias), alias, rows)
        parts.append(pb.write_head(1, sum(map(len, tensor))))
        parts += tensor
    parts += [pb.write_bytes(2, alias.encode()) for alias in fetch]
    parts.append(pb.write_varint(3, int(profile_server)) + pb.write_varint(4, log_id))
    return b"".join(parts)


def decode_request(
    message: bytes | memoryview, *, max_bytes: int = MAX_REQUEST_BYTES
) -> ServingRequest:
    """Decode a Request.

    Args:
        max_bytes: of the arrays; integers may be eight times shorter in the message.

    Raises:
        BadRequest: malformed or too large; names the tensor.
    """
    tensors: list[ServingTensor] = []
    fetch: list[str] = []
    profile_server = log_id = 0
    try:
        for number, _, value in pb.read_fields(memoryview(message)):
            if number == 1:
                tensors.append(_decode_tensor(pb.read_bytes(value), max_bytes))
                max_bytes -= tensors[-1].array.nbytes
            elif number == 2:
                fetch.append(pb.read_text(value))
            elif number == 3:
                profile_server = pb.read_uint(value)
            elif number == 4:
                log_id = pb.read_uint(value)
            if max(len(tensors), len(fetch)) > MAX_TENSORS:
                raise ProtobufError(f"more than {MAX_TENSORS} tensors")
    except ProtobufError as error:
        raise BadRequest(f"the message is malformed: {error}") from error
    return ServingRequest(
        tensors=tuple(tensors),
        fetch=tuple(fetch),
        profile_server=bool(profile_server),
        log_id=log_id,
    )


def encode_response(response: ServingResponse) -> bytes:
    """Return a Response. Raises: BadRequest: a tensor cannot be sent; names it."""
    parts: list[Any] = []
    for tensor in response.outputs:
        encoded = _encode_tensor(tensor.name, tensor.alias_name, tensor.array)
        parts.append(pb.write_head(1, sum(map(len, encoded))))
        parts += encoded
    if parts:
        parts.append(pb.write_text(2, response.engine_name))
        parts.insert(0, pb.write_head(1, sum(map(len, parts))))
    parts += [
        pb.write_ints(2, response.profile_time),
        pb.write_varint(3, int(bool(response.profile_time))),
        pb.write_varint(4, response.log_id),
        pb.write_varint(5, response.err_no),
        pb.write_text(6, response.err_msg),
    ]
    return b"".join(parts)


def decode_response(
    message: bytes | memoryview, *, max_bytes: int = MAX_REQUEST_BYTES
) -> ServingResponse:
    """Decode a Response; return the outputs of its first engine.

    Raises:
        BadRequest: malformed or too large; names the tensor.
    """
    engine: memoryview | None = None
    log_id = err_no = 0
    err_msg = ""
    profile: list[int] = []
    try:
        for number, wire_type, value in pb.read_fields(memoryview(message)):
            if number == 1 and engine is None:
                engine = pb.read_bytes(value)
            elif number == 2:
                pb.read_ints(wire_type, value, profile, limit=MAX_TENSORS)
            elif number == 4:
                log_id = pb.read_uint(value)
            elif number == 5:
                err_no = pb.read_int(value)
            elif number == 6:
                err_msg = pb.read_text(value)
        outputs, name = ([], ENGINE) if engine is None else _decode_engine(engine, max_bytes)
    except ProtobufError as error:
        raise BadRequest(f"the message is malformed: {error}") from error
    return ServingResponse(
        outputs=tuple(outputs),
        engine_name=name,
        profile_time=tuple(profile),
        log_id=log_id,
        err_no=err_no,
        err_msg=err_msg,
    )


def elem_type_of(tensor: str, dtype: np.dtype[Any]) -> int:
    """Return the elem_type of a dtype. Raises: BadRequest: there is none; names the tensor."""
    try:
        return ELEM_TYPE_OF[dtype.name]
    except KeyError:
        raise BadRequest(f"tensor {tensor}: Paddle Serving has no type for {dtype.name}") from None


def _encode_tensor(name: str, alias: str, rows: Rows) -> list[Any]:
    """Return the parts of a Tensor. Its bytes are not copied if they are sent as they are."""
    dtype, shape, arrays = join_rows(alias or name, rows)
    elem_type = elem_type_of(alias or name, dtype)
    number = DATA_FIELDS[DATA_FIELD_OF[dtype.name]][0] if dtype.name in DATA_FIELD_OF else _CONTENT
    data: list[Any]
    if dtype.kind == "i" and number != _CONTENT:
        data = [pb.pack_varints(array) for array in arrays]
    else:
        data = [raw_bytes(array) for array in arrays]
    return [
        pb.write_head(number, sum(map(len, data))),
        *data,
        pb.write_varint(10, elem_type)
        + pb.write_ints(11, shape)
        + pb.write_text(13, name)
        + pb.write_text(14, alias),
    ]


def _decode_engine(message: memoryview, max_bytes: int) -> tuple[list[ServingTensor], str]:
    tensors: list[ServingTensor] = []
    name = ENGINE
    for number, _, value in pb.read_fields(message):
        if number == 1:
            tensors.append(_decode_tensor(pb.read_bytes(value), max_bytes))
            max_bytes -= tensors[-1].array.nbytes
        elif number == 2:
            name = pb.read_text(value)
    return tensors, name


def _decode_tensor(message: memoryview, max_bytes: int) -> ServingTensor:
    tensor = RawTensor()
    names = {number: (name, held) for name, (number, held) in DATA_FIELDS.items()}
    data: dict[str, PackedNumbers] = {}
    content: memoryview | None = None
    for number, wire_type, value in pb.read_fields(message):
        if number in names:
            name, held = names[number]
            if name not in data:
                data[name] = PackedNumbers(held)
            data[name].add(wire_type, value)
        elif number in _OTHER_DATA and value:
            raise BadRequest(f"tensor {tensor.label}: has data of a type that is not supported")
        elif number == 10:
            tensor.elem_type = pb.read_int(value)
        elif number == 11:
            pb.read_ints(wire_type, value, tensor.shape, limit=MAX_AXES)
        elif number == 12:
            pb.read_ints(wire_type, value, tensor.lod, limit=pb.MAX_FIELDS)
        elif number == 13:
            tensor.name = pb.read_text(value)
        elif number == 14:
            tensor.alias_name = pb.read_text(value)
        elif number == _CONTENT:
            content = pb.read_bytes(value)
    return _find_data(tensor, data, content, max_bytes)


def _find_data(
    tensor: RawTensor, data: dict[str, PackedNumbers], content: memoryview | None, max_bytes: int
) -> ServingTensor:
    dtype = tensor.dtype()
    counts = {name: numbers.count() for name, numbers in data.items()}
    found = [name for name, count in counts.items() if count]
    items = sum(counts.values())
    if content:
        found.append("tensor_content")
        items += len(content) // dtype.itemsize
    tensor.check_data(found, items)
    if items * dtype.itemsize > max_bytes:
        raise BadRequest(
            f"tensor {tensor.label}: has {items * dtype.itemsize} bytes, more than one request "
            "may have; send fewer samples at a time"
        )
    if not found:
        return tensor.finish(np.empty(0, dtype))
    if content:
        return tensor.finish(view_bytes(tensor.label, content, dtype, tensor.shape))
    return tensor.finish(data[found[0]].array())
