"""The reader as its users have it; teachers in this process, and real ones that get killed."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill_reader import DistillReader
from distill_reader.errors import BadRequest, NoTeacher, ReaderError, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from tests import warm
from tests.distill_reader.student.conftest import reader_threads
from tests.distill_reader.student.fake_teachers import FakeTeacher
from tests.distill_reader.student.teacher_process import TeacherProcess
from tests.support import ROOT, wait_until

SHAPE = (2, 3)


def image(value: float, *axes: int) -> np.ndarray:
    return np.full((*axes, *SHAPE), value, np.float32)


@pytest.fixture
def make(reach: Callable[..., None]) -> Callable[..., DistillReader]:
    def make_reader(
        *teachers: FakeTeacher,
        ins: tuple[str | None, ...] = ("image", None),
        predicts: tuple[str, ...] = ("total",),
    ) -> DistillReader:
        reach(*teachers)
        reader = DistillReader(ins, predicts)
        return reader.set_fixed_teacher([teacher.endpoint for teacher in teachers])

    return make_reader


def two() -> tuple[FakeTeacher, FakeTeacher]:
    return FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.001)


def test_what_a_student_waits_for_is_logged_where_the_script_has_set_up_logging(monkeypatch):
    # `dictConfig` and `fileConfig` disable what there is, `disable_existing_loggers` being True.
    logger = logging.getLogger("distill_reader.student.pool.pool")
    monkeypatch.setattr(logger, "disabled", True)
    DistillReader(["image"], ["total"])
    assert not logger.disabled


# --- what is yielded


def test_batches_come_back_in_order_with_their_predictions_behind_them(make):
    def batches() -> Iterator[Any]:
        for index in range(100):
            yield image(index, 1 + index % 5), index

    reader = make(*two(), predicts=("total", "double")).set_batch_generator(batches)
    for _ in range(3):  # epochs
        found = list(reader())
        assert [index for _, index, _, _ in found] == list(range(100))
        for pixels, index, total, double in found:
            assert pixels.shape == (1 + index % 5, *SHAPE)
            np.testing.assert_array_equal(double, 2 * pixels)
            np.testing.assert_array_equal(total, np.full((len(pixels), 1), 6 * index))


def test_samples_come_back_one_by_one(make):
    def samples() -> Iterator[Any]:
        for index in range(500):
            yield image(index), index

    found = list(make(*two()).set_sample_generator(samples)())
    assert [index for _, index, _ in found] == list(range(500))
    for pixels, index, total in found:
        assert pixels.shape == SHAPE
        assert total.tolist() == [6 * index]


def test_lists_of_samples_come_back_as_lists(make):
    def lists() -> Iterator[Any]:
        for index in range(100):
            yield [(image(index), sample) for sample in range(index % 4)]

    found = list(make(*two()).set_sample_list_generator(lists)())
    assert [len(samples) for samples in found] == [index % 4 for index in range(100)]
    for index, samples in enumerate(found):
        assert [sample for _, sample, _ in samples] == list(range(index % 4))
        assert all(total.tolist() == [6 * index] for _, _, total in samples)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_teachers_batch_size_bounds_requests_and_shows_nowhere_else(make, size: int):
    one, other = two()
    reader = make(one, other).set_teacher_batch_size(size)
    reader.set_batch_generator(lambda: ((image(index, 5), index) for index in range(30)))
    found = list(reader())
    assert all(total.shape == (5, 1) for _, _, total in found)
    assert [total[0, 0] for _, _, total in found] == [6 * index for index in range(30)]
    assert max(sum(request) for request in one.requests + other.requests) <= size


def test_numbers_in_fields_that_are_not_sent_pass_as_the_elastic_loop_needs_them(make):
    reader = make(*two(), ins=(None, None, None, "image", None))
    reader.set_batch_generator([(0, index, 2, image(1, 4), np.arange(4)) for index in range(3)])
    for place, (epoch, step, shard, _, labels, total) in enumerate(reader()):
        assert (epoch, step, shard) == (0, place, 2)
        assert type(step) is int
        assert labels.shape == (4,)
        assert total.shape == (4, 1)


def test_paddle_tensors_are_sent_and_yielded_as_they_came(make):
    paddle = pytest.importorskip("paddle")
    tensor = paddle.ones([4, *SHAPE])
    weights = paddle.ones([4])
    weights.stop_gradient = False
    sparse = paddle.eye(4).to_sparse_coo(2)
    reader = make(*two(), ins=["image", None, None])
    reader.set_batch_generator([(tensor, weights, sparse)])
    ((given, of_weights, of_sparse, total),) = reader()
    assert isinstance(given, paddle.Tensor)
    assert (given.numpy() == 1).all()
    assert of_weights is weights
    assert of_sparse is sparse
    assert total.tolist() == [[6.0]] * 4


def test_two_readers_do_not_mix(make):
    one = make(*two()).set_batch_generator(lambda: ((image(1, 2), i) for i in range(50)))
    other = make(FakeTeacher("c:1")).set_batch_generator(
        lambda: ((image(2, 2), i) for i in range(50))
    )
    for mine, theirs in zip(one(), other(), strict=True):
        assert (mine[1], theirs[1]) == (theirs[1], mine[1])
        assert (mine[2][0, 0], theirs[2][0, 0]) == (6, 12)


def test_a_pass_reads_what_the_reader_was_given_when_it_was_called(make):
    reader = make(*two())
    batches = reader.set_batch_generator([(image(1, 4), "train")])()
    samples = reader.set_sample_generator([(image(2), "test")])()
    assert [(total.shape, name) for _, name, total in batches] == [((4, 1), "train")]
    assert [(total.shape, name) for _, name, total in samples] == [((1,), "test")]


def test_a_reader_may_be_iterated_over_twice_at_once(make):
    reader = make(*two()).set_batch_generator(lambda: ((image(1, 2), i) for i in range(50)))
    assert [a[1] == b[1] for a, b in zip(reader(), reader(), strict=True)] == [True] * 50


# --- samples of different lengths

TOKENS = ModelSpec(
    name="tokens",
    inputs=(
        TensorSpec(name="ids", dtype="int64", shape=(-1,)),
        TensorSpec(name="mask", dtype="float32", shape=(-1,)),
    ),
    outputs=(
        TensorSpec(name="total", dtype="int64", shape=(1,)),
        TensorSpec(name="doubled", dtype="int64", shape=(-1,)),
    ),
)


def tokens(inputs: Any) -> Any:
    ids, mask = inputs["ids"], inputs["mask"]
    total = np.where(mask > 0, ids, 0).sum(axis=1, keepdims=True)
    return {"total": total, "doubled": 2 * ids}


def sentence(index: int) -> tuple[np.ndarray, np.ndarray]:
    length = 1 + 7 * index % 50
    return np.full(length, index, np.int64), np.ones(length, np.float32)


def check_sentence(index: int, given: Any) -> None:
    ids, mask, total, doubled = given
    np.testing.assert_array_equal(ids, sentence(index)[0])
    assert mask.shape == ids.shape
    assert total.tolist() == [index * len(ids)]
    np.testing.assert_array_equal(doubled, 2 * ids)


def padding_reader(make: Any) -> tuple[FakeTeacher, DistillReader]:
    teacher = FakeTeacher("a:1", TOKENS, tokens, delay_s=0.001)
    reader = make(teacher, ins=("ids", "mask"), predicts=("total", "doubled"))
    return teacher, reader.set_padding({"ids": 9, "mask": 0}, multiple_of=16, outputs=["doubled"])


def test_padded_samples_share_requests_and_come_back_as_long_as_they_were(make):
    teacher, reader = padding_reader(make)
    found = list(reader.set_sample_generator(lambda: map(sentence, range(400)))())
    for index, given in enumerate(found):
        check_sentence(index, given)
    assert len(found) == 400
    assert len(teacher.requests) < 100


def test_padded_lists_and_batches_come_back_as_long_as_they_were(make):
    _, reader = padding_reader(make)
    lists = [[sentence(10 * index + at) for at in range(10)] for index in range(20)]
    for index, samples in enumerate(reader.set_sample_list_generator(lists)()):
        for at, given in enumerate(samples):
            check_sentence(10 * index + at, given)
    batches = [tuple(np.stack([field] * 3) for field in sentence(index)) for index in range(20)]
    for index, columns in enumerate(reader.set_batch_generator(batches)()):
        for sample in range(3):
            check_sentence(index, [column[sample] for column in columns])


WORDS = replace(
    TOKENS,
    inputs=TOKENS.inputs[:1],
    outputs=tuple(
        TensorSpec(name=name, dtype="float32", shape=shape)
        for name, shape in (("mean", (2,)), ("each", (-1,)))
    ),
)


def means(inputs: Any) -> Any:
    """What depends on padding: the mean over all positions."""
    each = inputs["ids"].astype(np.float32)
    mean = each.mean(axis=1, keepdims=True)
    return {"mean": np.concatenate([mean, -mean], 1), "each": each * mean}


@pytest.mark.parametrize("predicts", ["mean", "each"])
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_model_whose_answer_depends_on_padding_is_refused(make, predicts, is_batch: bool):
    reader = make(FakeTeacher("a:1", WORDS, means), ins=("ids",), predicts=(predicts,))
    reader.set_padding("ids", multiple_of=8, outputs=["each"] if predicts == "each" else [])
    texts = [(np.arange(1, 2 + length),) for length in range(1, 20)]
    if is_batch:
        reader.set_batch_generator([(np.stack([ids] * 3),) for (ids,) in texts])
    else:
        reader.set_sample_generator(texts)
    with pytest.raises(UsageError, match=f"output {predicts}: a padded sample gets another answer"):
        list(reader())


def test_rounding_that_differs_with_the_shape_is_no_dependence_on_padding(make):
    def scores(inputs: Any) -> Any:  # close to each other, and in half precision
        largest = inputs["ids"].max(axis=1, keepdims=True).astype(np.float32)
        score = 0.9 + 1e-5 * largest + 4e-4 * (inputs["ids"].shape[1] % 8 == 0)
        return {"mean": np.repeat(score, 2, 1), "each": inputs["ids"].astype(np.float32)}

    reader = make(FakeTeacher("a:1", WORDS, scores), ins=("ids",), predicts=("mean",))
    reader.set_padding("ids", multiple_of=8, outputs=[])
    texts = [(np.arange(1, 2 + length),) for length in range(1, 20)]
    assert len(list(reader.set_sample_generator(texts)())) == 19


def test_a_model_that_takes_padded_samples_alone_is_trusted(make):
    def of_8(inputs: Any) -> Any:
        if inputs["ids"].shape[1] != 8:
            raise BadRequest("ids: expected 8 positions")
        return means(inputs)

    reader = make(FakeTeacher("a:1", WORDS, of_8), ins=("ids",), predicts=("mean",))
    reader.set_padding("ids", multiple_of=8, outputs=[])
    texts = [(np.arange(1, 2 + length),) for length in range(1, 7)]
    assert len(list(reader.set_sample_generator(texts)())) == 6


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({"fields": "ids", "value": 0.5}, [sentence(1)], "ids is int64, which has no 0.5"),
        (
            {"fields": {"ids": 0, "mask": -1e9}},
            [(np.zeros(3, np.int64), np.zeros(3, np.float16))],
            "mask is float16, which has no -1e[+]09",
        ),
        (
            {"fields": {"ids": 0, "mask": 0}},
            [(np.zeros(3, np.int64), np.zeros(4, np.float32))],
            "ids and mask: .* equally long, got 3 and 4",
        ),
        (
            {"fields": "ids", "outputs": ["doubled", "total"]},
            [sentence(1)],
            "output total: expected a value for each of 64 positions",
        ),
        ({"fields": "ids", "outputs": None}, [sentence(1)], "doubled may be as long as the padded"),
    ],
)
def test_what_cannot_be_padded_is_an_error(make, options, given, words):
    teacher = FakeTeacher("a:1", TOKENS, lambda inputs: tokens({**inputs, "mask": inputs["ids"]}))
    teacher.spec = replace(TOKENS, inputs=TOKENS.inputs[:1])
    reader = make(teacher, ins=("ids", "mask"), predicts=("total", "doubled"))
    if len(options["fields"]) == 2:
        teacher.spec = TOKENS
    reader.set_padding(**{"outputs": ["doubled"], **options}).set_sample_generator(given)
    with pytest.raises((UsageError, BadRequest), match=words):
        list(reader())


def test_that_samples_are_sent_one_by_one_is_said_once(make, caplog):
    teacher = FakeTeacher("a:1", TOKENS, tokens, delay_s=0.0005)
    reader = make(teacher, ins=("ids", "mask"), predicts=("total",))
    lengths = [(np.zeros(n, np.int64), np.zeros(n, np.float32)) for n in range(1, 400)]
    list(reader.set_sample_generator(lengths)())
    assert caplog.text.count("set_padding lets them share requests") == 1


# --- memory


@pytest.mark.parametrize("is_known", [True, False], ids=["size known", "size unknown"])
def test_predictions_that_are_larger_than_inputs_count_against_the_bound(make, is_known: bool):
    spec = ModelSpec(
        name="rows",
        inputs=(TensorSpec(name="ids", dtype="int64", shape=(4,)),),
        outputs=(TensorSpec(name="rows", dtype="float32", shape=(4, 16_000 if is_known else -1)),),
    )  # 250 KiB a sample
    teacher = FakeTeacher(
        "a:1", spec, lambda inputs: {"rows": np.zeros((len(inputs["ids"]), 4, 16_000), np.float32)}
    )
    reader = make(teacher, ins=("ids",), predicts=("rows",)).set_max_memory(8)
    reader.set_batch_generator((np.ones((8, 4), np.int64),) for _ in range(60))  # 2 MiB each
    used = 0
    for _ in reader():
        used += 8
        time.sleep(0.02)
        if is_known or used > 64:
            assert teacher.samples - used <= 5 * 8
    assert teacher.samples == used == 480


def test_the_generator_runs_ahead_no_further_than_memory_allows(make):
    ahead = 0
    made = 0

    def batches() -> Iterator[Any]:
        nonlocal made
        for _ in range(200):
            made += 1
            yield np.zeros((1000, *SHAPE), np.float32), np.zeros(20_000)  # 24 kB and 160 kB

    reader = make(*two()).set_max_memory(1).set_batch_generator(batches)
    for used, _ in enumerate(reader()):
        ahead = max(ahead, made - used)
    assert made == 200
    assert ahead <= 1 + (1 << 20) // 184_000 + 1  # held, and the one that waits for room


# --- ends


def test_a_break_ends_threads_connections_and_the_generator(make):
    ended = threading.Event()

    def batches() -> Iterator[Any]:
        try:
            while True:
                yield image(1, 2), 0
        finally:
            ended.set()

    reader = make(*two()).set_batch_generator(batches)
    for _ in reader():
        break
    gc.collect()
    wait_until(lambda: not reader_threads())
    assert ended.is_set()
    assert len(list(zip(reader(), range(3), strict=False))) == 3  # and it may be read again


def test_closing_the_iterator_ends_it_while_teachers_do_not_answer(make):
    teacher = FakeTeacher("a:1", delay_s=0.001)
    iterator = make(teacher).set_batch_generator(lambda: ((image(1, 2), i) for i in range(10**9)))()
    next(iterator)
    teacher.stop()
    iterator.close()
    wait_until(lambda: not reader_threads())


def test_an_iterator_that_was_never_asked_starts_nothing(make):
    iterator = make(*two()).set_batch_generator(lambda: iter([(image(1, 2), 0)]))()
    assert reader_threads() == []
    iterator.close()


def test_an_error_of_the_generator_comes_behind_the_batches_before_it(make):
    def batches() -> Iterator[Any]:
        for index in range(30):
            yield image(index, 2), index
        raise OSError("broken file")

    iterator = make(*two()).set_batch_generator(batches)()
    found = [next(iterator)[1] for _ in range(30)]
    with pytest.raises(ReaderError, match="broken file") as caught:
        next(iterator)
    assert found == list(range(30))
    assert isinstance(caught.value.__cause__, OSError)


def test_what_is_no_batch_is_refused_where_it_comes(make):
    with pytest.raises(UsageError, match="expected 2 fields"):
        list(make(*two()).set_batch_generator([(image(1, 2),)])())


def test_what_does_not_fit_the_model_is_refused_by_teacher_and_tensor(make):
    reader = make(FakeTeacher("a:1"))
    reader.set_batch_generator([(image(1, 2), 0), (np.zeros((2, 7), np.float32), 1)])
    iterator = reader()
    assert next(iterator)[1] == 0
    with pytest.raises(BadRequest, match=r"a:1: tensor image: expected shape .*2, 3.*\[2, 7\]"):
        next(iterator)


def test_a_second_epoch_of_an_iterator_is_refused_and_not_empty(make):
    reader = make(FakeTeacher("a:1"))
    reader.set_batch_generator((image(1, 2), index) for index in range(3))
    assert len(list(reader())) == 3
    with pytest.raises(UsageError, match="an iterator, which can be read once"):
        reader()
    reader.set_batch_generator(iter([(image(1, 2), 0)]))
    assert len(list(reader())) == 1


def test_a_token_that_cannot_be_read_for_a_moment_ends_no_pass(make, tmp_path, monkeypatch, caplog):
    file, goes_on = tmp_path / "token", threading.Event()
    monkeypatch.setenv("EDL_TEACHER_TOKEN_FILE", str(file))

    def batches() -> Iterator[Any]:
        yield image(1, 2), 0
        goes_on.wait(20)
        yield image(1, 2), 1

    teacher = FakeTeacher("a:1")
    reader = make(teacher).set_batch_generator(batches)
    with pytest.raises(UsageError, match=f"EDL_TEACHER_TOKEN_FILE {file}: .*No such file"):
        reader()
    file.write_text("a token")
    iterator = reader()
    next(iterator)
    file.write_text("")  # as it is, for an instant, for who writes it anew
    teacher.kill()
    goes_on.set()
    wait_until(lambda: f"a:1: EDL_TEACHER_TOKEN_FILE {file}: is empty" in caplog.text)
    teacher.come_back()
    file.write_text("another token")
    assert len(list(iterator)) == 1


def test_no_teacher_raises_or_skips(make):
    dead = FakeTeacher("a:1")
    dead.kill()
    reader = make(dead).set_batch_generator([(image(1, 2), index) for index in range(3)])
    with pytest.raises(NoTeacher, match="set_no_teacher_timeout"):
        list(reader.set_no_teacher_timeout(0.1)())
    found = list(reader.set_no_teacher_timeout(0.1, "skip")())
    assert [(index, total) for _, index, total in found] == [(0, None), (1, None), (2, None)]


def test_what_was_read_ahead_while_there_was_no_teacher_has_its_predictions_once_one_is_back(make):
    teacher = FakeTeacher("a:1")
    teacher.kill()
    read_ahead: list[int] = []

    def batches() -> Iterator[Any]:
        for index in range(2000):
            read_ahead.append(index)
            yield image(index, 1), index

    reader = make(teacher).set_no_teacher_timeout(0.1, "skip").set_batch_generator(batches)
    iterator = reader()
    assert [next(iterator)[2] for _ in range(3)] == [None] * 3
    wait_until(lambda: len(read_ahead) == 2000)
    teacher.come_back()
    wait_until(lambda: teacher.samples == 1997)
    for _, index, total in iterator:
        assert total is not None
        assert total[0, 0] == 6 * index
    assert index == 1999


def test_an_iterator_that_a_fork_inherits_refuses_instead_of_waiting_for_ever(make):
    teacher = FakeTeacher("a:1")
    iterator = make(teacher).set_batch_generator(lambda: ((image(1, 2), i) for i in range(10**9)))()
    next(iterator)

    def go_on() -> int:
        try:
            for _ in iterator:
                pass
        except UsageError:
            return 7
        return 1

    assert exit_code_of_fork(go_on) == 7
    iterator.close()


def test_a_fork_reads_whatever_threads_of_its_parent_were_at(make):
    reader = make(FakeTeacher("a:1")).set_batch_generator([(image(1, 2), 0)])
    list(reader())
    with reader._services[""].meter._lock:
        assert exit_code_of_fork(lambda: len(list(reader()))) == 1


def exit_code_of_fork(work: Callable[[], int]) -> int:
    """Return what `work` returns in a fork of this process."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    statuses: list[int] = []

    def is_over() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        statuses.extend([status] * bool(pid))
        return bool(pid)

    try:
        wait_until(is_over)
    finally:
        if not statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(statuses[0])


