"""Whether a pod may be evicted, by the budgets that select it. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping

from tests.k8s_controller.cluster.kinds import ApiError, Object
from tests.k8s_controller.cluster.patches import selects


def refusal(
    pod: Object, pods: Iterable[Object], budgets: Iterable[Object],
    scale_of_owner: Callable[[Object], int | None],
) -> ApiError | None:  # fmt: skip
    """Return the refusal of an eviction, None if the pod may go. All of one namespace.

    All but a plain minAvailable is reckoned from the scale of the pods' owner.
    """
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed", "Pending"):
        return None
    labels = pod["metadata"].get("labels", {})
    for budget in budgets:
        spec = budget["spec"]
        if not selects(spec.get("selector"), labels):
            continue
        protected = [
            each for each in pods if selects(spec["selector"], each["metadata"].get("labels", {}))
        ]
        healthy = sum(map(is_ready, protected))
        if isinstance(spec.get("minAvailable"), int):
            needed = spec["minAvailable"]
        elif (expected := scale_of_owner(pod)) is None:
            return ApiError(429, "TooManyRequests", "Cannot evict pod: its budget is not reckoned")
        elif "minAvailable" in spec:
            needed = _of(spec["minAvailable"], expected)
        else:
            needed = expected - _of(spec["maxUnavailable"], expected)
        if healthy - is_ready(pod) < needed:
            name = budget["metadata"]["name"]
            return ApiError(
                429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption "
                f"budget. The disruption budget {name} needs {needed} healthy pods and has "
                f"{healthy} currently", retry_after_s=1,
            )  # fmt: skip
    return None


def is_ready(pod: Mapping[str, Object]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    is_going = "deletionTimestamp" in pod["metadata"]
    return not is_going and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _of(value: int | str, count: int) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return math.ceil(count * int(value[:-1]) / 100)
    return int(value)
