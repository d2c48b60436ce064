"""Limits on what clients of a teacher may use: bytes, time, connections. And the token check."""

from dataclasses import dataclass

from distill_reader.tokens import same_token


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Bounds of the front. Its memory and its threads stay within them whatever clients send."""

    max_request_bytes: int = 512 << 20
    max_json_bytes: int = 32 << 20  # parsed JSON takes ten times as much memory
    max_connections: int = 1024  # of HTTP and gRPC together; the fast path has the same bound
    max_unfinished_bytes: int = 1 << 30  # of all gRPC messages that are not complete yet
    first_byte_s: float = 30.0  # how long a new connection may stay silent
    idle_s: float = 60.0  # how long an HTTP connection may stay without a request
    stall_s: float = 20.0  # how long a transfer may pause
    least_rate: int = 256 << 10  # bytes per second; a slower transfer is stalled

    def is_stalled(self, elapsed_s: float, moved_bytes: int) -> bool:
        """Return whether a transfer that took so long for so many bytes must be given up."""
        return elapsed_s > self.longest_s(moved_bytes)

    def longest_s(self, size_bytes: int) -> float:
        """Return how long a transfer of this size may take."""
        return self.stall_s + size_bytes / self.least_rate


def bearer_matches(header: str, token: str) -> bool:
    """Return whether an Authorization header has the token; every header does if it is ""."""
    if not token:
        return True
    scheme, _, shown = header.partition(" ")
    return scheme.lower() == "bearer" and same_token(shown.strip(), token)
