"""What students notice of servers and Redis that die, hang and come back: nothing."""

import signal
import socket
import time

import pytest
import redis

from distill_reader.balance.client import FeedStats
from distill_reader.balance.server import balancer
from tests.distill_reader.balance.discovery_process import DiscoveryProcess
from tests.distill_reader.balance.local_discovery import (
    LEASE_S,
    LocalDiscovery,
    LocalStudent,
    LocalTeacher,
    RawClient,
)
from tests.distill_reader.balance.redis_process import RedisProcess
from tests.support import free_port, wait_until


def group(run, where_teachers, where_students, teachers: int, students: int):
    """Teachers and students that have found each other, evenly: nobody is to be told more."""
    made = [run(LocalTeacher, where_teachers) for _ in range(teachers)]
    learners = [run(LocalStudent, where_students) for _ in range(students)]
    wait_until(lambda: share(learners, made))
    return made, learners


def share(students, teachers) -> bool:
    """Whether each teacher has one student, and each student as many teachers."""
    links = sorted(endpoint for student in students for endpoint in student.teachers)
    each = len(teachers) // len(students)
    return links == sorted(teacher.endpoint for teacher in teachers) and all(
        len(student.teachers) == each for student in students
    )


def wait_for_the_end_of_leases() -> None:
    end_s = time.monotonic() + LEASE_S + 0.5
    wait_until(lambda: time.monotonic() > end_s)


def test_a_server_that_is_killed_takes_nothing_with_it(redis_server, run):
    dying = run(DiscoveryProcess, "--db_endpoints", redis_server.endpoint)
    port = free_port()
    _, students = group(run, redis_server.url, f"{dying.endpoint},127.0.0.1:{port}", 4, 2)
    staying = run(LocalDiscovery, redis_server.url, port=port)
    told = [list(student.told) for student in students]
    dying.send(signal.SIGKILL)
    wait_until(lambda: staying.server.balancer.students == 2)
    newcomer = run(LocalTeacher, redis_server.url)
    wait_until(lambda: any(newcomer.endpoint in student.teachers for student in students))
    for before, student in zip(told, students, strict=True):
        for teachers in student.told[len(before) :]:
            assert set(before[-1]) <= set(teachers)


def test_a_server_that_hangs_is_left(redis_server, run, monkeypatch):
    monkeypatch.setattr("distill_reader.balance.client.REPORT_S", 0.1)
    monkeypatch.setattr("distill_reader.balance.client.ANSWER_S", 0.5)
    hanging = run(DiscoveryProcess, "--db_endpoints", redis_server.endpoint)
    port = free_port()
    where = f"{hanging.endpoint},127.0.0.1:{port}"
    (teacher,), (student,) = group(run, redis_server.url, where, 1, 1)
    staying = run(LocalDiscovery, redis_server.url, port=port)
    told = len(student.told)
    hanging.send(signal.SIGSTOP)
    wait_until(lambda: staying.server.balancer.students == 1)
    hanging.send(signal.SIGCONT)
    assert set(student.told[told - 1 :]) == {(teacher.endpoint,)}


def test_teachers_that_registered_with_a_server_that_hangs_stay(redis_server, run, monkeypatch):
    monkeypatch.setattr("distill_reader.balance.registry.registrar._ANSWER_S", 0.3)
    hanging = run(DiscoveryProcess, "--db_endpoints", redis_server.endpoint)
    staying = run(LocalDiscovery, redis_server.url)
    both = f"{hanging.endpoint},{staying.endpoint}"
    _, (student,) = group(run, both, staying.endpoint, 4, 1)  # some at each, most likely
    told = len(student.told)
    hanging.send(signal.SIGSTOP)
    wait_for_the_end_of_leases()
    assert all(student.told[told - 1 :])
    wait_until(lambda: len(student.teachers) == 4)
    hanging.send(signal.SIGCONT)


