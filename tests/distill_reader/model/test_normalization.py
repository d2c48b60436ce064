import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import BadRequest, ModelError, UsageError
from distill_reader.model.normalization import (
    NORMALIZATION_FILE,
    Normalization,
    check_inputs,
    parse_option,
    read_folder,
    write_folder,
)
from distill_reader.model.specs import TensorSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = Normalization(mean=MEAN, std=STD, layout="CHW")


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name="image", dtype=dtype, shape=shape, variable="x")


@pytest.mark.parametrize("layout", ["CHW", "HWC", "HWC-CHW"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_pixels_become_what_the_textbook_says(layout: str, dtype: str):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6), dtype=np.uint8)
    expected = (pixels / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    given_pixels = pixels if layout == "CHW" else pixels.transpose(0, 2, 3, 1)
    if layout == "HWC":
        expected = expected.transpose(0, 2, 3, 1)
    floats: Any = Normalization(mean=MEAN, std=STD, layout=layout).apply(given_pixels, dtype)
    assert floats.dtype == dtype
    assert floats.flags.c_contiguous
    np.testing.assert_allclose(floats, expected, atol=2e-3 if dtype == "float16" else 1e-6)


def test_without_channels_any_shape_will_do():
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 6)
    floats = Normalization(scale=1.0, mean=(1.0,), std=(2.0,)).apply(pixels, "float32")
    np.testing.assert_array_equal(floats, (pixels.astype(np.float32) - 1) / 2)


def test_samples_with_other_channels_are_refused():
    with pytest.raises(BadRequest, match="expected 3 channels on axis 1"):
        IMAGENET.apply(np.zeros((2, 4, 5, 5), np.uint8), "float32")


def test_the_form_in_which_pixels_come_follows_the_layout():
    assert IMAGENET.accepted(tensor(3, 8, 9)).shape == (3, 8, 9)
    turned = Normalization(mean=MEAN, std=STD, layout="HWC-CHW")
    assert turned.accepted(tensor(3, 8, 9)).shape == (8, 9, 3)
    assert turned.accepted(tensor(3, -1, -1)).shape == (-1, -1, 3)
    assert Normalization().accepted(tensor(784)).shape == (784,)


@pytest.mark.parametrize(
    ("normalization", "spec", "words"),
    [
        (IMAGENET, tensor(784), r"image has shape \[784\], layout CHW wants three axes"),
        (IMAGENET, tensor(8, 8, 3), "image has 8 channels in layout CHW, mean and std have 3"),
        (IMAGENET, tensor(3, 8, 8, dtype="int64"), "image is int64; only inputs of floats"),
    ],
)
def test_what_does_not_fit_an_input_is_refused(normalization, spec, words: str):
    with pytest.raises(UsageError, match=words):
        check_inputs({"image": normalization}, [spec])


def test_an_input_goes_by_either_name_and_must_be_there():
    assert check_inputs({"x": IMAGENET}, [tensor(3, 8, 8)]) == {"image": IMAGENET}
    with pytest.raises(UsageError, match="'picture' is not an input of the model; it takes image"):
        check_inputs({"picture": IMAGENET}, [tensor(3, 8, 8)])
    with pytest.raises(UsageError, match="'x' is the input 'image', which has one"):
        check_inputs({"image": IMAGENET, "x": IMAGENET}, [tensor(3, 8, 8)])


def test_an_inputs_name_comes_before_the_variable_of_another_one():
    left, right = (
        replace(tensor(3, 8, 8), name=name, variable=variable)
        for name, variable in (("left", "right"), ("right", "left"))
    )
    for inputs in ([left, right], [right, left]):
        assert check_inputs({"left": IMAGENET}, inputs) == {"left": IMAGENET}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image", ("", "image", Normalization())),
        (
            "m/image:mean=0.485,0.456,0.406:std=0.229,0.224,0.225:layout=CHW",
            ("m", "image", IMAGENET),
        ),
        (
            "image:scale=1:mean=-1:std=1/4",
            ("", "image", Normalization(scale=1.0, mean=(-1.0,), std=(0.25,))),
        ),
    ],
)
def test_an_option_says_it_all(text: str, expected):
    assert parse_option(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no input; write INPUT:mean="),
        ("image:mean", "'mean' is none of scale=..., mean=..., std=..., layout=..., each once"),
        ("image:mean=1:mean=2", "each once"),
        ("image:median=1", "'median=1' is none of"),
        ("image:mean=a", "expected numbers such as .* got 'a'"),
        ("image:mean=", "expected numbers"),
        ("image:scale=1,2", "scale is one number"),
        ("image:std=0", "scale and std must be > 0"),
        ("image:std=1/0", "expected numbers"),
        ("image:mean=1,2,3", "3 channels want a layout"),
        ("image:mean=1,2,3:std=1,2:layout=CHW", "mean has 3 values, std 2"),
        ("image:layout=WHC", "layout: expected one of CHW, HWC, HWC-CHW or nothing, got 'WHC'"),
        ("image:mean=1e999", "expected numbers"),
        (
            "image:mean=123.675,116.28,103.53:std=58.395,57.12,57.375:layout=CHW",
            "mean 123.675 is above 1, which a white pixel becomes by scale 0.00392157: say scale=1",
        ),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(text: str, words: str):
    with pytest.raises(UsageError, match=words):
        parse_option(text)


def test_a_folder_keeps_them_and_none_takes_the_file_away(tmp_path: Path):
    assert read_folder(tmp_path) == {}
    given_ones = {"image": IMAGENET, "depth": Normalization(scale=0.1)}
    write_folder(tmp_path, given_ones)
    assert read_folder(tmp_path) == given_ones
    write_folder(tmp_path, {})
    assert not (tmp_path / NORMALIZATION_FILE).exists()


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["image", "scale", "mean", "std", "layout"]), inner, max_size=4
    ),
    max_leaves=8,
)  # fmt: skip


@given(document=_json)
def test_a_file_that_is_no_such_file_is_refused_by_name(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("m")
    (folder / NORMALIZATION_FILE).write_text(json.dumps(document))
    try:
        found = read_folder(folder)
    except ModelError as error:
        text = str(error)
    else:
        assert all(isinstance(each, Normalization) for each in found.values())
        return
    assert NORMALIZATION_FILE in text
