"""Keep a teacher registered (`edl register`) in a Redis: this machine's, as in the original."""

import sys
from collections.abc import Sequence

from distill_reader.register import main as register

DEFAULTS = ("--db_endpoints", "127.0.0.1:6379")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal comes; return the exit code."""
    return register([*DEFAULTS, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
