"""Keep jobs, nodes and events in one SQLite file. All is written before it is published."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_server.api import wire
from job_server.api.errors import ConfigError, StoreTrouble

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2  # 1 differs in the fields of jobs, which `sharing.upgrade` knows
_READABLE = (1, SCHEMA_VERSION)
KEPT_EVENTS = 10_000  # per job; older ones are forgotten

_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of submission
    job_id TEXT NOT NULL UNIQUE,
    data TEXT NOT NULL,
    forget INTEGER NOT NULL DEFAULT 0          -- 1: delete it when it has ended
);
CREATE TABLE nodes (node_id TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    job_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    at REAL NOT NULL,
    stage INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
"""
# Later than the others: a server that does not know them leaves them alone.
_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS limits (node_id TEXT PRIMARY KEY, slots INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS drains (node_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantines (
    node_id TEXT NOT NULL, slot INTEGER NOT NULL, data TEXT NOT NULL, PRIMARY KEY (node_id, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS task_queues (name TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tasks (
    name TEXT NOT NULL,
    pass INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (name, pass, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    job_id: str
    data: Any  # as given to save_job; None: it is not JSON
    forget: bool
    last_event: int  # 0: it has none


def _has_locks(path: str) -> bool:
    """Return whether its file system has file locks; some mounts of NFS and Lustre do not."""
    try:
        with open(path, "ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


class Store:
    """One open database. Safe to use from any thread; only one server may have it open.

    Raises (all methods):
        StoreTrouble: SQLite could not do it (a full disk); the database is as it was before.
    """

    def __init__(self, path: str) -> None:
        """Open or make the database at `path`; ":memory:" keeps nothing.

        Raises:
            ConfigError: it is in use, no database of ours, or cannot be opened.
        """
        self.trouble = ""  # why the last write failed; "": it did not
        self._path = path
        self._lock = threading.Lock()
        try:
            if path != ":memory:" and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"--db: the folder of {path} does not exist; make it first")
            self.connection = _connect(path)
        except (OSError, sqlite3.Error) as error:  # in a folder that this user may not enter, say
            raise ConfigError(f"--db: cannot open {path}: {error}") from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.connection.close()
            if not _has_locks(path):
                raise ConfigError(
                    f"--db: the file system of {path} has no file locks; name a file on a local "
                    "disk (for `edl run`, a --log_dir there)"
                ) from None
            if "locked" in str(error):
                raise ConfigError(
                    f"--db: {path} is in use by another job server; stop that one or name another"
                ) from None
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says where it failed
            of_disk = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
            remedy = "see to its disk" if of_disk else "move it away or name another"
            raise ConfigError(f"--db: {path} cannot be used ({error}); {remedy}") from None
        except ConfigError:
            self.connection.close()
            raise

    def _prepare(self) -> None:
        # Two servers with one database would both decide: this one keeps the lock while it runs.
        self.connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        with self._transaction(durable=True):
            version = self.connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self.connection.execute(statement)
            elif version not in _READABLE:
                raise ConfigError(
                    f"--db: {self._path} has schema version {version}, this server knows "
                    f"{SCHEMA_VERSION}; use the server that wrote it, or name another file"
                )
            for statement in _LATER_TABLES.split(";"):
                self.connection.execute(statement)
            if version != SCHEMA_VERSION:  # else nothing is written: the disk may be full
                self.connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        # NORMAL may lose the newest writes in a power cut, never in a crash of the server.
        self.connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _writing(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._put_back()
                with self._transaction(durable=durable):
                    yield self.connection
            except sqlite3.Error as error:
                raise self._trouble("written", error) from error
            self.trouble = ""

    def try_again(self) -> None:
        """Write again what is there, as of the newest job: `trouble` is what it is now after it."""
        with contextlib.suppress(StoreTrouble), self._writing(durable=False) as db:
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            db.execute("UPDATE jobs SET data = data WHERE number = (SELECT max(number) FROM jobs)")

    def _put_back(self) -> None:
        """Write the database anew where somebody has deleted its file.

        SQLite would go on without a word, and no later start find what it has written.
        """
        if self._path == ":memory:" or not _is_missing(self._path):
            return
        path, copy = Path(self._path), Path(f"{self._path}.new")
        before = self.connection
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for stale in (copy, Path(f"{self._path}-wal")):
                stale.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(copy)) as made:
                before.backup(made)
            copy.replace(path)
            self.connection = _connect(self._path)
            self._prepare()
        except (OSError, sqlite3.Error, ConfigError) as error:
            if self.connection is not before:
                self.connection.close()
                self.connection = before
                path.unlink(missing_ok=True)  # else it would look as if all were well
            raise self._trouble("written, as its file was deleted", error) from error
        before.close()
        logger.warning(
            "the database %s was deleted while the server ran, and is written anew; to be rid of "
            "it, end the server first", self._path,
        )  # fmt: skip

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self.connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise self._trouble("read", error) from error

    def _trouble(self, verb: str, error: Exception) -> StoreTrouble:
        trouble = StoreTrouble(f"the server's database {self._path} cannot be {verb}: {error}", 2.0)
        if verb != "read":
            self.trouble = str(trouble)
        return trouble

    def jobs(self) -> list[StoredJob]:
        """Return all jobs in the order of submission."""
        rows = self._read(
            "SELECT job_id, data, forget,"
            " (SELECT coalesce(max(number), 0) FROM events WHERE events.job_id = jobs.job_id)"
            " FROM jobs ORDER BY number"
        )
        return [
            StoredJob(job_id=job_id, data=_from_text(data), forget=bool(forget), last_event=last)
            for job_id, data, forget, last in rows
        ]

    def save_job(
        self,
        job_id: str,
        data: object,
        *,
        events: Sequence[wire.JobEvent] = (),
        forget: bool = False,
        durable: bool = True,
    ) -> None:
        """Write a job and its new events in one transaction."""
        text = _to_text(data)
        with self._writing(durable=durable) as db:
            db.execute(
                "INSERT INTO jobs (job_id, data, forget) VALUES (?, ?, ?)"
                " ON CONFLICT (job_id) DO UPDATE"
                " SET data = excluded.data, forget = excluded.forget",
                (job_id, text, forget),
            )
            for event in events:
                db.execute(
                    "INSERT INTO events (job_id, number, at, stage, text) VALUES (?, ?, ?, ?, ?)",
                    (job_id, event.number, event.at, event.stage, event.text),
                )
                db.execute(
                    "DELETE FROM events WHERE job_id = ? AND number <= ?",
                    (job_id, event.number - KEPT_EVENTS),
                )

    def note_held(self, job_id: str, held: Mapping[str, object]) -> bool:
        """Write which snapshots pods hold into a job: cheaper than all of a job of many pods.

        A power cut may lose it until the next write that is durable; launchers say it again.

        Returns:
            Whether that was possible; if not, write the job.
        """
        where = "$.progress.snapshots"
        values = [part for pod_id, ref in held.items() for part in (pod_id, _to_text(ref))]
        with self._writing(durable=False) as db:
            done = db.execute(
                "UPDATE jobs SET data = json_set(data"
                + f""", '{where}."' || ? || '"', json(?)""" * len(held)
                + f") WHERE job_id = ? AND json_type(data, '{where}') = 'object'",
                (*values, job_id),
            )
            return done.rowcount == 1

    def delete_job(self, job_id: str) -> None:
        with self._writing(durable=True) as db:
            db.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
            db.execute("DELETE FROM events WHERE job_id = ?", (job_id,))

    def events(self, job_id: str, *, after: int, limit: int) -> list[wire.JobEvent]:
        """Return at most `limit` events whose number is above `after`, oldest first."""
        rows = self._read(
            "SELECT number, at, stage, text FROM events WHERE job_id = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            job_id,
            after,
            limit,
        )
        return [
            wire.JobEvent(number=number, at=at, job_id=job_id, stage=stage, text=text)
            for number, at, stage, text in rows
        ]

    def nodes(self) -> list[Any]:
        """Return what save_node was given; None for a row that is not JSON."""
        rows = self._read("SELECT data FROM nodes ORDER BY node_id")
        return [_from_text(data) for (data,) in rows]

    def save_node(self, node_id: str, data: object) -> None:
        with self._writing(durable=False) as db:
            db.execute(
                "INSERT OR REPLACE INTO nodes (node_id, data) VALUES (?, ?)",
                (node_id, _to_text(data)),
            )

    def delete_node(self, node_id: str) -> None:
        with self._writing(durable=False) as db:
            db.execute("DELETE FROM nodes WHERE node_id = ?", (node_id,))

    def limits(self) -> dict[str, int]:
        """Return node -> slots that shared jobs may have there, where that is limited."""
        return {str(node): int(slots) for node, slots in self._read("SELECT * FROM limits")}

    def drains(self) -> list[str]:
        """Return the nodes that an operator has drained."""
        return [str(node_id) for (node_id,) in self._read("SELECT node_id FROM drains")]

    def save_limits(
        self, node_ids: Sequence[str], slots: int | None, *, drain: bool = False
    ) -> None:
        """Limit what shared jobs may have of each of these nodes; None: no more.

        Args:
            drain: no job may have anything of them.
        """
        each = [(node_id,) for node_id in node_ids]
        with self._writing(durable=True) as db:
            db.executemany("DELETE FROM limits WHERE node_id = ?", each)
            db.executemany("DELETE FROM drains WHERE node_id = ?", each)
            if drain:
                db.executemany("INSERT INTO drains (node_id) VALUES (?)", each)
            if slots is not None:
                rows = [(node_id, slots) for node_id in node_ids]
                db.executemany("INSERT INTO limits (node_id, slots) VALUES (?, ?)", rows)

    def quarantines(self) -> list[tuple[str, Any]]:
        """Return node and what save_quarantine was given, of each slot; None: it is not JSON."""
        rows = self._read("SELECT node_id, data FROM quarantines ORDER BY node_id, slot")
        return [(str(node_id), _from_text(data)) for node_id, data in rows]

    def save_quarantine(self, node_id: str, slot: int, data: object | None) -> None:
        """Write what is remembered of a slot; None: nothing."""
        with self._writing(durable=True) as db:
            if data is None:
                db.execute(
                    "DELETE FROM quarantines WHERE (node_id, slot) = (?, ?)", (node_id, slot)
                )
            else:
                row = (node_id, slot, _to_text(data))
                db.execute("INSERT OR REPLACE INTO quarantines VALUES (?, ?, ?)", row)

    def task_queues(self) -> list[str]:
        """Return the names of the task queues."""
        return [name for (name,) in self._read("SELECT name FROM task_queues ORDER BY name")]

    def task_queue(self, name: str) -> tuple[Any, list[Any]]:
        """Return a task queue's data, and those of its tasks; None for what is not JSON."""
        rows = self._read("SELECT data FROM task_queues WHERE name = ?", name)
        tasks = self._read("SELECT data FROM tasks WHERE name = ?", name)
        return _from_text(rows[0][0]) if rows else None, [_from_text(data) for (data,) in tasks]

    def save_tasks(
        self,
        name: str,
        tasks: Sequence[tuple[int, int, object]],
        *,
        queue: tuple[int, object] | None = None,
        durable: bool = True,
    ) -> None:
        """Write tasks of a queue.

        Args:
            tasks: pass, number and data of each.
            queue: pass and data of the queue: all tasks of passes before are forgotten, but those
                that `tasks` has. None: it has not changed.
        """
        rows = [(name, pass_number, number, _to_text(data)) for pass_number, number, data in tasks]
        with self._writing(durable=durable) as db:
            if queue is not None:
                pass_number, data = queue
                db.execute(
                    "INSERT OR REPLACE INTO task_queues (name, data) VALUES (?, ?)",
                    (name, _to_text(data)),
                )
                db.execute("DELETE FROM tasks WHERE name = ? AND pass < ?", (name, pass_number))
            db.executemany(
                "INSERT OR REPLACE INTO tasks (name, pass, number, data) VALUES (?, ?, ?, ?)", rows
            )

    def delete_task_queue(self, name: str) -> None:
        with self._writing(durable=True) as db:
            db.execute("DELETE FROM task_queues WHERE name = ?", (name,))
            db.execute("DELETE FROM tasks WHERE name = ?", (name,))

    def close(self) -> None:
        with self._lock:
            try:
                self._put_back()
            except StoreTrouble as error:
                logger.error("%s", error)
            except sqlite3.Error:  # it was closed before
                pass
            self.connection.close()


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    # A damaged text spoils its own row, not the whole query.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:  # nothing is known of it
        return False
    return False


def _to_text(data: object) -> str:
    """Return `data` as text; raise a ValueError for numbers that JSON does not have."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _from_text(text: str) -> Any:
    try:
        # Version 0.1.0 wrote an estimate of 1e999 s as Infinity: it is read as missing.
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
