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
_LOOK_S = 2.0  # between two looks at a silent connection
_MAX_STREAMS = 1024  # open on a connection; the server refuses far fewer


class GrpcRelay:
    """All connections that are passed on. Every method may be called from any thread."""

    def __init__(self, unix: str, limits: FrontLimits) -> None:
        """`unix`: abstract name of the socket where the gRPC server listens."""
        self._unix = unix
        self._limits = limits
        self._lock = threading.Lock()
        self._relayed: set[_Relayed] = set()
        self._is_closed = False

    def start(self, sock: socket.socket, at_end: Callable[[], None]) -> None:
        """Pass a connection on from now on; it belongs to the relay, which calls `at_end` once.

        Raises:
            OSError: the gRPC server does not accept, or there are no more threads. `sock` is the
                caller's still, and `at_end` is not called.
        """
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.settimeout(self._limits.stall_s)
            inner.connect("\0" + self._unix)
            stream.prepare(inner, self._limits.stall_s)
            stream.prepare(sock, _LOOK_S)
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
        """Return whether messages that have begun to come hold more memory than they may."""
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
        """Copy from the client to the server; in the end, clear up after both threads."""
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
        told_bytes = 0
        while True:
            try:
                got = stream.receive_some(self._outer, buffer)
            except StreamStalled:  # nothing came: fine between two requests
                self._check(time.monotonic())
                continue
            now = time.monotonic()
            reader.feed(buffer[:got], now)
            self._check(now)
            told_bytes += got
            if told_bytes > _CHUNK_BYTES:
                told_bytes = 0
                if self.streams.by_number and self._relay.is_over_budget():
                    raise StreamStalled("messages that are not complete take too much memory")
            stream.send(self._inner, [buffer[:got]], got, stall_s)

    def _check(self, now: float) -> None:
        """Raise StreamStalled if a request of this connection does not go on."""
        if len(self.streams.by_number) > _MAX_STREAMS:
            raise StreamStalled(f"more than {_MAX_STREAMS} requests are open")
        for one in self.streams.list():
            if self._limits.is_stalled(now - one.since, one.size_bytes):
                raise StreamStalled(
                    f"{one.size_bytes} bytes of a request came within {now - one.since:.0f} s"
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
            self.end()  # the other thread finds the end of its stream

    def _send_outward(self, data: memoryview) -> None:
        """Send to the client, whose socket times out early for the sake of `_check`."""
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
    """Return memory that is only taken as far as it is used, and given back in the end: many
    connections at one time would otherwise leave a heap of many megabytes."""
    return memoryview(mmap.mmap(-1, _CHUNK_BYTES))
