"""Write the newest state that shims hold as a checkpoint; its trainers may be gone.

    python -m pod_runtime.save [--id N] [--spare] POD_DIR...

Run by the job client when a job is paused or ends. It needs no framework: the state describes
itself, and names its script's folder of checkpoints. If that cannot be written, or the script has
none, the state goes to `RUN_DIR/checkpoint`. A try that was killed leaves a folder without a
manifest, which the next one overwrites.

Prints `wire.SaveState`s as JSON lines, the last of them WRITTEN (exit code 0) or FAILED (1).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from job_server.api.wire import SavePhase, SaveState, encode
from pod_runtime.errors import PodRuntimeError
from pod_runtime.processes import die_with_parent
from pod_runtime.segment_header import SlotHeader, read_geometry, read_newest, read_slots
from pod_runtime.shim_wire import ShimError, request

_PRINT_PERIOD_S = 0.2
_FOUND = "EDL_SAVE_HERE"  # set: this interpreter is the trainers'


class NothingHeldError(PodRuntimeError):
    """There is no state to be written."""


def find_newest(pod_dirs: Iterable[Path]) -> tuple[SlotHeader, int]:
    """Return the newest state that any of the shims holds, and its segment's descriptor.

    Raises:
        NothingHeldError: all shims answer, and none holds a state.
        ShimError: a shim does not answer, and the others hold none.
    """
    found: list[tuple[SlotHeader, int]] = []
    whys = []
    for pod_dir in pod_dirs:
        try:
            _, fds = request(pod_dir, {"op": "get", "stage": None})
        except ShimError as error:
            whys.append(str(error))
            continue
        found += [(header, fd) for fd in fds if (header := read_newest(fd)) is not None]
    if not found and not whys:
        raise NothingHeldError("no shim of this node holds a snapshot")
    if not found:
        raise ShimError("; ".join(whys))
    return max(found, key=lambda each: each[0].stamp)


def trainers_python(fd: int, header: SlotHeader) -> str | None:
    """Return the interpreter that a state's trainers ran in; None: not known."""
    geometry = read_geometry(fd)
    slot = next((slot for slot, each in read_slots(fd, geometry) if each == header), None)
    if geometry is None or slot is None:
        return None
    try:
        places = json.loads(os.pread(fd, header.meta_bytes, geometry.meta_offset(slot)))["places"]
        return str(places["python"])
    except (ValueError, KeyError, TypeError):
        return None


class _Progress:
    """Prints how far the writing is, at most every `_PRINT_PERIOD_S`."""

    def __init__(self, state: SaveState) -> None:
        self._state = state
        self._printed_at = 0.0

    def print(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._printed_at = time.monotonic()
        sys.stdout.write(json.dumps(encode(self._state)) + "\n")
        sys.stdout.flush()

    def written(self, count: int) -> None:
        if time.monotonic() - self._printed_at >= _PRINT_PERIOD_S:
            self.print(written_bytes=count)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pod_runtime.save", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--id", type=int, default=0, help="of the order; the answer carries it")
    parser.add_argument("--spare", action="store_true", help="to the run folder only")
    parser.add_argument("--parent", type=int, help="end when this process, the parent, does")
    parser.add_argument("pod_dirs", nargs="+", type=Path, metavar="POD_DIR")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
    progress = _Progress(SaveState(id=args.id, phase=SavePhase.WRITING))
    try:
        header, fd = find_newest(args.pod_dirs)
        _go_where_the_trainers_were(trainers_python(fd, header), argv)
        stamp = header.stamp
        progress.print(
            stage=stamp.stage, step=stamp.step, serial=stamp.serial, total_bytes=header.data_bytes
        )
        # Only now: the client's own interpreter may lack what this imports.
        from pod_runtime.trainer.state.last_save import write_state

        path, spare = write_state(fd, stamp, spare=args.spare, report=progress.written)
    except (PodRuntimeError, OSError, ImportError) as error:
        nothing = isinstance(error, NothingHeldError)
        progress.print(phase=SavePhase.FAILED, reason=str(error), nothing=nothing)
        return 1
    progress.print(phase=SavePhase.WRITTEN, path=path, spare=spare, written_bytes=header.data_bytes)
    return 0


def _go_where_the_trainers_were(python: str | None, argv: Sequence[str] | None) -> None:
    """Go on in the trainers' interpreter, which has what their checkpoint path needs."""
    here = python is None or python == sys.executable or not os.access(python, os.X_OK)
    if here or os.environ.get(_FOUND) or python is None:
        return
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = [python, "-m", "pod_runtime.save", *arguments]
    os.execve(python, command, {**os.environ, _FOUND: "1"})


if __name__ == "__main__":
    sys.exit(main())
