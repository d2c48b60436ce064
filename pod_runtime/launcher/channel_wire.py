"""What a trainer may say to its launcher, checked. Standard library only, pure.

docs/architecture.md, "Launcher and trainer", says when each is said. What the launcher answers is
made where it is sent (`state`, `segments`), as plain JSON objects.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from job_server.api.wire import SnapshotRef, TrainerError, WireError, decode
from pod_runtime.errors import ChannelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHello:
    """The trainer has called the elastic loop."""

    rank: int
    stage: int
    pid: int
    joins: bool = False  # it can form the group of a next stage beside that of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTooLow:
    highest_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Ready beside the stage that trains: what is left is to take over the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """It was asked to join: it has formed the group of the next stage, beside its own."""

    stage: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotJoin:
    """It was asked to join and will not; nor will it later, until it says hello again."""

    stage: int = 0  # 0: nobody has asked
    attempt: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    step: int  # global steps committed so far
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    step: int
    epoch: int = 0
    total_steps: int | None = None  # None: not known
    step_s: float | None = None  # None: too early to say
    metrics: dict[str, float] | None = None  # None: unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMade:
    """A memfd comes with it."""

    stage: int
    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMade:
    stage: int
    step: int
    digest: str = ""
    serial: int = 0  # states of one stage in order; what follows an epoch shares its last step


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    step: int
    id: int | None = None  # of the cut it answers; None: it followed its peers, or does not say
    snapshot: SnapshotRef | None = None  # of this state, on its node; None: there is none
    durable: str = ""  # the path of checkpoints that it has written this state to; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The script has raised, and ends; said on a connection of its own, without a hello."""

    error: TrainerError


TrainerMessage = (
    TrainerHello | StageTooLow | Prepared | Formed | CannotJoin | StateLoaded | Stepped
    | SegmentMade | SnapshotMade | Drained | Done | Raised
)  # fmt: skip

_KINDS: dict[str, type[TrainerMessage]] = {
    "hello": TrainerHello,
    "stage_too_low": StageTooLow,
    "prepared": Prepared,
    "formed": Formed,
    "cannot_join": CannotJoin,
    "loaded": StateLoaded,
    "step": Stepped,
    "segment": SegmentMade,
    "snapshot": SnapshotMade,
    "drained": Drained,
    "done": Done,
    "raised": Raised,
}


def parse(message: Mapping[str, Any]) -> TrainerMessage:
    """Return the typed form of what a trainer said.

    A metric that is not finite is left out: a loss that became NaN is the user's concern, and no
    reason to lose the trainer.

    Raises:
        ChannelError: an unknown `say`, or a field is missing or of another type.
    """
    word = message.get("say")
    kind = _KINDS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise ChannelError(f"say: expected one of {', '.join(_KINDS)}, got {word!r}")
    body = dict(message)
    if kind is Stepped:
        body = _finite_only(body)
    try:
        return decode(kind, body)
    except WireError as error:
        raise ChannelError(f"{word}: {error}") from error


def _finite_only(body: dict[str, Any]) -> dict[str, Any]:
    metrics = body.get("metrics")
    if isinstance(metrics, dict):
        body["metrics"] = {
            name: value
            for name, value in metrics.items()
            if not (isinstance(value, float) and not math.isfinite(value))
        }
    step_s = body.get("step_s")
    if isinstance(step_s, float) and not math.isfinite(step_s):
        body["step_s"] = None
    return body
