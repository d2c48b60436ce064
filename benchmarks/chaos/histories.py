"""Random histories of a simulated cluster, in virtual time: thousands of them."""

import logging
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.job_server.rough_stories import RoughStory
from tests.job_server.sick_stories import SickStory

_LENGTH = 50  # things that happen in each


def run_histories(first: int, count: int) -> list[str]:
    """Run those of `count` seeds from `first` on; return what does not hold."""
    found: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="edl-chaos-") as folder,
        multiprocessing.Pool(max(1, (os.cpu_count() or 1) // 2)) as pool,
    ):
        run = partial(run_history, Path(folder))
        for number, error in enumerate(pool.imap_unordered(run, range(first, first + count)), 1):
            if error:
                found.append(error)
                print(error, flush=True)
            if number % 200 == 0:
                print(f"{number} histories, {len(found)} with faults", flush=True)
    print(f"histories: {count}, from seed {first}")
    return found


def run_history(folder: Path, seed: int) -> str:
    """Run one; return what does not hold, in a line, or "". All of it follows from the seed."""
    logging.disable(logging.CRITICAL)  # a full disk's errors are part of it
    kind = SickStory if seed // 10 % 2 else RoughStory
    story = kind(seed, folder, late=seed % 3 == 1, shared=seed % 2 == 1)
    try:
        for job_id in story.names[:3]:
            story.submit(job_id)
        for _ in range(_LENGTH):
            story.happen()
        story.finish()
    except Exception as error:  # noqa: BLE001  any of them is a find
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"history {seed}: {type(error).__name__}: {error} ({where.name}, {where.lineno})"
    finally:
        story.end_server(kill=True)
        for path in _files(folder, seed):
            path.unlink()
    return ""


def _files(folder: Path, seed: int) -> Iterator[Path]:
    yield from folder.glob(f"{seed}.db*")
