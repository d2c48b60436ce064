"""An API server that behaves as Kubernetes' does, where a controller could see a difference.

    with ApiServer() as server:
        server.store.create(...)                          # as the cluster's own parts do
        server.kubeconfig(path, server.token_of("edl-system", "edl-controller"))

It serves discovery, list and watch with resource versions and bookmarks, 410 and 409, patches,
the subresources status, scale, eviction, binding and log, custom kinds by their definitions, and
rights by the roles in it. `calls` records who did what. Not there: admission webhooks, tables but
for custom kinds, and whatever else kubectl alone would want (its --validate needs OpenAPI).
"""

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from tests.k8s_controller.cluster import eviction, patches, rbac
from tests.k8s_controller.cluster.kinds import ApiError, Kind, Object
from tests.k8s_controller.cluster.store import Change, Store, is_selected

ADMIN = "admin"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "GET": "get", "DELETE": "delete"}
_BOOKMARK_S = 0.5  # a minute in Kubernetes
_HISTORY = 50_000


@dataclass
class Fault:
    """What calls get instead of their answer, `times` times."""

    error: ApiError
    meets: Callable[[rbac.Call], bool]
    times: int


@dataclass
class _Request:
    """A call, its kind, and what came with it."""

    call: rbac.Call
    kind: Kind
    subresource: str
    query: Mapping[str, str]
    content_type: str
    body: Any
    accepts: str = ""

    @property
    def is_strict(self) -> bool:
        return self.query.get("fieldValidation") == "Strict"


