"""A front with small bounds in a process of its own, whose memory a test can measure.

python -m tests.distill_reader.teacher.front_process [TOKEN]

It prints its port and runs until its standard input ends.
"""

import sys

from distill_reader.teacher.front import Front, FrontConfig
from distill_reader.teacher.protocols.limits import FrontLimits
from tests.distill_reader.teacher.fake_service import FakeService

MAX_REQUEST_BYTES = 16 << 20
MAX_UNFINISHED_BYTES = 32 << 20

if __name__ == "__main__":
    limits = FrontLimits(
        max_request_bytes=MAX_REQUEST_BYTES, max_unfinished_bytes=MAX_UNFINISHED_BYTES
    )
    token = sys.argv[1] if len(sys.argv) > 1 else ""
    front = Front(FakeService(), FrontConfig(port=0, token=token, limits=limits), lambda: b"")
    front.start()
    print(front.address[1], flush=True)
    sys.stdin.read()
    front.close(1.0)
