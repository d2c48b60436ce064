"""A TrainingJob's status: what users read, and all that the controller remembers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

from k8s_controller.decisions.observed import seconds, time_text
from k8s_controller.decisions.spec import Object


class Phase(Enum):
    """The one word that `kubectl get` shows."""

    PENDING = "Pending"  # there are not enough pods yet
    STARTING = "Starting"
    RUNNING = "Running"
    SCALING = "Scaling"  # it trains, with another number of pods than is wanted
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition, as Kubernetes has them."""

    status: bool
    reason: str  # one word
    message: str = ""
    since: float = 0.0  # seconds since 1970


SPEC_VALID = "SpecValid"  # is there once it was wrong
SERVER_READY = "ServerReady"
PODS_READY = "PodsReady"
RUNNING = "Running"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"

_TIMES = {  # field here -> field of the object
    "started_at": "startTime",
    "completed_at": "completionTime",
    "scaled_at": "scaleStartedAt",
    "pod_failed_at": "podFailedAt",
    "pause_asked_at": "pauseAskedAt",
    "suspended_at": "suspendedAt",
}
_PLAIN = {
    "observed_generation": "observedGeneration",
    "desired": "desiredReplicas",
    "replicas": "replicas",
    "ready": "readyReplicas",
    "training": "trainingReplicas",
    "selector": "selector",
    "step": "step",
    "epoch": "epoch",
    "total_steps": "totalSteps",
    "stage": "stage",
    "failures": "failures",
    "job_state": "jobState",
    "reason": "reason",
    "saved_path": "savedPath",
    "suspended_s": "suspendedSeconds",
    "pod_failures": "podFailures",
    "pod_retries": "podRetries",
    "pod_failed_step": "podFailedStep",
    "step_s": "stepSeconds",
    "change_s": "changeSeconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    """How many pods a job with `autoscale` is to have, and why."""

    replicas: int = 0  # 0: it waits
    reason: str = ""
    since: float | None = None  # seconds since 1970; None: nothing was decided yet
    nodes: Mapping[str, int] = field(default_factory=dict)  # node -> pods, as it was reckoned
    limit: int | None = None  # for more pods the scheduler has found no node ...
    limit_until: float | None = None  # ... and is not asked before that

    @classmethod
    def read(cls, raw: Object) -> Self:
        return cls(
            replicas=int(raw.get("replicas") or 0),
            reason=str(raw.get("reason") or ""),
            since=seconds(raw.get("since")),
            nodes={each["name"]: int(each["pods"]) for each in raw.get("nodes") or ()},
            limit=raw.get("limit"),
            limit_until=seconds(raw.get("limitUntil")),
        )

    def write(self) -> dict[str, Any]:
        """Return it as an object has it; None takes a field away in a merge patch."""
        return {
            "replicas": self.replicas,
            "reason": self.reason,
            "since": None if self.since is None else time_text(self.since),
            "nodes": [{"name": name, "pods": pods} for name, pods in sorted(self.nodes.items())],
            "limit": self.limit,
            "limitUntil": None if self.limit_until is None else time_text(self.limit_until),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJobStatus:
    """All times are seconds since 1970; None: not yet."""

    phase: Phase = Phase.PENDING
    observed_generation: int = 0
    desired: int | None = None  # pods; None: nothing is decided yet
    replicas: int = 0  # trainer pods that are there and stay
    ready: int = 0  # ... that the job server knows
    training: int = 0  # ... that the running stage has
    selector: str = ""
    started_at: float | None = None
    completed_at: float | None = None
    step: int = 0
    epoch: int = 0
    total_steps: int | None = None
    stage: int = 0
    failures: int = 0
    job_state: str = ""  # of the job server
    reason: str = ""
    saved_path: str = ""  # where the last pause or end wrote the state
    step_s: Mapping[str, float] = field(default_factory=dict)  # pods -> seconds of a step
    change_s: float = 0.0  # of the pauses of its changes, in the mean
    autoscale: Autoscale | None = None  # what was decided for it; written by whoever decides
    # The controller's memory, so that another one goes on where it was.
    scaled_at: float | None = None  # when `desired` last changed, or pods last came
    pod_failures: int = 0  # pods that have ended by themselves since it last made a new step
    pod_retries: int = 0  # ... since all its pods trained
    pod_failed_step: int = 0  # the most steps that it had when one did
    pod_failed_at: float | None = None
    pause_asked_at: float | None = None
    suspended_at: float | None = None  # it ends when the job is given pods again
    suspended_s: float = 0.0  # all that is over
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.holds(COMPLETE) or self.holds(FAILED)

    def holds(self, kind: str) -> bool:
        return kind in self.conditions and self.conditions[kind].status

    def with_condition(
        self, kind: str, status: bool, reason: str, message: str, now: float
    ) -> Self:
        """Return the status with this condition; its time stays unless it turns."""
        known = self.conditions.get(kind)
        since = known.since if known is not None and known.status == status else now
        made = Condition(status=status, reason=reason, message=message[:1024], since=since)
        return replace(self, conditions={**self.conditions, kind: made})

    def no_later_than(self, now: float) -> Self:
        """Return the status without times to come, as a controller with another clock writes them.

        What waits for so long after them would wait until this clock has come there, too.
        """
        times = {name: min(at, now) for name in _TIMES if (at := getattr(self, name)) is not None}
        conditions = {
            kind: replace(each, since=min(each.since, now))
            for kind, each in self.conditions.items()
        }
        given = self.autoscale
        if given is not None and given.since is not None and given.since > now:
            # That of the pods' last change, which is written in the next pass, and stays then.
            given = replace(given, since=times.get("scaled_at", now))
        return replace(self, **times, conditions=conditions, autoscale=given)

    @classmethod
    def read(cls, raw: Object | None) -> Self:
        """Return what an object's status says; unknown and broken fields count as absent."""
        raw = raw or {}
        found: dict[str, Any] = {}
        for name, key in _PLAIN.items():
            if raw.get(key) is not None:
                found[name] = raw[key]
        for name, key in _TIMES.items():
            if raw.get(key):
                found[name] = seconds(raw[key])
        if isinstance(raw.get("autoscale"), Mapping):
            found["autoscale"] = Autoscale.read(raw["autoscale"])
        phases = {each.value: each for each in Phase}
        found["phase"] = phases.get(str(raw.get("phase")), Phase.PENDING)
        found["conditions"] = {
            str(each["type"]): Condition(
                status=each.get("status") == "True",
                reason=str(each.get("reason", "")),
                message=str(each.get("message", "")),
                since=seconds(each.get("lastTransitionTime")) or 0.0,
            )
            for each in raw.get("conditions") or ()
        }
        return cls(**found)

    def write(self) -> dict[str, Any]:
        """Return the status as an object has it; None takes a field away in a merge patch."""
        raw: dict[str, Any] = {key: getattr(self, name) for name, key in _PLAIN.items()}
        for name, key in _TIMES.items():
            at = getattr(self, name)
            raw[key] = None if at is None else time_text(at)
        raw["phase"] = self.phase.value
        raw["conditions"] = [
            {
                "type": kind,
                "status": "True" if each.status else "False",
                "reason": each.reason,
                "message": each.message,
                "lastTransitionTime": time_text(each.since),
                "observedGeneration": self.observed_generation,
            }
            for kind, each in sorted(self.conditions.items())
        ]
        return raw
