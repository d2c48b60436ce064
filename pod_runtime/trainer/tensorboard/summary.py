"""Write one TensorBoard or VisualDL run of a training, across all its stages and crashes.

    log = RunLog(loop, "runs/resnet50")
    ...
    log.add_scalar("loss", loss)

FOLDER/events.out.tfevents.%010d.edl.epoch_E.step_S    one file per stage, from (E, S) on

A stage that begins at (E, S) removes what earlier ones noted from there on, because it will be
noted again: each point is there once. Every point reaches the kernel when it is noted, so a SIGKILL
loses none.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.tensorboard.event_file import (
    Position,
    Scalar,
    encode_header,
    encode_scalar,
    read_scalars,
)

logger = logging.getLogger(__name__)

KINDS = ("auto", "tensorboard", "visualdl")
_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.edl\.epoch_(\d+)\.step_(\d+)\Z")


class HasProgress(Protocol):
    """What `RunLog` asks of a loop; `elastic.Loop` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def step_count(self) -> int: ...


class RunLog:
    """Curves for TensorBoard, which go on through changes and restarts of a training.

    Those of rank 0 count; on other ranks all calls do nothing, so that scripts need no `if`.
    """

    def __init__(
        self, loop: HasProgress, folder: str | os.PathLike[str], kind: str = "auto"
    ) -> None:
        """Take over what is there, as far as `loop` has got.

        Make it when the loop is made, before the first step. A folder that cannot be written is an
        error in the log, and the training goes on without.

        Args:
            loop: the `elastic.Loop`, or an object with `rank`, `epoch` and `step_count`.
            folder: of this run alone, on this node or shared by all; rank 0 may move.
            kind: "tensorboard" needs nothing but `pip install tensorboard` where it is looked at;
                "visualdl" writes VisualDL's file as well; "auto" is "tensorboard".

        Raises:
            UsageError: an argument is wrong, or visualdl is asked for and not installed.
        """
        if kind not in KINDS:
            raise UsageError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if "://" in os.fspath(folder):
            raise UsageError(
                f"folder: expected a local or mounted folder, got the URL {os.fspath(folder)!r}"
            )
        self._make_mirror = _visualdl_writer() if kind == "visualdl" else None
        self._loop, self._root = loop, Path(folder)
        self._is_off = False  # closed, or it cannot be written
        self._file: _EventWriter | None = None  # None: another rank writes, or nobody
        self._mirror: Any = None  # None: no VisualDL
        self._follow_rank()

    @property
    def _counts(self) -> bool:
        """Whether what the script does now is part of its training, as far as the loop says it."""
        return bool(getattr(self._loop, "_counts", True))

    def _follow_rank(self) -> None:
        """Write where this is rank 0, and nowhere else: a trainer that stays may become it."""
        if not self._counts:  # a rehearsal stands at step 0, and would take over all that is there
            return
        is_mine = self._loop.rank == 0
        if is_mine and self._file is None and not self._is_off:
            self._open()
        elif not is_mine and self._file is not None:
            self._let_go()

    def _open(self) -> None:
        position, root = Position(self._loop.epoch, self._loop.step_count), self._root
        try:
            stages = take_over(root, position)
            number = stages[-1].number + 1 if stages else 1
            if self._make_mirror is not None:
                self._mirror = _rebuild_mirror(root, number, stages, self._make_mirror)
            self._file = _EventWriter(root, number, position)
        except OSError as error:
            self._is_off = True
            logger.error(
                "folder: %s cannot be written: %s; the training goes on without this log",
                root,
                error.strerror or error,
            )

    def add_scalar(self, tag: str, value: Any, step: int | None = None) -> None:
        """Note one point.

        Args:
            tag: name of the curve.
            value: a number, or a tensor with one element.
            step: position on the axis; None: the loop's count of steps.

        Raises:
            UsageError: an argument is wrong.
        """
        if not tag or "%" in tag:  # VisualDL has no place for that
            raise UsageError(f"tag: expected a name without %, got {tag!r}")
        if step is None:
            step = self._loop.step_count
        if type(step) is not int or step < 0:
            raise UsageError(f"step: expected a whole number of at least 0, got {step!r}")
        self._follow_rank()
        if self._loop.rank != 0:
            return
        try:
            number = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"value: {tag}: expected a number, got {value!r:.80}") from error
        if self._file is None or not self._counts:
            return
        scalar = Scalar(
            tag=tag,
            value=number,
            step=step,
            wall_time=time.time(),
            at=Position(self._loop.epoch, self._loop.step_count),
        )
        self._file.add(scalar)
        if self._mirror is not None:
            try:
                _add_to_mirror(self._mirror, scalar)
                self._mirror.flush()
            except OSError as error:
                logger.error("VisualDL's file is not written any more: %s", error)
                self._mirror = None

    def close(self) -> None:
        """Sync to the disk. Without it a power cut may lose points, and nothing else."""
        self._is_off = True
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """The event file of one stage."""

    path: Path
    number: int
    start: Position


