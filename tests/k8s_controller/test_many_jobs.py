"""Many jobs, whose controller is killed at any moment: nothing is orphaned, nothing made twice."""

import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.job_servers import JobServers
from tests.k8s_controller.cluster.kinds import ApiError, Object
from tests.k8s_controller.jobs import training_job
from tests.k8s_controller.running import start_controller
from tests.support import ROOT, wait_until

MOST = 6
MEMORY_MB = 150
OWN = {"Pod", "Secret", "Service", "PodDisruptionBudget", "NetworkPolicy"}


class ManyJobs:
    """TrainingJobs of one cluster, and what a user wants of them."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.cluster, self.random = cluster, random.Random(17)
        self.wanted: dict[str, int] = {}
        for number in range(count):
            self.create(f"job-{number:03d}", 5)

    def create(self, name: str, pods: int) -> None:
        job = training_job(name, minReplicas=1, maxReplicas=MOST, replicas=pods)
        del job["metadata"]["uid"]
        self.cluster.apply(job)
        self.wanted[name] = pods

    def delete(self, name: str) -> None:
        self.cluster.store.delete(self.cluster.store.kind("TrainingJob"), "default", name)

    def change(self, name: str, **spec: Any) -> None:
        kind = self.cluster.store.kind("TrainingJob")
        self.cluster.store.patch(kind, "default", name, {"spec": spec})

    def happen(self) -> None:
        """Change a few of them."""
        for name in self.random.sample(sorted(self.wanted), max(2, len(self.wanted) // 4)):
            match self.random.randrange(5):
                case 0 | 1:
                    self.wanted[name] = self.random.randint(1, MOST)
                    self.change(name, replicas=self.wanted[name])
                case 2:
                    self.change(name, suspend=self.random.random() < 0.5)
                case 3:
                    self.delete(name)
                    self.create(name, self.wanted[name])
                case 4:
                    with contextlib.suppress(ApiError):  # there is none yet
                        kind = self.cluster.store.kind("Pod")
                        self.cluster.store.delete(kind, "default", f"{name}-0")

    def settled(self) -> bool:
        jobs = self.cluster.store.all("TrainingJob")
        return len(jobs) == len(self.wanted) and all(
            (status := job.get("status") or {}).get("phase") == "Running"
            and status["trainingReplicas"] == status["replicas"] == self.wanted[_name(job)]
            for job in jobs
        )

    def objects(self) -> Counter[tuple[str, str]]:
        """Count objects by the uid of their TrainingJob and their kind; else `nobody`."""
        uids = {job["metadata"]["uid"] for job in self.cluster.store.all("TrainingJob")}
        found: Counter[tuple[str, str]] = Counter()
        for kind in OWN:
            for each in self.cluster.store.all(kind):
                (owner,) = (o["uid"] for o in each["metadata"]["ownerReferences"])
                found[owner if owner in uids else "nobody", kind] += 1
        return found

    def is_whole(self) -> bool:
        """Whether each has what it wants, one of each thing, and nothing more is there."""
        expected: Counter[tuple[str, str]] = Counter()
        for job in self.cluster.store.all("TrainingJob"):
            uid = job["metadata"]["uid"]
            expected.update(dict.fromkeys(((uid, kind) for kind in OWN), 1))
            expected[uid, "Pod"] = self.wanted[_name(job)] + 1
        return self.settled() and self.objects() == expected

    def most_at_once(self) -> int:
        """Return the most trainer pods that one job ever had that were not leaving."""
        there: dict[str, set[str]] = {}
        most = 0
        for change in self.cluster.store.since(self.cluster.store.oldest):
            meta = change.obj["metadata"]
            if change.kind.kind != "Pod" or meta["name"].endswith("-server"):
                continue
            pods = there.setdefault(meta["ownerReferences"][0]["uid"], set())
            gone = change.type == "DELETED" or "deletionTimestamp" in meta
            (pods.discard if gone else pods.add)(meta["uid"])
            most = max(most, len(pods))
        return most


def _name(job: Object) -> str:
    return str(job["metadata"]["name"])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "rounds", "outage_s"),
    [
        pytest.param(6, 3, 3.0, id="short"),
        pytest.param(100, 12, 60.0, id="long", marks=pytest.mark.slow),
    ],
)
def test_many_jobs_survive_a_controller_that_is_killed_again_and_again(
    tmp_path: Path, count: int, rounds: int, outage_s: float
):
    limit_s = 180 + 3 * count
    with Cluster(tmp_path, pretends=True) as cluster, JobServers(cluster.store):
        for number in range(3):
            cluster.kubelet.add_node(f"node-{number}", str(10 * count), "900Ti", pods=10 * count)
        cluster.apply_file(ROOT / "manifests" / "crd.yaml")
        began = time.monotonic()
        controller = start_controller(cluster, tmp_path)
        try:
            jobs = ManyJobs(cluster, count)
            wait_until(jobs.is_whole, limit_s, "the first start")
            jobs.delete("job-000")
            jobs.create("job-000", 2)  # at once, by the same name
            wait_until(jobs.is_whole, limit_s, "another one of that name")
            print(f"{count} jobs of 5 pods train after {time.monotonic() - began:.1f} s")
            for number in range(rounds):
                cluster.api.conflicting = number % 2 == 1
                jobs.happen()
                time.sleep(jobs.random.uniform(0, 3))  # any moment: that is what is tried
                controller.kill()
                controller.wait()
                controller = start_controller(cluster, tmp_path)
            jobs.happen()
            cluster.api.outage()
            cluster.kubelet.lose_node("node-0")
            cluster.kubelet.remove_node("node-0")
            time.sleep(outage_s)
            cluster.api.resume()
            for name in jobs.wanted:
                jobs.change(name, suspend=False)
            wait_until(jobs.is_whole, limit_s, "all as wanted")
            assert jobs.most_at_once() <= MOST
            assert controller.poll() is None
            memory_mb = psutil.Process(controller.pid).memory_info().rss / 1e6
            assert calls_per_second(cluster) < 0.5 * count
            print(f"{memory_mb:.0f} MB, {calls_per_second(cluster):.1f} calls/s when quiet")
            assert memory_mb < MEMORY_MB
            cluster.api.conflicting = False
            for name in jobs.wanted:
                jobs.delete(name)
            wait_until(lambda: not jobs.objects(), limit_s, "all gone")
        finally:
            controller.kill()
            controller.wait()


def calls_per_second(cluster: Cluster, during_s: float = 3.0) -> float:
    before = len(cluster.api.calls)
    time.sleep(during_s)
    return (len(cluster.api.calls) - before) / during_s
