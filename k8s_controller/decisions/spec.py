"""Read a TrainingJob's spec, and refuse what cannot be right. Pure.

The definition in `manifests/crd.yaml` refuses most of it sooner. What is left for here is what a
schema cannot say, and objects that were stored before a rule was added.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from job_server.api.failure_policy import FailureRule, read_rules
from job_server.api.wire import JobSpec, WireError

Object = Mapping[str, Any]
T = TypeVar("T")

GROUP = "paddlepaddle.org"
VERSION = "v1"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
API_VERSION = f"{GROUP}/{VERSION}"
TRAINER = "trainer"  # the container that trains
GPU = "nvidia.com/gpu"
_OTHER_GPU = re.compile(r"(nvidia|amd)\.com/(gpu|mig)|gpu\.intel\.com/")
MAX_NAME = 50  # `-server` and an index follow it in names of 63 characters
MAX_PODS = 500  # each is a node of the job's server, which hears no more often enough
_OURS = ("restartPolicy", "hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_OF_TEXTS = frozenset(  # fields with keys of the user's own
    ("labels", "annotations", "nodeSelector", "matchLabels", "volumeAttributes", "options")
)
_OUR_ENV = ("POD_NAME", "POD_IP", "POD_UID")
_OUR_PREFIXES = ("EDL_", "PADDLE_JOB", "PADDLE_POD")
_OF_PODS = frozenset(  # volumes that come and go with a pod, or cannot be written
    ("emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image")
)


class SpecError(ValueError):
    """A TrainingJob that can never run; the text names the field, the value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJobSpec:
    """What a user wants, with all defaults filled in. `replicas` and its bounds count pods."""

    replicas: int
    min_replicas: int
    max_replicas: int
    template: Object  # a PodTemplateSpec
    slots_per_pod: int = 1
    has_gpus: bool = False
    autoscale: bool = False  # `replicas` is the controller's; the field here counts for nothing
    suspend: bool = False
    restart_limit: int = 20
    failure_policy: tuple[FailureRule, ...] = ()  # they come before those of EDL
    active_deadline_s: float | None = None  # None: it may run for ever
    ttl_s: float | None = None  # None: it stays when it has ended
    clean_pods: bool = True  # after the end
    pod_ready_timeout_s: float = 600.0
    overlap: str = "auto"
    standby: int = 0
    spares: int = 1
    policy: str = "fixed_global"
    prepare_timeout_s: float = 120.0
    server_resources: Object = field(default_factory=dict)
    server_image: str = ""
    storage: Object | None = None  # None: an emptyDir

    @property
    def gpus(self) -> int:
        """Return how many a pod's trainers have."""
        return self.slots_per_pod if self.has_gpus else 0

    @property
    def trainer(self) -> Object:
        """Return the container that trains."""
        return _container(self.template["spec"])

    def outlives_pods(self, path: str) -> bool:
        """Whether a path of container `trainer` is in a volume that stays when its pod goes."""
        volumes = {each.get("name"): each for each in self.template["spec"].get("volumes", ())}
        mounts = self.trainer.get("volumeMounts", ())
        found: Object = max(
            (each for each in mounts if _is_in(path, str(each.get("mountPath", "")))),
            key=lambda each: len(PurePosixPath(each["mountPath"]).parts),
            default={},
        )
        volume = volumes.get(found.get("name"))
        return volume is not None and _OF_PODS.isdisjoint(volume)

    def job_spec(self, name: str) -> JobSpec:
        """Return what the job server is told.

        Raises:
            WireError: a value is out of its range.
        """
        return JobSpec(
            job_id=name,
            min_pods=self.min_replicas,
            max_pods=self.max_replicas,
            slots_per_pod=self.slots_per_pod,
            overlap=self.overlap,
            standby=self.standby,
            spares=self.spares,
            policy=self.policy,
            prepare_timeout_s=self.prepare_timeout_s,
            max_failures=self.restart_limit,
            failure_policy=self.failure_policy,
            share=True,
            keeps_least=True,
        )


