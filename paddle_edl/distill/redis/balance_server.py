"""Run a discovery server (`edl discovery`) on a Redis, with the original's addresses.

It listens on all addresses unless --server says otherwise, which needs a token here.
"""

import sys
from collections.abc import Sequence

from distill_reader.discovery import main as discover

DEFAULTS = ("--server", "0.0.0.0:7001", "--db_endpoints", "127.0.0.1:6379")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; return the exit code."""
    return discover([*DEFAULTS, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
