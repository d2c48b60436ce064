"""The API server of the tests behaves as Kubernetes' does, where a test could see a difference."""

import contextlib
import json
import urllib.error
import urllib.request
from typing import Any, Self

import pytest

from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.cluster.kinds import Object
from tests.k8s_controller.cluster.patches import JSON, MERGE

DEFINITION = {
    "metadata": {"name": "widgets.example.org"},
    "spec": {
        "group": "example.org", "scope": "Namespaced",
        "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"]},
        "versions": [
            {
                "name": "v1", "served": True, "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.size", "statusReplicasPath": ".status.size",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object", "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 0, "maximum": 9},
                                    "max": {"type": "integer", "default": 9},
                                    "port": {"x-kubernetes-int-or-string": True},
                                    "free": {
                                        "type": "object",
                                        "x-kubernetes-preserve-unknown-fields": True,
                                    },
                                },
                                "x-kubernetes-validations": [
                                    {"rule": "self.size <= self.max", "message": "size above max"},
                                    {"rule": "self.max >= oldSelf.max", "message": "max shrinks"},
                                ],
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "size": {"type": "integer"}, "selector": {"type": "string"},
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}  # fmt: skip


class Client:
    """Asks as curl does. Answers of errors come back like all others."""

    def __init__(self, server: ApiServer, token: str = "") -> None:
        self.server, self._token = server, token

    def __call__(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> Object:
        with self.open(method, path, body, kind) as answer:
            found: Object = json.loads(answer.read())
        return found

    def open(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, method=method)
        request.add_header("Content-Type", kind)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            return urllib.request.urlopen(request, timeout=20)
        except urllib.error.HTTPError as error:
            return error


@pytest.fixture(scope="session")
def ask(api_server: ApiServer) -> Client:
    store = api_server.store
    store.create(store.kind("CustomResourceDefinition"), "", DEFINITION)
    return Client(api_server)


@pytest.fixture
def widgets(ask: Client, namespace: str) -> str:
    """Return the path of a namespace's widgets, of which there is one, `w`."""
    path = f"/apis/example.org/v1/namespaces/{namespace}/widgets"
    assert ask("POST", path, widget("w"))["metadata"]["generation"] == 1
    return path


def widget(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name, "labels": {"of": "test"}}, "spec": {"size": 1, **spec}}


class Watch:
    """What a watch tells, event by event."""

    def __init__(self, ask: Client, path: str) -> None:
        self._stream = ask.open("GET", path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stream.close()

    def next(self) -> Object:
        event: Object = json.loads(self._stream.readline())
        return event


# --- objects


def test_what_comes_with_an_old_version_is_refused_and_a_patch_without_one_is_not(ask, widgets):
    first = ask("GET", f"{widgets}/w")
    second = ask("PUT", f"{widgets}/w", {**first, "spec": {"size": 2}})
    assert (second["metadata"]["generation"], second["spec"]["max"]) == (2, 9)
    refused = ask("PUT", f"{widgets}/w", {**first, "spec": {"size": 3}})
    assert (refused["code"], refused["reason"]) == (409, "Conflict")
    late = {"metadata": first["metadata"], "spec": {"size": 3}}
    assert ask("PATCH", f"{widgets}/w", late, MERGE)["code"] == 409
    assert ask("PATCH", f"{widgets}/w", {"spec": {"size": 3}}, MERGE)["spec"]["size"] == 3


def test_a_change_that_changes_nothing_makes_no_new_version(ask, widgets):
    before = ask("GET", f"{widgets}/w")
    assert ask("PATCH", f"{widgets}/w", {"spec": {"size": 1}}, MERGE) == before


def test_status_and_spec_are_written_by_their_own_ways_alone(ask, widgets):
    told = {"spec": {"size": 5}, "status": {"size": 7}}
    by_status = ask("PATCH", f"{widgets}/w/status", told, MERGE)
    assert (by_status["spec"]["size"], by_status["status"]) == (1, {"size": 7})
    assert by_status["metadata"]["generation"] == 1
    by_spec = ask("PATCH", f"{widgets}/w", {"spec": {"size": 5}, "status": {"size": 9}}, MERGE)
    assert (by_spec["spec"]["size"], by_spec["status"]) == (5, {"size": 7})
    assert by_spec["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"size": 10}, "10 is greater than the maximum of 9"),
        ({"size": "2"}, "is not of type 'integer'"),
        ({"size": 3, "max": 2}, "spec: size above max"),
        ({"size": None}, "is not of type"),
    ],
)
def test_what_the_schema_forbids_is_refused(ask, widgets, spec, told):
    refused = ask("POST", widgets, widget("other", **spec))
    assert refused["code"] == 422
    assert told in refused["message"]


