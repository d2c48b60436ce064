"""Define a training job as plain values, which the server stores.

Pure, and without decisions: `machine.step` makes the next job from an event, `views` derives what
clients, launchers and users get.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec.structs import replace

from job_server.api.codec import Message
from job_server.api.wire import (
    Account,
    Allotment,
    DesiredState,
    FirstError,
    JobSpec,
    JobState,
    LossPoint,
    Node,
    Order,
    PlanPod,
    PodPhase,
    PodStagePhase,
    RankPace,
    RestoreFrom,
    Save,
    Saved,
    SaveState,
    SnapshotRef,
    StageRecord,
    Way,
)
from job_server.cluster.placement import Site, gather
from job_server.jobs.pod_reports import without
from job_server.jobs.work import Goal, SteppedJob

MAX_RECORDS = 1000  # a script that runs overnight must not grow the job without limit


class TrainingPod(Message, frozen=True, kw_only=True):
    """A pod that the job has been given and that is not yet confirmed gone."""

    pod_id: str
    site: Site
    desired: DesiredState | None = DesiredState.RUN  # None: released; its client must confirm
    planned: bool = False  # KILL: a change script or an operator asked for it
    launcher_done: bool = False  # its launcher has exited 0; its script may go on
    phase: PodPhase | None = None  # as its client reported last; None: not yet
    log_path: str = ""

    @property
    def released(self) -> bool:
        return self.desired is None

    @property
    def leaving(self) -> bool:
        """Whether it was let go. A pod that is to be killed still counts: its exit is evaluated."""
        return self.desired in (None, DesiredState.HOLD)

    @property
    def usable(self) -> bool:
        """Whether a next stage may count on it."""
        return self.desired is DesiredState.RUN and not self.launcher_done


TERMINATED = frozenset(
    {PodStagePhase.ENDED, PodStagePhase.LEFT, PodStagePhase.FINISHED}
)  # confirmed: it no longer trains
GONE = TERMINATED | {PodStagePhase.LOST}  # nothing more can be awaited from it
COMPLETED = (PodStagePhase.LEFT, PodStagePhase.FINISHED)  # it must not be started again
STARTUP_ORDER = (
    PodStagePhase.ABSENT,
    PodStagePhase.READY,
    PodStagePhase.STARTED,
    PodStagePhase.LOADED,
    PodStagePhase.TRAINING,
)  # in this order


class StagePod(Message, frozen=True, kw_only=True):
    pod: PlanPod
    phase: PodStagePhase = PodStagePhase.ABSENT
    step: int = 0  # PARKED: the last step before
    snapshot_is_current: bool = False  # PARKED: its node holds a snapshot of exactly this state
    durable: str = ""  # PARKED: the path to which a trainer has written this state; "": none


class CauseKind(Enum):
    FAILURE = "failure"  # counts against max_failures
    PREEMPTION = "preemption"  # counts against max_preemptions
    PLANNED = "planned"  # a kill that a change script or an operator asked for
    NEUTRAL = "neutral"  # no fault: a burnt stage number, a pause
    IGNORED = "ignored"  # a failure that the failure policy counts in no budget


class Fault(Message, frozen=True, kw_only=True):
    """A permanent error; `faults` decides which are."""

    who: str
    text: str  # FILE:LINE first
    mark: str  # equal for the same error at the same step
    at_once: bool = False  # a second try cannot end differently
    step: int | None = None  # None: not known
    why: str = ""  # at_once: why it is; "": as said above


class Avoided(Message, frozen=True, kw_only=True):
    """Slots that the job uses only where no others are free."""

    node_id: str
    slots: tuple[int, ...]
    ends_at: float
    why: str


class Cause(Message, frozen=True, kw_only=True):
    """Why a stage ended early."""

    kind: CauseKind
    text: str
    at: float
    faults: tuple[Fault, ...] = ()  # of all trainers that failed, in that order
    of_change: bool = False  # the stage was a change not yet committed: the old pods may succeed
    peer_lost: bool = False  # reported by a victim; the cause is not yet known
    no_memory_on: str = ""  # node where the kernel has killed a trainer for lack of memory
    counted: bool = False  # it is in the budgets


class JobStage(Message, frozen=True, kw_only=True):
    stage: int
    way: Way
    phase: Order  # what the change waits for: PREPARE, CUT, END, START; GO once committed
    since: float  # when the phase began, or the server restarted in it
    reason: str
    members: tuple[StagePod, ...]
    target: int  # number of pods that the job has once this is committed
    counts: bool = False  # a requested change: counts as a resize
    standby: bool = False  # it waits for a crash of the active stage
    survivable_failures: tuple[
        tuple[str, ...], ...
    ] = ()  # standby: sets of pods that it can go on without
    missing_pods: tuple[str, ...] = ()  # standby: the set that is gone
    attempt: int = 0
    restore_from: RestoreFrom | None = None  # None: not yet chosen, or the checkpoint
    base_step: int | None = None  # the step it began from; None: not known
    over: Cause | None = None  # None: active, or on its way
    end_since: float | None = None  # when its pods were first ordered to end it; None: not yet
    resuming: bool = False  # a cut was called off; some pods are not yet known to train again
    cut: int = 0  # number of orders to cut
    kill_ranks: tuple[tuple[str, int], ...] = ()
    committed_at: float | None = None  # None: not committed
    first_step_at: float | None = None  # None: no step yet

    @property
    def committed(self) -> bool:
        return self.committed_at is not None

    @property
    def pod_ids(self) -> tuple[str, ...]:
        return tuple(member.pod.pod_id for member in self.members)

    @property
    def trainers(self) -> int:
        return sum(len(member.pod.ranks) for member in self.members)

    @property
    def overlaps(self) -> bool:
        """Whether its trainers are prepared while those of the active stage train."""
        return self.way in (Way.REPLACE, Way.JOIN)

    @property
    def end_ordered(self) -> bool:
        """Whether its pods are ordered to end its trainers."""
        return self.end_since is not None

    @property
    def finishing(self) -> bool:
        return any(member.phase in COMPLETED for member in self.members)

    @property
    def stands_by(self) -> bool:
        """Whether it is ready to take over from a stage that crashes, and costs only memory."""
        return (
            self.standby and self.phase is Order.PREPARE and not self.any_in(PodStagePhase.ABSENT)
        )

    def member(self, pod_id: str) -> StagePod | None:
        """Return the member by pod id, None where the pod is not of this stage."""
        return next((m for m in self.members if m.pod.pod_id == pod_id), None)

    def with_member(self, member: StagePod) -> "JobStage":
        members = tuple(member if m.pod.pod_id == member.pod.pod_id else m for m in self.members)
        return replace(self, members=members)

    def pods_in(self, *phases: PodStagePhase) -> tuple[str, ...]:
        return tuple(member.pod.pod_id for member in self.members if member.phase in phases)

    def pods_not_in(self, *phases: PodStagePhase) -> tuple[str, ...]:
        return tuple(member.pod.pod_id for member in self.members if member.phase not in phases)

    def any_in(self, *phases: PodStagePhase) -> bool:
        return any(member.phase in phases for member in self.members)

    def all_in(self, *phases: PodStagePhase) -> bool:
        return all(member.phase in phases for member in self.members)


class HaltPhase(Enum):
    """How far a pause or an end has come."""

    WAIT = "wait"  # for a cut that was called off, or a change that has already drained
    CUT = "cut"
    SAVE = "save"  # a client writes the newest state; the trainers are parked or gone
    END = "end"
    RELEASE = "release"
    DONE = "done"


PHASES_WITH_CUT = (
    HaltPhase.CUT,
    HaltPhase.SAVE,
)  # in these, a stage that is not over is ordered to cut


class Halt(Message, frozen=True, kw_only=True):
    phase: HaltPhase
    since: float
    save: Save | None = None  # SAVE: the present order; None: none
    pod_id: str = ""  # ... to the client of this pod
    tried: tuple[str, ...] = ()  # SAVE: nodes that failed
    why_not: str = ""  # ... and why the last one did
    again_at: float | None = None  # SAVE: when all nodes are tried again; None: not all have failed
    kept_since: float | None = None  # since when the state waits in memory


class ManualChange(Message, frozen=True, kw_only=True):
    """A resize that waits until what is going on is over."""

    pods: int
    asked_at_s: float  # on the script's clock: scripted changes due before it go first
    not_before_s: float = 0.0  # on that clock, too: no change is made before


class Hang(Message, frozen=True, kw_only=True):
    """A trainer that has given no sign of life for too long, or is too slow."""

    stage: int
    rank: int
    text: str


class Absence(Message, frozen=True, kw_only=True):
    """A time without a server of which nobody knows yet what a stage did in it."""

    stage: int
    since: float
    away_s: float
    part: str  # of the account: where it belongs if the stage went on


class JobProgress(Message, frozen=True, kw_only=True):
    """What changes with every heartbeat and is not written each time."""

    step: int = 0
    best_step: int = 0  # the highest ever
    epoch: int = 0
    total_steps: int | None = None  # None: not known
    metrics: Mapping[str, float] = {}
    metric_epochs: Mapping[str, int] = {}  # as of PodReport
    loss_curve: tuple[LossPoint, ...] = ()
    promise: str = ""  # of the training, for people; "": not known
    checkpoint_error: str = ""  # why it, or a snapshot, is not written; "": it is
    stepped_at: float | None = None  # when a new step was last reported; None: never
    steps: Mapping[str, int] = {}  # pod -> step, of the active stage
    snapshots: Mapping[str, SnapshotRef] = {}  # pod -> newest
    heard: Mapping[str, float] = {}  # pod -> last report of its launcher
    joins: Mapping[str, bool] = {}  # pod -> its trainers can join
    missing: Mapping[str, float] = {}  # pod -> omitted since
    account: Account = Account()
    accrued_at: float = 0.0
    absence: Absence | None = None  # counted as waiting; None: what was done in each is known
    script_s: float = 0.0  # the change script's clock
    saving: SaveState | None = None  # of the client that was ordered to save; None: nothing yet
    saving_at: float = 0.0  # when that last changed
    hangs: tuple[Hang, ...] = ()  # those of stages that are over do not count
    paces: Mapping[int, RankPace] = {}  # rank -> newest, of `paced_stage`
    paced_stage: int = 0
    stragglers: tuple[Hang, ...] = ()  # ranks that make the others wait
    queue_reason: str = ""  # of a shared job: why it waits, or runs with so many pods

    def without_pod(self, pod_id: str) -> "JobProgress":
        """Forget what is known of a pod."""
        return replace(
            self,
            snapshots=without(self.snapshots, pod_id),
            heard=without(self.heard, pod_id),
            missing=without(self.missing, pod_id),
            joins=without(self.joins, pod_id),
            steps=without(self.steps, pod_id),
        )


# --- parts of a job, each changed by one module ---------------------------------------------------


class Budget(Message, frozen=True, kw_only=True):
    """Failures and preemptions so far, and when the next try may begin; see `accounting`."""

    failures: int = 0
    failures_in_row: int = 0  # no new step between them
    step_at_failure: int = 0
    faults: tuple[Fault, ...] = ()  # of the last failure that was counted
    preemptions: int = 0
    preemptions_in_row: int = 0
    step_at_preemption: int = 0
    retry_at: float = 0.0


class RetryLater(Message, frozen=True, kw_only=True):
    """When something that failed and that no user asked for is tried again; see `moves`."""

    retry_at: float = 0.0
    failures: int = 0  # in a row


class ChangeQueue(Message, frozen=True, kw_only=True):
    """What waits to be changed; see `changes`."""

    script_index: int = 0  # of the script's next change
    script_stored_s: float = 0.0  # the script's clock; a crash of the server may lose 5 s of it
    resize: ManualChange | None = None  # None: no resize waits


class Given(Message, frozen=True, kw_only=True):
    """Ids and ports that were used and must not be used again at once; see `allocation`."""

    pod_ids: tuple[str, ...] = ()  # given out under this flag
    flag: int = 0
    last_ports: Mapping[str, int] = {}  # node -> the last port


class Lineage(Message, frozen=True, kw_only=True):
    """How the steps of one stage follow those of the stage before; see `accounting`."""

    stopped_at: float | None = None  # when the last old step ended; None: it trains
    previous_last_step: int = 0  # the last step of what ran before
    redone_steps: int = 0


class Ending(Message, frozen=True, kw_only=True):
    """What happens to the newest state at a pause or an end; see `halting`."""

    orders: int = 0  # to save, so far
    saved: Saved | None = None  # the newest state that was written; None: none was
    discard: bool = False  # the user who stops the job does not want its state
    failed: str = ""  # FAIL: why
    stopped: str = ""  # STOP: why, where no user has asked for it


class Share(Message, frozen=True, kw_only=True):
    """What a shared job has of the cluster; see `share`."""

    allotment: Allotment | None = None  # None: nothing is decided, or it is paused
    most: int | None = None  # pods, by a user's resize; None: as its spec says
    met: tuple[str, ...] = ()  # jobs of its `after` that have succeeded
    refused_at: float = 0.0  # when it could not be stopped; 0: never


class Announced(Message, frozen=True, kw_only=True):
    """What events have already announced, so that it is announced once."""

    waiting: str = ""  # what the job waits for
    standby: str = ""  # why a standby cannot be prepared, or covers less than was asked for
    plain: bool = False  # that no trainer has called the elastic loop
    quarantine: str = ""  # why a pod stays on a slot in quarantine
    shortage: str = ""  # of what its nodes are short


class BadSlot(Message, frozen=True, kw_only=True):
    """A slot that is to be put in quarantine, as a pod's exit has shown."""

    node_id: str
    slot: int
    uuid: str = ""  # of its GPU; "": not known, not a GPU
    name: str  # of the fault
    why: str
    at: float