# --- how it is set


def test_setters_return_the_reader_and_the_configuration_can_be_printed(make, capsys, monkeypatch):
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "")
    reader = make(*two())
    assert reader.set_fixed_teacher("x:1, y:2") is reader
    assert reader.set_teacher_batch_size(16) is reader
    assert reader.set_require_max_teacher(3) is reader
    assert reader.set_no_teacher_timeout(None) is reader
    assert reader.set_max_memory(64) is reader
    assert reader.set_timeout(300) is reader
    assert reader.set_hedging(False) is reader
    assert reader.set_mixed_versions(True) is reader
    assert reader.set_padding("image") is reader
    assert reader.set_batch_generator(list) is reader
    reader.print_config()
    printed = capsys.readouterr().out
    assert "teachers: ('x:1', 'y:2')" in printed
    assert "teacher_batch_size: 16" in printed
    assert "generator: batch" in printed


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DistillReader("image", ["total"]), "ins: expected a list of names, got the text"),
        (lambda: DistillReader(["image"], ["total"])(), "reader: nothing to read"),
        (lambda: DistillReader(["image"], ["total"]).set_batch_generator(7), "reader: expected"),
        (
            lambda: DistillReader(["image"], ["total"]).set_batch_generator(list)(),
            "teachers: none are given; call set_fixed_teacher",
        ),
        (
            lambda: DistillReader(["image"], ["total"]).set_serving_conf_file("nowhere"),
            "conf_file: nowhere is not a file",
        ),
        (
            lambda: DistillReader(["image"], ["total"]).set_no_teacher_timeout(
                1,
                "wait",  # type: ignore[arg-type]
            ),
            "policy: ",
        ),
        (lambda: DistillReader(["image"], ["total"]).set_timeout(0), "timeout_s: expected seconds"),
        (lambda: DistillReader(["image"], ["total"]).set_padding("ids"), "padding: fields: 'ids'"),
        (
            lambda: DistillReader(["ids"], ["total"]).set_padding("ids", outputs=["x"]),
            "padding: outputs: 'x'",
        ),
        (
            lambda: DistillReader(["ids"], ["total"]).set_padding("ids", multiple_of=0),
            "padding: multiple_of",
        ),
        (
            lambda: DistillReader(["ids"], ["total"]).set_padding(3),  # type: ignore[arg-type]
            "padding: fields: .*got 3",
        ),
        (
            lambda: DistillReader(["ids"], ["total"]).set_max_memory(0.5),  # type: ignore[arg-type]
            "max_memory: mebibytes: expected an integer of 1 or more, got 0.5",
        ),
        (
            lambda: DistillReader(["ids"], ["total"]).set_dynamic_teacher(
                None,  # type: ignore[arg-type]
                "digits",
            ),
            "discovery_servers: expected texts .*got None",
        ),
    ],
)
def test_what_is_not_right_is_said_before_anything_starts(call: Callable[[], Any], words: str):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TeacherProcess]]:
    """Two that run when a test begins; it may end them."""
    folder = tmp_path_factory.mktemp("teachers")
    pair = [TeacherProcess(folder / "a"), TeacherProcess(folder / "b")]
    yield pair
    for teacher in pair:
        teacher.kill()


