"""The encodings in which a teacher can be asked to send an output. Pure.

The name of an output is followed by its encoding:

    NAME@float16                rounded to half precision
    NAME@topK:values            (N, ..., K) the K largest values of the last axis, largest first
    NAME@topK:indices           (N, ..., K) int32, their indices on that axis
    NAME@topK:logrest           (N, ..., 1) the log of the sum of exp over all others; -inf: none

`:DTYPE` may follow values and logrest (float16) and indices (uint16, int32, int64). Every protocol
carries names of outputs, so every protocol can ask for encodings.
"""

import re
from typing import NamedTuple

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.specs import ModelSpec, TensorSpec

MARK = "@"
WHOLE, VALUES, INDICES, LOG_REST = "", "values", "indices", "logrest"
MAX_TOP_K = 65_535
FLOAT_DTYPES = ("float16",)
INDEX_DTYPES = ("int32", "uint16", "int64")

_TOP = re.compile(r"top([1-9]\d{0,4}):(values|indices|logrest)(?::(\w+))?")


class OutputEncoding(NamedTuple):  # a tuple: hashed for every request
    """An output and how it is encoded."""

    output_index: int  # among the spec's outputs
    part: str  # WHOLE, VALUES, INDICES or LOG_REST
    top_k: int  # 0 where WHOLE
    dtype: str  # of the encoded tensor


def encoding_name(output: str, part: str = WHOLE, top_k: int = 0, dtype: str = "") -> str:
    """Return the name that asks for an encoded output.

    Args:
        dtype: "": the default, which is int32 for indices and the output's own dtype for the rest.
    """
    if part == WHOLE:
        return f"{output}{MARK}{dtype}" if dtype else output
    return f"{output}{MARK}top{top_k}:{part}" + (f":{dtype}" if dtype else "")


def split_name(spec: ModelSpec, name: str) -> tuple[TensorSpec, str]:
    """Split a name into its output and its encoding ("": none).

    Raises:
        BadRequest: the model has no such output; lists the outputs.
    """
    output, mark, encoding = name.rpartition(MARK)
    if not mark or any(name in (known.name, known.variable) for known in spec.outputs):
        return spec.output(name), ""
    return spec.output(output), encoding


def parse_encoding(spec: ModelSpec, name: str) -> OutputEncoding:
    """Parse a name.

    Raises:
        BadRequest: there is no such output or encoding; lists those there are.
    """
    output, encoding = split_name(spec, name)
    output_index = spec.outputs.index(output)
    own = np.dtype(output.dtype).name
    if not encoding:
        return OutputEncoding(output_index, WHOLE, 0, own)
    if np.dtype(own).kind != "f":
        raise BadRequest(f"output {name}: {output.name} is {own}; only floats can be encoded")
    if encoding in FLOAT_DTYPES:
        return OutputEncoding(output_index, WHOLE, 0, encoding)
    match = _TOP.fullmatch(encoding)
    if match is None:
        raise BadRequest(
            f"output {name}: no encoding {encoding!r}; there are {output.name}{MARK}float16 and "
            f"{output.name}{MARK}topK:values, :indices and :logrest"
        )
    if not output.shape:
        raise BadRequest(f"output {name}: {output.name} has one value per sample, and no top of it")
    top_k, part, dtype = int(match[1]), match[2], match[3]
    if top_k > MAX_TOP_K:
        raise BadRequest(f"output {name}: K is {top_k}; at most {MAX_TOP_K} can be wanted")
    known = INDEX_DTYPES if part == INDICES else (own, *FLOAT_DTYPES)
    if dtype is not None and dtype not in known:
        raise BadRequest(f"output {name}: {part} come as {' or '.join(known)}, not as {dtype}")
    return OutputEncoding(output_index, part, top_k, dtype or known[0])


def encoded_shape(encoding: OutputEncoding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one encoded sample, for an output of this shape."""
    if encoding.part == WHOLE:
        return shape
    if encoding.part == LOG_REST:
        return (*shape[:-1], 1)
    return (*shape[:-1], min(encoding.top_k, shape[-1]))
