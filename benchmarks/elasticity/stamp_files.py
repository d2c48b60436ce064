"""The files in which trainers write down their steps. Standard library only: peers' trainers too.

A file per process, appended to by single writes: nothing that was written is lost by a kill.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

from benchmarks.elasticity.stamps import Generation, Stamp, generations, parse

_RECENT = 16  # trainers among whom are all of the newest generation


class Stamper:
    """For a trainer."""

    def __init__(self, folder: str) -> None:
        self._fd = os.open(
            os.path.join(folder, f"{os.getpid()}.{time.monotonic_ns()}.stamps"),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            0o644,
        )

    def note(
        self, step: int, *, rank: int, world: int, stage: int = 0, stood_s: float = 0.0
    ) -> None:
        """Step number `step`, counted from 1, has just ended."""
        stamp = Stamp(
            who=f"{os.getpid()}.{stage}",
            rank=rank,
            world=world,
            step=step,
            at=time.monotonic(),
            stood_s=stood_s,
        )
        os.write(self._fd, stamp.line().encode())


class StampFolder:
    """For who watches them. A look costs little, as it is taken often beside the training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._read: dict[str, int] = {}  # by file: bytes
        self._by_who: dict[str, list[Stamp]] = {}

    def look(self) -> None:
        """Take in what is new."""
        with os.scandir(self.folder) as entries:
            grown = [e.path for e in entries if e.stat().st_size > self._read.get(e.path, 0)]
        for path in grown:
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(data)
            for stamp in parse(data.decode()):
                self._by_who.setdefault(stamp.who, []).append(stamp)

    def stamps(self) -> list[Stamp]:
        """Return all stamps that are there by now."""
        self.look()
        return [stamp for mine in self._by_who.values() for stamp in mine]

    def generations(self) -> list[Generation]:
        return generations(self.stamps())

    def newest(self) -> Generation | None:
        """Return who trains now, with the first two and the last of their steps; None: nobody."""
        self.look()
        latest = sorted(self._by_who.values(), key=lambda mine: mine[0].at)[-_RECENT:]
        found = generations(stamp for mine in latest for stamp in (*mine[:2], *mine[2:][-1:]))
        return found[-1] if found else None