class Job(SteppedJob, frozen=True, kw_only=True):
    spec: JobSpec
    submitted_at: float  # seconds since 1970, as all times here
    state: JobState = JobState.WAITING
    reason: str = ""
    waiting: str = ""  # why nothing can start; "": something runs or is on its way
    goal: Goal = Goal.RUN
    halt: Halt | None = None  # None: neither pausing nor paused nor stopping
    retiring: JobStage | None = None  # replace, join: parked until its successor has made a step
    active: JobStage | None = None  # training, or over and being ended
    preparing: JobStage | None = None
    recovery_pods: tuple[str, ...] = ()  # pods that a recovery starts from, in rank order
    pods: tuple[TrainingPod, ...] = ()
    target: int = 1
    next_stage: int = 1
    commits: int = 0  # committed stages; the original's flag is commits - 2
    served: tuple[PlanPod, ...] = ()  # the last committed pods
    legacy_nodes: tuple[Node, ...] = ()  # of the original's clients; (): ours serve it
    elastic: bool = False  # a trainer has called the elastic loop
    adapter: str = ""  # module of its framework's adapter, which spares import; "": not known
    done: bool = False  # training is complete; its pods are about to exit
    no_room: bool = False  # the kernel has killed a trainer beside another set of them
    fresh: bool = True  # the next start is the first or follows a pause: no recovery
    cut_off: bool = False  # no pod of the active stage can be reached
    start_since: float = 0.0
    grace_from: float = 0.0  # silence counts from here at the earliest
    resizes: int = 0
    kills: int = 0
    snapshot_stage: int = 0  # newest stage that has reported a snapshot
    estimated_run_time_s: float | None = None  # None: not reported
    records: tuple[StageRecord, ...] = ()
    ended_at: float | None = None  # None: not ended
    budget: Budget = Budget()
    growth: RetryLater = RetryLater()  # back to the target
    standby: RetryLater = RetryLater()
    queue: ChangeQueue = ChangeQueue()
    given: Given = Given()
    lineage: Lineage = Lineage()
    ending: Ending = Ending()
    announced: Announced = Announced()
    share: Share = Share()
    error: FirstError | None = None  # of the last stage that failed; None: none did
    bad_slots: tuple[BadSlot, ...] = ()  # the newest, which the server puts in quarantine
    moving: tuple[str, ...] = ()  # pods that leave their node by a planned change, as it is drained
    evacuations: int = 0  # changes away from slots in quarantine that did not come about, in a row
    avoided: tuple[Avoided, ...] = ()  # see `allocation.avoid`
    progress: JobProgress = JobProgress()

    @property
    def flag(self) -> int:
        """The original's flag: -1 for the first committed stage, and before it."""
        return max(self.commits, 1) - 2

    @property
    def next_flag(self) -> int:
        return self.commits - 1

    @property
    def legacy(self) -> bool:
        return bool(self.legacy_nodes)

    @property
    def stages(self) -> tuple[JobStage, ...]:
        return tuple(s for s in (self.retiring, self.active, self.preparing) if s is not None)

    def stage_numbered(self, number: int) -> JobStage | None:
        """Return the stage of this number, None where it is over or never was."""
        return next((stage for stage in self.stages if stage.stage == number), None)

    def pod(self, pod_id: str) -> TrainingPod | None:
        """Return the pod, None where it is unknown or confirmed gone."""
        return next((pod for pod in self.pods if pod.pod_id == pod_id), None)

    def pods_by_id(self) -> dict[str, TrainingPod]:
        """Return a new table of the pods, for who looks up many: a job may have a thousand."""
        return {pod.pod_id: pod for pod in self.pods}

    def known_pods(self, pod_ids: Iterable[str]) -> tuple[TrainingPod, ...]:
        """Return these pods in this order, without those that are confirmed gone."""
        known = self.pods_by_id()
        return tuple(known[pod_id] for pod_id in pod_ids if pod_id in known)

    def usable_pods(self, pod_ids: Iterable[str]) -> tuple[TrainingPod, ...]:
        """Return those of these pods that a next stage may count on."""
        return tuple(pod for pod in self.known_pods(pod_ids) if pod.usable)


