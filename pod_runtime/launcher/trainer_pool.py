"""A launcher's trainers: start them, find them by pid, reap them and clean up after them."""

import contextlib
import logging
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from job_server.api.wire import StagePlan
from pod_runtime.env import POD_ID, PodEnv, spare_environment, trainer_environment
from pod_runtime.launcher.console import Console
from pod_runtime.launcher.spares import Spare, Spares
from pod_runtime.launcher.state import Key
from pod_runtime.launcher.trainers import ADAPTERS, TrainerProcess, is_script, with_defaults
from pod_runtime.network import interface_of
from pod_runtime.orphans import kill_orphans, noted_forks, reap_adopted, remove_shared_memory
from pod_runtime.processes import read

logger = logging.getLogger(__name__)

Name = tuple[Key, int]  # ((stage, attempt), rank)


KEEP_LOGS = 200  # stages whose trainers' logs stay
_LOG = re.compile(r"trainer_\d+\.stage_(\d+)\.log(\.1)?")
_DAY_S = 86400.0
UNKILLABLE_S = 15.0  # who has not ended so long after SIGKILL waits in the kernel
_LOOP = "pod_runtime.trainer.elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The launcher's command line."""

    command: tuple[str, ...]  # interpreter, script, arguments
    log_dir: Path
    run_dir: Path
    highest_stage: int = 0  # in the checkpoint path; 0: none, or not known
    console: bool = True  # show the trainers' output, prefixed
    preload: tuple[str, ...] = ()  # what spares import, besides EDL and the framework
    keep_logs: int = KEEP_LOGS  # stages; 0: all


