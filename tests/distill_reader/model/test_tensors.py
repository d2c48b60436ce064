"""Tensors as the protocols name and lay them out."""

import re
from collections import UserDict
from collections.abc import ValuesView

import numpy as np
import pytest

from distill_reader.errors import BadRequest
from distill_reader.model import tensors


@pytest.mark.parametrize(("datatype", "name"), tensors.OIP_TO_NUMPY.items())
def test_a_datatype_and_its_dtype_name_each_other(datatype, name):
    dtype = tensors.numpy_dtype("x", datatype)
    assert dtype.name == name
    assert tensors.oip_datatype("x", dtype) == datatype


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(BadRequest, match="tensor words: datatype 'BYTES'"):
        tensors.numpy_dtype("words", "BYTES")
    with pytest.raises(BadRequest, match=r"tensor z: .*complex64"):
        tensors.oip_datatype("z", np.dtype("complex64"))


@pytest.mark.parametrize("shape", [(-1, 3), (1,) * 33])
def test_an_impossible_shape_is_refused(shape):
    with pytest.raises(BadRequest, match=r"tensor x: shape .* impossible"):
        tensors.count_items("x", shape)


def test_bytes_become_a_tensor_without_a_copy():
    data = bytearray(np.arange(6, dtype="<f4").tobytes())
    array = tensors.view_bytes("x", memoryview(data), np.dtype("<f4"), (2, 3))
    data[:4] = np.float32(7).tobytes()
    assert array[0, 0] == 7


def test_bytes_at_an_odd_address_become_a_tensor():
    data = memoryview(b"?" + np.arange(6, dtype="<i8").tobytes())[1:]
    assert tensors.view_bytes("x", data, np.dtype("<i8"), (6,)).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(2, 2), (1 << 62, 1 << 62), ()])
def test_bytes_that_do_not_fit_the_shape_are_refused(shape):
    with pytest.raises(BadRequest, match=r"tensor x: float32 of shape .* 24 came"):
        tensors.view_bytes("x", memoryview(bytes(24)), np.dtype("<f4"), shape)


def test_rows_of_several_arrays_form_one_tensor_without_a_copy():
    first, second = np.zeros((2, 3), "f4"), np.ones((1, 3), "f4")
    dtype, shape, arrays = tensors.join_rows("x", [first, second])
    assert (dtype, shape) == (np.dtype("<f4"), (3, 3))
    assert [array is given for array, given in zip(arrays, (first, second), strict=True)] == [
        True,
        True,
    ]


def test_arrays_that_lie_otherwise_are_laid_out_anew():
    strange = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    _, _, (array,) = tensors.join_rows("x", strange)
    assert bytes(tensors.raw_bytes(array)) == np.arange(6, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="none"),
        pytest.param([np.zeros((1, 2)), np.zeros((1, 3))], id="other rows"),
        pytest.param([np.zeros((1, 2)), np.zeros((1, 2), "f4")], id="other types"),
    ],
)
def test_arrays_that_form_no_tensor_are_refused(rows):
    with pytest.raises(BadRequest, match="tensor x"):
        tensors.join_rows("x", rows)


def test_an_empty_array_has_no_bytes():
    assert len(tensors.raw_bytes(np.zeros((0, 3), "f4"))) == 0


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ([1, 2.5], "float32", [1.0, 2.5]),
        ([[1], [2]], "float32", [1.0, 2.0]),
        ([1, 2], "uint8", [1, 2]),
        ([-(1 << 63)], "int64", [-(1 << 63)]),
        ([(1 << 64) - 1], "uint64", [(1 << 64) - 1]),
        ([True, False], "bool", [True, False]),
        ([1, 0], "bool", [True, False]),
        ([1e300], "float32", [float("inf")]),
        ([], "int64", []),
    ],
)
def test_numbers_become_the_type_that_is_asked_for(numbers, dtype, expected):
    assert tensors.cast_numbers("x", numbers, np.dtype(dtype)).tolist() == expected


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([256], "uint8"),
        ([-1], "uint64"),
        ([1.0], "int64"),
        ([1 << 70], "int64"),
        ([True], "float32"),
        ([2], "bool"),
        (["1"], "float32"),
        ([None], "float32"),
        ([{}], "float32"),
        ([[1], [2, 3]], "float32"),
        ([1, [2]], "float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(numbers, dtype):
    with pytest.raises(BadRequest, match=re.escape("tensor x: data ")):
        tensors.cast_numbers("x", numbers, np.dtype(dtype))


class Sparse:
    """As PyTorch's sparse tensors do."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("nbytes is not defined for sparse tensors")


class Lazy(UserDict[str, object]):
    def values(self) -> ValuesView[object]:
        raise KeyError("gone")


@pytest.mark.parametrize("odd", [Sparse(), Lazy()])
def test_what_cannot_tell_its_memory_counts_as_nothing_and_hides_nothing_else(odd: object):
    assert tensors.memory_of(odd) == 0
    field = {"graph": odd, "ids": np.zeros(100_000), "all": [odd, odd]}
    assert tensors.memory_of(field) == pytest.approx(800_000, rel=0.01)