def parse(body: Object) -> TrainingJobSpec:
    """Return the spec of a TrainingJob.

    Raises:
        SpecError: it can never run as it is. It raises nothing else: one job's pass, and what
            looks at all jobs, would fail by it without a word in the job's status.
    """
    name = str(body["metadata"]["name"])
    if len(name) > MAX_NAME:
        raise SpecError(
            f"metadata.name: {name!r} has {len(name)} characters, and names of pods follow from "
            f"it; use at most {MAX_NAME}"
        )
    raw: Object = _get(body, "spec", dict, {}, "")
    lowest = _int(raw, "minReplicas", 1, 1, MAX_PODS)
    replicas = _get(raw, "replicas", int, None)
    highest = _int(raw, "maxReplicas", max(replicas or 0, lowest), 1, MAX_PODS)
    if highest < lowest:
        raise SpecError(
            f"spec.maxReplicas: {highest} is less than spec.minReplicas, {lowest}; raise it"
        )
    if replicas is not None and not lowest <= replicas <= highest:
        raise SpecError(
            f"spec.replicas: {replicas} is not between spec.minReplicas, {lowest}, and "
            f"spec.maxReplicas, {highest}; change one of them"
        )
    autoscale = bool(_get(raw, "autoscale", bool, False))
    if autoscale and replicas is not None:
        raise SpecError(
            f"spec.replicas: {replicas}, but spec.autoscale chooses it; leave one of them out"
        )
    if autoscale and raw.get("maxReplicas") is None:
        raise SpecError(
            "spec.maxReplicas: missing; spec.autoscale needs to know how many it may be"
        )
    default = highest if "maxReplicas" in raw else lowest
    template = _template(_without_nulls(_get(raw, "template", dict, None)))
    gpus = _gpus(_container(template["spec"]))
    server: Object = _get(raw, "server", dict, {})
    clean = _one_of(raw, "cleanPodPolicy", ("All", "None"))
    spec = TrainingJobSpec(
        replicas=default if replicas is None else replicas,
        min_replicas=lowest,
        max_replicas=highest,
        template=template,
        slots_per_pod=_int(raw, "slotsPerPod", gpus or 1, 1, 64),
        has_gpus=gpus > 0,
        autoscale=autoscale,
        suspend=_get(raw, "suspend", bool, False),
        restart_limit=_int(raw, "restartLimit", 20, 0, 1_000_000),
        failure_policy=_failure_policy(raw),
        active_deadline_s=_seconds(raw, "activeDeadlineSeconds", 1),
        ttl_s=_seconds(raw, "ttlSecondsAfterFinished", 0),
        clean_pods=clean == "All",
        pod_ready_timeout_s=float(_int(raw, "podReadyTimeoutSeconds", 600, 10, 10**8)),
        overlap=_one_of(raw, "overlap", ("auto", "on", "off", "join")),
        standby=_int(raw, "standby", 0, 0, 2),
        spares=_int(raw, "spares", 1, 0, 64),
        policy=_one_of(raw, "policy", ("fixed_global", "linear")),
        prepare_timeout_s=float(_int(raw, "prepareTimeoutSeconds", 120, 1, 86400)),
        server_resources=_get(server, "resources", dict, {}, "spec.server"),
        server_image=_get(server, "image", str, "", "spec.server"),
        storage=_storage(server),
    )
    if gpus and spec.slots_per_pod != gpus:
        raise SpecError(
            f"spec.slotsPerPod: {spec.slots_per_pod} trainers for the {gpus} GPUs of container "
            f"{TRAINER}; each trainer has one, so leave slotsPerPod out"
        )
    if autoscale and not _asks(template["spec"]):
        raise SpecError(
            f"spec.template.spec.containers[{TRAINER}].resources.requests: missing; spec.autoscale "
            "counts by them what fits: give cpu, memory or both"
        )
    try:
        spec.job_spec(name)
    except WireError as error:
        raise SpecError(f"spec: {error}") from None
    return spec


def _template(template: Object | None) -> Object:
    pod = _get(template or {}, "spec", dict, None, "spec.template")
    if not pod:
        raise SpecError("spec.template.spec: missing; give the pods' spec, as of a batch/v1 Job")
    for name in _OURS:
        if name in pod:
            raise SpecError(f"spec.template.spec.{name}: the controller sets it; leave it out")
    _check_shapes(pod)
    container = _container(pod)
    for name in ("lifecycle", "workingDir"):
        if name in container:
            raise SpecError(
                f"spec.template.spec.containers[{TRAINER}].{name}: the controller sets it; "
                "leave it out"
            )
    if not container.get("image"):
        raise SpecError(
            f"spec.template.spec.containers[{TRAINER}].image: missing; name one that has EDL in it"
        )
    if not (container.get("command") or container.get("args")):
        raise SpecError(
            f"spec.template.spec.containers[{TRAINER}].command: missing; give what each pod runs, "
            'such as ["python", "-m", "pod_runtime.launch", "/app/train.py"]'
        )
    for each in container.get("env", ()):
        name = str(each.get("name", ""))
        if name in _OUR_ENV or name.startswith(_OUR_PREFIXES):
            raise SpecError(
                f"spec.template.spec.containers[{TRAINER}].env: {each['name']} is set by the "
                "controller; leave it out"
            )
    assert template is not None
    return template