@pytest.fixture
def running(teachers: list[TeacherProcess]) -> list[TeacherProcess]:
    for teacher in teachers:
        if not teacher.is_running:
            teacher.start()
    for teacher in teachers:
        teacher.wait()
    return teachers


class Digits:
    """Batches of 16 whose number is in the pixels; checks each as it comes."""

    def __init__(self, teachers: list[TeacherProcess]) -> None:
        self.reader = DistillReader(["image", None], ["sum"])
        self.reader.set_fixed_teacher([teacher.endpoint for teacher in teachers])
        self.reader.set_batch_generator(self.batches)
        self.iterator = self.reader()
        self.count = 0

    def batches(self) -> Iterator[Any]:
        index = 0
        while True:
            yield np.full((16, 1, 28, 28), index % 500, np.float32), index
            index += 1

    def more(self, count: int) -> None:
        for _ in range(count):
            _, index, total = next(self.iterator)
            assert index == self.count
            np.testing.assert_array_equal(total, np.full((16, 1), 784.0 * (index % 500)))
            self.count += 1


@pytest.fixture
def digits(running: list[TeacherProcess]) -> Iterator[Digits]:
    reading = Digits(running)
    reading.more(50)
    yield reading
    reading.iterator.close()
    wait_until(lambda: not reader_threads(), what="also those that were connecting have ended")


