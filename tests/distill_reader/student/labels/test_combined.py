"""Several services whose predictions are averaged."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_reader import Discovered, DistillReader
from distill_reader.errors import BadRequest, NoTeacher, ReaderError, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.clients.client import Bounds
from distill_reader.student.labels.combine import Combination
from tests.distill_reader.student.fake_teachers import FakeTeacher
from tests.support import wait_until

SPEC = ModelSpec(
    name="classes",
    inputs=(TensorSpec(name="image", dtype="float32", shape=(2,)),),
    outputs=(TensorSpec(name="score", dtype="float32", shape=(3,)),),
    digest="one",
)
Make = Callable[..., DistillReader]


def teacher(
    endpoint: str, factor: float, *, spec: ModelSpec = SPEC, delay_s: float = 0.0
) -> FakeTeacher:
    """Its score is made of the image and of its own factor."""

    def compute(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        image = inputs["image"]
        score = np.stack([image[:, 0] * factor, image[:, 1], image[:, 0] * 0 + factor], axis=1)
        return {"score": score.astype(np.float32)}

    return FakeTeacher(endpoint, spec, compute, delay_s=delay_s)


def batches(count: int) -> Iterator[Any]:
    for index in range(count):
        yield np.full((1 + index % 4, 2), index, np.float32), index


def expected(index: int, factor: float) -> list[float]:
    return [index * factor, index, factor]


@pytest.fixture
def make(reach: Callable[..., None]) -> Make:
    def make_reader(
        services: Mapping[str, list[FakeTeacher]],
        *,
        ins: tuple[str | None, ...] = ("image", None),
        **options: Any,
    ) -> DistillReader:
        reach(*itertools.chain.from_iterable(services.values()))
        endpoints = {
            name: [each.endpoint for each in teachers] for name, teachers in services.items()
        }
        reader = DistillReader(ins, ["score"])
        return reader.set_teachers_combined(endpoints, **{"of": "logits", **options})

    return make_reader


def test_the_weighted_mean_of_all_services_comes_in_order(make: Make):
    reader = make(
        {
            "a": [teacher("a:1", 1), teacher("a:2", 1, delay_s=0.003)],
            "b": [teacher("b:1", 4, delay_s=0.001)],
        },
        weights={"b": 2},
    )
    for _ in range(2):
        found = list(reader.set_batch_generator(lambda: batches(100))())
        assert [index for _, index, _ in found] == list(range(100))
        for image, index, score in found:
            assert score.shape == (len(image), 3)
            np.testing.assert_allclose(score, np.tile(expected(index, 3), (len(image), 1)))


def test_predictions_larger_than_the_memory_bound_keep_no_service_waiting(make: Make):
    spec = replace(SPEC, outputs=(TensorSpec(name="score", dtype="float32", shape=(-1,)),))

    def wide(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"score": np.ones((len(inputs["image"]), 100_000), np.float32)}

    services = {
        name: [FakeTeacher(f"{name}:1", spec, wide, delay_s=delay_s)]
        for name, delay_s in (("small", 0.001), ("large", 0.003))
    }
    reader = make(services).set_max_memory(1).set_batch_generator(lambda: batches(60))
    assert [index for _, index, _ in reader()] == list(range(60))


def test_the_consumer_waits_for_the_slow_service_alone(make: Make):
    fast, slow = teacher("a:1", 1), teacher("b:1", 1, delay_s=0.02)
    slow.computes_in_turn()
    reader = make({"fast": [fast], "slow": [slow]}).set_teacher_batch_size(2).set_max_memory(1)
    aside = np.zeros(60_000, np.uint8)  # memory for some items: they are read as others are taken
    reader.set_batch_generator((np.ones((2, 2), np.float32), aside) for _ in range(80))
    for _ in itertools.islice(reader(), 60):
        pass
    shares = {}
    for name in ("fast", "slow"):
        measured = reader._services[name].meter.read()
        assert measured is not None
        shares[name] = measured.wait_share
    assert shares["slow"] > 0.5
    assert shares["fast"] < 0.25


def test_lists_of_texts_of_several_lengths_have_it_too(make: Make):
    words = TensorSpec(name="image", dtype="int64", shape=(-1,))
    score = TensorSpec(name="score", dtype="float32", shape=(-1, 2))
    spec = replace(SPEC, inputs=(words,), outputs=(score,))

    def compute(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"score": np.stack([inputs["image"]] * 2, axis=-1).astype(np.float32)}

    one, other = (FakeTeacher(f"{name}:1", spec, compute) for name in "ab")
    other.bounds = Bounds(most_samples=2)
    reader = make({"one": [one], "other": [other]})
    samples = [(np.full(length, index), index) for index, length in enumerate((3, 3, 3, 5, 3))]
    (found,) = reader.set_sample_list_generator([samples])()
    for words, index, score in found:
        assert score.shape == (len(words), 2)
        assert (score == index).all()


def test_the_mean_of_two_types_is_of_the_wider_one(make: Make):
    half = replace(SPEC, outputs=(TensorSpec(name="score", dtype="float16", shape=(1,)),))
    single = replace(SPEC, outputs=(TensorSpec(name="score", dtype="float32", shape=(1,)),))
    services = {
        "half": [FakeTeacher("a:1", half, lambda i: {"score": i["image"][:, :1].astype("f2")})],
        "single": [FakeTeacher("b:1", single, lambda i: {"score": i["image"][:, :1] * 1000})],
    }
    reader = make(services).set_batch_generator([(np.full((2, 2), 200, np.float32), 0)])
    ((*_, score),) = reader()
    np.testing.assert_array_equal(score, np.full((2, 1), 100_100, np.float32))


def test_samples_and_lists_of_samples_have_it_too(make: Make):
    reader = make({"a": [teacher("a:1", 1)], "b": [teacher("b:1", 3)]})
    samples = [(np.full(2, index, np.float32), index) for index in range(50)]
    found = list(reader.set_sample_generator(samples)())
    assert [score.tolist() for _, _, score in found] == [expected(i, 2) for i in range(50)]
    lists = [samples[:3], [], samples[3:5]]
    found = list(reader.set_sample_list_generator(lists)())
    assert [[score.tolist() for _, _, score in each] for each in found] == [
        [expected(i, 2) for i in range(3)],
        [],
        [expected(i, 2) for i in range(3, 5)],
    ]


def test_a_lost_teacher_costs_no_sample_while_its_service_has_another(make: Make):
    lost, other = teacher("a:1", 1, delay_s=0.002), teacher("a:2", 1, delay_s=0.002)
    reader = make({"a": [lost, other], "b": [teacher("b:1", 3)]}).set_teacher_batch_size(4)
    indices = []
    for _, index, score in reader.set_batch_generator(lambda: batches(300))():
        indices.append(index)
        np.testing.assert_allclose(score[0], expected(index, 2))
        if index == 20:
            lost.kill()
    assert indices == list(range(300))


@pytest.mark.full
def test_a_service_that_fails_follows_the_policy_raise(make: Make):
    lost = teacher("b:1", 3, delay_s=0.002)
    reader = make({"a": [teacher("a:1", 1)], "b": [lost]}).set_no_teacher_timeout(3)
    reader.set_teacher_batch_size(4).set_batch_generator(lambda: batches(10**7))
    indices: list[int] = []

    def train() -> None:
        for _, index, score in reader():
            np.testing.assert_allclose(score[0], expected(index, 2))
            indices.append(index)
            if index == 20:
                lost.kill()

    with pytest.raises(NoTeacher, match=r"no teacher of b for 3 s \(b:1: nobody listens"):
        train()
    assert indices == list(range(len(indices)))


def test_a_service_that_fails_follows_the_policy_skip_until_it_is_back(make: Make):
    lost = teacher("b:1", 3)
    reader = make({"a": [teacher("a:1", 1)], "b": [lost]}).set_no_teacher_timeout(0.1, "skip")
    reader.set_batch_generator((np.full((1, 2), i, np.float32), i) for i in range(10**7))
    phases = ["whole"]
    for place, (_, index, score) in enumerate(reader()):
        assert index == place
        if score is not None:
            np.testing.assert_allclose(score[0], expected(index, 2))
        phase = "without" if score is None else "whole"
        if phase != phases[-1]:
            phases.append(phase)
        if index == 20:
            lost.kill()
        if phases == ["whole", "without"] and not lost.is_alive:
            lost.come_back()
        if phases == ["whole", "without", "whole"]:
            break
    assert phases == ["whole", "without", "whole"]


def test_what_goes_wrong_comes_at_its_place(make: Make):
    def generate() -> Iterator[Any]:
        yield from batches(5)
        raise ValueError("a broken image")

    reader = make({"a": [teacher("a:1", 1)], "b": [teacher("b:1", 3, delay_s=0.01)]})
    items = reader.set_batch_generator(generate)()
    assert [index for _, index, _ in itertools.islice(items, 5)] == list(range(5))
    with pytest.raises(ReaderError, match="a broken image"):
        next(items)


def test_each_service_has_a_cache_of_its_own_labels(make: Make, tmp_path: Path):
    one, other = teacher("a:1", 1), teacher("b:1", 3, spec=replace(SPEC, digest="two"))
    reader = make({"a": [one], "b": [other]}, ins=("image", "id")).set_cache(tmp_path)
    for _ in range(2):
        reader.set_batch_generator([(np.full((2, 2), 5, np.float32), np.arange(2))])
        ((_, _, score),) = reader()
        assert score.tolist() == [expected(5, 2)] * 2
    assert (one.samples, other.samples) == (2, 2)
    assert len(list(tmp_path.glob("labels-*"))) == 2
    same_version = [teacher("a:1", 1, spec=replace(SPEC, digest="")), teacher("b:1", 3)]
    given_one = make({"a": same_version[:1], "b": same_version[1:]}, ins=("image", "id"))
    given_one.set_cache(tmp_path, teacher_version="both")
    for _ in range(2):  # one text for two services: they are kept apart
        given_one.set_batch_generator([(np.full((1, 2), 7, np.float32), [1])])
        ((_, _, score),) = given_one()
        assert score.tolist() == [expected(7, 2)]


def test_memory_stays_bounded_while_one_service_is_slow(make: Make):
    fast, slow = teacher("a:1", 1), teacher("b:1", 3)
    slow.stop()
    reader = make({"a": [fast], "b": [slow]}).set_max_memory(1)
    yielded = []

    def generate() -> Iterator[Any]:
        for index in range(2000):
            yielded.append(index)
            yield np.full((64, 2), index, np.float32), index

    items = reader.set_batch_generator(generate)()
    waiting = threading.Thread(target=lambda: yielded.append(next(items)[1]), name="waits")
    # It connects only while it runs; then it hangs at its first request.
    slow.go_on()
    slow.delay_s = 0.5
    waiting.start()
    wait_until(lambda: slow.in_flight > 0)
    slow.stop()
    slow.delay_s = 0.0
    wait_until(lambda: fast.samples > 64 * 30)
    assert len(yielded) < 1500  # of 1.5 KiB each, and 1 KiB beside them
    slow.go_on()
    waiting.join(30)
    assert [index for _, index, _ in items] == list(range(1, 2000))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.set_teachers_combined({"a": "a:1"}), "two services or more"),
        (lambda r: r.set_teachers_combined({"a": "a:1", "b": ""}), "teachers: expected endpoints"),
        (lambda r: r.set_teachers_combined({"a": "a:1", "": "b:1"}), "expected a name, got ''"),
        (lambda r: r.set_teachers_combined({"a": "a:1", "b": Discovered("x", "s")}), "x"),
        (
            lambda r: r.set_teachers_combined({"a": "a:1", "b": Discovered("x:1", "s", 0)}),
            "require_max_teacher: .*got 0",
        ),
        (
            lambda r: r.set_teachers_combined({"a": "a:1", "b": "b:1"}, weights={"c": 1}),
            "weights: 'c' is none of the services: a, b",
        ),
        (
            lambda r: r.set_teachers_combined({"a": "a:1", "b": "b:1"}, weights={"a": 0}),
            "a: weight: expected > 0, got 0",
        ),
        (
            lambda r: r.set_teachers_combined({"a": "a:1", "b": "b:1"}, of="scores"),
            "of: expected probabilities or logits, got 'scores'",
        ),
        (
            lambda r: r.set_top_k(1, dense=False).set_teachers_combined({"a": "a:1", "b": "b:1"}),
            r"whole rows of probabilities: say set_top_k\(k, of='probabilities', dense=True\)",
        ),
        (
            lambda r: r.set_teachers_combined({"a": "a:1", "b": "b:1"}, of="logits").set_top_k(1),
            "set_top_k",
        ),
    ],
)
def test_a_combination_that_cannot_be_meant_is_refused(call: Any, words: str):
    with pytest.raises(UsageError, match=words):
        call(DistillReader(["image"], ["score"]))


def test_a_balance_server_of_the_environment_is_not_ignored(make: Make, monkeypatch):
    reader = make({"a": [teacher("a:1", 1)], "b": [teacher("b:1", 1)]})
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", "c:1")
    with pytest.raises(UsageError, match="names one service, where set_teachers_combined names"):
        reader.set_batch_generator(batches(1))()


HALVES = Combination(names=("a", "b"), weights=(1.0, 1.0), predicts=("score",), of="probabilities")


def test_the_mean_of_probabilities_is_one_of_probabilities():
    (mean,) = HALVES([[np.array([[1.0, 0.0]], np.float32)], [np.array([[0.5, 0.5]], np.float32)]])
    assert mean.dtype == np.float32
    assert mean.tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (np.array([[2.0, 1.0]], np.float32), "score of b: its rows are no probabilities"),
        (np.array([[np.nan, 1.0]], np.float32), "score of b: has NaN: .* its inputs"),
        (np.array([[1, 0]]), "score of b is int64: a mean is of floats"),
        (np.array([[1.0, 0.0, 0.0]]), r"score of b has shape \[3\] per sample, that of a \[2\]"),
    ],
)
def test_what_has_no_mean_is_refused(other: Any, words: str):
    with pytest.raises(BadRequest, match=words):
        HALVES([[np.array([[1.0, 0.0]], np.float32)], [other]])
