"""The service answers in the encodings that are wanted, whatever else it computes meanwhile."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import BadRequest
from distill_reader.model.output_encodings import parse_encoding
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.encodings import Encoder
from distill_reader.teacher.service.requests import InferRequest
from distill_reader.teacher.service.service import PredictorService, ServiceConfig

pytestmark = pytest.mark.full  # its predictors are processes

TOYS = "tests.distill_reader.teacher.toy_backends"
WAIT_S = 60.0
WHOLE = ("logits", "probs", "batch")
ENCODED = (
    *WHOLE,
    "probs@float16",
    "probs@top3:values",
    "probs@top3:indices:uint16",
    "logits@top5:logrest",
    "logits@top99:values:float16",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], PredictorService]]:
    """Return a function that starts the service of a toy, once for all tests."""
    folder = tmp_path_factory.mktemp("model")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(toy: str) -> PredictorService:
            service = PredictorService(
                ServiceConfig(
                    models=(("toy", str(folder)),),
                    devices=(Device(),) * 2,
                    backend=f"{TOYS}:{toy}",
                    max_batch=8,
                    memory_bytes=8 << 20,
                )
            )
            stack.callback(service.close)
            service.start(WAIT_S)
            return service

        yield start


@pytest.fixture
def service(
    start: Callable[[str], PredictorService], request: pytest.FixtureRequest
) -> Iterator[PredictorService]:
    """The service of a toy, by default `classify`; after the test all of its memory is back."""
    service = start(getattr(request, "param", "classify"))
    yield service
    assert service.metrics.registry.get_sample_value("edl_teacher_memory_bytes") == 0


def answer(service: PredictorService, fetch: tuple[str, ...], **inputs: Any) -> dict[str, Any]:
    return taken(service.submit(InferRequest(model="toy", inputs=inputs, fetch=fetch)))


def taken(future: Any) -> dict[str, Any]:
    found = future.result(WAIT_S)
    copies = {name: array.copy() for name, array in found.outputs.items()}
    found.release()
    return copies


def test_requests_of_all_encodings_and_types_at_once_get_what_each_wants(service):
    spec = service.models()["toy"]
    random = np.random.default_rng(0)
    asked = []
    for number in range(80):
        image = random.random((random.integers(1, 12), 4)).astype("f2" if number % 3 else "f4")
        fetch = tuple(str(name) for name in random.permutation(ENCODED)[: random.integers(1, 6)])
        request = InferRequest(model="toy", inputs={"image": image}, fetch=fetch)
        asked.append((image, fetch, service.submit(request)))
    for image, fetch, future in asked:
        found = taken(future)
        assert tuple(found) == fetch
        plain = answer(service, (), image=image.astype(np.float32))
        encoder = Encoder([plain[name] for name in WHOLE], WHOLE)
        for name, array in found.items():
            if name != "batch":
                expected: Any = encoder.encode(parse_encoding(spec, name))
                assert array.dtype == expected.dtype
                np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("service", ["repeated"], indirect=True)
def test_outputs_whose_length_is_not_known_before_are_encoded(service):
    fetch = ("ones@top3:values", "same", "ones@top3:indices")
    for count in (2, 5, 3, 5):
        found = answer(service, fetch, count=np.full((4, 1), count, np.int64))
        assert found["ones@top3:values"].shape == (4, min(3, count))
        assert found["ones@top3:indices"].tolist() == [list(range(min(3, count)))] * 4
        assert found["same"].tolist() == [[count]] * 4


def test_unknown_encodings_and_too_many_are_refused(service):
    image = np.ones((1, 4), np.float32)
    many = tuple(f"probs@top{k}:values" for k in range(1, 80))
    for fetch, words in (
        (many, "79 encodings of outputs are wanted; at most 64"),
        (("probs@top",), "no encoding 'top'"),
        (("batch@float16",), "batch is int64"),
    ):
        with pytest.raises(BadRequest, match=words):
            answer(service, fetch, image=image)
    assert len(answer(service, many[:64], image=image)) == 64


def test_a_value_that_its_encoding_cannot_hold_fails_only_its_own_request(service):
    good, bad = np.ones((1, 4), np.float32), np.full((1, 4), 1e6, np.float32)
    futures = [
        service.submit(
            InferRequest(model="toy", inputs={"image": image}, fetch=("logits@float16",))
        )
        for image in (good, bad, good, bad)
    ]
    for future in futures[1::2]:
        with pytest.raises(BadRequest, match="values beyond float16"):
            future.result(WAIT_S)
    for future in futures[::2]:
        assert taken(future)["logits@float16"].dtype == np.float16
