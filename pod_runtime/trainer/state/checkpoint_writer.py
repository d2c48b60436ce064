"""Write checkpoints in the background: one at a time, from a copy of the state."""

import logging
import threading
import time
from collections.abc import Callable

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.host_state import HostState

logger = logging.getLogger(__name__)

_LONG_S = 1200.0  # for one checkpoint: it is said
_TROUBLE_CHARS = 300


class CheckpointWriter:
    """One background thread, started for each checkpoint; none is left when none is written."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._thread: threading.Thread | None = None  # None: nothing was ever written
        self._error: Exception | None = None  # of the newest attempt
        self._begun_at = 0.0  # of that, by time.monotonic()
        self._trouble: str | None = None  # as of `trouble`, when the newest attempt was over

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """The newest attempt is over, without a checkpoint."""
        return not self.busy and self._error is not None

    @property
    def trouble(self) -> str | None:
        """Why the newest checkpoint is not written; "": it is. None: no attempt is over yet."""
        if self.busy and time.monotonic() > self._begun_at + _LONG_S:
            minutes = f"{_LONG_S / 60:.0f} min"
            return f"a checkpoint has been in writing for more than {minutes}, training goes on"
        return self._trouble

    def start(self, host_state: HostState) -> None:
        """Write a state in the background. The caller leaves its memory alone until not `busy`."""
        self.start_from(lambda: host_state)

    def start_from(self, take: Callable[[], HostState]) -> None:
        """As `start`, of a state that `take` returns; it is called in the background."""
        assert not self.busy
        self._begun_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._write, args=(take,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the one in progress.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            if self._error is not None:
                raise CheckpointError(str(self._error)) from self._error

    def _write(self, take: Callable[[], HostState]) -> None:
        self._error = None
        what = "a checkpoint"
        try:
            host_state = take()
            what = f"checkpoint of step {host_state.status.step}"
            made = self.store.write(host_state)
        except Exception as error:  # noqa: BLE001  any store may fail in its own way; training goes on
            self._error = error
            text = f"{what} failed, training goes on, the next save tries again: {error}"
            self._trouble = " ".join(text.split())[:_TROUBLE_CHARS]
            logger.error("%s", text)
            return
        self._trouble = ""
        logger.info(
            "checkpoint %s written in %.2f s", made.folder, time.monotonic() - self._begun_at
        )
