"""A reader with a cache: who is asked, what comes, and from where."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_reader import DistillReader
from distill_reader.errors import BadRequest, NoTeacher, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from tests.distill_reader.student.fake_teachers import SPEC, FakeTeacher, double
from tests.distill_reader.student.teacher_process import TeacherProcess
from tests.support import ROOT, wait_until

V1, V2 = replace(SPEC, digest="one"), replace(SPEC, digest="two")
Make = Callable[..., DistillReader]


def images(ids: Any) -> np.ndarray:
    return np.repeat(np.asarray(ids, np.float32), 6).reshape(-1, 2, 3)


def batches(*ids: list[int]) -> Iterator[Any]:
    for each in ids:
        yield images(each), np.array(each), "label"


def totals(reader: DistillReader) -> list[list[float]]:
    return [total[:, 0].tolist() for *_, total in reader()]


@pytest.fixture
def make(reach: Callable[..., None]) -> Make:
    def make_reader(
        *teachers: FakeTeacher, predicts: tuple[str, ...] = ("total",)
    ) -> DistillReader:
        reach(*teachers)
        reader = DistillReader(["image", "id", None], predicts)
        return reader.set_fixed_teacher([teacher.endpoint for teacher in teachers])

    return make_reader


@pytest.mark.parametrize(
    ("folder", "is_own"),
    [
        ("labels", True),
        ("{pod}/labels", True),
        ("../labels", False),
        ("{all}/labels", False),
        ("shared", False),  # a link
    ],
)
def test_a_cache_that_no_other_pod_would_find_is_told(
    make: Make, tmp_path: Path, monkeypatch, caplog, folder: str, is_own: bool
):
    (tmp_path / "disk" / "pod_0_0").mkdir(parents=True)
    (tmp_path / "all").mkdir()
    (tmp_path / "pods").symlink_to(tmp_path / "disk")  # as --pod_path may be
    pod = tmp_path / "pods" / "pod_0_0"
    (pod / "shared").symlink_to(tmp_path / "all")
    monkeypatch.setenv("EDL_POD_FOLDER", str(pod))
    monkeypatch.chdir(pod)
    reader = make(FakeTeacher("a:1", V1)).set_cache(folder.format(pod=pod, all=tmp_path / "all"))
    reader.set_batch_generator(lambda: batches([1, 2, 3]))
    for _ in range(2):
        list(reader())
    told = [each for each in caplog.messages if "of this pod alone" in each]
    assert len(told) == is_own


def test_a_second_epoch_asks_no_teacher(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path)
    reader.set_batch_generator(lambda: batches([1, 2, 3], [4, 5]))
    first = list(reader())
    assert teacher.samples == 5
    second = list(reader())
    assert teacher.samples == 5
    for before, after in zip(first, second, strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
    assert totals(make(teacher).set_cache(tmp_path).set_batch_generator(batches([5, 1]))) == [
        [30.0, 6.0]
    ]  # another reader, in another order
    assert teacher.samples == 5


def test_only_what_is_not_known_is_asked_and_everything_stays_in_its_place(make, tmp_path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher, predicts=("total", "double")).set_cache(tmp_path)
    list(reader.set_batch_generator(batches([0, 3, 4, 7, 9]))())
    teacher.requests.clear()
    ids = list(range(12))
    ((given, _, _, total, double),) = reader.set_batch_generator(batches(ids))()
    assert total[:, 0].tolist() == [6 * each for each in ids]
    np.testing.assert_array_equal(double, 2 * given)
    assert teacher.samples == 7


def test_all_kinds_of_generators_have_it(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path)
    for ids in ([2, 4], [1, 2, 3, 4, 5]):
        samples = [(images([each])[0], each, "label") for each in ids]
        found = list(reader.set_sample_generator(samples)())
        assert [(each, total[0]) for _, each, _, total in found] == [(i, 6 * i) for i in ids]
    assert teacher.samples == 5
    lists = [[(images([each])[0], each, "x") for each in [*ids, 8]] for ids in ([5, 7], [], [1])]
    found = list(reader.set_sample_list_generator(lists)())
    assert [[total[0] for *_, total in each] for each in found] == [[30, 42, 48], [48], [6, 48]]
    # 7 once; 8 up to three times: it was asked before it was known
    assert 5 + 2 <= teacher.samples <= 5 + 4


def labelled(teacher: FakeTeacher, folder: Path, *labels: Any) -> list[list[list[float]]]:
    """Read an epoch for each array of labels, which have a name."""
    reader = DistillReader(["image", "id", "label"], ["total"]).set_cache(folder)
    reader.set_fixed_teacher(teacher.endpoint)
    return [
        totals(reader.set_batch_generator([(images([1, 2]), np.array([1, 2]), each)]))
        for each in labels
    ]


def test_a_field_that_no_teacher_takes_may_change(reach: Callable[..., None], tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reach(teacher)
    some = (np.arange(2), np.ones(2), np.zeros((2, 5)), np.array(["a", "ab"]))
    for first in range(len(some)):
        folder = tmp_path / str(first)
        assert labelled(teacher, folder, *some[first:], *some) == [[[6.0, 12.0]]] * (8 - first)
        assert teacher.samples == 2
        teacher.requests.clear()


def test_a_cache_that_knows_such_a_field_as_an_input_goes_on_to(reach, tmp_path: Path):
    both = (*SPEC.inputs, TensorSpec(name="label", dtype="int64", shape=()))
    older = FakeTeacher("a:1", replace(V1, inputs=both), lambda fed: double({"": fed["image"]}))
    teacher = FakeTeacher("b:1", V1)
    reach(older, teacher)
    assert labelled(older, tmp_path, np.arange(2)) == [[[6.0, 12.0]]]
    assert labelled(teacher, tmp_path, np.arange(2)) == [[[6.0, 12.0]]]
    assert not teacher.samples
    with pytest.raises(UsageError, match="were made of other inputs"):
        labelled(teacher, tmp_path, np.ones(2, np.int64))


def test_texts_are_ids_as_well(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    names = ["n01440764/1.jpg", "n01440764/2.jpg"]
    reader = make(teacher).set_cache(tmp_path)
    reader.set_batch_generator([(images([1, 2]), names, 0)])
    assert totals(reader) == totals(reader) == [[6.0, 12.0]]
    assert teacher.samples == 2


def test_with_everything_known_no_teacher_need_be_there(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path)
    reader.set_batch_generator(lambda: batches([1, 2], [3]))
    expected = totals(reader)
    teacher.kill()
    reader.set_no_teacher_timeout(0.2)

    def slowly() -> Iterator[Any]:
        for batch in batches([1, 2], [3]):
            threading.Event().wait(0.5)  # longer than the reader waits for a teacher
            yield batch

    assert totals(reader.set_batch_generator(slowly)) == expected
    with pytest.raises(NoTeacher):
        totals(reader.set_batch_generator(batches([1, 2], [4])))
    reader.set_no_teacher_timeout(0.2, "skip")
    found = [total for *_, total in reader.set_batch_generator(batches([1, 2], [4], [3]))()]
    assert found[0][:, 0].tolist() == [6.0, 12.0]
    assert found[1] is None
    assert found[2][:, 0].tolist() == [18.0]


def test_a_new_process_needs_no_teacher_where_the_version_is_given(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", SPEC)  # which does not tell its own
    reader = make(teacher).set_cache(tmp_path, teacher_version="resnet v1")
    expected = totals(reader.set_batch_generator(batches([1, 2])))
    teacher.kill()
    again = make(teacher).set_cache(tmp_path, teacher_version="resnet v1")
    assert totals(again.set_batch_generator(batches([2, 1]))) == [expected[0][::-1]]
    other = make(teacher).set_cache(tmp_path, teacher_version="resnet v2")
    with pytest.raises(NoTeacher):
        totals(other.set_no_teacher_timeout(0.2).set_batch_generator(batches([2])))


def test_where_nobody_tells_the_version_skip_goes_on_and_raise_raises(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    teacher.kill()
    reader = make(teacher).set_cache(tmp_path).set_batch_generator(lambda: batches([1], [2]))
    with pytest.raises(NoTeacher):
        totals(reader.set_no_teacher_timeout(0.2))
    reader.set_no_teacher_timeout(0.2, "skip")
    assert [total for *_, total in reader()] == [None, None]


def test_labels_of_two_versions_are_not_mixed(make: Make, tmp_path: Path):
    old, new = FakeTeacher("a:1", V1), FakeTeacher("b:1", V2)
    reader = make(old, new).set_cache(tmp_path)
    old.delay_s = 0.01
    reader.set_batch_generator(lambda: batches(*([i] for i in range(200))))
    assert totals(reader) == [[6.0 * i] for i in range(200)]
    assert (old.samples > 0) + (new.samples > 0) == 1  # whoever was first
    old.kill()
    only_old = make(old).set_cache(tmp_path).set_batch_generator(batches([1]))
    old.come_back()
    assert totals(only_old) == [[6.0]]
    alone = make(FakeTeacher("a:1", V2))  # the same reader meets the new version at a later epoch
    only_old.set_batch_generator(batches([1000]))
    with pytest.raises(BadRequest, match=r"serves version two .* labels of one.* set_cache again"):
        totals(only_old)
    only_old.set_cache(tmp_path)
    assert totals(only_old.set_batch_generator(batches([1000]))) == [[6000.0]]
    del alone


def test_a_teacher_without_a_version_is_refused_with_the_remedy(make: Make, tmp_path: Path):
    reader = make(FakeTeacher("a:1", SPEC)).set_cache(tmp_path).set_batch_generator(batches([1]))
    with pytest.raises(BadRequest, match=r"set_cache\(teacher_version=\.\.\.\)"):
        totals(reader)


def test_labels_are_kept_as_the_teacher_said_them_whatever_the_consumer_does(make, tmp_path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path)
    reader.set_batch_generator(lambda: ((images([i, i]), np.array([2 * i, 2 * i + 1]), 0)
                                        for i in range(300)))  # fmt: skip
    for image, *_, total in reader():
        total /= 4  # in place, at once
        image += 1
    for number, (*_, total) in enumerate(reader()):
        assert total[:, 0].tolist() == [6.0 * number, 6.0 * number]
    assert teacher.samples == 600


def test_labels_of_samples_that_were_let_go_are_not_kept(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path).set_no_teacher_timeout(0.3, "skip")
    is_stopped, is_answered = threading.Event(), threading.Event()

    def generate() -> Iterator[Any]:
        yield from batches([1, 2])
        is_stopped.wait(10)
        yield from batches([3, 4])
        is_answered.wait(10)
        yield from batches([5])

    iterator = iter(reader.set_batch_generator(generate)())
    next(iterator)
    teacher.stop()
    is_stopped.set()
    image, _, _, total = next(iterator)
    assert total is None
    image -= 1000  # while it is still being sent
    teacher.go_on()
    wait_until(lambda: not teacher.in_flight, what="the late answer is there")
    is_answered.set()
    assert next(iterator)[3][:, 0].tolist() == [30.0]
    iterator.close()
    assert totals(reader.set_batch_generator(batches([1, 2], [3, 4], [5]))) == [
        [6.0, 12.0], [18.0, 24.0], [30.0],
    ]  # fmt: skip


@pytest.mark.parametrize("version", [None, "v1"])
def test_a_disk_that_is_full_when_it_begins_ends_no_training(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, version: str | None
):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache"))

    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path / "cache", teacher_version=version)
    reader.set_batch_generator(lambda: batches([1, 2], [3]))
    monkeypatch.setattr(Path, "mkdir", full)
    for epoch in (1, 2):
        assert totals(reader) == [[6.0, 12.0], [18.0]]
        assert teacher.samples == 3 * epoch
    assert caplog.text.count(f"cache {tmp_path}/cache: No space left on device; the train") == 1


def test_what_is_not_a_number_is_not_kept(make: Make, tmp_path: Path):
    def compute(inputs: Any) -> Any:
        total = double(inputs)["total"].copy()
        total[1:2] = np.nan  # of a request for several samples
        return {"total": total}

    teacher = FakeTeacher("a:1", V1, compute)
    reader = make(teacher).set_cache(tmp_path).set_batch_generator(lambda: batches([1, 2, 3]))
    np.testing.assert_array_equal(totals(reader), [[6.0, np.nan, 18.0]])
    assert teacher.samples == 3
    for _ in range(2):
        assert totals(reader) == [[6.0, 12.0, 18.0]]
        assert teacher.samples == 4


def test_labels_of_other_data_are_not_found_where_it_has_a_name(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    for data, more, asked in (("train", 0, 2), ("validation", 9, 4), ("train", 0, 4), (None, 3, 6)):
        reader = make(teacher).set_cache(tmp_path, data=data)
        reader.set_batch_generator([(images([1, 2]) + more, np.array([1, 2]), 0)])
        assert totals(reader) == [[6.0 + 6 * more, 12.0 + 6 * more]]
        assert teacher.samples == asked


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (images([4, 5, 6]), "other inputs: that of sample 0 of this batch"),
        (images([1, 2, 3]).astype(np.float64), r"made of image \(float32 \[-1, 3\]\), and the"),
    ],
)
def test_labels_of_other_inputs_are_refused_with_the_remedy(make, tmp_path, other, words):
    ids = np.arange(3)
    reader = make(FakeTeacher("a:1", V1)).set_cache(tmp_path)
    list(reader.set_batch_generator([(images([1, 2, 3]), ids, 0)])())
    again = make(FakeTeacher("a:1", V1)).set_cache(tmp_path)
    with pytest.raises(UsageError, match=rf"{words}.* set_cache\(data=\.\.\.\).* remove"):
        totals(again.set_batch_generator([(other, ids, 0)]))


MASK = TensorSpec(name="mask", dtype="float32", shape=(2, 3))


def masked(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return {"total": (inputs["image"] * inputs.get("mask", 1)).sum(axis=(1, 2))[:, None]}


def test_fields_may_come_in_another_order(reach: Callable[..., None], tmp_path: Path):
    teacher = FakeTeacher("a:1", replace(V1, inputs=(*SPEC.inputs, MASK)), masked)
    reach(teacher)
    fields = {"image": images([1, 2]), "mask": images([3, 0]), "id": np.arange(2)}
    for order in (["image", "mask", "id"], ["mask", "id", "image"]):
        reader = DistillReader(order, ["total"]).set_fixed_teacher("a:1").set_cache(tmp_path)
        reader.set_batch_generator([tuple(fields[name] for name in order)])
        assert totals(reader) == [[18.0, 0.0]]
    assert teacher.samples == 2
    reader.set_batch_generator([(images([1, 2]), np.arange(2), images([3, 0]))])
    with pytest.raises(UsageError, match="has changed"):
        totals(reader)


def test_labels_that_were_made_without_an_input_are_refused(reach, tmp_path: Path):
    """As where a text names the version, and a later teacher of it takes one more."""
    reach(
        FakeTeacher("a:1", SPEC, masked),
        FakeTeacher("b:1", replace(SPEC, inputs=(*SPEC.inputs, MASK)), masked),
    )
    batch = images([1, 2]), np.arange(2), images([0, 0])

    def again() -> Iterator[Any]:  # until the teacher is known, which the cache does not wait for
        for _ in range(3000):
            yield batch
            time.sleep(0.01)

    for endpoint, read in (("a:1", [batch]), ("b:1", again)):
        reader = DistillReader(["image", "id", "mask"], ["total"]).set_fixed_teacher(endpoint)
        reader.set_cache(tmp_path, teacher_version="mine").set_batch_generator(read)
        if endpoint == "a:1":
            assert totals(reader) == [[6.0, 12.0]]
            continue
        with pytest.raises(UsageError, match=r"made of image \(.*\), and .* are image .*, mask"):
            totals(reader)


def test_a_text_may_be_as_long_as_the_longest_of_its_batch(make: Make, tmp_path: Path):
    """Lengths follow from who else is in the batch, labels do not; equal lengths are compared."""
    ids = np.arange(3)
    reader = make(FakeTeacher("a:1", V1)).set_cache(tmp_path)
    expected = totals(reader.set_batch_generator([(images([1, 2, 3]), ids, 0)]))
    longer = np.concatenate([images([1, 2, 3]), np.zeros((3, 5, 3), np.float32)], axis=1)
    assert totals(reader.set_batch_generator([(longer, ids, 0)])) == expected
    with pytest.raises(UsageError, match="has changed"):
        totals(reader.set_batch_generator([(images([4, 5, 6]), ids, 0)]))
    with pytest.raises(UsageError, match=r"the reader's are image \(float32 \[-1, 9\]\)"):
        totals(reader.set_batch_generator([(np.zeros((3, 2, 9), np.float32), ids, 0)]))


@pytest.mark.parametrize("is_padded", [False, True])
def test_labels_that_are_as_long_as_their_text_are_found_for_that_length_alone(
    make: Make, tmp_path: Path, is_padded: bool
):
    words = ModelSpec(
        name="words",
        inputs=(TensorSpec(name="image", dtype="float32", shape=(-1,)),),
        outputs=(TensorSpec(name="total", dtype="float32", shape=(-1,)),),
        digest="one",
    )
    teacher = FakeTeacher("a:1", words, lambda inputs: {"total": inputs["image"] * 2})
    reader = make(teacher).set_cache(tmp_path)
    if is_padded:
        reader.set_padding("image", multiple_of=2, outputs=["total"])

    def texts(*lengths: int) -> Iterator[Any]:
        for length in lengths:
            yield np.full((3, length), 5, np.float32), np.array([1, 2, length]), 0

    for _ in range(2):
        for image, _, _, total in reader.set_batch_generator(texts(6, 3, 6, 9))():
            np.testing.assert_array_equal(total, 2 * image)
    assert teacher.samples < 2 * 4 * 3  # of the first length


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param((), id="unknown"),
        pytest.param((TensorSpec(name="total", dtype="float32", shape=(2,)),), id="of a prototxt"),
    ],
)
def test_labels_per_position_of_a_teacher_that_does_not_say_so_have_the_length_of_their_text(
    make: Make, tmp_path: Path, outputs: tuple[TensorSpec, ...]
):
    words = TensorSpec(name="image", dtype="float32", shape=(-1,))
    spec = ModelSpec(name="serving", version="", inputs=(words,), outputs=outputs)
    teacher = FakeTeacher(
        "a:1", spec, lambda inputs: {"total": np.stack([inputs["image"]] * 2, axis=-1)}
    )
    reader = make(teacher).set_cache(tmp_path, teacher_version="v1")
    for length, asked in ((4, 3), (8, 6), (4, 6)):
        batch = np.ones((3, length), np.float32), np.arange(3), 0
        ((*_, total),) = reader.set_batch_generator([batch])()
        assert total.shape == (3, length, 2)
        assert teacher.samples == asked


@pytest.mark.parametrize("tells_first", [True, False])
@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param((), id="unknown"),
        pytest.param((replace(SPEC.outputs[1], shape=()),), id="of a prototxt"),
    ],
)
def test_labels_are_kept_whether_or_not_their_teacher_tells_its_outputs(
    make: Make, tmp_path: Path, outputs: tuple[TensorSpec, ...], *, tells_first: bool
):
    ids = [1, 2, 3], [4, 5, 6]
    specs = [SPEC, replace(SPEC, outputs=outputs)]
    for spec, each in zip(specs if tells_first else specs[::-1], ids, strict=True):
        reader = make(FakeTeacher("a:1", spec)).set_cache(tmp_path, teacher_version="v1")
        list(reader.set_batch_generator(batches(each))())
    teacher = FakeTeacher("a:1")
    reader = make(teacher).set_cache(tmp_path, teacher_version="v1")
    found = totals(reader.set_batch_generator(batches(*ids)))
    assert found == [[6 * number for number in each] for each in ids]
    assert teacher.samples == 0


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([np.full((3, 4 + i % 2, 4), i, np.float32) for i in range(4)], id="size"),
        pytest.param([np.full((3, 4, 4), i, f"f{4 + 4 * (i % 2)}") for i in range(4)], id="type"),
    ],
)
def test_samples_of_another_size_or_type_than_the_first_are_asked_for_again(
    make: Make, tmp_path: Path, samples: list[np.ndarray], caplog: pytest.LogCaptureFixture
):
    pixels = TensorSpec(name="image", dtype="float32", shape=(3, -1, -1))
    spec = replace(V1, inputs=(pixels,), outputs=(replace(SPEC.outputs[1], shape=(1,)),))
    teacher = FakeTeacher(
        "a:1", spec, lambda inputs: {"total": inputs["image"].mean((1, 2, 3))[:, None]}
    )
    reader = make(teacher).set_cache(tmp_path)
    reader.set_sample_list_generator([[(each, i, 0) for i, each in enumerate(samples)]])
    for asked in (4, 6, 8):
        (found,) = reader()
        assert [total[0] for *_, total in found] == [0, 1, 2, 3]
        assert teacher.samples == asked
    assert caplog.text.count("samples of another size or type than the first are not kept") == 1


def test_inputs_are_compared_in_all_kinds_of_generators_and_requests(make: Make, tmp_path: Path):
    """One row in 64 has a checksum: of 600, in any order and split, about nine."""
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path).set_teacher_batch_size(5)
    everything = images(range(600))
    reader.set_batch_generator(
        (everything[i : i + 17], np.arange(i, min(600, i + 17)), 0) for i in range(0, 600, 17)
    )
    list(reader())
    order = np.random.default_rng(0).permutation(600).tolist()
    samples = [(everything[i], i, 0) for i in order]
    assert len(list(reader.set_sample_generator(samples)())) == 600
    lists = [samples[i : i + 7] for i in range(0, 600, 7)]
    assert sum(map(len, reader.set_sample_list_generator(lists)())) == 600
    asked = teacher.samples
    assert asked == 600
    changed = [[(image + 1, i, 0) for image, i, _ in some] for some in lists]
    with pytest.raises(UsageError, match="has changed"):
        list(reader.set_sample_list_generator(changed)())


def test_a_cache_of_the_release_before_is_read(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path)
    expected = totals(reader.set_batch_generator(batches([1, 2, 3])))
    (folder,) = tmp_path.glob("labels-*")
    document, _ = json.loads((folder / "header.json").read_text())
    del document["inputs"]
    check = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    (folder / "header.json").write_text(json.dumps([document, check]))
    (folder / "inputs").unlink()
    older = make(teacher).set_cache(tmp_path).set_batch_generator(batches([3, 1, 2]))
    assert totals(older) == [[expected[0][place] for place in (2, 0, 1)]]
    assert teacher.samples == 3


def test_what_is_augmented_is_kept_by_its_variant(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    make(teacher)
    reader = DistillReader(["image", "id", "seed"], ["total"]).set_fixed_teacher("a:1")
    reader.set_cache(tmp_path, variant="seed")
    for seed, asked in ((0, 2), (1, 4), (0, 4), (1, 4)):
        reader.set_batch_generator([(images([1, 2]) + seed, np.array([1, 2]), seed)])
        assert totals(reader) == [[6.0 + 6 * seed, 12.0 + 6 * seed]]
        assert teacher.samples == asked


def test_other_options_have_labels_of_their_own(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", replace(V1, takes_encodings=True))
    for predicts in (("total",), ("double",), ("double", "total")):
        reader = make(teacher, predicts=predicts).set_cache(tmp_path)
        list(reader.set_batch_generator(batches([1]))())
    assert teacher.samples == 3
    assert len(list(tmp_path.glob("labels-*"))) == 3


def test_options_that_change_between_epochs_count_for_what_was_kept_before(make, tmp_path: Path):
    tops: dict[str, Any] = {
        "p@top2:values": np.array([[0.5, 0.25]], np.float32),
        "p@top2:indices:uint16": np.array([[3, 0]], np.uint16),
    }
    spec = ModelSpec(
        name="p",
        digest="one",
        takes_encodings=True,
        inputs=V1.inputs,
        outputs=(TensorSpec(name="p", dtype="float32", shape=(5,)),),
    )
    teacher = FakeTeacher("a:1", spec, lambda _: tops)
    reader = make(teacher, predicts=("p",)).set_cache(tmp_path)
    reader.set_batch_generator(lambda: batches([1]))

    def found(**options: Any) -> list[list[float]]:
        ((*_, label, last),) = reader.set_top_k(2, **options)()
        return [each.ravel().tolist() for each in (label, last) if type(each) is not str]

    even = np.float32(0.25) / 3
    assert found() == [pytest.approx([0.25, even, even, 0.5, even])]
    assert found(rest="renormalize") == [pytest.approx([1 / 3, 0, 0, 2 / 3, 0])]
    assert found(dense=False) == [[0.5, 0.25], [3, 0]]
    assert teacher.samples == 1


def test_a_full_cache_goes_on_by_asking(make: Make, tmp_path: Path):
    teacher = FakeTeacher("a:1", V1)
    reader = make(teacher).set_cache(tmp_path, max_mebibytes=1)
    ids = list(range(60_000))  # 28 bytes each
    reader.set_batch_generator(lambda: batches(ids))
    assert totals(reader) == totals(reader) == [[6.0 * each for each in ids]]
    kept = (1 << 20) // 28
    assert teacher.samples == 60_000 + 60_000 - kept
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < (1 << 20) + (16 << 10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.set_cache("x", id="number"), "id: 'number' is none of the names in `ins`"),
        (lambda r: r.set_cache("x", variant="seed"), "variant: 'seed' is none of the names"),
        (lambda r: r.set_cache("x", variant="id"), "two names, got 'id' twice"),
        (lambda r: r.set_cache("x", max_mebibytes=0), "cache: max_mebibytes: .*1 or more, got 0"),
        (lambda r: r.set_cache("x", teacher_version=""), "expected a text or None, got an empty"),
        (lambda r: r.set_cache("x", data=""), "data: expected a text such as 'imagenet-train@224'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(make: Make, call: Any, words: str):
    with pytest.raises(UsageError, match=words):
        call(make(FakeTeacher("a:1", V1)))


def test_ids_that_are_none_and_folders_that_cannot_be_are_refused(make: Make, tmp_path: Path):
    reader = make(FakeTeacher("a:1", V1)).set_cache(tmp_path)
    reader.set_batch_generator([(images([1, 2]), np.arange(3), 0)])
    with pytest.raises(UsageError, match="cache: id: expected one per sample, 2"):
        totals(reader)
    (tmp_path / "file").write_text("")
    reader = make(FakeTeacher("a:1", V1)).set_cache(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cache: .*local disk"):
        totals(reader.set_batch_generator(batches([1])))


TRAINER = """
import sys
import numpy as np
from distill_reader import DistillReader
endpoint, cache, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def batches():
    for start in range(first, first + count, 16):
        ids = np.arange(start, start + 16)
        yield np.repeat(ids, 4).reshape(16, 4).astype(np.float32), ids
