"""Elect one of several controllers by a Lease, as Kubernetes' own controllers do.

Whoever holds it renews it every few seconds. The others watch the counter of its writes with their
own clocks, so clocks may differ: a Lease that was not written for its time is free. One that ends
in order gives it back. One that was stopped for a while (SIGSTOP, a machine that slept) writes
nothing until it has renewed it.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from k8s_controller.decisions.observed import time_text
from k8s_controller.kube_api import TROUBLES, KubeApi

logger = logging.getLogger(__name__)

LEASE_S, RETRY_S = 15.0, 2.0
ANSWER_S = 2.0  # of a call about the Lease; an attempt makes two
RENEW_S = LEASE_S - RETRY_S - 2 * ANSWER_S  # later there is no time for another attempt


def _now() -> float:
    """Return seconds of a clock that counts while the machine sleeps, unlike the monotonic one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """One candidate.

    Args:
        kube: its calls end within `ANSWER_S`.
        identity: of this process, unlike that of any other.
    """

    def __init__(self, kube: KubeApi, namespace: str, name: str, identity: str) -> None:
        self._kube, self._namespace, self._name = kube, namespace, name
        self._identity = identity
        self._seen: tuple[str, float] = ("", 0.0)  # version, and since when it is that
        self._renewed_at = float("-inf")

    def win(self, stop: threading.Event) -> bool:
        """Wait until this one leads; False: it was asked to stop."""
        while not stop.is_set():
            if self._renew():
                return True
            stop.wait(RETRY_S)
        return False

    def leads(self) -> bool:
        """Say whether nobody else can lead yet. Thread-safe."""
        return _now() < self._renewed_at + RENEW_S + RETRY_S

    def keep(self, stop: threading.Event, lost: Callable[[], None]) -> None:
        """Renew until `stop`, then give the Lease back; call `lost` where that fails."""
        while not stop.wait(RETRY_S):
            if not self._renew() and _now() > self._renewed_at + RENEW_S:
                lost()
                return

    def give_back(self) -> None:
        """Let another one lead at once."""
        try:
            lease = self._kube.get("Lease", self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                spec = {**lease["spec"], "holderIdentity": ""}
                self._kube.replace({**lease, "spec": spec})
        except TROUBLES as error:
            logger.warning("the lease is not given back, it ends by itself: %s", error)

    def _renew(self) -> bool:
        asked_at = _now()
        if self._try():
            self._renewed_at = asked_at
            return True
        return False

    def _try(self) -> bool:
        try:
            lease = self._kube.get("Lease", self._namespace, self._name)
            if lease is None:
                self._kube.create(self._lease({}, {}))
                return False  # the next look says who made it
            spec, meta = lease.get("spec") or {}, lease["metadata"]
            holder = spec.get("holderIdentity") or ""
            now = _now()
            if meta["resourceVersion"] != self._seen[0]:
                self._seen = (meta["resourceVersion"], now)
            if holder not in ("", self._identity) and now < self._seen[1] + LEASE_S:
                return False
            return self._kube.replace(self._lease(meta, spec))
        except TROUBLES as error:
            logger.warning("the lease %s cannot be had: %s", self._name, error)
            return False

    def _lease(self, meta: Any, spec: Any) -> dict[str, Any]:
        mine = spec.get("holderIdentity") == self._identity
        now = time_text(time.time())
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": dict(meta) or {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(LEASE_S),
                "acquireTime": spec.get("acquireTime") if mine else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (not mine),
            },
        }
