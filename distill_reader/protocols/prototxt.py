"""The model config of Paddle Serving (GeneralModelConfig), as text and as binary protobuf.

A servable folder holds `serving_server_conf.prototxt` and `.stream.prototxt`, its clients hold
`serving_client_conf.*` of the same content: names, aliases, types and shapes of what is fed and
fetched. Six fields of one old proto2 schema do not need generated code.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distill_reader.errors import UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec

SERVER_FILES = ("serving_server_conf.prototxt", "serving_server_conf.stream.prototxt")
CLIENT_FILES = ("serving_client_conf.prototxt", "serving_client_conf.stream.prototxt")

DTYPES = {  # Paddle Serving's elem_type -> numpy's name
    0: "int64",
    1: "float32",
    2: "int32",
    3: "float64",
    4: "int16",
    5: "float16",
    7: "uint8",
    8: "int8",
    9: "bool",
    10: "complex64",
    11: "complex128",
}
ELEM_TYPES = {dtype: number for number, dtype in DTYPES.items()}
_UNKNOWN = {6: "bfloat16, which numpy has not", 20: "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVariable:
    """One FeedVar or FetchVar."""

    name: str  # the model's own
    alias: str  # what clients call it
    is_lod: bool = False  # rows are sequences of different lengths
    elem_type: int = 0
    shape: tuple[int, ...] = ()  # of one sample, as written: lengths that are open are left out

    @property
    def dtype(self) -> str:
        """Numpy's name of the type.

        Raises:
            UsageError: it has none; names the variable.
        """
        if self.elem_type not in DTYPES:
            kind = _UNKNOWN.get(self.elem_type, "unknown")
            raise UsageError(
                f"{self.name}: elem_type {self.elem_type} ({kind}) cannot be served; "
                f"known are {', '.join(f'{key} ({DTYPES[key]})' for key in DTYPES)}"
            )
        return DTYPES[self.elem_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model is fed and what is fetched from it."""

    feeds: tuple[ServedVariable, ...]
    fetches: tuple[ServedVariable, ...]

    def spec(self, name: str) -> ModelSpec:
        """Return the spec that the config tells; of a LoD tensor the lengths are open.

        Raises:
            UsageError: a variable has a type that cannot be served.
        """
        return ModelSpec(
            name=name,
            inputs=tuple(map(_tensor_spec, self.feeds)),
            outputs=tuple(map(_tensor_spec, self.fetches)),
        )


def config_of(spec: ModelSpec) -> ModelConfig:
    """Return the config of a model; open lengths are left out, as Paddle Serving does.

    Raises:
        UsageError: a tensor has a type that Paddle Serving does not know.
    """
    return ModelConfig(
        feeds=tuple(map(_served_variable, spec.inputs)),
        fetches=tuple(map(_served_variable, spec.outputs)),
    )


def read_config(path: str | Path) -> ModelConfig:
    """Read a config file: text, or binary where its name ends with `.stream.prototxt`.

    Raises:
        UsageError: it cannot be read; names the file, and the line where it is text.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if path.name.endswith(".stream.prototxt"):
            return parse_binary(content)
        return parse_text(content.decode())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error


def write_config(config: ModelConfig, folder: str | Path, names: tuple[str, str]) -> None:
    """Write the text and the binary file; `names`: SERVER_FILES or CLIENT_FILES."""
    text, binary = names
    Path(folder, text).write_text(to_text(config))
    Path(folder, binary).write_bytes(to_binary(config))


# Text: name { field: value }, the subset of protobuf's text format that a config can contain.

_TOKENS = re.compile(
    r"""(?P<skip>[\s,;]+|\#[^\n]*)
      | (?P<word>[A-Za-z_][\w.]*)
      | (?P<number>-?\d+)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>[{}<>\[\]:])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"
}  # fmt: skip