def _without_nulls(value: Any, name: str = "") -> Any:
    """Return a value without the fields behind which nothing stands: to Kubernetes they are none.

    `env:` alone is such a one. The API server keeps it, as it cannot look into a template. Where
    keys are the user's own, as in `nodeSelector`, nothing is an empty text to it.
    """
    if isinstance(value, Mapping) and name in _OF_TEXTS:
        return {key: "" if each is None else each for key, each in value.items()}
    if isinstance(value, Mapping):
        return {key: _without_nulls(each, key) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _is_in(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _check_shapes(pod: Object) -> None:
    """Refuse what is another thing than is read here and in what pods are made of."""
    at = "spec.template.spec"
    _get(pod, "securityContext", dict, {}, at)
    _get(pod, "terminationGracePeriodSeconds", int, 0, at)
    _items(pod, "volumes", at)
    for kind in ("containers", "initContainers"):
        for each in _items(pod, kind, at):
            where = f"{at}.{kind}[{each.get('name')}]"
            for name in ("env", "volumeMounts"):
                _items(each, name, where)
            _get(each, "securityContext", dict, {}, where)
            resources = _get(each, "resources", dict, {}, where)
            for name in ("limits", "requests"):
                _get(resources, name, dict, {}, f"{where}.resources")
            for name in ("command", "args"):
                words = _get(each, name, list, [], where)
                if wrong := [word for word in words if not isinstance(word, str)]:
                    raise SpecError(
                        f"{where}.{name}: expected texts, got {wrong[0]!r}; write it in quotes"
                    )


def _items(raw: Object, name: str, where: str) -> list[Object]:
    """Return a list of mappings."""
    found: list[Any] = _get(raw, name, list, [], where)
    if wrong := [each for each in found if not isinstance(each, Mapping)]:
        raise SpecError(f"{where}.{name}: expected a list of mappings, got {wrong[0]!r} in it")
    return found


def _container(pod: Object) -> Object:
    named = [each for each in pod.get("containers", ()) if each.get("name") == TRAINER]
    if len(named) != 1:
        raise SpecError(
            f"spec.template.spec.containers: expected one of the name {TRAINER!r}, got "
            f"{len(named)}; it is the one that trains"
        )
    found: Object = named[0]
    return found


def _gpus(container: Object) -> int:
    resources = container.get("resources", {})
    for kind in ("limits", "requests"):
        if GPU in resources.get(kind, {}):
            text = str(resources[kind][GPU])
            if not text.isdecimal():
                raise SpecError(
                    f"spec.template.spec.containers[{TRAINER}].resources.{kind}: expected a whole "
                    f"number of {GPU}, got {text!r}"
                )
            return int(text)
    _check_gpus(container)
    return 0


def _check_gpus(container: Object) -> None:
    """Refuse GPUs that trainers would leave idle: they would train on the CPU without a word."""
    resources = container.get("resources", {})
    if resources.get("claims"):  # what they claim is not in the template: it may be a network card
        raise SpecError(
            f"spec.template.spec.containers[{TRAINER}].resources.claims: a trainer has a whole GPU "
            f"of {GPU}, and leaves one that is claimed idle; ask for {GPU}, or leave claims out"
        )
    for kind in ("limits", "requests"):
        for name in resources.get(kind, {}):
            if _OTHER_GPU.match(str(name)):
                raise SpecError(
                    f"spec.template.spec.containers[{TRAINER}].resources.{kind}: {name}: a trainer "
                    f"has a whole GPU of {GPU}, and leaves others and parts of one idle; ask for "
                    f"{GPU}, or leave it out to train on the CPU"
                )


def _asks(pod: Object) -> bool:
    """Whether some container asks for something that is counted."""
    return any(
        kind in (container.get("resources") or {}).get(where, {})
        for container in pod["containers"]
        for where in ("requests", "limits")
        for kind in ("cpu", "memory", GPU)
    )


def _storage(server: Object) -> Object | None:
    storage: Object | None = _get(server, "storage", dict, None, "spec.server")
    if storage is not None and "size" not in storage:
        raise SpecError("spec.server.storage.size: missing; give an amount, such as 1Gi")
    return storage


def _get(raw: Object, name: str, kind: type[T], default: Any, where: str = "spec") -> Any:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        what = "a mapping" if kind is dict else "a list" if kind is list else kind.__name__
        raise SpecError(f"{where}.{name}: expected {what}, got {value!r}; correct or leave it out")
    return value


def _int(raw: Object, name: str, default: int, low: int, high: int) -> int:
    value = int(_get(raw, name, int, default))
    if not low <= value <= high:
        raise SpecError(f"spec.{name}: must be between {low} and {high}, got {value}")
    return value


def _failure_policy(raw: Object) -> tuple[FailureRule, ...]:
    try:
        return read_rules(_get(raw, "failurePolicy", list, []))
    except WireError as error:
        raise SpecError(f"spec.failurePolicy: {error}") from None


def _seconds(raw: Object, name: str, low: int) -> float | None:
    if raw.get(name) is None:
        return None
    return float(_int(raw, name, low, low, 2**31 - 1))


def _one_of(raw: Object, name: str, known: tuple[str, ...]) -> str:
    value = str(_get(raw, name, str, known[0]))
    if value not in known:
        raise SpecError(f"spec.{name}: expected {' or '.join(known)}, got {value!r}")
    return value