def test_killing_one_of_two_teachers_loses_and_doubles_nothing(digits, running):
    running[0].kill()
    digits.more(3000)


def test_when_the_last_teacher_died_and_is_back_reading_goes_on(digits, running):
    for teacher in running:
        teacher.kill()
    running[1].start()
    digits.more(3000)


def test_a_teacher_that_hangs_keeps_nothing_back(digits, running):
    running[0].send(signal.SIGSTOP)
    try:
        digits.more(3000)
    finally:
        running[0].send(signal.SIGCONT)
    digits.more(500)


def test_no_socket_is_left_open(running):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        digits = Digits(running)
        digits.more(5)
        digits.iterator.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # one may be connecting


def test_what_a_reader_held_is_free_when_it_is_left_not_when_the_collector_comes(running):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(10):
            digits = Digits(running)
            made: list[weakref.ref[Any]] = []
            digits.reader.set_batch_generator(_remembered(digits.batches(), made))
            digits.iterator.close()
            digits.iterator = digits.reader()
            digits.more(5)
            digits.iterator.close()
            # The generator's frame and the one that checks have the last ones that they saw.
            assert sum(array() is not None for array in made) <= 2 < len(made)
            wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        gc.enable()


def _remembered(batches: Iterator[Any], made: list[Any]) -> Callable[[], Iterator[Any]]:
    def generate() -> Iterator[Any]:
        for batch in batches:
            made.append(weakref.ref(batch[0]))
            yield batch

    return generate


