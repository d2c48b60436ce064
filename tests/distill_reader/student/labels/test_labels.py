from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import BadRequest, UsageError
from distill_reader.model.output_encodings import parse_encoding
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.labels.labels import Labels
from distill_reader.student.options import TopK
from distill_reader.teacher.predictor.encodings import Encoder


def spec(classes: int = 20, *, takes_encodings: bool = True, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(
        name="m",
        inputs=(TensorSpec(name="image", dtype="float32", shape=(4,)),),
        outputs=(
            TensorSpec(name="score", dtype=dtype, shape=(classes,)),
            TensorSpec(name="count", dtype="int64", shape=(1,)),
        ),
        takes_encodings=takes_encodings,
    )


def taught(labels: Labels, outputs: dict[str, np.ndarray], of: ModelSpec) -> list[np.ndarray]:
    """What the user gets of these outputs, by way of a teacher's own encoder."""
    names, served = labels.asked("t:1", of)
    encoder = Encoder([outputs[o.name] for o in of.outputs], [o.name for o in of.outputs])
    columns = [encoder.encode(parse_encoding(of, name)) for name in names]
    return list(labels.restore(columns, served))


def shares(rows: int, classes: int, seed: int = 0, sharpness: float = 3.0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(rows, classes)) * sharpness
    exp = np.exp(logits - logits.max(1, keepdims=True))
    result: np.ndarray = (exp / exp.sum(1, keepdims=True)).astype(np.float32)
    return result


def test_without_options_the_outputs_are_asked_for_by_their_names():
    labels = Labels(("count", "score"), "", None)
    assert labels.asked("t:1", spec(takes_encodings=False))[0] == ("count", "score")
    assert len(labels.arrays) == 2


@given(
    seed=st.integers(0, 99),
    classes=st.integers(1, 40),
    k=st.integers(1, 50),
    half=st.booleans(),
    rest=st.sampled_from(["uniform", "renormalize"]),
)
def test_rows_of_the_top_are_probabilities_with_the_top_in_its_place(seed, classes, k, half, rest):
    probabilities = shares(6, classes, seed)
    labels = Labels(("score",), "float16" if half else "", TopK(k=k, rest=rest))
    (dense,) = taught(labels, {"score": probabilities, "count": np.zeros((6, 1))}, spec(classes))
    assert dense.shape == (6, classes)
    assert dense.dtype == np.float32
    np.testing.assert_allclose(dense.sum(1), 1, atol=2e-3)
    top = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(k, classes)]
    found, expected = (np.take_along_axis(a, top, 1) for a in (dense, probabilities))
    if rest == "renormalize" or k >= classes:
        expected = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=2e-3 if half else 1e-5)
    if k < classes:
        others = np.delete(dense[0], top[0])
        left = 0.0 if rest == "renormalize" else (1 - probabilities[0][top[0]].sum()) / len(others)
        np.testing.assert_allclose(others, left, atol=1e-3 if half else 1e-5)


@given(seed=st.integers(0, 99), k=st.integers(1, 25), half=st.booleans())
def test_logits_keep_the_mass_of_the_others(seed, k, half):
    logits = (np.random.default_rng(seed).normal(size=(5, 20)) * 4).astype(np.float32)
    labels = Labels(("score",), "float16" if half else "", TopK(k=k, of="logits"))
    (dense,) = taught(labels, {"score": logits, "count": np.zeros((5, 1))}, spec())
    before, after = (np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in (logits, dense))
    top = np.argsort(-logits, axis=1)[:, :k]
    np.testing.assert_allclose(
        np.take_along_axis(after, top, 1),
        np.take_along_axis(before, top, 1),
        atol=1e-2 if half else 1e-4,
    )


def test_logits_that_are_renormalized_give_the_others_nothing_at_any_temperature():
    logits = np.array([[3.0, 1.0, 2.0, 0.0]], np.float32)
    labels = Labels(("score",), "", TopK(k=2, of="logits", rest="renormalize"))
    (dense,) = taught(labels, {"score": logits, "count": np.zeros((1, 1))}, spec(4))
    for temperature in (1, 20):
        exp = np.exp((dense - dense.max()) / temperature)
        assert exp[0, 1] == exp[0, 3] == 0
    assert np.isfinite(dense).all()


