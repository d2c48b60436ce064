"""Check the arrays of a request against the model before they are sent. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distill_reader.errors import BadRequest, TeacherGone
from distill_reader.model.output_encodings import MARK, split_name
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.clients.client import Array


class InputRows(NamedTuple):  # a tuple: made for every request
    """One input: the rows of `arrays`, one array after the other."""

    name: str  # as the model's spec calls it
    input_index: int  # among the spec's inputs
    dtype: str
    arrays: Sequence[Array]  # C-contiguous, at least one
    shape: tuple[int, ...]  # of all rows together
    size_bytes: int


def gather(
    spec: ModelSpec, feeds: Mapping[str, Sequence[Array]], *, is_exact: bool = True
) -> list[InputRows]:
    """Return the inputs in the order of the spec.

    Args:
        spec: of the model. Without inputs they are unknown, and all arrays are accepted.
        is_exact: whether the spec's shapes are complete; if not, only types are checked.

    Raises:
        BadRequest: an input is missing, unknown or does not fit; names it.
    """
    by_index: dict[int, InputRows] = {}
    for name, arrays in feeds.items():
        if not arrays:
            raise BadRequest(f"tensor {name}: no array is given")
        if spec.inputs:
            tensor = spec.input(name)
            input_index = spec.inputs.index(tensor)
        else:
            tensor = _seen(name, arrays[0])
            input_index = len(by_index)
        if input_index in by_index:
            raise BadRequest(f"tensor {tensor.name}: given twice, also as {name!r}")
        if not is_exact and arrays[0].shape[1:] != tensor.shape:
            tensor = replace(tensor, shape=arrays[0].shape[1:])
        by_index[input_index] = _check(tensor, input_index, arrays)
    missing = [t.name for input_index, t in enumerate(spec.inputs) if input_index not in by_index]
    if missing:
        raise BadRequest(f"model {spec.name} also takes {', '.join(missing)}")
    rows = [by_index[input_index] for input_index in range(len(by_index))]
    for other in rows[1:]:
        if other.shape[0] != rows[0].shape[0]:
            raise BadRequest(
                f"tensors {rows[0].name} and {other.name}: must have equally many samples, "
                f"got {rows[0].shape[0]} and {other.shape[0]}"
            )
    return rows


def find_outputs(spec: ModelSpec, fetch: Sequence[str]) -> dict[str, str]:
    """Return the model's name for each output wanted; all outputs if `fetch` is empty.

    If the spec has no outputs they are unknown, and names are returned as they are.

    Raises:
        BadRequest: the model has no such output.
    """
    if not fetch:
        return {tensor.name: tensor.name for tensor in spec.outputs if not tensor.unusable}
    return {name: _wire_name(spec, name) if spec.outputs else name for name in fetch}


def pick_outputs(
    endpoint: str, wanted: Mapping[str, str], answer: Mapping[str, Array]
) -> dict[str, Array]:
    """Return copies of the outputs by the caller's names; all outputs if `wanted` is empty.

    Copies, because the answer's arrays are views of a message: unaligned, perhaps read-only.

    Raises:
        TeacherGone: the answer lacks one.
    """
    missing = [name for name in wanted.values() if name not in answer]
    if missing:
        raise TeacherGone(f"{endpoint}: its answer lacks {', '.join(missing)}")
    names = wanted or {name: name for name in answer}
    return {name: np.array(answer[given]) for name, given in names.items()}


def _wire_name(spec: ModelSpec, name: str) -> str:
    """Return the model's name of an output, with the encoding that is asked for."""
    output, encoding = split_name(spec, name)
    return f"{output.name}{MARK}{encoding}" if encoding else output.name


def _seen(name: str, array: Array) -> TensorSpec:
    """Return the spec of an unknown input, as the array shows it."""
    return TensorSpec(name=name, dtype=array.dtype.name, shape=array.shape[1:])


def _check(tensor: TensorSpec, input_index: int, arrays: Sequence[Array]) -> InputRows:
    first = arrays[0]
    dtype = first.dtype
    tail = first.shape[1:]
    if dtype != np.dtype(tensor.dtype) or tail != tensor.shape or first.ndim == 0:
        tensor.check(str(first.dtype), first.shape)
    samples = size = 0
    is_contiguous = True
    for array in arrays:
        shape = array.shape
        if array.dtype != dtype or shape[1:] != tail or not shape:
            tensor.check(str(array.dtype), shape)
            raise BadRequest(  # each alone would fit: they differ in a length the model leaves open
                f"tensor {tensor.name}: arrays of one request must agree but for axis 0, "
                f"got {list(first.shape)} and {list(shape)}"
            )
        samples += shape[0]
        size += array.nbytes
        is_contiguous = is_contiguous and array.flags.c_contiguous
    if not is_contiguous:
        arrays = [np.ascontiguousarray(array) for array in arrays]
    return InputRows(tensor.name, input_index, dtype.name, arrays, (samples, *tail), size)
