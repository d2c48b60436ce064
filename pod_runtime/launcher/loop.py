"""The launcher's event loop: one thread that owns the trainers and carries out decisions.

`decisions` decides what to do. This module turns sockets, pidfds and signals into events, and
actions into system calls.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import queue
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from job_server.api.failure_policy import DO_NOT_RESTART_EXIT, OOM_KILL, UNKILLABLE
from job_server.api.text import describe_exit
from job_server.api.wire import (
    EXIT_REPORT_S,
    Attach,
    PodOrders,
    PodReport,
    RaisedError,
    ReportKind,
    SlotKind,
    StagePlan,
    TrainerError,
)
from pod_runtime.activity import Seen, look, open_page
from pod_runtime.cgroups import OomWatch
from pod_runtime.channel_wire import (
    Go,
    LauncherMessage,
    Preview,
    Raised,
    SegmentMade,
    SnapshotMade,
    TrainerHello,
    TrainerMessage,
    Welcome,
    kind_of,
)
from pod_runtime.env import PodEnv
from pod_runtime.errors import ChannelError, LaunchError, SpawnError
from pod_runtime.launcher import decisions, hangs, server_link, stacks, state
from pod_runtime.launcher.channel import TrainerChannel, TrainerConnection, close_all
from pod_runtime.launcher.reports import attach_status, pace_between
from pod_runtime.launcher.segments import NodeSegments
from pod_runtime.launcher.server_link import JobServerApi, LinkEvent, ServerLink
from pod_runtime.launcher.spares import Spare
from pod_runtime.launcher.trainer_pool import UNKILLABLE_S, LaunchConfig, Name, TrainerPool
from pod_runtime.launcher.trainers import (
    TrainerProcess,
    adapter_of,
    find_taken_port,
    read_script,
)
from pod_runtime.processes import delayed_s, read, set_child_subreaper
from pod_runtime.shim_wire import CLAIM, REFUSED, LineSocket, ShimError, connect, write_json

logger = logging.getLogger(__name__)

_STOP_FLUSH_S = 2.0  # ... where the pod is being stopped
_SAME_STOP_S = 2.0  # within which a second signal says nothing new
_CONSOLE_S = 2.0
_USAGE_ERROR = "pod_runtime.trainer.errors.UsageError"  # as failure policies know it
_LOST_WORKER = re.compile(r"worker.*(kill|exit)", re.IGNORECASE)  # of a framework's data loader
_FRESH_SNAPSHOT = (ReportKind.DRAINED, ReportKind.ENDED, ReportKind.FAILED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StacksTaken:
    """The stacks of a pod's trainers, one of which hangs."""

    name: Name
    text: str
    silent_s: float
    since: float  # as of `Seen`: another one now is a sign of life
    stacks: dict[int, stacks.Stacks]  # by rank


