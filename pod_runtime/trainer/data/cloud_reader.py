"""Read records by a task queue of the job server: each is read in each pass, whoever dies.

The readers of a training share its files out among themselves as they go: who is quick reads more,
what a dead one was reading goes to another, and a part that nobody can read is dropped and named
by `edl tasks`. Records of a task whose reader died are read again: at least once, not exactly once.
"""

import atexit
import contextlib
import glob
import itertools
import json
import logging
import multiprocessing
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from job_server.api.api_client import ApiClient, NotFound, Rejected, Retryable, server_url
from job_server.api.backoff import Backoff
from job_server.api.command_line import read_token
from job_server.api.errors import BadRequest, JobServerError
from job_server.api.local_servers import find_server
from job_server.api.task_wire import (
    MAX_ERROR_CHARS,
    MAX_TASKS,
    Lease,
    LeaseAsked,
    TaskQueueSpec,
    TaskReport,
)
from job_server.api.wire import WireError
from pod_runtime.env import SUBMITTED_AT, TASK_TOKEN
from pod_runtime.trainer.data.readers import ReadFrom
from pod_runtime.trainer.errors import UsageError

logger = logging.getLogger(__name__)

Read = Callable[[str, int, int | None], Iterable[Any]]
T = TypeVar("T")

_STARTED = secrets.token_hex(3)  # in a container, a trainer that starts again has its old pid
_END_S = 5.0
_RENEWALS = 3  # in the time of a lease
_FIRST_S, _LAST_S = 0.1, 5.0  # between two tries to reach the server
_TOO_LONG = 413  # of a request's body
_UNKNOWN = "0.0"  # when a job was submitted, to a server of an older version, or outside a job


def cloud_reader(
    paths: str | Sequence[str],
    endpoint: str | None = None,
    *,
    queue: str | None = None,
    records_per_task: int | None = None,
    lease_s: float = 60.0,
    max_tries: int = 3,
    in_use: int = 1000,
    server_timeout_s: float = 600.0,
    read: Read | None = None,
) -> "CloudReader":
    """Return a reader: each call is one pass over the records, of which this process gets a part.

    All trainers of a job call this with the same arguments, and read the same passes: a pass ends
    for all of them when its last record has been read. A trainer that was started again joins the
    pass that is on; its calls for passes that are over yield nothing. A script that is started
    again at a later epoch names its pass: `reader(epoch)`. As the original's
    `paddle.reader.creator.cloud_reader`, with a job server in place of etcd.

    Args:
        paths: files, or patterns such as `data/train-*.npy`. All trainers need to see them under
            these names. A `.npy` file has one record in each row of its array, any other file one
            in each line (a str without its end), unless `read` says otherwise.
        endpoint: of the job server, HOST:PORT or a URL. None: that of this job.
        queue: a name for the queue; another training that is to read the same files needs another
            one. None: made of the job's id, of when it was submitted, and of the files' names;
            outside a job of their names, sizes and times.
        records_per_task: cut files into tasks of so many records. None: a file is a task.
        lease_s: a task goes to another reader when its own is silent for so long, seconds.
        max_tries: a task that could not be read so often is dropped for the pass.
        in_use: how many records the script may have taken without having trained on them: at least
            its batch size. A task is done when it has taken so many more, or begins the next pass,
            or ends; until then it goes to another reader if this one dies.
        server_timeout_s: how long the server may be away before a read fails.
        read: reads other files: called as read(path, start, stop) for the records [start, stop) of
            a file, stop None meaning the rest.

    Raises:
        UsageError: there are no such files, or an argument is wrong; while reading: the queue was
            deleted, or all tasks of a pass were dropped.
        ConnectionError: the server cannot be reached for `server_timeout_s`.
    """
    if records_per_task is not None and records_per_task < 1:
        raise UsageError(f"records_per_task: expected 1 or more, got {records_per_task}")
    files = _find([paths] if isinstance(paths, str) else list(paths))
    read = read or read_records
    server = _Server(endpoint, os.environ, server_timeout_s)
    tasks = tuple(_tasks(files, records_per_task, read))
    if len(tasks) > MAX_TASKS:
        raise UsageError(
            f"records_per_task: {records_per_task} makes {len(tasks)} tasks of these files, and a "
            f"queue keeps {MAX_TASKS}; take a larger number"
        )
    name = queue or queue_name(files, tasks, os.environ)
    try:
        spec = TaskQueueSpec(name=name, tasks=tasks, lease_s=lease_s, max_tries=max_tries)
        server.call(lambda api: api.make_queue(spec))
    except (WireError, Rejected) as error:
        text = str(error)
        if isinstance(error, BadRequest) and error.status == _TOO_LONG:
            text += (
                f"; the {len(tasks)} tasks are described in one request: read fewer, larger files"
            )
            text += "" if records_per_task is None else ", or take a larger records_per_task"
        raise UsageError(text) from None
    return CloudReader(server, name, read, in_use, len(tasks))