def test_the_log_does_not_grow_with_each_beat_of_a_teacher_while_redis_is_away(
    redis_server, run, caplog, monkeypatch
):
    monkeypatch.setattr("distill_reader.balance.registry.registrar._RETRY_S", 0.02)
    caplog.set_level("INFO", "distill_reader")
    server = run(LocalDiscovery, redis_server.url)
    group(run, server.endpoint, server.endpoint, 1, 1)
    redis_server.kill()
    refused = server.server.metrics._messages.labels("teacher", "refused")
    wait_until(lambda: refused._value.get() > 20, what="its heartbeats are refused")
    said = [each for each in caplog.messages if "redis at" in each]
    assert any("the registry is unavailable" in each for each in said)
    assert len(said) < 10


def test_the_only_server_that_hangs_forgets_nobody(run):
    server = run(DiscoveryProcess)
    _, (student,) = group(run, server.endpoint, server.endpoint, 2, 1)
    server.send(signal.SIGSTOP)
    wait_for_the_end_of_leases()
    server.send(signal.SIGCONT)
    newcomer = run(LocalTeacher, server.endpoint)
    wait_until(lambda: newcomer.endpoint in student.teachers and len(student.teachers) == 3)
    first = student.told.index(next(each for each in student.told if len(each) == 2))
    assert all(len(teachers) >= 2 for teachers in student.told[first:])


def test_the_only_server_is_started_again_and_nothing_moves(run, monkeypatch):
    monkeypatch.setattr(balancer, "_RECOVERY_S", 15.0)  # teachers may be slow to come back
    first = run(LocalDiscovery)
    _, students = group(run, first.endpoint, first.endpoint, 6, 3)
    before = [student.teachers for student in students]
    first.close()
    again = run(LocalDiscovery, port=first.port)
    wait_until(lambda: len(again.links()) == 3 and again.server.balancer.students == 3)
    wait_until(lambda: sum(map(len, again.links().values())) == 6)
    newcomer = run(LocalTeacher, again.endpoint)
    wait_until(lambda: any(newcomer.endpoint in student.teachers for student in students))
    for teachers, student in zip(before, students, strict=True):
        assert all(teachers <= set(told) for told in student.told[-2:])


def test_the_only_server_of_a_redis_comes_back_after_the_leases_and_nothing_moves(
    redis_server, run, monkeypatch
):
    monkeypatch.setattr(balancer, "_RECOVERY_S", 15.0)  # teachers may be slow to come back
    first = run(DiscoveryProcess, "--db_endpoints", redis_server.endpoint)
    _, students = group(run, first.endpoint, first.endpoint, 6, 3)
    before = [list(student.told) for student in students]
    first.send(signal.SIGKILL)
    wait_for_the_end_of_leases()  # of the teachers; Redis still has the table
    port = int(first.endpoint.rpartition(":")[2])
    again = run(LocalDiscovery, redis_server.url, port=port)
    wait_until(lambda: again.server.balancer.students == 3 and len(again.teachers()) == 6)
    newcomer = run(LocalTeacher, again.endpoint)
    wait_until(lambda: any(newcomer.endpoint in student.teachers for student in students))
    for told, student in zip(before, students, strict=True):
        assert all(set(told[-1]) <= set(later) for later in student.told[len(told) :])


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_redis_away_for_longer_than_leases_last_moves_nothing(redis_server, run, how, monkeypatch):
    monkeypatch.setattr("distill_reader.balance.registry.redis_registry._TIMEOUT_S", 0.5)
    monkeypatch.setattr(balancer, "_HOLD_S", 15.0)  # teachers may be slow to come back
    servers = [run(LocalDiscovery, redis_server.url) for _ in range(2)]
    both = ",".join(server.endpoint for server in servers)
    teachers, students = group(run, redis_server.url, both, 4, 2)
    wait_until(lambda: all(sum(map(len, each.links().values())) == 4 for each in servers))
    before = [list(student.told) for student in students]
    if how == "killed":
        redis_server.kill()
    else:
        redis_server.freeze()
    wait_until(lambda: all(server.server.balancer.view.away for server in servers))
    late = run(LocalStudent, both)  # gets what there is, from what is known
    wait_until(lambda: late.teachers)
    late.close()
    wait_for_the_end_of_leases()
    if how == "killed":
        redis_server.start()  # with nothing in it
    else:
        redis_server.thaw()
    wait_until(lambda: not any(server.server.balancer.view.away for server in servers))
    newcomer = run(LocalTeacher, redis_server.url)
    wait_until(lambda: any(newcomer.endpoint in student.teachers for student in students))
    everybody = {teacher.endpoint for teacher in teachers}
    for told, student in zip(before, students, strict=True):
        for later in student.told[len(told) :]:
            assert set(told[-1]) <= set(later) | {newcomer.endpoint}
            assert later, "a student was without teachers"
    wait_until(lambda: sum(len(student.teachers) for student in students) == 5)
    assert set.union(*(student.teachers for student in students)) > everybody


