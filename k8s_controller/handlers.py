"""What wakes the controller: kopf's watches of TrainingJobs and of their pods.

They only say which job to look at. Nothing is written to the objects: no annotation, no finalizer.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import kopf
from kubernetes.client import Configuration

from k8s_controller.controller import Controller
from k8s_controller.decisions.observed import JOB_LABEL
from k8s_controller.decisions.spec import GROUP, PLURAL, VERSION, Object
from k8s_controller.kube_api import load_config

logger = logging.getLogger(__name__)

SOON_S = 3.0  # watches that break off sooner end the controller
PREFIX = GROUP  # of annotations, if a handler that needs them is ever added


class Backoffs:
    """The seconds between two tries of kopf's own calls: it gives up after the last, so none is."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0, 2.0), itertools.repeat(3.0))


def connection(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Return how to reach the API server that `KubeApi` asks; kopf's own login knows no file."""
    load_config(kubeconfig)  # anew: what it had may have expired
    config = Configuration.get_default_copy()
    header = config.get_api_key_with_prefix("BearerToken") or config.get_api_key_with_prefix(
        "authorization"  # of the client before 36
    )
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=config.host,
        ca_path=config.ssl_ca_cert,
        insecure=not config.verify_ssl,
        username=config.username or None,
        password=config.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=config.cert_file,
        private_key_path=config.key_file,
    )


def registry_for(controller: Controller, kubeconfig: str | None) -> kopf.OperatorRegistry:
    """Return the handlers that wake a controller."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def log_in(**_: object) -> kopf.ConnectionInfo:
        return connection(kubeconfig)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: object) -> None:
        settings.posting.enabled = False  # events are the controller's own
        settings.scanning.disabled = True  # it needs no right to list definitions
        settings.execution.max_workers = 2
        # Its end after an error has hung: SIGKILL then, as a pod without watches is of no use.
        settings.process.ultimate_exiting_timeout = 30
        settings.networking.error_backoffs = Backoffs()
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.watching.reconnect_backoff = 0.2
        settings.persistence.finalizer = f"{PREFIX}/finalizer"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=PREFIX)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    def job_changed(
        namespace: str | None, name: str | None, type: str | None, body: Object, **_: object
    ) -> None:
        if type != "MODIFIED" or not is_own_change(body):
            controller.look_at(str(namespace), str(name))

    @kopf.on.event("", "v1", "pods", labels={JOB_LABEL: kopf.PRESENT}, registry=registry)
    def pod_changed(namespace: str | None, labels: Object, **_: object) -> None:
        controller.look_at(str(namespace), str(labels[JOB_LABEL]))

    return registry


def is_own_change(job: Object) -> bool:
    """Whether a TrainingJob was looked at as it is now: its change was that of its status."""
    meta, status = job["metadata"], job.get("status") or {}
    seen = status.get("observedGeneration") == meta.get("generation")
    return seen and "deletionTimestamp" not in meta


def watch(
    controller: Controller,
    namespaces: Sequence[str],
    stop: threading.Event,
    kubeconfig: str | None = None,
) -> None:
    """Watch until `stop`, SIGTERM or SIGINT. No namespaces: all. No kubeconfig: the usual one."""
    try:
        # Each try in a loop of its own: kopf leaves a timer in it, by which the process is killed.
        while asyncio.run(_breaks_off(controller, namespaces, stop, kubeconfig)):
            pass
    finally:
        stop.set()


async def _breaks_off(
    controller: Controller,
    namespaces: Sequence[str],
    stop: threading.Event,
    kubeconfig: str | None,
) -> bool:
    """Watch; return whether the API server has ended a watch with an error, False: it is over.

    kopf ends then, but where its version was forgotten. Kubernetes' own controllers list anew, as
    kopf does when it begins again. What goes wrong at once is raised: it may not get better.
    """
    ended, began = asyncio.Event(), time.monotonic()

    async def follow() -> None:
        while not (stop.is_set() or ended.is_set()):
            await asyncio.sleep(0.2)
        ended.set()

    registry = registry_for(controller, kubeconfig)

    @kopf.on.cleanup(registry=registry)
    async def end(**_: object) -> None:
        ended.set()  # kopf takes signals for itself, and then waits for whoever waits for its flag

    following = asyncio.create_task(follow())
    try:
        await kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=ended,
        )
    except Exception as error:
        if stop.is_set() or time.monotonic() < began + SOON_S:
            raise
        logger.warning("the watches have broken off, and begin again: %s", error)
        return True
    finally:
        ended.set()
        await following
    return False
