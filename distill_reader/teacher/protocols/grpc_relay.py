"""Copy gRPC connections between the shared port and the gRPC server behind it, within bounds.

gRPC's core wants a listening socket of its own, so it gets an abstract unix socket. Two threads per
connection copy the bytes.

The relay also bounds what clients hold by requests that they do not finish, by size and by time.
gRPC cannot: its core takes in all that comes of a message, and its options bound calls, not bytes.
With 24 clients that each send 15 of 16 MiB and a bound of 32 MiB, a teacher grew by 376 MiB with
gRPC's options alone, and by 56 MiB with this relay (test_half_sent_grpc.py). With room for only two
calls (maximum_concurrent_rpcs) it would grow by 50 MiB, but then two such clients shut out the
others.
"""

import contextlib
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable

from distill_reader.protocols import stream
from distill_reader.protocols.stream import StreamEnded, StreamStalled
from distill_reader.teacher.protocols.http2_frames import FrameReader, OpenStreams
from distill_reader.teacher.protocols.limits import FrontLimits

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 256 << 10
_CHECK_S = 2.0  # how often a silent connection is checked
_MAX_STREAMS = 1024  # open on a connection; the server allows far fewer


class GrpcRelay:
    """All relayed connections. Every method may be called from any thread."""

    def __init__(self, unix: str, limits: FrontLimits) -> None:
        """`unix`: abstract name of the socket on which the gRPC server listens."""
        self._unix = unix
        self._limits = limits
        self._lock = threading.Lock()
        self._relayed: set[_Relayed] = set()
        self._is_closed = False

    def start(self, sock: socket.socket, at_end: Callable[[], None]) -> None:
        """Relay a connection. The relay owns it from here on, and calls `at_end` once at its end.

        Raises:
            OSError: the gRPC server does not accept it, or there are no more threads. The caller
                still owns `sock`, and `at_end` is not called.
        """
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.settimeout(self._limits.stall_s)
            inner.connect("\0" + self._unix)
            stream.prepare(inner, self._limits.stall_s)
            stream.prepare(sock, _CHECK_S)
            relayed = _Relayed(self, sock, inner, at_end)
            with self._lock:
                if self._is_closed:
                    raise OSError("the front is closed")
                self._relayed.add(relayed)
            try:
                relayed.start()
            except RuntimeError as error:
                self._relayed.discard(relayed)
                raise OSError(f"no more threads: {error}") from error
        except BaseException:
            inner.close()
            raise

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            relayed = list(self._relayed)
        for one in relayed:
            one.end()
        for one in relayed:
            one.join()

    def is_over_budget(self) -> bool:
        """Return whether unfinished messages hold more memory than they may."""
        with self._lock:
            relayed = list(self._relayed)
        held = sum(one.streams.size_bytes for one in relayed)
        return held > self._limits.max_unfinished_bytes

    def forget(self, relayed: "_Relayed") -> None:
        with self._lock:
            self._relayed.discard(relayed)


class _Relayed:
    """One connection and its two threads."""

    def __init__(
        self,
        relay: GrpcRelay,
        outer: socket.socket,
        inner: socket.socket,
        at_end: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._limits = relay._limits
        self._outer = outer
        self._inner = inner
        self._at_end = at_end
        self.streams = OpenStreams()
        self._is_ended = False
        self._inward = threading.Thread(target=self._run_inward, name="grpc-in", daemon=True)
        self._outward = threading.Thread(target=self._run_outward, name="grpc-out", daemon=True)

    def start(self) -> None:
        self._outward.start()
        try:
            self._inward.start()
        except RuntimeError:
            self.end()
            self._outward.join()
            raise

    def end(self) -> None:
        self._is_ended = True
        stream.end(self._outer)
        stream.end(self._inner)

    def join(self) -> None:
        self._inward.join()

    def _run_inward(self) -> None:
        """Copy from the client to the server; at the end, clean up for both threads."""
        try:
            self._copy_inward()
        except StreamEnded as error:
            logger.debug("gRPC: %s", error)
        except StreamStalled as error:
            logger.info("gRPC: a connection is dropped: %s", error)
        finally:
            self.end()
            self._outward.join()
            self._outer.close()
            self._inner.close()
            self._relay.forget(self)
            self._at_end()

    def _copy_inward(self) -> None:
        reader = FrameReader(self.streams, is_client=True)
        buffer = _new_buffer()
        stall_s = self._limits.stall_s
        unchecked_bytes = 0
        while True:
            try:
                got = stream.receive_some(self._outer, buffer)
            except StreamStalled:  # silent, which is fine between two requests
                self._check(time.monotonic())
                continue
            now = time.monotonic()
            reader.feed(buffer[:got], now)
            self._check(now)
            unchecked_bytes += got
            if unchecked_bytes > _CHUNK_BYTES:
                unchecked_bytes = 0
                if self.streams.by_number and self._relay.is_over_budget():
                    raise StreamStalled("unfinished messages take too much memory")
            stream.send(self._inner, [buffer[:got]], got, stall_s)

    def _check(self, now: float) -> None:
        """Raise StreamStalled if a request of this connection makes no progress."""
        if len(self.streams.by_number) > _MAX_STREAMS:
            raise StreamStalled(f"more than {_MAX_STREAMS} requests are open")
        for one in self.streams.list():
            if self._limits.is_stalled(now - one.since, one.size_bytes):
                raise StreamStalled(
                    f"a request is too slow: {one.size_bytes} bytes in {now - one.since:.0f} s"
                )

    def _run_outward(self) -> None:
        """Copy from the server to the client."""
        reader = FrameReader(self.streams, is_client=False)
        buffer = _new_buffer()
        try:
            while True:
                try:
                    got = stream.receive_some(self._inner, buffer)
                except StreamStalled:
                    continue
                reader.feed(buffer[:got], time.monotonic())
                self._send_outward(buffer[:got])
        except (StreamEnded, StreamStalled) as error:
            if not self._is_ended:
                logger.debug("gRPC: %s", error)
        finally:
            self.end()  # so the other thread ends too

    def _send_outward(self, data: memoryview) -> None:
        """Send to the client. Its socket has a short timeout, which `_check` needs."""
        began, left = time.monotonic(), data
        while left:
            sent = 0
            with contextlib.suppress(BlockingIOError):
                try:
                    sent = self._outer.send(left, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    raise
                except OSError as error:
                    raise StreamEnded(str(error)) from error
            left = left[sent:]
            if left and self._limits.is_stalled(time.monotonic() - began, len(data) - len(left)):
                raise StreamStalled("a client does not take its answers")


def _new_buffer() -> memoryview:
    """Return memory that the system provides as it is used, and takes back at the end.

    From the heap, the buffers of many connections would remain as megabytes that are not returned.
    """
    return memoryview(mmap.mmap(-1, _CHUNK_BYTES))
