from dataclasses import replace

import numpy as np
import pytest

from distill_reader.errors import BadRequest
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.batches.feed import Feed, RequestLimits
from distill_reader.student.batches.items import BatchFormat
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import Labels
from distill_reader.student.pool.request_mapping import RequestMapping

SPEC = ModelSpec(
    name="net",
    inputs=(TensorSpec(name="image", dtype="float32", shape=(1, 2, 2), variable="x0"),),
    outputs=(
        TensorSpec(name="score", dtype="float32", shape=(3,)),
        TensorSpec(name="feature", dtype="float32", shape=(5,)),
    ),
)
OPEN = ModelSpec(
    name="text",
    inputs=(TensorSpec(name="words", dtype="int64", shape=(-1,)),),
    outputs=(TensorSpec(name="score", dtype="float32", shape=(2,)),),
)


def mapping(spec: ModelSpec = SPEC, sent: tuple[str, ...] = ("image",)) -> RequestMapping:
    return RequestMapping("t:1", spec, sent, Labels(("score",), "", None))


def fed(mapping: RequestMapping, *arrays: Array) -> dict[str, list[Array]]:
    names = tuple((place, f"field{place}") for place in range(len(arrays)))
    feed = Feed(1 << 20)
    feed.add(BatchFormat(names, len(arrays), 1).item(arrays))
    request = feed.take(RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20), "t:1")
    assert request is not None
    return mapping.feeds(request)


def test_only_what_the_model_takes_is_sent():
    image, label = np.zeros((2, 1, 2, 2), np.float32), np.zeros(2, np.int64)
    feeds = fed(mapping(sent=("label", "image")), label, image)
    assert list(feeds) == ["image"]
    assert feeds["image"][0] is image


def test_the_models_own_variable_names_are_names_too():
    feeds = fed(mapping(sent=("x0",)), np.zeros((2, 1, 2, 2), np.float32))
    assert list(feeds) == ["image"]


@pytest.mark.parametrize("sent", [("y", "z"), ("z", "y"), ("label", "z", "y")])
def test_a_name_comes_before_the_variable_of_another_input(sent: tuple[str, ...]):
    inputs = tuple(
        TensorSpec(name=name, dtype="float32", shape=(1,), variable=variable)
        for name, variable in (("y", "x"), ("z", "y"))
    )
    values = {name: np.full((2, 1), number, np.float32) for number, name in enumerate(sent)}
    feeds = fed(mapping(replace(SPEC, inputs=inputs), sent), *values.values())
    assert {name: arrays[0] is values[name] for name, arrays in feeds.items()} == {
        "y": True,
        "z": True,
    }


def test_an_inputs_name_comes_before_its_variable():
    name, variable = np.ones((2, 1, 2, 2), np.float32), np.zeros((2, 1, 2, 2), np.float32)
    assert fed(mapping(sent=("x0", "image")), variable, name)["image"][0] is name


def test_a_teacher_that_cannot_say_what_it_takes_gets_every_field():
    unknown = ModelSpec(name="", inputs=(), outputs=())
    feeds = fed(mapping(unknown, ("a", "b")), np.zeros(2), np.zeros(2))
    assert list(feeds) == ["a", "b"]


def test_flat_samples_get_the_models_shape():
    (array,) = fed(mapping(), np.arange(8, dtype=np.float32).reshape(2, 4))["image"]
    assert array.shape == (2, 1, 2, 2)
    assert array.ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("shape", [(4, 5, 3), (5, 3, 4), (1, 4, 5, 3)])
def test_samples_whose_axes_are_in_another_order_are_refused_and_not_mixed_up(shape):
    chw = TensorSpec(name="image", dtype="float32", shape=(3, 4, 5))
    given = np.zeros((2, *shape), np.float32)
    with pytest.raises(BadRequest, match=r"t:1: field image .* takes \[3, 4, 5\]: .* transpose"):
        fed(mapping(replace(SPEC, inputs=(chw,))), given)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1), (1, 1, 4)])
def test_an_axis_of_length_1_may_be_anywhere(shape):
    (array,) = fed(mapping(), np.zeros((2, *shape), np.float32))["image"]
    assert array.shape == (2, 1, 2, 2)