reader = DistillReader(["image", "id"], ["sum"]).set_fixed_teacher(endpoint)
reader.set_cache(cache, teacher_version="sums").set_batch_generator(batches)
for number, (image, ids, total) in enumerate(reader()):
    assert (total[:, 0] == 4 * ids).all(), "another sample's label"
    print(number, flush=True)
"""


@pytest.fixture
def sums(tmp_path: Path) -> Iterator[TeacherProcess]:
    teacher = TeacherProcess(tmp_path / "teacher", shape=(4,))
    teacher.start()
    teacher.wait()
    yield teacher
    teacher.kill()


def test_trainers_share_a_cache_and_one_that_is_killed_spoils_nothing(
    sums: TeacherProcess, tmp_path: Path
):
    def start(first: int, count: int) -> subprocess.Popen[str]:
        numbers = [str(first), str(count)]
        return subprocess.Popen(
            [sys.executable, "-c", TRAINER, sums.endpoint, str(tmp_path / "cache"), *numbers],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    killed, other = start(0, 1 << 20), start(0, 8000)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("300"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    out, _ = other.communicate(timeout=120)
    assert (other.returncode, out.splitlines()[-1]) == (0, "499")
    sums.kill()
    alone = start(0, 8000)  # without a teacher: all of it is there, and right
    out, _ = alone.communicate(timeout=120)
    assert (alone.returncode, out.splitlines()[-1]) == (0, "499")


def test_a_second_elastic_training_asks_no_teacher(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paddle = pytest.importorskip("paddle")
    from pod_runtime import elastic

    for name in ("EDL_CHANNEL", "EDL_STAGE", "EDL_RUN_DIR", "EDL_MAX_TRAINERS"):
        monkeypatch.delenv(name, raising=False)
    teacher = FakeTeacher("a:1", V1)
    make(teacher)
    distill = DistillReader([None, None, None, "id", "image"], ["total"])
    distill.set_fixed_teacher("a:1").set_cache(tmp_path)
    data = [np.full((2, 3), sample, "float32") for sample in range(20)]

    def read(where: elastic.ReadFrom) -> Iterator[Any]:
        items: Iterator[Any] = distill.set_batch_generator(loop.shards(data, with_ids=True))()
        return items

    asked = []
    for _ in range(2):  # trainings
        model = paddle.nn.Linear(1, 1)
        optimizer = paddle.optimizer.SGD(1e-6, parameters=model.parameters())
        loop = elastic.Loop(model, optimizer, data, batch_size=6, epochs=3, shards=2, reader=read)
        seen: list[int] = []
        for epoch in loop.epochs():
            for step in epoch:
                for ids, _, total in step:
                    numbers = ids.numpy().tolist()
                    assert total.numpy()[:, 0].tolist() == [6.0 * one for one in numbers]
                    step.backward(model(total).mean())
                    seen += numbers
                step.update()
        assert sorted(seen) == sorted([*range(20)] * 3)
        asked.append(teacher.samples)
    # The first one may read ahead into its next epoch before the first answers are there.
    assert 20 <= asked[0] <= 60
    assert asked[1] == asked[0]
