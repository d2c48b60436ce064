"""Print a line about the cluster every ten seconds, as EDL's first collector did:

    python -m job_server.cli.collector --server URL

It is `edl top --lines`.
"""

import sys

from job_server.cli import commands


def main(argv: list[str]) -> int:
    """Print lines until Ctrl-C; return the exit code."""
    return commands.main(["top", "--lines", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