def parse_text(text: str) -> ModelConfig:
    """Parse protobuf text format.

    Raises:
        UsageError: names the line.
    """
    tokens = _Tokens(text)
    found: dict[str, list[ServedVariable]] = {"feed_var": [], "fetch_var": []}
    while (name := tokens.next()) is not None:
        if name not in found:
            raise tokens.error(f"expected feed_var or fetch_var, got {name!r}")
        found[name].append(_parse_variable(tokens, name))
    return _checked(found["feed_var"], found["fetch_var"])


def to_text(config: ModelConfig) -> str:
    """Return protobuf text format, as Paddle Serving writes it."""
    lines: list[str] = []
    for kind, variables in (("feed", config.feeds), ("fetch", config.fetches)):
        for variable in variables:
            lines += [
                f"{kind}_var {{",
                f"  name: {_quoted(variable.name)}",
                f"  alias_name: {_quoted(variable.alias)}",
                f"  is_lod_tensor: {'true' if variable.is_lod else 'false'}",
                f"  {kind}_type: {variable.elem_type}",
                *(f"  shape: {length}" for length in variable.shape),
                "}",
            ]
    return "".join(f"{line}\n" for line in lines)


class _Tokens:
    """The words, numbers, texts and marks of a file, one after the other."""

    def __init__(self, text: str) -> None:
        self._line = 1
        self._tokens = self._split(text)
        self._ahead: list[str | None] = []

    def next(self) -> str | None:
        return self._ahead.pop() if self._ahead else next(self._tokens, None)

    def peek(self) -> str | None:
        if not self._ahead:
            self._ahead.append(next(self._tokens, None))
        return self._ahead[-1]

    def accept(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.next()
        return True

    def error(self, text: str) -> UsageError:
        return UsageError(f"line {self._line}: {text}")

    def _split(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            match = _TOKENS.match(text, at)
            if match is None:
                raise self.error(f"unexpected {text[at]!r}")
            if match.lastgroup != "skip":
                yield match.group()
            self._line += match.group().count("\n")
            at = match.end()


def _parse_variable(tokens: _Tokens, kind: str) -> ServedVariable:
    tokens.accept(":")
    opening = tokens.next()
    if opening not in ("{", "<"):
        raise tokens.error(f"expected {{ after {kind}, got {opening!r}")
    closing = "}" if opening == "{" else ">"
    fields: dict[str, list[str]] = {}
    while not tokens.accept(closing):
        name = tokens.next()
        if name is None:
            raise tokens.error(f"{kind} is not closed by {closing}")
        tokens.accept(":")
        fields.setdefault(name, []).extend(_parse_values(tokens, name))
    try:
        return _variable(
            name="".join(map(_unquoted, fields.get("name", []))),
            alias="".join(map(_unquoted, fields.get("alias_name", []))),
            is_lod=fields.get("is_lod_tensor", ["false"])[-1] in ("true", "True", "t", "1"),
            elem_type=int(fields.get(kind.replace("_var", "_type"), ["0"])[-1]),
            shape=tuple(map(int, fields.get("shape", []))),
        )
    except ValueError as error:
        raise tokens.error(str(error)) from error


def _parse_values(tokens: _Tokens, name: str) -> list[str]:
    values: list[str] = []
    if tokens.accept("["):
        while not tokens.accept("]"):
            values.append(_value(tokens, name))
        return values
    values.append(_value(tokens, name))
    while values[-1][0] in "\"'" and (tokens.peek() or " ")[0] in "\"'":
        values.append(_value(tokens, name))  # texts that follow each other are one
    return values


def _value(tokens: _Tokens, name: str) -> str:
    value = tokens.next()
    if value is None or value in "{}<>[]:":
        raise tokens.error(f"expected a value of {name}, got {value!r}")
    return value


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _unquoted(token: str) -> str:
    if token[0] not in "\"'":
        raise UsageError(f"expected a text in quotes, got {token!r}")
    # Escapes are bytes of UTF-8: a letter may be written as several of them.
    return _ESCAPE.sub(_unescaped, token[1:-1].encode()).decode()


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    return _ESCAPES.get(other, other)


# Binary: GeneralModelConfig {feed_var=1, fetch_var=2}; both variables
# {name=1, alias_name=2, is_lod_tensor=3, feed_type or fetch_type=4, repeated int32 shape=5}.


def parse_binary(content: bytes) -> ModelConfig:
    """Parse the binary form.

    Raises:
        UsageError: it is none.
    """
    found: dict[int, list[ServedVariable]] = {1: [], 2: []}
    for number, value in wire_fields(content):
        if number in found and isinstance(value, bytes):
            found[number].append(_binary_variable(value))
    return _checked(found[1], found[2])


def to_binary(config: ModelConfig) -> bytes:
    """Return the binary form."""
    parts: list[bytes] = []
    for number, variables in ((1, config.feeds), (2, config.fetches)):
        for variable in variables:
            body = b"".join(
                (
                    _bytes_field(1, variable.name.encode()),
                    _bytes_field(2, variable.alias.encode()),
                    _varint_field(3, int(variable.is_lod)),
                    _varint_field(4, variable.elem_type),
                    *(_varint_field(5, length) for length in variable.shape),
                )
            )
            parts.append(_bytes_field(number, body))
    return b"".join(parts)


def wire_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a serialized protobuf message: number, and varint (unsigned) or bytes.

    Raises:
        UsageError: it is cut off or no message.
    """
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise UsageError(f"no protobuf message: wire type {kind} at byte {at}")
        if at + size > len(content):
            raise UsageError(f"no protobuf message: cut off at byte {len(content)}")
        yield number, content[at : at + size]
        at += size


def signed(value: int) -> int:
    """Return a varint as the signed number that it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def varints(content: bytes) -> list[int]:
    """Return the numbers of a packed field."""
    values, at = [], 0
    while at < len(content):
        value, at = _varint(content, at)
        values.append(value)
    return values


def _binary_variable(content: bytes) -> ServedVariable:
    texts: dict[int, str] = {}
    numbers: dict[int, int] = {}
    shape: list[int] = []
    for number, value in wire_fields(content):
        if number == 5:
            shape += varints(value) if isinstance(value, bytes) else [value]
        elif isinstance(value, bytes):
            texts[number] = value.decode()
        else:
            numbers[number] = value
    return _variable(
        name=texts.get(1, ""),
        alias=texts.get(2, ""),
        is_lod=bool(numbers.get(3, 0)),
        elem_type=numbers.get(4, 0),
        shape=tuple(map(signed, shape)),
    )


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise UsageError(f"no protobuf message: cut off at byte {at}")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encode_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varint_field(number: int, value: int) -> bytes:
    return _encode_varint(number << 3) + _encode_varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _variable(
    *, name: str, alias: str, is_lod: bool, elem_type: int, shape: tuple[int, ...]
) -> ServedVariable:
    if not name:
        raise UsageError("a variable has no name")
    return ServedVariable(
        name=name, alias=alias or name, is_lod=is_lod, elem_type=elem_type, shape=shape
    )


def _checked(feeds: Iterable[ServedVariable], fetches: Iterable[ServedVariable]) -> ModelConfig:
    config = ModelConfig(feeds=tuple(feeds), fetches=tuple(fetches))
    for kind, variables in (("feed_var", config.feeds), ("fetch_var", config.fetches)):
        if not variables:
            raise UsageError(f"has no {kind}")
        for what, names in (
            ("name", [variable.name for variable in variables]),
            ("alias_name", [variable.alias for variable in variables]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise UsageError(f"two {kind} have the {what} {min(twice)!r}")
    return config


def _tensor_spec(variable: ServedVariable) -> TensorSpec:
    return TensorSpec(
        name=variable.alias,
        dtype=variable.dtype,
        shape=variable.shape,
        variable=variable.name,
    )


def _served_variable(spec: TensorSpec) -> ServedVariable:
    if spec.dtype not in ELEM_TYPES:
        raise UsageError(f"{spec.name}: Paddle Serving knows no type {spec.dtype}")
    return ServedVariable(
        name=spec.variable,
        alias=spec.name,
        elem_type=ELEM_TYPES[spec.dtype],
        shape=tuple(length for length in spec.shape if length >= 0),
    )
