"""Let everything go wrong that can, and check that nothing is lost, left over or unexplained.

    python -m benchmarks.chaos --seed N --minutes M [--jobs K] [--framework torch|paddle]
    python -m benchmarks.chaos --replay FILE
    python -m benchmarks.chaos --histories N [--seed FIRST]

The first form has a real job server, two nodes and K jobs, and kills, freezes, changes and cuts
them for M minutes: what follows from the seed alone. It needs root for network namespaces and
mounts; what this machine cannot have is left out, and said. Each action is a line of `--log FILE`,
with its time; `--replay FILE` does the same actions at the same times again. The second form goes
through so many histories of simulated clusters, in virtual time.

Exit code: 0 all holds, 1 something does not; each fault is a line, and the folder is kept.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos import checks
from benchmarks.chaos.cluster import NODES, ChaosCluster, left_out
from benchmarks.chaos.faults import Faults, Submission
from benchmarks.chaos.histories import run_histories
from benchmarks.chaos.plan import KINDS, Action, actions
from job_server.api.errors import JobServerError
from job_server.api.wire import JobEvent, JobSpec, JobState, JobStatus
from tests.e2e.netns import Network
from tests.support import wait_until

_START_S = 120.0
_END_S = 300.0
_NAMES = ("one", "two", "three", "four")
_HEAD = ("seed", "minutes", "jobs", "framework", "step_s")  # options that a replay has as well


class Chaos:
    """One run of it."""

    def __init__(self, options: argparse.Namespace, cluster: ChaosCluster) -> None:
        self.options, self.cluster = options, cluster
        self.began = time.monotonic()
        self.acted: list[float] = []  # when something was done or undone (monotonic)
        self.actions = 0
        self.pids: set[int] = set()
        self.found: list[str] = []
        self.ends: dict[str, JobStatus] = {}  # of the last submissions
        self.events: dict[str, list[JobEvent]] = {name: [] for name in cluster.specs}
        self.faults = Faults(cluster, self._undone, self._ended)
        self._log = options.log.open("w")
        self._write({name: getattr(options, name) for name in _HEAD})

    # --- what happens

    def run(self, plan: Iterator[tuple[float | None, Action]]) -> None:
        """Do the actions until the time is over, each at its time or its `wait_s` later."""
        faults, cluster = self.faults, self.cluster
        faults.restart()
        for node in NODES:
            cluster.start_client_of(node)
        wait_until(cluster.is_up, _START_S, "the server answers")
        for job_id in cluster.specs:
            wait_until(lambda job_id=job_id: faults.submit(job_id), _START_S, "a job is taken")  # type: ignore[misc]
        self.began = time.monotonic()
        first = next(iter(cluster.specs))
        if cluster.wait_job(first, JobState.RUNNING, limit_s=_START_S) is None:
            self.found.append("no job began to train")
            return
        ends = self.began + self.options.minutes * 60
        for at, action in plan:
            if at is None:
                faults.let_train(action)
            due = time.monotonic() + action.wait_s if at is None else self.began + at
            if min(due, time.monotonic()) > ends or self._someone_failed():
                break
            faults.wait(due)
            began = time.monotonic()
            self.pids |= {each.pid for each in cluster.processes()}
            if action.kind in left_out():
                continue
            self.acted.append(began)
            self.actions += 1
            self._write({"at": round(began - self.began, 3), "action": asdict(action)})
            did = faults.do(action)
            self._write({"at": self._now(), "did": did, "number": action.number})
            self.acted.append(time.monotonic())

    def finish(self) -> None:
        """Heal everything, end the jobs, and check all that must hold."""
        self.faults.heal()
        for job_id in self.cluster.specs:
            self.cluster.end_file(job_id).touch()
        for job_id in self.cluster.specs:
            self._finish_job(job_id)
        self.found += checks.check_processes(self.cluster)
        self.found += self.faults.violations

    def _finish_job(self, job_id: str) -> None:
        cluster, faults = self.cluster, self.faults
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            faults.restart()
            now = cluster.job(job_id)
            if now is not None and now.state.ended:
                self._ended(now, faults.submissions[job_id])
                break
            if now is not None and now.state is JobState.PAUSED:
                try:
                    cluster.api().resume(job_id)
                except JobServerError as error:
                    self._undone(f"resume refused: {error}")
            time.sleep(0.3)
        else:
            now = cluster.job(job_id)
            what = "not known" if now is None else f"{now.state.value}: {now.reason}"
            self.found.append(f"{job_id} did not end within {_END_S:g} s, it is {what}")
            return
        if now.state is not JobState.SUCCEEDED:
            self.found.append(f"{job_id} is {now.state.value}: {now.reason}")
            return
        try:
            self.found += checks.check_result(cluster, job_id, self.options.framework)
        except OSError as error:
            self.found.append(f"{job_id} has left no result: {error}")
        self.found += checks.check_pauses(
            job_id, cluster.stamps(job_id), self.events[job_id], faults, self.acted
        )

    def check_left(self, memory_before: set[str]) -> None:
        self.cluster.stop()
        for process in self.cluster.processes():
            self.found.append(f"process {process.pid} is left")
        self.found += checks.check_left(self.cluster, self.pids, memory_before)

    def report(self) -> None:
        """Print what the jobs had of it."""
        wall_s = time.monotonic() - self.began
        for job_id, status in self.ends.items():
            account = status.account
            parts = {name: getattr(account, name) for name in account.__struct_fields__}
            lost = ", ".join(f"{name[:-2]} {s:.0f}" for name, s in parts.items() if s >= 0.5)
            good = ""
            if status.state is JobState.SUCCEEDED:
                share = checks.goodput(status, self.cluster.stamps(job_id), wall_s)
                good = f", goodput {share:.0%}"
            print(
                f"{job_id}: {status.state.value}, {status.step} steps, "
                f"{status.redone_steps} redone, {status.failures} failures, "
                f"{len(status.stages)} stages{good}; seconds: {lost}"
            )

    # --- notes

    def _someone_failed(self) -> bool:
        jobs = [self.cluster.job(job_id) for job_id in self.cluster.specs]
        return any(job is not None and job.state is JobState.FAILED for job in jobs)

    def _ended(self, status: JobStatus, submission: Submission) -> None:
        before = self.ends.get(status.job_id)
        saved = None if before is None else before.saved
        if saved is not None and status.job_id not in self.faults.spoiled:
            self.found += checks.check_goes_on(status, saved)
        self.faults.spoiled.discard(status.job_id)  # what is written at an end is whole again
        self.ends[status.job_id] = status
        try:
            events = self._events_of(status.job_id)
        except JobServerError as error:
            self._undone(f"no events: {error}")
            return
        self.events[status.job_id] += events
        self.found += checks.check_events(status.job_id, events)
        wall_s = self.faults.when(events[-1].at) - submission.at
        self.found += checks.check_status(status, submission, wall_s)

    def _events_of(self, job_id: str) -> list[JobEvent]:
        events: list[JobEvent] = []
        with self.cluster.api() as api:
            while True:
                more = api.events(job_id, after=events[-1].number if events else 0, limit=1000)
                events += more
                if not more:
                    return events

    def _undone(self, text: str) -> None:
        self.acted.append(time.monotonic())
        self._write({"at": self._now(), "then": text})

    def _now(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def _write(self, line: object) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        if self.options.verbose:
            print(json.dumps(line), flush=True)


def replayed(path: Path) -> tuple[dict[str, object], list[tuple[float | None, Action]]]:
    """Return the options and the actions, with their times, that a log tells of."""
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    done = [(line["at"], Action(**line["action"])) for line in lines if "action" in line]
    return head, done


def specs_of(seed: int, jobs: int, framework: str) -> list[JobSpec]:
    """Return the jobs: alone one whose user resizes it, several share the nodes."""
    draw = random.Random(f"jobs {seed}")
    specs = []
    for name in _NAMES[:jobs]:
        overlap = draw.choice(["auto", "on", "off", "join"][: 4 if framework == "paddle" else 3])
        standby = draw.choice([0, 0, 1, 2]) if overlap in ("auto", "on") else 0
        fields: dict[str, Any] = {"share": True} if jobs > 1 else {"pods": 2}
        specs.append(
            JobSpec(
                job_id=name,
                folder=name,
                max_pods=3,
                overlap=overlap,
                standby=standby,
                spares=1,
                grace_s=3.0,
                max_failures=None,
                max_restarts_without_progress=10_000,
                **fields,
            )
        )
    return specs


def run_chaos(options: argparse.Namespace) -> list[str]:
    """Run it; return what does not hold."""
    plan: Iterator[tuple[float | None, Action]]
    if options.replay is not None:
        head, done = replayed(options.replay)
        vars(options).update(head)
        plan = iter(done)
    else:
        plan = ((None, action) for action in actions(options.seed, tuple(options.only)))
    for kind, why in left_out().items():
        print(f"left out: {kind}: {why}")
    memory_before = set(os.listdir("/dev/shm"))
    network = None if "cut network" in left_out() else Network(len(NODES))
    cluster = ChaosCluster(
        Path(tempfile.mkdtemp(prefix="edl-chaos-")) / "c",
        framework=options.framework,
        specs=specs_of(options.seed, options.jobs, options.framework),
        slots=2,
        step_s=options.step_s,
        network=network,
    )
    keep = None
    chaos = Chaos(options, cluster)
    try:
        chaos.run(plan)
        chaos.finish()
        chaos.report()
        chaos.check_left(memory_before)
    except BaseException:
        keep = options.keep
        raise
    finally:
        cluster.stop()
        keep = options.keep if chaos.found else keep
        cluster.remove(keep)
        cluster.folder.parent.rmdir()
    print(
        f"seed {options.seed}: {chaos.actions} actions, {chaos.faults.killed} processes killed, "
        f"log {options.log}"
    )
    if chaos.found:
        print(f"logs: {keep}")
    return chaos.found


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, len(_NAMES) + 1))
    parser.add_argument("--framework", choices=["torch", "paddle"], default="torch")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--step_s", type=float, default=0.03, help="that a step takes longer")
    parser.add_argument("--log", type=Path, help="of the actions (chaos-SEED.jsonl)")
    parser.add_argument("--keep", type=Path, help="for the logs of a run that fails (chaos-SEED)")
    parser.add_argument("--replay", type=Path, help="a log, whose actions are done again")
    parser.add_argument("--histories", type=int, help="so many in virtual time, and nothing else")
    parser.add_argument("--verbose", action="store_true", help="print the log as well")
    options = parser.parse_args(argv)
    name = f"chaos-{options.seed}"
    if options.replay is not None:  # what is replayed is not written over
        name = f"{options.replay.stem}-again"
    options.log = options.log or Path(f"{name}.jsonl")
    options.keep = options.keep or Path(name)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything is taken down
    if options.histories is not None:
        found = run_histories(options.seed, options.histories)
    else:
        found = run_chaos(options)
    for fault in found:
        print(f"FAULT: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
