"""Hold a checkpoint folder for one training at a time; `PATH/owner.json` names the holder."""

import atexit
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from job_server.api.wire import StagePlan, WireError, decode, encode
from pod_runtime import processes
from pod_runtime.trainer.errors import CheckpointError, InUseError
from pod_runtime.trainer.state.owner_record import (
    STILL_S,
    Act,
    Facts,
    Holder,
    Record,
    ServerSays,
    State,
    decide,
    next_record,
)
from pod_runtime.trainer.state.storage import Storage, exclusive

logger = logging.getLogger(__name__)

OWNER = "owner.json"
BEAT_S = 10.0  # a sixth of what others wait
_LOOK_EVERY_S = 1.0
# A stage that goes on writes only after its first steps: before them, each second is the change's.
_SETTLE_S = 1.0
_READ_TRIES = 3
_ASK_TIMEOUT_S = 3.0
_NOTHING = Facts(process_lives=None, server=ServerSays.NOT_ASKED)


def this_holder(*, plan: StagePlan | None, server: str) -> Holder:
    """Return who this process trains for.

    Args:
        plan: of its stage; None: outside EDL, where the process is all there is.
        server: URL of the job server; "" outside EDL.
    """
    if plan is not None:
        return job_holder(plan.job_id, plan.submitted_at, server)
    process = _this_process()
    return Holder(id="/".join(map(str, process.values())), **process)


def job_holder(job_id: str, submitted_at: float, server: str) -> Holder:
    """Return a job as holder, for any of its processes."""
    # Servers of the version before do not say when a job was submitted.
    since = repr(submitted_at) if submitted_at else server
    return Holder(
        id=f"{job_id}@{since}",
        job=job_id,
        server=server,
        submitted_at=submitted_at,
        **_this_process(),
    )


def look_at(holder: Holder) -> Facts:
    """Return what can be found out about another holder at once."""
    return Facts(
        process_lives=_process_lives(holder),
        server=_ask_server(holder),
        server_is_local=_is_local(holder.server),
    )


@dataclass(slots=True)
class _Watch:
    """What was seen so far of another holder."""

    first: Record | None = None  # as it was when the watch began; None: it has not
    since: float = 0.0  # by our clock
    facts: Facts = _NOTHING
    logged: str = ""