class TrainerPool:
    """The trainers that run. For the launcher's main thread only: they die with that thread."""

    def __init__(
        self, config: LaunchConfig, pod_env: PodEnv, environ: Mapping[str, str], channel: str
    ) -> None:
        self._config, self._env, self._environ = config, pod_env, environ
        self._channel = channel
        self._trainers: dict[Name, TrainerProcess] = {}
        self._console = Console() if config.console else None
        self.spares = Spares((), config.log_dir, config.command)
        self.preload_adapter(ADAPTERS["paddle"])  # until it is known
        self._given_up: list[TrainerProcess] = []  # they may end some day
        self._dead_pids: set[int] = set()  # until `sweep` has removed what they left in /dev/shm
        self._tidied = 0  # stage at whose start old logs were dropped

    def __iter__(self) -> Iterator[TrainerProcess]:
        return iter(list(self._trainers.values()))

    def start(self, plan: StagePlan, rank: int) -> TrainerProcess:
        """Start the trainer `rank` of `plan`.

        Raises:
            SpawnError: it cannot be started.
        """
        if self._config.keep_logs and plan.stage > self._tidied:
            self._tidied = plan.stage
            drop_old_logs(self._config.log_dir, plan.stage - self._config.keep_logs, time.time())
        mine = next((pod.addr for pod in plan.pods if pod.pod_id == self._env.pod_id), None)
        env = trainer_environment(
            self._environ,
            self._env,
            plan,
            rank,
            channel=self._channel,
            run_dir=self._config.run_dir,
            interface=None if mine is None else interface_of(mine),
        )
        trainer = TrainerProcess(
            stage=plan.stage,
            attempt=plan.attempt,
            rank=rank,
            argv=self._config.command,
            env=with_defaults(env),
            log_path=self._config.log_dir / f"trainer_{rank}.stage_{plan.stage}.log",
            spares=self.spares,
        )
        self._trainers[trainer.key, rank] = trainer
        if self._console is not None:
            self._console.follow(trainer.log_path, rank, trainer.log_start)
        return trainer

    def get(self, name: Name) -> TrainerProcess | None:
        return self._trainers.get(name)

    @property
    def can_warm(self) -> bool:
        """Whether trainers are Python scripts: only those can be run by a spare."""
        return is_script(self._config.command)

    def preload_adapter(self, module: str) -> None:
        """Have the next spares import this module of the trainers' framework."""
        self.spares.preload = (_LOOP, module, *self._config.preload)

    def warm_spare(self) -> Spare:
        """Start a spare. Raises SpawnError."""
        return self.spares.start(with_defaults(spare_environment(self._environ, self._env)))

    def signal(self, name: Name, signum: signal.Signals) -> None:
        self._trainers[name].send_signal(signum)

    def move(self, old: Name, new: Name) -> None:
        """Let a trainer go on in another stage; its log and its marks stay the same."""
        trainer = self._trainers[new] = self._trainers.pop(old)
        (trainer.stage, trainer.attempt), trainer.rank = new

    def find(self, pid: int) -> Name | None:
        """Return the name of the trainer that `pid` belongs to; None: it is none of ours."""
        by_pid = {trainer.pid: name for name, trainer in self._trainers.items()}
        while pid > 1 and pid not in by_pid:
            process = read(pid)
            pid = 0 if process is None else process.ppid
        return by_pid.get(pid)

    def renumber(self, key: Key, ranks: Mapping[int, int]) -> None:
        """Give the trainers of `key` other ranks, old -> new. Their logs keep their names."""
        for trainer in self:
            if trainer.key == key:
                trainer.rank = ranks.get(trainer.rank, trainer.rank)
        self._trainers = {(each.key, each.rank): each for each in self}

    def note_children(self) -> None:
        for trainer in self:
            trainer.note_children()

    def reap(self, trainer: TrainerProcess) -> int:
        """Take a dead trainer out; return its exit code. `clean_up_after` removes what it left."""
        code = trainer.reap()
        del self._trainers[trainer.key, trainer.rank]
        if self._console is not None:
            self._console.ended(trainer.log_path)
        return code

    def give_up_at(self) -> float | None:
        """Return when the next trainer is given up if it has not ended; None: none was killed."""
        return min(
            (each.killed_at + UNKILLABLE_S for each in self if each.killed_at is not None),
            default=None,
        )

    def give_up(self, trainer: TrainerProcess) -> str:
        """Take a trainer out that SIGKILL does not end; return why that may be, in words.

        It runs no more of its program, whenever it ends.
        """
        process = read(trainer.pid)
        del self._trainers[trainer.key, trainer.rank]
        self._given_up.append(trainer)
        if self._console is not None:
            self._console.ended(trainer.log_path)
        state = "" if process is None else f" (state {process.state})"
        return (
            f"process {trainer.pid}{state} has not ended for {UNKILLABLE_S:.0f} s after SIGKILL: "
            f"it waits in the kernel, for a file server, a disk or a device"
        )

    def clean_up_after(self, trainer: TrainerProcess) -> None:
        """Kill and remove what a reaped trainer left."""
        living = {each.pid for each in self} | {each.process.pid for each in self.spares}
        killed = kill_orphans({POD_ID: self._env.pod_id, **trainer.marks}, living)
        noted = noted_forks(self._env.pod_dir)
        self._dead_pids |= killed | noted | trainer.children | {trainer.pid}
        self.sweep()

    def sweep(self) -> None:
        """Reap orphans that this process has adopted; remove what they and dead trainers left."""
        for trainer in [each for each in self._given_up if each.ends_by(0.0)]:
            self._given_up.remove(trainer)
            trainer.reap()
            self._dead_pids.add(trainer.pid)
        ours = {each.pid for each in (*self, *self._given_up)}
        ours |= {each.process.pid for each in self.spares}
        self._dead_pids |= reap_adopted(ours)
        if self._dead_pids:
            remove_shared_memory(self._dead_pids)
            self._dead_pids.clear()

    def kill_all(self) -> None:
        """Kill all: no trainer outlives its launcher, however that ends."""
        self.spares.end_all()
        for trainer in self:
            trainer.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + UNKILLABLE_S
        for trainer in self:
            if trainer.ends_by(deadline):
                self.reap(trainer)
                self.clean_up_after(trainer)
            else:
                logger.error("rank %d: %s", trainer.rank, self.give_up(trainer))

    def finish_console(self, timeout_s: float) -> None:
        """Show the last lines; wait no longer than `timeout_s` for a slow reader."""
        if self._console is not None:
            self._console.finish(timeout_s)


def drop_old_logs(log_dir: Path, last: int, now: float) -> None:
    """Delete trainers' logs of the stages up to `last`.

    Those that were written within a day of `now` (seconds since 1970) stay: a trainer that goes on
    into later stages, perhaps another launcher's, keeps the log of its first one.
    """
    with contextlib.suppress(OSError):  # what cannot be deleted now is tried at the next stage
        for path in log_dir.iterdir():
            named = _LOG.fullmatch(path.name)
            if named and int(named[1]) <= last and path.stat().st_mtime < now - _DAY_S:
                path.unlink(missing_ok=True)
