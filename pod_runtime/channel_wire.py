"""The messages between a launcher and its trainers: typed on both ends. Pure.

docs/architecture.md, "Launcher and trainer", says when each is sent. On the socket a message is a
JSON object: a trainer's has its kind under "say", a launcher's under "do".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from job_server.api.wire import SnapshotRef, StagePlan, TrainerError, WireError, decode, encode
from pod_runtime.errors import ChannelError

PEER_LOST_EXIT_CODE = 75  # EX_TEMPFAIL: of a trainer that ends since another one is gone

# --- from a trainer to its launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHello:
    """The trainer has called the elastic loop."""

    rank: int
    stage: int
    pid: int
    joins: bool = False  # it can form a next stage's group while it trains
    # The script makes a later loop, and those before it are kept by checkpoints: the training is
    # not complete yet.
    goes_on: bool = False
    adapter: str = ""  # module of its framework, which spares import; "": an old trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTooLow:
    highest_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The group is formed while an older stage trains: only the state has to be taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """An invited trainer has formed the next stage's group, besides its own."""

    stage: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotJoin:
    """A trainer cannot join the next stage, nor a later one, until it sends hello again."""

    stage: int = 0  # 0: it was not invited
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
    metric_epochs: dict[str, int] | None = None  # of what the script logs: as of PodReport
    promise: str = ""  # what the training promises, for people; "": an old trainer
    # Why a checkpoint, or a snapshot, is not written; "": it is. None: not known, or another's.
    checkpoint_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMade:
    """A trainer has made a snapshot segment, whose memfd comes with this message."""

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
    id: int | None = None  # of the cut it answers; None: it followed its peers, or is older
    snapshot: SnapshotRef | None = None  # of this state, on its node; None: there is none
    durable: str = ""  # the path of checkpoints that it has written this state to; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The script has raised, and ends. Sent on a connection of its own, without a hello."""

    error: TrainerError


# --- from a launcher to a trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers hello. Segments to restore from come with it."""

    plan: StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """The stage is committed: train."""

    # What a prepared trainer starts from, or the stage that a trainer joins. Segments come with it
    # for the former. None: the trainer has loaded its state already.
    plan: StagePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The state that a prepared trainer will start from, if the change is committed.

    The segment that holds it comes with it.
    """

    snapshot: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Drain at an agreed step."""

    id: int  # grows from cut to cut
    durable: bool = False  # no stage follows: a checkpoint that is being written is finished first
    patient: bool = False  # not in the middle of a step, even while that waits for data
    halt: str = ""  # "pause" or "stop" follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The cut `id`, and each before it, is off."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Form the group of the next stage, and join it when it is committed."""

    plan: StagePlan
    rank: int  # the trainer's own in that stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Disinvitation:
    """The stage that the trainer was invited to is off."""


TrainerMessage = (
    TrainerHello | StageTooLow | Prepared | Formed | CannotJoin | StateLoaded | Stepped
    | SegmentMade | SnapshotMade | Drained | Done | Raised
)  # fmt: skip

LauncherMessage = Welcome | Go | Preview | Cut | Resume | Invitation | Disinvitation

_FROM_TRAINER: dict[str, type[TrainerMessage]] = {
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
_FROM_LAUNCHER: dict[str, type[LauncherMessage]] = {
    "welcome": Welcome,
    "go": Go,
    "preview": Preview,
    "cut": Cut,
    "resume": Resume,
    "join": Invitation,
    "drop": Disinvitation,
}
_KIND = {made: kind for kind, made in (*_FROM_TRAINER.items(), *_FROM_LAUNCHER.items())}
_Message = TypeVar("_Message")


def kind_of(message: TrainerMessage | LauncherMessage) -> str:
    """Return a message's name on the socket."""
    return _KIND[type(message)]


def to_json(message: TrainerMessage | LauncherMessage) -> dict[str, Any]:
    """Return a message as `parse_trainer` or `parse_launcher` reads it."""
    key = "say" if kind_of(message) in _FROM_TRAINER else "do"
    fields = {name: value for name, value in encode(message).items() if value is not None}
    return {key: kind_of(message), **fields}


def parse_trainer(message: Mapping[str, Any]) -> TrainerMessage:
    """Return the typed form of what a trainer sent.

    Metrics that are not finite are left out: a NaN loss is no reason to lose the trainer.

    Raises:
        ChannelError: an unknown `say`, or a field is missing or of another type.
    """
    return _parse(message, "say", _FROM_TRAINER)


def parse_launcher(message: Mapping[str, Any]) -> LauncherMessage:
    """Return the typed form of what a launcher sent.

    Raises:
        ChannelError: an unknown `do`, or a field is missing or of another type.
    """
    return _parse(message, "do", _FROM_LAUNCHER)


def _parse(message: Mapping[str, Any], key: str, types: Mapping[str, type[_Message]]) -> _Message:
    kind = message.get(key)
    made = types.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise ChannelError(f"{key}: expected one of {', '.join(types)}, got {kind!r:.90}")
    body = dict(message)
    if made is Stepped:
        body = _finite_only(body)
    try:
        return decode(made, body)
    except WireError as error:
        raise ChannelError(f"{kind}: {error}") from error


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
