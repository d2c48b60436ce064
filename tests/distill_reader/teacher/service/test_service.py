import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    UsageError,
)
from distill_reader.protocols.arena import ArenaError, OwnArena, attach
from distill_reader.teacher.predictor.backend import Array, Device
from distill_reader.teacher.service.requests import Buffer, InferAnswer, InferRequest, SharedTensor
from distill_reader.teacher.service.service import PredictorService, ServiceConfig
from tests.support import ROOT, standing_still, wait_until

TOYS = "tests.distill_reader.teacher.toy_backends"
WAIT_S = 60.0


def config(folder: Path, toy: str, **changes: object) -> ServiceConfig:
    settings: dict[str, object] = {
        "models": (("toy", str(folder)),),
        "devices": (Device(),) * 2,
        "backend": f"{TOYS}:{toy}",
        "max_batch": 8,
        "memory_bytes": 1 << 20,
        "max_request_bytes": 1 << 18,
    }
    return ServiceConfig(**{**settings, **changes})  # type: ignore[arg-type]


def started(settings: ServiceConfig, *on_outdated: Callable[[], None]) -> PredictorService:
    service = PredictorService(settings, *on_outdated)
    service.start(WAIT_S)
    return service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def service(folder) -> Iterator[PredictorService]:
    service = started(config(folder, "moody"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def open_service(folder) -> Iterator[PredictorService]:
    service = started(config(folder, "doubled"))
    yield service
    service.close()


@pytest.fixture(autouse=True)
def nothing_is_kept(request) -> Iterator[None]:
    """After each test every byte of shared memory is back."""
    yield
    for name in {"service", "open_service"} & set(request.fixturenames):
        used = request.getfixturevalue(name)
        wait_until(partial(is_empty, used), WAIT_S)


def is_empty(service: PredictorService) -> bool:
    return memory_of(service) == 0


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """Return a function that lists the processes that this test started and that run."""
    before = set(psutil.Process().children())

    def running() -> list[psutil.Process]:
        return [process for process in psutil.Process().children() if process not in before]

    return running


def memory_of(service: PredictorService) -> float:
    return value(service, "edl_teacher_memory_bytes")


def value(service: PredictorService, name: str, **labels: str) -> float:
    found = service.metrics.registry.get_sample_value(name, labels)
    assert found is not None, f"no metric {name} {labels}"
    return found


def images(*firsts: float) -> Array:
    """Return a (n, 4) array; column 0 as given, the others counting up."""
    rows = np.arange(len(firsts) * 4, dtype=np.float32).reshape(-1, 4) / 16
    rows[:, 0] = firsts
    return rows


def ask(
    service: PredictorService, image: Array, *fetch: str, model: str = "toy"
) -> Future[InferAnswer]:
    return service.submit(
        InferRequest(model=model, inputs={"image": image}, fetch=fetch, protocol="test")
    )


def outputs(future: Future[InferAnswer]) -> Mapping[str, Any]:
    """Return copies of the outputs, and give their memory back."""
    answer = future.result(WAIT_S)
    copies = {name: array.copy() for name, array in answer.outputs.items()}
    answer.release()
    return copies


def assert_sums(got: Mapping[str, Any], image: Array) -> None:
    np.testing.assert_allclose(got["sum"], image.reshape(len(image), -1).sum(1, keepdims=True))


def pids(service: PredictorService) -> set[int]:
    """Return who answers: asks for single samples until both have."""
    seen: set[int] = set()
    futures = [ask(service, images(1), "pid") for _ in range(20)]
    for future in futures:
        seen |= set(outputs(future)["pid"].ravel().tolist())
    return seen


def test_a_request_gets_the_outputs_that_it_names_in_its_order(service):
    image = images(1, 2, 3)
    got = outputs(ask(service, image, "mean", "sum"))
    assert list(got) == ["mean", "sum"]
    assert_sums(got, image)
    np.testing.assert_allclose(got["mean"] * 4, got["sum"])


def test_a_request_that_names_no_output_gets_all(service):
    assert list(outputs(ask(service, images(1)))) == ["sum", "mean", "pid", "batch"]


def test_tensors_may_go_by_the_names_of_the_model_itself(service):
    image = images(5)
    request = InferRequest(model="toy", inputs={"x_0": image}, fetch=("y_0",))
    np.testing.assert_allclose(outputs(service.submit(request))["y_0"], image.sum(1)[:, None])


def test_the_only_model_need_not_be_named(service):
    assert_sums(outputs(ask(service, images(2), model="")), images(2))


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 100])
def test_requests_of_any_size_come_back_whole_and_in_order(service, samples):
    image = images(*range(samples))
    got = outputs(ask(service, image))
    assert_sums(got, image)
    assert got["batch"].max() <= 8


