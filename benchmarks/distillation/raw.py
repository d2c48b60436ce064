"""The teacher that the original is measured with, and the client that its reader imports.

    python -m benchmarks.distillation.raw [--wait_s SECONDS_PER_IMAGE]

Paddle Serving can be installed no more, so a module with its client's name speaks to a process that
answers at once, by the least that a socket needs: 16 bytes of head, the images as they lie in
memory, scores back. That is cheaper than Paddle Serving's client ever was: what is left is the
original's reader.
"""

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.distillation.backends import CLASSES, first_values
from distill_reader.protocols.stream import bytes_of

_HEAD = struct.Struct("<qq")  # samples, bytes
_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Client:
    """As much of paddle_serving_client.Client as the original's reader uses."""

    def __init__(self) -> None:
        self.feed_shapes_: dict[str, list[int]] = {}
        self._sock: socket.socket | None = None

    def load_client_config(self, path: str) -> None:
        """Read a file that `write_config` wrote."""
        self.feed_shapes_ = json.loads(Path(path).read_text())

    def connect(self, endpoints: Sequence[str]) -> None:
        host, port = endpoints[0].split(":")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_feed_names(self) -> list[str]:
        return list(self.feed_shapes_)

    def predict(self, feed: Sequence[Mapping[str, Any]], fetch: Sequence[str]) -> dict[str, Any]:
        """Return the scores of all samples; their arrays are sent as they lie in memory."""
        assert self._sock is not None
        (name,) = self.feed_shapes_
        images = [np.ascontiguousarray(sample[name]) for sample in feed]
        size = sum(image.nbytes for image in images)
        self._sock.sendall(_HEAD.pack(len(images), size))
        for first in range(0, len(images), _IOV_MAX):
            _send_all(self._sock, [bytes_of(image) for image in images[first:][:_IOV_MAX]])
        scores = np.empty((len(images), CLASSES), np.float32)
        _receive(self._sock, bytes_of(scores))
        return dict.fromkeys(fetch, scores)

    def release(self) -> None:
        if self._sock is not None:
            self._sock.close()


def install_client() -> None:
    """Let `from paddle_serving_client import Client` find the one above."""
    module = ModuleType("paddle_serving_client")
    module.__dict__["Client"] = Client
    sys.modules[module.__name__] = module


def write_config(path: Path, shape: Sequence[int]) -> None:
    """Write what `load_client_config` reads: the shape of the only input, `image`."""
    path.write_text(json.dumps({"image": list(shape)}))


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views:
            views[0] = views[0][sent:]


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("closed by the other end")
        view = view[got:]


def _answer(sock: socket.socket, wait_s: float) -> None:
    """Answer one connection until it ends."""
    head = memoryview(bytearray(_HEAD.size))
    room = bytearray()
    try:
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                _receive(sock, head)
                samples, size = _HEAD.unpack(head)
                if size > len(room):
                    room = bytearray(size)
                view = memoryview(room)[:size]
                _receive(sock, view)
                if wait_s:
                    time.sleep(wait_s * samples)
                images = np.frombuffer(view, np.float32).reshape(samples, -1)
                sock.sendall(bytes_of(first_values(images)))
    except ConnectionError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0, help="0: any; it is printed")
    parser.add_argument("--wait_s", type=float, default=0.0, help="per image")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", args.port)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer, args=(sock, args.wait_s), daemon=True).start()


if __name__ == "__main__":
    main()
