"""Read and write the folder of a pod's shim, as the client uses it.

    pod.json    the server's `NodePod`, written before anything is started
    saved.json  `wire.SaveState`: where the client wrote the pod's state as it ended
    released    the server does not know this pod any more
    server      where the job server is: for a launcher that was started by an earlier client
    shim.json, exit.json, sock, log     the shim's: `pod_runtime.shim_wire`

A client may have been killed at any moment, so a folder's meaning depends on its content alone.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from job_server.api.wire import NodePod, SaveState, WireError, decode, encode
from pod_runtime import processes, shim_wire

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S = 0.2  # between two tries to read, where this process is short of descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimProcess:
    """Which process is a pod's shim."""

    pid: int
    start_time: int  # clock ticks since boot

    def is_alive(self) -> bool:
        return processes.is_alive(self.pid, self.start_time)


def folder_of(pods_dir: Path, pod: NodePod) -> Path:
    """Return the folder of the shim of `pod`.

    Pods of one job have the same parent folder, since they look into each other's. Jobs by folder
    have a parent folder each, since pod ids are unique within a job only.
    """
    return pods_dir / pod.pod_id if pod.folder is None else pods_dir / pod.job_id / pod.pod_id


def prepare(folder: Path, pod: NodePod) -> None:
    """Make the folder of a pod that is about to start. That of an earlier pod is renamed.

    Raises:
        OSError: the disk is full, or the folder may not be written.
    """
    if (folder / "released").exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    of_last = ("shim.json", "exit.json", "saved.json", "sock", "log")
    for name in (*of_last, shim_wire.CLAIM, shim_wire.REFUSED, shim_wire.SERVER):
        (folder / name).unlink(missing_ok=True)
    shim_wire.write_json(folder / "pod.json", encode(pod))


def is_gone(folder: Path) -> bool:
    """Return whether somebody has deleted the folder of a pod that was prepared."""
    try:
        return not (folder / "pod.json").exists()
    except OSError:  # the disk or the file server is in trouble: nobody can tell now
        return False


def is_deaf(folder: Path) -> bool:
    """Return whether the socket is gone by which a pod's shim is asked."""
    try:
        return not (folder / "sock").exists()
    except OSError:  # as above
        return False


def is_complete(folder: Path) -> bool:
    """Return whether the pod's launcher has written that its training is complete."""
    try:
        return bool((folder / shim_wire.CLAIM).read_bytes())
    except OSError:
        return False


def release(folder: Path) -> None:
    """Mark the folder as released; its log stays."""
    try:
        (folder / "released").touch()
        (folder / "sock").unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: cannot be marked as released: %s", folder, error)


def drop_oldest(pods_dir: Path, keep: int) -> None:
    """Delete the folders, with their logs, of all but the `keep` pods that were released last.

    One that holds a training's state stays, or says where the client wrote it, and one that cannot
    be deleted. A paused job, or one that waits its turn, goes on from there.

    Raises:
        OSError: the disk is in trouble.
    """
    marks = [*pods_dir.glob("*/released"), *pods_dir.glob("*/*/released")]
    old = sorted(marks, key=lambda mark: mark.stat().st_mtime)[: max(0, len(marks) - keep)]
    for folder in [mark.parent for mark in old]:
        try:
            if (folder / "saved.json").exists() or shim_wire.holds_state(folder):
                continue
            shutil.rmtree(folder)
            logger.info("%s: deleted, as %d pods have ended since (--keep_folders)", folder, keep)
        except OSError as error:  # in use, say: tried at the next pod's end
            logger.warning("%s: this folder of an old pod stays: %s", folder, error)


def find(pods_dir: Path) -> Iterator[tuple[Path, NodePod]]:
    """Return the folders of pods that were started (or begun) and not released."""
    for path in sorted([*pods_dir.glob("*/pod.json"), *pods_dir.glob("*/*/pod.json")]):
        folder = path.parent
        if (folder / "released").exists():
            continue
        try:
            pod = decode(NodePod, json.loads(_read_when_possible(path.read_text)))
        except (OSError, ValueError, WireError) as error:
            logger.warning("%s: not adopted, its pod.json cannot be read: %s", folder, error)
            continue
        yield folder, pod


def read_shim(folder: Path) -> ShimProcess | None:
    """Return the shim that was started for this folder, alive or not; None if there was none."""
    try:
        data = json.loads(_read_when_possible(lambda: (folder / "shim.json").read_text()))
        return ShimProcess(pid=int(data["pid"]), start_time=int(data["start_time"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: shim.json cannot be read: %s", folder, error)
        return None


def has_shim(folder: Path) -> bool:
    """Return whether the shim of this folder is alive."""
    shim = read_shim(folder)
    return shim is not None and shim.is_alive()


def read_exit(folder: Path) -> shim_wire.PodExit | None:
    """Return how the pod ended; None if it has not, or if that was never written."""
    try:
        return _read_when_possible(lambda: shim_wire.read_exit(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: exit.json cannot be read: %s", folder, error)
        return None


def _read_when_possible(read: Callable[[], T]) -> T:
    """Return what `read` returns; wait while this process has no descriptor or memory for it.

    A pod that cannot be looked at must not count as one that died without a word.
    """
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in processes.SHORT:
                raise
            logger.warning("how a pod is cannot be read now: %s", error)
            time.sleep(_AGAIN_S)


def write_server(folder: Path, url: str) -> None:
    """Tell the pod's launcher where the job server is."""
    try:
        shim_wire.write_json(folder / shim_wire.SERVER, {"url": url})
    except OSError as error:
        logger.warning("%s: its launcher is not told where the server is: %s", folder, error)


def read_saved(folder: Path) -> SaveState | None:
    """Return where the client before this one wrote the pod's state; None: it did not."""
    try:
        text = _read_when_possible(lambda: (folder / "saved.json").read_text())
        return decode(SaveState, json.loads(text))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, WireError) as error:
        logger.warning("%s: saved.json cannot be read: %s", folder, error)
        return None


def write_saved(folder: Path, saved: SaveState) -> None:
    """Note where the pod's state is, for the next client of this folder."""
    try:
        shim_wire.write_json(folder / "saved.json", encode(saved))
    except OSError as error:
        logger.warning("%s: saved.json not written: %s", folder, error)


def write_exit(folder: Path, ended: shim_wire.PodExit) -> None:
    """Write the exit of a pod whose shim could not."""
    try:
        shim_wire.write_json(folder / "exit.json", encode(ended))
    except OSError as error:
        logger.warning("%s: exit.json not written: %s", folder, error)