def test_small_requests_are_computed_together(service):
    for _ in range(200):
        futures = [ask(service, images(number), "batch", "sum") for number in range(16)]
        answers = [outputs(future) for future in futures]
        for number, answer in enumerate(answers):
            assert_sums(answer, images(number))
        if max(answer["batch"].item() for answer in answers) > 1:
            return
    pytest.fail("200 times 16 requests at once, and no two were computed together")


def test_what_a_backend_computes_in_place_does_not_change_a_request_that_another_gets(tmp_path):
    service = started(config(tmp_path, "in_place", devices=(Device(),)))
    try:
        answer = outputs(ask(service, images(1, 2, 3)))
        assert (tmp_path / "failed").exists()
        assert_sums(answer, 2 * images(1, 2, 3))
    finally:
        service.close()


def test_a_model_whose_answers_depend_on_others_samples_is_refused_with_the_remedy(folder):
    service = started(config(folder, "training", devices=(Device(),)))
    try:
        outputs(ask(service, images(1)))  # of one alone nothing can be told
        for _ in range(2):
            with pytest.raises(BadRequest, match=r"output sum: .* depends on .* call its eval"):
                outputs(ask(service, images(1, 2, 3, 5)))
    finally:
        service.close()


def test_a_model_that_was_refused_answers_no_sample_alone_either(folder):
    settings = config(folder, "training", max_batch=2, batch_timeout_s=3600.0)
    service = started(settings)
    try:
        joined = [ask(service, images(number)) for number in (1, 5)]
        for future in joined:  # it would be right to ask each alone if one of them were at fault
            with pytest.raises(BadRequest, match=r"model toy: output sum: .* depends on"):
                future.result(WAIT_S)
        with pytest.raises(BadRequest, match=r"model toy: output sum: .* depends on"):
            ask(service, images(3))
        assert memory_of(service) == 0
    finally:
        service.close()


def test_a_model_whose_answers_differ_each_time_answers_no_sample_alone(tmp_path):
    (tmp_path / "shape").write_text("64")
    service = started(config(tmp_path, "dropping", devices=(Device(),)))
    image = np.linspace(0, 1, 64, dtype=np.float32)[None]
    try:
        with pytest.raises(BadRequest, match=r"model toy: output sum: .* differs each time"):
            # Two answers may be nearly the same by chance.
            [outputs(ask(service, image)) for _ in range(8)]
    finally:
        service.close()


def test_a_quantized_model_whose_rounding_depends_on_other_samples_is_served(folder):
    service = started(config(folder, "quantized", devices=(Device(),)))
    try:
        assert len(outputs(ask(service, images(1, 2, 3, 5, 4, 6, 2, 9)))["sum"]) == 8
    finally:
        service.close()


def test_bytes_in_shared_memory_are_not_copied_and_given_back_once(service):
    image = images(*range(6))
    buffer = service.allocate(image.nbytes + 16)
    buffer.view[16:] = image.tobytes()
    before = memory_of(service)
    tensor = SharedTensor(buffer=buffer, offset=16, dtype="float32", shape=image.shape)
    future = service.submit(InferRequest(model="toy", inputs={"image": tensor}, fetch=("sum",)))
    answer = future.result(WAIT_S)
    assert memory_of(service) <= before
    np.testing.assert_allclose(answer.outputs["sum"], image.sum(1, keepdims=True))
    answer.release()


