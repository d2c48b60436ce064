"""A teacher that only takes time, for test_teachers_live: `live_teacher.py FOLDER`.

Answers one byte for one byte, one after the other whoever asks, each after a while. SIGTERM: what
it has taken it answers, then it notes in FOLDER that it has drained. There it also notes that it
teaches, and would drain.
"""

import os
import signal
import socketserver
import sys
import threading
import time
from pathlib import Path

BATCH_S = 0.02
computing = threading.Lock()


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1):
            with computing:
                time.sleep(BATCH_S)
                self.request.sendall(data)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def main() -> None:
    pod_id = os.environ["EDL_POD_ID"]
    address = os.environ["EDL_ADDR"], int(os.environ["EDL_PORT"])
    with Server(address, Handler) as server:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        (Path(sys.argv[1]) / f"{pod_id}.teaches").touch()
        print(f"{os.environ['EDL_SERVICE']} on {address}", flush=True)
        server.serve_forever(0.05)
        with computing:
            (Path(sys.argv[1]) / f"{pod_id}.drained").touch()
            os._exit(0)


if __name__ == "__main__":
    main()