def test_it_reads_in_the_workers_of_a_data_loader(running):
    pytest.importorskip("paddle")
    import paddle

    class Stream(paddle.io.IterableDataset):
        def __init__(self) -> None:
            self.reader = DistillReader(["image", None], ["sum"])
            self.reader.set_fixed_teacher([teacher.endpoint for teacher in running])
            self.reader.set_sample_generator(self.samples)

        def samples(self) -> Iterator[Any]:
            worker = paddle.io.get_worker_info()
            for index in range(worker.id, 60, worker.num_workers):
                yield np.full((1, 28, 28), index, np.float32), index

        def __iter__(self):
            return self.reader()

    loader = paddle.io.DataLoader(Stream(), batch_size=5, num_workers=2, return_list=True)
    for _ in range(2):  # epochs
        seen = []
        for _, index, total in loader:
            np.testing.assert_array_equal(total.numpy()[:, 0], 784.0 * index.numpy())
            seen += index.tolist()
        assert sorted(seen) == list(range(60))


LOADS = """
import sys
import numpy as np
from distill_reader import DistillReader

class Numbers(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index == BROKEN:
            raise ValueError("it is broken")
        return np.full((1, 28, 28), index, "f4"), np.int64(index)

BROKEN = None
reader = DistillReader(["image", None], ["sum"]).set_max_memory(1)
reader.set_fixed_teacher(TEACHERS)

def loader(**options):
    return DataLoader(Numbers(), batch_size=4, num_workers=2, **options)

def batches():
    yield from loader()

def read(given, most=99):
    seen = []
    for _, index, total in reader.set_batch_generator(given)():
        assert (np.asarray(total).ravel() == 784 * np.asarray(index).ravel()).all()
        seen += np.asarray(index).ravel().tolist()
        most -= 1
        if not most:
            break
    return seen

"""