@dataclass
class ApiServer:
    """The server, on a loopback address, in a thread of its own."""

    store: Store = field(default_factory=Store)
    host: str = "127.0.0.1"
    port: int = 0
    calls: list[tuple[str, rbac.Call]] = field(default_factory=list)  # user, call
    read_log: Callable[[str, str], str] = lambda namespace, name: ""
    conflicting: bool = False  # each object's first create, patch or delete is answered with 409

    def __post_init__(self) -> None:
        self._users: dict[str, str] = {}  # by token
        self._faults: list[Fault] = []
        self._broken: list[ApiError] = []  # what has ended all watches of then, one by one
        self._tried: set[tuple[rbac.Call, str]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._changed: set[asyncio.Event] = set()
        self._runner: web.AppRunner | None = None

    # --- for tests

    def __enter__(self) -> Self:
        self._thread.start()
        self.store.listen(self._on_change)
        self.resume()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.store.forget(self._on_change)
        self.outage()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def token_of(self, namespace: str, account: str) -> str:
        """Return a token of a service account, which has the rights that roles give it."""
        token = secrets.token_hex(16)
        self._users[token] = f"system:serviceaccount:{namespace}:{account}"
        return token

    def kubeconfig(self, path: Path, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig; without a token it is the administrator's."""
        user: Object = {"token": token} if token else {}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "test", "namespace": namespace},
                }
            ],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def fail_next(
        self,
        code: int,
        *,
        times: int = 1,
        verb: str = "",
        resource: str = "",
        retry_after_s: int | None = None,
    ) -> None:
        """Answer the next calls (of a verb, on a resource) with an error."""
        reason = {409: "Conflict", 410: "Expired", 429: "TooManyRequests"}.get(
            code, "InternalError"
        )
        error = ApiError(code, reason, f"the test wants a {code}", retry_after_s)

        def meets(call: rbac.Call) -> bool:
            return verb in ("", call.verb) and resource in ("", call.resource)

        self._faults.append(Fault(error, meets, times))

    def break_watches(self, code: int, message: str) -> None:
        """Have all watches end with an error, as where the database has no leader."""
        self._broken.append(ApiError(code, "InternalError", message))
        self._on_change()

    def outage(self) -> None:
        """Stop to listen, and break every connection off."""
        self._run(self._stop())

    def resume(self) -> None:
        """Listen again, at the same port."""
        self._run(self._start())

    def calls_of(self, user: str) -> set[rbac.Call]:
        """Return what a user has asked, without the objects' names."""
        return {call for who, call in list(self.calls) if who == user}

    # --- the server

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for site in list(runner.sites):
            await site.stop()
        for connection in list(runner.server.connections if runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        for event in self._changed:
            event.set()
        await runner.cleanup()

    def _on_change(self) -> None:
        if len(self.store.history) > _HISTORY:
            self.store.compact()
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for event in self._changed:
            event.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            user = self._user(request)
            path = request.path.strip("/")
            if found := self._unnamed(path):
                return web.json_response(found)
            if path in ("healthz", "livez", "readyz"):
                return web.Response(text="ok")
            asked = self._parsed(request, path.split("/"), await request.read())
            self.calls.append((user, asked.call))
            self._maybe_fail(asked.call)
            self._maybe_conflict(asked)
            self._authorize(user, asked.call)
            if asked.call.verb == "watch":
                return await self._watch(request, asked)
            if asked.subresource == "log":
                return web.Response(text=self.read_log(asked.call.namespace, asked.call.name))
            code = 201 if asked.call.verb == "create" else 200
            return web.json_response(self._answer(asked), status=code)
        except ApiError as error:
            headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
            return web.json_response(error.status(), status=error.code, headers=headers)

    def _user(self, request: web.Request) -> str:
        told = request.headers.get("Authorization", "")
        if not told:
            return ADMIN
        try:
            return self._users[told.removeprefix("Bearer ")]
        except KeyError:
            raise ApiError(401, "Unauthorized", "Unauthorized") from None

    def _authorize(self, user: str, call: rbac.Call) -> None:
        if user == ADMIN:
            return
        kinds = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        roles = [each for kind in kinds for each in self.store.all(kind)]
        if not any(grant.allows(call) for grant in rbac.grants_of(user, roles)):
            raise ApiError(
                403, "Forbidden", f'{call.resource} "{call.name}" is forbidden: User "{user}" '
                f'cannot {call.verb} resource "{call.resource}" in API group "{call.group}" in '
                f'the namespace "{call.namespace}"',
            )  # fmt: skip

    def _maybe_fail(self, call: rbac.Call) -> None:
        for fault in self._faults:
            if fault.meets(call):
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                raise fault.error

    def _maybe_conflict(self, asked: _Request) -> None:
        """Let every other try of each write fail."""
        call = asked.call
        if not self.conflicting or call.verb not in ("create", "patch", "delete"):
            return
        name = call.name or str(asked.body.get("metadata", {}).get("name"))
        tried = (call, name)
        if tried in self._tried:
            self._tried.remove(tried)
            return
        self._tried.add(tried)
        raise ApiError(409, "Conflict", f"{name}: the object has been modified; try again")

    # --- what is asked

    def _parsed(self, request: web.Request, parts: list[str], body: bytes) -> _Request:
        whole = "/".join(parts)
        nothing = ApiError(404, "NotFound", f"the server could not find {whole}")
        if parts[0] == "api" and len(parts) > 2:
            group, (version, *rest) = "", parts[1:]
        elif parts[0] == "apis" and len(parts) > 3:
            group, version, *rest = parts[1:]
        else:
            raise nothing
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *more = (*rest, "", "")[: max(3, len(rest))]
        kind = self.store.kinds.get((group, version, plural))
        if kind is None or more or (subresource and subresource not in kind.subresources):
            raise nothing
        verb = _VERBS[request.method]
        if verb == "get" and not name:
            verb = "watch" if request.query.get("watch") in ("1", "true") else "list"
        if verb == "delete" and not name:
            verb = "deletecollection"
        if "dryRun" in request.query:
            raise ApiError(400, "BadRequest", "dryRun is not known here")
        told = request.content_type
        is_yaml = told == patches.APPLY or "yaml" in told
        loaded = (yaml.safe_load(body) if is_yaml else json.loads(body)) if body else {}
        if verb == "list" and (by_name := _only_name(request.query.get("fieldSelector", ""))):
            name_of_call = by_name
        else:
            name_of_call = name
        resource = f"{plural}/{subresource}" if subresource else plural
        call = rbac.Call(verb, group, resource, namespace, name_of_call)
        return _Request(
            call, kind, subresource, request.query, told, loaded, request.headers.get("Accept", "")
        )

    def _answer(self, asked: _Request) -> Object:
        kind, call, store = asked.kind, asked.call, self.store
        if asked.subresource == "scale":
            return self._scale(asked)
        if asked.subresource == "eviction":
            return self._evict(asked)
        if asked.subresource == "binding":
            node = asked.body["target"]["name"]
            store.bind(call.namespace, call.name, node)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        match call.verb:
            case "create":
                return store.create(kind, call.namespace, asked.body, asked.is_strict)
            case "get":
                return _shown(asked, [store.get(kind, call.namespace, call.name)], None)
            case "list":
                return self._list(asked)
            case "update":
                if "resourceVersion" not in asked.body["metadata"] and kind.schema is not None:
                    raise ApiError(
                        422, "Invalid", "metadata.resourceVersion: must be specified for an update"
                    )
                return store.update(
                    kind, call.namespace, call.name, lambda old: asked.body, asked.subresource,
                    asked.is_strict,
                )  # fmt: skip
            case "patch":
                return self._patch(asked)
            case "delete":
                return store.delete(kind, call.namespace, call.name, self._options(asked))
            case _:
                for each in self._selected(asked)[0]:
                    meta = each["metadata"]
                    where = meta.get("namespace", "")
                    store.delete(kind, where, meta["name"], self._options(asked))
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    @staticmethod
    def _options(asked: _Request) -> Object:
        options: Object = dict(asked.body)
        if "propagationPolicy" in asked.query:
            options["propagationPolicy"] = asked.query["propagationPolicy"]
        if "gracePeriodSeconds" in asked.query:
            options["gracePeriodSeconds"] = int(asked.query["gracePeriodSeconds"])
        return options

    def _patch(self, asked: _Request) -> Object:
        kind, call = asked.kind, asked.call
        if asked.content_type == patches.APPLY:
            try:
                self.store.get(kind, call.namespace, call.name)
            except ApiError:
                return self.store.create(kind, call.namespace, asked.body)
        return self.store.patch(
            kind, call.namespace, call.name, asked.body, content_type=asked.content_type,
            subresource=asked.subresource, strict=asked.is_strict,
        )  # fmt: skip

    def _selected(self, asked: _Request) -> tuple[list[Object], int]:
        found: tuple[list[Object], int] = self.store.select(
            asked.kind, asked.call.namespace, asked.query.get("labelSelector", ""),
            asked.query.get("fieldSelector", ""),
        )  # fmt: skip
        return found

    def _list(self, asked: _Request) -> Object:
        found, revision = self._selected(asked)
        meta: Object = {"resourceVersion": str(revision)}
        limit = int(asked.query.get("limit") or 0)
        first = 0
        if token := asked.query.get("continue"):
            told, first = map(int, token.split("-"))
            if told < self.store.oldest:
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
        if limit and len(found) > first + limit:
            meta |= {
                "continue": f"{revision}-{first + limit}",
                "remainingItemCount": len(found) - first - limit,
            }
        return _shown(asked, found[first : first + limit if limit else None], meta)

    # --- subresources

    def _scale(self, asked: _Request) -> Object:
        kind, call = asked.kind, asked.call
        paths = kind.scale or {
            "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
        }  # fmt: skip

        def to_scale(obj: Object, default: int | None = None) -> Object:
            status: Object = {"replicas": _at(obj, paths["statusReplicasPath"]) or 0}
            if selector := _at(obj, paths.get("labelSelectorPath", "")):
                status["selector"] = selector
            meta = {
                k: obj["metadata"][k]
                for k in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
            }
            replicas = _at(obj, paths["specReplicasPath"])
            replicas = default if replicas is None else replicas
            if replicas is None:
                raise ApiError(
                    500, "InternalError", "Internal error occurred: the spec replicas field "
                    f"{paths['specReplicasPath']!r} does not exist",
                )  # fmt: skip
            return {
                "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta,
                "spec": {"replicas": replicas}, "status": status,
            }  # fmt: skip

        def scaled(obj: Object) -> Object:
            told = asked.body
            if call.verb == "patch":
                told = patches.patched(to_scale(obj, 0), asked.body, asked.content_type)
            replicas = told["spec"].get("replicas", 0)
            if not isinstance(replicas, int) or replicas < 0:
                raise ApiError(422, "Invalid", f"spec.replicas: must be >= 0, got {replicas!r}")
            *parents, last = paths["specReplicasPath"].strip(".").split(".")
            place = obj
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = replicas
            meta = obj["metadata"]
            meta["resourceVersion"] = told["metadata"].get("resourceVersion")
            return obj

        if call.verb == "get":
            return to_scale(self.store.get(kind, call.namespace, call.name))
        return to_scale(self.store.update(kind, call.namespace, call.name, scaled))

    def _scale_of_owner(self, pod: Object) -> int | None:
        """Return what a pod's controller is to have; None: its scale says nothing."""
        for owner in pod["metadata"].get("ownerReferences") or ():
            if owner.get("controller"):
                kind = self.store.kind(owner["kind"])
                obj = self.store.get(kind, pod["metadata"]["namespace"], owner["name"])
                paths = kind.scale or {"specReplicasPath": ".spec.replicas"}
                found: int | None = _at(obj, paths["specReplicasPath"])
                return found
        return None

    def _evict(self, asked: _Request) -> Object:
        call, store = asked.call, self.store
        with store.lock:
            pod = store.get(asked.kind, call.namespace, call.name)
            refused = eviction.refusal(
                pod, store.all("Pod", call.namespace),
                store.all("PodDisruptionBudget", call.namespace), self._scale_of_owner,
            )  # fmt: skip
            if refused:
                raise refused
            store.delete(
                asked.kind, call.namespace, call.name, asked.body.get("deleteOptions") or {}
            )
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    # --- watching

    async def _watch(self, request: web.Request, asked: _Request) -> web.StreamResponse:
        told = asked.query.get("resourceVersion", "")
        sends_initial = asked.query.get("sendInitialEvents") == "true"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        changed = asyncio.Event()
        self._changed.add(changed)
        ends_at = self._loop.time() + float(asked.query.get("timeoutSeconds") or 3600)
        broken = len(self._broken)
        try:
            await response.prepare(request)
            if told in ("", "0") or sends_initial:
                found, revision = self._selected(asked)
                for obj in found:
                    await _send(response, "ADDED", obj)
                if sends_initial:
                    await _send(response, "BOOKMARK", _bookmark(asked.kind, revision, True))
            else:
                revision = int(told)
            while self._runner is not None and self._loop.time() < ends_at:
                changed.clear()
                if len(self._broken) > broken:
                    raise self._broken[-1]
                for change in self.store.since(revision):
                    revision = change.revision
                    for how, obj in _seen(asked, change):
                        await _send(response, how, obj)
                wait_s = max(0.0, min(_BOOKMARK_S, ends_at - self._loop.time()))
                try:
                    await asyncio.wait_for(changed.wait(), wait_s)
                except TimeoutError:
                    if asked.query.get("allowWatchBookmarks") in ("1", "true"):
                        await _send(response, "BOOKMARK", _bookmark(asked.kind, revision, False))
        except ApiError as error:
            await _send(response, "ERROR", error.status())
        except (ConnectionError, RuntimeError):
            return response  # the other end has gone, or an outage was asked for
        finally:
            self._changed.discard(changed)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    # --- discovery

    def _unnamed(self, path: str) -> Object | None:
        kinds = self.store.kinds.values()
        groups = {
            group: [k.api_version for k in kinds if k.group == group]
            for group in sorted({kind.group for kind in kinds})
        }
        if path == "version":
            return {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            listed = [_group(name, versions) for name, versions in groups.items() if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        head, _, rest = path.partition("/")
        if head == "apis" and rest in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(rest, groups[rest])}
        found = [
            k for k in kinds if rest == k.api_version and head == ("apis" if k.group else "api")
        ]
        if found:
            return {
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": rest,
                "resources": [entry for kind in found for entry in kind.discovery()],
            }  # fmt: skip
        return None


def _group(name: str, versions: list[str]) -> Object:
    listed = [
        {"groupVersion": each, "version": each.split("/")[1]} for each in dict.fromkeys(versions)
    ]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _only_name(selector: str) -> str:
    """Return the one name that a field selector allows; rules by names know that."""
    return selector.removeprefix("metadata.name=") if selector.startswith("metadata.name=") else ""


def _at(obj: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        obj = obj.get(part) if isinstance(obj, Mapping) else None
    return obj if path else None


def _shown(asked: _Request, found: list[Object], meta: Object | None) -> Object:
    """Return one object (`meta` None), a list, or where kubectl asks for it and can, a table."""
    kind = asked.kind
    if "as=Table" in asked.accepts and kind.schema is not None:
        columns = [{"name": "Name", "type": "string", "format": "name"}, *kind.columns]
        rows = [
            {
                "cells": [
                    obj["metadata"]["name"],
                    *(_at(obj, c["jsonPath"]) for c in kind.columns),
                ],
                "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
                | {"metadata": obj["metadata"]},
            }
            for obj in found
        ]
        return {
            "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta or {},
            "columnDefinitions": columns, "rows": rows,
        }  # fmt: skip
    if meta is None:
        return found[0]
    return {
        "kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta,
        "items": found,
    }  # fmt: skip


def _seen(asked: _Request, change: Change) -> list[tuple[str, Object]]:
    """Return what a watch tells of a change: one that selects sees objects come and go by that."""
    if change.kind.key != asked.kind.key:
        return []
    if asked.call.namespace not in ("", change.obj["metadata"].get("namespace", "")):
        return []
    labels, fields = asked.query.get("labelSelector", ""), asked.query.get("fieldSelector", "")
    now = change.type != "DELETED" and is_selected(change.obj, labels, fields)
    before = change.before is not None and is_selected(change.before, labels, fields)
    if now:
        return [("MODIFIED" if before else "ADDED", change.obj)]
    return [("DELETED", change.obj)] if before else []


def _bookmark(kind: Kind, revision: int, ends_initial: bool) -> Object:
    meta: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
    if ends_initial:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta}


async def _send(response: web.StreamResponse, how: str, obj: Object) -> None:
    await response.write(json.dumps({"type": how, "object": obj}).encode() + b"\n")