def test_a_rule_on_changes_compares_with_what_was(ask, widgets):
    assert "max shrinks" in ask("PATCH", f"{widgets}/w", {"spec": {"max": 8}}, MERGE)["message"]


def test_fields_that_the_schema_does_not_name_are_pruned_or_refused(ask, widgets):
    body = widget("other", nonsense=1, free={"any": {"thing": 1}}, port="http")
    refused = ask("POST", f"{widgets}?fieldValidation=Strict", body)
    assert 'unknown field "spec.nonsense"' in refused["message"]
    made = ask("POST", widgets, body)
    assert made["spec"] == {"size": 1, "max": 9, "free": {"any": {"thing": 1}}, "port": "http"}


def test_the_scale_subresource_reads_and_writes_the_paths_of_the_definition(ask, widgets):
    ask("PATCH", f"{widgets}/w/status", {"status": {"size": 1, "selector": "a=b"}}, MERGE)
    scale = ask("GET", f"{widgets}/w/scale")
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 1},
        {"replicas": 1, "selector": "a=b"},
    )
    assert ask("PATCH", f"{widgets}/w/scale", {"spec": {"replicas": 4}}, MERGE)["spec"] == {
        "replicas": 4
    }
    assert ask("GET", f"{widgets}/w")["spec"]["size"] == 4
    scale["spec"]["replicas"] = 5
    assert ask("PUT", f"{widgets}/w/scale", scale)["code"] == 409
    assert ask("PATCH", f"{widgets}/w/scale", {"spec": {"replicas": 10}}, MERGE)["code"] == 422


def test_json_patches_test_add_replace_and_remove(ask, widgets):
    patch = [
        {"op": "test", "path": "/spec/size", "value": 1},
        {"op": "add", "path": "/metadata/annotations", "value": {"a/b": "c"}},
        {"op": "replace", "path": "/spec/size", "value": 2},
        {"op": "remove", "path": "/metadata/labels/of"},
    ]
    made = ask("PATCH", f"{widgets}/w", patch, JSON)
    assert (made["spec"]["size"], made["metadata"]["annotations"]) == (2, {"a/b": "c"})
    assert ask("PATCH", f"{widgets}/w", patch, JSON)["code"] == 422


def test_an_object_with_a_finalizer_goes_when_that_is_taken_off(ask, widgets):
    ask("PATCH", f"{widgets}/w", {"metadata": {"finalizers": ["example.org/x"]}}, MERGE)
    ask("DELETE", f"{widgets}/w")
    assert "deletionTimestamp" in ask("GET", f"{widgets}/w")["metadata"]
    ask("PATCH", f"{widgets}/w", {"metadata": {"finalizers": []}}, MERGE)
    assert ask("GET", f"{widgets}/w")["code"] == 404


def test_lists_come_in_pieces_and_a_piece_of_a_forgotten_list_is_gone(ask, widgets, api_server):
    for number in range(4):
        ask("POST", widgets, widget(f"n{number}"))
    first = ask("GET", f"{widgets}?limit=2")
    rest = ask("GET", f"{widgets}?limit=9&continue={first['metadata']['continue']}")
    names = [each["metadata"]["name"] for each in [*first["items"], *rest["items"]]]
    assert names == ["n0", "n1", "n2", "n3", "w"]
    api_server.store.compact()
    ask("POST", widgets, widget("late"))
    assert ask("GET", f"{widgets}?limit=9&continue=1-2")["code"] == 410


# --- watches


def test_a_watch_tells_what_came_after_its_version_with_bookmarks(ask, widgets):
    at = ask("GET", widgets)["metadata"]["resourceVersion"]
    ask("PATCH", f"{widgets}/w", {"spec": {"size": 2}}, MERGE)
    path = f"{widgets}?watch=1&resourceVersion={at}&allowWatchBookmarks=true"
    with Watch(ask, path) as watch:
        ask("POST", widgets, widget("later"))
        ask("DELETE", f"{widgets}/w")
        told = [watch.next() for _ in range(4)]
    seen = [(e["type"], e["object"]["metadata"].get("name")) for e in told]
    assert seen == [("MODIFIED", "w"), ("ADDED", "later"), ("DELETED", "w"), ("BOOKMARK", None)]
    versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in told]
    assert versions == sorted(versions)


