"""Teachers and students come and go: with a registry in memory, and with several servers on one
Redis."""

import socket

import pytest
import redis

from distill_reader.balance import client
from distill_reader.balance.addresses import RedisAddress
from distill_reader.balance.client import FeedStats
from distill_reader.balance.table import Measured
from distill_reader.balance.wire.client_connection import ClientConnection
from tests.authority import make_authority
from tests.distill_reader.balance.local_discovery import (
    LocalDiscovery,
    LocalStudent,
    LocalTeacher,
    RawClient,
)
from tests.distill_reader.balance.redis_process import RedisProcess
from tests.support import wait_until

pytestmark = pytest.mark.full  # students wait until they are moved


@pytest.fixture(params=["memory", "redis"])
def servers(request, run) -> list[LocalDiscovery]:
    """One server with its own registry, or two on one Redis."""
    if request.param == "memory":
        return [run(LocalDiscovery)]
    url = request.getfixturevalue("redis_server").url
    return [run(LocalDiscovery, url), run(LocalDiscovery, url)]


def test_a_teacher_that_joins_is_told_and_one_that_dies_is_taken_off(servers, run):
    student = run(LocalStudent, servers[0].endpoint)
    wait_until(lambda: student.told == [()])
    teacher = run(LocalTeacher, servers[-1].endpoint)
    wait_until(lambda: student.teachers == {teacher.endpoint})
    teacher.kill()
    wait_until(lambda: student.teachers == set())
    teacher.come_back()
    wait_until(lambda: student.teachers == {teacher.endpoint})


def test_a_teacher_with_a_long_lease_is_looked_at_as_often_as_others(run):
    server = run(LocalDiscovery)
    teacher = run(LocalTeacher, server.endpoint, lease_s=600.0)
    wait_until(lambda: server.teachers() == {teacher.endpoint})
    teacher.kill()
    wait_until(lambda: not server.teachers(), 60)


def test_of_a_registrar_that_is_killed_too_the_lease_ends(servers, run):
    """Withdrawn by nobody: only its lease says that it is gone."""
    student = run(LocalStudent, servers[0].endpoint)
    teacher = run(LocalTeacher, servers[-1].endpoint)
    wait_until(lambda: student.teachers == {teacher.endpoint})
    teacher.stop_beating()
    wait_until(lambda: student.teachers == set())


def test_each_teacher_has_one_student_and_one_that_leaves_moves_nothing(servers, run):
    teachers = [run(LocalTeacher, servers[0].endpoint) for _ in range(8)]
    everybody = {teacher.endpoint for teacher in teachers}
    wait_until(lambda: servers[0].teachers() == everybody)
    students = [run(LocalStudent, servers[number % len(servers)].endpoint) for number in range(4)]
    wait_until(lambda: all(len(student.teachers) == 2 for student in students))
    assert set.union(*(student.teachers for student in students)) == everybody
    before = [student.teachers for student in students]
    gone = teachers[3].endpoint
    teachers[3].close()
    wait_until(lambda: sum(len(student.teachers) for student in students) == 7)
    assert [student.teachers for student in students] == [each - {gone} for each in before]


def test_the_teachers_of_a_student_that_leaves_are_given_to_others_at_once(servers, run):
    for _ in range(4):
        run(LocalTeacher, servers[0].endpoint)
    one = run(LocalStudent, servers[0].endpoint)
    other = run(LocalStudent, servers[-1].endpoint)
    wait_until(lambda: len(one.teachers) == 2 == len(other.teachers))
    other.close()
    wait_until(lambda: len(one.teachers) == 4)


def test_more_students_than_teachers_share_them(servers, run):
    teachers = [run(LocalTeacher, servers[-1].endpoint) for _ in range(2)]
    students = [run(LocalStudent, servers[number % len(servers)].endpoint) for number in range(6)]
    even = sorted((each.endpoint,) for each in teachers for _ in range(3))
    wait_until(lambda: all(sorted(each.links().values()) == even for each in servers))
    wait_until(lambda: all(len(student.teachers) == 1 for student in students))


def test_a_student_may_want_more_or_fewer_while_it_reads(servers, run):
    for _ in range(3):
        run(LocalTeacher, servers[0].endpoint)
    student = run(LocalStudent, servers[0].endpoint, require=1)
    wait_until(lambda: len(student.teachers) == 1)
    student.client.set_require(3)
    wait_until(lambda: len(student.teachers) == 3)


def test_services_do_not_know_of_each_other(servers, run):
    one = run(LocalTeacher, servers[0].endpoint, "one")
    run(LocalTeacher, servers[0].endpoint, "one.two")
    student = run(LocalStudent, servers[0].endpoint, "one")
    wait_until(lambda: student.teachers == {one.endpoint})


