"""Start the predictor processes, restart them, and receive their messages.

Each process holds every model of the server on one device. That costs no more memory than a process
per model: on a CPU each process has its own weights anyway, and on a GPU there is one CUDA context
instead of several. And no device idles, whichever model is in demand.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from distill_reader.backoff import backoff_s
from distill_reader.errors import DistillError, ModelError, UsageError
from distill_reader.model.normalization import Normalization
from distill_reader.model.specs import ModelSpec
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.wire import (
    MessageKind,
    PredictorChannel,
    StartMessage,
    parse_specs,
    start_document,
)

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1  # before a predictor is restarted; doubles each time
_LAST_DELAY_S = 10.0
_STEADY_S = 10.0  # after a predictor has lived so long, the first delay applies again
_END_S = 2.0  # how long a predictor may take to end after its connection is closed


class PredictorListener(Protocol):
    """Decides what predictors do. Called from the thread that receives from the predictor."""

    def predictor_ready(self, predictor: "Predictor", specs: tuple[ModelSpec, ...]) -> None: ...

    def predictor_replied(
        self, predictor: "Predictor", kind: MessageKind, numbers: tuple[int, ...], text: bytes
    ) -> None: ...

    def predictor_gone(self, predictor: "Predictor", error: DistillError | None) -> None:
        """`error`: why it could not load its models; None: it had loaded them."""
        ...


class Predictor:
    """One predictor process and the connection to it. A restarted one is a new object."""

    def __init__(
        self, index: int, process: subprocess.Popen[bytes], channel: PredictorChannel
    ) -> None:
        self.index = index  # which of the devices it computes on
        self.channel = channel
        self.process = process
        self.started = time.monotonic()

    def __str__(self) -> str:
        return f"predictor {self.index} (pid {self.process.pid})"


class PredictorPool:
    """One predictor per device. One that ends is restarted, with growing delays."""

    def __init__(
        self,
        listener: PredictorListener,
        *,
        backend: str,
        models: Sequence[tuple[str, str]],
        devices: Sequence[Device],
        normalizations: Sequence[tuple[str, str, Normalization]] = (),
    ) -> None:
        self._listener = listener
        self._start_messages = [
            StartMessage(
                backend=backend,
                models=tuple(models),
                device=device,
                paths=tuple(map(os.path.abspath, sys.path)),
                normalizations=tuple(normalizations),
            )
            for device in devices
        ]
        self._changed = threading.Condition()
        self._is_stopping = False
        self._alive: dict[int, Predictor] = {}
        self._start_at = dict.fromkeys(range(len(self._start_messages)), 0.0)
        self._failures = dict.fromkeys(range(len(self._start_messages)), 0)
        # The kernel kills a predictor when the *thread* that started it ends. So one thread starts
        # all of them, and lives as long as the pool.
        self._supervisor = threading.Thread(target=self._supervise, name="predictors", daemon=True)
        self._receivers: list[threading.Thread] = []

    def start(self) -> None:
        """Start the predictors in the background."""
        self._supervisor.start()

    def stop(self) -> None:
        """End all predictors; return when none is left."""
        with self._changed:
            self._is_stopping = True
            alive = list(self._alive.values())
            self._changed.notify_all()
        if self._supervisor.ident is None:
            return
        for predictor in alive:
            _shut_down(predictor.channel.sock)
        deadline = time.monotonic() + _END_S
        for predictor in alive:
            try:
                predictor.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                predictor.process.kill()
                predictor.process.wait()
        self._supervisor.join()
        for receiver in self._receivers:
            receiver.join()

    def _supervise(self) -> None:
        while True:
            with self._changed:
                if self._is_stopping:
                    return
                now = time.monotonic()
                indices = [index for index, at in self._start_at.items() if at <= now]
                for index in indices:
                    try:
                        self._spawn(index)
                        del self._start_at[index]
                    except OSError as error:  # no memory, or too many processes: try later
                        logger.warning("predictor %d cannot be started: %s", index, error)
                        self._start_at[index] = now + _LAST_DELAY_S
                self._receivers = [thread for thread in self._receivers if thread.is_alive()]
                delays = [at - time.monotonic() for at in self._start_at.values()]
                self._changed.wait(max(0.0, min(delays)) if delays else None)

    def _spawn(self, index: int) -> None:
        start = self._start_messages[index]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                sys.executable,
                "-m",
                "distill_reader.teacher.predictor.process",
                f"--fd={theirs.fileno()}",
                f"--front={os.getpid()}",
            ]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(start.device),
                )
            except OSError:
                ours.close()
                raise
        predictor = Predictor(index, process, PredictorChannel(ours))
        receiver = threading.Thread(
            target=self._receive, args=(predictor,), name=f"predictor-{index}", daemon=True
        )
        try:
            receiver.start()
        except RuntimeError as error:  # there are too many threads
            process.kill()
            process.wait()
            predictor.channel.close()
            raise OSError(str(error)) from error
        self._alive[index] = predictor
        self._receivers.append(receiver)

    def _receive(self, predictor: Predictor) -> None:
        """Pass on the messages of a predictor until it is gone."""
        channel = predictor.channel
        is_ready = False
        error: DistillError | None = None
        try:
            channel.send_json(
                MessageKind.START, start_document(self._start_messages[predictor.index])
            )
            while True:
                kind, numbers, text = channel.receive()
                if kind is MessageKind.READY:
                    is_ready = True
                    self._listener.predictor_ready(predictor, parse_specs(text))
                elif kind is MessageKind.BROKEN:
                    error = _broken(text)
                else:
                    self._listener.predictor_replied(predictor, kind, numbers, text)
        except (EOFError, OSError):
            pass  # it is gone
        predictor.process.kill()  # it has closed its end, so it does nothing more
        code = predictor.process.wait()
        if not is_ready and error is None:
            error = ModelError(f"{predictor} ended with {_ending(code)} while it loaded the models")
        self._log_end(predictor, error, code)
        self._listener.predictor_gone(predictor, None if is_ready else error)
        self._plan_restart(predictor)
        channel.close()

    def _plan_restart(self, predictor: Predictor) -> None:
        index, now = predictor.index, time.monotonic()
        with self._changed:
            del self._alive[index]
            if now - predictor.started > _STEADY_S:
                self._failures[index] = 0
            delay_s = backoff_s(self._failures[index], _FIRST_DELAY_S, _LAST_DELAY_S)
            self._failures[index] += 1
            self._start_at[index] = now + delay_s
            self._changed.notify_all()

    def _log_end(self, predictor: Predictor, error: DistillError | None, code: int) -> None:
        if not self._is_stopping:
            logger.warning("%s ended: %s", predictor, error if error is not None else _ending(code))


def _environment(device: Device) -> dict[str, str]:
    environment = dict(os.environ)
    if device.gpu is None:
        environment["OMP_NUM_THREADS"] = str(device.threads)  # read when Paddle is imported
    environment.setdefault("GLOG_minloglevel", "2")
    environment.setdefault("PYTHONWARNINGS", "ignore")  # Paddle warns about compilers
    return environment


def _broken(text: bytes) -> DistillError:
    document = json.loads(text)
    if document["kind"] == "usage":
        return UsageError(document["text"])
    return ModelError(document["text"])


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no name
        return f"signal {-code}"


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was first
        sock.shutdown(socket.SHUT_RDWR)
