"""Run the job server (`python -m job_server`) as the original's did.

Its one job is called test_job_id_1234 unless PADDLE_JOB_ID says otherwise, which is how the
original's clients ask for it. With nodes on other machines the server listens on all addresses,
which needs a token here.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from job_server.api.addresses import is_loopback
from job_server.server.config import build_parser

JOB_ID = "test_job_id_1234"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become the server, until a signal comes."""
    given = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("PADDLE_JOB_ID", JOB_ID)
    nodes = build_parser().parse_args(given).node_ips.split(",")
    everywhere = [] if all(is_loopback(node.strip()) for node in nodes) else ["--bind", "0.0.0.0"]
    os.execv(sys.executable, [sys.executable, "-m", "job_server", *everywhere, *given])


if __name__ == "__main__":
    main()
