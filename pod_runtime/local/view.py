"""Follow a job's events and state, for `edl run` to show."""

import contextlib
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator

from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError, NotFound
from job_server.api.wire import JobEvent, JobState, JobStatus

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_AGAIN_S = 2.0
_POLL_S = 5.0
_FAILS = re.compile(r"(^|; )failed: .*; (?=its newest state)")


class JobWatch:
    """Two threads that follow one job: its newest status, and events that were not shown yet."""

    def __init__(self, connect: Callable[[], ApiClient], job_id: str) -> None:
        """Follow a job that was submitted."""
        self.status: JobStatus | None = None  # None: not known yet
        self.is_deleted = False  # the server has the job no longer
        self.warnings: tuple[str, ...] = ()  # what the server cannot do now
        self.changed = threading.Event()
        self._connect, self._job_id = connect, job_id
        self._events: deque[JobEvent] = deque()  # a thread puts them there
        self._closed = threading.Event()
        for work in (self._follow_status, self._follow_events):
            threading.Thread(
                target=self._keep, args=(work,), name=work.__name__, daemon=True
            ).start()

    def close(self) -> None:
        """Follow the job no longer."""
        self._closed.set()

    def take_events(self) -> list[JobEvent]:
        """Return the events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def fetch_events(self) -> list[JobEvent]:
        """Return the events that are left, at the end of a job; asks the server."""
        self.close()
        seen = self.take_events()
        after = max([self._heard, *(event.number for event in seen)], default=0)
        try:
            with self._connect() as api:
                return [*seen, *api.events(self._job_id, after=after)]
        except JobServerError:
            return seen  # they are in the server's database

    def _keep(self, work: Callable[[], None]) -> None:
        while not self._closed.is_set():
            try:
                work()
            except Exception:  # without this thread `edl run` would wait for ever
                logger.exception("following the job failed; trying again")
                self._closed.wait(_AGAIN_S)

    def _follow_status(self) -> None:
        with self._connect() as api:
            revision = -1
            while not self._closed.is_set():
                try:
                    status = api.watch(self._job_id, revision, _POLL_S)
                except NotFound:
                    self.is_deleted = True
                    self.close()
                    self.changed.set()
                    return
                except JobServerError:  # it is being restarted
                    self._closed.wait(_RETRY_S)
                    revision = -1
                    continue
                revision, self.status = status.revision, status
                self.changed.set()

    _heard = 0

    def _follow_events(self) -> None:
        with self._connect() as api:
            while not self._closed.is_set():
                try:
                    events = api.events(self._job_id, after=self._heard, timeout_s=_POLL_S)
                    if not events:
                        self.warnings = api.health().warnings
                except JobServerError:
                    self._closed.wait(_RETRY_S)
                    continue
                if events and not self._closed.is_set():
                    self._events.extend(events)
                    self._heard = events[-1].number
                    self.changed.set()


def without_end(text: str) -> str:
    """Return an event's text without the reason why the job ends, which is shown last, once."""
    text = _FAILS.sub(r"\1", text)
    for state in JobState:
        if state.ended:
            text = text.partition(f"{state.value}: ")[0]
    return text.removesuffix("; ")


@contextlib.contextmanager
def patient_output() -> Iterator[None]:
    """Ignore a full disk behind our output: the logs and the server have it all.

    Raises:
        BrokenPipeError: our output is not read any more.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        return