class Launcher:
    """One pod's launcher. Make and run it in the main thread: trainers die with that thread."""

    def __init__(
        self,
        config: LaunchConfig,
        pod_env: PodEnv,
        environ: Mapping[str, str],
        connect_server: Callable[[], JobServerApi],
    ) -> None:
        self._config, self._env = config, pod_env
        on_gpus = pod_env.slot_kind is SlotKind.GPU  # where a spare may be unable to fork
        adapter = "" if on_gpus else adapter_of(read_script(config.command))
        self._pod = state.LauncherState(
            pod_id=pod_env.pod_id,
            node_id=pod_env.node_id,
            grace_s=pod_env.grace_s,
            adapter=adapter,
        )
        self._connections: dict[Name, TrainerConnection] = {}
        self._exit: decisions.Exit | None = None
        self._stopped_at: float | None = None  # monotonic, by the first signal; None: by none
        self._reaped: list[TrainerProcess] = []  # whose leftovers are not cleaned up yet
        self._inbox: queue.SimpleQueue[LinkEvent | _StacksTaken] = queue.SimpleQueue()
        self._oom = OomWatch()
        self._look_at = 0.0  # when the trainers' pages are looked at next
        self._silences: dict[int, hangs.Silence] = {}  # by pid
        # By pid: since when its time is told, and the processor time that it had used then.
        self._paced: dict[int, tuple[Seen, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._channel = TrainerChannel(pod_env.pod_id)
        self._segments = NodeSegments(pod_env.pod_id, pod_env.pod_dir)
        self._pool = TrainerPool(config, pod_env, environ, self._channel.name)
        if adapter:
            self._pool.preload_adapter(adapter)
        self._status = self._attach_now()  # replaced as a whole, so other threads may read it
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._link = ServerLink(
            connect=connect_server,
            job_id=pod_env.job_id,
            pod_id=pod_env.pod_id,
            status=lambda: dataclasses.replace(self._status, snapshot=self._segments.newest()),
            deliver=self._deliver,
        )

    def run(self) -> int:
        """Work until the pod is over; return the exit code.

        Raises:
            LaunchError: there is no shim, the pod has had its launcher, or the server refuses this
                one.
        """
        set_child_subreaper()
        shim = self._watch_shim()
        claim = self._claim_pod()
        with self._signals():
            self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
            self._selector.register(self._channel, selectors.EVENT_READ, self._on_connect)
            self._selector.register(shim, selectors.EVENT_READ, self._on_shim_gone)
            self._link.start()
            try:
                while self._exit is None:
                    self._wait()
                    self._settle()
            finally:
                self._pool.kill_all()
                shim.close()
                self._channel.close()
        code = self._finish(self._exit)
        if self._exit.complete:  # after what the server is told: this tells of no step and no loss
            with contextlib.suppress(OSError):  # a full disk
                os.write(claim, b"complete\n")
        os.close(claim)
        return code

    # --- events -------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Handle what has happened: signals and orders first, deaths last.

        A trainer reports an error before it exits, so its messages are handled before its death.
        """
        deadline = decisions.next_deadline(self._pod)
        if any(each.page is not None for each in self._connections.values()):
            deadline = self._look_at if deadline is None else min(deadline, self._look_at)
        give_up_at = self._pool.give_up_at()
        if give_up_at is not None:
            deadline = give_up_at if deadline is None else min(deadline, give_up_at)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in sorted(ready, key=self._urgency):
            if isinstance(key.data, TrainerProcess):
                self._on_death(key.data)
            elif isinstance(key.data, TrainerConnection):
                self._on_message(key.data)
            elif isinstance(key.data, Spare):
                self._on_spare(key.data)
            else:
                key.data()
        self._give_up_unkillable()
        if time.monotonic() >= self._look_at:
            self._look_at_trainers()

    def _urgency(self, key: selectors.SelectorKey) -> int:
        if isinstance(key.data, TrainerProcess):
            return 3
        if isinstance(key.data, TrainerConnection):
            return 2
        return 0 if key.data == self._on_wake else 1

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake_read, 4096):
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    self._on_stop(signal.Signals(number))
        with contextlib.suppress(queue.Empty):
            while True:
                self._on_link(self._inbox.get_nowait())
        self._pool.sweep()

    def _on_stop(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
        elif now < self._stopped_at + _SAME_STOP_S:
            # Who ends a whole unit (systemd, Slurm) signals the shim as well, which passes it on.
            return
        again = self._pod.leaving is not None
        logger.info("%s: %s", signum.name, "killing the trainers" if again else "ending")
        leaving = state.Leaving(code=128 + signum, reason=signum.name, at_once=again)
        self._pod = state.leave(self._pod, leaving)

    def _on_link(self, event: "LinkEvent | _StacksTaken") -> None:
        match event:
            case _StacksTaken():
                self._say_hang(event)
            case server_link.AttachAnswered(orders):
                self._heed(orders)
                self._pod = state.attached(self._pod, orders)
            case server_link.OrdersChanged(orders):
                self._heed(orders)
                self._pod = state.ordered(self._pod, orders)
            case server_link.NotWanted(reason):
                logger.info("the server does not want this pod any more: %s", reason)
                self._pod = state.leave(self._pod, state.Leaving(code=0, reason=reason))
            case server_link.LauncherRefused(reason):
                self._pod = state.leave(self._pod, state.Leaving(code=1, reason=reason))

    def _heed(self, orders: PodOrders) -> None:
        if orders.adapter:  # else what its own trainers have said holds, or what is usual
            self._pool.preload_adapter(orders.adapter)

    def _on_shim_gone(self) -> None:
        logger.error("the pod's shim is gone: ending the trainers")
        leaving = state.Leaving(code=1, reason="the pod's shim is gone", at_once=True)
        self._pod = state.leave(self._pod, leaving)
        for key in [k for k in self._selector.get_map().values() if k.data == self._on_shim_gone]:
            self._selector.unregister(key.fileobj)

    def _on_connect(self) -> None:
        while (connection := self._channel.accept()) is not None:
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _on_message(self, connection: TrainerConnection) -> None:
        try:
            for message, fds in connection.messages():
                try:
                    self._handle(connection, message, fds)
                finally:
                    close_all(fds)
        except ChannelError as error:
            logger.error("a trainer (pid %d) is cut off: %s", connection.peer_pid, error)
            connection.open = False
        if not connection.open:
            self._forget(connection)

    def _handle(
        self, connection: TrainerConnection, message: TrainerMessage, fds: tuple[int, ...]
    ) -> None:
        if isinstance(message, TrainerHello):
            self._introduce(connection, message)
            if fds:
                try:
                    connection.page = open_page(fds[0])
                except (OSError, ValueError) as error:
                    raise ChannelError(f"hello: its page cannot be read: {error}") from error
        name = self._name_of(connection)
        if isinstance(message, Raised):
            name = self._pool.find(connection.peer_pid)
        if name is None:
            raise ChannelError(
                f"{type(message).__name__} from a process that is no trainer of ours"
            )
        key, rank = name
        run = state.find_run(self._pod, key)
        if run is None:
            return
        match message:
            case SegmentMade():
                if len(fds) != 1:
                    raise ChannelError(f"segment: expected one descriptor, got {len(fds)}")
                self._segments.keep(run.plan, message, fds[0])
            case SnapshotMade():
                self._segments.complete(run.plan, message)
            case Raised():
                of_worker = any(_LOST_WORKER.search(each.text) for each in message.error.chain)
                evidence, _ = self._evidence(self._pool.get(name), killed=of_worker)
                self._pod = state.received(self._pod, key, rank, message, evidence)
            case _:
                self._pod = state.received(self._pod, key, rank, message)

    def _introduce(self, connection: TrainerConnection, hello: TrainerHello) -> None:
        """Bind a connection to the trainer that it, or an ancestor of its process, is."""
        name = self._pool.find(connection.peer_pid)
        if name is None or (name[0][0], name[1]) != (hello.stage, hello.rank):
            raise ChannelError(
                f"hello: pid {connection.peer_pid} is not rank {hello.rank} of stage {hello.stage}"
            )
        self._refuse_twins(name, self._connections.get(name), connection)
        self._refuse_successors(name, connection)
        self._connections[name] = connection
        if hello.adapter:
            self._pool.preload_adapter(hello.adapter)

    def _refuse_twins(
        self, name: Name, before: TrainerConnection | None, now: TrainerConnection
    ) -> None:
        """See that no two processes of a script are one trainer; it fails by that.

        Raises:
            ChannelError: they are.
        """
        run = state.find_run(self._pod, name[0])
        if before is None or not before.open or run is None or run.done_step is not None:
            return
        other = read(before.peer_pid)
        if before.peer_pid == now.peer_pid or other is None or other.state in "ZX":
            return
        self._refuse_loop(
            name,
            f"two processes of the script have made a Loop, pid {before.peer_pid} and "
            f"{now.peer_pid}, and both would be rank {name[1]}: the launcher starts a process for "
            f"each trainer. Call the function that trains once, without "
            f"torch.multiprocessing.spawn and the like. Where workers of a DataLoader start by "
            f"spawn or forkserver, which run the script again, write what trains under "
            f"if __name__ == '__main__':",
        )

    def _refuse_successors(self, name: Name, now: TrainerConnection) -> None:
        """See that no training of a script is another process's than the one before.

        A loop is known by its place among those of its process: a state of the one in memory would
        be taken for one of the other after a crash.

        Raises:
            ChannelError: it is; the trainer fails by that.
        """
        trainer, run = self._pool.get(name), state.find_run(self._pod, name[0])
        if trainer is None or run is None:
            return
        before, trainer.loop_pid = trainer.loop_pid, now.peer_pid
        if before not in (None, now.peer_pid) and run.done_step is not None:
            self._refuse_loop(
                name,
                f"a process of the script, pid {before}, has trained before, and another one makes "
                f"a Loop now, pid {now.peer_pid}: after a crash one could go on with the model of "
                f"the other. Make the loops one after the other in one process, or start each "
                f"training by itself (edl run, edl submit)",
            )

    def _refuse_loop(self, name: Name, text: str) -> NoReturn:
        """Have a trainer fail by a loop that it must not make. Raises ChannelError."""
        key, rank = name
        error = TrainerError(chain=(RaisedError(types=(_USAGE_ERROR, "Exception"), text=text),))
        evidence, _ = self._evidence(self._pool.get(name), killed=False)
        self._pod = state.received(self._pod, key, rank, Raised(error=error), evidence)
        raise ChannelError(text)

    def _on_death(self, trainer: TrainerProcess) -> None:
        name = trainer.key, trainer.rank
        self._on_connect()  # a trainer that raised reports that on a connection of its own
        keys = list(self._selector.get_map().values())
        for connection in [each.data for each in keys if isinstance(each.data, TrainerConnection)]:
            if connection.peer_pid == trainer.pid or connection is self._connections.get(name):
                self._on_message(connection)
        self._forget_trainer(trainer)
        code = self._pool.reap(trainer)
        evidence, reason = self._evidence(trainer, killed=code == -signal.SIGKILL)
        if code not in (0, -signal.SIGKILL):
            reason = trainer.last_words()
        logger.info(
            "stage %d: rank %d (pid %d) %s",
            trainer.stage, trainer.rank, trainer.pid, describe_exit(code),
        )  # fmt: skip
        self._pod = state.died(self._pod, trainer.key, trainer.rank, code, reason, evidence)
        self._reaped.append(trainer)  # its death is reported first: the other pods wait for that

    def _forget_trainer(self, trainer: TrainerProcess) -> None:
        name = trainer.key, trainer.rank
        if name in self._connections:
            self._forget(self._connections[name])
        self._selector.unregister(trainer)
        self._silences.pop(trainer.pid, None)
        self._paced.pop(trainer.pid, None)

    def _give_up_unkillable(self) -> None:
        """Count trainers as dead that SIGKILL has not ended: their stage must come to its end."""
        give_up_at, now = self._pool.give_up_at(), time.monotonic()
        if give_up_at is None or now < give_up_at:
            return
        for trainer in self._pool:
            if trainer.killed_at is None or now < trainer.killed_at + UNKILLABLE_S:
                continue
            evidence = state.Evidence(events=(UNKILLABLE,), last_lines=trainer.last_lines())
            self._forget_trainer(trainer)
            reason = self._pool.give_up(trainer)
            logger.error("stage %d: rank %d: %s", trainer.stage, trainer.rank, reason)
            self._pod = state.died(
                self._pod, trainer.key, trainer.rank, -signal.SIGKILL, reason, evidence
            )

    def _evidence(
        self, trainer: TrainerProcess | None, *, killed: bool
    ) -> tuple[state.Evidence, str]:
        """Return what is known of a failure besides its exit code, and of a SIGKILL in words.

        Args:
            killed: it, or a process of it, was killed: by the kernel's OOM killer, if that has
                killed one more.
        """
        lines = () if trainer is None else trainer.last_lines()
        if not killed:
            return state.Evidence(last_lines=lines), ""
        why = self._oom.explain(time.monotonic())
        if why is None:
            why = "whether by the kernel, for lack of memory, cannot be read here"
            return state.Evidence(last_lines=lines), why
        events = (OOM_KILL,) if why else ()
        return state.Evidence(events=events, last_lines=lines), why

    # --- trainers that hang -------------------------------------------------------------------

    def _look_at_trainers(self) -> None:
        now = time.monotonic()
        self._look_at = now + hangs.LOOK_S
        self._oom.look(now)
        limits = None if self._pod.orders is None else self._pod.orders.hang_limits
        if limits is None:
            return
        for name, connection in list(self._connections.items()):
            trainer, run = self._pool.get(name), state.find_run(self._pod, name[0])
            seen = self._seen(name)
            if trainer is None or run is None or run.ending or seen is None:
                continue
            process = read(connection.peer_pid)  # a script may start its Python as a child
            if process is None:
                continue
            found = hangs.Look(
                seen=seen,
                cpu_s=process.cpu_s,
                delayed_s=delayed_s(connection.peer_pid),
                stopped=process.state == "T",
            )
            before = self._silences.get(trainer.pid)
            self._silences[trainer.pid], alarm = hangs.heed(before, found, now, limits, run.step_s)
            if alarm is not None:
                self._paced[trainer.pid] = (seen, process.cpu_s)  # a hang is told by itself
                self._heed_alarm(name, alarm, seen)
            told, cpu_s = self._paced.setdefault(trainer.pid, (seen, process.cpu_s))
            pace = pace_between(name[1], told, seen)
            if pace is not None:
                self._paced[trainer.pid] = (seen, process.cpu_s)
                pace = dataclasses.replace(
                    pace,
                    cpu_percent=round(100 * (process.cpu_s - cpu_s) / pace.window_s, 1),
                    memory_mb=process.rss_bytes // 10**6,
                )
                self._pod = state.paced(self._pod, name[0], pace)

    def _seen(self, name: Name) -> Seen | None:
        """Return what a trainer's page says. None: it has none."""
        connection = self._connections.get(name)
        return None if connection is None or connection.page is None else look(connection.page)

    def _heed_alarm(self, name: Name, alarm: hangs.Alarm, seen: Seen) -> None:
        (key, rank), kills = name, self._pod.orders is not None and self._pod.orders.hang_kills
        if not alarm.silent_s:
            logger.info("stage %d: rank %d: %s", key[0], rank, alarm.text)
            self._pod = state.hung(
                self._pod, key, rank, state.TrainerHang(text=alarm.text, silent_s=0.0)
            )
        elif not alarm.act:
            self._take_stacks(name, alarm.text, alarm.silent_s, seen)
        elif kills:
            logger.error("stage %d: rank %d is killed: %s", key[0], rank, alarm.text)
            self._pod = state.killed_as_hung(self._pod, key, rank, alarm.text, alarm.silent_s)
            self._pool.signal(name, signal.SIGKILL)

    def _look_once_more(self, name: Name) -> None:
        """Say where a trainer hangs before it is ended: its peers may have given it up."""
        trainer, seen, now = self._pool.get(name), self._seen(name), time.monotonic()
        text = "" if seen is None else hangs.given_up(seen, now)
        if seen is None or trainer is None or not text:
            return
        target = dataclasses.replace(
            self._target(trainer), asked_from=stacks.log_size(trainer.log_path)
        )
        if stacks.ask(target.pid):
            self._gather(name, text, now - seen.since, seen, [target])

    def _target(self, trainer: TrainerProcess) -> stacks.HungProcess:
        connection = self._connections.get((trainer.key, trainer.rank))
        pid = trainer.pid if connection is None else connection.peer_pid
        return stacks.HungProcess(
            rank=trainer.rank,
            pid=pid,
            log_path=trainer.log_path,
            children=tuple(sorted(trainer.children - {pid})),
        )

    def _take_stacks(self, name: Name, text: str, silent_s: float, seen: Seen) -> None:
        """Have the stacks of the pod's trainers of that stage taken, beside all else."""
        self._pool.note_children()
        targets = [self._target(each) for each in self._pool if each.key == name[0]]
        self._gather(name, text, silent_s, seen, targets)

    def _gather(
        self, name: Name, text: str, silent_s: float, seen: Seen, targets: list[stacks.HungProcess]
    ) -> None:
        def work() -> None:
            found = {target.rank: stacks.take(target) for target in targets}
            self._deliver(
                _StacksTaken(
                    name=name, text=text, silent_s=silent_s, since=seen.since, stacks=found
                )
            )

        threading.Thread(target=work, name="stacks", daemon=True).start()

    def _say_hang(self, taken: "_StacksTaken") -> None:
        key, rank = taken.name
        logger.error("stage %d: rank %d hangs: %s", key[0], rank, taken.text)
        for each, found in sorted(taken.stacks.items()):
            for line in found.text.splitlines():
                logger.error("rank %d: %s", each, line)
        seen = self._seen(taken.name)
        if seen is not None and seen.since != taken.since:
            logger.info("stage %d: rank %d has gone on meanwhile", key[0], rank)
            return
        mine = taken.stacks.get(rank)
        where = "" if mine is None else f"at {mine.where}" if mine.where else mine.unknown
        hang = state.TrainerHang(text=taken.text, silent_s=taken.silent_s, where=where)
        self._pod = state.hung(self._pod, key, rank, hang)

    def _deliver(self, event: "LinkEvent | _StacksTaken") -> None:
        """Hand an event to the main thread. Called by other threads."""
        self._inbox.put(event)
        with contextlib.suppress(BlockingIOError):  # full: the main thread will wake anyway
            os.write(self._wake_write, b"\0")

    # --- actions ------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Decide and act until nothing is left to do."""
        while self._exit is None:
            self._pod, actions = decisions.decide(self._pod, time.monotonic())
            self._status = self._attach_now()  # before the server gets a report about it
            decided = self._pod
            for action in actions:
                self._act(action)
            again = decisions.Spawn | decisions.Invite | decisions.WarmSpare
            if self._pod is decided and not any(isinstance(action, again) for action in actions):
                break
        while self._reaped:
            self._pool.clean_up_after(self._reaped.pop())

    def _act(self, action: decisions.Action) -> None:
        match action:
            case decisions.Spawn(plan=plan):
                self._spawn(plan)
            case decisions.Renumber(key=key, ranks=ranks):
                self._pool.renumber(key, ranks)
                self._connections = {
                    (k, ranks.get(r, r) if k == key else r): connection
                    for (k, r), connection in self._connections.items()
                }
            case decisions.WarmSpare(hurry=hurry):
                self._warm_spare(hurry=hurry)
            case decisions.Invite(key=key, plan=plan):
                self._invite(key, plan)
            case decisions.Move(key=key, rank=rank):
                self._move((key, rank), (action.new_key, action.new_rank), action.message)
            case decisions.SendMessage(key=key, rank=rank, message=message):
                self._send_with_segments((key, rank), message)
            case decisions.HaveAtHand(plan=plan):
                self._segments.let_go()
                if plan is not None:
                    self._segments.have_at_hand(plan)
            case decisions.SendSignal(key=key, rank=rank, signum=signum):
                logger.info("stage %d: rank %d: %s", key[0], rank, signum.name)
                if signum is signal.SIGTERM and self._pod.leaving is None:
                    self._look_once_more((key, rank))
                self._pool.signal((key, rank), signum)
            case decisions.SendReport(report=report):
                self._report(report)
            case decisions.Exit():
                self._exit = action

    def _spawn(self, plan: StagePlan) -> None:
        mine = state.own_pod(self._env.pod_id, plan)
        taken = find_taken_port(mine)
        if taken:
            logger.warning("stage %d: %s", plan.stage, taken)
            self._pod = state.refused_ports(self._pod, plan, taken)
            return
        logger.info(
            "stage %d: starting ranks %s of %d, by %s",
            plan.stage, ",".join(map(str, mine.ranks)), plan.world_size, plan.way.value,
        )  # fmt: skip
        started: list[int] = []
        for rank in mine.ranks:
            try:
                trainer = self._pool.start(plan, rank)
            except SpawnError as error:
                logger.error("stage %d: %s", plan.stage, error)
                self._pod = state.not_spawned(self._pod, plan, started, rank, error.reason)
                return
            self._count_spares()  # one of them may have become this trainer
            self._selector.register(trainer, selectors.EVENT_READ, trainer)
            started.append(rank)
        self._pod = state.spawned(self._pod, plan)

    def _invite(self, key: state.Key, plan: StagePlan) -> None:
        taken = find_taken_port(state.own_pod(self._env.pod_id, plan))
        if taken:
            logger.warning("stage %d: %s", plan.stage, taken)
            self._pod = state.refused_ports(self._pod, plan, taken)
        else:
            self._pod = state.invited(self._pod, key, plan)

    def _move(self, old: Name, new: Name, message: Go) -> None:
        logger.info("stage %d: rank %d goes on as rank %d of stage %d", old[0][0], old[1], new[1],
                    new[0][0])  # fmt: skip
        self._pool.move(old, new)
        if old in self._connections:
            self._connections[new] = self._connections.pop(old)
        self._send(new, message)

    def _warm_spare(self, *, hurry: bool) -> None:
        importing = next((each for each in self._pool.spares if not each.ready), None)
        if importing is not None:
            importing.hurry()
            return
        try:
            if not self._pool.can_warm:
                raise SpawnError(-1, "--spares: only Python scripts can be run by a spare")
            spare = self._pool.warm_spare()
        except SpawnError as error:
            logger.warning("no spares: %s", error.reason)
            self._pod = state.spare_failed(self._pod)
            return
        if hurry:
            spare.hurry()
        self._selector.register(spare, selectors.EVENT_READ, spare)
        self._pod = state.spare_started(self._pod)

    def _on_spare(self, spare: Spare) -> None:
        """A spare is ready, or has died."""
        if not spare.receive():
            logger.warning("a spare (pid %d) has died; its log: spares.log", spare.process.pid)
            self._selector.unregister(spare)
            self._pool.spares.drop(spare)
            self._pod = state.spare_failed(self._pod)
            return
        use = "any number of trainers" if spare.forks else "one trainer"
        logger.info("a spare (pid %d) is ready, for %s", spare.process.pid, use)
        self._count_spares()

    def _count_spares(self) -> None:
        spares = list(self._pool.spares)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Spare) and key.data not in spares:  # a trainer now
                self._selector.unregister(key.data)
        warming = any(not spare.ready for spare in spares)
        forks = next((spare.forks for spare in spares if spare.ready), None)
        self._pod = state.spares_counted(self._pod, len(spares), warming=warming, forks=forks)

    def _send_with_segments(self, name: Name, message: LauncherMessage) -> None:
        """Send a trainer a message, with the segments of the state that it is about."""
        if not isinstance(message, Welcome | Preview):
            logger.info("stage %d: rank %d: %s", name[0][0], name[1], kind_of(message))
        match message:
            case Preview(snapshot=snapshot):
                if fds := self._segments.show(snapshot):
                    self._send(name, message, fds)
            case Welcome(plan=plan) | Go(plan=plan) if plan is not None:
                try:
                    fds = self._segments.for_restore(plan)
                except ShimError as error:
                    self._fail_start(name, str(error))
                    return
                try:
                    self._send(name, message, fds)
                finally:
                    close_all(fds)
            case _:
                self._send(name, message)

    def _fail_start(self, name: Name, text: str) -> None:
        """Have a trainer fail that waits for its state: the next try may get it."""
        logger.error("stage %d: rank %d: %s", name[0][0], name[1], text)
        raised = RaisedError(types=("TimeoutError", "OSError", "Exception"), text=text)
        failure = Raised(error=TrainerError(chain=(raised,)))
        self._pod = state.received(self._pod, *name, failure)

    def _send(self, name: Name, message: LauncherMessage, fds: tuple[int, ...] = ()) -> None:
        connection = self._connections.get(name)
        if connection is None:  # the trainer has hung up, so it will exit
            return
        try:
            connection.send(message, fds)
        except OSError as error:
            logger.warning("rank %d does not hear %s: %s", name[1], kind_of(message), error)
            self._forget(connection)

    def _report(self, report: PodReport) -> None:
        if report.kind is ReportKind.PROGRESS:
            self._pool.note_children()
        elif report.kind is not ReportKind.ALIVE:
            logger.info(
                "stage %d: %s%s", report.stage, report.kind.value,
                f": {report.reason}" if report.reason else "",
            )  # fmt: skip
        if report.snapshot is not None:
            snapshot = self._segments.confirm(report.snapshot)
        elif report.kind in _FRESH_SNAPSHOT:
            snapshot = self._segments.newest()
        else:
            snapshot = self._segments.announced()
        self._link.send(
            dataclasses.replace(report, snapshot=snapshot, submitted_at=self._env.submitted_at)
        )

    # --- begin and end ------------------------------------------------------------------------

    def _attach_now(self) -> Attach:
        truth = attach_status(self._pod, os.getpid(), self._config.highest_stage)
        return dataclasses.replace(truth, submitted_at=self._env.submitted_at)

    def _name_of(self, connection: TrainerConnection) -> Name | None:
        names = (name for name, each in self._connections.items() if each is connection)
        return next(names, None)

    def _forget(self, connection: TrainerConnection) -> None:
        name = self._name_of(connection)
        if name is not None:
            del self._connections[name]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def _watch_shim(self) -> LineSocket:
        try:
            shim = connect(self._env.pod_dir)
            shim.send({"op": "watch", "fds": 0})
            shim.receive()
        except ShimError as error:
            raise LaunchError(
                f"EDL_POD_DIR: {error}; the launcher is started inside a pod, by the job client"
            ) from error
        shim.socket.settimeout(None)
        return shim

    def _claim_pod(self) -> int:
        """Make this the pod's launcher; return the descriptor that says so as long as it is open.

        Another beside it would start the same ranks, from the state of the first one's training.
        One behind it would be given nothing to do: the job would succeed without its training.

        Raises:
            LaunchError: there is one, or its training is complete.
        """
        claim = os.open(self._env.pod_dir / CLAIM, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = "another launcher of this pod runs"
        else:
            if not os.read(claim, 1):
                return claim
            found = "the training of this pod is complete, and this would be a second one"
        os.close(claim)
        text = f"{found}: a job is one training, so make another one a job of its own"
        # A script that goes on after this, and ends well, would have the job succeed; one that
        # ends with another code would be run again.
        refused = {"code": DO_NOT_RESTART_EXIT, "reason": f"launch: {text}"}
        with contextlib.suppress(OSError):  # a full disk
            write_json(self._env.pod_dir / REFUSED, refused)
        raise LaunchError(text, DO_NOT_RESTART_EXIT)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into wake-ups of the event loop."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        woken_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _finish(self, exit_now: decisions.Exit) -> int:
        logger.info("exiting with %d: %s", exit_now.code, exit_now.reason)
        self._pool.finish_console(_CONSOLE_S)
        report = PodReport(
            kind=ReportKind.EXITED,
            stage=exit_now.stage,
            code=exit_now.code,
            reason=exit_now.reason,
        )
        self._report(report)
        patience_s = EXIT_REPORT_S if self._pod.leaving is None else _STOP_FLUSH_S
        if not self._link.flush(patience_s):
            logger.warning("the job server is away: it does not know that this pod ends")
        self._link.close()
        return exit_now.code
