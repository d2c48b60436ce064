from collections import UserDict
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import BadRequest, UsageError
from distill_reader.student.batches.items import (
    BatchFormat,
    ItemFormat,
    ReaderItem,
    SampleFormat,
    SampleListFormat,
)

SENT = ((1, "image"),)
BATCH, SAMPLE, SAMPLES = (
    kind(SENT, 2, 1) for kind in (BatchFormat, SampleFormat, SampleListFormat)
)
IMAGE = np.arange(6.0).reshape(2, 3)


class Tensor:
    """Like a framework's: on some device, an array when asked."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array

    @property
    def dtype(self) -> object:
        return self.array.dtype


def rows(item: ReaderItem) -> list[np.ndarray]:
    (piece,) = item.pieces
    (arrays,) = piece.rows
    return list(arrays)


def answered(kind: ItemFormat, item: ReaderItem, output: np.ndarray) -> Any:
    for piece in item.pieces:
        item.answers.append((piece.first, piece.samples, (output,), piece.first))
    return kind.result(item)


def test_a_batchs_array_is_sent_as_it_is():
    item = BATCH.item((7, IMAGE))
    assert rows(item)[0] is IMAGE
    assert item.samples == 2


def test_nothing_of_a_sample_is_copied():
    item = SAMPLE.item((7, IMAGE))
    (row,) = rows(item)
    assert row.shape == (1, 2, 3)
    assert np.shares_memory(row, IMAGE)


def test_each_kind_gets_its_predictions_in_its_own_form():
    output = np.array([[0.5], [0.25]])
    label, image, soft = answered(BATCH, BATCH.item((7, IMAGE)), output)
    assert (label, image is IMAGE, soft is output) == (7, True, True)

    label, image, soft = answered(SAMPLE, SAMPLE.item((7, IMAGE)), output)
    assert (label, image is IMAGE, soft.tolist()) == (7, True, [0.5])

    first, second = answered(SAMPLES, SAMPLES.item([(7, IMAGE), (8, IMAGE)]), output)
    assert (first[0], second[0]) == (7, 8)
    assert (first[2].tolist(), second[2].tolist()) == ([0.5], [0.25])


def test_parts_of_a_batch_whose_predictions_differ_in_shape_are_refused_by_name():
    kind = BatchFormat(SENT, 2, 1, outputs=["score"])
    item = kind.item((7, IMAGE))
    item.answers = [(0, 1, (np.zeros((1, 3)),), 0), (1, 1, (np.zeros((1, 5)),), 0)]
    with pytest.raises(BadRequest, match=r"output score: .*\[3\] and \[5\].*set_sample_list_gen"):
        kind.result(item)


def test_fields_without_a_name_pass_untouched_whatever_they_are():
    anything = object()
    result = answered(BATCH, BATCH.item((anything, IMAGE, {"also": 1})), np.zeros(2))
    assert result[0] is anything
    assert result[2] == {"also": 1}


def test_a_frameworks_tensor_is_sent_as_an_array_and_yielded_as_it_came():
    tensor = Tensor(IMAGE)
    item = BATCH.item((7, tensor))
    assert rows(item)[0] is IMAGE
    assert item.fields[1] is tensor


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (BatchFormat, lambda buffer: (7, buffer)),
        (BatchFormat, lambda buffer: (7, buffer[:])),
        (BatchFormat, lambda buffer: (7, Tensor(buffer))),
        (SampleFormat, lambda buffer: (7, buffer)),
        (SampleListFormat, lambda buffer: [(7, buffer)]),
    ],
)
def test_a_generator_that_writes_into_what_it_has_yielded_is_refused_by_name(kind, given):
    kind, buffer = kind(SENT, 2, 1), np.zeros((2, 3))
    held = [kind.item(given(buffer)) for _ in range(4)]  # with the same values it may come again
    buffer += 1
    with pytest.raises(UsageError, match="field image: the generator writes into memory that it"):
        held.append(kind.item(given(buffer)))


def test_memory_may_be_written_to_once_nobody_has_what_was_yielded_of_it():
    kind, buffer = BatchFormat(SENT, 2, 1), np.zeros((2, 3))
    for number in range(4):
        buffer[:] = number
        kind.item((7, buffer[:])).pieces.clear()  # as they are once they are answered


def test_different_views_that_begin_at_the_same_place_are_no_memory_that_is_written_to():
    kind, image, series = BatchFormat(SENT, 2, 1), np.arange(9.0).reshape(3, 3), np.arange(40.0)
    held = [kind.item((7, each)) for each in (image, image, image.T, image.T, image)]
    held += [kind.item((7, series[: 8 * step : step])) for step in (1, 2, 3) for _ in range(2)]
    assert len(held) == 11


def test_lists_and_numbers_become_arrays():
    item = BATCH.item((7, [[1.0], [2.0]]))
    assert isinstance(item.fields[1], np.ndarray)
    assert rows(item)[0].tolist() == [[1.0], [2.0]]
    item = SAMPLE.item((7, 3))
    assert rows(item)[0].tolist() == [3]


def test_a_batch_may_come_as_a_list_and_is_yielded_as_a_tuple():
    assert isinstance(BATCH.item([7, IMAGE]).fields, tuple)


def test_an_empty_list_of_samples_has_nothing_to_ask():
    item = SAMPLES.item([])
    assert (item.missing, item.pieces, SAMPLES.result(item)) == (0, [], [])


def test_without_a_teacher_predictions_are_none():
    assert BATCH.without_predictions(BATCH.item((7, IMAGE)))[2] is None
    assert SAMPLE.without_predictions(SAMPLE.item((7, IMAGE)))[2] is None
    (sample,) = SAMPLES.without_predictions(SAMPLES.item([(7, IMAGE)]))
    assert sample[2] is None


def objects(*values: Any) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def test_arrays_that_are_not_sent_count_as_memory():
    least = BATCH.item((0, IMAGE)).charge_bytes
    large = np.zeros(1_000_000)  # 8 MB
    for field, megabytes in (
        (large, 8),
        ([large] * 3, 24),
        ({"mask": large, "boxes": [[], large[:500_000]]}, 12),
        (UserDict(ids=large), 8),
        ([np.zeros(0), large], 8),
        (bytes(1_000_000), 1),
        ([1.5] * 1_000_000, 32),
        (objects(large, large), 16),
        ({"boxes": objects(large, [large[:500_000]]).reshape(2, 1)}, 12),
        (np.array("a" * 1_000_000, object), 1),
        (np.empty(0, object), 0),
    ):
        more = BATCH.item((field, IMAGE)).charge_bytes - least
        assert more == pytest.approx(megabytes * 1_000_000, rel=0.01, abs=1000)
    endless: list[Any] = []
    endless.append(endless)
    assert BATCH.item((endless, IMAGE)).charge_bytes < least + 1000


def test_an_array_of_objects_counts_as_them_under_a_name_that_no_teacher_takes_too():
    kind = BatchFormat(((0, "boxes"), (1, "image")), 2, 1)
    boxes = objects(*[np.zeros(1_000_000)] * 2)
    assert kind.item((boxes, IMAGE)).charge_bytes == pytest.approx(16_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (BATCH, (7,), "expected 2 fields as in `ins`, got 1"),
        (BATCH, IMAGE, "expected a tuple of fields, got ndarray"),
        (BATCH, (7, np.float32(3)), "field image: a batch's field has samples on axis 0"),
        (BATCH, (7, np.zeros((0, 3))), "a batch without samples"),
        (BATCH, (7, [[1, 2], [3]]), "field image: "),
        (SAMPLES, IMAGE, "expected a list of tuples, got ndarray"),
        (BATCH, (7, np.ma.masked_less(IMAGE, 3)), "field image: is a masked array"),
        (SAMPLE, (7, None), "field image: is NoneType, and teachers take numbers: .* None in its"),
        (SAMPLE, (7, [1, None]), "field image: has objects, and teachers take numbers"),
        (SAMPLES, [7], "expected a tuple of fields, got int"),
        (SAMPLE, [IMAGE], "expected 2 fields as in `ins`, got 1"),
    ],
)
def test_what_is_not_of_the_kind_is_refused(kind: ItemFormat, given: Any, words: str):
    with pytest.raises(UsageError, match=words):
        kind.item(given)


def test_sent_fields_of_a_batch_must_be_equally_long():
    kind = BatchFormat(((0, "a"), (1, "b")), 2, 1)
    with pytest.raises(UsageError, match=r"fields a and b: .* got 2 and 3"):
        kind.item((np.zeros(2), np.zeros(3)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int64"])
@pytest.mark.full  # imports Paddle
def test_a_tensor_of_paddle_is_sent_by_its_values(dtype: str):
    paddle = pytest.importorskip("paddle")
    given = paddle.to_tensor([[1.0, -2.0, 0.5]]).astype(dtype)
    (array,) = rows(BATCH.item((7, given)))
    assert array.astype("float64").tolist() == [[1.0, -2.0, 0.0 if dtype == "int64" else 0.5]]
    assert array.dtype == (dtype if dtype in ("float16", "int64") else "float32")


def test_a_tensor_of_torch_in_bfloat16_is_sent_by_its_values():
    class BFloat16(Tensor):
        dtype = "torch.bfloat16"

        def numpy(self) -> np.ndarray:
            raise TypeError("Got unsupported ScalarType BFloat16")

        def float(self) -> Tensor:
            return Tensor(self.array)

    (array,) = rows(BATCH.item((7, BFloat16(IMAGE.astype("float32")))))
    assert array.tolist() == IMAGE.tolist()
