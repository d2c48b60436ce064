"""A reader whose teachers a discovery service names: real servers, teachers that come and go."""

import gc
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distill_reader import Discovered, DistillReader
from distill_reader.balance.addresses import registry_addresses
from distill_reader.balance.registry.registrar import RegistrarConfig, RegistrarThread
from distill_reader.balance.server.demand import demand_of
from distill_reader.balance.table import Student
from distill_reader.errors import BadRequest, NoTeacher, TeacherBusy, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.batches.meter import Meter
from distill_reader.student.pool import dynamic
from distill_reader.teacher.protocols.fast import FastLimits
from tests.distill_reader.balance.local_discovery import PATIENT, LocalDiscovery
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher
from tests.distill_reader.student.test_reader import exit_code_of_fork
from tests.support import wait_until

SPEC = ModelSpec(
    name="double",
    inputs=(TensorSpec(name="image", dtype="float32", shape=(2, 3)),),
    outputs=(TensorSpec(name="double", dtype="float32", shape=(2, 3)),),
    digest="one",
)


class Registered:
    """A teacher that is registered for as long as it runs."""

    def __init__(self, where: str, service: str = "svc", *, token: str = "") -> None:
        self.is_closed = False
        self.service = LocalService(SPEC, lambda inputs: {"double": inputs["image"] * 2})
        self._teacher = LocalTeacher(self.service, FastLimits(token=token))
        self.endpoint = self._teacher.endpoint
        self._registrar = RegistrarThread(
            RegistrarConfig(
                addresses=registry_addresses(where, "where"),
                service=service,
                server=self.endpoint,
                read_token=lambda: token,
                lease_s=20.0,  # does not end because the machine is busy
            ),
            lambda: True,
        )
        self._registrar.start()

    @property
    def answers(self) -> int:
        return len(self.service.protocols)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._registrar.stop()
            self._teacher.close()
            self.service.close()