def test_a_redis_that_has_lost_teachers_and_is_back_at_once_moves_nothing(redis_server, run):
    # As one that is started again, or another in its place, with a dump older than leases last.
    server = run(LocalDiscovery, redis_server.url)
    _, students = group(run, redis_server.url, server.endpoint, 8, 4)
    before = [list(student.told) for student in students]
    with redis.Redis(port=redis_server.port) as admin:
        for _ in range(2):
            restart = admin.pipeline(transaction=True)
            restart.delete(*admin.keys("/service/*/nodes/*"))
            restart.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            restart.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            restart.execute()
            wait_for_the_end_of_leases()
    assert [list(student.told) for student in students] == before


def test_after_a_failover_the_name_of_a_redis_is_looked_up_anew(
    redis_server, run, monkeypatch, tmp_path
):
    """The one before has become a replica, and keeps the connections that it has."""
    (tmp_path / "heir").mkdir()
    heir = run(RedisProcess, tmp_path / "heir")
    port, look_up = redis_server.port, socket.getaddrinfo

    def look_up_redis(host, asked_port, *args, **options):
        if host == "redis.test":
            host, asked_port = "127.0.0.1", port
        return look_up(host, asked_port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_redis)
    url = "redis://redis.test:6379"
    server = run(LocalDiscovery, url)
    direct = run(LocalStudent, url)
    served = run(LocalStudent, server.endpoint)
    teachers = [run(LocalTeacher, url) for _ in range(2)]
    wait_until(lambda: share([direct, served], teachers))
    with redis.Redis(port=heir.port) as new, redis.Redis(port=redis_server.port) as old:
        new.replicaof("127.0.0.1", redis_server.port)
        wait_until(lambda: new.info("replication")["master_link_status"] == "up")
        new.replicaof("NO", "ONE")
        port = heir.port
        old.replicaof("127.0.0.1", heir.port)
    teachers += [run(LocalTeacher, url) for _ in range(2)]
    wait_until(lambda: share([direct, served], teachers))


@pytest.mark.parametrize("had", [True, False], ids=["its teacher is gone", "it has just come"])
def test_who_lacks_a_teacher_asks_another_server_where_one_has_lost_its_registry(
    redis_server, run, tmp_path, had: bool
):
    (tmp_path / "lost").mkdir()
    lost = run(RedisProcess, tmp_path / "lost")  # of this server alone, as if its network were cut
    cut, port = run(LocalDiscovery, lost.url), free_port()
    gone = run(LocalTeacher, lost.url)
    wait_until(cut.teachers if had else lambda: gone.is_registered)
    where = f"{cut.endpoint},127.0.0.1:{port}"
    if had:
        student = run(LocalStudent, where)
        wait_until(lambda: student.teachers == {gone.endpoint})
    lost.kill()
    wait_until(lambda: cut.server.balancer.view.away)
    if not had:
        student = run(LocalStudent, where, "other")
        wait_until(lambda: cut.server.balancer.students == 1)
    run(LocalDiscovery, redis_server.url, port=port)
    teacher = run(LocalTeacher, redis_server.url, "svc" if had else "other")
    if had:  # as long as its teachers answer, it stays
        end_s = time.monotonic() + 1.0
        wait_until(lambda: time.monotonic() > end_s)
        assert student.teachers == {gone.endpoint}
        student.feed_stats = FeedStats(unusable=(gone.endpoint,))
    wait_until(lambda: student.teachers == {teacher.endpoint}, 60)