class CloudReader:
    """Reads by a task queue: each call is one pass. `cloud_reader` makes it."""

    def __init__(self, server: "_Server", name: str, read: Read, in_use: int, tasks: int) -> None:
        """`tasks`: how many the queue has."""
        self._server, self._name, self._read, self._in_use = server, name, read, in_use
        self._tasks = tasks
        self._given = self._none_given()
        self._passes = itertools.count()
        self._ends_in = 0  # the process at whose end the last tasks are reported

    def __call__(self, number: int | None = None) -> Generator[Any, None, None]:
        """Yield this process's part of a pass, from 0 on. None: of the next one."""
        if number is not None:
            self._passes = itertools.count(number)
        if self._ends_in != os.getpid():
            # What a parent process was given is not this worker's to report.
            self._ends_in, self._given = os.getpid(), self._none_given()
            atexit.register(self._given.end, os.getpid())
        return self._records(next(self._passes), self._given)

    def _none_given(self) -> "_Given":
        return _Given(lambda given: given - self._in_use)

    def batches(
        self,
        *,
        steps_per_epoch: int,
        collate: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> Callable[[ReadFrom], Iterator[tuple[Any, ...]]]:
        """Return a `reader=` for `elastic.Loop`, which reads without end.

        For data that are too large to be counted, or for each trainer to see all of them. The
        loop's steps are counted exactly, the records at least once in each pass: after a change or
        a crash of the trainers those of steps that are in no snapshot yet are read again.

        Args:
            steps_per_epoch: the loop's own. An epoch is so many steps, whatever a pass has.
            collate: makes the batch's fields of a list of records. None: one array of them all.
        """
        fields = collate or (lambda records: (np.array(records),))

        def read_from(start: ReadFrom) -> Iterator[tuple[Any, ...]]:
            shards = [each for each in enumerate(start.shard_samples, start.first_shard) if each[1]]
            of_step = sum(start.shard_samples)

            def used(_given: int) -> int:
                # A crash has the steps since the newest snapshot made again, with other records.
                return (start.kept.steps - start.global_step) * of_step

            given = _Given(used)
            start.kept.then = given.report_kept  # this trainer may be killed right after that
            records = self._records(None, given)
            step = start.epoch * steps_per_epoch + start.step
            with contextlib.closing(records):
                while True:
                    epoch, of_epoch = divmod(step, steps_per_epoch)
                    for shard, samples in shards:
                        batch = list(itertools.islice(records, samples))
                        yield epoch, of_epoch, shard, *fields(batch)
                    step += 1

        return read_from

    def _records(self, pass_number: int | None, given: "_Given") -> Generator[Any, None, None]:
        """Yield the records of a pass; None: of all that come, without end."""
        given.report_all()  # of the pass before: its last batch has been used
        worker, place = _worker(os.environ), _place(os.environ)
        asked = LeaseAsked(worker=worker, place=place, pass_number=pass_number)
        empty: set[int] = set()  # tasks without a record, since there was one
        for tries in itertools.count():
            lease = self._server.call(lambda api: api.lease_task(self._name, asked))
            if lease.unreadable:
                raise UsageError(
                    f"paths: nobody can read any of the {lease.unreadable} tasks of the queue "
                    f"{self._name!r}; `edl tasks {self._name}` says why. Once that is mended, "
                    f"`edl tasks {self._name} --delete` makes room for a new queue"
                )
            if lease.over:
                if not tries:
                    logger.warning(
                        "pass %s of the task queue %s was over before: it gives no record",
                        pass_number, self._name,
                    )  # fmt: skip
                return
            if lease.number is None:
                given.say_all_read()  # others wait for no more than that
                time.sleep(lease.wait_s)
                continue
            task = _Task(self._server, self._name, asked.worker, lease)
            try:
                for record in _records(lease, self._read):
                    if task.lost:
                        break
                    task.records += 1
                    yield record
                    given.count_record()
                else:
                    given.add(task)  # all of it was read, by this reader
            except _Unreadable as error:
                logger.error("task %d cannot be read: %s", lease.number, error)
                task.report(error=str(error))
            except BaseException:  # the script stops here, or fails
                given.give_back(task)
                raise
            if task.records:
                empty.clear()
            elif not task.lost:
                empty.add(lease.number)
            if pass_number is None and len(empty) == self._tasks:  # there is no end to wait for
                raise UsageError(
                    f"paths: no record is in any of the {self._tasks} tasks of the queue "
                    f"{self._name!r}, so that no batch would ever come; see to the files, and to "
                    f"what read= yields"
                )


def read_records(path: str, start: int, stop: int | None) -> Iterator[Any]:
    """Yield the records [start, stop) of a file, as `cloud_reader` says."""
    if path.endswith(".npy"):
        rows = np.load(path, mmap_mode="r")
        yield from (np.array(row) for row in rows[start:stop])
        return
    with open(path, encoding="utf-8") as lines:
        for line in itertools.islice(lines, start, stop):
            yield line.rstrip("\r\n")


# --- the tasks


def _find(patterns: Sequence[str]) -> list[str]:
    files: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        files += [os.path.abspath(path) for path in found if os.path.isfile(path)]
        if not found or not os.path.isfile(found[0]):
            raise UsageError(f"paths: there is no file {pattern!r}")
    return list(dict.fromkeys(files))


def _tasks(files: Sequence[str], records_per_task: int | None, read: Read) -> Iterator[str]:
    for path in files:
        if records_per_task is None:
            yield _task(path, 0, None)
            continue
        count = _count(path, read)
        for start in range(0, count, records_per_task):
            yield _task(path, start, min(start + records_per_task, count))


def _task(path: str, start: int, stop: int | None) -> str:
    return json.dumps({"path": path, "start": start, "stop": stop})


def _count(path: str, read: Read) -> int:
    try:
        if path.endswith(".npy") and read is read_records:
            return len(np.load(path, mmap_mode="r"))
        return sum(1 for _ in read(path, 0, None))
    except OSError:  # it may pass, and names the file
        raise
    except Exception as error:  # whatever a reader of the script's own raises
        raise UsageError(
            f"paths: the records of {path} cannot be counted: {type(error).__name__}: {error}"
        ) from error


def queue_name(files: Sequence[str], tasks: Sequence[str], environ: Mapping[str, str]) -> str:
    """Name the queue by the job, or by what the files are now: all trainers find the same name.

    A job that is submitted anew under its name has to read all of them again. Each of its nodes may
    have a copy of the files, with times of its own.
    """
    submitted_at = environ.get(SUBMITTED_AT, _UNKNOWN)
    stats: list[tuple[str, int, int]] = []
    if submitted_at == _UNKNOWN:
        stats = [(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in files]
    digest = zlib.crc32(repr((files, stats, tasks, submitted_at)).encode())
    return f"{environ.get('PADDLE_JOB_ID') or 'files'}-{digest:08x}"[-100:]


# --- one pass


class _Given:
    """Tasks whose records were all given to the script, which may not have used them yet."""

    def __init__(self, used: Callable[[int], int]) -> None:
        """`used`: says how many records have been used, of so many that were given."""
        self._used = used
        self._records = 0  # given, after which the script has asked for another
        self._tasks: deque[tuple[int, _Task]] = deque()  # with the number of their last record
        self._reports = threading.Lock()

    def count_record(self) -> None:
        self._records += 1
        self._report_used()

    def add(self, task: "_Task") -> None:
        self._tasks.append((self._records, task))
        self._report_used()

    def say_all_read(self) -> None:
        for _, task in self._tasks:
            if not task.all_read:
                task.report(all_read=True)

    def report_all(self) -> None:
        while self._tasks:
            self._tasks.popleft()[1].report(done=True)

    def end(self, pid: int) -> None:
        """Say that all has been used: process `pid` has ended. Wait for no server that is away."""
        if os.getpid() != pid:
            return  # a fork of it has
        try:
            while self._tasks:
                self._tasks.popleft()[1].report(done=True, timeout_s=_END_S)
        except (ConnectionError, UsageError) as error:
            logger.warning("the last tasks may be read again: %s", error)

    def give_back(self, present: "_Task") -> None:
        """Give back the task that is read and those that are in use."""
        used = self._used(self._records)
        answers = present.leave(says_so=True)
        for last, task in self._tasks:  # a server that is away is waited for once, not for each
            answers = task.leave(says_so=answers, done=last <= used)
        self._tasks.clear()

    def report_kept(self) -> None:
        """Say what has been used by now, from another thread. Wait for no server that is away."""
        try:
            self._report_used(_END_S)
        except (ConnectionError, UsageError) as error:
            logger.warning("some tasks may be read again: %s", error)

    def _report_used(self, timeout_s: float | None = None) -> None:
        if not self._reports.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise ConnectionError("the reader waits for the job server")
        try:
            while self._tasks and self._tasks[0][0] <= self._used(self._records):
                self._tasks[0][1].report(done=True, timeout_s=timeout_s)
                self._tasks.popleft()
        finally:
            self._reports.release()


class _Unreadable(Exception):  # noqa: N818 - of a record
    """A record could not be read; what the script does with records never raises this."""


def _records(lease: Lease, read: Read) -> Iterator[Any]:
    try:
        task = json.loads(lease.content)
        records = iter(read(task["path"], task["start"], task["stop"]))
    except Exception as error:  # whatever a reader of the script's own raises
        raise _unreadable(lease, 0, error) from error
    for number in itertools.count():
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # as above
            raise _unreadable(lease, number, error) from error
        yield record


def _unreadable(lease: Lease, number: int, error: Exception) -> _Unreadable:
    return _Unreadable(
        f"{type(error).__name__}: {error} (record {number} of the task {lease.content})"
    )


class _Task:
    """A leased task: says every now and then that it is still read."""

    def __init__(self, server: "_Server", queue: str, worker: str, lease: Lease) -> None:
        self.records = 0
        self.all_read = False  # and the server knows
        self.lost = False  # another reads it: this one was silent for too long
        self._server, self._queue, self._lease = server, queue, lease
        self._worker = worker
        self._over = threading.Event()
        threading.Thread(target=self._renew, name="task lease", daemon=True).start()

    def report(
        self,
        *,
        all_read: bool = False,
        done: bool = False,
        error: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Say how far the task is, or how it ended."""
        self.all_read |= all_read
        if done or error:
            self._over.set()
        report = self._report(done=done, error=error[:MAX_ERROR_CHARS])
        if not self._server.call(lambda api: api.report_task(self._queue, report), timeout_s):
            logger.warning("%s: another reader reads it, too", self._lease.content)

    def leave(self, *, says_so: bool, done: bool = False) -> bool:
        """Leave the task; it comes back after its lease, or at once if the server is told.

        Args:
            says_so: tell the server.
            done: it is to come back only where the server is not told.

        Returns:
            Whether the server has answered.
        """
        self._over.set()
        if says_so:
            with self._server.connect() as api, contextlib.suppress(JobServerError):
                api.report_task(self._queue, self._report(done=done, give_back=not done))
                return True
        return False

    def _renew(self) -> None:
        with self._server.connect() as api:
            while not self._over.wait(self._lease.lease_s / _RENEWALS):
                try:
                    held = api.report_task(self._queue, self._report())
                except Retryable as error:
                    logger.warning("%s: %s; trying again", self._lease.content, error)
                    continue
                except Rejected as error:
                    logger.error("%s: %s", self._lease.content, error)
                    held = False
                if not held and not self._over.is_set():
                    logger.warning(
                        "%s: silent for more than %g s, so another reader reads it",
                        self._lease.content, self._lease.lease_s,
                    )  # fmt: skip
                    self.lost = True
                    return

    def _report(
        self, *, done: bool = False, error: str = "", give_back: bool = False
    ) -> TaskReport:
        assert self._lease.number is not None
        return TaskReport(
            worker=self._worker,
            pass_number=self._lease.pass_number,
            number=self._lease.number,
            lease=self._lease.lease,
            records=self.records,
            all_read=self.all_read,
            done=done,
            error=error,
            give_back=give_back,
        )


def _worker(environ: Mapping[str, str]) -> str:
    """Return a name of this process that people find again."""
    where = environ.get("PADDLE_POD_ID") or socket.gethostname()
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in where).lstrip("._-")[:60]
    return f"{plain or 'reader'}.{os.getpid()}.{_STARTED}"


def _place(environ: Mapping[str, str]) -> str:
    """Name a trainer's place in its job: of two processes in one place, the older one is gone.

    Child processes, such as the workers of a DataLoader, read beside each other and have none.
    """
    pod = environ.get("PADDLE_POD_ID") if multiprocessing.parent_process() is None else None
    return f"{pod}.{environ.get('LOCAL_RANK', '0')}" if pod else ""


class _Server:
    """The job server, which may be away for a while."""

    def __init__(self, endpoint: str | None, environ: Mapping[str, str], timeout_s: float) -> None:
        named = endpoint or environ.get("PADDLE_JOBSERVER")
        if not named:
            raise UsageError(
                "endpoint: missing, and this is no trainer of a job, nor is it in `edl check`; "
                "pass the job server's HOST:PORT, or set PADDLE_JOBSERVER to that"
            )
        try:
            self._url = server_url(named)
        except ValueError as error:
            raise UsageError(f"endpoint: {error}") from None
        self._token = _token(self._url, environ)
        self._timeout_s = timeout_s
        self._local = threading.local()

    def connect(self) -> ApiClient:
        return ApiClient(self._url, self._token)

    def call(self, ask: Callable[[ApiClient], T], timeout_s: float | None = None) -> T:
        """Return the answer; while the server is away, try again, usually for long.

        Raises:
            ConnectionError: it stays away.
            UsageError: the queue was deleted.
        """
        api = self._mine()
        backoff = Backoff(_FIRST_S, _LAST_S)
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return ask(api)
            except Retryable as error:
                wait_s = backoff.next_s()
                if time.monotonic() + wait_s > deadline:
                    raise ConnectionError(
                        f"the job server has been away for {patience_s:g} s: {error}"
                    ) from error
                time.sleep(wait_s)
            except NotFound as error:
                raise UsageError(f"queue: {error}; was it deleted?") from None

    def _mine(self) -> ApiClient:
        # A connection belongs to one process and thread; a fork must not use its parent's.
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.api = os.getpid(), self.connect()
        api: ApiClient = self._local.api
        return api


def _token(url: str, environ: Mapping[str, str]) -> str | None:
    token = environ.get(TASK_TOKEN) or read_token(None, environ)
    if token is None and (server := find_server(url, environ)) is not None:
        token = server.token()
    return token


def write_shards(
    records: Iterable[Any], folder: str | Path, prefix: str, per_file: int = 5000
) -> list[Path]:
    """Write records into files `PREFIX-00000.npy`, for `cloud_reader`.

    As the original's `dataset.common.convert`, which wrote RecordIO; these are NumPy's files, which
    anything reads. They take the place of all such files of this prefix that are there.

    Args:
        records: arrays or tuples of numbers, all of one shape.
        folder: made if it is not there.
        prefix: of the files' names.
        per_file: records.

    Raises:
        UsageError: they have different shapes, or there are none.
    """
    if per_file < 1:
        raise UsageError(f"per_file: expected 1 or more, got {per_file}")
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    source, written = iter(records), list[Path]()
    while part := list(itertools.islice(source, per_file)):
        try:
            rows = np.array(part)
        except ValueError as error:
            raise UsageError(f"records: they have different shapes: {error}") from None
        if rows.dtype == object:
            raise UsageError(f"records: expected numbers, got {part[0]!r:.60}")
        path = where / f"{prefix}-{len(written):05d}.npy"
        np.save(path, rows)
        written.append(path)
    if not written:
        raise UsageError("records: there are none")
    ours = re.compile(re.escape(prefix) + r"-\d{5,}\.npy")
    for path in set(where.iterdir()).difference(written):
        if ours.fullmatch(path.name):
            path.unlink()  # a reader would take it for one of these
    return written
