"""A training under any launcher, for resize.py and recovery.py: its nodes and stamped steps."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil

from benchmarks import harness
from benchmarks.elasticity.stamp_files import StampFolder
from benchmarks.elasticity.stamps import Generation
from benchmarks.harness import ROOT

_LOOK_S = 0.05
_STOP_S = 20.0


class NotInTime(Exception):  # noqa: N818  it is what happened
    """A launcher did not do what it should within the limit; that is a result, too."""


class Job(ABC):
    """One training and all processes of it, which end with the `with` block.

    Its processes are known by `folder`, which is in the command line or environment of each.
    """

    limit_s = 120.0  # for a change or a recovery; then it counts as one that never came

    def __init__(self, folder: Path, *, task: str, steps: int) -> None:
        self.folder = folder
        self.task = task
        self.steps = steps
        folder.mkdir(parents=True)
        self.stamps = StampFolder(folder / "stamps")
        self.programs: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self, trainers: int) -> None:
        """Begin to train on so many."""

    @abstractmethod
    def grow(self) -> None:
        """Ask for one trainer more."""

    @abstractmethod
    def shrink(self) -> None:
        """Ask for one trainer less, politely."""

    @abstractmethod
    def kill_node(self) -> None:
        """SIGKILL to all processes of a node that others can do without."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything: in order as far as that goes, by SIGKILL what is left."""
        self.end_in_order()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for program in self.programs:
            program.wait()

    def end_in_order(self) -> None:
        for program in reversed(self.programs):
            end(program)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield every living process of this training."""
        mark = str(self.folder)
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                texts = [*process.cmdline(), *process.environ().values()]
            except psutil.Error:
                continue
            if any(mark in text for text in texts):
                yield process

    def spawn(
        self, command: Sequence[str], name: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program of the launcher; its output goes to a log of that name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            program = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env=base_env() | {"BENCHMARK_FOLDER": str(self.folder)} | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    # --- what the stamps tell

    def newest(self) -> Generation:
        """Return who trains now. Raises NotInTime: nobody ever has."""
        newest = self.stamps.newest()
        if newest is None:
            raise NotInTime("no trainer has made a step")
        return newest

    def wait_world(self, world: int | None, *, steps: int, after: float = 0.0) -> Generation:
        """Return the newest generation once it has `world` trainers that made `steps` steps.

        Args:
            world: None: any number.
            after: it made its first step after this time.

        Raises:
            NotInTime: that took more than `limit_s`, or the launchers have ended.
        """

        def is_there() -> bool:
            newest = self.stamps.newest()
            return (
                newest is not None
                and world in (None, newest.world)
                and newest.members[0][0].at > after
                and newest.done_step >= newest.first_step + steps - 1
            )

        self._wait(is_there, self.limit_s, f"no {steps} steps by {world or 'any'} trainers")
        return self.stamps.generations()[-1]

    def wait_step(self, step: int, limit_s: float) -> None:
        """Return when the training has made so many steps. Raises NotInTime."""

        def is_there() -> bool:
            newest = self.stamps.newest()
            return newest is not None and newest.done_step >= step

        self._wait(is_there, limit_s, f"step {step} was not reached")

    def wait_more(self, steps: int) -> None:
        """Return when so many steps more have been made. Raises NotInTime."""
        self.wait_step(self.newest().done_step + steps, self.limit_s)

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            lives = self.is_alive()  # asked first: the last step comes before the end
            if condition():
                return
            if not lives:
                raise NotInTime(f"{what}: all launchers have ended")
            if time.monotonic() > deadline:
                raise NotInTime(f"{what} within {limit_s:g} s")
            time.sleep(_LOOK_S)

    def is_alive(self) -> bool:
        """Whether anything could still train."""
        return any(program.poll() is None for program in self.programs)

    def kill_trainer(self, rank: int) -> float:
        """SIGKILL to that rank of the newest generation; return when.

        Raises:
            NotInTime: it is gone already.
        """
        members = self.newest().members
        if rank >= len(members):
            raise NotInTime(f"rank {rank} does not train any more")
        pid = members[rank][-1].pid
        if pid not in [process.pid for process in self.processes()]:  # nor another that has its id
            raise NotInTime(f"rank {rank} was gone before it was killed")
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at


def base_env() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore:No ccache found",
        "GLOG_minloglevel": "2",
    }


def trainer_options(job: Job, checkpoint: Path, save_steps: int) -> list[str]:
    """Return the options that all trainers understand."""
    return [
        f"--task={job.task}",
        f"--steps={job.steps}",
        f"--save_steps={save_steps}",
        f"--checkpoint={checkpoint}",
        f"--stamps={job.stamps.folder}",
    ]


def end(program: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> None:
    """Signal a program and wait for it; SIGKILL when it takes too long."""
    if program.poll() is None:
        program.send_signal(how)
        try:
            program.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            program.kill()
    program.wait()


def kill_tree(program: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a program and all that it started, as nearly at once as can be."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(program.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    program.wait()


def warm_page_cache(python: str, modules: str) -> None:
    """Have the interpreter's files in memory: nobody's first start shall pay for the disk."""
    subprocess.run([python, "-c", f"import {modules}"], env=base_env(), check=True)


OURS_PYTHON = sys.executable


def wait_port(port: int, limit_s: float = 120.0) -> None:
    """Return when somebody listens there. Raises NotInTime."""
    if not harness.wait_port(port, limit_s):
        raise NotInTime(f"nothing listens on port {port} after {limit_s:g} s")