def test_the_connection_for_changes_is_never_silent_for_long(redis_server, run, monkeypatch):
    """A proxy before Redis would end it, and Redis would count as away each time."""
    monkeypatch.setattr("distill_reader.balance.registry.redis_registry._SAY_S", 0.1)
    run(LocalDiscovery, redis_server.url)
    admin = redis.Redis.from_url(redis_server.url, decode_responses=True)
    wait_until(lambda: [each["cmd"] for each in admin.client_list(_type="pubsub")] == ["ping"])
    admin.close()


@pytest.mark.parametrize(
    ("setting", "refusing", "usual"),
    [
        pytest.param("min-replicas-to-write", 1, 0, id="as with a full disk"),
        pytest.param("maxmemory", 1, 0, id="full memory"),
    ],
)
def test_a_redis_that_takes_no_writes_is_away_for_a_server_without_students_too(
    redis_server, run, setting: str, refusing: int, usual: int
):
    server = run(LocalDiscovery, redis_server.url)
    teacher = run(LocalTeacher, redis_server.url)
    wait_until(lambda: server.server.balancer.view.services)
    with redis.Redis(port=redis_server.port) as admin:
        admin.config_set(setting, refusing)
        wait_for_the_end_of_leases()
        wait_until(lambda: server.server.balancer.view.away)
        late = run(LocalStudent, server.endpoint)
        wait_until(lambda: late.teachers == {teacher.endpoint})
        admin.config_set(setting, usual)
        wait_until(lambda: not server.server.balancer.view.away)
        newcomer = run(LocalTeacher, redis_server.url)
        other = run(LocalStudent, server.endpoint)
        everybody = {teacher.endpoint, newcomer.endpoint}
        wait_until(lambda: late.teachers | other.teachers == everybody)
        assert not admin.exists("/service/writes")


def test_teachers_that_die_while_redis_is_away_are_taken_off_when_it_is_back(
    redis_server, run, monkeypatch
):
    monkeypatch.setattr(balancer, "_HOLD_S", 1.0)
    server = run(LocalDiscovery, redis_server.url)
    teachers, (student,) = group(run, redis_server.url, server.endpoint, 2, 1)
    redis_server.kill()
    wait_until(lambda: server.server.balancer.view.away)
    teachers[0].close()
    redis_server.start()
    wait_until(lambda: student.teachers == {teachers[1].endpoint})


def test_whoever_is_there_first_waits_for_the_others(redis_server, run):
    redis_server.kill()
    student = run(LocalStudent, f"redis://{redis_server.endpoint}")
    server = run(LocalDiscovery, redis_server.url)
    other = run(LocalStudent, server.endpoint)
    teachers = [run(LocalTeacher, redis_server.url), run(LocalTeacher, server.endpoint)]
    redis_server.start()
    everybody = {teacher.endpoint for teacher in teachers}
    wait_until(
        lambda: (
            student.teachers | other.teachers == everybody
            and len(student.teachers) == 1 == len(other.teachers)
        )
    )


def test_students_that_ask_redis_themselves_share_with_those_that_do_not(redis_server, run):
    server = run(LocalDiscovery, redis_server.url)
    direct = run(LocalStudent, redis_server.url)
    served = run(LocalStudent, server.endpoint)
    teachers = [run(LocalTeacher, redis_server.url) for _ in range(4)]
    wait_until(lambda: share([direct, served], teachers))
    direct.close()
    wait_until(lambda: served.teachers == {teacher.endpoint for teacher in teachers})


def test_a_password_is_wanted_and_given(tmp_path, run):
    server = run(RedisProcess, tmp_path, password="p@ss/word")
    url = f"redis://:p%40ss%2Fword@{server.endpoint}"
    discovery = run(LocalDiscovery, url)
    teacher = run(LocalTeacher, url)
    student = run(LocalStudent, discovery.endpoint)
    wait_until(lambda: student.teachers == {teacher.endpoint})


