"""Make the manifests of a TrainingJob's objects. Pure, so that the same job has the same ones.

All pods keep the Pod Security standard "restricted": no root, no privileges, no capabilities.
"""

from collections.abc import Mapping
from typing import Any

from k8s_controller.decisions.observed import (
    GPUS_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    ROLE_LABEL,
    UID_CHARS,
)
from k8s_controller.decisions.spec import (
    API_VERSION,
    KIND,
    MAX_PODS,
    TRAINER,
    Object,
    TrainingJobSpec,
)

Manifest = dict[str, Any]

PORT = 8180  # of the job server
STATE = "/state"  # where the containers work; all our paths are relative to it
USER = 10001  # of the image
GRACE_S = 120  # of a trainer pod, if its template names none: it leaves within that
_STOPPING_S = 30  # of the grace: what the job client has left once it gets SIGTERM
_SERVER_TAKES = (  # of the template: where its pods may run, and who may pull their images
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "serviceAccountName",
    "tolerations",
)
_SERVER_RESOURCES: Manifest = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"memory": "1Gi"},
}


def labels(job: str, role: str) -> dict[str, str]:
    """Return the labels of a job's pods."""
    return {
        "app.kubernetes.io/name": "edl",
        "app.kubernetes.io/managed-by": "edl-controller",
        JOB_LABEL: job,
        ROLE_LABEL: role,
    }


def selector(job: str) -> str:
    """Return what selects the trainers, for `status.selector`."""
    return f"{JOB_LABEL}={job},{ROLE_LABEL}=trainer"


def server_name(job: str) -> str:
    return f"{job}-server"


def trainer_name(job: str, index: int) -> str:
    return f"{job}-{index}"


def foundations(owner: Object, spec: TrainingJobSpec, token: str) -> list[Manifest]:
    """Return what a job has beside its pods; each is made once and never changed.

    Args:
        owner: the TrainingJob.
        token: for the job server and all who ask it; one that is there already stays.
    """
    job = owner["metadata"]["name"]
    made = [
        _object(owner, "v1", "Secret", f"{job}-token", "server")
        | {"type": "Opaque", "stringData": {"token": token}},
        _object(owner, "v1", "Service", server_name(job), "server")
        | {
            "spec": {
                "selector": {JOB_LABEL: job, ROLE_LABEL: "server"},
                # There is no other one: a slow answer to a probe must not cut trainers off.
                "publishNotReadyAddresses": True,
                "ports": [{"name": "http", "port": PORT, "targetPort": PORT}],
            }
        },
        _object(owner, "policy/v1", "PodDisruptionBudget", job, "trainer")
        | {
            "spec": {
                "minAvailable": 0,  # the controller keeps it at one less than there are
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {JOB_LABEL: job, ROLE_LABEL: "trainer"}},
            }
        },
        _object(owner, "networking.k8s.io/v1", "NetworkPolicy", job, "trainer")
        | {
            "spec": {
                "podSelector": {"matchLabels": {JOB_LABEL: job}},
                "policyTypes": ["Ingress"],
                "ingress": [
                    {
                        "from": [
                            {"podSelector": {"matchLabels": {JOB_LABEL: job}}},
                            {
                                "namespaceSelector": {},
                                "podSelector": {
                                    "matchLabels": {
                                        "app.kubernetes.io/name": "edl",
                                        "app.kubernetes.io/component": "controller",
                                    }
                                },
                            },
                        ]
                    }
                ],
            }
        },
    ]
    if spec.storage is not None:
        claim: Manifest = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(spec.storage["size"])}},
        }
        if spec.storage.get("storageClassName"):
            claim["storageClassName"] = str(spec.storage["storageClassName"])
        made.append(
            _object(owner, "v1", "PersistentVolumeClaim", server_name(job), "server")
            | {"spec": claim}
        )
    return made


def server_pod(owner: Object, spec: TrainingJobSpec) -> Manifest:
    """Return the pod of the job server. Its container is started again where it stands."""
    job = owner["metadata"]["name"]
    template = spec.template["spec"]
    state: Manifest = {"emptyDir": {}}
    if spec.storage is not None:
        state = {"persistentVolumeClaim": {"claimName": server_name(job)}}
    image = {"image": spec.server_image}
    if not spec.server_image:  # the trainer's is there, or is pulled, as for the trainer
        image = {
            key: spec.trainer[key] for key in ("image", "imagePullPolicy") if key in spec.trainer
        }
    pod: Manifest = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security(),
        "terminationGracePeriodSeconds": 15,
        "containers": [
            {
                "name": "server",
                **image,
                "workingDir": STATE,
                "command": ["python", "-m", "job_server"],
                "args": [
                    "--no_job",
                    "--bind=$(POD_IP)",
                    f"--server_port={PORT}",
                    "--db=edl.sqlite",
                    # Pods that replace others are there beside them: up to twice as many.
                    f"--heartbeat_s={1 if 2 * spec.max_replicas <= MAX_PODS else 2}",
                ],
                "env": [_field("POD_IP", "status.podIP"), _token(job), _home()],
                "ports": [{"name": "http", "containerPort": PORT}],
                "readinessProbe": _health(2, 3),
                "livenessProbe": _health(10, 6),
                "resources": dict(spec.server_resources) or _SERVER_RESOURCES,
                "securityContext": _rights(),
                "volumeMounts": _mounts(("state", STATE), ("tmp", "/tmp")),
            }
        ],
        "volumes": [{"name": "state"} | state, {"name": "tmp", "emptyDir": {}}],
    }
    for name in _SERVER_TAKES:
        if name in template:
            pod[name] = template[name]
    return _object(owner, "v1", "Pod", server_name(job), "server") | {"spec": pod}


