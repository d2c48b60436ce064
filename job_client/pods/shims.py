"""Start the shim of a pod, and follow it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from job_client.errors import PodStartError
from job_client.pods.pod_folder import ShimProcess, read_shim
from job_server.api.wire import SnapshotRef
from pod_runtime import shim_wire
from pod_runtime.segment_header import read_newest
from pod_runtime.shim_wire import PodExit, ShimError

START_TIMEOUT_S = 30.0  # a machine that swaps is slow, not broken

# Without the site packages a start takes half as long, and no `sitecustomize` or .pth file can
# break the process that holds the pod. The script's environment is untouched.
_CODE = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from pod_runtime.shim.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


def start(folder: Path, command: list[str], *, cwd: Path, env: Mapping[str, str]) -> ShimProcess:
    """Start `command` under a shim of its own, which outlives this process.

    Returns once the shim answers on its socket.

    Raises:
        PodStartError: it did not come up; says why.
    """
    root = str(Path(shim_wire.__file__).resolve().parents[1])
    argv = [sys.executable, "-I", "-S", "-c", _CODE.format(root=root)]
    argv += ["--pod_dir", str(folder), "--detach", "--", *command]
    try:
        started = subprocess.run(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PodStartError(f"the pod's shim did not start: {error}") from None
    shim = read_shim(folder)
    if started.returncode != 0 or shim is None:
        text = started.stderr.decode(errors="replace").strip().splitlines()
        raise PodStartError(f"the pod's shim did not start: {text[-1] if text else 'no reason'}")
    return shim


def follow(folder: Path) -> PodExit | None:
    """Wait until the pod of `folder` has ended, and return how; None: the connection closed.

    Raises:
        ShimError: the shim does not answer.
    """
    line = shim_wire.connect(folder)
    try:
        line.send({"op": "watch", "exit": True, "fds": 0})
        line.socket.settimeout(None)
        while True:
            received = line.receive()
            if received is None:
                return None
            ended = received[0].get("exit")
            if ended is not None:
                return _exit(ended)
    except OSError as error:
        raise ShimError(f"{folder}: watch: {error}") from error
    finally:
        line.close()


def newest_held(folder: Path, timeout_s: float) -> SnapshotRef | None:
    """Return the newest state that the shim of `folder` holds; None: none, or it does not answer.

    Launchers report that as well, but the server may not have heard of it while they lived.
    """
    try:
        _, fds = shim_wire.request(folder, {"op": "get", "stage": None}, timeout_s=timeout_s)
    except ShimError:
        return None
    try:
        found = [header for fd in fds if (header := read_newest(fd)) is not None]
    finally:
        for fd in fds:
            os.close(fd)
    newest = max(found, key=lambda header: header.stamp, default=None)
    if newest is None:
        return None
    stamp = newest.stamp
    return SnapshotRef(
        stage=stamp.stage, step=stamp.step, digest=newest.digest, serial=stamp.serial
    )


def wait_closed(folder: Path) -> None:
    """Wait until the shim of `folder` ends; its pod has ended already."""
    try:
        line = shim_wire.connect(folder)
    except ShimError:
        return
    try:
        line.send({"op": "watch", "fds": 0})
        line.socket.settimeout(None)
        while line.receive() is not None:
            pass
    except OSError:
        return
    finally:
        line.close()


def _exit(data: object) -> PodExit:
    if not isinstance(data, dict):
        raise ShimError(f"exit: expected an object, got {json.dumps(data)[:80]}")
    return PodExit(
        code=data.get("code"),
        signal=data.get("signal"),
        reason=str(data.get("reason", "")),
        last_lines=tuple(map(str, data.get("last_lines", ()))),
    )
