"""The database: what was written is there again, and nothing half is."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from job_server.api.errors import ConfigError, StoreTrouble
from job_server.api.wire import JobEvent
from job_server.server.store import KEPT_EVENTS, Store
from tests.support import no_file_locks, nothing_writable


def event(number: int, text: str = "said") -> JobEvent:
    return JobEvent(number=number, at=100.0 + number, job_id="digits", stage=1, text=text)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "server.db")


def test_jobs_nodes_and_events_outlive_the_server(path):
    store = Store(path)
    store.save_job("b", {"step": 1}, events=[event(1)])
    store.save_job("a", {"step": 2}, forget=True)
    store.save_job("b", {"step": 3}, events=[event(2)])
    store.save_node("node-a", {"addr": "x"})
    store.save_node("node-b", {"addr": "y"})
    store.delete_node("node-b")
    store.close()

    store = Store(path)
    jobs = [(job.job_id, job.data, job.forget, job.last_event) for job in store.jobs()]
    assert jobs == [("b", {"step": 3}, False, 2), ("a", {"step": 2}, True, 0)]
    assert store.nodes() == [{"addr": "x"}]
    store.close()


def test_limits_of_nodes_outlive_the_server_and_its_version_before(path):
    before = Store(path)  # of a version that knew no limits
    before.connection.execute("DROP TABLE limits")
    before.close()

    store = Store(path)
    store.save_limits(["node-a"], 2)
    store.save_limits(["node-b"], 0)
    store.save_limits(["node-c"], 1)
    store.save_limits(["node-a"], 3)
    store.save_limits(["node-c"], None)
    store.close()

    store = Store(path)
    assert store.limits() == {"node-a": 3, "node-b": 0}
    store.close()


def test_what_pods_hold_is_written_into_the_job(path):
    store = Store(path)
    store.save_job("digits", {"progress": {"snapshots": {"p0": {"stage": 1}}}, "step": 1})
    store.save_job("other", {"progress": {"snapshots": {}}})
    assert store.note_held("digits", {"p0": {"stage": 2}, "p_1": {"stage": 2, "step": 7}})
    store.close()
    store = Store(path)
    held = {"p0": {"stage": 2}, "p_1": {"stage": 2, "step": 7}}
    assert [job.data for job in store.jobs()] == [
        {"progress": {"snapshots": held}, "step": 1},
        {"progress": {"snapshots": {}}},
    ]
    store.close()


@pytest.mark.parametrize("data", [{"progress": {}}, {"progress": {"snapshots": None}}, {}])
def test_a_job_with_no_place_for_what_pods_hold_is_to_be_written_whole(path, data):
    store = Store(path)
    store.save_job("digits", data)
    assert not store.note_held("digits", {"p0": {"stage": 2}})
    assert not store.note_held("none", {"p0": {"stage": 2}})
    assert store.jobs()[0].data == data
    store.close()


def test_a_killed_server_loses_nothing_that_was_written(path, tmp_path):
    store = Store(path)
    store.save_job("digits", {"step": 1}, durable=False)
    store.save_job("digits", {"step": 2})
    # What a kill -9 leaves: the files as they are, never closed.
    for name in ("server.db", "server.db-wal"):
        (tmp_path / f"copy-{name}").write_bytes((tmp_path / name).read_bytes())
    copy = Store(str(tmp_path / "copy-server.db"))
    assert [job.data for job in copy.jobs()] == [{"step": 2}]
    copy.close()
    store.close()


def test_events_come_in_pages_and_the_oldest_are_forgotten(path):
    store = Store(path)
    last = KEPT_EVENTS + 5
    events = [event(number) for number in range(1, last + 1)]
    store.save_job("digits", {}, events=events)
    assert [e.number for e in store.events("digits", after=0, limit=3)] == [6, 7, 8]
    assert store.events("digits", after=last - 1, limit=10) == [event(last)]
    assert store.events("digits", after=last, limit=10) == []
    assert store.events("other", after=0, limit=10) == []
    store.close()


def test_a_deleted_job_takes_its_events_along(path):
    store = Store(path)
    store.save_job("digits", {}, events=[event(1)])
    store.delete_job("digits")
    assert store.jobs() == []
    store.save_job("digits", {})
    assert store.jobs()[0].last_event == 0
    store.close()


def test_a_failed_write_changes_nothing(path):
    store = Store(path)
    store.save_job("digits", {"step": 1}, events=[event(1)])
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count={pages}")  # a full disk
    with pytest.raises(StoreTrouble, match="full") as trouble:
        store.save_job("digits", {"text": "x" * 100_000}, events=[event(2)])
    assert trouble.value.delay_s > 0
    store.connection.execute("PRAGMA max_page_count=100000")  # there is room again
    assert [(job.data, job.last_event) for job in store.jobs()] == [({"step": 1}, 1)]
    store.save_job("digits", {"step": 2}, events=[event(2)])
    store.close()


def test_a_database_is_opened_again_without_a_write_as_its_disk_may_be_full(path):
    Store(path).close()
    before = Path(path).read_bytes()
    Store(path).close()
    assert Path(path).read_bytes() == before


def test_a_database_on_a_disk_that_takes_nothing_is_not_to_be_moved_away(path):
    with nothing_writable(), pytest.raises(ConfigError, match="see to its disk"):
        Store(path)


@pytest.mark.parametrize("what", ["file", "file and log", "moved", "folder"])
def test_a_database_that_is_deleted_under_its_server_is_written_anew(tmp_path, caplog, what):
    """SQLite goes on with a file that has no name: the next start found no job."""
    path = tmp_path / "state" / "server.db"
    path.parent.mkdir()
    store = Store(str(path))
    store.save_job("a", {"step": 1}, events=[event(1)])
    store.save_limits(["node-a"], 2)
    if what == "folder":
        shutil.rmtree(path.parent)
    elif what == "moved":
        path.rename(tmp_path / "elsewhere.db")
    else:
        path.unlink()
        if what == "file and log":
            Path(f"{path}-wal").unlink()
    store.save_job("a", {"step": 2}, events=[event(2)])
    assert "was deleted while the server ran" in caplog.text
    with pytest.raises(ConfigError, match="in use by another job server"):
        Store(str(path))
    store.save_job("b", {"step": 3})
    store.close()

    store = Store(str(path))
    assert [(job.job_id, job.data) for job in store.jobs()] == [
        ("a", {"step": 2}),
        ("b", {"step": 3}),
    ]
    assert [each.number for each in store.events("a", after=0, limit=9)] == [1, 2]
    assert store.limits() == {"node-a": 2}
    store.close()


def test_a_database_that_was_deleted_and_is_not_written_any_more_is_there_again(path):
    store = Store(path)
    store.save_job("a", {"step": 1})
    Path(path).unlink()
    store.close()
    store = Store(path)
    assert [job.job_id for job in store.jobs()] == ["a"]
    store.close()


def test_a_deleted_database_that_cannot_be_written_anew_loses_nothing(path):
    store = Store(path)
    store.save_job("a", {"step": 1})
    Path(path).unlink()
    Path(f"{path}.new").mkdir()  # in its way
    with pytest.raises(StoreTrouble, match="as its file was deleted"):
        store.save_job("a", {"step": 2})
    assert [job.data for job in store.jobs()] == [{"step": 1}]
    Path(f"{path}.new").rmdir()
    store.save_job("a", {"step": 2})
    store.close()
    store = Store(path)
    assert [job.data for job in store.jobs()] == [{"step": 2}]
    store.close()


@pytest.mark.full
def test_a_second_server_on_the_same_database_is_refused(path):
    store = Store(path)
    with pytest.raises(ConfigError, match="in use by another job server"):
        Store(path)
    # SQLite calls it locked, or an I/O error, where no file can be locked.
    with no_file_locks(), pytest.raises(ConfigError, match="has no file locks; name a file on a"):
        Store(path)
    store.close()
    Store(path).close()


def test_a_database_of_another_version_is_refused(path):
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="schema version 99"):
        Store(path)


def test_what_is_no_database_is_refused_and_left_alone(path):
    Path(path).write_bytes(b"my thesis" * 1000)
    with pytest.raises(ConfigError, match="move it away"):
        Store(path)
    assert Path(path).read_bytes() == b"my thesis" * 1000


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        Store(str(tmp_path / "no" / "server.db"))


def test_a_closed_store_refuses_instead_of_breaking():
    store = Store(":memory:")
    store.close()
    with pytest.raises(StoreTrouble):
        store.save_job("digits", {})
    with pytest.raises(StoreTrouble):
        store.events("digits", after=0, limit=1)


def test_what_could_never_be_answered_is_not_written(path):
    store = Store(path)
    with pytest.raises(ValueError, match="JSON"):
        store.save_job("digits", {"s": float("inf")})
    with pytest.raises(ValueError, match="JSON"):
        store.save_node("node-a", {"s": float("nan")})
    assert (store.jobs(), store.nodes()) == ([], [])
    store.close()


@pytest.mark.parametrize(
    ("text", "data"),
    [
        pytest.param('{"s": Infinity, "t": [NaN]}', {"s": None, "t": [None]}, id="no numbers"),
        pytest.param('{"s": ', None, id="cut off"),
        pytest.param("[" * 100_000, None, id="deep"),
        pytest.param(b'{"s": "\xff"}', {"s": "\ufffd"}, id="no UTF-8"),
    ],
)
def test_a_row_that_an_older_version_or_a_bad_disk_left_costs_no_other_row(path, text, data):
    store = Store(path)
    store.save_job("a", {"step": 1})
    store.save_job("b", {"step": 2})
    store.save_node("node-a", {})
    store.connection.execute("UPDATE jobs SET data = CAST(? AS TEXT) WHERE job_id = 'a'", (text,))
    store.connection.execute("UPDATE nodes SET data = CAST(? AS TEXT)", (text,))
    assert [job.data for job in store.jobs()] == [data, {"step": 2}]
    assert store.nodes() == [data]
    store.close()
