"""Open a client's log folder: its lock, its marker, its pods."""

import contextlib
import fcntl
import os
import re
import socket
import uuid
from pathlib import Path

from job_client.errors import SetupError
from job_server.api.wire import check_id

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClientDir:
    """The folder of one client while it runs, and of its successor after that.

    Raises:
        SetupError: the folder cannot be written, or another client has it.
    """

    def __init__(self, log_dir: Path) -> None:
        self.pods_dir = log_dir / "pods"
        try:
            self.pods_dir.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(log_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(log_dir, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SetupError(
                f"--log_dir: another job client runs in {log_dir}; end it, or give this one a "
                "folder of its own"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise SetupError(
                f"--log_dir: {log_dir} cannot be locked ({error.strerror}); give a folder on a "
                "local disk"
            ) from None
        self.log_dir = log_dir
        try:
            self.marker = self._read_marker()
        except OSError as error:
            self.close()
            raise _unwritable(log_dir, error) from None

    def _read_marker(self) -> str:
        """Return the mark of this folder's processes: made once, and unique."""
        path = self.log_dir / "marker"
        try:
            marker = path.read_text().strip()
        except FileNotFoundError:
            marker = ""
        if not re.fullmatch(r"[0-9a-f]{32}", marker):
            marker = uuid.uuid4().hex
            path.write_text(marker + "\n")
        return marker

    def client_id(self) -> str:
        """Return what the server knows this folder's clients by, as long as the machine is up.

        Machines that were made of one image may have the same folder and the same name. Two such
        clients have to be two to the server, or both would run the pods of one node.
        """
        boot = ""
        with contextlib.suppress(OSError):
            boot = BOOT_ID.read_text().replace("-", "")[:8]
        return self.marker[:8] + boot

    def default_node_id(self, *, stays: bool) -> str:
        """Return an id that two clients on one host do not share and a restart keeps.

        Args:
            stays: pods of the client before live here, so that its id counts, whatever the host is
                called by now. Else it does not: the folder may be of another machine's image.
        """
        kept = self.log_dir / "node_id"
        with contextlib.suppress(OSError, ValueError):
            before = kept.read_text().strip()
            check_id("node_id", before)
            if stays:
                return before
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "node"
        made = f"{host[:80]}-{self.marker[:4]}"
        with contextlib.suppress(OSError):  # a full disk
            kept.write_text(made + "\n")
        return made

    def close(self) -> None:
        os.close(self._lock)


def _unwritable(log_dir: Path, error: OSError) -> SetupError:
    return SetupError(f"--log_dir: cannot write {log_dir}: {error.strerror}")