def test_the_students_own_memory_reaches_the_predictors(service):
    image = images(*range(20))
    student = OwnArena(1 << 16)
    own = student.allocate(image.nbytes)
    own.view[:] = image.tobytes()
    arena = attach(os.dup(student.fd))
    for _ in range(3):
        released: list[object] = []
        piece = arena.slice(own.offset, own.size, released.append)
        tensor = SharedTensor(buffer=piece, offset=0, dtype="float32", shape=image.shape)
        request = InferRequest(model="toy", inputs={"image": tensor}, fetch=("sum",))
        assert_sums(outputs(service.submit(request)), image)
        assert released == [piece]
    arena.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(arena.fd)
    assert_sums(outputs(ask(service, image)), image)
    assert not [path for pid in pids(service) for path in maps(pid) if "edl-student" in path]
    own.release()
    student.close()


def test_what_a_student_shared_is_free_when_it_leaves_not_when_the_collector_comes(service):
    image = images(*range(20))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            student = OwnArena(1 << 16, "edl-gone")
            own = student.allocate(image.nbytes)
            own.view[:] = image.tobytes()
            arena = attach(os.dup(student.fd))
            piece = arena.slice(own.offset, own.size)
            inputs = {"image": shared(piece, 0, *image.shape)}
            future = service.submit(InferRequest(model="toy", inputs=inputs, fetch=("sum",)))
            assert_sums(outputs(future), image)
            own.release()
            student.close()
            arena.close()
            del own, student, arena, piece, inputs, future
        wait_until(lambda: not any("edl-gone" in path for path in maps(os.getpid())))
    finally:
        gc.enable()