class Owner:
    """The hold of one training on one folder. For the rank that writes there; any thread.

    `claim` or `hold` begins it, a thread keeps it up, `leave` gives the folder back. A write that
    fails is tried again: a full disk ends no training, being replaced does.
    """

    def __init__(
        self,
        storage: Storage,
        me: Holder,
        *,
        take_over: bool = False,
        look: Callable[[Holder], Facts] = look_at,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        beat_s: float = BEAT_S,
    ) -> None:
        """
        Args:
            take_over: replace the holder of the folder, once.
            look, clock, sleep, beat_s: for tests.
        """
        self._storage, self.me = storage, me
        self.stage = 0  # of this process; set it before `claim` or `hold`
        self.run_id = ""  # "": not known yet, what the folder says holds
        self._take_over, self._look = take_over, look
        self._clock, self._sleep, self._beat_s = clock, sleep, beat_s
        self.replaced_by = ""  # why this training has to end; "": it has not
        self._state = State.TRAINING
        self._expected: Record | None = None  # of another, whose place is ours; not yet written
        self._gate = threading.Lock()
        self._stop: threading.Event | None = None  # of the thread that beats; None: there is none
        self._failed = False  # the newest beat; a failure is logged once
        self._has_held = False  # this process has seen the folder to be ours
        self._watch = _Watch()  # of who has it, while this training goes on from memory

    def claim(self) -> str:
        """Take the folder, which may mean to watch another holder for a minute.

        Returns who had it before, and what became of that training; "": no other had it.

        Raises:
            InUseError: another training uses it.
            CheckpointError: the folder cannot be read.
        """
        watch = _Watch()
        while (before := self._try(watch)) is None:
            self._sleep(_LOOK_EVERY_S)
        self._start(soon=False)
        return before

    def refuse_early(self) -> None:
        """Raise InUseError where `claim` would raise it at once; else do nothing."""
        try:
            found = self.read()
        except CheckpointError:
            return  # `claim` says so, if it lasts
        if found is not None and found.holder.id != self.me.id:
            self._decide(found, self._look(found.holder))

    def confirm(self) -> None:
        """Check that no other training has claimed the folder at the same moment.

        Raises:
            InUseError: one has, and has it now.
        """
        self.beat()
        self._raise_if_replaced()

    def hold(self) -> None:
        """Be the holder, as `stage`; returns at once, a thread looks at the folder's record.

        For a training that goes on from memory: it holds the folder already, through a process of
        an earlier stage; or it has come to a node whose folder was another's, which is watched
        as in `claim`, and meanwhile nothing is written there.
        """
        self._state = State.TRAINING
        self._start(soon=True)

    def check(self) -> None:
        """Call before anything is written to the folder.

        Raises:
            InUseError: this training was replaced, and must not write.
            CheckpointError: it is not known yet whether it may.
            OSError: whether it was cannot be found out, or not be written.
        """
        self._raise_if_replaced()
        is_ours = self._move_counter()
        self._raise_if_replaced()
        if not is_ours:
            raise CheckpointError(
                f"checkpoint: {self._storage.name} may be in use by another training, which is "
                f"watched for {STILL_S:g} s; nothing is written there before"
            )

    def commit(self, path: str, content: bytes) -> None:
        """As the storage's `commit`, if the folder is still ours. Raises as `check`, and OSError.

        On a local file system it cannot be taken in between.
        """
        self._raise_if_replaced()
        with self._gate, exclusive(self._storage):
            if not self._is_theirs(self.read()):
                self._storage.commit(path, content)
        self._raise_if_replaced()

    def beat(self) -> None:
        """Move the counter; what cannot be done is only logged."""
        try:
            self._move_counter()
        except Exception as error:  # noqa: BLE001  any store may fail in its own way; training goes on
            if not self._failed:
                logger.warning(
                    "%s/%s cannot be written, others may think that this training has ended: %s",
                    self._storage.name, OWNER, error,
                )  # fmt: skip
            self._failed = True
        else:
            self._failed = False

    def leave(self, state: State) -> None:
        """Say how this training ends; what cannot be written is only logged."""
        self._state = state
        if state is not State.STOPPING:
            self.close()
        self.beat()

    def close(self) -> None:
        """Beat no more."""
        if self._stop is not None:
            self._stop.set()

    def read(self) -> Record | None:
        """Return what the folder says; None: nothing yet.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            content = self._storage.read(OWNER)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: {self._storage.name}/{OWNER} cannot be read: "
                f"{error.strerror or error}"
            ) from error
        try:
            return decode(Record, json.loads(content))
        except (ValueError, WireError) as error:
            raise CheckpointError(
                f"checkpoint: {self._storage.name}/{OWNER} is damaged: {error}; remove it if no "
                f"other training writes there"
            ) from error

    def stage_of_others(self) -> int:
        """Return the stage of another holder: what it began may be half written. 0: none."""
        try:
            found = self.read()
        except CheckpointError:
            return 0  # `claim` says so
        return 0 if found is None or found.holder.id == self.me.id else found.stage

    # --- how

    def _decide(self, found: Record | None, facts: Facts) -> tuple[Act, str]:
        act, reason = decide(found, self.me, facts, take_over=self._take_over)
        if act is Act.REFUSE:
            assert found is not None
            raise InUseError(
                f"checkpoint: {self._storage.name} is in use by run {found.run_id} of "
                f"{found.holder}, which {reason}; this is {self.me}. Stop that one, give another "
                f"checkpoint path, or replace it, also in a copy of its folder: `--take_over` of "
                f"edl run and edl submit, EDL_TAKE_OVER=1 for a script alone"
            )
        return act, reason

    def _read_patiently(self) -> Record | None:
        """As `read`; not every file system shows a file whole or not at all."""
        for _ in range(_READ_TRIES - 1):
            try:
                return self.read()
            except CheckpointError:
                self._sleep(_LOOK_EVERY_S)
        return self.read()

    def _take(self, found: Record | None) -> bool:
        """Write this training as holder in the place of `found`; False: that has changed."""
        self.run_id = self.run_id or (found.run_id if found is not None else "")
        self.run_id = self.run_id or new_run_id()
        with self._gate, exclusive(self._storage):
            if self.read() != found:
                return False
            self._expected, self._has_held = found, True
            try:
                self._write(found)
            except OSError as error:
                # This process cannot write checkpoints here either; it may still read a state.
                logger.warning(
                    "%s/%s cannot be written: %s", self._storage.name, OWNER,
                    error.strerror or error,
                )  # fmt: skip
        return True

    def _try(self, watch: "_Watch") -> str | None:
        """Take the folder if that may be; None: who has it must be watched. Raises as `claim`."""
        found = self._read_patiently()
        facts = watch.facts
        if found is not None and found.holder.id != self.me.id:
            if watch.first is None or _who(found) != _who(watch.first):
                watch.first, watch.since = found, self._clock()
                watch.facts = self._look(found.holder)
            moved, still_s = found.counter != watch.first.counter, self._clock() - watch.since
            facts = replace(watch.facts, moved=moved, still_s=still_s)
        act, reason = self._decide(found, facts)
        text = "" if found is None or not reason else f"{found.holder} {reason}"
        if act is Act.WATCH:
            if text != watch.logged:
                watch.logged = text
                logger.warning("checkpoint: %s: %s", self._storage.name, text)
            return None
        return text if self._take(found) else None

    def _move_counter(self) -> bool:
        """Write that we live, unless somebody else has the folder; return whether it is ours.

        Raises:
            OSError: it could not be read, or written.
        """
        if not self._has_held and not self._enter():
            return False
        with self._gate, exclusive(self._storage):
            if self.replaced_by:
                return False
            found = self._read_whole()
            if self._is_theirs(found):
                return False
            if found is not None and found.stage > self.stage and found.holder.id == self.me.id:
                self.close()  # the process of a later stage does it now
                return True
            self._write(found)
            self._has_held = True
            return True

    def _enter(self) -> bool:
        """Return whether the folder may be ours; else its holder is watched, or keeps it."""
        found = self._read_whole()
        if found is None or found.holder.id == self.me.id:
            return True
        if self.me.id in found.replaced:
            return not self._is_theirs(found)
        try:
            before = self._try(self._watch)
        except InUseError as error:
            self.replaced_by = str(error)
            logger.error("%s", error)
            return False
        if before:
            logger.warning("checkpoint: %s: %s", self._storage.name, before)
        return before is not None

    def _read_whole(self) -> Record | None:
        """As `read`, but half a record is none: no holder writes one. Raises OSError."""
        try:
            return self.read()
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            return None

    def _is_theirs(self, found: Record | None) -> bool:
        """Return whether another training has taken the folder; logs and remembers it."""
        if found is None or found.holder.id == self.me.id:
            return False
        if found == self._expected:
            return False
        self.replaced_by = (
            f"checkpoint: {self._storage.name} was taken over by {found.holder}, run "
            f"{found.run_id}; this training, {self.me}, writes nothing more and ends"
        )
        logger.error("%s", self.replaced_by)
        return True

    def _write(self, found: Record | None) -> None:
        record = next_record(found, self.me, run_id=self.run_id, stage=self.stage)
        record = replace(record, state=self._state)
        self._storage.commit(OWNER, json.dumps(encode(record), indent=1).encode())
        self._expected = None

    def _raise_if_replaced(self) -> None:
        if self.replaced_by:
            raise InUseError(self.replaced_by)

    def _start(self, *, soon: bool) -> None:
        if self._stop is None and not self.me.job:
            atexit.register(self._at_exit)
        self.close()
        self._stop = threading.Event()
        wait_s = min(_SETTLE_S, self._beat_s) if soon else self._beat_s
        threading.Thread(
            target=self._run, args=(self._stop, wait_s), name="owner", daemon=True
        ).start()

    def _run(self, stop: threading.Event, wait_s: float) -> None:
        while not stop.wait(wait_s) and not self.replaced_by:
            self.beat()
            wait_s = self._beat_s if self._has_held else _LOOK_EVERY_S

    def _at_exit(self) -> None:
        """A script alone is over when its process ends, and others need not watch for a minute."""
        if os.getpid() != self.me.pid:  # a fork of the script that ends
            return
        try:
            found = self.read()
        except CheckpointError:
            return
        if found is not None and found.holder == self.me and found.state is State.TRAINING:
            self.leave(State.OVER)


def new_run_id() -> str:
    """Return the id of a training that begins."""
    return uuid.uuid4().hex[:12]


def _who(record: Record) -> tuple[str, State, int]:
    """What must not change while its counter is watched."""
    return record.holder.id, record.state, record.holder.pid


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "start_time": processes.start_time(pid) or 0,
    }


def _machine() -> str:
    """Return what only processes have in common that see each other by pid; "": not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_lives(holder: Holder) -> bool | None:
    """Return whether the holder's process runs; None: it cannot be seen from here."""
    machine = _machine()
    if not machine or holder.machine != machine:
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    process = processes.read(holder.pid)
    if process is None:  # hidden from this user, or just gone
        return None
    return process.start_time == holder.start_time and process.state not in "ZX"


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1") or host.startswith("127.")


def _ask_server(holder: Holder) -> ServerSays:
    """Ask the job server of another holder whether that job goes on."""
    if not holder.server:
        return ServerSays.NOT_ASKED
    from job_server.api.api_client import ApiClient, ApiError, NotFound, ServerAway  # rarely needed
    from job_server.api.local_servers import find_server

    try:
        # A trainer has no token, but this user's servers on this machine can be asked all the same.
        listed = find_server(holder.server, os.environ)
        token = None if listed is None else listed.token()
        with ApiClient(holder.server, token, _ASK_TIMEOUT_S) as api:
            status = api.status(holder.job)
    except ServerAway:
        return ServerSays.AWAY
    except NotFound:
        return ServerSays.FORGOT
    except (ApiError, ValueError):
        return ServerSays.UNKNOWN
    if status.submitted_at != holder.submitted_at:  # another job of that name, or another server
        return ServerSays.FORGOT
    return ServerSays.ENDED if status.state.ended else ServerSays.LIVES
