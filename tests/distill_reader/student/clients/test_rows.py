import numpy as np
import pytest

from distill_reader.errors import BadRequest, TeacherGone
from distill_reader.model.specs import ModelSpec
from distill_reader.student.clients.rows import find_outputs, gather, pick_outputs
from tests.distill_reader.student.local_teacher import SPEC

UNKNOWN = ModelSpec(name="serving", inputs=(), outputs=())


def image(samples: int = 2, dtype: str = "float32") -> np.ndarray:
    return np.ones((samples, 2, 3), dtype)


def words(samples: int = 2, length: int = 5) -> np.ndarray:
    return np.ones((samples, length), np.int64)


def test_rows_of_several_arrays_form_one_input():
    rows = gather(SPEC, {"words": [words(3)], "image": [image(1), image(0), image(2)]})
    assert [(row.name, row.input_index, row.shape) for row in rows] == [
        ("image", 0, (3, 2, 3)),
        ("words", 1, (3, 5)),
    ]
    assert rows[0].size_bytes == 3 * 2 * 3 * 4


def test_an_input_goes_by_the_models_own_name_as_well():
    assert gather(SPEC, {"x0": [image()], "words": [words()]})[0].name == "image"


def test_arrays_that_are_not_contiguous_are_made_so():
    strided = np.ones((2, 3, 2), np.float32).transpose(0, 2, 1)
    rows = gather(SPEC, {"image": [strided], "words": [words()]})
    assert rows[0].arrays[0].flags.c_contiguous


@pytest.mark.parametrize(
    ("feeds", "text"),
    [
        ({"image": [image()]}, "model sums also takes words"),
        ({"image": [image()], "words": []}, "tensor words: no array"),
        ({"image": [image()], "word": [words()]}, "no input 'word'; it has image, words"),
        ({"image": [image(dtype="float64")], "words": [words()]}, "image: expected float32"),
        ({"image": [np.ones((2, 4), "f4")], "words": [words()]}, "image: expected shape .N, 2, 3."),
        ({"image": [np.float32(1)], "words": [words()]}, "image: expected shape"),
        ({"image": [image(), image(1, "int8")], "words": [words(3)]}, "image: expected float32"),
        ({"image": [image()], "words": [words(1, 5), words(1, 6)]}, "words: arrays of one request"),
        (
            {"image": [image(2)], "words": [words(3)]},
            "image and words: must have equally many samples, got 2 and 3",
        ),
        ({"image": [image()], "x0": [image()], "words": [words()]}, "image: given twice, also as"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(feeds, text):
    with pytest.raises(BadRequest, match=text):
        gather(SPEC, feeds)


def test_of_an_unknown_model_the_arrays_go_as_they_are():
    rows = gather(UNKNOWN, {"b": [image(2, "uint8")], "a": [words()]})
    assert [(row.name, row.dtype, row.shape) for row in rows] == [
        ("b", "uint8", (2, 2, 3)),
        ("a", "int64", (2, 5)),
    ]
    with pytest.raises(BadRequest, match="tensor a: expected shape"):
        gather(UNKNOWN, {"a": [words(1, 4), words(1, 5)]})
    assert find_outputs(UNKNOWN, ["price"]) == {"price": "price"}
    assert find_outputs(UNKNOWN, []) == {}


def test_of_shapes_that_are_not_whole_only_types_are_checked():
    wide = np.ones((2, 2, 3, 9), np.float32)
    rows = gather(SPEC, {"image": [wide], "words": [words()]}, is_exact=False)
    assert rows[0].shape == (2, 2, 3, 9)
    with pytest.raises(BadRequest, match="image: expected float32, got float64"):
        gather(SPEC, {"image": [wide.astype("f8")], "words": [words()]}, is_exact=False)


def test_outputs_are_found_by_either_name_and_returned_by_the_callers():
    wanted = find_outputs(SPEC, ["longest", "fc_0"])
    assert wanted == {"longest": "longest", "fc_0": "total"}
    assert list(find_outputs(SPEC, [])) == ["total", "longest"]
    with pytest.raises(BadRequest, match="no output 'nope'"):
        find_outputs(SPEC, ["nope"])
    answer = {"total": np.zeros(1), "longest": np.ones(1)}
    assert list(pick_outputs("t:1", wanted, answer)) == ["longest", "fc_0"]
    with pytest.raises(TeacherGone, match="t:1: its answer lacks longest"):
        pick_outputs("t:1", wanted, {"total": np.zeros(1)})


def test_what_is_returned_can_be_written_to():
    frozen = np.frombuffer(bytes(8), np.float32)
    assert pick_outputs("t:1", {}, {"y": frozen})["y"].flags.writeable
