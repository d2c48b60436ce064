"""Start, watch and stop one `edl run`, and clean up after it."""

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pod_runtime
from job_server.api.api_client import ApiClient
from job_server.api.command_line import keep_token
from job_server.api.errors import JobServerError, Rejected, Retryable, ServerAway
from job_server.api.text import error_lines, printable, saving_text
from job_server.api.wire import (
    TRAIN_LOSS,
    JobSpec,
    JobState,
    JobStatus,
    Saved,
    SavePhase,
    SaveState,
)
from pod_runtime import processes
from pod_runtime.errors import LaunchError
from pod_runtime.local.last_state import end_pods, find_pods, write_newest
from pod_runtime.local.old_runs import drop_old_runs
from pod_runtime.local.output import TrainerOutput
from pod_runtime.local.programs import LocalProgram
from pod_runtime.local.view import JobWatch, patient_output, without_end
from pod_runtime.log_tail import read_tail
from pod_runtime.orphans import remove_shared_memory
from pod_runtime.shim_wire import lock_folder

RUN_ID = "EDL_RUN_ID"  # every process of one `edl run` carries it
_START_S = 30.0
_LOOK_EVERY_S = 0.1
_CLIENT_STOP_EXTRA_S = 15.0
_SERVER_STOP_S = 5.0
_SHOWN_LINES = 20
_OTHER_WATCHERS = 50  # of the server, beside pods: users' commands, the job client
INTERRUPTED = 130
# Below the ports that the kernel gives to connections: none takes it while the server restarts.
_SERVER_PORTS = range(10000, 12000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    spec: JobSpec
    cpu_slots: int | None  # None: the client offers the GPUs
    script: Path
    script_args: tuple[str, ...]
    cwd: Path  # where the trainers run
    folder: Path  # of this run: logs, database, ledger
    heartbeat_s: float
    token: str  # of the server
    preload: str | None = None  # modules that spares import; None: only EDL's
    keep_runs: int = 0  # folders of past runs beside this one's; 0: all


class LocalSession:
    """One run. Use it once; `run` returns when no process of it is left."""

    def __init__(self, config: RunConfig, train_sh: str, environ: Mapping[str, str]) -> None:
        self._config, self._train_sh = config, train_sh
        self._run_id = uuid.uuid4().hex
        self._token_file = config.folder / "token"
        self._env = self._environment(environ)
        self._port, self._port_claim = claim_port(random.sample(_SERVER_PORTS, 100))
        self._url = f"http://127.0.0.1:{self._port}"
        self._server: LocalProgram | None = None  # None: not started
        self._client: LocalProgram | None = None  # None: not started
        self._interrupts = 0
        self._told_why = False  # a stop that was asked for does not begin
        self._has_grace_only = False  # SIGTERM: whoever sends it kills what is left soon
        self._lock: int | None = None  # systemd-tmpfiles deletes nothing in a folder with one
        self._output = TrainerOutput(config.folder / "trainers", sys.stdout.buffer)

    def run(self) -> int:
        """Return the exit code.

        Raises:
            LaunchError: server or client could not be started, or broke.
        """
        self._make_folder()
        with self._port_claim, self._signals():
            try:
                status = self._watch_patiently() if self._start() else None
                self._keep_page()
                self._end_programs()
            except BaseException:  # whatever it was: the training is well
                self._end_with_state()
                raise
            finally:
                self._kill_rest()
        self._output.show_new(last=True)
        if self._interrupts:
            show(f"interrupted; logs, state and status.html are in {self._config.folder}")
            show(describe_continuation(status))
            return INTERRUPTED
        return self._sum_up(status)

    # --- start --------------------------------------------------------------------------------

    def _environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        env = {
            **environ,
            RUN_ID: self._run_id,
            "PADDLE_JOB_ID": self._config.spec.job_id,
            "EDL_TOKEN_FILE": str(self._token_file),  # in the place of EDL_TOKEN
        }
        for name in ("EDL_TOKEN", "PADDLE_JOBSERVER"):
            env.pop(name, None)
        root = Path(pod_runtime.__file__).parents[1]
        if not {"site-packages", "dist-packages"} & set(root.parts):  # a clone, not installed
            paths = [str(root), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return env

    def _make_folder(self) -> None:
        folder = self._config.folder
        try:
            (folder / "client").mkdir(parents=True)
            (folder / "train.sh").write_bytes(os.fsencode(self._train_sh))  # in any locale
            keep_token(self._token_file, self._config.token)
            self._lock = lock_folder(folder)
        except OSError as error:
            raise LaunchError(f"--log_dir: cannot write {folder}: {error.strerror}", 2) from error
        show(f"logs and state in {folder}")
        link_latest(folder)
        if self._config.keep_runs:
            dropped = drop_old_runs(folder.parent, self._config.keep_runs, time.time())
            if dropped:
                show(f"deleted the folders of {len(dropped)} old runs (--keep_runs)")

    def _start(self) -> bool:
        """Start server and client with the job; False: it was interrupted before that was there."""
        folder, spec = self._config.folder, self._config.spec
        self._server = LocalProgram(
            "job server",
            [
                sys.executable, "-m", "job_server", "--no_job", "--bind", "127.0.0.1",
                "--server_port", str(self._port), "--db", str(folder / "server.db"),
                "--heartbeat_s", f"{self._config.heartbeat_s:g}",
                # Two sets of pods during a change. Each costs descriptors, which may be few.
                "--max_watchers", str(min(2 * spec.max_pods + _OTHER_WATCHERS, 1500)),
            ],
            self._env, folder, folder / "server.log",
        )  # fmt: skip
        if not self._submit():
            return False
        slots = (
            [] if self._config.cpu_slots is None else ["--cpu_slots", str(self._config.cpu_slots)]
        )
        self._client = LocalProgram(
            "job client",
            [
                sys.executable, "-m", "job_client", "--job_server", self._url,
                "--log_dir", str(folder / "client"), "--pod_path", str(folder / "pods"),
                "--port_range", "auto", "--grace_s", f"{spec.grace_s:g}", *slots,
                str(folder / "train.sh"),
            ],
            self._env, folder, folder / "client.log",
        )  # fmt: skip
        show(f"watch it at {self._url}/")
        with contextlib.suppress(JobServerError), self._connect() as api:  # `edl page` has another
            show(f"a browser opens it, once, by {api.page_link()}  (`edl page` prints another)")
        return True

    def _submit(self) -> bool:
        """Submit the job; return whether it was, before an interrupt."""
        deadline = time.monotonic() + _START_S
        with self._connect() as api:
            while not self._interrupts:
                try:
                    api.submit(self._config.spec)
                    return True
                except Rejected as error:
                    raise LaunchError(str(error), 2) from error
                except Retryable as error:
                    self._look_after_programs()
                    if time.monotonic() > deadline:
                        raise LaunchError(f"the job server does not answer: {error}") from error
                    time.sleep(_LOOK_EVERY_S)
        return False

    def _connect(self) -> ApiClient:
        return ApiClient(self._url, self._config.token)

    # --- watch --------------------------------------------------------------------------------

    def _watch_patiently(self) -> JobStatus | None:
        """Do as `_watch`; where nobody reads what is shown any more, stop the job in order."""
        try:
            return self._watch()
        except BrokenPipeError:  # as where `| tee log` has ended with its terminal
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._interrupts = max(self._interrupts, 1)
            return self._watch()

    def _watch(self) -> JobStatus | None:
        """Show the job until it ends; None: it was cut short.

        Raises:
            BrokenPipeError: nobody reads that any more.
        """
        with contextlib.closing(JobWatch(self._connect, self._config.spec.job_id)) as watch:
            return self._follow(watch)

    def _follow(self, watch: JobWatch) -> JobStatus | None:
        asked, shown = False, ""
        warned: tuple[str, ...] = ()
        while True:
            watch.changed.wait(_LOOK_EVERY_S)
            watch.changed.clear()
            status = watch.status
            if watch.warnings != warned:  # no event says so, as none can be written
                warned = watch.warnings
                for text in warned:
                    show(f"warning: {text}")
            events = watch.take_events()
            self._output.show_new()  # the events may be about it
            for event in events:
                show(without_end(event.text))
            if status is not None and status.state.ended:
                for event in watch.fetch_events():
                    show(without_end(event.text))
                return status
            if watch.is_deleted:
                show("the job was deleted (`edl delete`)")
                return None
            self._look_after_programs()
            if self._interrupts and not asked:
                asked = True
                show("stopping the job once its state is written; Ctrl-C again ends it at once")
            if self._interrupts > 1:
                show(describe_loss(status))
                return None
            if asked:
                # Others may kill this process at any time: show how far it is.
                shown = show_saving(status, shown)
                self._ask_to_stop(status)

    def _ask_to_stop(self, status: JobStatus | None) -> None:
        if status is not None and status.state is JobState.STOPPING:
            return
        try:
            with self._connect() as api:
                api.stop(self._config.spec.job_id)
        except ServerAway as error:  # asked again
            if error.answers and self._has_grace_only:
                raise LaunchError(f"the job cannot be stopped in order, as {error}") from None
            if error.answers and not self._told_why:  # it may be so for ever: its disk is full
                self._told_why = True
                show(f"the job is not stopped yet, as {error}; trying again")
        except JobServerError:  # as one that has just ended
            pass

    def _look_after_programs(self) -> None:
        for program in (self._server, self._client):
            happened = program.look_after() if program is not None else ""
            if happened:
                show(happened)

    # --- end ----------------------------------------------------------------------------------

    def _end_programs(self) -> None:
        """Stop the client, which stops its pods, then the server."""
        if self._interrupts > 1:
            return
        if self._client is not None:
            self._client.stop(self._config.spec.grace_s + _CLIENT_STOP_EXTRA_S)
        if self._server is not None:
            self._server.stop(_SERVER_STOP_S)

    def _end_with_state(self) -> None:
        """Have the client write the newest state, as the job cannot go on, and wait for that."""
        client, before = self._client, self._interrupts
        if client is None or before > 1:
            return
        if not client.stop(0.0):
            text = "the job client ends the pods, and writes their newest state"
            show(f"{text}; Ctrl-C ends it at once")
            while not client.has_ended(_LOOK_EVERY_S):
                if self._interrupts > before:
                    return
            show(f"what it did:\n{client.last_lines()}")
        self._end_without_client(lambda: self._interrupts > before)

    def _end_without_client(self, is_cancelled: Callable[[], bool]) -> None:
        """Do what the client has left undone, as where it has died: shims end with their states."""
        pods_dir = self._config.folder / "client" / "pods"
        pods = find_pods(pods_dir)
        if not pods:
            return
        show(
            "no job client is left: ending the pods, and writing their newest state; Ctrl-C ends "
            "it at once"
        )
        end_pods(pods, self._config.spec.grace_s, is_cancelled)
        if not is_cancelled():
            state = write_newest(find_pods(pods_dir), self._env, is_cancelled)
            show(describe_last_state(state))

    def _keep_page(self) -> None:
        """Leave the status page in the run folder, as it is at the end."""
        if self._interrupts > 1:
            return
        try:
            with self._connect() as api:
                (self._config.folder / "status.html").write_text(api.page(), encoding="utf-8")
        except (JobServerError, OSError) as error:
            show(f"the status page could not be kept: {error}")

    def _kill_rest(self) -> None:
        """Kill all that this run has started, however it ends."""
        for program in (self._client, self._server):
            if program is not None:
                program.kill()
        killed = processes.kill_marked(RUN_ID, self._run_id, lambda _pid, _env: False)
        remove_shared_memory(killed)

    def _sum_up(self, status: JobStatus | None) -> int:
        if status is None:
            show("the job was cut short")
            return 1
        folder = self._config.folder
        state, stages = status.state.value, len(status.stages)
        reason = status.reason.removeprefix(f"{state}: ")
        failed = status.state is JobState.FAILED
        loss = status.metrics.get(TRAIN_LOSS)
        shown = "" if loss is None else f" ({TRAIN_LOSS} {loss:.4g})"
        step = f"step {status.step}{shown}, " if status.step or failed else ""  # none without loop
        show(
            f"{state} after {step}{stages} stage{'s' if stages > 1 else ''} and "
            f"{status.account.total_s:.1f} s{'' if failed else f': {reason}'}"
        )
        if failed:
            show(reason)
            if status.error is not None and status.error.text not in reason:
                show("the first error: " + "; ".join(error_lines(status.error)))
            self._show_end_of(self._culprit(reason))
        show(f"logs, state and status.html in {folder}")
        return 0 if status.state is JobState.SUCCEEDED else 1

    def _culprit(self, reason: str) -> Path | None:
        """Return the newest log of the rank that the reason names, else of all; None: no log."""
        named = re.search(r"\brank (\d+) \(", reason)
        ranks = (named[1], "*") if named is not None else ("*",)
        for rank in ranks:
            logs = (self._config.folder / "trainers").glob(f"trainer_{rank}.stage_*.log")
            newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
            if newest is not None:
                return newest
        return None

    def _show_end_of(self, log: Path | None) -> None:
        """Show the traceback that ended the job, if it is off the screen; else the last lines."""
        if log is None:
            return
        lines = self._output.repeat(log)
        if lines is None:
            lines = read_tail(log)[-_SHOWN_LINES:]
        shown = "".join(f"\n  {line}" for line in lines)
        show(f"the end of {log}:{shown}" if shown else f"its output: {log}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, _frame: object) -> None:
            self._interrupts += 1
            self._has_grace_only |= number == signal.SIGTERM

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else it runs under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def link_latest(folder: Path) -> None:
    """Have `latest` beside a run's folder lead to it; where it is another user's it stays so."""
    latest, made = folder.parent / "latest", folder.parent / f".latest.{folder.name}"
    try:
        made.symlink_to(folder.name)
        try:
            made.replace(latest)
        except OSError:
            made.unlink()
            raise
    except OSError as error:  # in a folder of all users, as /tmp is
        show(f"{latest} does not lead there: {error.strerror}")


def show_saving(status: JobStatus | None, shown: str) -> str:
    """Show how far the state is written, if that is new; return what was shown last."""
    if status is None or status.saving is None:
        return shown
    text = saving_text(status.saving)
    if text != shown:
        show(text)
    return text


def describe_loss(status: JobStatus | None) -> str:
    """Return what is lost if the job ends at once."""
    if status is None or not status.step:
        return "ended at once"
    saved = status.saved
    if saved is not None and saved.step >= status.step:
        return f"ended at once; step {saved.step} is in {saved.path}"
    return f"ended at once: step {status.step} is lost, but for what checkpoints hold"


def describe_continuation(status: JobStatus | None) -> str:
    """Return how the training goes on after it was interrupted; "" where nothing was written."""
    saved = None if status is None else status.saved
    return "" if saved is None else _how_to_go_on(saved)


def describe_last_state(state: SaveState) -> str:
    """Return where the state is that this process has had written itself, or that it is lost."""
    if state.phase is SavePhase.WRITTEN:
        return _how_to_go_on(state)
    if state.nothing:
        return "no pod held a state: what checkpoints hold is all that there is"
    return f"the newest state is lost, but for what checkpoints hold: {state.reason}"


def _how_to_go_on(saved: Saved | SaveState) -> str:
    if saved.spare:
        # The next run has a folder of its own, and does not look here.
        return f"step {saved.step} is in {saved.path}: give that to the script as its checkpoint="
    return f"the same command goes on at step {saved.step + 1}, from {saved.path}"


def show(text: str) -> None:
    """Print a line of `edl run` itself."""
    if not text:
        return
    with patient_output():
        sys.stdout.write(f"edl: {printable(text, lines=True)}\n")
        sys.stdout.flush()


def claim_port(ports: Iterable[int]) -> tuple[int, socket.socket]:
    """Return the first free one, and what keeps it from other runs while that is open.

    A server opens its port a second later, and again when it restarts.

    Raises:
        LaunchError: there is none.
    """
    for port in ports:
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0edl-run-port-{port}")  # as long as a process lives, for all users
            probe.bind(("127.0.0.1", port))
            return port, claim
        claim.close()
    raise LaunchError(f"no free port from {_SERVER_PORTS[0]} to {_SERVER_PORTS[-1]}")
