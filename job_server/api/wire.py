"""Define the messages of the job server's REST API, and nothing else.

Server, job client, pod runtime and controller import these types from here. Importing this module
loads the standard library and msgspec alone. JSON is made and checked by `codec`.

The protocol is level-triggered. Clients and launchers long-poll for what should be true now
(`NodePlan`, `PodOrders`) and report what is true now (`NodeReport`, `Attach`, `PodReport`). Every
message may be repeated, and none is a difference to an earlier one.
"""

import re
from enum import Enum
from typing import Any

from job_server.api.codec import MAX_INT, Int, Message, WireError, decode, encode
from job_server.api.failure_policy import MAX_RULES, FailureRule

__all__ = [
    "Message",
    "WireError",
    "decode",
    "encode",
]  # the rest is public as well; these are re-exports

API = "/api/v1"
MAX_BODY_BYTES = 2 * 1024 * 1024
SHOWN_CHARS = 300  # of the text of an exception
MAX_ERROR_CHARS = 4096  # of the same, as it is sent
MAX_METRICS = 500  # of one job
MAX_AMOUNT = 10**9  # of thousandths of a core, or of MB
MAX_PRIORITY = 1000
MAX_AFTER = 100  # jobs that one job waits for
MAX_ARGS, MAX_ARG_CHARS = 200, 1000  # of a job's script
TRAIN_LOSS = "train_loss"  # the metric that trainers report by themselves
HANG_POLICIES = ("say", "restart", "fail")
STRAGGLER_POLICIES = ("say", "evict")
MAX_POLL_S = 60.0  # the longest a server holds a long poll
MAX_RUN_TIME_S = 366 * 86400.0
MAX_STAGE = 10**12  # later stages must still fit into 16 digits, as all integers in our JSON
STOP_AFTER_RANGE_S = (0.1, MAX_RUN_TIME_S)
EXIT_REPORT_S = 30.0  # for so long a launcher tries to say how it ended, before it exits
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def check_id(field: str, value: str) -> None:
    """Refuse an id that could lead out of a folder or break a path, such as `../x`.

    Raises:
        WireError: `value` is not 1 to 100 letters, digits, '.', '_' or '-', or its first character
            is neither letter nor digit.
    """
    if not _ID.match(value):
        shown = value if len(value) <= 60 else value[:57] + "..."
        raise WireError(
            f"{field}: {shown!r} is not an id; use 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise a WireError unless low <= value <= high."""
    if not low <= value <= high:
        # Not every int can be shown as a float, and a long one fills the screen.
        shown = f"{value:g}" if abs(value) < 1e300 else "a huge number"
        raise WireError(f"{field}: must be between {low:g} and {high:g}, got {shown}")


# --- nodes: job client <-> server -------------------------------------------------------------


class SlotKind(Enum):
    GPU = "gpu"
    CPU = "cpu"


class Slot(Message, frozen=True, kw_only=True):
    """Room for one trainer: one GPU, or a share of the CPU."""

    index: Int  # as NVML numbers GPUs; CPU slots count from 0
    kind: SlotKind
    name: str = ""
    uuid: str = ""
    memory_bytes: Int = 0
    usable: bool = True
    reason: str = ""  # why it is not usable
    quarantine: str = ""  # by the server: why the pods on it leave, too; "": they may stay
    ends_trainers: bool = False  # ... at once: none can go on there
    drained: bool = False  # ... as all pods leave the node; nothing is wrong with the slot

    def __post_init__(self) -> None:
        check_range("index", self.index, 0, 4095)


class Quarantine(Message, frozen=True, kw_only=True):
    """A slot that gets no pods because something is wrong with it, or was."""

    slot: Int
    uuid: str = ""  # of its GPU; "": not known, not a GPU
    name: str  # of the fault
    why: str  # in words
    since: float  # seconds since 1970
    times: Int = 1  # how often it was in quarantine, this time included
    probe_s: float = 0.0  # it ends once the slot was well and idle for so long; 0: by hand alone
    ended_at: float | None = None  # None: it is in force


class Node(Message, frozen=True, kw_only=True):
    """What a job client registers: its slots, its address and its ports."""

    node_id: str
    addr: str  # address that other nodes' trainers reach
    slots: tuple[Slot, ...]
    port_low: Int  # first port that trainers of this node may use
    port_high: Int  # last one, inclusive
    job_id: str | None = None  # the only job that it serves; None: all jobs in `folders`
    folders: tuple[str, ...] = ()  # jobs it can run by `--jobs_dir`; unused where job_id is set
    stop_after_s: float | None = None  # None: its pods keep running while the server is away
    saves: bool = False  # it understands `NodePod.save`; clients of the version before do not
    gives_args: bool = False  # ... `NodePod.args`; such a job runs on no other node
    # The same as long as its log folder lives and its machine is up; "": of the version before.
    client: str = ""
    cpu_milli: Int = 0  # thousandths of a processor core; 0: not known, not limited
    memory_mb: Int = 0  # 10**6 bytes; 0: not known, not limited

    def __post_init__(self) -> None:
        check_id("node_id", self.node_id)
        if self.client:
            check_id("client", self.client)
        check_range("cpu_milli", self.cpu_milli, 0, MAX_AMOUNT)
        check_range("memory_mb", self.memory_mb, 0, MAX_AMOUNT)
        if self.job_id is not None:
            check_id("job_id", self.job_id)
        if not self.addr or len(self.addr) > 255 or any(c in self.addr for c in " ,/;"):
            raise WireError(f"addr: expected a host name or an address, got {self.addr[:60]!r}")
        check_range("port_low", self.port_low, 1024, 65535)
        check_range("port_high", self.port_high, self.port_low, 65535)
        if self.stop_after_s is not None:
            check_range("stop_after_s", self.stop_after_s, *STOP_AFTER_RANGE_S)
        if not self.slots:
            raise WireError("slots: a node needs at least one slot")
        if len({slot.index for slot in self.slots}) != len(self.slots):
            raise WireError("slots: two slots have the same index")
        if self.port_high - self.port_low + 1 < 2 * len(self.slots):
            raise WireError(
                f"port_high: {self.port_high - self.port_low + 1} ports are too few for "
                f"{len(self.slots)} slots; give at least two per slot"
            )


class Save(Message, frozen=True, kw_only=True):
    """An order to a client: write the newest state that a pod's shim holds as a checkpoint.

    It goes where the training script has its checkpoints; where that cannot be written, or the
    script has none, to the run folder of the pod.
    """

    id: Int  # another number is another try
    spare: bool = False  # to the run folder only: another node may write to the script's path


class SavePhase(Enum):
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"


class SaveState(Message, frozen=True, kw_only=True):
    """The state of a `Save`, or of a save that a client began by itself as it was ended."""

    id: Int  # of the order; 0: the client began it by itself
    phase: SavePhase
    stage: Int = 0  # of the state; 0: not known yet
    step: Int = 0
    serial: Int = 0
    written_bytes: Int = 0  # the writer is alive as long as it changes
    total_bytes: Int = 0
    path: str = ""  # WRITTEN: the folder of checkpoints, or URL, that it is in
    spare: bool = False  # WRITTEN: that is a run folder, not where the script has its checkpoints
    reason: str = ""  # FAILED
    nothing: bool = False  # FAILED: the shims answer, and hold no state


class Saved(Message, frozen=True, kw_only=True):
    """Where the last state of a pause or an end was written."""

    stage: Int
    step: Int
    serial: Int = 0
    path: str  # folder of checkpoints, or URL
    node_id: str  # that wrote it; others may not see a local path
    spare: bool = False  # a run folder: a start does not look there by itself
    alone: bool = False  # trainers elsewhere did not see it there: a start waits for the node


class DesiredState(Enum):
    RUN = "run"
    HOLD = "hold"  # stop every process of the pod, keep its shim: it holds a snapshot
    KILL = "kill"  # SIGKILL the whole pod now (a change script or an operator asked for it)


def is_same_job(one: float, other: float) -> bool:
    """Whether two times of submission may be of one job; 0: not known (the version before)."""
    return not one or not other or one == other


class NodePod(Message, frozen=True, kw_only=True):
    """One pod as its node should have it. A pod that is not named is stopped and released."""

    pod_id: str
    job_id: str
    slots: tuple[Int, ...]
    want: DesiredState
    folder: str | None = None  # subfolder of --jobs_dir; None: the client's own script
    max_trainers: Int = 1
    grace_s: float = 15.0
    service: str | None = None  # None: not a teacher
    ports: tuple[Int, ...] = ()  # of a teacher, on its node's address; trainers' are in the stage
    save: Save | None = None  # None: nothing is to be written
    last_save: bool = False  # if the client is ended, it writes the state that its pods hold
    submitted_at: float = 0.0  # of the job: its id may be used again; 0: not known
    started: bool = False  # a client had it running: one that does not know it leaves it be
    args: tuple[str, ...] = ()  # of the script, behind the client's own

    def __post_init__(self) -> None:
        check_id("pod_id", self.pod_id)
        check_id("job_id", self.job_id)
        if self.service is not None:
            check_id("service", self.service)


class NodePlan(Message, frozen=True, kw_only=True):
    """Answer to a client's long poll: all of this node's pods, of all jobs."""

    server_id: str  # changes when the server restarts: register and report again
    revision: Int
    pods: tuple[NodePod, ...]
    heartbeat_s: float


class PodPhase(Enum):
    STARTING = "starting"  # package script, shim
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"  # no process but, perhaps, the shim that holds a snapshot


class SnapshotRef(Message, frozen=True, kw_only=True):
    """The newest complete snapshot that a pod's shim holds."""

    stage: Int
    step: Int  # global steps committed since the job began
    digest: str = ""  # of the layout: names, shapes and types
    serial: Int = 0  # states of one stage in order; what follows an epoch shares its last step

    def __post_init__(self) -> None:
        check_range("snapshot.stage", self.stage, 0, 2 * MAX_STAGE)  # the job's next one is higher


class PodState(Message, frozen=True, kw_only=True):
    pod_id: str
    job_id: str
    phase: PodPhase
    exit_code: Int | None = None  # None: not exited, or ended by a signal
    signal: Int | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    log_path: str = ""
    cpu_percent: float = 0.0
    memory_bytes: Int = 0
    save: SaveState | None = None  # None: nothing was to be written
    holds: bool = True  # EXITED: its shim is there, with what it holds
    snapshot: SnapshotRef | None = None  # EXITED: what it held then; None: nothing, or not known
    submitted_at: float = 0.0  # of the job that it was started for; 0: not known
    complete: bool = False  # its launcher has left, and has written that the training is


class SlotFault(Message, frozen=True, kw_only=True):
    """Something that is or was wrong with a GPU."""

    name: str  # "xid_79", "ecc_uncorrected", "gpu_lost": see docs/gpus.md
    text: str
    age_s: float = 0.0  # since it was seen last; 0: it lasts


class SlotUsage(Message, frozen=True, kw_only=True):
    index: Int
    utilization_percent: float = 0.0
    memory_used_bytes: Int = 0
    temperature_c: float | None = None  # None, here and below: not a GPU, or not known
    stranger: str = ""  # other processes on it
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: Int | None = None
    max_clock_mhz: Int | None = None
    throttled_by: str = ""  # "heat", "power limit", ...
    ecc_corrected: Int | None = None  # memory errors since the driver was loaded
    ecc_uncorrected: Int | None = None
    retired_pages: Int | None = None  # in its life; GPUs before Ampere
    remapped_rows: Int | None = None  # ... and since
    faults: tuple[SlotFault, ...] = ()  # newest first
    idle_s: float | None = None  # for how long no process was on it


class NodeLoad(Message, frozen=True, kw_only=True):
    """What a node has, and what of it is in use; in a container what that may have."""

    cpu_milli: Int | None = None  # thousandths of a core, of all processes; None: not known yet
    load_1m: float = 0.0  # processes that run or wait to, mean of a minute
    memory_used_mb: Int = 0  # 10**6 bytes
    memory_total_mb: Int = 0  # 0: not known
    disk: str = ""  # the folder of pods or of the client whose disk is fullest
    disk_free_mb: Int = 0
    disk_total_mb: Int = 0  # 0: not known
    sent_bytes_s: Int | None = None  # by all network interfaces but the loopback
    received_bytes_s: Int | None = None


class NodeReport(Message, frozen=True, kw_only=True):
    """Heartbeat of a client, sent every `heartbeat_s` and at once when a pod's phase changes."""

    node_id: str
    pods: tuple[PodState, ...] = ()
    slots: tuple[SlotUsage, ...] = ()
    leaving: bool = False  # the client ends in an orderly way and has stopped its pods
    draining: str = ""  # why its pods are to leave, while it waits for that; "": they may stay
    client: str = ""  # as in Node
    foreign_cpu_milli: Int | None = None  # that processes use which are no pods'; None: not known
    foreign_memory_mb: Int | None = None  # ... and of memory
    sent_ms: Int = 0  # by a clock of the client that is never set; 0: not said
    load: NodeLoad | None = None  # None: not known

    def __post_init__(self) -> None:
        for field in ("foreign_cpu_milli", "foreign_memory_mb"):
            if (value := getattr(self, field)) is not None:
                check_range(field, value, 0, MAX_AMOUNT)


# --- stages: launcher <-> server --------------------------------------------------------------


class Way(Enum):
    """How a change of stage happens."""

    START = "start"  # nothing runs: a first start, a resume, a recovery
    STOP = "stop"  # trainers that never called the elastic loop: SIGTERM, then start again
    DRAIN = "drain"  # agree on a step, put the state away, then start
    REPLACE = "replace"  # the next stage's trainers are ready before the cut
    JOIN = "join"  # trainers that stay form the next group while they train in the old one


class Order(Enum):
    """What a pod should do about one stage."""

    PREPARE = "prepare"  # be there; no trainer yet, unless the way is replace or join
    START = "start"  # start this stage's trainers: form the group, restore, then wait for GO
    GO = "go"  # the stage is committed: train
    CUT = "cut"  # agree on a step, finish it, put the state away, park
    RESUME = "resume"  # the change was abandoned: parked trainers go on
    END = "end"  # the stage is over: stop its trainers, keep the launcher


class RestoreFrom(Message, frozen=True, kw_only=True):
    """Where a stage's state comes from. Without it: the newest intact checkpoint, else afresh."""

    stage: Int
    step: Int
    pods: tuple[str, ...]  # their shims hold it
    serial: Int = 0  # as of SnapshotRef
    # Exactly this state, and every node of the stage has a pod that holds it: no trainer
    # needs to ask the others.
    local_on_all_nodes: bool = False
    path: str = ""  # no shim has it: it is a checkpoint below this folder or URL
    spare: bool = False  # ... a run folder, which is the only copy
    away: bool = False  # ... and no pod of the stage is on the node that wrote it


class PlanPod(Message, frozen=True, kw_only=True):
    pod_id: str
    pod_rank: Int
    node_id: str
    addr: str
    slots: tuple[Int, ...]
    ranks: tuple[Int, ...]
    ports: tuple[Int, ...]  # one per rank


class StagePlan(Message, frozen=True, kw_only=True):
    """One stage as every pod of it must see it, with this pod's order."""

    job_id: str
    stage: Int
    flag: Int  # the original's count of committed changes; -1 is the first stage
    way: Way
    order: Order
    attempt: Int = 0  # +1 with new ports; a START with a new attempt starts the trainers again
    pods: tuple[PlanPod, ...]
    master: str  # "addr:port" of rank 0
    restore_from: RestoreFrom | None = None  # None: checkpoint or afresh
    max_trainers: Int
    durable: bool = False  # with CUT: no stage follows: a checkpoint in work is finished first
    patient: bool = False  # with CUT: trainers stay, so none parks within a step
    cut: Int = 0  # CUT: its number in this stage, the lower ones are off; else: all up to it are
    kill_ranks: tuple[tuple[str, Int], ...] = ()  # (kill id, rank): SIGKILL that trainer, once
    policy: str = "fixed_global"  # of the job, for a training script that names none
    # Sets of pods without any of which the prepared trainers could take over as well: for each
    # they form a group of all others, beside the one of all.
    survivable_failures: tuple[tuple[str, ...], ...] = ()
    missing_pods: tuple[
        str, ...
    ] = ()  # one of `survivable_failures`, whose pods are gone: `pods` are the others
    halt: str = ""  # with CUT: the job is to "pause" or to "stop"; "": neither
    submitted_at: float = 0.0  # of the job: ids are used again; 0: a server of the version before
    take_over: bool = False  # of the job
    min_trainers: Int = 0  # of the job; 0: a server of the version before

    @property
    def world_size(self) -> int:
        return sum(len(pod.ranks) for pod in self.pods)


class HangLimits(Message, frozen=True, kw_only=True):
    """For how long a trainer may give no sign of life, by what it does, before that is said."""

    step_s: float = 60.0  # in a step, at least; longer where steps take long:
    steps: float = 20.0  # so many times as long as a step usually takes
    first_s: float = 600.0  # before and in the first steps of a process, which may compile
    data_s: float = 600.0  # while it waits for data
    evaluation_s: float = 1800.0  # in a batch of an evaluation, and between two epochs
    saving_s: float = 1800.0  # while it takes a snapshot, or waits for a checkpoint

    def __post_init__(self) -> None:
        check_range("hang_limits.steps", self.steps, 1, 1e6)
        for field in ("step_s", "first_s", "data_s", "evaluation_s", "saving_s"):
            check_range(f"hang_limits.{field}", getattr(self, field), 0.1, MAX_RUN_TIME_S)


class PodOrders(Message, frozen=True, kw_only=True):
    """Answer to a launcher's long poll: at most the active stage and the one in preparation."""

    server_id: str  # changes when the server restarts: attach again
    revision: Int
    plans: tuple[StagePlan, ...]  # none where the revision is the one asked with
    heartbeat_s: float
    leave: bool = False  # no stage needs this pod any more: end the trainers and exit 0
    spares: Int = 0  # warm processes that the launcher is to keep
    adapter: str = ""  # module that they import, as the job's trainers have said; "": not known
    hang_limits: HangLimits | None = None  # None: a server of the version before
    hang_kills: bool = False  # a trainer that hangs for ten times as long as its limit is killed


class ReportKind(Enum):
    READY = "ready"  # PREPARE done: launcher is there (replace, join: trainers are, too)
    STARTED = "started"  # START: every trainer process has been spawned
    LOADED = "loaded"  # START: every trainer has formed the group and restored its state
    FIRST_STEP = "first_step"
    PROGRESS = "progress"  # heartbeat: step, metrics, newest snapshot
    DRAINED = "drained"  # CUT done: parked after `step`
    ENDED = "ended"  # END done: no trainer of that stage is left in this pod
    FAILED = "failed"  # a trainer died; the launcher has not touched the others
    PORT_TAKEN = "port_taken"  # START refused: allocate other ports
    CANNOT_JOIN = "cannot_join"  # PREPARE of join refused: change in another way
    STAGE_TOO_LOW = "stage_too_low"  # the checkpoint path holds stages up to `highest_stage`
    DONE = "done"  # training is complete and its final checkpoint has its manifest
    EXITED = "exited"  # the launcher is about to exit with `code`; its script may go on
    ALIVE = "alive"  # heartbeat where there is no PROGRESS: the launcher lives, no more
    HUNG = "hung"  # trainer `rank` has given no sign of life for `hung_s`; 0: now it has


class RaisedError(Message, frozen=True, kw_only=True):
    """One Python exception, as the trainer that it ended described it."""

    types: tuple[str, ...]  # its class, then the base classes; built-in ones without a module
    text: str = ""
    errno: Int | None = None  # None: it is no OSError, or one without a number
    at: str = ""  # FILE:LINE of the innermost frame; "": not known

    def __post_init__(self) -> None:
        if not self.types:
            raise WireError("types: expected the class of the error, got none")
        if len(self.types) > 100 or max(len(self.text), *map(len, self.types)) > MAX_ERROR_CHARS:
            raise WireError(f"text: at most {MAX_ERROR_CHARS} characters, and 100 types")


class TrainerError(Message, frozen=True, kw_only=True):
    """The Python exception that ended a trainer, and where the training then was."""

    chain: tuple[RaisedError, ...]  # itself, then its causes and contexts
    where: str = ""  # FILE:LINE of the innermost frame in the user's own files
    step: Int | None = None  # global steps committed; None: it was not in the elastic loop
    hint: str = ""  # what the trainer adds to explain it
    traceback: str = ""  # its end, as Python prints it; "": a trainer of the version before

    def __post_init__(self) -> None:
        if len(self.traceback) > 2 * MAX_ERROR_CHARS:
            raise WireError(f"traceback: at most {2 * MAX_ERROR_CHARS} characters")
        if not 1 <= len(self.chain) <= 100:
            raise WireError(f"chain: expected 1 to 100 errors, got {len(self.chain)}")

    def __str__(self) -> str:
        error = self.chain[0]
        text = " ".join(error.text.split())
        if len(text) > SHOWN_CHARS and not error.types[0].startswith("pod_runtime."):
            text = text[:SHOWN_CHARS]  # EDL's own errors end with the remedy
        parts = (self.where or error.at, error.types[0].rpartition(".")[2], text)
        return ": ".join(part for part in parts if part) + (f"; {self.hint}" if self.hint else "")


class RankPace(Message, frozen=True, kw_only=True):
    """Where a rank's time went in some steps; what is left was evaluations and the like."""

    rank: Int
    steps: Int
    samples: Int  # that it has computed itself
    window_s: float
    computing_s: float  # steps, and what the script has around them
    reading_s: float  # waiting for data
    exchanging_s: float  # waiting for the other ranks, and summing with them
    saving_s: float  # snapshots, and waiting for checkpoints
    cpu_percent: float = 0.0  # of a core, that its process used
    memory_mb: Int = 0  # 10**6 bytes, that its process has in memory; 0: not known

    def __post_init__(self) -> None:
        check_range("paces.rank", self.rank, 0, 1_000_000)
        check_range("paces.steps", self.steps, 1, MAX_INT)
        for field in ("window_s", "computing_s", "reading_s", "exchanging_s", "saving_s"):
            check_range(f"paces.{field}", getattr(self, field), 0, MAX_RUN_TIME_S)


class PodReport(Message, frozen=True, kw_only=True):
    """A launcher's report. Idempotent, keyed by (pod, stage, kind)."""

    kind: ReportKind
    stage: Int
    attempt: Int = 0
    step: Int = 0  # global steps committed so far
    epoch: Int = 0
    snapshot: SnapshotRef | None = None  # None: this pod's shim holds none
    snapshot_is_current: bool = False  # DRAINED: a snapshot of just this state is on the pod's node
    durable: str = ""  # DRAINED: the path of checkpoints that a trainer has written it to; "": none
    rank: Int | None = None  # FAILED: of the trainer; None: the launcher itself failed
    code: Int | None = None  # FAILED, EXITED: exit code, negative for a signal
    reason: str = ""
    error: TrainerError | None = None  # FAILED: the trainer's exception; None: not known
    peer_lost: bool = False  # FAILED: a victim of another trainer's death, not the cause
    elastic: bool = False  # a trainer of this stage has called the elastic loop
    joins: bool = False  # all its trainers can form the next group while they train
    adapter: str = ""  # module of their framework's adapter; "": not known
    highest_stage: Int = 0  # STAGE_TOO_LOW
    total_steps: Int | None = None  # None: not known
    step_s: float | None = None  # mean duration of recent steps; None: no step yet
    metrics: dict[str, float] | None = None  # None: unchanged
    # How many epochs were over when the script logged a metric, by its name. One that is not among
    # `metrics` was no finite number. None: it has logged none, or the launcher is of the version
    # before.
    metric_epochs: dict[str, Int] | None = None
    promise: str = ""  # what the training promises, for people; "": not known
    # Why a checkpoint, or a snapshot, is not written; "": it is. None: not known, or another's.
    checkpoint_error: str | None = None
    submitted_at: float = 0.0  # of the job that the pod was started for; 0: not known
    hung_s: float = 0.0  # HUNG; FAILED: it was killed, as it had given no sign of life for so long
    paces: tuple[RankPace, ...] = ()  # PROGRESS: of its trainers; each is sent once
    events: tuple[str, ...] = ()  # FAILED: what was seen from outside, as `FailureRule.event`
    last_lines: tuple[str, ...] = ()  # FAILED: the last that the trainer wrote

    def __post_init__(self) -> None:
        check_range("highest_stage", self.highest_stage, 0, MAX_STAGE)
        check_range("hung_s", self.hung_s, 0, MAX_RUN_TIME_S)


class PodStagePhase(Enum):
    """How far a pod is with one stage."""

    # As its launcher tells it.
    READY = "idle"  # the launcher is there (replace, join: its trainers are, too)
    STARTED = "starting"  # every trainer process has been spawned
    LOADED = "loaded"
    TRAINING = "training"
    PARKED = "parked"
    FAILED = "failed"  # a trainer died; others may be there
    ENDED = "ended"  # confirmed: no trainer of the stage is left in the pod
    # As only the server knows it.
    ABSENT = "absent"
    CUTTING = "cutting"  # told to cut; whether it trains or has parked is not known
    LEFT = "left"  # the launcher exited 0: the trainers are done, the pod's script may go on
    FINISHED = "finished"  # the pod exited 0: its training is complete
    LOST = "lost"  # given up without having been reached


LAUNCHER_PHASES = (
    PodStagePhase.READY,
    PodStagePhase.STARTED,
    PodStagePhase.LOADED,
    PodStagePhase.TRAINING,
    PodStagePhase.PARKED,
    PodStagePhase.FAILED,
    PodStagePhase.ENDED,
)


class Attach(Message, frozen=True, kw_only=True):
    """All that a launcher knows; sent first, and again whenever the server has restarted."""

    pod_id: str
    node_id: str
    pid: Int
    highest_stage: Int = 0  # found in the checkpoint path, 0 for none or unknown
    stage: Int = 0  # the newest stage it has trainers (or had them) for; 0: none yet
    attempt: Int = 0
    phase: PodStagePhase = PodStagePhase.READY  # of `stage`
    step: Int = 0
    snapshot: SnapshotRef | None = None  # None: its shim holds none
    elastic: bool = False
    done: bool = False
    failure: PodReport | None = None  # what it reported last, where phase is FAILED
    submitted_at: float = 0.0  # of the job that the pod was started for; 0: not known

    def __post_init__(self) -> None:
        check_id("pod_id", self.pod_id)
        check_id("node_id", self.node_id)
        check_range("highest_stage", self.highest_stage, 0, MAX_STAGE)
        check_range("stage", self.stage, 0, 2 * MAX_STAGE)
        if self.phase not in LAUNCHER_PHASES:
            raise WireError(f"phase: {self.phase.value!r} is no phase that a launcher can be in")


# --- jobs: users <-> server -------------------------------------------------------------------


class JobState(Enum):
    WAITING = "WAITING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PREPARING = "PREPARING"
    CUTTING_OVER = "CUTTING_OVER"
    RECOVERING = "RECOVERING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class JobKind(Enum):
    TRAINING = "training"
    TEACHER = "teacher"  # its pods are teacher servers: no stages, no ranks, added one by one


class ScriptKind(Enum):
    NONE = "none"
    ALTERNATE = "alternate"  # the original's
    TIMELINE = "timeline"
    WALK = "walk"
    TRACE = "trace"


class ScriptSpec(Message, frozen=True, kw_only=True):
    """Which changes fall due when. Only the fields of its kind count."""

    kind: ScriptKind = ScriptKind.NONE
    interval_s: float = 900.0  # alternate, walk: time between changes
    del_pods: Int = 1  # alternate: pods removed in one step
    add_pods: Int = 1  # alternate: pods added in one step
    text: str = ""  # timeline: YAML; trace: CSV
    seed: Int = 0  # walk
    min_pods: Int = 1  # walk
    max_pods: Int | None = None  # walk; None: the job's

    def __post_init__(self) -> None:
        check_range("interval_s", self.interval_s, 0.05, 366 * 86400)
        check_range("del_pods", self.del_pods, 0, 4096)
        check_range("add_pods", self.add_pods, 0, 4096)
        check_range("min_pods", self.min_pods, 1, 4096)
        if self.max_pods is not None:
            check_range("max_pods", self.max_pods, self.min_pods, 4096)
        if len(self.text) > 1_000_000:
            raise WireError(f"text: at most 1000000 characters, got {len(self.text)}")


# The default of our programs. A job that is submitted by the bare API has none.
USUAL_SPARES = 1


class JobSpec(Message, frozen=True, kw_only=True):
    """What a user submits. It counts pods, not slots; a pod has `slots_per_pod` trainers."""

    job_id: str
    kind: JobKind = JobKind.TRAINING
    service: str | None = None  # of teachers: the name that students ask for; None: a training
    min_pods: Int = 1  # teachers: 0 means none while there are no students
    max_pods: Int = 1
    pods: Int | None = None  # at the first start; None: max_pods, of teachers min_pods
    slots_per_pod: Int = 1
    folder: str | None = None  # subfolder of the clients' --jobs_dir; None: their own script
    args: tuple[str, ...] = ()  # of train.sh, or of the clients' own script, behind its own
    script: ScriptSpec = ScriptSpec()
    policy: str = "fixed_global"
    overlap: str = "auto"  # on, off, join, auto; `moves.choose_way` says what they mean
    spares: Int = 0
    standby: Int = 0
    prepare_timeout_s: float = 120.0
    start_timeout_s: float = 60.0
    expected_nodes: Int = 1  # a first start waits for so many, at most start_timeout_s
    grace_s: float = 15.0
    keep_failed_s: float = 3600.0  # how long a state that cannot be written stays in memory
    max_failures: Int | None = 20  # None: no limit
    max_preemptions: Int | None = None
    max_resizes: Int | None = None
    max_restarts_without_progress: Int = 3
    demand_timeout_s: float = 300.0  # teachers: after so long without demand, min_pods are enough
    demand_interval_s: float = 2.0  # teachers: of several reports in that time, one counts
    take_over: bool = False  # replace another training that has the folder of checkpoints
    share: bool = False  # the server chooses how many pods it has: none, or min_pods to max_pods
    priority: Int = 0  # of a shared job, as all below: the highest goes first
    user: str = ""  # whose share of the cluster it is; "": all such jobs are of one user
    after: tuple[str, ...] = ()  # jobs that must have SUCCEEDED before it starts
    cpu_milli: Int = 0  # that a trainer needs, in thousandths of a core; 0: not counted
    memory_mb: Int = 0  # that a trainer needs, in 10**6 bytes; 0: not counted
    max_run_time_s: float | None = None  # of running, not waiting; then it is stopped; None: any
    keeps_least: bool = False  # once it runs: no other job and no node's limit takes its least
    hang_policy: str = "restart"  # say, restart or fail, at ten times a limit of `hang_limits`
    hang_limits: HangLimits = HangLimits()
    straggler_policy: str = "say"  # or evict: its pod moves to a free slot elsewhere
    failure_policy: tuple[FailureRule, ...] = ()  # they come before those of EDL

    def __post_init__(self) -> None:
        check_id("job_id", self.job_id)
        if len(self.failure_policy) > MAX_RULES:
            raise WireError(
                f"failure_policy: at most {MAX_RULES} rules, got {len(self.failure_policy)}"
            )
        if self.folder is not None:
            check_id("folder", self.folder)
        _check_args(self.args)
        _check_kind(self)
        _check_share(self)
        check_range("min_pods", self.min_pods, 0 if self.kind is JobKind.TEACHER else 1, 4096)
        check_range("max_pods", self.max_pods, 1, 4096)
        if self.max_pods < self.min_pods:
            raise WireError(
                f"max_pods: must be at least min_pods ({self.min_pods}), got {self.max_pods}"
            )
        if self.pods is not None:
            check_range("pods", self.pods, self.min_pods, self.max_pods)
        check_range("slots_per_pod", self.slots_per_pod, 1, 4096)
        check_range("spares", self.spares, 0, 64)
        check_range("standby", self.standby, 0, 2)
        check_range("prepare_timeout_s", self.prepare_timeout_s, 1, 86400)
        check_range("start_timeout_s", self.start_timeout_s, 0, 86400)
        check_range("expected_nodes", self.expected_nodes, 1, 4096)
        check_range("grace_s", self.grace_s, 0, 3600)
        check_range("keep_failed_s", self.keep_failed_s, 0, 366 * 86400)
        check_range("max_restarts_without_progress", self.max_restarts_without_progress, 1, 10000)
        check_range("demand_timeout_s", self.demand_timeout_s, 1, 366 * 86400)
        check_range("demand_interval_s", self.demand_interval_s, 0.05, 3600)
        for field in ("max_failures", "max_preemptions", "max_resizes"):
            value = getattr(self, field)
            if value is not None:
                check_range(field, value, 0, 1_000_000)
        if self.overlap not in ("on", "off", "join", "auto"):
            raise WireError(f"overlap: expected on, off, join or auto, got {self.overlap!r}")
        if self.standby and self.overlap in ("off", "join"):
            raise WireError(
                f"standby: {self.standby} needs trainers beside those that train, which overlap "
                f"{self.overlap!r} forbids; use overlap auto or on, or standby 0"
            )
        if self.hang_policy not in HANG_POLICIES:
            raise WireError(
                f"hang_policy: expected {', '.join(HANG_POLICIES)}, got {self.hang_policy!r}"
            )
        if self.straggler_policy not in STRAGGLER_POLICIES:
            raise WireError(
                f"straggler_policy: expected {', '.join(STRAGGLER_POLICIES)}, got "
                f"{self.straggler_policy!r}"
            )
        if self.straggler_policy == "evict" and self.share:
            raise WireError(
                "straggler_policy: evict: where the pods of a shared job are is the server's "
                "choice; leave one of the two out"
            )
        if self.policy not in ("fixed_global", "linear"):
            raise WireError(f"policy: expected fixed_global or linear, got {self.policy!r}")

    @property
    def first_pods(self) -> int:
        if self.pods is not None:
            return self.pods
        return self.min_pods if self.kind is JobKind.TEACHER else self.max_pods

    @property
    def min_trainers(self) -> int:
        return self.min_pods * self.slots_per_pod

    @property
    def max_trainers(self) -> int:
        return self.max_pods * self.slots_per_pod


_TRAINING_ONLY = {  # field -> its default
    "script": ScriptSpec(),
    "policy": "fixed_global",
    "overlap": "auto",
    "spares": 0,
    "standby": 0,
    "prepare_timeout_s": 120.0,
    "start_timeout_s": 60.0,
    "expected_nodes": 1,
    "keep_failed_s": 3600.0,
    "max_resizes": None,
    "take_over": False,
    "share": False,
    "hang_policy": "restart",
    "hang_limits": HangLimits(),
    "straggler_policy": "say",
    "failure_policy": (),
}
_SHARED_ONLY = {  # field -> its default
    "priority": 0,
    "user": "",
    "after": (),
    "cpu_milli": 0,
    "memory_mb": 0,
    "max_run_time_s": None,
    "keeps_least": False,
}


def _check_args(args: tuple[str, ...]) -> None:
    """Raise a WireError where no program could be started with these arguments."""
    if len(args) > MAX_ARGS:
        raise WireError(f"args: at most {MAX_ARGS}, got {len(args)}")
    for arg in args:
        if len(arg) > MAX_ARG_CHARS or "\0" in arg:
            raise WireError(
                f"args: at most {MAX_ARG_CHARS} characters each, none of them NUL, got {arg[:60]!r}"
            )


def _check_kind(spec: JobSpec) -> None:
    """Refuse fields that mean nothing for a job of this kind.

    Raises:
        WireError: a field that only the other kind has is set, or one is missing.
    """
    if spec.kind is JobKind.TRAINING:
        if spec.service is not None:
            raise WireError(
                f"service: only jobs of kind teacher serve one, got {spec.service[:60]!r}; "
                "leave it out, or give the kind"
            )
        return
    if spec.service is None:
        raise WireError("service: missing; a job of kind teacher names the service of its teachers")
    check_id("service", spec.service)
    for field, default in _TRAINING_ONLY.items():
        if getattr(spec, field) != default:
            raise WireError(
                f"{field}: means nothing for a job of kind teacher, whose pods have no stages; "
                "leave it out"
            )


def _check_share(spec: JobSpec) -> None:
    """Refuse what a job that shares the cluster cannot have, and what only such a job can.

    Raises:
        WireError: one of these is set, or is out of range.
    """
    if not spec.share:
        for field, default in _SHARED_ONLY.items():
            if getattr(spec, field) != default:
                raise WireError(
                    f"{field}: only of a job that shares the cluster; add share, or leave it out"
                )
        return
    if spec.script.kind is not ScriptKind.NONE:
        raise WireError(
            "script: the server chooses how many pods a shared job has, so a change script cannot; "
            "leave out script or share"
        )
    if spec.pods is not None:
        raise WireError(
            f"pods: the server chooses how many pods a shared job has; give min_pods and max_pods "
            f"instead of {spec.pods}, or leave out share"
        )
    if spec.expected_nodes > 1:
        raise WireError(
            f"expected_nodes: a shared job starts as soon as its min_pods have a place; leave out "
            f"{spec.expected_nodes} or share"
        )
    check_range("priority", spec.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if spec.user:
        check_id("user", spec.user)
    if len(spec.after) > MAX_AFTER:
        raise WireError(f"after: at most {MAX_AFTER} jobs, got {len(spec.after)}")
    for job_id in spec.after:
        check_id("after", job_id)
        if job_id == spec.job_id:
            raise WireError(f"after: {job_id!r} is the job itself; name others")
    check_range("cpu_milli", spec.cpu_milli, 0, MAX_AMOUNT)
    check_range("memory_mb", spec.memory_mb, 0, MAX_AMOUNT)
    if spec.max_run_time_s is not None:
        check_range("max_run_time_s", spec.max_run_time_s, 1, MAX_RUN_TIME_S)


class JobPod(Message, frozen=True, kw_only=True):
    pod_id: str
    pod_rank: Int
    node_id: str
    addr: str
    slots: tuple[Int, ...]
    ranks: tuple[Int, ...]
    phase: str  # "running", "preparing", "leaving" or "holding"; of teachers also "starting"
    log_path: str = ""
    ports: tuple[Int, ...] = ()  # teachers: where to listen
    cpu_percent: tuple[float, ...] = ()  # of a core, by trainer, as of `ranks`; (): not known
    memory_mb: tuple[Int, ...] = ()  # 10**6 bytes, by trainer; (): not known


class StageRecord(Message, frozen=True, kw_only=True):
    """A stage of a job, committed or not."""

    stage: Int
    flag: Int
    way: Way
    pods: Int
    trainers: Int
    reason: str  # why it was made
    outcome: str = "preparing"  # "preparing", "committed", "ended" or "abandoned: why"
    wanted_at: float = 0.0  # all *_at: seconds since 1970
    committed_at: float | None = None  # None: never
    first_step_at: float | None = None  # None: not yet
    ended_at: float | None = None  # None: it runs
    first_step: Int | None = None  # of the job, 1-based; None: no step yet
    last_step: Int | None = None  # None: no step yet
    pause_s: float | None = None  # last old step's end to first new step's end; None: not known
    redone_steps: Int = 0


class Account(Message, frozen=True, kw_only=True):
    """Where a job's time went; the parts add up to it."""

    training_s: float = 0.0  # of teachers: with one at least that runs
    preparing_s: float = 0.0  # training while the next stage is prepared, so slower
    cutting_over_s: float = 0.0
    recovering_s: float = 0.0
    waiting_s: float = 0.0  # for nodes, pods, a first start, an operator, the server
    paused_s: float = 0.0
    hung_s: float = 0.0  # no step was made, and a trainer gave no sign of life
    reading_s: float = 0.0  # the slowest rank waited for data
    saving_s: float = 0.0  # ... or took a snapshot, or waited for a checkpoint
    straggling_s: float = 0.0  # ... or computed for longer than the median rank

    @property
    def total_s(self) -> float:
        return (
            self.training_s
            + self.preparing_s
            + self.cutting_over_s
            + self.recovering_s
            + self.waiting_s
            + self.paused_s
            + self.hung_s
            + self.reading_s
            + self.saving_s
            + self.straggling_s
        )


class FirstError(Message, frozen=True, kw_only=True):
    """What was heard first of the errors that ended a stage, or a change."""

    stage: Int
    at: float  # seconds since 1970, when the server heard it
    text: str  # whose it is, FILE:LINE, the error
    traceback: str = ""  # its end; "": it was no Python exception, or none was told
    is_of_victim: bool = False  # of a trainer that lost a peer: the cause is not known yet


class Demand(Message, frozen=True, kw_only=True):
    """What the students of a service report together; posted every 2 s, by a discovery service."""

    service: str
    students: Int
    wait_share: float  # mean share of their time, 0 to 1, in which they wait for predictions
    samples_per_s: float  # of all of them
    teachers: Int | None = None  # registered under the service; None: not known

    def __post_init__(self) -> None:
        check_id("service", self.service)
        check_range("students", self.students, 0, 1_000_000)
        check_range("wait_share", self.wait_share, 0, 1)
        check_range("samples_per_s", self.samples_per_s, 0, 1e15)
        if self.teachers is not None:
            check_range("teachers", self.teachers, 0, 1_000_000)


class DemandAnswer(Message, frozen=True, kw_only=True):
    """How many teachers there are and should be, after a demand."""

    server_id: str
    job_id: str
    running: Int  # pods
    wanted: Int


class TeacherStatus(Message, frozen=True, kw_only=True):
    """What only a job of kind teacher has."""

    service: str
    running: Int  # pods that run; others may be starting or leaving
    wanted: Int
    chosen_by: str  # "demand", or "resize": a user has fixed the number
    why: str  # the reason for the wanted number
    demand: Demand | None  # None: none was ever posted
    demand_age_s: float | None  # None: as above


class Allotment(Message, frozen=True, kw_only=True):
    """How many pods the server has decided that a shared job has, and why."""

    pods: Int  # 0: it waits
    reason: str
    since: float  # seconds since 1970
    nodes: dict[str, Int]  # node -> pods


class LossPoint(Message, frozen=True, kw_only=True):
    """The global training loss at a step."""

    step: Int
    loss: float


class JobStatus(Message, frozen=True, kw_only=True):
    """A job as users see it."""

    job_id: str
    state: JobState
    reason: str
    revision: Int
    spec: JobSpec
    stage: Int
    flag: Int
    pods: tuple[JobPod, ...]
    target_pods: Int
    queued_changes: tuple[str, ...]
    step: Int
    epoch: Int
    total_steps: Int | None
    metrics: dict[str, float]
    failures: Int
    preemptions: Int
    resizes: Int
    redone_steps: Int
    script_elapsed_s: float
    estimated_run_time_s: float | None  # from POST job_runtime_static; None: not known
    submitted_at: float  # seconds since 1970
    account: Account
    stages: tuple[StageRecord, ...]
    teachers: TeacherStatus | None  # None: a training
    promise: str = ""  # what the training promises when pods change; "": not known
    warnings: tuple[str, ...] = ()  # the job goes on, but perhaps not as its user wants
    saving: SaveState | None = None  # what is being written now; None: nothing is
    saved: Saved | None = None  # what was written at the last pause or end; None: nothing was
    allotment: Allotment | None = None  # None: not a shared job, or nothing is decided yet
    error: FirstError | None = None  # of the last stage that failed; None: none did
    metric_epochs: dict[str, Int] = {}  # as of PodReport  # noqa: RUF012
    loss_curve: tuple[LossPoint, ...] = ()  # over all steps, evenly thinned; steps rise
    unreachable: bool = False  # it waits for pods that cannot be reached, and may still run


class JobEvent(Message, frozen=True, kw_only=True):
    """Something that happened to a job, for `edl events` and the page."""

    number: Int
    at: float  # seconds since 1970
    job_id: str
    stage: Int
    text: str


class RunTime(Message, frozen=True, kw_only=True):
    """An original client's estimate of how long a job takes."""

    job_id: str
    estimated_run_time: float  # seconds

    def __post_init__(self) -> None:
        check_range("estimated_run_time", self.estimated_run_time, 0, MAX_RUN_TIME_S)


class Resize(Message, frozen=True, kw_only=True):
    pods: Int | None  # None: for teachers only: their number follows the demand again
    assume_dead: bool = False  # treat unreachable pods as stopped

    def __post_init__(self) -> None:
        if self.pods is not None:
            check_range("pods", self.pods, 1, 4096)


class Kill(Message, frozen=True, kw_only=True):
    """A pod or a trainer to kill: exactly one of the two."""

    pod_id: str | None = None  # kill that whole pod; None: a rank is named
    rank: Int | None = None  # kill that trainer; None: a pod is named

    def __post_init__(self) -> None:
        if (self.pod_id is None) == (self.rank is None):
            raise WireError("pod_id: name either a pod_id or a rank")
        if self.pod_id is not None:
            check_id("pod_id", self.pod_id)
        if self.rank is not None:
            check_range("rank", self.rank, 0, 1_000_000)


class NodeStatus(Message, frozen=True, kw_only=True):
    node: Node
    alive: bool
    last_seen_at: float
    report: dict[str, Any]
    limit: Int | None = None  # of slots for shared jobs; None: all
    quarantines: tuple[Quarantine, ...] = ()  # that are in force
    shortage: str = ""  # of what it is short, so that it gets no new pods; "": of nothing
    draining: str = ""  # why pods of all jobs leave it; "": they do not
    drains: Int = 0  # how often an operator has drained it since the server began


class NodeLimit(Message, frozen=True, kw_only=True):
    """How many slots of a node shared jobs may have together; None: all that are free."""

    slots: Int | None
    drain: bool = False  # the pods of all jobs leave, shared or not; `slots` is 0
    also: tuple[str, ...] = ()  # further nodes, limited so by the same decision: one change

    def __post_init__(self) -> None:
        for node_id in self.also:
            check_id("also", node_id)
        if self.slots is not None:
            check_range("slots", self.slots, 0, 4096)
        if self.drain and self.slots != 0:
            raise WireError(f"drain: a node that is drained has 0 slots, got slots={self.slots}")


class SlotOrder(Message, frozen=True, kw_only=True):
    """Put a slot of a node in quarantine, or take it back."""

    slot: Int
    take_back: bool = False
    why: str = "an operator asked for it"

    def __post_init__(self) -> None:
        check_range("slot", self.slot, 0, 4095)
        if not 0 < len(self.why) <= SHOWN_CHARS:
            raise WireError(f"why: expected 1 to {SHOWN_CHARS} characters, got {len(self.why)}")


class SharedNode(Message, frozen=True, kw_only=True):
    """A node as jobs share it."""

    node_id: str
    alive: bool
    slots: Int  # that are usable
    used_shared: Int  # slots that shared jobs hold
    used_others: Int  # ... and other jobs, teachers, strangers
    limit: Int | None = None  # of slots for shared jobs; None: all
    barred: str = ""  # why others of its slots get no pods; "": all do, or not said
    quarantine: str = ""  # why the pods on one of its slots leave that; "": all may stay
    closed: bool = False  # it gets no new pods: `slots` are those of pods that are there
    cpu_milli: Int = 0  # as of Node; 0: not known
    cpu_used_milli: Int = 0  # what shared jobs' trainers have by their specs, and foreign load
    memory_mb: Int = 0
    memory_used_mb: Int = 0
    gpu_percent: float | None = None  # mean use of its GPUs; None: it has none, or not known
    job_id: str | None = None  # the only job that it serves; None: those in `folders`
    folders: tuple[str, ...] = ()


class SharedJob(Message, frozen=True, kw_only=True):
    """A shared job that has not ended, in the order in which the queue serves them."""

    job_id: str
    user: str = ""
    priority: Int = 0
    state: JobState
    pods: Int  # that it has now
    allotted: Int  # that it is to have; 0: it waits
    min_pods: Int
    max_pods: Int
    slots_per_pod: Int = 1
    reason: str = ""  # of the allotment
    after: tuple[str, ...] = ()  # those of its spec that have not succeeded yet
    submitted_at: float  # seconds since 1970
    started_at: float | None = None  # its first start; None: not yet
    waited_s: float = 0.0  # in the queue, all times together
    remaining_s: float | None = None  # of work for one pod; None: not known
    step_s: dict[Int, float]  # pods -> seconds per step, as measured
    nodes: dict[str, Int]  # node -> pods that it has, or is to have
    since: float  # seconds since 1970: it waits, or has so many
    cpu_milli: Int = 0  # of a trainer, as of JobSpec
    memory_mb: Int = 0
    folder: str | None = None
    run_time_left_s: float | None = None  # until max_run_time_s ends it; None: it has none
    home: str = ""  # the node that has its state, on which its first pod is to be; "": any


class Sharing(Message, frozen=True, kw_only=True):
    """How jobs share the cluster now."""

    policy: str
    now: float = 0.0  # seconds since 1970
    nodes: tuple[SharedNode, ...] = ()
    jobs: tuple[SharedJob, ...] = ()


# --- what a route answers that answers no message from above --------------------------------------


class Health(Message, frozen=True, kw_only=True):
    server_id: str  # changes when the server restarts
    version: str = ""
    now: float = 0.0  # seconds since 1970
    warnings: tuple[str, ...] = ()  # what it cannot do now; told only to who shows the token


class PageLink(Message, frozen=True, kw_only=True):
    """Opens the status page in a browser, without the token."""

    path: str  # below the server's URL; it works once, for a quarter of an hour


class Acknowledgement(Message, frozen=True, kw_only=True):
    """A report has been received."""

    server_id: str  # changes when the server restarts: register or attach again
    # To a node that drains: whether jobs are leaving it by planned changes. None: it does not, or
    # the server is of the version before.
    moving: bool | None = None


class JobList(Message, frozen=True, kw_only=True):
    jobs: tuple[JobStatus, ...] = ()


class EventList(Message, frozen=True, kw_only=True):
    events: tuple[JobEvent, ...] = ()


class NodeList(Message, frozen=True, kw_only=True):
    nodes: tuple[NodeStatus, ...] = ()


class ScriptPreview(Message, frozen=True, kw_only=True):
    """What a change script would do, as lines."""

    timeline: tuple[str, ...]


class OriginalPod(Message, frozen=True, kw_only=True):
    """A pod as clients of the original see it."""

    pod_id: str
    running: bool = True
    addr: str
    pod_port: Int
    trainer_ports: tuple[Int, ...]
    gpus: tuple[Int, ...]


class OriginalPods(Message, frozen=True, kw_only=True):
    """What clients of the original poll."""

    job_id: str
    job_stage_flag: Int
    pods: tuple[OriginalPod, ...]


class ErrorText(Message, frozen=True, kw_only=True):
    """What every refused request is answered."""

    error: str
