"""Which gRPC requests of an HTTP/2 connection have begun to come and not ended. Pure.

gRPC's core takes in whatever clients send of their messages, and cannot be told how much of all of
them it may hold, nor for how long. Whoever passes the bytes on can see both in the frame heads.
"""

from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # a client's first bytes

_HEAD_BYTES = 9  # length 3, type 1, flags 1, stream 4
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM = 1


@dataclass(slots=True)
class OpenStream:
    """A request that is not complete."""

    since: float  # monotonic seconds
    size_bytes: int = 0  # of what came of it


@dataclass(slots=True)
class OpenStreams:
    """Those of one connection; both directions change them, each in a thread of its own."""

    by_number: dict[int, OpenStream] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(stream.size_bytes for stream in list(self.by_number.values()))

    def list(self) -> list[OpenStream]:
        return list(self.by_number.values())


class FrameReader:
    """Follows one direction of a connection; `feed` gets all its bytes, however they are cut."""

    def __init__(self, streams: OpenStreams, *, is_client: bool) -> None:
        """`is_client`: whether these are the client's bytes, which begin with the preface."""
        self._streams = streams
        self._is_client = is_client
        self._skip = len(PREFACE) if is_client else 0  # bytes until the next head
        self._head = b""  # the part of it that came

    def feed(self, data: memoryview, now: float) -> None:
        """Take the next bytes of the connection; `now`: monotonic seconds."""
        at, end = self._skip, len(data)
        if self._head:
            missing = _HEAD_BYTES - len(self._head)
            self._head += bytes(data[:missing])
            if len(self._head) < _HEAD_BYTES:
                return
            at = missing + self._take(self._head, now)
            self._head = b""
        while at + _HEAD_BYTES <= end:
            at += _HEAD_BYTES + self._take(bytes(data[at : at + _HEAD_BYTES]), now)
        if at < end:
            self._head = bytes(data[at:])
            at = end
        self._skip = at - end

    def _take(self, head: bytes, now: float) -> int:
        """Note a frame; return its length without the head."""
        length = int.from_bytes(head[:3], "big")
        kind, flags = head[3], head[4]
        if kind > _RST_STREAM:
            return length
        number = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
        ends = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        open_streams = self._streams.by_number
        if ends:  # a server ends one when it has answered: then nothing more is waited for
            open_streams.pop(number, None)
        elif self._is_client and kind == _HEADERS:
            open_streams.setdefault(number, OpenStream(now))
        elif self._is_client and kind == _DATA and (stream := open_streams.get(number)):
            stream.size_bytes += length
        return length
