"""Do what the job client of `edl run` can do no more: end pods, and write their newest state."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from job_server.api.wire import Save, SavePhase, SaveState
from pod_runtime import save_wire
from pod_runtime.shim_wire import ShimError, request

_LOOK_EVERY_S = 0.1
_MARGIN_S = 5.0  # beyond the grace, for a shim that kills what is left of its pod


def find_pods(pods_dir: Path) -> list[Path]:
    """Return the folders of the shims that have a pod, or hold a state of one."""
    found = []
    for folder in sorted(pods_dir.glob("*")):
        with contextlib.suppress(ShimError):
            answer, _ = request(folder, {"op": "status"})
            if answer["running"] or answer["segments"]:
                found.append(folder)
    return found


def end_pods(folders: Sequence[Path], grace_s: float, is_cancelled: Callable[[], bool]) -> None:
    """End all pods, and wait for that; their shims stay with what they hold."""
    for folder in folders:
        with contextlib.suppress(ShimError):
            request(folder, {"op": "stop", "grace_s": grace_s})
    deadline = time.monotonic() + grace_s + _MARGIN_S
    while any(_runs(folder) for folder in folders):
        if is_cancelled() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_EVERY_S)


def _runs(folder: Path) -> bool:
    try:
        return bool(request(folder, {"op": "status"})[0]["running"])
    except ShimError:
        return False


def write_newest(
    folders: Sequence[Path], env: Mapping[str, str], is_cancelled: Callable[[], bool]
) -> SaveState:
    """Write the newest state that the shims hold, as a client does that is ended.

    Args:
        folders: of shims whose pods have ended; one that holds nothing has ended with its pod.
    """
    if not folders:
        return SaveState(id=0, phase=SavePhase.FAILED, nothing=True)
    try:
        process = save_wire.start(Save(id=0), folders, env)
    except OSError as error:
        return _failed(f"its writer cannot be started: {error}")
    while True:
        try:
            output, _ = process.communicate(timeout=_LOOK_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            if is_cancelled():
                process.kill()
    state, said = _failed(""), ""
    for line in output.splitlines():
        found = save_wire.read_line(line)
        if found is not None:
            state = found
        else:
            said = line.strip() or said
    if state.phase is SavePhase.WRITING or not (state.reason or state.path):
        return _failed(f"its writer has ended with {process.returncode}: {said}")
    return state


def _failed(reason: str) -> SaveState:
    return SaveState(id=0, phase=SavePhase.FAILED, reason=reason)