_PARKING = (PodStagePhase.CUTTING, PodStagePhase.PARKED)


def same_but_progress(old: Job, new: Job) -> bool:
    """Return whether `new` need not be written.

    Nothing needs writing if only what every heartbeat changes differs, how far a pod has started,
    or which pods of the active stage have parked: until all have, that changes nothing, and
    launchers report it again when they attach. (If the server is killed during a cut, the pause
    counts from its restart.) Who holds a state of which stage is written: a launcher may be gone
    when the server is back.
    """
    if old.progress.snapshots is not new.progress.snapshots and _held(old) != _held(new):
        return False
    for before, now in ((old.active, new.active), (old.preparing, new.preparing)):
        if before is not now and not _same_but_reports(before, now):
            return False
    estimated = None not in (old.estimated_run_time_s, new.estimated_run_time_s)
    held = replace(
        old,
        progress=new.progress,
        estimated_run_time_s=(new if estimated else old).estimated_run_time_s,
        active=new.active,
        preparing=new.preparing,
        lineage=new.lineage if _same_but_stop(old, new) else old.lineage,
    )
    return held == new


def newly_held(old: Job, new: Job) -> dict[str, SnapshotRef]:
    """Return what pods newly hold a state of a stage; empty if more than that is to be written."""
    before, now = old.progress.snapshots, new.progress.snapshots
    held = {
        pod_id: ref
        for pod_id, ref in now.items()
        if pod_id not in before or before[pod_id].stage != ref.stage
    }
    if not held or not before.keys() <= now.keys():
        return {}
    others = replace(new, progress=replace(new.progress, snapshots=before))
    return held if same_but_progress(old, others) else {}