@pytest.mark.parametrize(("is_exact", "shape"), [(False, (2, 1)), (True, (2,))])
def test_a_text_of_one_token_keeps_its_axis_where_a_prototxt_has_left_it_out(is_exact, shape):
    ids = TensorSpec(name="image", dtype="int64", shape=())
    spec = replace(SPEC, inputs=(ids,), is_exact=is_exact)
    (array,) = fed(mapping(spec), np.ones((2, 1), np.int32))["image"]
    assert array.shape == shape
    assert array.dtype == np.int64


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "int8", "bool"])
def test_types_that_fit_into_the_models_are_changed(dtype: str):
    (array,) = fed(mapping(), np.ones((2, 1, 2, 2), dtype))["image"]
    assert array.dtype == np.float32


def test_values_beyond_the_models_type_are_refused_by_name():
    half = ModelSpec(
        name="half",
        inputs=(TensorSpec(name="image", dtype="float16", shape=(2,)),),
        outputs=SPEC.outputs,
    )
    given = np.array([[65504.0, -np.inf]], np.float32)
    (array,) = fed(mapping(half), given)["image"]
    assert array.tolist() == given.tolist()
    with pytest.raises(BadRequest, match=r"field image: has values beyond float16 \(±65504\)"):
        fed(mapping(half), np.array([[1.0, 70000.0]], np.float32))


def test_16_bits_without_a_sign_may_be_those_of_bfloat16_and_are_refused_for_floats():
    with pytest.raises(BadRequest, match=r"t:1: field image is uint16, .* bits of bfloat16.* cast"):
        fed(mapping(), np.ones((2, 1, 2, 2), np.uint16))
    words = np.ones((2, 7), np.uint16)
    (sent,) = fed(mapping(OPEN, ("words",)), words)["words"]
    assert sent.dtype == np.int64


def test_types_that_do_not_fit_are_left_for_the_client_to_refuse():
    given = np.zeros((2, 1, 2, 2), np.int64)
    assert fed(mapping(), given)["image"][0] is given
    floats = np.zeros((2, 7))
    assert fed(mapping(OPEN, ("words",)), floats)["words"][0] is floats


@pytest.mark.parametrize(
    ("spec", "sent", "words"),
    [
        (SPEC, ("picture",), r"t:1: model net takes 'image'.*`ins` \(picture\)"),
        (OPEN, ("image",), "model text takes 'words'"),
    ],
)
def test_an_input_without_a_field_is_refused_by_name(
    spec: ModelSpec, sent: tuple[str, ...], words: str
):
    with pytest.raises(BadRequest, match=words):
        mapping(spec, sent)


def test_an_output_that_the_model_lacks_is_refused_by_name():
    with pytest.raises(BadRequest, match=r"t:1: predicts: .*'logits'; it has score, feature"):
        RequestMapping("t:1", SPEC, ("image",), Labels(("logits",), "", None))


def test_predictions_come_in_the_order_of_predicts_and_one_per_sample():
    both = RequestMapping("t:1", SPEC, ("image",), Labels(("feature", "score"), "", None))
    score, feature = np.zeros((2, 3)), np.zeros((2, 5))
    found = both.outputs({"score": score, "feature": feature}, 2)
    assert found[0] is feature
    assert found[1] is score
    with pytest.raises(BadRequest, match=r"t:1: tensor feature: expected 4 rows .*\[2, 5\]"):
        both.outputs({"score": np.zeros((4, 3)), "feature": feature}, 4)


def test_the_bfloat16_of_other_libraries_becomes_what_the_model_takes():
    numbers = pytest.importorskip("ml_dtypes")
    field = np.arange(8).reshape(2, 1, 2, 2).astype(numbers.bfloat16)
    [sent] = fed(mapping(), field)["image"]
    assert sent.dtype == np.float32
    assert sent.ravel().tolist() == [*range(8)]


@pytest.mark.parametrize("spec", [SPEC, ModelSpec(name="any", inputs=(), outputs=())])
@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "M8[s]", "V4", "i4,f4"])
def test_a_field_that_is_no_numbers_is_refused_by_name_where_a_teacher_takes_it(spec, dtype: str):
    field = np.zeros((2, 1, 2, 2), dtype)
    with pytest.raises(BadRequest, match=r"t:1: field image is .*: yield it as such, or have None"):
        fed(mapping(spec), field)
    image = np.zeros((2, 1, 2, 2), np.float32)
    assert list(fed(mapping(sent=("name", "image")), field, image)) == ["image"]
