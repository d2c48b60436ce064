"""What pods ask for, where they may be, and what nodes have beside them. Pure.

As Kubernetes' scheduler sees it, as far as that is simple: requests, node selectors, required node
affinity, taints, cordons. It knows nothing of volumes, ports, spreading and pods' affinities.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from job_server.sharing.resources import NOTHING, NodeRoom, Resources
from k8s_controller.decisions.spec import GPU, Object

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What somebody has of the cluster, or waits for, whom we cannot move."""

    needs: Resources
    node: str = ""  # "": not scheduled yet
    going: bool = False  # it is on its node for a little longer
    nodes: frozenset[str] = frozenset()  # where it may be, while it is not scheduled


def quantity(text: object) -> float:
    """Return the number that a quantity is: `500m` is 0.5.

    Raises:
        ValueError: it is none.
    """
    digits = str(text).rstrip("numkKMGTPEi")
    unit = str(text)[len(digits) :]
    try:
        number = float(digits) * (_UNITS[unit] if unit else 1)
    except (ValueError, KeyError):
        number = -1.0
    if not 0 <= number < math.inf:  # "infinity" is a number of Python's alone
        raise ValueError(f"{text!r} is no quantity")
    return number


def requests_of(pod: Object) -> Resources:
    """Return what a pod asks for, from its spec; GPUs are slots.

    Raises:
        ValueError: something is no quantity.
    """
    found = []
    for kind in ("cpu", "memory", GPU):
        total = sum(_asked(each, kind) for each in pod.get("containers") or ())
        first = 0.0  # what containers that run before the others ask for, at most
        for each in pod.get("initContainers") or ():
            if each.get("restartPolicy") == "Always":  # it stays beside them
                total += _asked(each, kind)
                first = max(first, total)
            else:
                first = max(first, _asked(each, kind))
        whole = _asked(pod, kind, max(total, first))  # what is asked for the pod goes before
        found.append(whole + quantity((pod.get("overhead") or {}).get(kind, 0)))
    cpu, memory, gpus = found
    return Resources(
        slots=math.ceil(gpus),
        cpu_milli=math.ceil(round(cpu * 1000, 6)),
        memory_mb=math.ceil(memory / 1e6),
    )


def _asked(asks: Object, kind: str, default: float = 0.0) -> float:
    """Return what a container, or a pod for all of its containers, asks for."""
    resources = asks.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    return quantity(requests.get(kind, limits.get(kind, default)))


def capacity_of(node: Object) -> Resources:
    """Return what pods can have of a node."""
    has = (node.get("status") or {}).get("allocatable") or {}
    return Resources(
        slots=int(quantity(has.get(GPU, 0))),
        cpu_milli=int(round(quantity(has.get("cpu", 0)) * 1000, 6)),
        memory_mb=int(quantity(has.get("memory", 0)) / 1e6),
    )


def usable_nodes(pod: Object, nodes: Iterable[Object]) -> frozenset[str]:
    """Return the names of the nodes on which a pod of this spec may be started now."""
    return frozenset(str(node["metadata"]["name"]) for node in nodes if _may_be_on(pod, node))


def _may_be_on(pod: Object, node: Object) -> bool:
    spec, meta = node.get("spec") or {}, node["metadata"]
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = all(each["status"] == "True" for each in conditions if each["type"] == "Ready")
    if spec.get("unschedulable") or not ready or "deletionTimestamp" in meta:
        return False
    labels = meta.get("labels") or {}
    if not (pod.get("nodeSelector") or {}).items() <= labels.items():
        return False
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is not None and not any(
        _selects(term, labels, str(meta["name"])) for term in required["nodeSelectorTerms"]
    ):
        return False
    return all(
        taint.get("effect") == "PreferNoSchedule"
        or any(_tolerates(each, taint) for each in pod.get("tolerations") or ())
        for taint in spec.get("taints") or ()
    )


def _selects(term: Object, labels: Mapping[str, str], name: str) -> bool:
    """Whether a term of a required affinity is met; one that says nothing is not."""
    rules = [(each, labels) for each in term.get("matchExpressions") or ()]
    rules += [(each, {"metadata.name": name}) for each in term.get("matchFields") or ()]
    return bool(rules) and all(_holds(rule, values) for rule, values in rules)


def _holds(rule: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), list(rule.get("values") or ())
    match rule["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _number(value) > _number(values[0])
        case "Lt":
            return _number(value) < _number(values[0])
    return False


def _number(text: str | None) -> float:
    try:
        return math.nan if text is None else int(text)
    except ValueError:
        return math.nan  # compares as False, as the scheduler has it


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same = (toleration.get("value") or "") == (taint.get("value") or "")
    return toleration.get("key") == taint["key"] and same


def rooms(
    nodes: Sequence[Object],
    claims: Iterable[Claim],
    held: Mapping[str, Resources],
    givable: Mapping[str, Resources],
) -> tuple[list[NodeRoom], bool]:
    """Return the nodes, with the claims as what others use of them, and whether all were counted.

    A claim that is not scheduled is counted where there is room for it or will be when others have
    gone, or would be if jobs gave way there, so that they do. One for which no node can make room
    is left out. What is going has its room until it has gone, and no other one gets that.

    Args:
        held: node -> what the jobs that we move have there.
        givable: node -> the part of it that they could give up.
    """
    capacity = {str(node["metadata"]["name"]): capacity_of(node) for node in nodes}
    foreign = dict.fromkeys(capacity, NOTHING)  # of those that stay
    going, coming = dict(foreign), dict(foreign)
    waiting = []
    for claim in claims:
        if claim.node in foreign:
            where = going if claim.going else foreign
            where[claim.node] = add(where[claim.node], claim.needs)
        elif not claim.node:
            waiting.append(claim)
    complete = True
    for claim in sorted(waiting, key=lambda each: each.needs, reverse=True):
        best = None
        for name in sorted(claim.nodes & foreign.keys()):
            used = add(add(foreign[name], coming[name]), held.get(name, NOTHING))
            left = subtract(subtract(capacity[name], used), claim.needs)
            could = add(left, givable.get(name, NOTHING))
            if not _fits(could, claim.needs):
                continue
            now = subtract(left, going[name])
            key = (_fits(left, claim.needs), _fits(now, claim.needs), left)
            if best is None or key > best[0]:
                best = key, name
        if best is None:
            complete = False
        else:
            coming[best[1]] = add(coming[best[1]], claim.needs)
    found = []
    for name, has in sorted(capacity.items()):
        both = Resources(*map(max, going[name], coming[name]))  # one after the other
        found.append(NodeRoom(node_id=name, capacity=has, foreign=add(foreign[name], both)))
    return found, complete


def _fits(left: Resources, needs: Resources) -> bool:
    """Whether nothing that is needed is used beyond what there is."""
    return all(rest >= 0 for rest, need in zip(left, needs, strict=True) if need)


def add(one: Resources, other: Resources) -> Resources:
    return Resources(*(a + b for a, b in zip(one, other, strict=True)))


def subtract(one: Resources, other: Resources) -> Resources:
    return Resources(*(a - b for a, b in zip(one, other, strict=True)))


def times(count: int, one: Resources) -> Resources:
    return Resources(*(count * amount for amount in one))
