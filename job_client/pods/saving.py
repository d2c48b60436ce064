"""Write the state that shims hold as a checkpoint, in a process of its own."""

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from job_client.threads import start_thread
from job_server.api.wire import Save, SavePhase, SaveState
from pod_runtime import env, save_wire, shim_wire

logger = logging.getLogger(__name__)

MAX_STARTS = 3  # of a writer that dies without a result
_MARKS = (
    env.RUN_MARKER,
    env.POD_ID,
    "EDL_POD_DIR",
)  # marks that get a process killed


class SaveAttempt:
    """One try to write a state. Thread-safe; its thread starts the writer and reads its output.

    The writer dies with this process: the next client of the node starts another one.
    """

    def __init__(
        self,
        order: Save,
        folders: Sequence[Path],
        environment: Mapping[str, str],
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            folders: of shims; the newest of their states is written.
            environment: of the pod, since its script may need it to reach the checkpoints.
            changed: called when the try is over.
        """
        self.order = order
        self.state = SaveState(id=order.id, phase=SavePhase.WRITING)
        self._folders = list(folders)
        self._environment = writer_environment(environment)
        self._changed = changed
        self._lock = threading.Lock()  # guards _process and _cancelled
        self._process: subprocess.Popen[str] | None = None  # None: none runs
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def cancel(self) -> None:
        """Kill the writer; `is_over` is true once it is dead. `state` stays as it is."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        why = ""
        for _ in range(MAX_STARTS):
            why = self._try()
            if self._cancelled:
                return
            if self.state.phase is not SavePhase.WRITING:
                break
            logger.warning("the writer of a checkpoint %s", why)
        else:
            self.state = replace(
                self.state, phase=SavePhase.FAILED, reason=f"the writer {why}, {MAX_STARTS} times"
            )
        state = self.state
        if state.phase is SavePhase.WRITTEN:
            logger.info("step %d is written to %s", state.step, state.path)
        else:
            logger.error("step %d is not written: %s", state.step, state.reason)
        self._changed()

    def _try(self) -> str:
        """Run one writer to its end; return how it ended."""
        try:
            with self._lock:
                if self._cancelled:
                    return "was cancelled"
                process = self._process = save_wire.start(
                    self.order, self._folders, self._environment
                )
        except OSError as error:
            return f"cannot be started: {error}"
        assert process.stdout is not None
        last_line = ""
        with process.stdout:
            for line in process.stdout:
                state = save_wire.read_line(line)
                if state is not None:
                    self.state = state
                else:
                    last_line = line.strip() or last_line
        code = process.wait()
        with self._lock:
            self._process = None
        return f"ended with {code}" + (f": {last_line}" if last_line else "")


def writer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a pod's environment for a process that must survive the end of the pod."""
    own = {name: value for name, value in environment.items() if name not in _MARKS}
    root = Path(shim_wire.__file__).resolve().parents[1]
    if not {"site-packages", "dist-packages"} & set(root.parts):  # a clone, not installed
        paths = [str(root), environment.get("PYTHONPATH", "")]
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return own