def test_a_redis_cluster_is_named_with_the_remedy(tmp_path, run):
    """Its own words tell nobody that the servers would have to wait for ever."""
    server = run(RedisProcess, tmp_path, options=["--cluster-enabled", "yes"])
    discovery = run(LocalDiscovery, server.url)

    def is_said(words: str) -> bool:
        away = discovery.server.balancer.view.away or ""
        return words in away and "Redis Cluster is not supported: name a Redis" in away

    wait_until(lambda: is_said("slot not served"))
    with redis.Redis(port=server.port) as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    for _ in range(2):
        run(LocalStudent, discovery.endpoint)
    wait_until(lambda: is_said("same slot"))


class TestWhatOthersWrite:
    @pytest.fixture
    def database(self, redis_server):
        with redis.Redis(port=redis_server.port, decode_responses=True) as client:
            yield client

    @pytest.fixture
    def server(self, redis_server, run):
        return run(LocalDiscovery, redis_server.url)

    def test_teachers_of_the_originals_registrar_are_told(self, database, server, run):
        student = run(LocalStudent, server.endpoint)
        key = "/service/svc/nodes/10.1.2.3:9292"
        database.hset(key, mapping={"server": "10.1.2.3:9292", "info": "{cpu:10%, gpu:20%, net:1}"})
        database.expire(key, 6)
        wait_until(lambda: student.teachers == {"10.1.2.3:9292"})
        database.delete(key)
        wait_until(lambda: not student.teachers)

    def test_ours_are_as_the_originals_server_reads_them(self, database, redis_server, run):
        teacher = run(LocalTeacher, redis_server.url)
        key = f"/service/svc/nodes/{teacher.endpoint}"
        wait_until(lambda: teacher.is_registered)
        assert database.hgetall(key) == {"server": teacher.endpoint, "info": ""}
        assert 0 < database.pttl(key) <= 1000 * LEASE_S
        teacher.close()
        assert not database.exists(key)

    def test_a_teacher_without_a_lease_does_not_count(self, database, server, run):
        database.hset("/service/svc/nodes/10.1.2.3:9292", "server", "10.1.2.3:9292")
        student = run(LocalStudent, server.endpoint)
        teacher = run(LocalTeacher, server.endpoint)
        wait_until(lambda: student.teachers == {teacher.endpoint})

    def test_rubbish_stops_nobody(self, database, server, run):
        database.set("/service/svc/table", b"\xff\xfe 0000 not a table")
        database.set("/service/svc/students/odd", "0000000000000001{}")
        database.set("/service/svc/students/odder", b"\x00\xff")
        database.set("/service/svc/students/oddest", '0000000000000001{"require": "many"}')
        database.set("/service/svc/nodes/not an endpoint", "x", px=60_000)
        database.set("/service/svc/unknown/x", "y")
        database.set("/service/", "y")
        database.lpush("/service/svc/students/list", "x")
        student = run(LocalStudent, server.endpoint)
        teacher = run(LocalTeacher, server.endpoint)
        wait_until(lambda: student.teachers == {teacher.endpoint})
        assert len(server.links()) == 1

    def test_a_table_that_is_taken_away_is_written_again_as_it_was(self, database, server, run):
        _, students = group(run, server.endpoint, server.endpoint, 4, 2)
        before = [student.told[-1] for student in students]
        database.delete("/service/svc/table")
        wait_until(lambda: database.exists("/service/svc/table"))
        assert [student.told[-1] for student in students] == before

    def test_the_originals_student_finds_ours_through_it(self, server, run):
        teacher = run(LocalTeacher, server.endpoint)
        wait_until(server.teachers)
        client = run(RawClient, server.endpoint)
        register = {"type": "register", "service_name": "svc", "seq": 0, "num": 1}
        assert client.ask(register)["servers"] == [teacher.endpoint]
