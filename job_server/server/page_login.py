"""Let browsers in to the status page: a link that works once, then a cookie."""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable

LINK_S = 15 * 60.0  # it may stand in a log that others read
COOKIE_S = 7 * 86400.0
_MOST = 100  # of each kind; the oldest goes first


class PageLogin:
    """The links and cookies of one server, in memory: after a restart they are void.

    A cookie opens the page and nothing else, since a browser sends it to whatever other program it
    visits at the same address, whatever the port is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: in seconds, for tests."""
        self._clock = clock
        self._lock = threading.Lock()
        self._codes: dict[bytes, float] = {}  # digest: until when
        self._cookies: dict[bytes, float] = {}

    def make_code(self) -> str:
        """Return what stands in a new link."""
        return self._make(self._codes, LINK_S)

    def redeem(self, code: str) -> str | None:
        """Return the cookie for the code of a link; None: it was used, is old or is none."""
        with self._lock:
            until = self._codes.pop(_digest(code), 0.0)
        return self._make(self._cookies, COOKIE_S) if self._clock() < until else None

    def knows(self, cookie: str) -> bool:
        with self._lock:
            return self._clock() < self._cookies.get(_digest(cookie), 0.0)

    def _make(self, kind: dict[bytes, float], lasts_s: float) -> str:
        made = secrets.token_urlsafe(24)
        with self._lock:
            kind[_digest(made)] = self._clock() + lasts_s
            while len(kind) > _MOST:
                del kind[next(iter(kind))]
        return made


def cookie_name(host: str) -> str:
    """Return the name of the cookie for a `Host`.

    Browsers keep cookies apart by address alone, so that of two servers on one machine the second
    would replace the first one's.
    """
    port = re.search(r":([0-9]+)$", host)
    return "edl_page" if port is None else f"edl_page_{port[1]}"


def _digest(text: str) -> bytes:
    # A look-up by digest tells nothing by the time it takes.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