def test_memory_that_a_student_has_sealed_against_writing_ends_no_predictor(service):
    image = images(*range(4))
    fd = os.memfd_create("edl-student", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    os.pwrite(fd, image.tobytes(), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    restarts = value(service, "edl_teacher_predictor_restarts_total")
    try:
        arena = attach(fd, is_writable=False)
    except ArenaError:  # as kernels before 6.7 say
        return
    tensor = SharedTensor(
        buffer=arena.slice(0, image.nbytes), offset=0, dtype="float32", shape=image.shape
    )
    request = InferRequest(model="toy", inputs={"image": tensor}, fetch=("sum",))
    assert_sums(outputs(service.submit(request)), image)
    assert value(service, "edl_teacher_predictor_restarts_total") == restarts
    arena.close()


def maps(pid: int) -> list[str]:
    return [entry.path for entry in psutil.Process(pid).memory_maps(grouped=False)]


class PlainBuffer:
    """Memory that is not shared: what a protocol without the arena would hand in."""

    def __init__(self, content: bytes) -> None:
        self.view = memoryview(bytearray(content))
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def test_a_buffer_of_another_kind_is_copied(service):
    image = images(1, 2)
    buffer = PlainBuffer(b"??" + image.tobytes())
    tensor = SharedTensor(buffer=buffer, offset=2, dtype="float32", shape=image.shape)
    got = outputs(service.submit(InferRequest(model="toy", inputs={"image": tensor})))
    assert_sums(got, image)
    assert buffer.releases == 1


def shared(buffer: Buffer, offset: int, *shape: int) -> SharedTensor:
    return SharedTensor(buffer=buffer, offset=offset, dtype="float32", shape=shape)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda b: {"image": np.zeros((2, 5), np.float32)}, r"image: expected shape \[N, 4\], got"),
        (lambda b: {"image": np.zeros((2, 4))}, "image: expected float32 or float16, got float64"),
        (lambda b: {"image": np.zeros((0, 4), np.float32)}, r"image: has 0 samples"),
        (lambda b: {"image": np.float32(3)}, "image: expected shape"),
        (lambda b: {}, "image: is missing; model toy needs it"),
        (lambda b: {"picture": images(1)}, "has no input 'picture'; it has image"),
        (lambda b: {"image": images(1), "x_0": images(1)}, "image: came twice"),
        (lambda b: {"image": shared(b, 0, 5, 4)}, "80 bytes at offset 0 do not fit"),
        (lambda b: {"image": shared(b, 60, 1, 4)}, "16 bytes at offset 60 do not fit"),
        (lambda b: {"image": shared(b, -4, 1, 4)}, "at offset -4 do not fit"),
        (lambda b: {"image": shared(b, 0, -1, 4)}, "impossible|-1 samples"),
        (lambda b: {"image": shared(b, 0, 2**70, 4)}, "impossible|samples"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_names_the_tensor(service, make, text):
    buffer = service.allocate(64)
    inputs = make(buffer)
    before = value_or_zero(service, "refused")
    with pytest.raises(BadRequest, match=text):
        service.submit(InferRequest(model="toy", inputs=inputs, protocol="test"))
    assert value_or_zero(service, "refused") == before + 1
    buffer.release()  # of those that did not name it


def value_or_zero(service: PredictorService, outcome: str) -> float:
    labels = {"protocol": "test", "model": "toy", "outcome": outcome}
    return service.metrics.registry.get_sample_value("edl_teacher_requests_total", labels) or 0.0


def test_unknown_models_and_outputs_are_refused_with_those_there_are(service):
    with pytest.raises(ModelNotFound, match="no model 'other' is served here; there is toy"):
        ask(service, images(1), model="other")
    with pytest.raises(BadRequest, match="has no output 'logits'; it has sum, mean"):
        ask(service, images(1), "logits")


def test_more_bytes_than_a_request_may_have_are_refused(service):
    with pytest.raises(BadRequest, match=r"at most 262144 are taken.*--max_request_mb"):
        service.allocate(1 << 19)


def test_full_memory_is_said_at_once(service):
    held = [service.allocate(1 << 18) for _ in range(4)]
    with pytest.raises(TeacherBusy, match="no room"):
        service.allocate(1)
    with pytest.raises(TeacherBusy, match="no room"):
        ask(service, images(1))
    for buffer in held:
        buffer.release()
    assert_sums(outputs(ask(service, images(1))), images(1))


@pytest.mark.parametrize(
    ("mood", "text"),
    [
        (-1, "model toy: no negative images"),
        (-4, "output sum: expected float32, got float64"),
        (-5, r"output sum: has shape \[0, 1\] for 1 samples"),
        (-6, "output mean: the model did not return it"),
        (-8, "output mean: expected an array of numpy, got a list"),
        (-9, "the backend returned a NoneType, not a dict of arrays by output"),
        (-10, r"output sum: expected shape \[N, 1\], as the model's spec says, got \[1\]"),
        (-11, r"output sum: expected shape \[N, 1\], as the model's spec says, got \[1, 2\]"),
    ],
)
def test_what_the_model_refuses_fails_alone(service, mood, text):
    firsts = [1, 2, mood, 4, 5, 6]
    futures = [ask(service, images(first)) for first in firsts]
    for first, future in zip(firsts, futures, strict=True):
        if first == mood:
            with pytest.raises(BadRequest, match=text):
                future.result(WAIT_S)
        else:
            assert_sums(outputs(future), images(first))


def test_a_long_request_of_which_one_sample_is_refused_fails_once(service):
    with pytest.raises(BadRequest, match="no negative images"):
        ask(service, images(*range(50), -1, *range(50))).result(WAIT_S)


@pytest.mark.parametrize("mood", [-2, -3], ids=["the device is lost", "the process is killed"])
def test_a_request_that_ends_predictors_fails_and_its_neighbours_do_not(service, mood):
    restarts = value(service, "edl_teacher_predictor_restarts_total")
    firsts = [1, 2, mood, 4, 5, 6]
    futures = [ask(service, images(first)) for first in firsts]
    for first, future in zip(firsts, futures, strict=True):
        if first == mood:
            with pytest.raises(TeacherFailed, match="2 predictors ended"):
                future.result(WAIT_S)
        else:
            assert_sums(outputs(future), images(first))
    assert value(service, "edl_teacher_predictor_restarts_total") >= restarts + 2
    wait_until(lambda: value(service, "edl_teacher_predictors_ready") == 2, WAIT_S)


def test_a_cancelled_request_is_dropped_while_it_waits(folder, children):
    service = started(config(folder, "sums", devices=(Device(),), max_batch=1))
    with standing_still(children()):
        futures = [ask(service, images(number)) for number in range(20)]
        cancelled = [future for future in futures if future.cancel()]
    assert len(cancelled) >= 10
    for future in futures:
        if future not in cancelled:
            outputs(future)
    assert value_or_zero(service, "cancelled") == len(cancelled)
    assert service.drain(WAIT_S)
    wait_until(partial(is_empty, service), WAIT_S)  # two were computed all the same
    service.close()


def test_of_a_request_whose_client_has_left_no_more_is_computed(folder, children):
    service = started(config(folder, "sums", devices=(Device(),), max_batch=1))
    with standing_still(children()):
        large = ask(service, images(*range(100)))
        assert large.cancel()
    outputs(ask(service, images(1)))
    assert value(service, "edl_teacher_samples_total", model="toy") <= 4  # two were under way
    assert service.drain(WAIT_S)
    wait_until(partial(is_empty, service), WAIT_S)
    service.close()


def test_a_cancelled_request_that_others_share_a_refused_batch_with_gives_its_memory_back(
    folder, children
):
    settings = config(folder, "moody", devices=(Device(),), batch_timeout_s=0.2)
    service = started(settings)
    with standing_still(children()):
        futures = [ask(service, images(each)) for each in (5, -1, 6)]
        wait_until(lambda: value(service, "edl_teacher_queue_requests") == 0, WAIT_S)
        assert futures[0].cancel()
    with pytest.raises(BadRequest, match="no negative"):
        futures[1].result(WAIT_S)
    assert_sums(outputs(futures[2]), images(6))
    wait_until(partial(is_empty, service), WAIT_S)
    service.close()


def test_samples_without_a_value_are_bounded_as_all_others_are(folder):
    service = started(config(folder, "lengths"))
    empty = np.empty((1 << 30, 0), np.int64)
    with pytest.raises(RequestTooLarge, match="1073741824 samples without a value; at most 65536"):
        service.submit(InferRequest(model="toy", inputs={"ids": empty}))
    got = outputs(service.submit(InferRequest(model="toy", inputs={"ids": empty[:3]})))
    assert got["length"].tolist() == [[0]] * 3
    service.close()


def test_a_full_queue_is_said_at_once(folder, children):
    service = started(config(folder, "sums", devices=(Device(),), max_batch=1, max_queue=4))
    futures: list[Future[InferAnswer]] = []

    def ask_for_ever() -> None:
        while True:
            futures.append(ask(service, images(1)))

    with (
        standing_still(children()),
        pytest.raises(TeacherBusy, match="4 requests wait already"),
    ):
        ask_for_ever()
    assert 4 <= len(futures) <= 8
    for future in futures:
        assert_sums(outputs(future), images(1))
    assert memory_of(service) == 0
    service.close()


def test_draining_finishes_what_waits_and_takes_no_more(folder, children):
    service = started(config(folder, "sums", max_batch=1))
    was_ready = service.is_ready
    with standing_still(children()):
        futures = [ask(service, images(number)) for number in range(10)]
        assert not service.drain(0.0)
    assert (was_ready, service.is_ready) == (True, False)
    with pytest.raises(TeacherBusy, match="the teacher ends"):
        ask(service, images(1))
    assert service.drain(WAIT_S)
    for number, future in enumerate(futures):
        assert future.done()
        assert_sums(outputs(future), images(number))
    service.close()


def test_closing_fails_what_waits_and_leaves_no_process_descriptor_or_thread(folder, children):
    gc.collect()  # what earlier tests left
    threads, fds, arenas = set(threading.enumerate()), open_fds(), arenas_mapped()
    service = started(config(folder, "slow_sums", max_batch=1))
    processes = children()
    assert len(processes) == 2
    futures = [ask(service, images(number)) for number in range(10)]
    service.close()
    service.close()
    for future in futures:
        try:
            future.result(WAIT_S).release()
        except TeacherBusy as error:
            assert "the teacher ends" in str(error)  # noqa: PT017 - some were answered in time
    assert not any(process.is_running() for process in processes)
    assert set(threading.enumerate()) == threads
    del service, futures, future  # the answers' arrays keep the memory mapped
    gc.collect()
    assert open_fds() == fds
    assert arenas_mapped() == arenas


def arenas_mapped() -> int:
    return sum("edl-arena" in path for path in maps(os.getpid()))


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


FRONT = """
import sys, time
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.service.service import PredictorService, ServiceConfig

folder, backend = sys.argv[1:]
service = PredictorService(
    ServiceConfig(models=(("toy", folder),), devices=(Device(),) * 2, backend=backend)
)
service.start(60)
print("ready", flush=True)
time.sleep(600)
"""


def test_predictors_go_with_a_front_that_is_killed(folder):
    command = [sys.executable, "-c", FRONT, str(folder), f"{TOYS}:slow_sums"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as front:
        assert front.stdout is not None
        assert front.stdout.readline() == b"ready\n"
        predictors = psutil.Process(front.pid).children(recursive=True)
        assert len(predictors) == 2
        front.kill()
    wait_until(lambda: not any(process.is_running() for process in predictors), WAIT_S)


def test_predictors_killed_under_load_leave_no_request_wrong_or_without_answer(folder, children):
    service = started(config(folder, "sums", memory_bytes=1 << 24))
    end = time.monotonic() + 2.0
    wrong: list[object] = []
    answered = [0] * 4

    def student(number: int) -> None:
        step = 0
        while time.monotonic() < end or answered[number] < 20 or (kills < 2 and not wrong):
            step += 1
            image = images(*(number * 1000 + step * 10 + np.arange(1 + step % 30)))
            try:
                assert_sums(outputs(ask(service, image)), image)
                answered[number] += 1
            except TeacherFailed:  # both that tried it were killed: a student asks again
                continue
            except (AssertionError, DistillError) as error:
                wrong.append(error)
                return

    kills = 0
    students = [threading.Thread(target=student, args=(number,)) for number in range(4)]
    for thread in students:
        thread.start()
    while (time.monotonic() < end or kills < 2) and not wrong:
        for process in children():
            if value(service, "edl_teacher_predictors_ready") == 2:
                with contextlib.suppress(psutil.NoSuchProcess):  # killed a moment ago
                    process.kill()
                    kills += 1
        time.sleep(0.02)
    for thread in students:
        thread.join()
    assert wrong == []
    assert service.drain(WAIT_S)
    assert memory_of(service) == 0
    service.close()


def test_a_teacher_that_gets_no_thread_for_a_new_predictor_keeps_the_others_and_tries_again(
    folder, children, monkeypatch
):
    service = started(config(folder, "sums"))
    killed, stays = children()
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("predictor-") and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    killed.kill()
    wait_until(lambda: refused, WAIT_S)
    wait_until(lambda: value(service, "edl_teacher_predictors_ready") == 2, WAIT_S)
    assert stays.is_running()
    image = images(1, 2, 3)
    assert_sums(outputs(ask(service, image)), image)
    service.close()


def test_a_predictor_that_hangs_is_replaced_and_its_request_answered_by_another(folder, children):
    service = started(config(folder, "sums", predict_timeout_s=8.0))
    hung = children()[0]
    hung.send_signal(signal.SIGSTOP)
    full = [images(*range(first, first + 8)) for first in range(6)]  # a batch each, for both
    futures = [ask(service, batch) for batch in full]
    for batch, future in zip(full, futures, strict=True):
        assert_sums(outputs(future), batch)
    assert not hung.is_running()
    assert value(service, "edl_teacher_predictor_restarts_total") >= 1
    service.close()


def test_a_predictor_that_finds_another_model_in_the_folder_says_what_to_do(
    tmp_path, children, caplog
):
    outdated = threading.Event()
    service = started(config(tmp_path, "sums", devices=(Device(),)), outdated.set)
    (tmp_path / "shape").write_text("5")
    children()[0].kill()
    assert outdated.wait(60)
    assert "files were replaced; start this server again" in caplog.text
    assert service.is_outdated
    assert not service.is_ready
    service.close()


def test_a_predictor_that_is_merely_idle_is_no_hung_one(folder, children):
    service = started(config(folder, "sums", predict_timeout_s=3.0, devices=(Device(),)))
    outputs(ask(service, images(1)))
    time.sleep(3.5)  # nothing is to happen: there is no condition to wait for
    outputs(ask(service, images(1)))
    assert value(service, "edl_teacher_predictor_restarts_total") == 0
    service.close()


@pytest.mark.full
def test_a_first_batch_that_is_computed_twice_may_take_its_time_each_time(folder):
    service = started(config(folder, "naps", predict_timeout_s=3.0, devices=(Device(),)))
    image = images(1, 2, 3)
    assert_sums(outputs(ask(service, image)), image)
    assert value(service, "edl_teacher_predictor_restarts_total") == 0
    service.close()


@pytest.mark.full
def test_time_in_which_the_teacher_was_stopped_does_not_count_against_its_predictors(
    folder, children
):
    service = started(config(folder, "sums", predict_timeout_s=3.0, devices=(Device(),)))
    image = images(1, 2, 3)
    with standing_still(children()):
        future = ask(service, image)
        time.sleep(0.3)
        with service._lock:  # nothing moves, as if this process stood still, too
            time.sleep(4.5)
    assert_sums(outputs(future), image)
    assert value(service, "edl_teacher_predictor_restarts_total") == 0
    service.close()


def test_an_open_axis_may_have_any_length(open_service):
    for length in (3, 5, 3, 0):
        ids = np.arange(20 * length, dtype=np.int64).reshape(20, length)
        scale = np.arange(20, dtype=np.int64)[:, None]
        request = InferRequest(model="toy", inputs={"scale": scale, "ids": ids})
        got = outputs(open_service.submit(request))
        np.testing.assert_array_equal(got["doubled"], ids * scale)
        assert got["count"].tolist() == [[length]] * 20


def test_requests_of_different_lengths_at_the_same_time_do_not_mix(open_service):
    futures = []
    for number in range(60):
        ids = np.full((1 + number % 4, 1 + number % 7), number, np.int64)
        scale = np.full((len(ids), 1), 3, np.int64)
        request = InferRequest(model="toy", inputs={"ids": ids, "scale": scale}, fetch=("doubled",))
        futures.append((ids, open_service.submit(request)))
    for ids, future in futures:
        np.testing.assert_array_equal(outputs(future)["doubled"], ids * 3)


def test_outputs_may_be_as_long_as_the_values_of_the_inputs_say(folder):
    service = started(config(folder, "repeated", devices=(Device(),), max_batch=4))

    def repeat(*counts: int, fetch: tuple[str, ...] = ()) -> Mapping[str, Any]:
        inputs = {"count": np.array(counts, np.int64)[:, None]}
        return outputs(service.submit(InferRequest(model="", inputs=inputs, fetch=fetch)))

    for count in (3, 5, 2, 2, 0, 7):
        got = repeat(count, count)
        assert got["ones"].shape == (2, count)
        assert got["ones"].all()
    # Samples beyond max_batch are computed apart: their outputs may be no one tensor.
    with pytest.raises(BadRequest, match="outputs of different shapes; send fewer samples"):
        repeat(1, 1, 1, 1, 2)
    assert repeat(1, 1, 1, 1, 2, fetch=("same",))["same"].ravel().tolist() == [1, 1, 1, 1, 2]
    assert repeat(6, 6)["ones"].shape == (2, 6)
    assert service.drain(WAIT_S)
    assert is_empty(service)
    service.close()


def test_a_request_that_fits_into_no_memory_with_its_answer_is_too_large(
    open_service: PredictorService,
):
    def double(samples: int) -> Future[InferAnswer]:  # 320 kB in and 320 kB out, of each sample
        ids = np.ones((samples, 40_000), np.int64)
        scale = np.ones((samples, 1), np.int64)
        return open_service.submit(InferRequest(model="", inputs={"ids": ids, "scale": scale}))

    with pytest.raises(RequestTooLarge, match=r"1280128 bytes with its answer, .*has 1048576"):
        double(2).result(WAIT_S)  # whose size is known once it is computed
    wait_until(partial(is_empty, open_service), WAIT_S)  # its predictor lets go of its inputs later
    assert outputs(double(1))["doubled"].all()
    with pytest.raises(RequestTooLarge, match="with its answer"):
        double(2)


def test_the_message_of_a_request_counts_until_its_inputs_are_copied(open_service):
    ids, scale = np.ones((1, 40_000), np.int64), np.ones((1, 1), np.int64)
    request = InferRequest(model="", inputs={"ids": ids, "scale": scale})
    assert outputs(open_service.submit(request))["doubled"].all()  # its size is known now
    message = open_service._allocate(1 << 19, ())
    with pytest.raises(RequestTooLarge, match="1164416 bytes with its answer"):
        open_service.submit(replace(request, message=message))
    message.release()


def test_a_request_that_is_too_large_leaves_room_for_others_of_its_inputs(folder):
    service = started(config(folder, "repeated", devices=(Device(),)))

    def repeat(count: int) -> Future[InferAnswer]:
        inputs = {"count": np.array([[count]], np.int64)}
        return service.submit(InferRequest(model="", inputs=inputs))

    with pytest.raises(RequestTooLarge):
        repeat(1 << 20).result(WAIT_S)
    assert outputs(repeat(3))["ones"].shape == (1, 3)
    service.close()


def test_inputs_must_have_the_same_number_of_samples(open_service):
    inputs = {"ids": np.zeros((3, 2), np.int64), "scale": np.zeros((2, 1), np.int64)}
    with pytest.raises(BadRequest, match="scale: has 2 samples, tensor ids has 3"):
        open_service.submit(InferRequest(model="toy", inputs=inputs))


def test_several_models_share_the_predictors(tmp_path, children):
    folders = [tmp_path / name for name in ("small", "large")]
    for path, shape in zip(folders, ("2", "2 3"), strict=True):
        path.mkdir()
        (path / "shape").write_text(shape)
    models = tuple((path.name, str(path)) for path in folders)
    service = started(config(tmp_path, "sums", models=models, devices=(Device(),)))
    assert len(children()) == 1
    assert {name: spec.inputs[0].shape for name, spec in service.models().items()} == {
        "small": (2,),
        "large": (2, 3),
    }
    wanted = [
        (model, np.full((3, *shape), number, np.float32))
        for number in range(20)
        for model, shape in (("small", (2,)), ("large", (2, 3)))
    ]
    futures = [ask(service, image, "sum", model=model) for model, image in wanted]
    for (_, image), future in zip(wanted, futures, strict=True):
        assert_sums(outputs(future), image)
    with pytest.raises(ModelNotFound, match="there is small, large"):
        ask(service, images(1), model="")
    service.close()


@pytest.mark.parametrize(
    ("toy", "error", "text"),
    [
        ("broken", ModelError, "model.json: is broken"),
        ("replaced", ModelError, "their files were replaced; start this server again"),
        ("crashing", ModelError, "ended with exit code 7 while it loaded the models"),
        ("no_such_function", UsageError, "no_such_function.*expected module:function"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_start(folder, children, toy, error, text):
    with pytest.raises(error, match=text):
        started(config(folder, toy))
    assert children() == []


def test_a_start_that_takes_too_long_ends(folder, children):
    with pytest.raises(ModelError, match="not loaded within 0 s"):
        PredictorService(config(folder, "sums")).start(0.0)
    assert children() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"models": ()}, "--model: name at least one"),
        ({"models": (("a", "x"), ("a", "y"))}, "two models are called 'a'"),
        ({"devices": ()}, "--gpu_ids, --thread"),
        ({"max_batch": 0}, "--max_batch: must be at least 1, got 0"),
        ({"max_queue": 0}, "--max_queue"),
        ({"batch_timeout_s": -1.0}, "--batch_timeout_ms"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, changes: dict[str, object], text: str):
    with pytest.raises(UsageError, match=text):
        config(folder, "sums", **changes)


def test_the_metrics_tell_what_was_done(folder):
    service = started(config(folder, "sums", devices=(Device(),)))
    for _ in range(3):
        outputs(ask(service, images(*range(10))))
    with pytest.raises(BadRequest):
        ask(service, images(1).astype(np.float64))
    wait_until(lambda: value(service, "edl_teacher_samples_total", model="toy") == 30)
    assert value_or_zero(service, "ok") == 3
    assert value_or_zero(service, "refused") == 1
    assert value(service, "edl_teacher_batch_samples_sum", model="toy") == 30
    assert value(service, "edl_teacher_queue_seconds_count", model="toy") == 3
    assert b'edl_teacher_compute_seconds_bucket{le="0.5",model="toy"}' in service.metrics.text()
    service.close()


CALLS: tuple[Callable[[PredictorService], object], ...] = (
    lambda service: service.allocate(10),
    lambda service: ask(service, images(1)),
)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_service_is_busy(folder, call):
    service = started(config(folder, "sums", devices=(Device(),)))
    service.close()
    with pytest.raises(TeacherBusy, match="the teacher ends"):
        call(service)
