"""Write checkpoints in the background: one at a time, from a copy of the state."""

import logging
import threading
import time
from collections.abc import Callable

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.host_state import HostState

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """One background thread, started for each checkpoint; none is left when none is written."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._thread: threading.Thread | None = None  # None: nothing was ever written
        self._error: Exception | None = None  # of the newest attempt

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """The newest attempt is over, without a checkpoint."""
        return not self.busy and self._error is not None

    def start(self, host_state: HostState) -> None:
        """Write a state in the background. The caller leaves its memory alone until not `busy`."""
        self.start_from(lambda: host_state)

    def start_from(self, take: Callable[[], HostState]) -> None:
        """As `start`, of a state that `take` returns; it is called in the background."""
        assert not self.busy
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
        begun = time.monotonic()
        self._error = None
        what = "a checkpoint"
        try:
            host_state = take()
            what = f"checkpoint of step {host_state.status.step}"
            made = self.store.write(host_state)
        except Exception as error:  # noqa: BLE001  any store may fail in its own way; training goes on
            self._error = error
            logger.error("%s failed, training goes on, the next save tries again: %s", what, error)
            return
        logger.info("checkpoint %s written in %.2f s", made.folder, time.monotonic() - begun)
