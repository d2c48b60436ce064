"""Define the messages of task queues: parts of a data set, handed out to whoever reads next."""

from job_server.api.codec import Int, Message, WireError
from job_server.api.wire import check_id, check_range

MAX_TASKS = 100_000
MAX_CONTENT_CHARS = 4096
MAX_ERROR_CHARS = 1000  # kept of a reader's error
MAX_PLACE_CHARS = 500
SHOWN_TASKS = 100  # of each kind, in a status


class TaskQueueSpec(Message, frozen=True, kw_only=True):
    """What a user makes a queue of. Each task is done once in each pass."""

    name: str
    tasks: tuple[str, ...]  # what a task is, is between those who make and read them
    lease_s: float = 60.0  # a task comes back if its reader is silent for so long
    max_tries: Int = 3  # a task is dropped for a pass when it has failed so often

    def __post_init__(self) -> None:
        check_id("name", self.name)
        if not self.tasks:
            raise WireError("tasks: a queue needs at least one task")
        if len(self.tasks) > MAX_TASKS:
            raise WireError(
                f"tasks: at most {MAX_TASKS} are kept, got {len(self.tasks)}; make each larger"
            )
        for number, task in enumerate(self.tasks):
            if not 1 <= len(task) <= MAX_CONTENT_CHARS:
                raise WireError(
                    f"tasks[{number}]: expected 1 to {MAX_CONTENT_CHARS} characters, got "
                    f"{len(task)}"
                )
        check_range("lease_s", self.lease_s, 0.5, 86400)
        check_range("max_tries", self.max_tries, 1, 1000)


class LeaseAsked(Message, frozen=True, kw_only=True):
    """A reader asks for a task of a pass. Passes count from 0."""

    worker: str  # who reads: named in the status
    place: str = ""  # where: whoever read there before is gone; "": not known
    pass_number: Int | None = None  # None: of any; the next begins when none is left of this one

    def __post_init__(self) -> None:
        check_id("worker", self.worker)
        if self.pass_number is not None:
            check_range("pass_number", self.pass_number, 0, 10**9)
        if len(self.place) > MAX_PLACE_CHARS:
            raise WireError(
                f"place: expected at most {MAX_PLACE_CHARS} characters, got {len(self.place)}"
            )


class Lease(Message, frozen=True, kw_only=True):
    """A task to read, or why there is none.

    `number` None: no task. `over`: the pass is over, or was before; otherwise ask again after
    `wait_s`: others read the last tasks, and may fail. `unreadable`: all tasks of the pass were
    dropped, so many; `over` is true then, and readers without passes get no next one.
    """

    number: Int | None = None
    pass_number: Int = 0  # of the task: one that a dead reader left may be of the pass before
    content: str = ""
    lease: Int = 0  # to be named in reports
    lease_s: float = 0.0  # report at least so often
    over: bool = False
    unreadable: Int = 0
    wait_s: float = 0.0


class TaskReport(Message, frozen=True, kw_only=True):
    """What a reader says of its task: that it reads on, has used all, failed, or gives it back."""

    worker: str
    pass_number: Int
    number: Int
    lease: Int
    records: Int = 0  # read so far
    all_read: bool = False  # and not used yet: nobody waits for it, but it is not done
    done: bool = False
    error: str = ""  # why it cannot be read; "": it can
    give_back: bool = False  # another shall read it; no failure

    def __post_init__(self) -> None:
        check_id("worker", self.worker)
        check_range("records", self.records, 0, 10**15)
        if self.done + bool(self.error) + self.give_back > 1:
            raise WireError("done, error, give_back: at most one of them can be true")


class TaskAnswer(Message, frozen=True, kw_only=True):
    """The answer to a report."""

    held: bool  # False: the task is no longer this reader's; others read it, or have read it


class TaskCount(Message, frozen=True, kw_only=True):
    """How far a pass is, in tasks and records."""

    pass_number: Int
    waiting: Int = 0
    leased: Int = 0
    done: Int = 0
    dropped: Int = 0
    records_once: Int = 0  # of tasks that one reader has read
    records_again: Int = 0  # of tasks that were begun more than once: some were read again


class TaskView(Message, frozen=True, kw_only=True):
    """A task that is worth a look."""

    number: Int
    content: str
    worker: str = ""  # who reads it
    reads: Int = 0  # how often it was begun in this pass
    failures: Int = 0
    error: str = ""  # the last one


class TaskQueueStatus(Message, frozen=True, kw_only=True):
    """A queue, its present pass and those before."""

    name: str
    tasks: Int
    lease_s: float
    max_tries: Int
    now: TaskCount
    leased: tuple[TaskView, ...] = ()  # of each at most SHOWN_TASKS
    dropped: tuple[TaskView, ...] = ()
    read_again: tuple[TaskView, ...] = ()  # begun more than once and done
    passes: tuple[TaskCount, ...] = ()  # those before, the newest last, at most SHOWN_TASKS


class TaskQueueList(Message, frozen=True, kw_only=True):
    queues: tuple[TaskQueueStatus, ...]
