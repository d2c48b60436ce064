"""Show the trainers' output in `edl run`: line by line, and the same traceback only once."""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pod_runtime.local.view import patient_output

_LOG = re.compile(r"trainer_(\d+)\.stage_(\d+)\.log")
_LONGEST = 300  # lines of a traceback; what is longer is shown as it comes
_LONGEST_LINE = 1 << 16  # bytes without a newline that are not shown yet: a bar may never have one
_KNOWN = 50  # tracebacks that are remembered
_STAGES = 3  # the logs of this many newest stages are read each time, ...
_RARELY = 10  # ... those of the others only every tenth time
_NEAR = 40  # lines that are still on the screen


@dataclass(slots=True, eq=False)
class _Block:
    """A traceback, and the lines after it."""

    lines: list[bytes] = field(default_factory=list)
    shown: bool = False  # else it is held back: it may be a repetition
    at: int = 0  # how many lines had been shown when its newest was

    def goes_with(self, other: "_Block") -> bool:
        """Whether the shorter of the two is a prefix of the other."""
        both = min(len(self.lines), len(other.lines))
        return self.lines[:both] == other.lines[:both]


@dataclass(slots=True)
class _Log:
    prefix: bytes
    stage: int
    offset: int = 0
    begun: bytes = b""  # of a line: what has no newline yet
    block: _Block | None = None  # None: no traceback has begun


class TrainerOutput:
    """Copies what is added to the trainers' logs, each line with its rank.

    All ranks tend to fail with the same error, and again in the next stage. From a traceback on, a
    log is held back while it is the same as another log's: it is shown whole if it goes on
    differently, and not at all if the log ends there.
    """

    def __init__(self, folder: Path, output: BinaryIO) -> None:
        """`folder`: where the logs are; it need not exist yet."""
        self._folder, self._output = folder, output
        self._logs: dict[Path, _Log] = {}  # in the order in which they are shown
        self._scanned_at = 0  # the folder's time of change, at the last scan
        self._looks = 0
        self._newest = 0  # stage
        self._known: list[_Block] = []
        self._count = 0  # lines shown

    def show_new(self, *, last: bool = False) -> None:
        """Show what has been added since the last call; `last`: nothing will be added."""
        self._find_logs()
        self._looks += 1
        for path, log in list(self._logs.items()):
            # A long run has thousands of logs; only the newest stages' grow, but for a few.
            if log.stage > self._newest - _STAGES or self._looks % _RARELY == 0 or last:
                try:
                    self._show_log(path, log, last)
                except FileNotFoundError:  # launchers delete those of old stages
                    del self._logs[path]
                except OSError:
                    continue
        with patient_output():
            self._output.flush()

    def repeat(self, path: Path) -> list[str] | None:
        """Return a log's last traceback, [] if it is still on the screen; None: it has none."""
        log = self._logs.get(path)
        block = None if log is None else log.block
        if block is None:
            return None
        shown = next((each for each in self._known if block.lines == each.lines), block)
        if shown.shown and self._count - shown.at < _NEAR:
            return []
        return [line.decode(errors="replace") for line in block.lines]

    def _find_logs(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            changed_at = self._folder.stat().st_mtime_ns
            if changed_at == self._scanned_at:
                return
            self._scanned_at = changed_at
        for path in sorted(self._folder.glob("trainer_*.log")):
            named = _LOG.fullmatch(path.name)
            if named is not None and path not in self._logs:
                self._logs[path] = _Log(b"[rank %s] " % named[1].encode(), int(named[2]))
                self._newest = max(self._newest, int(named[2]))

    def _show_log(self, path: Path, log: _Log, last: bool) -> None:
        """Show what has been added to a log. Raises OSError: it cannot be read."""
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < log.offset:  # it has been cut
                log.offset = 0
            file.seek(log.offset)
            added = file.read()
        log.offset += len(added)
        *lines, log.begun = (log.begun + added).split(b"\n")
        if log.begun and (last or len(log.begun) > _LONGEST_LINE):
            lines.append(log.begun)
            log.begun = b""
        for line in lines:
            self._take(log, line)
        self._decide(log, over=last)

    def _take(self, log: _Log, line: bytes) -> None:
        prefix = log.prefix
        if _begins(line, in_block=log.block is not None):
            self._decide(log, over=True)
            log.block = _Block(shown=not self._known)
            self._known = [*self._known, log.block][-_KNOWN:]
        block = log.block
        if block is None:
            self._show([line], prefix)
            return
        block.lines.append(line)
        if block.shown:
            self._show([line], prefix)
            block.at = self._count
        elif not self._model_of(block):
            self._show_block(block, prefix)
        if len(block.lines) > _LONGEST:
            self._show_block(block, prefix)
            self._known = [each for each in self._known if each is not block]
            log.block = None

    def _decide(self, log: _Log, *, over: bool) -> None:
        """Show what is held back if it is new."""
        block = log.block
        if block is None or block.shown:
            return
        model = self._model_of(block)
        if model is None or (over and len(model.lines) < len(block.lines)):
            self._show_block(block, log.prefix)

    def _model_of(self, block: _Block) -> _Block | None:
        """Return the longest traceback shown that this one repeats so far; None: there is none."""
        same = [each for each in self._known if each.shown and each.goes_with(block)]
        return max(same, key=lambda each: len(each.lines), default=None)

    def _show_block(self, block: _Block, prefix: bytes) -> None:
        if not block.shown:
            self._show(block.lines, prefix)
        block.shown, block.at = True, self._count

    def _show(self, lines: list[bytes], prefix: bytes) -> None:
        with patient_output():
            self._output.write(b"".join(prefix + line + b"\n" for line in lines))
        self._count += len(lines)


def _begins(line: bytes, *, in_block: bool) -> bool:
    """Whether a traceback begins with this line; a SyntaxError's may have no header."""
    if line.endswith(b"Traceback (most recent call last):") and not line.startswith(b"C++"):
        return True
    return not in_block and re.match(rb'  File "[^"]+", line \d+$', line) is not None
