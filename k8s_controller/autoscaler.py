"""Have `autoscale` decide again and again, and write down what it decides.

A decision is in the TrainingJob's status before anything follows from it, so whoever comes next
goes on with it. The jobs' own passes make it come true.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from job_server.sharing.allocate import Policy
from k8s_controller.decisions import autoscale
from k8s_controller.decisions.spec import KIND, Object
from k8s_controller.kube_api import TROUBLES, KubeApi
from k8s_controller.metrics import Metrics

logger = logging.getLogger(__name__)


class Autoscaler:
    """One thread.

    Args:
        wake: is told the namespace and name of a job that has another number.
        namespaces: whose jobs are looked after; none: all. Nodes and pods are always the cluster's.
    """

    def __init__(
        self,
        kube: KubeApi,
        wake: Callable[[str, str], None],
        metrics: Metrics,
        policy: Policy,
        interval_s: float,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._kube, self._wake, self._metrics = kube, wake, metrics
        self._policy, self._interval_s, self._namespaces = policy, interval_s, namespaces
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._interval_s):
            try:
                self.decide()
            except TROUBLES as error:
                self._metrics.count("errors")
                logger.warning("nothing is scaled: tried again soon: %s", error)
            except Exception:  # the next look may be of another cluster
                self._metrics.count("errors")
                logger.exception("nothing is scaled: this look has failed")

    def decide(self) -> None:
        """Look at the whole cluster once. Raises one of `TROUBLES`."""
        jobs = {autoscale.job_name(job): job for job in self._jobs()}
        for job in jobs.values():
            if not autoscale.is_scaled(job) and (job.get("status") or {}).get("autoscale"):
                self._write(job, None)
        if not any(map(autoscale.is_scaled, jobs.values())):
            return
        seen = autoscale.look(
            jobs.values(),
            self._kube.list_all("Pod"),
            self._kube.list_all("Node"),
            self._kube.list_all("PriorityClass"),
            self._kube.now(),
        )
        for name, decision in autoscale.decide(self._policy, seen, self._kube.now()).items():
            logger.info("%s: %d pods: %s", name, decision.replicas, decision.reason)
            self._write(jobs[name], decision.write())

    def _jobs(self) -> Sequence[Object]:
        if not self._namespaces:
            return self._kube.list_all(KIND)
        return [job for each in self._namespaces for job in self._kube.list_all(KIND, each)]

    def _write(self, job: Object, decision: Object | None) -> None:
        try:
            self._kube.write_status(job, {"autoscale": decision})
        except TROUBLES as error:  # of one job; it is decided on again
            self._metrics.count("errors")
            logger.warning("%s: not written: %s", autoscale.job_name(job), error)
            return
        if decision is not None:
            self._metrics.count("decisions")
        self._wake(job["metadata"]["namespace"], job["metadata"]["name"])
