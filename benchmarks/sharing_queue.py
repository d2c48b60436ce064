"""Measure how fast a job server decides who gets what, and that it loses no job.

    python benchmarks/sharing_queue.py --json sharing_queue.json

A real job server, over HTTP, with the clients and launchers of heartbeats.py: trainers only report.
All jobs are submitted at once; as many run as have room for their least, and the others wait. While
they do, a node's limit is set again and again to what it is: that makes the server decide anew
before it answers, so a decision takes no longer than that answer. Then the jobs train to their ends
while the server is killed with SIGKILL at random moments and started again. The exit code is 1 if a
job is lost, fails, or makes a step twice.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

import psutil

from benchmarks.harness import HOST, await_server, free_port
from benchmarks.heartbeats import Launcher, Load, Node, allow_files
from benchmarks.watchers import percentile
from job_server.api import wire
from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError

_KINDS = wire.ReportKind
_CHECKPOINT = "/shared/checkpoint"
_HURRY = 50  # times as fast do the jobs train once the decisions are measured


@dataclass(slots=True)
class Training:
    """The trainers of one job, all pods together. Their state is durable once they park."""

    total: int  # steps
    step: int = 0  # where it parked last, or began
    since: float | None = None  # it trains since then (monotonic); None: it does not
    stage: int = 0
    began: tuple[int, int] = (0, 0)  # stage and attempt of the newest GO
    pods: int = 0
    rate: float = 1.0  # steps of a pod per second
    redone: int = 0
    ends: int = 0  # how often it was complete

    def now(self) -> int:
        if self.since is None:
            return self.step
        made = int((time.monotonic() - self.since) * self.rate * self.pods)
        return min(self.total, self.step + made)

    def park(self) -> int:
        self.step, self.since = self.now(), None
        return self.step

    def go(self, plan: wire.StagePlan) -> None:
        is_late = plan.order is wire.Order.GO and (plan.stage, plan.attempt) == self.began
        if is_late or (self.since is not None and plan.stage == self.stage):
            return
        self.began = plan.stage, plan.attempt
        reached = self.park()
        source = plan.restore_from
        if source is not None and source.step < reached:
            self.redone += reached - source.step
            self.step = source.step
        self.step = min(self.total, self.step + 1)  # the first one is made as it is told
        self.stage, self.pods, self.since = plan.stage, len(plan.pods), time.monotonic()

    def hurry(self) -> None:
        if self.since is not None:
            self.park()
            self.since = time.monotonic()
        self.rate *= _HURRY


class ReportingLauncher(Launcher):
    """A launcher whose trainers share their steps with those of the job's other pods."""

    def __init__(self, load: Load, node_id: str, pod: wire.NodePod, training: Training) -> None:
        self._training = training
        self._phase = wire.PodStagePhase.READY
        self._told_end = False
        self.code: int | None = None  # None: it runs
        super().__init__(load, node_id, pod)

    def phase(self) -> wire.PodStagePhase:
        return self._phase

    def _obey(self, plan: wire.StagePlan) -> None:
        order = (
            plan.stage,
            plan.order,
            plan.attempt if plan.order is not wire.Order.CUT else plan.cut,
        )
        if order in self._done:
            return
        self._done.add(order)
        training, phases = self._training, wire.PodStagePhase
        match plan.order:
            case wire.Order.PREPARE:
                self._say(_KINDS.READY, plan)
            case wire.Order.START:
                self._stage, self._phase = plan.stage, phases.LOADED
                self._say(_KINDS.STARTED, plan)
                self._say(_KINDS.LOADED, plan)
            case wire.Order.GO | wire.Order.RESUME:
                first = plan.order is wire.Order.GO
                training.go(plan)
                self._stage, self._phase = plan.stage, phases.TRAINING
                self._step = training.now()
                self._say(_KINDS.FIRST_STEP if first else _KINDS.PROGRESS, plan)
            case wire.Order.CUT:
                if plan.stage == training.stage:
                    training.park()
                self._step, self._phase = training.step, phases.PARKED
                self._say(_KINDS.DRAINED, plan)
            case wire.Order.END:
                self._phase = phases.ENDED
                self._say(_KINDS.ENDED, plan)

    def _report(self, kind: wire.ReportKind, plan: wire.StagePlan | None) -> wire.PodReport:
        parked = kind is _KINDS.DRAINED
        return wire.PodReport(
            kind=kind,
            stage=self._stage if plan is None else plan.stage,
            attempt=0 if plan is None else plan.attempt,
            step=self._step,
            elastic=self._stage > 0,
            durable=_CHECKPOINT if parked else "",
            total_steps=self._training.total,
            code=0 if kind is _KINDS.EXITED else None,
            submitted_at=self._pod.submitted_at,
        )

    def _beat(self) -> None:
        training = self._training
        if self._phase is wire.PodStagePhase.TRAINING:
            self._step = training.now()
            if self._step >= training.total and not self._told_end:
                self._told_end = True
                training.ends += 1
                self._say(_KINDS.DONE)
                self._say(_KINDS.EXITED)
        if self._told_end and not self._outbox:
            self.code = 0
            self.silence()
            return
        if self._silent:
            return
        if not self._outbox:
            trains = self._phase is wire.PodStagePhase.TRAINING
            self._say(_KINDS.PROGRESS if trains else _KINDS.ALIVE)
        self._load.after(self._heartbeat_s, self._beat)