def test_fast_teachers_are_given_more_students(servers, run):
    fast, slow = (run(LocalTeacher, servers[0].endpoint).endpoint for _ in range(2))
    students = [run(LocalStudent, servers[0].endpoint) for _ in range(5)]
    wait_until(lambda: all(len(student.teachers) == 1 for student in students))
    for student in students:
        student.feed_stats = FeedStats(
            wait_share=0.5,
            samples_per_s=100.0,
            measured={
                fast: Measured(samples_per_s=400.0, busy_share=1.0),
                slow: Measured(samples_per_s=100.0, busy_share=1.0),
            },
        )
    wait_until(lambda: sum(student.teachers == {fast} for student in students) == 4)


def test_a_student_that_gets_nothing_from_its_teacher_is_given_another_ones(servers, run):
    for _ in range(2):
        run(LocalTeacher, servers[0].endpoint)
    one = run(LocalStudent, servers[0].endpoint)
    other = run(LocalStudent, servers[-1].endpoint)
    wait_until(lambda: len(one.teachers) == 1 == len(other.teachers))
    bad, good = one.teachers, other.teachers
    other.feed_stats = FeedStats(
        measured={teacher: Measured(samples_per_s=9.0, busy_share=0.5) for teacher in good}
    )
    one.feed_stats = FeedStats(unusable=sorted(bad))
    wait_until(lambda: one.teachers == good)
    wait_until(lambda: other.teachers == good | bad)  # which tries it
    other.feed_stats = FeedStats(measured=other.feed_stats.measured, unusable=sorted(bad))
    wait_until(lambda: other.teachers == good)
    assert one.teachers == good


@pytest.mark.parametrize("is_direct", [False, True], ids=["a server's", "Redis'"])
def test_teachers_by_the_loopback_address_of_another_host_are_not_used(
    redis_server, run, monkeypatch, caplog, is_direct: bool
):
    async def is_elsewhere(_: RedisAddress) -> bool:
        return True

    server = run(LocalDiscovery, redis_server.url)
    run(LocalTeacher, server.endpoint)
    other = run(RawClient, server.endpoint)
    heartbeat = {"service": "svc", "server": "10.9.8.7:9292", "lease_s": 60.0, "info": ""}
    assert other.ask({"type": "teacher", **heartbeat})["type"] == "ok"
    wait_until(lambda: len(server.teachers()) == 2)
    monkeypatch.setattr(ClientConnection, "is_elsewhere", True)
    monkeypatch.setattr(client, "_is_elsewhere", is_elsewhere)
    student = run(LocalStudent, redis_server.url if is_direct else server.endpoint)
    wait_until(lambda: student.teachers == {"10.9.8.7:9292"})
    assert all(set(told) <= {"10.9.8.7:9292"} for told in student.told)
    assert "is each host's own: start that with --bind or --advertise" in caplog.text


def test_a_host_may_have_any_name(servers, run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "小明 PC/1")
    teacher = run(LocalTeacher, servers[0].endpoint)
    student = run(LocalStudent, servers[0].endpoint)
    wait_until(lambda: student.teachers == {teacher.endpoint})
    original = run(RawClient, servers[0].endpoint)
    register = {"type": "register", "service_name": "svc", "seq": 0, "num": 1}
    assert original.ask(register)["servers"] == [teacher.endpoint]


def test_a_user_of_redis_need_not_be_allowed_any_channel(redis_server, run):
    with redis.Redis(port=redis_server.port) as admin:
        admin.acl_setuser(
            "edl", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all"]
        )
    where = f"redis://edl:secret@{redis_server.endpoint}"
    student = run(LocalStudent, where)
    teacher = run(LocalTeacher, where)
    wait_until(lambda: student.teachers == {teacher.endpoint})


def test_a_student_of_a_redis_that_refuses_it_knows_why_it_has_no_teacher(redis_server, run):
    student = run(LocalStudent, f"redis://nobody:secret@{redis_server.endpoint}")
    wait_until(lambda: "invalid username-password pair" in student.client.trouble)
    assert "redis://:PASSWORD@HOST:PORT" in student.client.trouble


def test_a_redis_by_tls_has_a_certificate_of_an_authority_that_is_named(tmp_path, run, monkeypatch):
    authority = make_authority(tmp_path)
    url = f"rediss://localhost:{run(RedisProcess, tmp_path, authority=authority).port}"
    stranger = run(LocalStudent, url)
    wait_until(lambda: "SSL_CERT_FILE names a file" in stranger.client.trouble)
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
    student = run(LocalStudent, url)
    teacher = run(LocalTeacher, url)
    wait_until(lambda: student.teachers == {teacher.endpoint})
