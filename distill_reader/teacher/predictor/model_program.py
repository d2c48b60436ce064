"""Reads what a Paddle model takes and returns from its program file, without Paddle.

A predictor of Paddle Inference tells names, but neither types nor shapes before it has run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_reader.errors import ModelError
from distill_reader.protocols.prototxt import signed, varints, wire_fields

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
        ModelError: it is none; names the file.
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
        StopIteration,
        RuntimeError,
    ) as error:  # what a file of another content makes of the parsers
        raise ModelError(
            f"{path}: cannot be read as a Paddle inference model: {error!r}"
        ) from error
    if not program.inputs or not program.outputs:
        raise ModelError(
            f"{path}: has {len(program.inputs)} inputs and {len(program.outputs)} outputs; "
            "export the model for inference (paddle.jit.save with input_spec)"
        )
    return program


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


# ProgramDesc {blocks=1}; BlockDesc {vars=3, ops=4}; VarDesc {name=1, type=2};
# VarType {lod_tensor=3}; LoDTensorDesc {tensor=1}; TensorDesc {data_type=1, dims=2};
# OpDesc {inputs=1, outputs=2, type=3, attrs=4}; OpDesc.Var {parameter=1, arguments=2};
# OpDesc.Attr {name=1, i=3}: of feed and fetch, `col` is the place.


def parse_program_desc(content: bytes) -> ModelProgram:
    """Parse a serialized ProgramDesc: the `feed` and `fetch` operations of its first block."""
    block = next(_messages(content, 1))
    inputs: list[tuple[int, str]] = []
    outputs: list[tuple[int, str]] = []
    for operation in _messages(block, 4):
        kind = b"".join(_messages(operation, 3))
        if kind == b"feed":
            inputs.append((_column(operation), _argument(operation, 2)))
        elif kind == b"fetch":
            outputs.append((_column(operation), _argument(operation, 1)))
    wanted = {name for _, name in (*inputs, *outputs)}
    variables = {
        name: _tensor(name, variable)
        for variable in _messages(block, 3)
        if (name := next(_messages(variable, 1)).decode()) in wanted
    }
    return ModelProgram(
        inputs=tuple(variables[name] for _, name in sorted(inputs)),
        outputs=tuple(variables[name] for _, name in sorted(outputs)),
    )


def _messages(content: bytes, number: int) -> Iterator[bytes]:
    for found, value in wire_fields(content):
        if found == number and isinstance(value, bytes):
            yield value


def _argument(operation: bytes, number: int) -> str:
    """Return the one argument of a feed's outputs or a fetch's inputs."""
    return next(_messages(next(_messages(operation, number)), 2)).decode()


def _column(operation: bytes) -> int:
    for attribute in _messages(operation, 4):
        if next(_messages(attribute, 1)) == b"col":
            for number, value in wire_fields(attribute):
                if number == 3 and isinstance(value, int):
                    return value
    return 0


def _tensor(name: str, variable: bytes) -> ProgramVariable:
    description = next(_messages(next(_messages(next(_messages(variable, 2)), 3)), 1))
    dims: list[int] = []
    kind = 0
    for number, value in wire_fields(description):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 2:
            dims += varints(value) if isinstance(value, bytes) else [value]
    return ProgramVariable(name=name, dtype=_PROGRAM_TYPES[kind], shape=tuple(map(signed, dims)))
