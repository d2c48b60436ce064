"""The socket between a launcher and its trainers: accept connections, read and send messages.

It is an abstract unix socket, so no file is left behind, and serves only processes of the same
user. A trainer connects to NUL + $EDL_CHANNEL.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator

from pod_runtime.channel_wire import LauncherMessage, TrainerMessage, parse_trainer, to_json
from pod_runtime.errors import ChannelError
from pod_runtime.shim_wire import LineSocket, ShimError, peer_credentials

_SEND_TIMEOUT_S = 2.0  # a trainer whose buffer stays full for so long is stuck
_FULL_S = 0.1  # between two tries where no descriptor is free


class TrainerConnection:
    """One trainer's end. For the launcher's main thread only."""

    def __init__(self, connection: socket.socket, peer_pid: int) -> None:
        connection.setblocking(False)
        self._lines = LineSocket(connection)
        self.peer_pid = peer_pid
        self.open = True
        # What it does (`activity`); None: it shows nothing.
        self.page: memoryview[float] | None = None

    def fileno(self) -> int:
        return self._lines.fileno()

    def messages(self) -> Iterator[tuple[TrainerMessage, tuple[int, ...]]]:
        """Yield what has arrived, with descriptors that the caller owns; never waits.

        Afterwards `open` is false if the trainer has hung up.

        Raises:
            ChannelError: a message that the protocol does not know.
        """
        while self.open:
            try:
                received = self._lines.receive()
            except BlockingIOError:
                return
            except ShimError as error:
                raise ChannelError(str(error)) from error
            except OSError:
                received = None
            if received is None:
                self.open = False
                return
            content, fds = received
            try:
                message = parse_trainer(content)
            except ChannelError:
                close_all(fds)
                raise
            yield message, fds

    def send(self, message: LauncherMessage, fds: tuple[int, ...] = ()) -> None:
        """Send one message; `fds` stay open here.

        Raises:
            OSError: the trainer is gone, or does not read.
        """
        self._lines.socket.settimeout(_SEND_TIMEOUT_S)
        try:
            self._lines.send({**to_json(message), "fds": len(fds)}, fds)
        finally:
            self._lines.socket.setblocking(False)

    def close(self) -> None:
        self.open = False
        self._lines.close()


class TrainerChannel:
    """The listening end."""

    def __init__(self, pod_id: str) -> None:
        # The random part keeps earlier trainers of the pod from finding a later launcher.
        self.name = f"edl-{pod_id[:40]}-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._listener.setblocking(False)

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> TrainerConnection | None:
        """Return the next connection; None: there is none, or it is another user's.

        Where no descriptor is free it waits a moment, as who waits for this socket is woken again.
        """
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # nobody waits any more
            return None
        except OSError:
            time.sleep(_FULL_S)
            return None
        pid, uid = peer_credentials(connection)
        if uid != os.getuid():
            connection.close()
            return None
        return TrainerConnection(connection, pid)

    def close(self) -> None:
        self._listener.close()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