def trainer_pod(owner: Object, spec: TrainingJobSpec, index: int) -> Manifest:
    """Return a pod of trainers: the job client, which runs the template's command.

    The client is a node of the job server with room for one EDL pod. When the pod is to leave, it
    first waits until the training has left it by a planned change; then SIGTERM comes. A server
    that goes at the same time, and keeps its database, is waited for.
    """
    job, namespace = owner["metadata"]["name"], owner["metadata"]["namespace"]
    template = spec.template["spec"]
    grace_s = int(template.get("terminationGracePeriodSeconds", GRACE_S))
    client = [
        "python -m job_client",
        f"--node_id={_SHELL_NODE}",
        '--addr="$POD_IP"',
        "--port_range=auto",
        "--log_dir=pod_log",
        "--pod_path=pods",
    ]
    if not spec.has_gpus:
        client.append(f"--cpu_slots={spec.slots_per_pod}")
    script = f'printf \'exec "$@"\\n\' >pod.sh && exec {" ".join(client)} pod.sh "$@"'
    wait_s = max(grace_s - _STOPPING_S, 0)
    leave = f"python -m edl capacity {_SHELL_NODE} --slots 0 --wait {wait_s}"
    if spec.storage is not None and wait_s:  # its server may move as well: it comes back
        leave = f"timeout {wait_s} bash -c 'until {leave}; do {_IS_KEPT} || exit 1; sleep 1; done'"
    user = spec.trainer
    container: Manifest = {name: user[name] for name in user if name not in ("command", "args")}
    container |= {
        "workingDir": STATE,
        "command": ["bash", "-c", script, "edl"],
        "args": [*user.get("command", ()), *user.get("args", ())],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_UID", "metadata.uid"),
            _field("POD_IP", "status.podIP"),
            _token(job),
            {
                "name": "PADDLE_JOBSERVER",
                "value": f"http://{server_name(job)}.{namespace}.svc:{PORT}",
            },
            {"name": "PADDLE_JOB_ID", "value": job},
            *([] if _sets_home(user) else [_home()]),
            *user.get("env", ()),
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", f"exec {leave}"]}}},
        "securityContext": _rights() | dict(user.get("securityContext", {})),
        "volumeMounts": [
            *user.get("volumeMounts", ()),
            *_mounts(*_missing(user, ("state", STATE), ("tmp", "/tmp"), ("shm", "/dev/shm"))),
        ],
    }
    pod: Manifest = dict(template) | {
        "restartPolicy": "Never",
        "automountServiceAccountToken": template.get("automountServiceAccountToken", False),
        "enableServiceLinks": False,
        "securityContext": _security() | dict(template.get("securityContext", {})),
        "terminationGracePeriodSeconds": grace_s,
        "containers": [
            container if each["name"] == TRAINER else _restricted(each)
            for each in template["containers"]
        ],
        "volumes": [
            *template.get("volumes", ()),
            *({"name": f"edl-{name}", "emptyDir": kind} for name, kind in _VOLUMES.items()),
        ],
    }
    if "initContainers" in template:
        pod["initContainers"] = [_restricted(each) for each in template["initContainers"]]
    made = _object(owner, "v1", "Pod", trainer_name(job, index), "trainer")
    meta = spec.template.get("metadata", {})
    made["metadata"]["labels"] = {
        **meta.get("labels", {}),
        **made["metadata"]["labels"],
        INDEX_LABEL: str(index),
        GPUS_LABEL: str(spec.gpus),
    }
    if meta.get("annotations"):
        made["metadata"]["annotations"] = dict(meta["annotations"])
    return made | {"spec": pod}


_SHELL_NODE = f'"$POD_NAME.${{POD_UID:0:{UID_CHARS}}}"'
# The job server's name is known as long as its Service is there: the job was not deleted.
_IS_KEPT = 'at="${PADDLE_JOBSERVER#*//}" && getent ahosts "${at%:*}" >/dev/null'
_VOLUMES: Mapping[str, Manifest] = {"state": {}, "tmp": {}, "shm": {"medium": "Memory"}}


def _object(owner: Object, api_version: str, kind: str, name: str, role: str) -> Manifest:
    meta = owner["metadata"]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": labels(meta["name"], role),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
    }


def _security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _rights() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _restricted(container: Object) -> Manifest:
    rights = _rights() | dict(container.get("securityContext", {}))
    return dict(container) | {"securityContext": rights}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _token(job: str) -> Manifest:
    source = {"secretKeyRef": {"name": f"{job}-token", "key": "token"}}
    return {"name": "EDL_TOKEN", "valueFrom": source}


def _home() -> Manifest:
    return {"name": "HOME", "value": "/tmp"}


def _sets_home(container: Object) -> bool:
    return any(each.get("name") == "HOME" for each in container.get("env", ()))


def _health(period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": "/api/v1/health", "port": PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _mounts(*places: tuple[str, str]) -> list[Manifest]:
    return [{"name": name, "mountPath": path} for name, path in places]


def _missing(container: Object, *places: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the folders that the user has not mounted something at, and our volumes for them."""
    taken = {str(each.get("mountPath")) for each in container.get("volumeMounts", ())}
    return [(f"edl-{name}", path) for name, path in places if path not in taken]
