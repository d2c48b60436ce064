"""Read the inputs and outputs of a Paddle model from its program file, without Paddle.

Paddle Inference itself gives their names, but no types or shapes until the model has run. Nor does
it notice that a file of parameters ends in the values of its last tensor.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError

from distill_reader.errors import ModelError
from distill_reader.protocols.protobuf_schema import message_classes

_PROGRAM_TYPES = {  # VarType.Type of framework.proto -> numpy's name
    0: "bool",
    1: "int16",
    2: "int32",
    3: "int64",
    4: "float16",
    5: "float32",
    6: "float64",
    20: "uint8",
    21: "int8",
    22: "bfloat16",
    23: "complex64",
    24: "complex128",
}
_PIR_TYPES = {  # suffix of a type's name in a .json program -> numpy's name
    "bool": "bool",
    "i8": "int8",
    "ui8": "uint8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}

_BYTES = {"bfloat16": 2}  # of a value, where numpy does not know the type
_MOST_LEVELS = 16  # of a tensor's LoD; more says that the file is no file of parameters

# The parts of Paddle's framework.proto that are read here.
_MESSAGES = message_classes(
    "paddle.framework.proto",
    {
        "ProgramDesc": "repeated BlockDesc blocks = 1",
        "BlockDesc": "repeated VarDesc vars = 3; repeated OpDesc ops = 4",
        "VarDesc": "string name = 1; VarType type = 2",
        "VarType": "VarType.LoDTensorDesc lod_tensor = 3",
        "VarType.LoDTensorDesc": "VarType.TensorDesc tensor = 1",
        "VarType.TensorDesc": "int32 data_type = 1; repeated int64 dims = 2",
        "OpDesc": (
            "repeated OpDesc.Var inputs = 1; repeated OpDesc.Var outputs = 2; string type = 3;"
            "repeated OpDesc.Attr attrs = 4"
        ),
        "OpDesc.Var": "string parameter = 1; repeated string arguments = 2",
        "OpDesc.Attr": "string name = 1; int32 i = 3",
    },
    syntax="proto2",  # tells a missing data_type from bool, which is 0
)
_PROGRAM_DESC, _TENSOR_DESC = _MESSAGES["ProgramDesc"], _MESSAGES["VarType.TensorDesc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVariable:
    """An input or output of a program."""

    name: str
    dtype: str  # numpy's name, or "bfloat16"
    shape: tuple[int, ...]  # with the axis of samples; -1: any length


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgram:
    """Inputs and outputs in the order in which the model was exported."""

    inputs: tuple[ProgramVariable, ...]
    outputs: tuple[ProgramVariable, ...]


def read_program(path: str | Path) -> ModelProgram:
    """Read a `.json` (Paddle 3), `.pdmodel` (Paddle 2) or `__model__` (1.x) file.

    Raises:
        ModelError: it is no program; names the file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        parse = parse_pir if path.suffix == ".json" else parse_program_desc
        program = parse(content)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        DecodeError,
    ) as error:  # the parsers raise all of these for files with other content
        raise ModelError(
            f"{path}: cannot be read as a Paddle inference model: {error!r}"
        ) from error
    if not program.inputs or not program.outputs:
        raise ModelError(
            f"{path}: has {len(program.inputs)} inputs and {len(program.outputs)} outputs; "
            "export the model for inference (paddle.jit.save with input_spec)"
        )
    return program


def missing_bytes(path: str | Path) -> int:
    """Return how many bytes a file of parameters lacks at its end.

    It is 0 as well for a file of any other form. Raises: OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = 0
        while end < size:
            file.seek(end)
            try:
                end = _tensor_end(file)
            except (struct.error, DecodeError, LookupError, ValueError):
                return 0  # what Paddle cannot read either, or a type that is unknown here
    return end - size


def _tensor_end(file: BinaryIO) -> int:
    """Return where the tensor ends that begins here.

    A version, the levels of its LoD, another version, its type and shape, and its values.
    """
    version, levels = struct.unpack("<IQ", file.read(12))
    if version or levels > _MOST_LEVELS:
        raise ValueError("no tensor")
    for _ in range(levels):
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(length, os.SEEK_CUR)
    version, length = struct.unpack("<Ii", file.read(8))
    if version or length < 0:
        raise ValueError("no tensor")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("no tensor")
    desc = _TENSOR_DESC.FromString(text)
    values: int = math.prod(desc.dims)
    if not desc.HasField("data_type") or values < 0:
        raise ValueError("no tensor")
    dtype = _PROGRAM_TYPES[desc.data_type]
    return file.tell() + values * (_BYTES.get(dtype) or np.dtype(dtype).itemsize)


def parse_pir(content: bytes) -> ModelProgram:
    """Parse the JSON of Paddle's intermediate representation (`pd_op.data`, `pd_op.fetch`)."""
    document: dict[str, Any] = json.loads(content)
    if document.get("base_code", {}).get("magic") != "pir":
        raise ValueError('no program: has no "magic": "pir"')
    inputs: list[ProgramVariable] = []
    outputs: list[tuple[int, ProgramVariable]] = []
    for operation in document["program"]["regions"][0]["blocks"][0]["ops"]:
        kind = operation["#"].rpartition(".")[2]
        if kind not in ("data", "feed", "fetch"):
            continue
        attributes = {item["N"]: item["AT"].get("D") for item in operation["A"]}
        kind_of_type, shape, *_ = operation["O"][0]["TT"]["D"]
        variable = ProgramVariable(
            name=attributes["name"],
            dtype=_PIR_TYPES[kind_of_type["#"].rpartition("t_")[2]],
            shape=tuple(shape),
        )
        if kind == "fetch":
            outputs.append((attributes.get("col", len(outputs)), variable))
        else:
            inputs.append(variable)
    outputs.sort(key=lambda item: item[0])
    return ModelProgram(inputs=tuple(inputs), outputs=tuple(variable for _, variable in outputs))


def parse_program_desc(content: bytes) -> ModelProgram:
    """Parse a serialized ProgramDesc: the `feed` and `fetch` operations of its first block."""
    block = _PROGRAM_DESC.FromString(content).blocks[0]
    variables = {variable.name: variable for variable in block.vars}
    inputs: list[tuple[int, str]] = []  # index, name
    outputs: list[tuple[int, str]] = []
    for operation in block.ops:
        if operation.type == "feed":
            inputs.append((_column(operation), operation.outputs[0].arguments[0]))
        elif operation.type == "fetch":
            outputs.append((_column(operation), operation.inputs[0].arguments[0]))
    return ModelProgram(
        inputs=tuple(_program_variable(variables[name]) for _, name in sorted(inputs)),
        outputs=tuple(_program_variable(variables[name]) for _, name in sorted(outputs)),
    )


def _column(operation: Any) -> int:
    """Return the index of the input or output that a `feed` or `fetch` operation is for."""
    return next((int(attr.i) for attr in operation.attrs if attr.name == "col"), 0)


def _program_variable(variable: Any) -> ProgramVariable:
    tensor = variable.type.lod_tensor.tensor
    if not tensor.HasField("data_type"):
        raise ValueError(f"variable {variable.name} is no dense tensor")
    return ProgramVariable(
        name=variable.name, dtype=_PROGRAM_TYPES[tensor.data_type], shape=tuple(tensor.dims)
    )