@pytest.mark.parametrize("framework", ["paddle", "torch"])
@pytest.mark.parametrize(
    ("steps", "code", "said"),
    [
        pytest.param(
            "for _ in range(2):\n    assert read(given, 3) == list(range(12))\n"
            "    assert read(given) == list(range(60))",
            0, "", id="epochs, and one that ends early",
        ),
        pytest.param("rest = reader.set_batch_generator(given)()\nnext(rest)\nsys.exit(7)", 7, "",
                     id="ends amid an epoch"),
        pytest.param("BROKEN = 20\nread(given)", 1, "ReaderError", id="a broken sample"),
        pytest.param(  # far more are read ahead than files may be open, or memory may be mapped
            "import resource, time\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
            "Numbers.__len__ = lambda self: 1200\n"
            "rest = reader.set_max_memory(64).set_batch_generator(given)()\n"
            "next(rest)\n"
            "time.sleep(1)\n"
            "assert sum('/dev/shm/' in line for line in open('/proc/self/maps')) < 100\n"
            "assert len(list(rest)) == 299",
            0, "", id="many small batches",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("given", ["lambda: loader()", "loader(persistent_workers=True)"])
def test_a_frameworks_loader_with_workers_may_be_the_generator(
    running, tmp_path: Path, framework: str, given: str, steps: str, code: int, said: str
):
    if framework == "paddle" and "persistent" in given:  # its own loses count after an early end
        steps = steps.replace("    assert read(given, 3) == list(range(12))\n", "")
    out = run_loader(running, tmp_path, framework, f"given = {given}\n{steps}", code)
    assert said in out


class KeptLoader:
    """As a DataLoader with persistent workers, whose passes share an iterator; slow at one item."""

    persistent_workers = True

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self._threads = self._at = 0

    def __iter__(self) -> Iterator[Any]:
        assert not self._threads, "the pass before is still within it"
        self._at = 0
        return iter(self._next, None)

    def _next(self) -> Any:
        self._threads += 1
        try:
            if self._at == 1:
                self.goes_on.wait(20)
            self._at += 1
            return (image(self._at, 1), self._at) if self._at < 4 else None
        finally:
            self._threads -= 1


def test_a_pass_waits_for_one_that_was_cut_short_within_a_slow_loader_that_keeps_its_workers(
    make, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.session._GENERATOR_CLOSE_S", 0.1)
    loader = KeptLoader()
    reader = make(FakeTeacher("a:1")).set_batch_generator(loader)
    for _ in reader():
        break
    timer = threading.Timer(0.3, loader.goes_on.set)
    timer.start()
    assert [index for _, index, _ in reader()] == [1, 2, 3]
    timer.join()


def test_a_generator_that_stops_as_it_begins_is_an_error_and_no_empty_epoch(running):
    reader = DistillReader(["image"], ["sum"])
    reader.set_fixed_teacher([teacher.endpoint for teacher in running])
    reader.set_batch_generator(lambda: next(iter(())))
    with pytest.raises(ReaderError, match=r"generator failed: .*StopIteration"):
        list(reader())


def test_a_paddle_loader_with_workers_within_a_generator_is_named_with_the_remedy(
    running, tmp_path: Path
):
    out = run_loader(running, tmp_path, "paddle", "read(batches)", 1)
    assert "ReaderError" in out
    assert "DataLoader of Paddle with workers: these are started by the main thread" in out


def run_loader(
    teachers: list[TeacherProcess], folder: Path, framework: str, steps: str, code: int
) -> str:
    """Run a program of LOADS and `steps`, which must end by itself; return what it writes."""
    pytest.importorskip(framework)
    module = {"paddle": "paddle.io", "torch": "torch.utils.data"}[framework]
    loads = LOADS.replace("TEACHERS", repr([teacher.endpoint for teacher in teachers]))
    script = folder / "loads.py"
    script.write_text(f"from {module} import Dataset, DataLoader\n{loads}{steps}\n")
    with (folder / "out").open("w+") as out:
        program = warm.start([str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}, out.fileno())
        try:
            ended = program.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # its workers, too
    said = (folder / "out").read_text()
    assert ended == code, said
    return said


def test_control_c_ends_a_program_that_waits_for_its_teachers(running, tmp_path: Path):
    script = f"""
import itertools, threading
import numpy as np
from distill_reader import DistillReader
reader = DistillReader(["image"], ["sum"]).set_fixed_teacher({[t.endpoint for t in running]!r})
reader.set_batch_generator(lambda: ((np.zeros((4, 1, 28, 28), "f4"),) for _ in itertools.count()))
try:
    for count, _ in enumerate(reader()):
        if count == 1000:
            print("reads", flush=True)
except KeyboardInterrupt:
    for thread in threading.enumerate():
        if thread.name.startswith("edl"):
            thread.join(20)  # one may be connecting to the teacher that has just gone silent
    print([t.name for t in threading.enumerate() if t.name.startswith("edl")])
"""
    program = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "reads\n"
        for teacher in running:
            teacher.send(signal.SIGSTOP)
        wait_until(lambda: _sleeps(program.pid), what="it waits for its teachers")
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=120)
    finally:
        program.kill()
        for teacher in running:
            teacher.send(signal.SIGCONT)
    assert program.returncode == 0
    assert out == "[]\n"


def _sleeps(pid: int) -> bool:
    """Whether a process takes no time of the processor for a while."""
    spent = psutil.Process(pid).cpu_times()
    time.sleep(0.1)
    return psutil.Process(pid).cpu_times() == spent
