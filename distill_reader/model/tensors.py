"""Convert between numpy arrays and tensors of the protocols: row-major, little-endian bytes."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
Rows = Array | Sequence[Array]  # one tensor, or arrays whose rows one after the other are one

MAX_AXES = 32
_LOOKED_AT = 8  # values of a list, to tell its memory
_OF_LARGEST = 0.01  # by less than this part of the largest value answers differ for rounding alone

OIP_TO_NUMPY = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
BFLOAT16 = "BF16"  # numpy lacks it; read as float32
NUMPY_TO_OIP = {numpy_name: name for name, numpy_name in OIP_TO_NUMPY.items()}


def numpy_dtype(tensor: str, datatype: str) -> np.dtype[Any]:
    """Return the little-endian dtype of a datatype of the Open Inference Protocol.

    Raises:
        BadRequest: the datatype is unknown; names the tensor and lists the known ones.
    """
    try:
        return np.dtype(OIP_TO_NUMPY[datatype]).newbyteorder("<")
    except KeyError:
        raise BadRequest(
            f"tensor {tensor}: datatype {datatype!r} is none of {', '.join(OIP_TO_NUMPY)}"
        ) from None


def oip_datatype(tensor: str, dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in the Open Inference Protocol.

    Raises:
        BadRequest: the protocol has no such type; names the tensor.
    """
    try:
        return NUMPY_TO_OIP[dtype.name]
    except KeyError:
        raise BadRequest(
            f"tensor {tensor}: the Open Inference Protocol has no type for {dtype.name}"
        ) from None


