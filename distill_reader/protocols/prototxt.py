"""Read and write the model config of Paddle Serving (GeneralModelConfig), as text and as binary.

A servable folder holds `serving_server_conf.prototxt` and `.stream.prototxt`. Its clients hold
`serving_client_conf.*` with the same content: names, aliases, types and shapes of the tensors that
are fed and fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from distill_reader.errors import UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols.protobuf_schema import message_classes

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
_UNSUPPORTED = {6: "bfloat16, which numpy lacks", 20: "string"}

_VARIABLE = (
    "string name = 1; string alias_name = 2; bool is_lod_tensor = 3;"
    "int32 {kind}_type = 4; repeated int32 shape = 5"
)
_MODEL_CONFIG = message_classes(
    "baidu.paddle_serving.configure",
    {
        "FeedVar": _VARIABLE.format(kind="feed"),
        "FetchVar": _VARIABLE.format(kind="fetch"),
        "GeneralModelConfig": "repeated FeedVar feed_var = 1; repeated FetchVar fetch_var = 2",
    },
    syntax="proto2",
)["GeneralModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVariable:
    """One FeedVar or FetchVar."""

    name: str  # the model's own
    alias: str  # what clients call it
    is_lod: bool = False  # rows are sequences of different lengths
    elem_type: int = 0
    shape: tuple[int, ...] = ()  # of one sample; open lengths are left out of the file

    @property
    def dtype(self) -> str:
        """Numpy's name of the type.

        Raises:
            UsageError: numpy has no such type; names the variable.
        """
        if self.elem_type not in DTYPES:
            kind = _UNSUPPORTED.get(self.elem_type, "unknown")
            raise UsageError(
                f"{self.name}: elem_type {self.elem_type} ({kind}) cannot be served; "
                f"known are {', '.join(f'{key} ({DTYPES[key]})' for key in DTYPES)}"
            )
        return DTYPES[self.elem_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The inputs (feeds) and outputs (fetches) of a model."""

    feeds: tuple[ServedVariable, ...]
    fetches: tuple[ServedVariable, ...]

    def spec(self, name: str) -> ModelSpec:
        """Return the spec of the model that the config describes.

        Raises:
            UsageError: a variable has a type that cannot be served.
        """
        return ModelSpec(
            name=name,
            inputs=tuple(map(_tensor_spec, self.feeds)),
            outputs=tuple(map(_tensor_spec, self.fetches)),
            is_exact=False,
        )


def config_of(spec: ModelSpec) -> ModelConfig:
    """Return the config of a model. Open lengths are left out, as in Paddle Serving's own files.

    Raises:
        UsageError: Paddle Serving lacks the type of a tensor.
    """
    return ModelConfig(
        feeds=tuple(map(_served_variable, spec.inputs)),
        fetches=tuple(map(_served_variable, spec.outputs)),
    )


def read_config(path: str | Path) -> ModelConfig:
    """Read a config file: binary if its name ends with `.stream.prototxt`, else text.

    Raises:
        UsageError: it cannot be read; names the file and, in a text file, the line.
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
    Path(folder, text).write_text(to_text(config), encoding="utf-8")
    Path(folder, binary).write_bytes(to_binary(config))


def parse_text(text: str) -> ModelConfig:
    """Parse protobuf's text format. Fields that are not of the schema are ignored.

    Raises:
        UsageError: names the line.
    """
    try:
        return _config(text_format.Parse(text, _MODEL_CONFIG(), allow_unknown_field=True))
    except text_format.ParseError as error:
        raise UsageError(f"line {error}") from error  # "LINE:COLUMN : ..."


def to_text(config: ModelConfig) -> str:
    """Return protobuf's text format, as Paddle Serving writes it."""
    return str(text_format.MessageToString(_message(config), as_utf8=True))


def parse_binary(content: bytes) -> ModelConfig:
    """Parse the binary format.

    Raises:
        UsageError: `content` is no config.
    """
    try:
        return _config(_MODEL_CONFIG.FromString(content))
    except (DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"no serialized model config: {error}") from error


def to_binary(config: ModelConfig) -> bytes:
    """Return the binary format."""
    return bytes(_message(config).SerializeToString())


def _config(message: Any) -> ModelConfig:
    feeds = [_variable(variable, variable.feed_type) for variable in message.feed_var]
    fetches = [_variable(variable, variable.fetch_type) for variable in message.fetch_var]
    _check("feed_var", feeds)
    _check("fetch_var", fetches)
    return ModelConfig(feeds=tuple(feeds), fetches=tuple(fetches))


def _message(config: ModelConfig) -> Any:
    return _MODEL_CONFIG(
        feed_var=[_fields(variable, "feed_type") for variable in config.feeds],
        fetch_var=[_fields(variable, "fetch_type") for variable in config.fetches],
    )


def _variable(message: Any, elem_type: int) -> ServedVariable:
    if not message.name:
        raise UsageError("a variable has no name")
    return ServedVariable(
        name=message.name,
        alias=message.alias_name or message.name,
        is_lod=message.is_lod_tensor,
        elem_type=elem_type,
        shape=tuple(message.shape),
    )


def _fields(variable: ServedVariable, type_field: str) -> dict[str, Any]:
    return {
        "name": variable.name,
        "alias_name": variable.alias,
        "is_lod_tensor": variable.is_lod,
        type_field: variable.elem_type,
        "shape": variable.shape,
    }


def _check(kind: str, variables: Sequence[ServedVariable]) -> None:
    if not variables:
        raise UsageError(f"has no {kind}")
    for what, names in (
        ("name", [variable.name for variable in variables]),
        ("alias_name", [variable.alias for variable in variables]),
    ):
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise UsageError(f"two {kind} have the {what} {min(twice)!r}")


def _tensor_spec(variable: ServedVariable) -> TensorSpec:
    return TensorSpec(
        name=variable.alias,
        dtype=variable.dtype,
        shape=variable.shape,
        variable=variable.name,
    )


def _served_variable(spec: TensorSpec) -> ServedVariable:
    if spec.dtype not in ELEM_TYPES:
        raise UsageError(f"{spec.name}: Paddle Serving has no type for {spec.dtype}")
    return ServedVariable(
        name=spec.variable,
        alias=spec.name,
        elem_type=ELEM_TYPES[spec.dtype],
        shape=tuple(length for length in spec.shape if length >= 0),
    )
