"""What a student's framework gets: tensors by `set_tensors`, and a PyTorch student in the loop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset  # noqa: E402

from distill_reader.errors import UsageError  # noqa: E402
from distill_reader.model.specs import ModelSpec, TensorSpec  # noqa: E402
from distill_reader.student.batches.items import BatchFormat  # noqa: E402
from edl import DistillReader, elastic, soft_cross_entropy  # noqa: E402
from tests.distill_reader.student.fake_teachers import FakeTeacher  # noqa: E402
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher  # noqa: E402

SHAPE = (2, 3)  # of FakeTeacher's images


def reader(reach: Callable[..., None], framework: Any) -> DistillReader:
    teacher = FakeTeacher("a:1")
    reach(teacher)
    made = DistillReader(ins=["image", None, None], predicts=["total"])
    return made.set_fixed_teacher([teacher.endpoint]).set_tensors(framework)


def batches() -> Iterator[Any]:
    for number in range(3):
        yield np.full((4, *SHAPE), number, np.float32), np.arange(4), ["a", "b", "c", "d"]


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_arrays_come_as_tensors_of_the_framework_and_the_rest_as_it_is(reach, framework):
    kind = pytest.importorskip(framework).Tensor
    found = list(reader(reach, framework).set_batch_generator(batches)())
    for number, (images, labels, words, total) in enumerate(found):
        assert isinstance(images, kind)
        assert isinstance(total, kind)
        assert labels.tolist() == [0, 1, 2, 3]
        assert isinstance(labels, kind)
        assert words == ["a", "b", "c", "d"]
        np.testing.assert_array_equal(total.numpy(), np.full((4, 1), 6.0 * number))
        total[:] = 0  # it is the user's own
    assert len(found) == 3


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_tensors_that_are_not_sent_count_as_memory(framework):
    zeros = pytest.importorskip(framework).zeros
    make = BatchFormat(((1, "image"),), 2, 1).item
    image = np.zeros((4, *SHAPE), np.float32)
    nothing = make((b"", image)).charge_bytes
    for field in (zeros([4, 500]), [zeros([500])] * 4, {"boxes": zeros([4, 500])}):
        more = make((field, image)).charge_bytes - nothing
        assert more == pytest.approx(8000, rel=0.05)


def test_a_sparse_tensor_that_is_not_sent_passes_untouched(reach):
    graph = torch.eye(4).to_sparse()
    given = [(np.zeros((4, *SHAPE), np.float32), graph, [graph])]
    ((_, alone, listed, _),) = reader(reach, "torch").set_batch_generator(given)()
    assert alone is graph
    assert listed[0] is graph


def test_samples_and_lists_of_samples_come_as_tensors_too(reach):
    samples = [(np.ones(SHAPE, np.float32), np.int64(number), "word") for number in range(4)]
    plain = list(reader(reach, "torch").set_sample_generator(lambda: iter(samples))())
    (batch,) = reader(reach, "torch").set_sample_list_generator(lambda: iter([samples]))()
    for found in (plain, batch):
        assert isinstance(found, list)
        for number, (image, label, word, total) in enumerate(found):
            assert (image.shape, label.item(), word) == (SHAPE, number, "word")
            assert torch.equal(total, torch.tensor([6.0]))


class Boxes(NamedTuple):
    corners: Any
    name: str


def test_dicts_and_named_tuples_come_with_tensors_in_them(reach):
    image, numbers = np.ones((4, *SHAPE), np.float32), np.arange(4)
    given = image, {"boxes": [numbers], "word": "a"}, Boxes(numbers, "b")
    (item,) = reader(reach, "torch").set_batch_generator(lambda: iter([given]))()
    assert torch.equal(item[1]["boxes"][0], torch.arange(4))
    assert (item[1]["word"], item[2].name) == ("a", "b")
    assert isinstance(item[2], Boxes)
    assert torch.equal(item[2].corners, torch.arange(4))


def test_arrays_that_torch_cannot_share_are_copied_and_those_it_has_no_type_for_stay(reach):
    image = np.ones((4, *SHAPE), np.float32)
    image.flags.writeable = False  # torch would warn, and warnings are errors here
    others = np.arange(4)[::-1], np.array(["a", "b", "c", "d"])
    (item,) = reader(reach, "torch").set_batch_generator(lambda: iter([(image, *others)]))()
    assert torch.equal(item[0], torch.ones(4, *SHAPE))
    assert torch.equal(item[1], torch.tensor([3, 2, 1, 0]))
    assert item[2] is others[1]


def test_without_a_framework_arrays_stay_arrays(reach):
    given = reader(reach, "torch").set_tensors(None).set_batch_generator(batches)
    assert all(type(value) is np.ndarray for item in given() for value in (item[0], item[3]))


def test_a_framework_that_there_is_not_is_refused():
    made = DistillReader(["image"], ["total"])
    with pytest.raises(UsageError, match="tensors: expected 'torch', 'paddle' or None, got 'jax'"):
        made.set_tensors("jax")  # type: ignore[arg-type]


def test_a_framework_that_is_not_installed_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"'torch' is not installed here: .*edl\[torch\]"):
        DistillReader(["image"], ["total"]).set_tensors("torch")


# --- a student in the elastic loop

PIXELS, CLASSES, SAMPLES = 6, 3, 22
SPEC = ModelSpec(
    name="taught",
    inputs=(TensorSpec(name="image", dtype="float32", shape=(PIXELS,)),),
    outputs=(TensorSpec(name="probs", dtype="float32", shape=(CLASSES,)),),
)
WEIGHTS = np.random.default_rng(3).normal(size=(PIXELS, CLASSES)).astype(np.float32)


def taught(inputs: Mapping[str, Any]) -> dict[str, Any]:
    shares = np.exp(inputs["image"] @ WEIGHTS)
    return {"probs": shares / shares.sum(axis=1, keepdims=True)}


class Images(Dataset):
    def __init__(self) -> None:
        self.images = np.random.default_rng(4).normal(size=(SAMPLES, PIXELS)).astype(np.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], index


@pytest.fixture
def teacher(clean: None) -> Iterator[LocalTeacher]:
    service = LocalService(SPEC, taught)
    made = LocalTeacher(service)
    yield made
    made.close()
    service.close()


def student() -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Linear(PIXELS, CLASSES)
    return model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


@pytest.mark.parametrize("framework", [None, "torch"], ids=["arrays", "tensors"])
def test_a_torch_student_learns_in_the_loop_as_if_it_computed_the_labels_itself(
    teacher, tmp_path, framework
):
    images = Images()
    model, optimizer = student()
    distill = DistillReader([None, None, None, "image", None], ["probs"])
    distill.set_fixed_teacher(teacher.endpoint).set_tensors(framework)
    loop = elastic.Loop(
        model, optimizer, images, batch_size=5, epochs=3, shards=2,
        checkpoint=tmp_path / "ckpt",
        reader=lambda where: distill.set_batch_generator(loop.shards(images))(),
    )  # fmt: skip
    seen = []
    for epoch in loop.epochs():
        for step in epoch:
            for pixels, ids, probs in step:
                assert torch.equal(pixels, torch.from_numpy(images.images[ids]))
                seen += ids.tolist()
                step.backward(soft_cross_entropy(model(pixels), probs))
            step.update()
    assert sorted(seen) == sorted([*range(SAMPLES)] * 3)

    own, own_optimizer = student()
    alone = elastic.Loop(own, own_optimizer, images, batch_size=5, epochs=3, shards=2)
    for epoch in alone.epochs():
        for step in epoch:
            for pixels, _ids in step:
                probs = torch.from_numpy(taught({"image": pixels.numpy()})["probs"])
                step.backward(soft_cross_entropy(own(pixels), probs))
            step.update()
    for found, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
