"""Types on the wire and top-k, through real teachers and every protocol."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from distill_reader import DistillReader
from distill_reader.errors import BadRequest, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher
from tests.distill_reader.student.teacher_process import TeacherProcess

MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.2, 0.3])
NORMALIZE = "image:mean=0.4,0.5,0.6:std=0.2,0.2,0.3:layout=HWC-CHW"
CLASSES = 50
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
FLOATS = ((PIXELS / 255 - MEAN) / STD).transpose(0, 3, 1, 2).astype(np.float32)
SCHEMES = ["", "grpc://", "http://"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    folder = tmp_path_factory.mktemp("teachers") / "m"
    folder.mkdir()
    (folder / "classes").write_text(str(CLASSES))
    options = ["--normalize", NORMALIZE]
    process = TeacherProcess(folder, backend="classify", shape=(3, 4, 5), options=options)
    process.start()
    process.wait()
    yield process
    process.kill()


@pytest.fixture
def read(teacher: TeacherProcess, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DistillReader]:
    """Make a reader of one batch; tcp, so that all bytes go by the socket."""
    monkeypatch.delenv("PADDLE_DISTILL_CONF_FILE", raising=False)

    def make(images: np.ndarray, *predicts: str, scheme: str = "") -> DistillReader:
        reader = DistillReader(["image", None], predicts or ("logits", "probs"))
        reader.set_fixed_teacher(scheme + teacher.endpoint)
        return reader.set_batch_generator([(images, np.arange(len(images)))])

    return make


@pytest.fixture(scope="module")
def plain(teacher: TeacherProcess) -> tuple[np.ndarray, np.ndarray]:
    """Logits and probabilities without any option."""
    reader = DistillReader(["image"], ["logits", "probs"]).set_fixed_teacher(teacher.endpoint)
    ((_, logits, probs),) = reader.set_batch_generator([(FLOATS,)])()
    return logits, probs


@pytest.mark.parametrize("scheme", SCHEMES)
def test_raw_pixels_are_normalized_by_the_teacher(read, plain, scheme: str):
    reader = read(PIXELS, scheme=scheme).set_wire_dtype(ins="uint8")
    ((given, _, logits, probs),) = reader()
    assert given is PIXELS
    np.testing.assert_allclose(logits, plain[0], atol=1e-3)
    np.testing.assert_allclose(probs, plain[1], atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_comes_back_as_the_teacher_serves_it(read, plain, scheme: str):
    reader = read(FLOATS, scheme=scheme).set_wire_dtype(predicts="float16")
    ((given, _, logits, probs),) = reader()
    assert given.dtype == logits.dtype == probs.dtype == np.float32
    np.testing.assert_allclose(logits, plain[0], rtol=5e-3, atol=5e-2)
    assert np.abs(logits - plain[0]).max() > 0  # it was rounded
    np.testing.assert_array_equal(logits, logits.astype(np.float16))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_top_alone_comes_and_rows_are_made_of_it(read, plain, scheme: str):
    ((_, _, probs),) = read(FLOATS, "probs", scheme=scheme).set_top_k(5)()
    top = np.argsort(-plain[1], axis=1)[:, :5]
    np.testing.assert_allclose(
        np.take_along_axis(probs, top, 1), np.take_along_axis(plain[1], top, 1), atol=1e-6
    )
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-5)


def test_logits_values_and_indices_and_two_types_at_once(read, plain):
    reader = read(PIXELS, "probs", "batch").set_wire_dtype(ins="uint8", predicts="float16")
    ((_, _, values, indices, batch),) = reader.set_top_k(3, dense=False, predicts=["probs"])()
    assert (values.shape, indices.shape) == ((9, 3), (9, 3))
    np.testing.assert_allclose(values, np.take_along_axis(plain[1], indices, 1), atol=2e-3)
    assert batch.dtype == np.int64
    ((_, _, logits),) = read(FLOATS, "logits").set_top_k(5, of="logits")()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(np.sort(shares)[:, -5:], np.sort(plain[1])[:, -5:], atol=1e-5)


def test_samples_and_lists_of_samples_have_them_too(read, plain):
    reader = read(PIXELS, "probs").set_wire_dtype(ins="uint8").set_top_k(2, dense=False)
    reader.set_sample_generator(lambda: ((pixels, place) for place, pixels in enumerate(PIXELS)))
    for (_, place, values, indices), row in zip(reader(), plain[1], strict=True):
        assert values.shape == indices.shape == (2,)
        assert indices[0] == row.argmax()
        assert place < len(PIXELS)
    reader.set_sample_list_generator([[(pixels, 0) for pixels in PIXELS]])
    (samples,) = reader()
    assert [sample[3][0] for sample in samples] == plain[1].argmax(1).tolist()


def test_students_of_different_options_share_one_teacher(read, plain):
    readers = [
        read(PIXELS).set_wire_dtype(ins="uint8"),
        read(FLOATS),
        read(FLOATS).set_wire_dtype(predicts="float16"),
        read(FLOATS).set_top_k(4, predicts=["probs"]),
    ]
    for reader in readers:
        reader.set_teacher_batch_size(2)
    for results in zip(*(reader() for reader in readers), strict=True):
        for result in results:
            np.testing.assert_allclose(result[2], plain[0], rtol=5e-3, atol=5e-2)


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (PIXELS, {}, r"field image is uint8, .* say set_wire_dtype\(ins='uint8'\)"),
        (FLOATS, {"ins": "uint8"}, "field image is float32: to go as uint8 it must be the raw"),
        (PIXELS[:, :3], {"ins": "uint8"}, r"image: expected shape \[N, 4, 5, 3\], got"),
        (FLOATS * 1e4, {"predicts": "float16"}, "logits: has values beyond float16"),
    ],
)
def test_a_field_that_cannot_go_so_is_refused_with_the_remedy(read, images, options, words: str):
    with pytest.raises(BadRequest, match=words):
        list(read(images).set_wire_dtype(**options)())


def test_the_top_of_logits_is_not_taken_for_probabilities(read):
    with pytest.raises(BadRequest, match=r"logits: .* say set_top_k\(k, of='logits'\)"):
        list(read(FLOATS, "logits").set_top_k(3)())


def test_paddle_serving_carries_pixels_but_no_encodings(read, plain):
    reader = read(PIXELS, scheme="serving+grpc://").set_wire_dtype(ins="uint8")
    ((_, _, logits, _),) = reader()
    np.testing.assert_allclose(logits, plain[0], rtol=5e-3, atol=5e-2)
    for reader in (
        read(FLOATS, "probs", scheme="serving://").set_top_k(3),
        read(FLOATS, scheme="serving://").set_wire_dtype(predicts="float16"),
    ):
        with pytest.raises(BadRequest, match="only teachers of edl can"):
            list(reader())


def test_a_teacher_of_an_older_release_is_refused_what_it_cannot_do_and_used_for_the_rest():
    spec = ModelSpec(
        name="old",
        inputs=(TensorSpec(name="image", dtype="float32", shape=(3, 4, 5)),),
        outputs=(TensorSpec(name="probs", dtype="float32", shape=(4,)),),
    )
    service = LocalService(spec, lambda inputs: {"probs": np.full((9, 4), 0.25, np.float32)})
    teacher = LocalTeacher(service)

    def reader() -> DistillReader:
        made = DistillReader(["image"], ["probs"]).set_fixed_teacher(teacher.endpoint)
        return made.set_batch_generator([(FLOATS,)])

    try:
        ((_, probs),) = reader()()
        assert probs.shape == (9, 4)
        for wanted, words in (
            (reader().set_wire_dtype(ins={"image": "uint8"}), "edl serve --normalize INPUT"),
            (reader().set_wire_dtype(ins="uint8"), "takes no input as uint8"),
            (reader().set_wire_dtype(predicts="float16"), "float16 of probs: only teachers of edl"),
            (reader().set_top_k(2), "the top of probs: only teachers of edl"),
        ):
            with pytest.raises(BadRequest, match=words):
                list(wanted())
        assert len(service.protocols) == 1  # it was asked for nothing that it does not know
    finally:
        teacher.close()
        service.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.set_wire_dtype(ins="int8"), "ins: expected uint8, got 'int8'"),
        (lambda r: r.set_wire_dtype(ins="float16"), "float16 was removed, .* raw pixels as uint8"),
        (lambda r: r.set_wire_dtype(ins={"x": "uint8"}), "'x' is none of those that are sent"),
        (lambda r: r.set_wire_dtype(predicts="uint8"), "predicts: expected float16, got 'uint8'"),
        (lambda r: r.set_top_k(0), "k: expected an integer"),
        (lambda r: r.set_top_k(3, predicts=["x"]), "'x' is none of those that are wanted: logits"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(call, words: str):
    with pytest.raises(UsageError, match=words):
        call(DistillReader(["image", None], ["logits", "probs"]))


def test_options_are_shown_and_can_be_taken_back(capsys):
    reader = DistillReader(["image"], ["probs"]).set_wire_dtype(ins="uint8", predicts="float16")
    reader.set_top_k(5).print_config()
    shown = capsys.readouterr().out
    assert "wire_ins: (('', 'uint8'),)" in shown
    assert "wire_predicts: float16" in shown
    assert "top_k: TopK(k=5, of='probabilities', rest='uniform'" in shown
    reader.set_wire_dtype().set_top_k(None).print_config()
    shown = capsys.readouterr().out
    assert "wire_ins: ()" in shown
    assert "top_k: None" in shown