class ReportingNode(Node):
    """A client whose pods end as they are told, and when their training is complete."""

    def __init__(
        self, load: Load, number: int, slots: int, trainings: Mapping[str, Training]
    ) -> None:
        self._trainings = trainings
        super().__init__(load, number, slots)

    def start(self, pod: wire.NodePod) -> Launcher:
        return ReportingLauncher(self._load, self.node_id, pod, self._trainings[pod.job_id])

    def _take(self, plan: wire.NodePlan) -> None:
        super()._take(plan)
        wanted = {(pod.job_id, pod.pod_id): pod for pod in plan.pods}
        for key, launcher in list(self.launchers.items()):
            if key not in wanted:
                launcher.silence()
                del self.launchers[key]
            elif wanted[key].want is not wire.DesiredState.RUN:
                launcher.silence()

    def state(self, pod: wire.NodePod) -> wire.PodState:
        launcher = self.launchers[pod.job_id, pod.pod_id]
        assert isinstance(launcher, ReportingLauncher)
        over = launcher.is_silent
        return wire.PodState(
            pod_id=pod.pod_id,
            job_id=pod.job_id,
            phase=wire.PodPhase.EXITED if over else wire.PodPhase.RUNNING,
            exit_code=launcher.code if over else None,
            signal=signal.SIGTERM if over and launcher.code is None else None,
            submitted_at=pod.submitted_at,
        )


class Server:
    """The job server, which may be killed and started again."""

    def __init__(self, folder: Path, port: int, watchers: int) -> None:
        self._command = [
            sys.executable, "-m", "job_server", "--no_job", "--server_port", str(port),
            "--db", str(folder / "server.db"), "--log_level", "40",
            "--max_watchers", str(watchers),
        ]  # fmt: skip
        self._port = port
        self.kills = 0
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.kills += 1
        self.process = self._start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command)
        await_server(self._port, process)
        return process


class Aside:
    """Asks the server from a thread of its own, while the load runs in this one."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.over = False
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  told in the main thread
            self.error = error
        self.over = True

    def raise_error(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def submit(api: ApiClient, number: int) -> None:
    api.submit(
        wire.JobSpec(
            job_id=f"job-{number}", folder="folder", share=True, min_pods=4, max_pods=8,
            user=f"user{number % 3}", overlap="off", prepare_timeout_s=600,
            script=wire.ScriptSpec(kind=wire.ScriptKind.NONE),
        )
    )  # fmt: skip


def running(api: ApiClient) -> list[wire.JobStatus]:
    return [job for job in api.jobs() if job.state is wire.JobState.RUNNING]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures."""
    slots, room = args.slots, args.nodes * args.slots // 4
    port = free_port()
    allow_files(4 * args.nodes * slots + 200)
    steps = int(args.work_s * 4 * _HURRY)
    trainings = {f"job-{number}": Training(total=steps) for number in range(args.jobs)}
    found: dict[str, Any] = {"jobs": args.jobs, "nodes": args.nodes, "slots": slots}
    with tempfile.TemporaryDirectory(prefix="edl-queue-") as folder:
        server = Server(Path(folder), port, args.nodes * slots + args.nodes + 100)
        api = ApiClient(f"http://{HOST}:{port}", timeout_s=60.0)
        load = Load(port)
        nodes = [ReportingNode(load, number, slots, trainings) for number in range(args.nodes)]
        try:
            _wait(load, Aside(lambda: _all_there(api, args.nodes)))
            _wait(load, Aside(lambda: _queue_up(api, args.jobs, room, args.limit_s, found)))
            _wait(
                load, Aside(lambda: _decide(api, server, nodes[-1].node_id, args.decisions, found))
            )
            if args.only_decide:
                return found
            for training in trainings.values():
                training.hurry()
            began = time.monotonic()
            _wait(load, Aside(lambda: _to_the_end(api, server, args, found)))
            found["all_ended_s"] = time.monotonic() - began
        finally:
            api.close()
            load.close()
            server.stop()
    found["kills"] = server.kills
    found["redone_steps"] = sum(each.redone for each in trainings.values())
    found["never_complete"] = sum(each.now() < each.total for each in trainings.values())
    found["load_average"] = os.getloadavg()[0]
    return found


