"""What clients of a teacher may take: bytes, time, connections."""

from dataclasses import dataclass

from distill_reader.tokens import same_token


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Bounds of the front: whatever comes, its memory and its threads stay within them."""

    max_request_bytes: int = 512 << 20
    max_json_bytes: int = 32 << 20  # JSON takes ten times its size when it is read
    max_connections: int = 1024  # of HTTP and gRPC; the fast path has its own bound, the same
    max_unfinished_bytes: int = 1 << 30  # of gRPC messages that have begun to come
    first_byte_s: float = 30.0  # for a new connection to say anything
    idle_s: float = 60.0  # for an HTTP connection to send a request
    stall_s: float = 20.0  # for a message that has begun to go on
    least_rate: int = 256 << 10  # bytes per second: who sends or takes less is stalled

    def is_stalled(self, elapsed_s: float, moved_bytes: int) -> bool:
        """Return whether a transfer that has moved so much since it began is given up."""
        return elapsed_s > self.longest_s(moved_bytes)

    def longest_s(self, size_bytes: int) -> float:
        """Return how long a transfer of this size may take."""
        return self.stall_s + size_bytes / self.least_rate


def bearer_matches(header: str, token: str) -> bool:
    """Return whether an Authorization header shows the token; "": none is wanted."""
    if not token:
        return True
    scheme, _, shown = header.partition(" ")
    return scheme.lower() == "bearer" and same_token(shown.strip(), token)
