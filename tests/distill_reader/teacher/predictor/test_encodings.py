from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distill_reader.errors import BadRequest
from distill_reader.model.normalization import Normalization
from distill_reader.model.output_encodings import INDICES, LOG_REST, VALUES, WHOLE, OutputEncoding
from distill_reader.model.specs import TensorSpec
from distill_reader.teacher.predictor.encodings import Encoder, decode_input

outputs = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=9),
    elements=st.floats(-1e4, 1e4, width=32),
)


def encode(output: Any, *encoding: Any) -> Any:
    return Encoder([output], ["score"]).encode(OutputEncoding(0, *encoding))


@given(output=outputs, top_k=st.integers(1, 12))
def test_the_largest_come_first_and_the_first_of_equal_ones_before_the_others(output, top_k):
    values = encode(output, VALUES, top_k, "float32")
    indices = encode(output, INDICES, top_k, "int32")
    order = np.argsort(-output, axis=-1, kind="stable")[..., :top_k]
    np.testing.assert_array_equal(values, np.take_along_axis(output, order, -1))
    np.testing.assert_array_equal(np.take_along_axis(output, indices, -1), values)
    assert all(len(set(row)) == len(row) for row in indices.reshape(-1, indices.shape[-1]))


def test_of_equal_values_within_the_top_the_first_comes_first():
    output = np.array([[1.0, 5.0, 5.0, 5.0, 0.0]], np.float32)
    assert encode(output, INDICES, 3, "int32").tolist() == [[1, 2, 3]]


def test_nan_hides_no_larger_value():
    output = np.array([[np.nan, 1.0, 3.0, 2.0]], np.float32)
    assert encode(output, INDICES, 2, "int32").tolist() == [[2, 3]]


@given(output=outputs, top_k=st.integers(1, 12))
def test_the_rest_is_the_log_of_the_sum_of_exp_of_the_others(output, top_k):
    rest = encode(output, LOG_REST, top_k, "float32")
    ordered = -np.sort(-output.astype(np.float64), axis=-1)
    others = ordered[..., top_k:]
    assert rest.shape == (*output.shape[:-1], 1)
    if not others.size:
        assert np.isneginf(rest).all()
        return
    most = others.max(-1, keepdims=True)
    expected = np.log(np.exp(others - most).sum(-1, keepdims=True)) + most
    np.testing.assert_allclose(rest, expected, rtol=1e-5, atol=1e-3)


@given(output=outputs)
def test_half_precision_is_off_by_a_thousandth_at_most(output):
    half = encode(output, WHOLE, 0, "float16")
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), output, rtol=1e-3, atol=1e-6)


def test_what_float16_cannot_hold_is_refused_and_infinity_is_not():
    output = np.array([[7e4, 1.0]], np.float32)
    with pytest.raises(BadRequest, match="output score: has values beyond float16"):
        encode(output, WHOLE, 0, "float16")
    endless = np.array([[-np.inf, 1.0]], np.float32)
    assert np.isneginf(encode(endless, WHOLE, 0, "float16")[0, 0])


def test_an_index_that_does_not_fit_its_type_is_refused():
    output = np.zeros((1, (1 << 16) + 1), np.float32)
    with pytest.raises(BadRequest, match="indices beyond uint16; want int32"):
        encode(output, INDICES, 1, "uint16")
    assert encode(output[:, 1:], INDICES, 1, "uint16").shape == (1, 1)


def test_inputs_become_the_models_own_type():
    tensor = TensorSpec(name="x", dtype="float32", shape=(2,))
    floats = np.ones((3, 2), np.float32)
    assert decode_input(floats, tensor, None) is floats
    assert decode_input(floats.astype(np.float16), tensor, None).dtype == np.float32
    pixels = np.full((3, 2), 51, np.uint8)
    decoded: Any = decode_input(pixels, tensor, Normalization())
    np.testing.assert_allclose(decoded, 0.2, rtol=1e-6)
