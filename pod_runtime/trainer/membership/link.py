"""Talk to the launcher, from a trainer; `channel_wire` has the messages.

There is no thread: the loop polls once per step, which costs a system call, and waits here while it
is parked. The socket closes when the launcher dies; then the kernel kills the trainer, too.
"""

import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from job_server.api.wire import StagePlan
from pod_runtime.activity import own_activity
from pod_runtime.channel_wire import (
    Cut,
    Disinvitation,
    Go,
    Invitation,
    Preview,
    Resume,
    Stepped,
    TrainerHello,
    TrainerMessage,
    Welcome,
    parse_launcher,
    to_json,
)
from pod_runtime.errors import ChannelError
from pod_runtime.segment_header import Stamp
from pod_runtime.shim_wire import LineSocket, ShimError
from pod_runtime.trainer.errors import LinkError
from pod_runtime.trainer.progress.agreement import HALTS

_CONNECT_TIMEOUT_S = 30.0
STEP_PERIOD_S = 0.2  # a trainer sends `step` at most so often


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """The plan of the stage that a trainer is a member of, and what it may restore from."""

    plan: StagePlan
    fds: tuple[int, ...]  # segments, owned by the receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePreview:
    """A state that a prepared trainer will probably start from, in segments."""

    stamp: Stamp
    fds: tuple[int, ...]  # segments, owned by the receiver


class LauncherLink:
    """The conversation of one trainer in one stage."""

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        stage: int,
        pid: int,
        joins: bool = False,
        goes_on: bool = False,
        adapter: str = "",
    ) -> None:
        """Connect and send hello.

        Args:
            name: of the launcher's abstract socket.
            joins: this trainer can form a next stage's group while it trains.
            goes_on: with a later loop of the script, see `TrainerHello`.
            adapter: module that spares import ahead, see `Framework.module`.

        Raises:
            LinkError: no launcher listens there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect("\0" + name)
        except OSError as error:
            connection.close()
            raise LinkError(
                f"EDL_CHANNEL: no launcher listens at {name!r}: {error.strerror or error}; "
                f"unset it to train outside EDL"
            ) from error
        connection.settimeout(None)
        self._lines = LineSocket(connection)
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self.going = False  # `go` has come
        self._start: StageStart | None = None  # the newest; None: none, or it was used
        self._preview: StatePreview | None = None  # the newest; None: none, or it was used
        self.invitation: Invitation | None = None  # None: there is none
        self.cut: Cut | None = None  # the newest that is not off; None: there is none
        self.resumed_id = -1  # highest id of a cut that is off
        self._last_step_at = 0.0
        hello = TrainerHello(
            rank=rank, stage=stage, pid=pid, joins=joins, goes_on=goes_on, adapter=adapter
        )
        self.send(hello, (own_activity().fd,))

    def send(self, message: TrainerMessage, fds: tuple[int, ...] = ()) -> None:
        """Send a message; `fds` stay open here.

        Raises:
            LinkError: the launcher is gone.
        """
        content = to_json(message)
        if fds:
            content["fds"] = len(fds)
        try:
            self._lines.send(content, fds)
        except OSError as error:
            raise LinkError(f"the launcher is gone: {error}") from error

    def close(self) -> None:
        """Hang up: the script begins another loop."""
        self._lines.close()

    def poll(self) -> None:
        """Handle the messages that have come, without waiting."""
        while True:
            received = self._lines.pending()
            if received is None:
                if not self._readable.poll(0):
                    return
                received = self._receive()
            self._take(*received)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a message, at most `timeout_s` (None: for ever), and handle it."""
        received = self._lines.pending()
        if received is None:
            if not self._readable.poll(None if timeout_s is None else timeout_s * 1000):
                return
            received = self._receive()
        self._take(*received)

    def wait_start(self, look: Callable[[StatePreview], None] = lambda _: None) -> StageStart:
        """Wait for the answer to hello, or until the stage that was prepared is committed.

        Args:
            look: called with each preview that comes before that.

        Raises:
            LinkError: the launcher is gone, or its plan is malformed.
        """
        while self._start is None:
            self.wait()
            preview, self._preview = self._preview, None
            if preview is not None:
                if self._start is None:
                    look(preview)
                for fd in preview.fds:
                    os.close(fd)
        start, self._start = self._start, None
        return start

    def wait_go(self) -> None:
        """Wait until the stage is committed; a cut means that it was."""
        while not self.going and self.cut is None:
            self.wait()

    def wait_for_the_end(self) -> NoReturn:
        """Wait until the launcher ends this process.

        Raises:
            LinkError: the launcher is gone.
        """
        while True:
            self._receive()

    def wait_resume(self, cut_id: int) -> StageStart | None:
        """Stay parked until the cut is off; most trainers are ended while they wait here.

        Returns the stage that this trainer has joined; None: it goes on in its own.
        """
        while self.resumed_id < cut_id and self._start is None:
            self.wait()
        start, self._start = self._start, None
        return start

    def send_step(
        self,
        *,
        step: int,
        epoch: int,
        total_steps: int | None,
        step_s: float,
        promise: str,
        checkpoint_error: Callable[[], str | None],
        metrics: Callable[[], dict[str, float] | None],
        metric_epochs: dict[str, int] | None,
        at_once: bool,
    ) -> None:
        """Send `step`, unless one was sent just now or the launcher does not read.

        Args:
            checkpoint_error, metrics: called if it is sent; None: as before.
            metric_epochs: how many epochs were over when the script logged each of its metrics.
        """
        now = time.monotonic()
        if now - self._last_step_at < STEP_PERIOD_S and not at_once:
            return
        if not self._writable.poll(0):
            return  # a stopped launcher must not stop the training
        self._last_step_at = now
        self.send(
            Stepped(
                step=step,
                epoch=epoch,
                total_steps=total_steps,
                step_s=step_s,
                metrics=metrics(),
                metric_epochs=metric_epochs,
                promise=promise,
                checkpoint_error=checkpoint_error(),
            )
        )

    def _receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        try:
            received = self._lines.receive()
        except (ShimError, OSError) as error:
            raise LinkError(f"the launcher's channel broke: {error}") from error
        if received is None:
            raise LinkError("the launcher is gone: it closed the channel")
        return received

    def _take(self, content: dict[str, Any], fds: tuple[int, ...]) -> None:
        try:
            message = parse_launcher(content)
        except ChannelError as error:
            raise LinkError(str(error)) from error
        match message:
            case Welcome(plan=plan):
                self._start = StageStart(plan=plan, fds=fds)
            case Go(plan=plan):
                self.going = True
                if plan is not None:
                    self._start = StageStart(plan=plan, fds=fds)
                    self.cut, self.resumed_id = None, -1  # the stage numbers its own cuts
            case Preview(snapshot=ref):
                stamp = Stamp(stage=ref.stage, step=ref.step, serial=ref.serial)
                self._preview = StatePreview(stamp=stamp, fds=fds)
            case Invitation(plan=plan, rank=rank):
                if not 0 <= rank < plan.world_size:
                    raise LinkError(f"join: rank: expected one of {plan.world_size}, got {rank}")
                self.invitation = message
            case Disinvitation():
                self.invitation = None
            case Cut(id=cut_id):
                if cut_id > self.resumed_id:
                    known = message.halt in HALTS  # else: of a later version
                    self.cut = message if known else replace(message, halt="")
            case Resume(id=cut_id):
                self.resumed_id = max(self.resumed_id, cut_id)
                if self.cut is not None and self.cut.id <= cut_id:
                    self.cut = None