def take_over(folder: Path, position: Position) -> list[StageFile]:
    """Remove what was noted at `position` or later; return the files that are left, in order.

    A file that loses its end is replaced as a whole: a trainer that was cut off and still lives
    keeps writing to the old one, which is not read.

    Raises:
        OSError: the folder cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for stage in _stage_files(folder):
        if stage.start < position:
            kept.append(stage)
        else:
            stage.path.unlink()
    if kept:
        last = kept[-1]  # those before it were cut where their successors begin
        data = last.path.read_bytes()
        end = 0
        for offset, scalar in read_scalars(data):
            if scalar is not None and scalar.at >= position:
                break
            end = offset
        if end < len(data):
            temporary = folder / f"cut.{os.getpid()}.part"
            try:
                temporary.write_bytes(data[:end])
                temporary.replace(last.path)
            except OSError:  # a full disk
                temporary.unlink(missing_ok=True)
                raise
    return kept


def _stage_files(folder: Path) -> list[StageFile]:
    found = []
    for path in folder.iterdir():
        match = _FILE.match(path.name)
        if match:
            start = Position(int(match[2]), int(match[3]))
            found.append(StageFile(path=path, number=int(match[1]), start=start))
    return sorted(found, key=lambda stage: stage.number)


class _EventWriter:
    """Appends records to the file of this stage."""

    def __init__(self, folder: Path, number: int, start: Position) -> None:
        name = f"events.out.tfevents.{number:010d}.edl.epoch_{start.epoch}.step_{start.step}"
        self._path = folder / name
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._size = 0
        self._failed = False
        self._append(encode_header(time.time()))

    def add(self, scalar: Scalar) -> None:
        """Append; a full disk is logged once, and the point is lost."""
        try:
            self._append(encode_scalar(scalar))
        except OSError as error:
            if not self._failed:
                logger.error(
                    "%s: not written: %s; the training goes on, points are missing until it works",
                    self._path,
                    error.strerror or error,
                )
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            logger.error("%s: may not be on the disk: %s", self._path, error.strerror)
        finally:
            os.close(self._fd)

    def _append(self, record: bytes) -> None:
        # At our own offset: half a record of a full disk is written over by the next one.
        written = 0
        while written < len(record):
            written += os.pwrite(self._fd, record[written:], self._size + written)
        self._size += len(record)


def _visualdl_writer() -> Any:
    try:
        from visualdl import LogWriter
    except ImportError as error:
        raise UsageError(
            f"kind: visualdl cannot be imported ({error}); pip install visualdl, or use "
            f'kind="tensorboard", which needs nothing'
        ) from error
    return LogWriter


def _rebuild_mirror(folder: Path, number: int, stages: list[StageFile], make: Any) -> Any:
    """Return VisualDL's writer of a new file with all earlier points: it shows one file only."""
    for path in folder.glob("vdlrecords.*.edl.log"):
        path.unlink()
    writer = make(logdir=str(folder), file_name=f"vdlrecords.{number:010d}.edl.log")
    for scalar in _scalars(stages):
        _add_to_mirror(writer, scalar)
    writer.flush()
    return writer


def _scalars(stages: list[StageFile]) -> Iterator[Scalar]:
    for stage in stages:
        for _offset, scalar in read_scalars(stage.path.read_bytes()):
            if scalar is not None:
                yield scalar


def _add_to_mirror(writer: Any, scalar: Scalar) -> None:
    milliseconds = round(scalar.wall_time * 1000)
    writer.add_scalar(scalar.tag, scalar.value, scalar.step, walltime=milliseconds)
