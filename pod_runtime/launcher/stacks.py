"""Find out where processes hang: have them write the stacks of their threads, or look from outside.

A trainer writes its stacks to its log on SIGQUIT (`trainer_main`), in C, whatever its interpreter
does. Where it does not answer, as it is stopped or waits in the kernel, py-spy looks, if it is
installed and the system lets it.
"""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pod_runtime import processes

_ANSWER_S = 2.0  # a process that can answer does so at once
_QUIET_S = 0.2  # without another line a dump is complete
_PY_SPY_S = 20.0
_MAX_CHARS = 20_000
_SHOWN_FRAMES = 3
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_SPY_FRAME = re.compile(r"    (?P<name>.*) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of a trainer and its children, or why there are none of the trainer."""

    text: str  # of all threads, as lines
    where: str = ""  # of the main thread, in short; "": not known
    unknown: str = ""  # why the trainer's stacks are not known; "": they are


@dataclass(frozen=True, slots=True, kw_only=True)
class HungProcess:
    """A trainer whose stacks are wanted."""

    rank: int
    pid: int
    log_path: Path
    children: tuple[int, ...] = ()  # its loader's workers, say
    asked_from: int | None = None  # size of the log before it was asked; None: it was not


def answers(pid: int) -> bool:
    """Whether a process catches SIGQUIT, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)


def ask(pid: int) -> bool:
    """Have a process write its stacks to its log. Return whether it can."""
    if not answers(pid):
        return False
    try:
        os.kill(pid, signal.SIGQUIT)
    except OSError:
        return False
    return True


def take(target: HungProcess) -> Stacks:
    """Return a trainer's stacks. It takes some tenths of a second; with py-spy, some seconds.

    Its children write theirs to the same log, before the trainer's.
    """
    asked_from, theirs = target.asked_from, ""
    if asked_from is None:
        asked_from = log_size(target.log_path)
        if any([ask(child) for child in target.children]):
            theirs = _written(target.log_path, asked_from)
            asked_from = log_size(target.log_path)
    if target.asked_from is not None or ask(target.pid):
        text = _written(target.log_path, asked_from)
        if "most recent call first" in text:
            return Stacks(text=(theirs + text)[-_MAX_CHARS:], where=shown(frames(text)))
    found = _spy(target.pid)
    return replace(found, text=f"{theirs}{found.text or found.unknown}")


def log_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written(path: Path, start: int) -> str:
    """Return what is written to a log from byte `start` on, once nothing more comes."""
    deadline = time.monotonic() + _ANSWER_S
    size, quiet_since = start, time.monotonic()
    while (now := time.monotonic()) < deadline:
        grown = log_size(path)
        if grown != size:
            size, quiet_since = grown, now
        elif size > start and now - quiet_since > _QUIET_S:
            break
        time.sleep(0.02)
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(4 * _MAX_CHARS).decode(errors="replace")
    except OSError:
        return ""


def _spy(pid: int) -> Stacks:
    process = processes.read(pid)
    state = "is gone" if process is None else f"does not answer SIGQUIT (state {process.state})"
    program = shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    if program is None:
        why = f"process {pid} {state}; with py-spy installed its stacks were shown"
        return Stacks(text="", unknown=why)
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_PY_SPY_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Stacks(text="", unknown=f"process {pid} {state}; py-spy could not look: {error}")
    if done.returncode:
        why = " ".join(done.stderr.split())[:300]
        why = f"process {pid} {state}; py-spy could not look (no ptrace?): {why}"
        return Stacks(text="", unknown=why)
    return Stacks(text=done.stdout[:_MAX_CHARS], where=shown(frames(done.stdout, f"Thread {pid} ")))


def frames(text: str, main: str = "Current thread") -> list[tuple[str, str, str]]:
    """Return the main thread's frames (file, line, function), innermost first.

    Args:
        text: as faulthandler or py-spy writes stacks of several threads, of one process or more;
            the last main thread counts.
        main: how its first line begins.
    """
    found: list[tuple[str, str, str]] = []
    is_main = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            is_main = line.startswith(main)
            found = [] if is_main else found
        elif is_main and (match := _FRAME.match(line) or _SPY_FRAME.match(line)):
            found.append((match["file"], match["line"] or "?", match["name"]))
    return found


def shown(found: Sequence[tuple[str, str, str]]) -> str:
    """Return the innermost frame and the innermost ones of the user's own files, in one line."""
    own = [frame for frame in found if not _is_library(frame[0])]
    picked = list(dict.fromkeys([*found[:1], *own[: _SHOWN_FRAMES - 1]]))
    return ", called at ".join(f"{_short(file)}:{line} {name}" for file, line, name in picked)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _is_library(file: str) -> bool:
    roots: Iterable[str] = (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
        "<",
    )
    return file.startswith(tuple(roots))
