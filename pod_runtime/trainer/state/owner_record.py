"""Decide whether a training may write to a checkpoint folder, by the record of its holder. Pure.

`PATH/owner.json` holds one `Record`. Its holder moves the counter while it trains, so that others
see from any machine that it lives; clocks of two machines are never compared.
"""

from dataclasses import dataclass
from enum import Enum

STILL_S = 60.0  # a counter that stands still for so long is that of a dead holder
_REPLACED_KEPT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A training: a job of a job server with all its stages, or one process alone."""

    id: str  # of the training
    job: str = ""  # its id at the server; "": a script alone
    server: str = ""  # URL; "": a script alone
    submitted_at: float = 0.0  # of the job: ids are used again; 0: a script alone, or not known
    host: str  # name, for people
    machine: str  # equal where processes see each other by pid; "": not known
    pid: int  # of the process that moves the counter
    start_time: int  # of that process; with the pid it names it for good

    def __str__(self) -> str:
        where = f"pid {self.pid} on {self.host}"
        return f"job {self.job} of {self.server} ({where})" if self.job else where


class State(Enum):
    """What a holder last wrote about itself."""

    TRAINING = "training"
    PAUSED = "paused"  # keeps the folder, and moves no counter
    STOPPING = "stopping"  # parked for good; its newest state may still be written
    OVER = "over"  # it has finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of `owner.json`."""

    run_id: str  # made with the first step, kept through all continuations
    holder: Holder
    state: State = State.TRAINING
    counter: int = 0  # moved by the holder
    stage: int  # of the holder's process
    replaced: tuple[str, ...] = ()  # ids of the holders from whom the folder was taken


class ServerSays(Enum):
    """What the job server of another holder answers about its job."""

    NOT_ASKED = "not asked"  # there is none
    LIVES = "lives"  # it runs, waits or is paused
    ENDED = "ended"
    AWAY = "away"  # no server answers
    FORGOT = "forgot"  # a server answers that has no such job
    UNKNOWN = "unknown"  # it wants a token, or is no job server


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What can be found out about another holder from here."""

    process_lives: bool | None  # None: it cannot be seen from this machine
    server: ServerSays
    server_is_local: bool = False  # ... by its URL: to this machine alone
    moved: bool = False  # its counter, since we watch
    still_s: float = 0.0  # since it moved last, by our clock


class Act(Enum):
    CLAIM = "claim"
    REFUSE = "refuse"
    WATCH = "watch"


def decide(found: Record | None, me: Holder, facts: Facts, *, take_over: bool) -> tuple[Act, str]:
    """Return whether `me` may have the folder, and why; the reason is about the other holder.

    Args:
        found: the folder's record; None: no training has used it yet.
        take_over: `me` may replace the holder that it finds; that counts once.
    """
    if found is None or found.holder.id == me.id:
        return Act.CLAIM, ""
    if found.state is State.OVER:
        return Act.CLAIM, "has ended"
    if take_over and me.id not in found.replaced:
        return Act.CLAIM, "was replaced, as --take_over asks"
    if facts.server is ServerSays.ENDED:
        return Act.CLAIM, "has ended, as its server says"
    if found.state is State.PAUSED:
        if facts.server is not ServerSays.LIVES and _follows(found, me, facts):
            return Act.CLAIM, "was deleted: its server has another job of its name"
        return Act.REFUSE, "is paused"
    if facts.server is ServerSays.LIVES:
        return Act.REFUSE, "has not ended, as its server says"
    if facts.moved:
        return Act.REFUSE, "trains, or is being stopped: it moves the counter in owner.json"
    if facts.process_lives:
        return Act.REFUSE, "trains, or is being stopped: its process is alive"
    # The server of a job whose process has died may be about to start the next one.
    gone = facts.server in (ServerSays.AWAY, ServerSays.FORGOT)
    on_its_own = not found.holder.job or (gone and facts.server_is_local)
    on_its_own = on_its_own or found.state is State.STOPPING
    if facts.process_lives is False and on_its_own:
        return Act.CLAIM, "is gone: its process has ended"
    if facts.still_s >= STILL_S:
        return Act.CLAIM, f"is gone: it has not moved its counter for {STILL_S:g} s"
    return Act.WATCH, f"may be alive: watching its counter, for {STILL_S:g} s at most"


def _follows(found: Record, me: Holder, facts: Facts) -> bool:
    """Return whether `me` is a later job of the same name at the same server.

    A server has one job of a name. Its clock does not tell which is the later one, as it may have
    been set back: the record names those who had the folder before.
    """
    other = found.holder
    is_same = bool(me.job) and (me.job, me.server) == (other.job, other.server)
    if facts.server_is_local:  # each machine has a server of this URL
        is_same = is_same and me.host == other.host
    is_known = me.submitted_at > 0 and other.submitted_at > 0
    return is_same and is_known and me.id not in found.replaced


def next_record(found: Record | None, me: Holder, *, run_id: str, stage: int) -> Record:
    """Return the folder's record once `me` holds it."""
    replaced: tuple[str, ...] = ()
    if found is not None:
        replaced = tuple(each for each in found.replaced if each != me.id)
        if found.holder.id != me.id and found.state is not State.OVER:
            replaced = (*replaced, found.holder.id)[-_REPLACED_KEPT:]
    return Record(
        run_id=run_id or (found.run_id if found is not None else ""),
        holder=me,
        counter=0 if found is None else found.counter + 1,
        stage=stage,
        replaced=replaced,
    )