def _wait(load: Load, aside: Aside) -> None:
    load.run(lambda: aside.over)
    aside.raise_error()


def _all_there(api: ApiClient, count: int) -> None:
    while len(api.nodes()) < count:
        time.sleep(0.1)
    time.sleep(1.5)  # and each has said what else runs on it


def _queue_up(api: ApiClient, jobs: int, room: int, limit_s: float, found: dict[str, Any]) -> None:
    took = []
    for number in range(jobs):
        began = time.perf_counter()
        submit(api, number)
        took.append(time.perf_counter() - began)
    deadline = time.monotonic() + limit_s
    while len(running(api)) < min(room, jobs):
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(running(api))} jobs run after {limit_s:.0f} s, not {room}")
        time.sleep(0.5)
    found["running"] = len(running(api))
    found["queued"] = jobs - found["running"]
    found["submit_p50_ms"] = 1000 * statistics.median(took)
    found["submit_p99_ms"] = 1000 * percentile(took, 0.99)


def _decide(
    api: ApiClient, server: Server, node_id: str, count: int, found: dict[str, Any]
) -> None:
    """Time decisions, and any other answer; and the server's processor time with each and without.

    The latter suffers less from other load.
    """
    process = psutil.Process(server.process.pid)

    def run(ask: Callable[[], object]) -> tuple[list[float], float, float]:
        """Return how long each answer took, all together, and the server's processor time."""
        took, used, began = [], process.cpu_times(), time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            ask()
            took.append(time.perf_counter() - asked)
            time.sleep(0.05)
        now = process.cpu_times()
        spent = now.user + now.system - used.user - used.system
        return took, time.perf_counter() - began, spent

    plain, plain_s, plain_cpu_s = run(api.health)
    decided, decided_s, decided_cpu_s = run(lambda: api.limit_node(node_id, None))
    for name, times in (("decision", decided), ("any_answer", plain)):
        found[f"{name}_p50_ms"] = 1000 * statistics.median(times)
        found[f"{name}_p99_ms"] = 1000 * percentile(times, 0.99)
    # The heartbeats of all take as much of a second in both.
    heartbeats_s = plain_cpu_s * decided_s / plain_s
    found["decision_cpu_ms"] = 1000 * (decided_cpu_s - heartbeats_s) / count


def _to_the_end(
    api: ApiClient, server: Server, args: argparse.Namespace, found: dict[str, Any]
) -> None:
    rng = random.Random(args.seed)
    deadline = time.monotonic() + args.limit_s
    next_kill = time.monotonic() + rng.uniform(0.5, 2.0)
    statuses: tuple[wire.JobStatus, ...] = ()
    while True:
        with contextlib.suppress(JobServerError):
            statuses = api.jobs()
            if all(job.state.ended for job in statuses):
                break
        if time.monotonic() > deadline:
            left = [f"{job.job_id} {job.state.value}: {job.reason}" for job in statuses]
            raise SystemExit(f"not all jobs ended in {args.limit_s:.0f} s: {left[:5]}")
        if server.kills < args.kills and time.monotonic() > next_kill:
            server.kill()
            next_kill = time.monotonic() + rng.uniform(0.5, 4.0)
        time.sleep(1.0)  # all jobs in full are not asked for at no cost
    states = [job.state for job in statuses]
    found["succeeded"] = states.count(wire.JobState.SUCCEEDED)
    found["lost_or_failed"] = args.jobs - found["succeeded"]
    found["redone_by_status"] = sum(job.redone_steps for job in statuses)
    found["longest_waited_s"] = max(job.account.waiting_s for job in statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=220)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--slots", type=int, default=8, help="of each node; a job takes 4 to 8")
    parser.add_argument("--work_s", type=float, default=8.0, help="of a job with 4 trainers")
    parser.add_argument("--decisions", type=int, default=100)
    parser.add_argument("--only_decide", action="store_true", help="no job trains to its end")
    parser.add_argument("--kills", type=int, default=10, help="of the server")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of these")
    parser.add_argument("--limit_s", type=float, default=600.0, help="for the start, and the end")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    for name, value in found.items():
        print(f"  {name:<20} {value:.1f}" if isinstance(value, float) else f"  {name:<20} {value}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    wrong = ("lost_or_failed", "redone_steps", "never_complete")
    return 1 if any(found.get(name) for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
