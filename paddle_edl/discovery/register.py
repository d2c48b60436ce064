"""Keep a teacher registered (`edl register`): the original's, which was made for etcd.

Without --db_endpoints it registers with the discovery server of this machine. `--db_type etcd` is
refused.
"""

import sys
from collections.abc import Sequence

from distill_reader.register import main as register

DEFAULTS = ("--discovery", "127.0.0.1:7001")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal comes; return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    named = any(arg.split("=")[0] in ("--db_endpoints", "--discovery") for arg in given)
    return register(given if named else [*DEFAULTS, *given])


if __name__ == "__main__":
    sys.exit(main())
