"""Do what the plan says to a real cluster."""

import contextlib
import heapq
import itertools
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from benchmarks.chaos.cluster import NODES, ChaosCluster
from benchmarks.chaos.plan import Action
from job_server.api.errors import JobServerError
from job_server.api.wire import JobState, JobStatus
from job_server.server.engine import PROGRESS_WRITE_S

_PHASE_S = 10.0  # so long a phase is waited for
_TRAIN_S = 30.0  # so long steps are waited for
_LOOK_S = 0.2
_STEP_S = 5.0  # a job that makes no step for so long does not train
_SUPERVISE_S = 2.0
_AWAY_S = 20.0  # a second client or server is refused within that
_SLOW_S = 0.1  # a slow node's processes stand still for so long, then run for as long


@dataclass
class Submission:
    """What is to be known of a job that was submitted, besides what the server says."""

    at: float  # monotonic
    ahead_s: float = 0.0  # how far the server's clock was set ahead since, between two lives
    unseen_s: float = 0.0  # time that may have passed unseen, as the clock was set back over it


@dataclass
class ServerLife:
    """From one start of the server to the next."""

    at: float  # monotonic
    clock_s: float  # by how much its clock is ahead of the machine's


class Faults:
    """Do actions, and undo them in time.

    Args:
        say: is told what was done, in words.
        ended: is given the last status of a submission that a stop of ours has ended, before the
            job is submitted again.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        say: Callable[[str], None],
        ended: Callable[[JobStatus, Submission], None],
    ) -> None:
        self.cluster = cluster
        self.clock_s = 0.0  # how far the clock is ahead
        self.killed = 0  # processes, by SIGKILL
        self.violations: list[str] = []
        self.submissions: dict[str, Submission] = {}  # by job
        self.spoiled: set[str] = set()  # jobs of which a checkpoint was corrupted or deleted
        self.lives: list[ServerLife] = []
        self._offset_s = time.time() - time.monotonic()
        self._ended_at = time.monotonic()  # when the server did, the last time
        self._say, self._ended = say, ended
        self._undo: list[tuple[float, int, str, Callable[[], None]]] = []  # when (monotonic)
        self._numbers = itertools.count()
        self._away_until = self._supervised = time.monotonic()
        self._held: dict[str, int] = {}  # how many actions keep something as it is

    # --- time

    def wait(self, until: float) -> None:
        """Let time pass until then (monotonic), and undo what is due meanwhile."""
        while True:
            now = time.monotonic()
            self._supervise(now)
            if self._undo and self._undo[0][0] <= min(now, until):
                _, _, text, undo = heapq.heappop(self._undo)
                undo()
                self._say(text)
                continue
            if now >= until:
                return
            due = self._undo[0][0] if self._undo else until
            time.sleep(max(0.0, min(due, until, now + _SUPERVISE_S) - now))

    def _supervise(self, now: float) -> None:
        """Start again what has ended by itself, as on a full disk, like whoever runs services."""
        if now >= self._away_until and now >= self._supervised + _SUPERVISE_S:
            self._supervised = now
            if self.lives:
                self.restart()

    def let_train(self, action: Action) -> None:
        """Wait until the job has made as many steps as the action wants, or half a minute."""
        job_id, deadline = self._job_id(action), time.monotonic() + _TRAIN_S
        begin: int | None = None
        while action.steps and time.monotonic() < deadline:
            now = self.cluster.job(job_id)
            if now is not None and now.state is JobState.RUNNING:
                begin = now.step if begin is None else min(begin, now.step)
                if now.step >= begin + action.steps:
                    return
            self.wait(time.monotonic() + _LOOK_S)

    def heal(self) -> None:
        """Undo all that lasts."""
        while self._undo:
            self.wait(self._undo[0][0])
        self.cluster.thaw()

    def _later(self, after_s: float, text: str, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + after_s, next(self._numbers), text, undo))

    # --- what is there

    def _job_id(self, action: Action) -> str:
        jobs = list(self.cluster.specs)
        return jobs[action.pick % len(jobs)]

    def _node(self, action: Action) -> int:
        return NODES[action.pick // 7 % len(NODES)]

    def _process(self, kind: str, action: Action) -> psutil.Process | None:
        cluster = self.cluster
        match kind:
            case "server":
                found = [cluster.server.pid] if cluster.server is not None else []
            case "client":
                found = [each.pid for each in cluster.clients.values()]
            case _:
                find = {"launcher": cluster.launchers, "trainer": cluster.trainers,
                        "spare": cluster.spares, "shim": cluster.shims}[kind]  # fmt: skip
                found = [each.pid for each in find()]
        try:
            return psutil.Process(found[action.pick % len(found)]) if found else None
        except psutil.NoSuchProcess:
            return None

    # --- actions

    def do(self, action: Action) -> str:
        """Do it; return what was done."""
        reached = self._bring_to(action) if action.phase else ""
        verb, _, what = action.kind.partition(" ")
        if verb in ("kill", "freeze", "terminate") and what not in ("node", "all"):
            done = self._signal(verb, what, action)
        else:
            method: Callable[[Action], str] = getattr(self, "_" + action.kind.replace(" ", "_"))
            done = method(action)
        return f"{done}{reached}"

    def _bring_to(self, action: Action) -> str:
        """Bring a job to a phase of a change, as far as that goes."""
        job_id, cluster = self._job_id(action), self.cluster
        now = cluster.job(job_id)
        if now is None:
            return ", server away"
        match action.phase:
            case "preparing" | "cutting_over":
                self._ask(lambda: self._resize_job(job_id, now, action.pick // 3))
            case "recovering":
                for trainer in cluster.trainers()[:1]:
                    cluster.kill(trainer)
                    self.killed += 1
            case "pausing":
                self._pause(action)
            case "starting":
                self._pause(action)
                cluster.wait_job(job_id, JobState.PAUSED, limit_s=_PHASE_S)
                self._ask(lambda: cluster.api().resume(job_id))
            case "stopping":
                self._stop(action)
        wanted = JobState[action.phase.upper()]
        reached = cluster.wait_job(job_id, wanted, limit_s=_PHASE_S)
        return f", {job_id} {action.phase}" if reached else f", {job_id} not {action.phase}"

    def _ask(self, ask: Callable[[], object]) -> str:
        try:
            ask()
        except JobServerError as error:
            return f" refused: {error}"
        return ""

    def _signal(self, verb: str, kind: str, action: Action) -> str:
        process = self._process(kind, action)
        if process is None:
            return f"{action.kind}: there is none"
        with contextlib.suppress(psutil.NoSuchProcess):
            if verb == "kill":
                process.kill()
                self.killed += 1
            elif verb == "terminate":
                process.terminate()
            else:
                process.suspend()
                again = f"{kind} {process.pid} goes on"
                self._later(action.for_s, again, lambda: _resume(process))
        if verb == "kill":
            self._back(action, kind)
        lasts = f" for {action.for_s:g} s" if verb == "freeze" else ""
        return f"{verb} {kind} {process.pid}{lasts}"

    def _back(self, action: Action, kind: str) -> None:
        """Have a server or a client that was ended be started again after a while."""
        if kind == "server":
            self._ended_at = time.monotonic()
        if kind in ("server", "client"):
            self._away_until = max(self._away_until, time.monotonic() + action.for_s)
            self._later(action.for_s, f"{kind}s are there again", self.restart)

    def restart(self) -> None:
        """Start each program that has ended."""
        cluster = self.cluster
        if cluster.server is None or cluster.server.poll() is not None:
            self._start_server()
        for node, client in list(cluster.clients.items()):
            if client.poll() is not None:
                cluster.start_client_of(node)

    def _start_server(self) -> None:
        now = time.monotonic()
        ahead_s = self.clock_s - self.lives[-1].clock_s if self.lives else 0.0
        self.lives.append(ServerLife(now, self.clock_s))
        for each in self.submissions.values():
            each.ahead_s += max(0.0, ahead_s)
            # It knows what it wrote last, and that its clock does not go back before that.
            each.unseen_s += min(max(0.0, -ahead_s), now - self._ended_at + PROGRESS_WRITE_S + 1)
        self.cluster.start_server()

    def server_time(self, at: float) -> float:
        """Return what the server's clock said at a (monotonic) time; while it was away, before."""
        clock_s = next((each.clock_s for each in reversed(self.lives) if each.at <= at), 0.0)
        return at + self._offset_s + clock_s

    def when(self, server_time: float) -> float:
        """Return when (monotonic) the server's clock said that; the last time, if twice."""
        found = math.nan
        for number, life in enumerate(self.lives):
            at = server_time - self._offset_s - life.clock_s
            ends = self.lives[number + 1].at if number + 1 < len(self.lives) else math.inf
            if life.at - 1.0 <= at <= ends + 1.0:
                found = at
        return found

    def _kill_node(self, action: Action) -> str:
        node = self._node(action)
        killed = self._kill_each(self._of_node(node))
        self._back(action, "client")
        return f"kill node {node}: {killed} processes"

    def _kill_each(self, processes: Sequence[psutil.Process]) -> int:
        killed = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed += 1
        self.killed += killed
        return killed

    def _of_node(self, node: int) -> list[psutil.Process]:
        """Every process below a node's client, and that client."""
        mark = str(self.cluster.disk / f"node{node}")
        found = self.cluster.find()
        return [each for each in found if _mentions(each, mark)]

    def _kill_all(self, action: Action) -> str:
        cluster = self.cluster
        killed = self._kill_each(cluster.processes())
        for program in (cluster.server, *cluster.clients.values()):
            if program is not None:
                program.wait(60)
        self._back(action, "server")
        return f"kill all: {killed} processes"

    def _end_server(self, action: Action) -> str:
        assert self.cluster.server is not None
        self.cluster.server.terminate()
        self._back(action, "server")
        return "end server"

    def _end_client(self, action: Action) -> str:
        node = self._node(action)
        self.cluster.clients[node].terminate()
        self._back(action, "client")
        self._later(action.for_s + 15, "clients are there again", self.restart)
        return f"end client {node}"

    def _resize(self, action: Action) -> str:
        job_id = self._job_id(action)
        now = self.cluster.job(job_id)
        if now is None:
            return "resize: server away"
        refused = self._ask(lambda: self._resize_job(job_id, now, action.pick // 3))
        return f"resize {job_id} from {now.target_pods}{refused}"

    def _resize_job(self, job_id: str, now: JobStatus, pick: int) -> None:
        spec = self.cluster.specs[job_id]
        sizes = [n for n in range(spec.min_pods, spec.max_pods + 1) if n != now.target_pods]
        self.cluster.api().resize(job_id, sizes[pick % len(sizes)])

    def _pause(self, action: Action) -> str:
        job_id = self._job_id(action)

        def resume() -> None:
            now = self.cluster.job(job_id)
            if now is not None and now.state is JobState.PAUSED:
                self._ask(lambda: self.cluster.api().resume(job_id))
            if now is None or now.state in (JobState.PAUSING, JobState.PAUSED):
                self._later(1.0, f"{job_id} is to go on", resume)

        refused = self._ask(lambda: self.cluster.api().pause(job_id))
        if not refused:
            self._later(action.for_s, f"{job_id} is to go on", resume)
        return f"pause {job_id}{refused}"

    def _stop(self, action: Action) -> str:
        job_id = self._job_id(action)
        stopped = self.submissions[job_id]

        def again() -> None:
            if self.submissions[job_id] is not stopped:
                return  # another action has stopped it, too, and had it submitted
            now = self.cluster.job(job_id)
            if now is None:
                if not self.submit(job_id):
                    self._later(1.0, f"{job_id} is to be submitted", again)
            elif not now.state.ended:
                self._later(1.0, f"{job_id} is to end", again)
            else:
                self._ended(now, self.submissions[job_id])
                self._ask(lambda: self.cluster.api().delete(job_id))
                self._later(0.5, f"{job_id} is to be submitted", again)

        refused = self._ask(lambda: self.cluster.api().stop(job_id))
        if not refused:
            self._later(action.for_s, f"{job_id} is to be submitted", again)
        return f"stop {job_id}{refused}"

    def submit(self, job_id: str) -> bool:
        """Submit a job; return whether the server took it."""
        at = time.monotonic()
        try:
            self.cluster.api().submit(self.cluster.specs[job_id])
        except JobServerError:
            return False
        self.submissions[job_id] = Submission(at)
        return True

    def _corrupt_checkpoint(self, action: Action) -> str:
        job_id = self._job_id(action)
        files = sorted(self.cluster.checkpoint(job_id).glob("stage_*/step_*/*"))
        if not files:
            return "corrupt checkpoint: there is none"
        if not self._trains(job_id):
            return f"corrupt checkpoint: {job_id} does not train, so it may be the only copy"
        self.spoiled.add(job_id)
        path = files[-1 - action.pick % min(6, len(files))]
        with contextlib.suppress(OSError):
            content = bytearray(path.read_bytes())
            if content and action.pick // 97 % 2:  # whichever job and file it is
                content[len(content) // 2] ^= 0xFF
                path.write_bytes(content)
            else:
                path.write_bytes(content[: len(content) // 2])
        return f"corrupt {path.relative_to(self.cluster.disk)}"

    def _trains(self, job_id: str) -> bool:
        """Wait for a step of a job that runs: its state is in its pods' memory then, too."""
        before = self.cluster.job(job_id)
        deadline = time.monotonic() + _STEP_S
        while before is not None and before.state is JobState.RUNNING:
            now = self.cluster.job(job_id)
            if now is None or now.state is not JobState.RUNNING:
                return False
            if now.step > before.step:
                return True
            if time.monotonic() > deadline:
                return False
            self.wait(time.monotonic() + _LOOK_S)
        return False

    def _delete_checkpoints(self, action: Action) -> str:
        job_id = self._job_id(action)
        if not self._trains(job_id):
            return f"delete checkpoints: {job_id} does not train, so they may be the only copies"
        self.spoiled.add(job_id)
        stages = sorted(self.cluster.checkpoint(job_id).glob("stage_*"))
        for path in stages[-1 - action.pick // 97 % 2 :]:
            shutil.rmtree(path, ignore_errors=True)
        return f"delete checkpoints of {job_id}"

    def _fill_disk(self, action: Action) -> str:
        path = self.cluster.disk / "filler"

        def fill() -> None:
            with contextlib.suppress(OSError), path.open("ab") as file:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()

        def empty() -> None:
            if not self._release("disk"):
                path.unlink(missing_ok=True)

        self._held["disk"] = self._held.get("disk", 0) + 1
        fill()
        self._later(action.for_s, "the disk has room again", empty)
        return f"fill disk for {action.for_s:g} s"

    def _lock_logs(self, action: Action) -> str:
        """Remount the folder of a job's logs read-only."""
        log = self.cluster.home(self._job_id(action)) / "log"
        log.mkdir(exist_ok=True)
        if self._held.get(str(log)):
            return "lock logs: they are"
        self._held[str(log)] = 1
        # A mount that is made read-only first: the namespaces of the nodes see it so, too.
        other = self.cluster.folder / f"{log.parent.name}.locked"
        other.mkdir(exist_ok=True)
        bind = ["mount", "--bind", str(log), str(other)]
        lock = ["mount", "-o", "remount,ro,bind", str(other)]
        for command in (bind, lock, ["mount", "--bind", str(other), str(log)]):
            subprocess.run(command, check=True)

        def unlock() -> None:
            self._release(str(log))
            subprocess.run(["umount", "-l", str(log), str(other)], check=True)

        self._later(action.for_s, f"{log.name} may be written again", unlock)
        return f"lock logs of {log.parent.name} for {action.for_s:g} s"

    def _slow_node(self, action: Action) -> str:
        """Let all processes of a node stand still half of the time."""
        node, ends = self._node(action), time.monotonic() + action.for_s

        def slow() -> None:
            while time.monotonic() < ends:
                found = self._of_node(node)
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.suspend()
                time.sleep(_SLOW_S)
                for process in found:
                    _resume(process)
                time.sleep(_SLOW_S)

        thread = threading.Thread(target=slow)
        thread.start()
        self._later(action.for_s + 0.5, f"node {node} is quick again", thread.join)
        return f"slow node {node} for {action.for_s:g} s"

    def _set_clock(self, action: Action) -> str:
        """Set the clock, then kill the server: a running one goes by the monotonic clock."""
        self.clock_s += action.clock_s
        self.cluster.clock.write_text(str(self.clock_s))
        assert self.cluster.server is not None
        self.cluster.server.kill()
        self.killed += 1
        self._back(action, "server")
        return f"set clock by {action.clock_s:g} s, kill server"

    def _cut_network(self, action: Action) -> str:
        network = self.cluster.network
        assert network is not None

        def heal() -> None:
            if not self._release("network"):
                network.heal(2)

        network.cut(2)
        self._held["network"] = self._held.get("network", 0) + 1
        self._later(action.for_s * 2, "node 2 is connected again", heal)
        return f"cut node 2 off for {action.for_s * 2:g} s"

    def _lose_packets(self, action: Action) -> str:
        network = self.cluster.network
        assert network is not None
        qdisc = ["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "loss", "20%"]
        subprocess.run(network.command(2, qdisc), check=True)
        clear = network.command(2, ["tc", "qdisc", "del", "dev", "eth0", "root"])

        def heal() -> None:
            if not self._release("packets"):
                subprocess.run(clear, check=True)

        self._held["packets"] = self._held.get("packets", 0) + 1
        self._later(action.for_s * 2, "node 2 loses no packets", heal)
        return f"node 2 loses packets for {action.for_s * 2:g} s"

    def _release(self, name: str) -> int:
        self._held[name] -= 1
        return self._held[name]

    def _second_client(self, action: Action) -> str:
        node = self._node(action)
        self.cluster.start_second_client(node, bool(action.pick % 2))
        other = self.cluster.others[-1]
        # The one that is there may be killed meanwhile, and then this one rightly takes its place.
        self._later(action.for_s, f"the second client of node {node} ends", other.terminate)
        self._back(replace(action, for_s=action.for_s + 8), "client")
        return f"second client for node {node} for {action.for_s:g} s"

    def _second_server(self, action: Action) -> str:
        server = self.cluster.server
        if server is None or server.poll() is not None:
            return "second server: there is no first one"
        self.cluster.start_second_server()
        other = self.cluster.others[-1]

        def check() -> None:
            if other.poll() is None:
                if server.poll() is None:
                    self.violations.append("a second server ran on the same database")
                other.kill()
                other.wait()

        self._later(_AWAY_S, "the second server was refused", check)
        return "second server"


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.resume()


def _mentions(process: psutil.Process, mark: str) -> bool:
    """Whether a process has that text on its command line or in its environment."""
    try:
        return any(mark in text for text in (*process.cmdline(), *process.environ().values()))
    except psutil.Error:
        return False
