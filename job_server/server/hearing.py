"""Tell a busy server from silent nodes: it hears its own heartbeats the way it hears theirs."""

import contextlib
import logging
import threading
import time
from contextlib import AbstractContextManager

from job_server.api.api_client import ApiClient
from job_server.api.errors import Rejected, ServerAway

logger = logging.getLogger(__name__)

LONGEST_S = 0.5  # between two of its own heartbeats
ANSWER_S = 60.0  # a server that is later than that with its answer is asked again


class Hearing:
    """Says how late the server hears what is sent to it. That is nobody's silence.

    Where nothing sends heartbeats to it (see OwnHeartbeat), it counts as never late.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.every_s = min(LONGEST_S, heartbeat_s / 2)
        self._usual_s = 3 * self.every_s
        self._until: float | None = None  # monotonic: what was sent before has been heard

    def heard(self, until: float) -> None:
        """Note that all that was sent until then (monotonic) has been heard."""
        self._until = until

    @property
    def late_s(self) -> float:
        until = self._until
        return 0.0 if until is None else max(0.0, time.monotonic() - until - self._usual_s)


class OwnHeartbeat(threading.Thread):
    """Sends heartbeats to the server that it runs in, over HTTP as all others.

    Args:
        lock: of the jobs; who waits for it has not been heard yet.
    """

    def __init__(
        self, hearing: Hearing, url: str, token: str | None, lock: AbstractContextManager[object]
    ) -> None:
        super().__init__(name="own heartbeat", daemon=True)
        self._hearing, self._url, self._token, self._lock = hearing, url, token, lock

    def run(self) -> None:
        before = time.monotonic()
        self._hearing.heard(before)
        with ApiClient(self._url, self._token, timeout_s=ANSWER_S) as api:
            while True:
                sent_at = time.monotonic()
                try:
                    with contextlib.suppress(Rejected):  # that is an answer, too
                        api.health()
                    # What came shortly before this one may be heard shortly after it, but not
                    # after the next.
                    with self._lock:
                        self._hearing.heard(before)
                    before = sent_at
                except ServerAway:  # it has not heard it
                    pass
                except Exception:
                    # Without this thread the server would seem late for ever, and no node silent.
                    logger.exception("an own heartbeat failed")
                time.sleep(self._hearing.every_s)
