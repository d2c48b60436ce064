"""Measure what Kubernetes adds: how soon pods are made, and the pause of a planned change.

    python -m benchmarks.kubernetes --json FILE [--rounds 7] [--settle 30]

As a module: as a script its folder would hide the package `kubernetes`. Two rows take turns:

    controller   a TrainingJob of 2 pods, 3 when spec.replicas says so, and 2 again, by the
                 controller on the tests' own API server, whose pods are processes
    plain        the same training by the job server alone, on three nodes that are there

`made` is the time from the TrainingJob to its last pod (two trainers and the job's server), as
objects. `pause` and `asked to done` are those of resize.py: a pause holds one ordinary step. In
row controller the latter holds the start of a new pod; in row plain the node waits already.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elasticity.command import finish, measure_all
from benchmarks.elasticity.jobs import Job, NotInTime
from benchmarks.elasticity.ours import EdlJob, NodeSpec, Options, pod_command
from benchmarks.elasticity.report import (
    Aim,
    Record,
    Sample,
    at_most,
    count_at_most,
    load_now,
    spread,
    table,
)
from benchmarks.harness import ROOT
from benchmarks.resize import ENDLESS, planned
from job_server.api.errors import JobServerError
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.running import LiveJob

ROWS = ("controller", "plain")
CHANGES = (("join", 3), ("leave", 2))
OPTIONS = Options(spares=1, nodes=(NodeSpec(slots=1),) * 3)  # otherwise as a TrainingJob's defaults


class KubeJob(Job):
    """A TrainingJob on a cluster of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, task="lenet", steps=ENDLESS)
        self._cluster = Cluster(folder / "pods")
        self._job: LiveJob | None = None  # None: not made yet
        self._wanted = 0
        self.made_s = 0.0  # from the TrainingJob to its last pod

    def start(self, trainers: int) -> None:
        self._cluster.__enter__()
        self._cluster.kubelet.add_node("node")
        self._cluster.apply_file(ROOT / "manifests" / "crd.yaml")
        config = self._cluster.api.kubeconfig(self.folder / "kubeconfig")
        command = ["-m", "k8s_controller", "--no_leader_elect", "--liveness_port=0"]
        self.spawn([sys.executable, *command, f"--kubeconfig={config}"], "controller")
        watches = {("watch", "trainingjobs"), ("watch", "pods")}
        self._wait(lambda: watches <= self._asked(), self.limit_s, "the controller does not watch")
        made_at: list[float] = []

        def note() -> None:
            if len(self._cluster.store.all("Pod")) == trainers + 1:
                made_at.append(time.monotonic())

        self._cluster.store.listen(note)
        self._wanted, asked = trainers, time.monotonic()
        self._job = LiveJob(self._cluster, self._manifest(trainers))
        self._wait(lambda: bool(made_at), self.limit_s, "the pods were not made")
        self._cluster.store.forget(note)
        self.made_s = made_at[0] - asked

    def _asked(self) -> set[tuple[str, str]]:
        return {(call.verb, call.resource) for call in self._cluster.api.calls_of("admin")}

    def _manifest(self, pods: int) -> dict[str, Any]:
        container = {
            "name": "trainer",
            "image": "edl",
            "command": ["python", *pod_command(self, OPTIONS)],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        }
        return {
            "apiVersion": "paddlepaddle.org/v1",
            "kind": "TrainingJob",
            "metadata": {"name": "bench", "namespace": "default"},
            "spec": {
                "replicas": pods,
                "maxReplicas": len(OPTIONS.nodes),
                "template": {"spec": {"containers": [container]}},
            },
        }

    def grow(self) -> None:
        self._scale(self._wanted + 1)

    def shrink(self) -> None:
        self._scale(self._wanted - 1)

    def _scale(self, pods: int) -> None:
        assert self._job is not None
        self._wanted = pods
        self._job.change(replicas=pods)

    def kill_node(self) -> None:
        self._cluster.kubelet.lose_node("node")

    def end_in_order(self) -> None:
        super().end_in_order()
        self._cluster.__exit__()


class KubernetesBench:
    """Measures rows, and keeps what came of them."""

    def __init__(self, args: argparse.Namespace, record: Record, folder: Path) -> None:
        self._settle, self._record, self._folder = args.settle, record, folder

    def measure(self, row: str, turn: int) -> None:
        try:
            for name, values in self._figures(row, self._folder / f"{row}-{turn}"):
                self._record.add(Sample(row=name, turn=turn, values=values, load=load_now()))
        except (NotInTime, JobServerError) as error:
            self._record.add(Sample(row=row, turn=turn, failed=str(error), load=load_now()))

    def _figures(self, row: str, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
        job: Job
        if row == "controller":
            job = KubeJob(folder)
        else:
            job = EdlJob(folder, task="lenet", steps=ENDLESS, options=OPTIONS)
        with job:
            job.start(2)
            if isinstance(job, KubeJob):
                yield "made", {"made_s": job.made_s}
            job.wait_world(2, steps=self._settle)
            for kind, world in CHANGES:
                yield f"{row} {kind}", planned(job, world, self._settle)


def show(record: Record) -> None:
    made = record.values("made", "made_s")
    print(f"\nFrom the TrainingJob to its pods: {spread(made)} s, median (range) of {len(made)}\n")
    lines = []
    for kind, _ in CHANGES:
        for row in ROWS:
            name = f"{row} {kind}"
            values = {key: record.values(name, key) for key in ("pause_s", "redone", "asked_s")}
            lines.append(
                (
                    name,
                    f"{len(values['pause_s'])}",
                    spread(values["pause_s"], 1e3),
                    spread(values["redone"], digits=1),
                    spread(values["asked_s"]),
                )
            )
    print(table(("", "n", "pause, ms", "redone", "asked to done, s"), lines))
    for row in ROWS:
        for why in record.failures(row):
            print(f"  {row} failed: {why}")


def aims(record: Record) -> list[Aim]:
    found = [at_most("from the TrainingJob to its pods", record.values("made", "made_s"), 1.0, "s")]
    redone = []
    for kind, _ in CHANGES:
        ours, plain = (record.values(f"{row} {kind}", "pause_s") for row in ROWS)
        more = [statistics.median(ours) - statistics.median(plain)] if ours and plain else []
        found.append(at_most(f"{kind}: a longer pause than without Kubernetes", more, 1.0, "s"))
        redone += [n for row in ROWS for n in record.values(f"{row} {kind}", "redone")]
    return [*found, count_at_most("steps redone", redone, 0)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each row (7)")
    parser.add_argument("--settle", type=int, default=30, help="steps between two changes (30)")
    parser.add_argument("--out", type=Path, help="folder for logs (a temporary one)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    for name in ("rounds", "settle"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be at least 1, got {getattr(args, name)}")
    about = {"benchmark": "kubernetes", "settle": args.settle}
    record = Record(args.json, resume=False, about=about)
    measure_all(
        args,
        [(row, turn) for turn in range(args.rounds) for row in ROWS],
        lambda _row: 30.0,
        lambda folder: KubernetesBench(args, record, folder).measure,
    )
    show(record)
    finish(record, aims(record), with_peers=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
