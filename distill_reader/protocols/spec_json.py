"""Convert a model's spec to JSON and back, for the fast path's greetings. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from distill_reader.errors import FastPathError, UsageError
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec

_KNOWN_DTYPES = ("float16", "uint8")  # of the encodings of inputs


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "version": spec.version,
        "inputs": [_tensor_to_json(tensor) for tensor in spec.inputs],
        "outputs": [_tensor_to_json(tensor) for tensor in spec.outputs],
        "takes_forms": spec.takes_encodings,
        "digest": spec.digest,
    }


def spec_from_json(value: object) -> ModelSpec:
    """Raises: FastPathError."""
    if not isinstance(value, dict):
        raise FastPathError(f"model: expected an object, got {value!r:.80}")
    return ModelSpec(
        name=text_of(value, "name"),
        version=text_of(value, "version"),
        inputs=_tensors_from_json(value.get("inputs")),
        outputs=_tensors_from_json(value.get("outputs")),
        takes_encodings=value.get("takes_forms")
        is True,  # missing: of a release before there were any
        digest=text_of(value, "digest"),
    )


def _tensor_to_json(tensor: TensorSpec) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "variable": tensor.variable,
        "accepts": [
            {"dtype": encoding.dtype, "shape": list(encoding.shape)} for encoding in tensor.accepts
        ],
    }


def _tensors_from_json(value: object) -> tuple[TensorSpec, ...]:
    if not isinstance(value, list):
        raise FastPathError(f"model: expected a list of tensors, got {value!r:.80}")
    tensors = []
    for fields in value:
        if not isinstance(fields, dict):
            raise FastPathError(f"model: expected a tensor, got {fields!r:.80}")
        try:
            tensors.append(
                TensorSpec(
                    name=text_of(fields, "name"),
                    dtype=text_of(fields, "dtype"),
                    shape=_shape(fields),
                    variable=text_of(fields, "variable"),
                    accepts=_accepts_from_json(fields.get("accepts", [])),
                )
            )
        except UsageError as error:
            raise FastPathError(f"model: {error}") from error
    return tuple(tensors)


def _accepts_from_json(value: object) -> tuple[InputEncoding, ...]:
    """Return the encodings that are known here: a newer teacher may have others."""
    if not isinstance(value, list):
        raise FastPathError(f"model: expected a list of encodings, got {value!r:.80}")
    encodings = []
    for fields in value:
        if not isinstance(fields, dict):
            raise FastPathError(f"model: expected an encoding, got {fields!r:.80}")
        if text_of(fields, "dtype") in _KNOWN_DTYPES:
            encodings.append(InputEncoding(dtype=text_of(fields, "dtype"), shape=_shape(fields)))
    return tuple(encodings)


def _shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    shape = fields.get("shape")
    if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape):
        raise FastPathError(f"model: expected a shape, got {shape!r:.80}")
    return tuple(shape)


def json_object(body: bytes) -> dict[str, Any]:
    """Raises: FastPathError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FastPathError(f"expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FastPathError(f"expected a JSON object, got {fields!r:.80}")
    return fields


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text, "" where it is missing. Raises: FastPathError."""
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise FastPathError(f"{name}: expected text, got {value!r:.80}")
    return value
