"""What can happen to a job: the events that `machine.step` and `teachers.step` take."""

from dataclasses import dataclass

from job_server.api.wire import Attach, Demand, Kill, PodReport, PodState, Resize


class RequestRefused(ValueError):  # noqa: N818 - the interface's word
    """A user asked for something that makes no sense now; the job is unchanged."""


class NotConverging(RuntimeError):  # noqa: N818 - as above
    """Two rules of the state machine undo each other: a defect; the job is unchanged."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class NodesChanged:
    """A node registered, left or changed, or slots of another job became free."""


@dataclass(frozen=True, slots=True)
class NodeReported:
    """The heartbeat of a node's client; `pods` are all pods of this job that it knows."""

    node_id: str
    pods: tuple[PodState, ...] = ()


@dataclass(frozen=True, slots=True)
class LauncherAttached:
    attach: Attach


@dataclass(frozen=True, slots=True)
class LauncherReported:
    pod_id: str
    report: PodReport


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    resize: Resize


@dataclass(frozen=True, slots=True)
class PauseAsked:
    pass


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    discard: bool = False  # at once: what is not written is lost


@dataclass(frozen=True, slots=True)
class KillAsked:
    kill: Kill


@dataclass(frozen=True, slots=True)
class ServerRestarted:
    """The job was read back from the store: nobody has been heard since nobody listened."""


@dataclass(frozen=True, slots=True)
class RunTimeStatic:
    """The original's client told how long the job is expected to run."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Demanded:
    """The students of the service that a job's teachers serve; no event of a training."""

    demand: Demand


Event = (
    Tick
    | NodesChanged
    | NodeReported
    | LauncherAttached
    | LauncherReported
    | ResizeAsked
    | PauseAsked
    | ResumeAsked
    | StopAsked
    | KillAsked
    | ServerRestarted
    | RunTimeStatic
    | Demanded
)
