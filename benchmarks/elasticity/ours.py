"""A training under EDL, for resize.py and recovery.py."""

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.elasticity.jobs import (
    Job,
    NotInTime,
    base_env,
    end,
    trainer_options,
    wait_port,
)
from benchmarks.harness import HOST, ROOT, free_port
from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError
from job_server.api.wire import JobEvent, JobSpec, JobStatus, WireError

JOB_ID = "bench"
_PORTS_PER_NODE = 200
_FIRST_PORT = 20000  # below the ephemeral ones
_QUIET_S = 0.7  # so long must trainers that wait do nothing to count as ready
_QUIET_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    slots: int
    script_fails: bool = False  # its pods end at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How EDL is told to run it."""

    overlap: str = "auto"
    spares: int = 0
    standby: int = 0
    snapshot_steps: str = "auto"
    save_steps: int = 20
    min_pods: int = 1
    framework: str = "paddle"
    promise: str = "rounding"
    nodes: tuple[NodeSpec, ...] = (NodeSpec(slots=3),)


def make_spec(options: Options, *, pods: int, expected_nodes: int) -> JobSpec:
    """Return the job as it is submitted. Raises WireError: this EDL cannot do that."""
    return JobSpec(
        job_id=JOB_ID,
        min_pods=options.min_pods,
        max_pods=sum(node.slots for node in options.nodes),
        pods=pods,
        overlap=options.overlap,
        spares=options.spares,
        standby=options.standby,
        expected_nodes=expected_nodes,
        grace_s=3.0,
        max_failures=None,
    )


def why_not(options: Options) -> str:
    """Return why this EDL cannot run a job that way, or ""."""
    try:
        make_spec(options, pods=1, expected_nodes=1)
    except WireError as error:
        return f"this EDL cannot: {error}"
    if find_spec(options.framework) is None:
        return f"there is no {options.framework} here"
    return ""


class EdlJob(Job):
    """A job server, a job client for each node, and one trainer for each slot in use."""

    def __init__(self, folder: Path, *, task: str, steps: int, options: Options) -> None:
        super().__init__(folder, task=task, steps=steps)
        self.options = options
        self.port = free_port()
        self.api = ApiClient(f"http://{HOST}:{self.port}")
        self.clients: list[subprocess.Popen[bytes]] = []
        self.server: subprocess.Popen[bytes] | None = None  # None: not running
        self._wanted = 0
        self._events: list[JobEvent] = []

    # --- Job

    def start(self, trainers: int) -> None:
        """On all nodes but those whose script fails: these are to come later."""
        self.start_server()
        for number, node in enumerate(self.options.nodes):
            if not node.script_fails:
                self.start_client(number)
        self.submit(trainers)

    def grow(self) -> None:
        self.resize(self._wanted + 1)

    def shrink(self) -> None:
        self.resize(self._wanted - 1)

    def kill_node(self) -> None:
        """The last node: client, shims, launchers, trainers."""
        name = self.node_id(len(self.clients) - 1)
        doomed = [process for process in self.processes() if _node_of(process) == name]
        client = self.clients.pop()
        client.kill()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        client.wait()

    def kill_shim(self) -> float:
        """SIGKILL to the shim of one pod, the newest; return when."""
        shims = [process for process in self.processes() if "--pod_dir" in process.cmdline()]
        newest = max(shims, key=lambda process: process.create_time(), default=None)
        if newest is None:
            raise NotInTime("no pod is left")
        at = time.monotonic()
        newest.kill()
        return at

    def end_in_order(self) -> None:
        for client in self.clients:
            end(client)
        if self.server is not None:
            end(self.server)
        self.api.close()

    # --- more

    def start_server(self) -> None:
        args = ["--no_job", "--server_port", str(self.port)]
        args += ["--db", str(self.folder / "server.db")]
        self.server = self.spawn([sys.executable, "-m", "job_server", *args], "server")
        wait_port(self.port)

    def kill_server(self) -> float:
        """Return when."""
        assert self.server is not None
        at = time.monotonic()
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        return at

    def node_id(self, number: int) -> str:
        return f"node{number}"

    def start_client(self, number: int) -> None:
        """Start the client of a node, counted from 0."""
        home = self.folder / self.node_id(number)
        home.mkdir(exist_ok=True)
        node = self.options.nodes[number]
        script = home / "train.sh"
        trains = shlex.join([sys.executable, *pod_command(self, self.options)])
        script.write_text("exit 1\n" if node.script_fails else f"exec {trains}\n")
        low = _FIRST_PORT + (self.port % 20) * 600 + number * _PORTS_PER_NODE
        args = ["--job_server", f"http://{HOST}:{self.port}", "--node_id", self.node_id(number)]
        args += ["--log_dir", str(home / "log"), "--pod_path", str(home / "pods")]
        args += ["--cpu_slots", str(node.slots), "--grace_s", "3"]
        args += ["--port_range", f"{low}-{low + _PORTS_PER_NODE - 1}", str(script)]
        command = [sys.executable, "-m", "job_client", *args]
        self.clients.append(self.spawn(command, f"client{number}"))

    def submit(self, pods: int) -> None:
        self._wanted = pods
        self.api.submit(make_spec(self.options, pods=pods, expected_nodes=len(self.clients)))

    def resize(self, pods: int) -> None:
        self._wanted = pods
        self.api.resize(JOB_ID, pods)

    def add_node(self, number: int) -> None:
        """Start the client of one more node, and return when the server knows it."""
        self.start_client(number)
        deadline = time.monotonic() + self.limit_s
        while self.node_id(number) not in [each.node.node_id for each in self.api.nodes()]:
            if time.monotonic() > deadline:
                raise NotInTime(f"{self.node_id(number)} has not registered")
            time.sleep(0.02)

    def status(self) -> JobStatus:
        return self.api.status(JOB_ID)

    def wait_status(self, wanted: Callable[[JobStatus], object], limit_s: float = 60) -> JobStatus:
        """Return the first status that is as `wanted`; the server may be away meanwhile."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(JobServerError):
                status = self.status()
                if wanted(status):
                    return status
            time.sleep(0.02)
        raise NotInTime(f"the job is not as it should be after {limit_s:g} s")

    def events(self, since: float) -> list[tuple[float, JobEvent]]:
        """Return the job's events after `since`, with their times on the monotonic clock."""
        while new := self.api.events(JOB_ID, after=self._events[-1].number if self._events else 0):
            self._events += new
        offset = time.time() - time.monotonic()
        return [(e.at - offset, e) for e in self._events if e.at - offset >= since]

    def wait_warm(self, waiting: int) -> None:
        """Return when so many warm processes (spares, standby) are there and do nothing."""
        deadline = time.monotonic() + self.limit_s
        before: dict[int, float] = {}
        while time.monotonic() < deadline:
            now = self._waiting_cpu_s()
            quiet = [
                pid
                for pid, cpu_s in now.items()
                if cpu_s - before.get(pid, -1.0) < _QUIET_SHARE * _QUIET_S
            ]
            if len(quiet) == len(now) >= waiting:
                return
            before = now
            time.sleep(_QUIET_S)
        raise NotInTime(f"{waiting} warm processes were not there after {self.limit_s:g} s")

    def _waiting_cpu_s(self) -> dict[int, float]:
        """Return the processor time of each trainer process that does not train."""
        training = {member[0].pid for member in self.newest().members}
        found: dict[int, float] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                script = any("elasticity/edl_" in word for word in line[1:3])
                if process.pid not in training and (script or "pod_runtime.spare" in line):
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system
        return found

    def verify(self) -> str:
        """Return the last line of what the proof says of this run."""
        done = subprocess.run(
            [sys.executable, "-m", "pod_runtime.verify", str(self.folder / "run")],
            capture_output=True,
            text=True,
            check=False,
            env=base_env(),
            cwd=ROOT,
        )
        return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