class Batches:
    """A generator of numbered batches, until it is told to end."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def __call__(self) -> Iterator[tuple[np.ndarray, int]]:
        number = 0
        while not self.is_over.wait(0.002):
            yield np.full((4, 2, 3), number, np.float32), number
            number += 1


@pytest.fixture
def discovery(run):
    return run(LocalDiscovery)


@pytest.fixture
def reader(clean, monkeypatch) -> DistillReader:
    monkeypatch.setattr(dynamic, "LINGER_S", 0.0)
    return DistillReader(["image", None], ["double"])


def take(results, batches: int, first: int = 0) -> int:
    """Read so many batches, in order and each with its own prediction; return the next one."""
    for expected in range(first, first + batches):
        image, number, double = next(results)
        assert number == expected
        np.testing.assert_array_equal(double, 2 * image)
    return first + batches


def test_teachers_that_join_are_used_and_those_that_leave_are_not(discovery, reader, run):
    reader.set_dynamic_teacher([discovery.endpoint], "svc", require_max_teacher=4)
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    one = run(Registered, discovery.endpoint)
    at = take(results, 20)
    two = run(Registered, discovery.endpoint)
    wait_until(lambda: len(discovery.teachers()) == 2)
    while not two.answers:
        at = take(results, 1, at)
    one.close()
    before = two.answers
    while two.answers < before + 20:
        at = take(results, 1, at)
    batches.is_over.set()
    for image, _, double in results:
        np.testing.assert_array_equal(double, 2 * image)


@pytest.mark.full
def test_a_pass_that_a_fork_inherits_refuses_instead_of_waiting_for_ever(discovery, reader, run):
    run(Registered, discovery.endpoint)
    reader.set_dynamic_teacher([discovery.endpoint], "svc")
    reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])
    assert len(list(reader())) == 1
    inherited = reader()

    def read() -> int:
        with pytest.raises(UsageError, match="call it in that one, such as in __iter__"):
            next(inherited)
        return 7

    assert exit_code_of_fork(read) == 7
    assert exit_code_of_fork(lambda: len(list(reader()))) == 1


def test_a_new_token_in_the_file_is_shown_to_discovery_as_to_teachers(
    reader, run, tmp_path, monkeypatch
):
    monkeypatch.setattr("distill_reader.balance.client._REFUSED_RETRY_S", 0.1)
    monkeypatch.setenv("EDL_TEACHER_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("first\n")
    server = run(LocalDiscovery, config=replace(PATIENT, token="first"))
    teacher = run(Registered, server.endpoint, token="first")
    reader.set_dynamic_teacher([server.endpoint], "svc")
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = take(results, 10)
    (tmp_path / "token").write_text("second\n")
    server.close()
    teacher.close()
    server = run(LocalDiscovery, port=server.port, config=replace(PATIENT, token="second"))
    teacher = run(Registered, server.endpoint, token="second")
    while not teacher.answers:  # elsewhere than the one before
        at = take(results, 1, at)
    batches.is_over.set()
    results.close()


@pytest.mark.full
def test_a_student_whose_teacher_is_busy_for_ever_gets_another_one(
    discovery, reader, run, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry.UNUSABLE_S", 0.3)
    both = [run(Registered, discovery.endpoint) for _ in range(2)]
    wait_until(lambda: len(discovery.teachers()) == 2)
    reader.set_dynamic_teacher(discovery.endpoint, "svc", 1)
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = take(results, 10)
    used, other = sorted(both, key=lambda each: -each.answers)
    assert not other.answers
    used.service.refuse_with = TeacherBusy("no predictor of the teacher runs", delay_s=0.05)
    while not other.answers:
        at = take(results, 1, at)
    batches.is_over.set()
    take(results, 1, at)
    results.close()


@pytest.mark.full
def test_a_student_that_is_given_one_that_refuses_it_gets_another_one(
    discovery, reader, run, monkeypatch
):
    """As in a rolling update, where the next teacher in line serves another model already."""
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry.UNUSABLE_S", 0.3)
    three = [run(Registered, discovery.endpoint) for _ in range(3)]
    wait_until(lambda: len(discovery.teachers()) == 3)
    reader.set_dynamic_teacher(discovery.endpoint, "svc", 1)
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = take(results, 10)
    used = max(three, key=lambda each: each.answers)
    first, second = sorted((each for each in three if each is not used), key=lambda e: e.endpoint)
    first.service.add(replace(SPEC, name="another"))  # whoever names none is refused
    used.close()
    while not second.answers:
        at = take(results, 1, at)
    assert not first.answers
    batches.is_over.set()
    take(results, 1, at)
    results.close()


def test_if_all_that_discovery_has_refuse_the_consumer_hears_why(
    discovery, reader, run, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.pool.supervisor._OTHERS_S", 0.5)
    teacher = run(Registered, discovery.endpoint)
    teacher.service.add(replace(SPEC, name="another"))
    reader.set_dynamic_teacher(discovery.endpoint, "svc", 1)
    results = reader.set_batch_generator(Batches())()
    with pytest.raises(BadRequest, match="several models are served"):
        next(results)


def test_between_two_epochs_it_stays_a_student_and_keeps_its_teachers(
    discovery, reader, run, monkeypatch
):
    monkeypatch.setattr(dynamic, "LINGER_S", 60.0)
    for _ in range(2):
        run(Registered, discovery.endpoint)
    wait_until(lambda: len(discovery.teachers()) == 2)
    reader.set_dynamic_teacher(discovery.endpoint, "svc", 2)
    reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)] * 3)
    for _ in range(3):
        assert len(list(reader())) == 3
    (links,) = discovery.links().values()
    assert len(links) == 2
    assert discovery.server.balancer.students == 1
    monkeypatch.setattr(dynamic, "LINGER_S", 0.0)
    assert len(list(reader())) == 3


def test_services_that_are_combined_can_be_discovered(discovery, reader, run):
    run(Registered, discovery.endpoint)
    fixed = run(Registered, discovery.endpoint)
    services = {
        "found": Discovered(discovery.endpoint, "svc", 2),
        "fixed": fixed.endpoint,
    }
    reader.set_teachers_combined(services, weights={"found": 3}, of="logits")
    reader.set_batch_generator((np.full((4, 2, 3), i, np.float32), i) for i in range(50))
    take(reader(), 50)


def test_behind_the_last_epoch_it_leaves_after_a_while(discovery, reader, run, monkeypatch):
    monkeypatch.setattr(dynamic, "LINGER_S", 0.05)
    run(Registered, discovery.endpoint)
    reader.set_dynamic_teacher(discovery.endpoint, "svc")
    reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])
    for _ in range(2):  # and comes back
        assert len(list(reader())) == 1
        wait_until(lambda: not discovery.server.balancer.students)


def test_a_reader_that_is_forgotten_leaves(discovery, run):
    run(Registered, discovery.endpoint)
    reader = DistillReader(["image", None], ["double"]).set_dynamic_teacher(
        discovery.endpoint, "svc"
    )
    reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])
    assert len(list(reader())) == 1
    assert discovery.server.balancer.students == 1
    del reader
    gc.collect()
    wait_until(lambda: not discovery.server.balancer.students)


@pytest.mark.full
def test_discovery_that_is_away_is_not_noticed(discovery, reader, run):
    run(Registered, discovery.endpoint)
    reader.set_dynamic_teacher(discovery.endpoint, "svc")
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = take(results, 10)
    discovery.close()
    at = take(results, 50, at)
    again = run(LocalDiscovery, port=discovery.port)
    wait_until(lambda: len(again.links()) == 1 and all(again.links().values()))
    take(results, 50, at)


def test_it_may_ask_redis_itself(redis_server, reader, run):
    teacher = run(Registered, redis_server.url)
    reader.set_dynamic_teacher([redis_server.url], "svc")
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = take(results, 10)
    redis_server.kill()
    at = take(results, 20, at)
    redis_server.start()
    take(results, 20, at)
    assert teacher.answers
    results.close()


def test_no_server_and_no_teacher_end_nothing_but_what_was_asked_for(reader, free_endpoint):
    reader.set_dynamic_teacher(free_endpoint, "svc").set_no_teacher_timeout(0.3)
    results = reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])()
    words = rf"service svc: discovery server {free_endpoint}: .*failed"
    with pytest.raises(NoTeacher, match=words):
        next(results)


def test_a_service_without_teachers_is_named(discovery, reader):
    reader.set_dynamic_teacher(discovery.endpoint, "unheard").set_no_teacher_timeout(1.0)
    results = reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])()
    with pytest.raises(NoTeacher, match="service unheard has no teacher"):
        next(results)


def test_the_environment_has_the_last_word(discovery, reader, run, monkeypatch):
    run(Registered, discovery.endpoint)
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", discovery.endpoint)
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "svc")
    monkeypatch.setenv("PADDLE_DISTILL_MAX_TEACHER", "3")
    reader.set_fixed_teacher("10.255.255.1:1")
    reader.set_batch_generator([(np.ones((4, 2, 3), np.float32), 0)])
    results = reader()
    next(results)
    (student,) = discovery.server.balancer.view.services["svc"].students.values()
    assert student.require == 3
    assert not list(results)


@pytest.mark.full
def test_the_servers_hear_how_it_is_fed(discovery, reader, run, monkeypatch):
    monkeypatch.setattr("distill_reader.balance.client.REPORT_S", 0.05)
    run(Registered, discovery.endpoint)
    reader.set_dynamic_teacher(discovery.endpoint, "svc")
    batches = Batches()
    results = reader.set_batch_generator(batches)()
    at = 0

    def reported() -> list[Student]:
        nonlocal at
        at = take(results, 1, at)
        known = discovery.server.balancer.view.services.get("svc")
        return [each for each in known.students.values() if each.measured] if known else []

    wait_until(reported)
    (student,) = reported()
    assert student.samples_per_s is not None
    assert student.samples_per_s > 0
    assert student.wait_share is not None
    assert 0 <= student.wait_share <= 1
    (measured,) = student.measured.values()
    assert measured.samples_per_s > 0
    assert 0 < measured.busy_share <= 1


@pytest.mark.full
@pytest.mark.parametrize("services", [["svc"], ["a", "b"]])
@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(None, id="no cache"),
        pytest.param({}, id="teachers tell the version"),
        pytest.param({"teacher_version": "v1"}, id="the version is given"),
    ],
)
def test_a_student_without_a_teacher_asks_each_service_for_one(
    discovery, clean, run, monkeypatch, tmp_path, services: list[str], cache: dict[str, Any] | None
):
    """Teachers on demand are started for it alone: there are none before."""
    monkeypatch.setattr(dynamic, "LINGER_S", 0.0)
    monkeypatch.setattr("distill_reader.balance.client.REPORT_S", 0.05)
    reader = DistillReader(["image", "id"], ["double"])
    if len(services) == 1:
        reader.set_dynamic_teacher(discovery.endpoint, services[0])
    else:
        found_services = {each: Discovered(discovery.endpoint, each) for each in services}
        reader.set_teachers_combined(found_services, of="logits")
    if cache is not None:
        reader.set_cache(tmp_path, id="id", **cache)
    is_read = threading.Event()

    def batches() -> Iterator[Any]:
        is_read.wait(30)
        yield np.ones((4, 2, 3), np.float32), np.arange(4)

    def wait_shares() -> list[float]:
        view = discovery.server.balancer.view.services
        demands = [demand_of(each, view[each]) for each in services if each in view]
        return [demand["wait_share"] for demand in demands if demand is not None]

    results = reader.set_batch_generator(batches)()
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.extend(results), daemon=True)
    consumer.start()
    wait_until(lambda: discovery.server.balancer.students == len(services))
    assert not wait_shares()  # it waits for its data
    is_read.set()
    try:
        wait_until(lambda: [share > 0.5 for share in wait_shares()] == [True] * len(services))
    finally:
        for service in services:
            run(Registered, discovery.endpoint, service)
        consumer.join(60)
    ((image, _, double),) = found
    np.testing.assert_array_equal(double, 2 * image)


def test_a_pass_keeps_its_service_when_the_reader_is_given_another(discovery, monkeypatch):
    monkeypatch.setattr(dynamic, "LINGER_S", 60.0)
    teachers = dynamic.DynamicTeachers(Meter())

    def students() -> dict[str, int]:
        services = discovery.server.balancer.view.services
        return {name: len(each.students) for name, each in services.items() if each.students}

    training = teachers.source((discovery.endpoint,), "train", 1)
    training.start(lambda _: None)
    wait_until(lambda: students() == {"train": 1})
    test = teachers.source((discovery.endpoint,), "test", 1)
    test.start(lambda _: None)
    wait_until(lambda: students() == {"train": 1, "test": 1})
    training.stop()
    wait_until(lambda: students() == {"test": 1})
    test.stop()
    assert students() == {"test": 1}  # for an iteration that follows
    del teachers
    wait_until(lambda: not students())


def test_an_iteration_that_gets_no_thread_leaves_the_next_one_its_discovery(discovery, monkeypatch):
    monkeypatch.setattr(dynamic, "LINGER_S", 0.0)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "edl-discovery":
            raise RuntimeError("can't start new thread")
        start(thread)

    teachers = dynamic.DynamicTeachers(Meter())
    source = teachers.source((discovery.endpoint,), "svc", 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        source.start(lambda _: None)
    source.stop()
    monkeypatch.setattr(threading.Thread, "start", start)
    source = teachers.source((discovery.endpoint,), "svc", 1)
    source.start(lambda _: None)
    wait_until(lambda: discovery.server.balancer.students == 1)
    source.stop()
    wait_until(lambda: not discovery.server.balancer.students)


def test_a_copy_for_another_process_is_a_student_of_its_own(discovery, monkeypatch):
    monkeypatch.setattr(dynamic, "LINGER_S", 0.0)
    teachers = dynamic.DynamicTeachers(Meter())
    sources = [teachers.source((discovery.endpoint,), "svc", 1)]
    copy = pickle.loads(pickle.dumps(teachers))
    sources.append(copy.source((discovery.endpoint,), "svc", 1))
    for source in sources:
        source.start(lambda _: None)
    wait_until(lambda: discovery.server.balancer.students == 2)
    for source in sources:
        source.stop()
    wait_until(lambda: not discovery.server.balancer.students)


def test_the_password_of_a_redis_is_not_printed(reader, capsys):
    reader.set_dynamic_teacher(["redis://:s3cret@10.0.0.1:6379/2"], "svc").print_config()
    printed = capsys.readouterr().out
    assert "discovery_servers: ('redis at 10.0.0.1:6379',)" in printed
    assert "s3cret" not in printed


def test_the_password_of_a_redis_is_not_printed_for_combined_services(reader, capsys):
    found = Discovered(["redis://:s3cret@10.0.0.1:6379/2"], "svc")
    reader.set_teachers_combined({"a": "10.0.0.2:1", "b": found}).print_config()
    printed = capsys.readouterr().out
    assert "redis at 10.0.0.1:6379" in printed
    assert "s3cret" not in printed


@pytest.mark.parametrize(
    ("servers", "service", "require", "words"),
    [
        ("", "svc", 1, "discovery_servers: expected HOST:PORT"),
        ([], "svc", 1, "discovery_servers: none is given"),
        ("10.0.0.1", "svc", 1, "discovery_servers: expected HOST:PORT"),
        ("10.0.0.1:7001,10.0.0.1:7001", "svc", 1, "each may be there once"),
        ("redis://10.0.0.1:0", "svc", 1, "expected HOST:PORT or redis://"),
        ("10.0.0.1:7001", "a*", 1, r"teacher_service_name: expected .* got 'a\*'"),
        ("10.0.0.1:7001", "", 1, "teacher_service_name: expected"),
        ("10.0.0.1:7001", "svc", 0, "require_max_teacher: expected an integer of 1 or more"),
    ],
)
def test_what_is_wrong_is_refused_where_it_is_said(reader, servers, service, require, words):
    with pytest.raises(UsageError, match=words):
        reader.set_dynamic_teacher(servers, service, require)
