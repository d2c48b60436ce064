"""Write a state in memory as a checkpoint, after its trainers are gone. Needs no framework."""

from collections.abc import Callable, Iterable, Iterator

from pod_runtime.segment_header import Stamp
from pod_runtime.trainer.errors import CheckpointError, StateError
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.host_state import HostState, SaveTarget
from pod_runtime.trainer.state.owner import Owner, job_holder
from pod_runtime.trainer.state.snapshot import read_snapshot
from pod_runtime.trainer.state.storage import Chunk, Storage, open_storage

_PIECE_BYTES = 16 << 20  # a tensor may be larger than what is written in a second

ReportBytes = Callable[[int], None]  # bytes given to the storage so far


def write_state(fd: int, stamp: Stamp, *, spare: bool, report: ReportBytes) -> tuple[str, bool]:
    """Write the state `stamp` of a segment to its save target; returns as `write_host_state`.

    Raises:
        CheckpointError: it could not be written anywhere; the text says why, for each path.
        StateError: the segment does not hold it, or is damaged.
    """
    host_state = read_snapshot([fd], stamp)
    if host_state is None:
        raise StateError(f"the snapshot of step {stamp.step} cannot be read")
    if host_state.save_target is None:
        raise StateError("the trainers were of a version that did not say where to write it")
    return write_host_state(host_state, host_state.save_target, spare=spare, report=report)


def write_host_state(
    host_state: HostState, target: SaveTarget, *, spare: bool, report: ReportBytes
) -> tuple[str, bool]:
    """Write a state; return the path of checkpoints that it is in, and whether that is the spare.

    Args:
        spare: write to the run folder only.

    Raises:
        CheckpointError: it could not be written anywhere; the text says why, for each path.
    """
    paths = [] if spare or not target.checkpoint else [(target.checkpoint, False)]
    if target.run_dir:
        paths.append((f"{target.run_dir}/checkpoint", True))
    whys = [] if paths else ["the state does not say where its run folder is"]
    for path, is_spare in paths:
        try:
            if is_spare:
                path = _apart(path, host_state.status.run_id)
            storage = open_storage(path)
            owner = None
            if target.job_id and not is_spare:  # as any process of the job; another's is refused
                me = job_holder(target.job_id, target.submitted_at, target.server)
                owner = Owner(storage, me)
            CheckpointStore(_Watched(storage, report), keep=target.keep, owner=owner).write(
                host_state
            )
        except (CheckpointError, OSError) as error:
            whys.append(str(error))
        else:
            return path, is_spare
    raise CheckpointError("; ".join(whys))


def _apart(path: str, run_id: str) -> str:
    """Return where in a run folder this training's state goes.

    An earlier job of the same name may have had this folder, and its state stays.
    """
    is_anothers = CheckpointStore(open_storage(path)).is_anothers(run_id)
    return f"{path}-{run_id}" if is_anothers else path


class _Watched:
    """A storage that reports how many bytes were written to it."""

    def __init__(self, storage: Storage, report: ReportBytes) -> None:
        self.name = storage.name
        self.folders, self.files, self.read = storage.folders, storage.files, storage.read
        self.commit, self.remove = storage.commit, storage.remove
        self._storage, self._report = storage, report
        self._written = 0

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        self._storage.write(path, self._reported(chunks))

    def _reported(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                yield piece
                self._written += len(piece)
                self._report(self._written)
