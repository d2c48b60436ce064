"""Show the trainers' logs on the launcher's standard output, each line with its rank.

A thread reads the files: when our output is not read, the thread waits and the launcher does not.
It cuts a log that has become too long, since it knows how far it has read.
"""

import logging
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pod_runtime.log_tail import LOG_BYTES, cut_log

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_AGAIN_S = 1.0  # after output that could not be written
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16  # a longer one is shown in parts


@dataclass(slots=True)
class _Tail:
    path: Path
    prefix: bytes
    offset: int
    longest: int  # bytes; then the log is cut
    partial: bytes = b""
    over: bool = False  # the trainer has ended: nothing will be added


class Console:
    """Follows log files; `follow` and `finish` may be called by any one thread."""

    def __init__(self, output: BinaryIO | None = None, *, longest: int = LOG_BYTES) -> None:
        """`longest`: bytes of a log that is cut, once they have been shown."""
        self._longest = longest
        # Unbuffered: after a full disk it is known what was written.
        buffer: Any = sys.stdout.buffer
        self._output: Any = output if output is not None else getattr(buffer, "raw", buffer)
        self._unsent = b""
        self._tails: list[_Tail] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, path: Path, rank: int, start: int) -> None:
        """Show what is written to `path` from byte `start` on."""
        with self._lock:
            self._tails.append(_Tail(path, f"[rank {rank}] ".encode(), start, self._longest))

    def ended(self, path: Path) -> None:
        """No more will be written to `path`; it is read to its end and then left."""
        with self._lock:
            for tail in self._tails:
                if tail.path == path:
                    tail.over = True

    def finish(self, timeout_s: float) -> None:
        """Show what is left, and stop; waits no longer than `timeout_s` for a slow reader."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = _LOOK_EVERY_S
        last = False
        while not last:
            last = self._stop.wait(wait_s)
            wait_s = _LOOK_EVERY_S
            try:
                self._send()
                self._show_new(last)
            except (BrokenPipeError, ValueError):
                return  # our output is not read any more; the files have it all
            except OSError:  # a full disk, perhaps not for ever; the files have it all
                wait_s = _AGAIN_S

    def _show_new(self, last: bool = False) -> None:
        with self._lock:
            tails = list(self._tails)
        for tail in tails:
            over = tail.over  # look before reading: then all of its output is in the file
            self._show(tail, last or over)
            if over:
                with self._lock:
                    self._tails.remove(tail)

    def _show(self, tail: _Tail, to_the_end: bool) -> None:
        try:
            self._show_file(tail, tail.path)
        except FileNotFoundError:
            return
        if tail.offset > tail.longest:
            self._cut(tail)
        if to_the_end and tail.partial:
            self._write(tail, tail.partial + b"\n")

    def _cut(self, tail: _Tail) -> None:
        try:
            if not cut_log(tail.path, tail.longest):
                return
        except OSError as error:  # a full disk, perhaps; the other logs are shown meanwhile
            tail.longest = tail.offset + self._longest
            logger.warning("%s cannot be cut, it grows on: %s", tail.path, error)
            return
        self._show_file(tail, tail.path.with_name(tail.path.name + ".1"))
        tail.offset, tail.longest = 0, self._longest

    def _show_file(self, tail: _Tail, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(tail.offset)
            while chunk := file.read(_CHUNK_BYTES):
                tail.offset += len(chunk)
                self._write(tail, tail.partial + chunk)

    def _write(self, tail: _Tail, data: bytes) -> None:
        *lines, tail.partial = data.split(b"\n")
        if len(tail.partial) > _LONGEST_LINE:
            lines.append(tail.partial)
            tail.partial = b""
        if lines:
            # One write for many lines: several launchers may share a terminal.
            self._unsent += b"".join(tail.prefix + line + b"\n" for line in lines)
            self._send()

    def _send(self) -> None:
        """Write what is due; what could not be written, and only that, stays due."""
        while self._unsent:
            written = self._output.write(self._unsent)
            if written is None:
                raise BlockingIOError("the output takes nothing now")
            self._unsent = self._unsent[written:]
        self._output.flush()