def test_values_and_indices_are_handed_out_as_asked():
    labels = Labels(("score", "count"), "", TopK(k=3, dense=False, predicts=("score",)))
    probabilities = shares(4, 20)
    assert len(labels.arrays) == 3
    values, indices, count = taught(
        labels, {"score": probabilities, "count": np.full((4, 1), 7)}, spec()
    )
    assert indices.dtype == np.int64
    np.testing.assert_array_equal(np.take_along_axis(probabilities, indices, 1), values)
    assert count.tolist() == [[7]] * 4


def test_what_came_is_not_written_to():
    labels = Labels(("score",), "", TopK(k=2, rest="renormalize"))
    names, served = labels.asked("t:1", spec())
    columns: list[Any] = [np.array([[0.5, 0.25]], np.float32), np.array([[3, 1]], np.uint16)]
    before = [column.copy() for column in columns]
    labels.restore(columns, served)
    for column, kept in zip(columns, before, strict=True):
        np.testing.assert_array_equal(column, kept)
    assert len(names) == 2


def test_many_classes_have_indices_of_four_bytes():
    top = Labels(("score",), "", TopK(k=2))
    assert top.asked("t:1", spec(65_536))[0][1] == "score@top2:indices:uint16"
    assert top.asked("t:1", spec(65_537))[0][1] == "score@top2:indices"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([[[3.0, 2.0]], [[0, 1]]], "no probabilities .*of='logits'"),
        ([[[-0.1, 0.2]], [[0, 1]]], "no probabilities"),
        ([[[np.nan, 0.2]], [[0, 1]]], "^score: has NaN: .* its inputs"),
        ([[[0.0, 0.0]], [[0, 1]]], "no probabilities"),
        ([[[0.5, 0.2]], [[0, 20]]], "a class beyond the 20"),
    ],
)
def test_what_cannot_be_the_top_of_probabilities_is_refused(columns, words: str):
    labels = Labels(("score",), "", TopK(k=2))
    _, served = labels.asked("t:1", spec())
    arrays: list[Any] = [np.array(columns[0], np.float32), np.array(columns[1], np.uint16)]
    with pytest.raises(BadRequest, match=words):
        labels.restore(arrays, served)


@pytest.mark.parametrize(
    ("of", "labels", "words"),
    [
        (
            spec(takes_encodings=False),
            Labels(("score",), "float16", None),
            "float16 of score: only",
        ),
        (spec(takes_encodings=False), Labels(("score",), "", TopK(k=1)), "the top of score: only"),
        (ModelSpec(name="s", inputs=(), outputs=()), Labels(("a",), "", TopK(k=1)), "upgrade it"),
        (spec(), Labels(("count",), "", TopK(k=1)), "count is int64.*name those by predicts="),
        (spec(-1), Labels(("score",), "", TopK(k=1)), r"how many classes.*classes=\.\.\."),
        (spec(20), Labels(("score",), "", TopK(k=1, classes=30)), "has 20 classes, .* says 30"),
        (spec(), Labels(("label",), "", None), "t:1: predicts: .*has no output 'label'"),
    ],
)
def test_a_teacher_that_cannot_answer_so_is_refused_with_the_remedy(of, labels, words: str):
    with pytest.raises(BadRequest, match=words):
        labels.asked("t:1", of)


def test_half_precision_is_asked_of_floats_alone():
    labels = Labels(("score", "count"), "float16", None)
    assert labels.asked("t:1", spec())[0] == ("score@float16", "count")
    assert labels.asked("t:1", spec(dtype="float16"))[0] == ("score", "count")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"k": 0}, "k: expected an integer of 1 to 65535, got 0"),
        ({"k": True}, "got True"),
        ({"k": 3, "of": "scores"}, "of: expected probabilities or logits, got 'scores'"),
        ({"k": 3, "rest": "zero"}, "rest: expected uniform or renormalize, got 'zero'"),
        ({"k": 3, "classes": 2}, "classes: expected an integer of k or more, got 2"),
        ({"k": 3, "of": "logits", "dense": False}, "take dense rows, or rest='renormalize'"),
    ],
)
def test_a_wrong_top_k_is_refused_by_name(wrong: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        TopK(**wrong)
