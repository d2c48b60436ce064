"""Track the unfinished requests of an HTTP/2 connection by its frame headers. Pure."""

from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # a client's first bytes

_HEAD_BYTES = 9  # length 3, type 1, flags 1, stream 4
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM = 1


@dataclass(slots=True)
class OpenStream:
    """A request that is not complete."""

    since: float  # monotonic seconds
    size_bytes: int = 0  # received so far


@dataclass(slots=True)
class OpenStreams:
    """The unfinished requests of one connection. Two threads update them, one per direction."""

    by_number: dict[int, OpenStream] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(stream.size_bytes for stream in list(self.by_number.values()))

    def list(self) -> list[OpenStream]:
        return list(self.by_number.values())


class FrameReader:
    """Reads the frame headers of one direction of a connection."""

    def __init__(self, streams: OpenStreams, *, is_client: bool) -> None:
        """`is_client`: whether the client sends these bytes, which then begin with the preface."""
        self._streams = streams
        self._is_client = is_client
        self._skip = len(PREFACE) if is_client else 0  # bytes until the next header
        self._head = b""  # the received part of that header

    def feed(self, data: memoryview, now: float) -> None:
        """Take the next bytes of the connection, split anywhere; `now`: monotonic seconds."""
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
        """Update the open requests by a frame header; return the length of the frame's payload."""
        length = int.from_bytes(head[:3], "big")
        kind, flags = head[3], head[4]
        if kind > _RST_STREAM:
            return length
        number = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
        ends = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        open_streams = self._streams.by_number
        if ends:  # by the client, or by a server that has answered and waits for nothing more
            open_streams.pop(number, None)
        elif self._is_client and kind == _HEADERS:
            open_streams.setdefault(number, OpenStream(now))
        elif self._is_client and kind == _DATA and (stream := open_streams.get(number)):
            stream.size_bytes += length
        return length
