"""Start threads, also where the machine has no memory or process id left for a moment."""

import logging
import threading
import time

logger = logging.getLogger(__name__)

AGAIN_S = 0.5


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; wait until it can be started. Without it the client could do nothing else."""
    while True:
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("%s: %s; trying again", thread.name, error)
            time.sleep(AGAIN_S)
        else:
            return
