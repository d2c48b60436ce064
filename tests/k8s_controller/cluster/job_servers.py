"""Job servers that only pretend: one for each server pod, at its address, in one thread.

Pods that run are its nodes. The training uses at once whatever it may use, and never ends.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from job_server.api import wire
from job_server.api.codec import from_json, to_json
from k8s_controller.decisions.objects import PORT
from k8s_controller.decisions.observed import JOB_LABEL, ROLE_LABEL, ListedPod, pod_view
from tests.k8s_controller.cluster.kinds import Object
from tests.k8s_controller.cluster.store import Store
from tests.k8s_controller.jobs import job_status

_TICK_S = 0.05


@dataclass
class _Training:
    """What a job server has in its database, which outlives its pod here."""

    pods: Callable[[], list[ListedPod]]
    spec: wire.JobSpec | None = None
    most: int = 0
    closed: set[str] = field(default_factory=set)
    paused: bool = False

    def used(self) -> list[str]:
        if self.spec is None or self.paused:
            return []
        nodes = [pod.node_id for pod in self.pods() if pod.node_id not in self.closed]
        return nodes[: self.most]

    def status(self) -> wire.JobStatus:
        assert self.spec is not None
        used = self.used()
        state = wire.JobState.RUNNING if used else wire.JobState.WAITING
        saved = None
        if self.paused:
            state = wire.JobState.PAUSED
            saved = wire.Saved(stage=1, step=1, path="s3://x", node_id="n")
        return job_status(self.spec, state, used, saved=saved, step=int(time.monotonic() * 10))

    def sharing(self) -> wire.Sharing:
        nodes = tuple(
            wire.SharedNode(
                node_id=pod.node_id, alive=True, slots=1, used_shared=0, used_others=0,
                limit=0 if pod.node_id in self.closed else None,
            )
            for pod in self.pods()
        )  # fmt: skip
        jobs: tuple[wire.SharedJob, ...] = ()
        if self.spec is not None:
            used = self.used()
            jobs = (
                wire.SharedJob(
                    job_id=self.spec.job_id, state=self.status().state, pods=len(used),
                    allotted=len(used), min_pods=self.spec.min_pods, max_pods=self.most,
                    submitted_at=1.0, step_s={}, nodes=dict.fromkeys(used, 1), since=1.0,
                ),
            )  # fmt: skip
        return wire.Sharing(policy="goodput", now=time.time(), nodes=nodes, jobs=jobs)


class JobServers:
    """They are there while its `with` block lasts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._trainings: dict[str, _Training] = {}  # by the TrainingJob's uid
        self._sites: dict[str, web.AppRunner] = {}  # by the server pod's uid
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        self._thread.join()

    async def _run(self) -> None:
        revision = -1
        while not self._ends.is_set():
            if revision != self._store.revision:
                revision = self._store.revision
                await self._follow()
            await asyncio.sleep(_TICK_S)
        for runner in self._sites.values():
            await runner.cleanup()

    async def _follow(self) -> None:
        there = {
            pod["metadata"]["uid"]: pod
            for pod in self._store.all("Pod")
            if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == "server"
            and pod["status"].get("phase") == "Running"
        }
        for uid in self._sites.keys() - there.keys():
            await self._sites.pop(uid).cleanup()
        for uid in there.keys() - self._sites.keys():
            owner = there[uid]["metadata"]["ownerReferences"][0]["uid"]
            training = self._trainings.get(owner) or _Training(self._pods_of(there[uid], owner))
            self._trainings[owner] = training
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", _handler(training))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, there[uid]["status"]["podIP"], PORT).start()
            self._sites[uid] = runner

    def _pods_of(self, server: Object, owner: str) -> Callable[[], list[ListedPod]]:
        meta = server["metadata"]
        selector = f"{JOB_LABEL}={meta['labels'][JOB_LABEL]},{ROLE_LABEL}=trainer"
        kind, namespace = self._store.kind("Pod"), meta["namespace"]

        def pods() -> list[ListedPod]:
            found = self._store.select(kind, namespace, selector)[0]
            mine = [p for p in found if p["metadata"]["ownerReferences"][0]["uid"] == owner]
            return [view for pod in mine if (view := pod_view(pod)).phase == "Running"]

        return pods


def _handler(training: _Training) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        parts, body = request.path.strip("/").split("/"), await request.read()
        answer: Any = None
        if parts[-1] == "openapi.json":
            fields: Object = {name: {} for name in wire.encode(wire.JobSpec(job_id="x"))}
            schemas = {"JobSpec": {"properties": fields}}
            return web.json_response({"components": {"schemas": schemas}})
        if parts[-1] == "sharing":
            answer = training.sharing()
        elif parts[-1] == "jobs" and request.method == "POST":
            training.spec = training.spec or from_json(wire.JobSpec, body)
            training.most = training.spec.max_pods
        elif parts[-1] == "limit":
            node, slots = parts[-2], from_json(wire.NodeLimit, body).slots
            (training.closed.discard if slots is None else training.closed.add)(node)
            slot = wire.Slot(index=0, kind=wire.SlotKind.CPU)
            known = wire.Node(
                node_id=node, addr="127.0.0.1", slots=(slot,), port_low=20000, port_high=20100
            )
            answer = wire.NodeStatus(
                node=known, alive=True, last_seen_at=1.0, report={}, limit=slots
            )
        elif parts[-1] == "resize":
            training.most = from_json(wire.Resize, body).pods or 0
        elif parts[-1] in ("pause", "resume"):
            training.paused = parts[-1] == "pause"
        if answer is None and training.spec is None:
            missing = {"error": "not_found", "message": "no such job"}
            return web.json_response(missing, status=404)
        told = to_json(answer or training.status())
        return web.Response(body=told, content_type="application/json")

    return handle