def count_items(tensor: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape.

    Raises:
        BadRequest: the shape is impossible; names the tensor.
    """
    if len(shape) > MAX_AXES or any(length < 0 for length in shape):
        raise BadRequest(f"tensor {tensor}: shape {list(shape[:MAX_AXES])} is impossible")
    return math.prod(shape)


def view_bytes(tensor: str, data: memoryview, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return a view of `data` as a tensor; read-only if `data` is.

    Raises:
        BadRequest: `data` has more or fewer bytes than the shape needs; names the tensor.
    """
    size = count_items(tensor, shape) * dtype.itemsize
    if len(data) != size:
        raise BadRequest(
            f"tensor {tensor}: {dtype.name} of shape {list(shape)} has {size} bytes, "
            f"{len(data)} came"
        )
    return np.ndarray(tuple(shape), dtype, data)


def view_bfloat16(tensor: str, data: memoryview, shape: Sequence[int]) -> Array:
    """Return bfloat16 values, which are the upper halves of float32, as float32.

    Raises:
        BadRequest: `data` has more or fewer bytes than the shape needs; names the tensor.
    """
    halves = view_bytes(tensor, data, np.dtype("<u2"), shape)
    return (halves.astype("<u4") << 16).view("<f4")


def join_rows(tensor: str, rows: Rows) -> tuple[np.dtype[Any], tuple[int, ...], list[Array]]:
    """Return dtype, shape and the contiguous little-endian arrays that form a tensor.

    Arrays that are C-contiguous and little-endian already are not copied.

    Raises:
        BadRequest: the arrays differ in dtype or in the shape of a row; names the tensor.
    """
    arrays = [rows] if isinstance(rows, np.ndarray) else list(rows)
    if not arrays:
        raise BadRequest(f"tensor {tensor}: there is no array")
    dtype, row = arrays[0].dtype, arrays[0].shape[1:]
    if len(arrays) == 1:
        shape: tuple[int, ...] = arrays[0].shape
    else:
        for array in arrays:
            if array.dtype != dtype or array.ndim == 0 or array.shape[1:] != row:
                raise BadRequest(
                    f"tensor {tensor}: rows of {dtype} {list(row)} and of {array.dtype} "
                    f"{list(array.shape[1:])} form no tensor"
                )
        shape = (sum(len(array) for array in arrays), *row)
    little = dtype.newbyteorder("<")
    return little, shape, [_little_endian(array, little) for array in arrays]


def raw_bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array without copying."""
    flat: Any = array.reshape(-1).view(np.uint8)  # numpy's types know no buffers yet
    return memoryview(flat)


def cast_numbers(tensor: str, numbers: object, dtype: np.dtype[Any]) -> Array:
    """Return nested JSON numbers as a flat array of `dtype`.

    Raises:
        BadRequest: they are not numbers, or do not fit the type; names the tensor.
    """
    try:
        array = np.array(numbers)
    except (ValueError, OverflowError, RecursionError):
        raise BadRequest(f"tensor {tensor}: data must be numbers, nested evenly") from None
    flat = array.reshape(-1)
    if flat.size == 0:
        return np.empty(0, dtype)
    if dtype.kind == "b":
        if flat.dtype.kind == "b" or (flat.dtype.kind in "iu" and np.isin(flat, (0, 1)).all()):
            return flat.astype(dtype)
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        if flat.dtype.kind in "iu" and info.min <= int(flat.min()) <= int(flat.max()) <= info.max:
            return flat.astype(dtype)
    elif flat.dtype.kind in "iuf":
        with np.errstate(over="ignore"):  # like the framework: too large values become infinite
            return flat.astype(dtype)
    raise BadRequest(f"tensor {tensor}: data does not fit {dtype.name}")


def _little_endian(array: Array, dtype: np.dtype[Any]) -> Array:
    if array.flags.c_contiguous and array.dtype == dtype:
        return array
    return np.ascontiguousarray(array, dtype)


def array_of(tensor: Any) -> Array:
    """Return a framework's tensor as an array.

    Floats that numpy lacks (bfloat16, float8) become float32 with the same values; Paddle's own
    `numpy()` would return their bits as integers.
    """
    dtype = str(getattr(tensor, "dtype", ""))
    if "bfloat16" not in dtype and "float8" not in dtype:
        return np.asarray(tensor.numpy())
    cast = tensor.float if hasattr(tensor, "float") else lambda: tensor.astype("float32")
    return np.asarray(cast().numpy())


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or dict with all its values changed; anything else as it is."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([change(each) for each in value])
    if kind is dict:
        return {key: change(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(kind, "_make"):  # a namedtuple
        return kind._make([change(each) for each in value])
    return value


def memory_of(value: Any, deep: int = 4) -> int:
    """Return about how many bytes an array, a tensor, or a list or mapping of some has.

    An array of objects counts as a list of them.

    Of something else, what Python says: an object may refer to what is not its own. What cannot be
    asked, such as a sparse tensor, counts as nothing.
    """
    try:
        return _memory_of(value, deep)
    except Exception:  # noqa: BLE001  an estimate ends no training, whatever the object's code does
        return 0


def differ_beyond_rounding(one: Array, other: Array, among: Array, of_spread: float) -> bool:
    """Return whether answers of a model to the same samples are not about the same.

    Those of other shapes, and numbers that are no floats, are not compared; nor is what has a NaN.

    Args:
        among: the answers to a whole batch.
        of_spread: by less than this part of their spread they differ for rounding alone.
    """
    if one.dtype.kind != "f" or one.shape != other.shape or not one.size:
        return False
    values = among.astype(np.float64)
    most = np.maximum(of_spread * np.ptp(values), _OF_LARGEST * np.abs(values).max())
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    return bool(most and apart > most)


def has_objects(value: Any) -> bool:
    """Return whether it is an array of objects, whose own bytes are references alone."""
    return bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def _memory_of(value: Any, deep: int) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int) and not has_objects(value):
        return size  # of numpy or PyTorch
    if hasattr(value, "element_size"):
        return int(value.size) * int(value.element_size())  # of Paddle
    own = sys.getsizeof(value, 0)
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, np.ndarray):
        value = value.reshape(-1)
    if isinstance(value, list | tuple | np.ndarray) and len(value) and deep:
        some = value[:: -(-len(value) // _LOOKED_AT)]  # looking at each would take time
        return own + len(value) * sum([memory_of(each, deep - 1) for each in some]) // len(some)
    return own