def pod_command(job: Job, options: Options) -> list[str]:
    """Return what each pod runs, without the interpreter."""
    return [
        "-m", "pod_runtime.launch",
        "--log_dir", str(job.folder / "trainers"), "--run_dir", str(job.folder / "run"),
        str(Path(__file__).with_name(f"edl_{options.framework}.py")),
        *trainer_options(job, job.folder / "checkpoint", options.save_steps),
        f"--snapshot_steps={options.snapshot_steps}",
        f"--promise={options.promise}",
    ]  # fmt: skip


def _node_of(process: psutil.Process) -> str | None:
    """Return the node that a pod's process belongs to; None: it is of no pod, or gone."""
    try:
        return process.environ().get("EDL_NODE_ID")
    except psutil.Error:
        return None


def planned_phases(job: EdlJob, *, asked: float, ended: float, began: float) -> dict[str, float]:
    """Return where the time of a planned change went, in seconds; from "hand over" on it paused."""
    events = [(at, event) for at, event in job.events(asked) if at <= began]
    return _between(
        [
            ("ask", asked),
            ("prepare", _first(events, "preparing stage")),
            ("last steps", _first(events, "cutting stage")),
            ("hand over", ended),
            ("start", _first(events, "starting the trainers")),
            ("first step", _first(events, "committed")),
            ("", began),
        ]
    )


def crash_phases(job: EdlJob, *, killed: float, began: float) -> dict[str, float]:
    """Return where the time of a recovery went, in seconds."""
    events = [(at, event) for at, event in job.events(killed) if at <= began]
    return _between(
        [
            ("notice", killed),
            ("stop", _first(events, "is over")),
            ("start", _first(events, "starting the trainers", "committed")),
            ("first step", _first(events, "committed")),
            ("", began),
        ]
    )


def _first(events: Sequence[tuple[float, JobEvent]], *words: str) -> float | None:
    return next((at for at, event in events if any(word in event.text for word in words)), None)


def _between(moments: Sequence[tuple[str, float | None]]) -> dict[str, float]:
    known = [(name, at) for name, at in moments if at is not None]
    return {name: after - at for (name, at), (_, after) in pairwise(known)}