def test_a_watch_that_selects_sees_objects_come_and_go_by_their_labels(ask, widgets):
    with Watch(ask, f"{widgets}?watch=1&labelSelector=of%3Dother") as watch:
        for label in ("other", "test"):
            patch = {"metadata": {"labels": {"of": label}}}
            ask("PATCH", f"{widgets}/w", patch, MERGE)
        assert [watch.next()["type"] for _ in range(2)] == ["ADDED", "DELETED"]


def test_a_watch_from_a_forgotten_version_is_told_so(ask, widgets, api_server):
    at = ask("GET", widgets)["metadata"]["resourceVersion"]
    ask("PATCH", f"{widgets}/w", {"spec": {"size": 2}}, MERGE)
    api_server.store.compact()
    with Watch(ask, f"{widgets}?watch=1&resourceVersion={at}") as watch:
        event = watch.next()
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


# --- faults


def test_faults_are_those_that_the_test_orders_and_then_over(ask, widgets, api_server):
    api_server.fail_next(429, times=2, verb="get", resource="widgets", retry_after_s=3)
    with ask.open("GET", f"{widgets}/w") as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (429, "3")
    assert ask("GET", widgets)["items"], "another verb"
    assert [ask("GET", f"{widgets}/w").get("code") for _ in range(2)] == [429, None]


def test_in_an_outage_nobody_listens_and_watches_break_off(ask, widgets, api_server):
    with ask.open("GET", f"{widgets}?watch=1") as stream:
        stream.readline()
        api_server.outage()
        with pytest.raises(OSError, match="refused"):
            ask("GET", widgets)
        with contextlib.suppress(OSError):
            assert not stream.readline()
    api_server.resume()
    assert ask("GET", f"{widgets}/w")["metadata"]["name"] == "w"


# --- rights


def test_a_service_account_has_the_rights_of_its_roles_and_no_others(ask, widgets, namespace):
    server = ask.server
    rules = [
        {"apiGroups": ["example.org"], "resources": ["widgets"], "verbs": ["list", "create"]},
        {
            "apiGroups": ["example.org"], "resources": ["widgets/status"], "verbs": ["patch"],
            "resourceNames": ["w"],
        },
    ]  # fmt: skip
    store = server.store
    store.create(store.kind("Role"), namespace, {"metadata": {"name": "r"}, "rules": rules})
    binding = {
        "metadata": {"name": "b"}, "roleRef": {"kind": "Role", "name": "r"},
        "subjects": [{"kind": "ServiceAccount", "name": "bot", "namespace": namespace}],
    }  # fmt: skip
    store.create(store.kind("RoleBinding"), namespace, binding)
    bot = Client(server, server.token_of(namespace, "bot"))
    assert len(bot("GET", widgets)["items"]) == 1
    assert "metadata" in bot("POST", widgets, widget("other"))
    assert bot("PATCH", f"{widgets}/w/status", {"status": {"size": 1}}, MERGE)["status"]
    for method, path in (
        ("GET", f"{widgets}/w"), ("DELETE", f"{widgets}/w"), ("PATCH", f"{widgets}/other/status"),
        ("GET", "/apis/example.org/v1/widgets"),
    ):  # fmt: skip
        assert bot(method, path, {} if method == "PATCH" else None, MERGE)["code"] == 403, path
    assert Client(server, "stranger")("GET", widgets)["code"] == 401
    made = {call.verb for call in server.calls_of(f"system:serviceaccount:{namespace}:bot")}
    assert made == {"list", "create", "patch", "get", "delete"}


def test_discovery_names_the_kinds_of_definitions(ask, widgets):
    (own,) = (g for g in ask("GET", "/apis")["groups"] if g["name"] == "example.org")
    assert own["preferredVersion"]["groupVersion"] == "example.org/v1"
    resources = {r["name"]: r for r in ask("GET", "/apis/example.org/v1")["resources"]}
    assert resources.keys() == {"widgets", "widgets/status", "widgets/scale"}
    assert resources["widgets/scale"]["kind"] == "Scale"