def _held(job: Job) -> dict[str, int]:
    return {pod_id: ref.stage for pod_id, ref in job.progress.snapshots.items()}


def _same_but_reports(before: JobStage | None, now: JobStage | None) -> bool:
    if before is None or now is None or len(before.members) != len(now.members):
        return False
    members = zip(before.members, now.members, strict=True)
    if not all(old is new or _is_as_far(old, new) for old, new in members):
        return False
    return replace(before, members=now.members) == now


def _is_as_far(old: StagePod, new: StagePod) -> bool:
    """Return whether a pod has only gone on starting, or parking, or differs in nothing."""
    for phases in (STARTUP_ORDER, _PARKING):
        if old.phase in phases and new.phase in phases:
            return old.pod == new.pod
    return old == new


def _same_but_stop(old: Job, new: Job) -> bool:
    """Return whether the lineages differ only in when the first pod has parked."""

    def seen(job: Job) -> Lineage:
        parks = job.active is not None and job.active.any_in(PodStagePhase.PARKED)
        return replace(job.lineage, stopped_at=None) if parks else job.lineage

    return old.lineage is not new.lineage and seen(old) == seen(new)


def age(state: SnapshotRef | RestoreFrom | Saved | SaveState) -> tuple[int, int, int]:
    """Return what orders states of a training by their age; the newest is the greatest."""
    return state.stage, state.step, state.serial


def occupied(pods: Iterable[TrainingPod]) -> dict[str, frozenset[int]]:
    """Return node -> slots on which processes of these pods are or may be."""
    return gather(
        (pod.site.node_id, pod.site.slots)
        for pod in pods
        if pod.desired is not DesiredState.HOLD or pod.phase is not PodPhase.EXITED
    )
