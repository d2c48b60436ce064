"""Supervise one pod of this node: make its folder, start it under its shim, follow it to its end.

Each pod has a thread that waits. All other calls return at once, so no pod waits for another, and
pods do not depend on the life of the client.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from job_client.config import ClientConfig
from job_client.devices.gpus import Inventory
from job_client.errors import PodStartError
from job_client.pods import folders, pod_folder, shims
from job_client.pods.pod_folder import ShimProcess
from job_client.pods.saving import SaveAttempt
from job_client.reconcile import LocalPod
from job_client.threads import start_thread
from job_server.api.wire import (
    NodePod,
    PodPhase,
    PodState,
    Save,
    SavePhase,
    SaveState,
    SnapshotRef,
)
from pod_runtime import env, processes, shim_wire
from pod_runtime.log_tail import cut_log, last_lines
from pod_runtime.orphans import KILL_WAIT_S, noted_forks, remove_shared_memory
from pod_runtime.processes import Process
from pod_runtime.shim_wire import PodExit, ShimError

logger = logging.getLogger(__name__)

SHIM_DIED = "shim died"
AGAIN_S = 1.0  # between two tries to find what a pod has left
ANSWER_S = 2.0  # a shim that takes longer to answer is stopped, or the machine is overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """What all pods of a client share."""

    config: ClientConfig
    node_id: str
    addr: Callable[[], str]  # of the node, as others reach it now
    marker: str
    inventory: Inventory
    token_file: Path | None  # None: the server wants no token
    changed: Callable[[], None]  # to be called whenever a pod's phase has changed


class PodSupervisor:
    """One pod on this node. All methods may be called from any thread."""

    def __init__(self, context: PodContext, spec: NodePod, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self._context = context
        self._lock = threading.Lock()
        self._phase = PodPhase.STARTING
        self._shim: ShimProcess | None = None  # None: not started yet, or never
        self._exit: PodExit | None = None  # None: not ended
        self._cancel = threading.Event()  # set by a stop: start nothing any more
        self._begun = False  # a process of the pod may be there
        self._ended = threading.Event()
        self._stop_grace_s: float | None = None  # None: not being stopped
        self._stop_reason = ""
        self._killed = False
        self._cpu_before: tuple[float, float] | None = None  # (CPU seconds, at); None: no sample
        self._saving: SaveAttempt | None = None  # None: nothing is to be written
        self._holds = True  # its shim may be there; False: it is gone, and its memory with it
        self._snapshot: SnapshotRef | None = None  # held as the pod had ended; None: none known
        self._last_save: SaveState | None = None  # by its client as that was ended; None: nothing
        self._untold = False  # the server may not know of that

    # --- state

    def local(self) -> LocalPod:
        with self._lock:
            return LocalPod(
                job_id=self.spec.job_id,
                pod_id=self.spec.pod_id,
                phase=self._phase,
                grace_s=self._grace(self.spec.grace_s),
                killed=self._killed,
                slots=self.spec.slots,
                submitted_at=self.spec.submitted_at,
                untold=self._untold,
            )

    def state(self, table: Mapping[int, Process] | None = None) -> PodState:
        """Return the report of this pod, with CPU and memory if a table of processes is given."""
        with self._lock:
            phase, ended, shim = self._phase, self._exit, self._shim
        cpu_percent, memory_bytes = 0.0, 0
        if table is not None and shim is not None and phase is not PodPhase.EXITED:
            cpu_percent, memory_bytes = self._usage(processes.descendants(shim.pid, table))
        return PodState(
            pod_id=self.spec.pod_id,
            job_id=self.spec.job_id,
            phase=phase,
            exit_code=None if ended is None else ended.code,
            signal=None if ended is None else ended.signal,
            reason="" if ended is None else ended.reason,
            last_lines=() if ended is None else ended.last_lines,
            log_path=str(self.folder / "log"),
            cpu_percent=cpu_percent,
            memory_bytes=memory_bytes,
            save=self._last_save if self._saving is None else self._saving.state,
            holds=self._holds,
            snapshot=self._snapshot,
            submitted_at=self.spec.submitted_at,
            complete=pod_folder.is_complete(self.folder),
        )

    def _usage(self, found: list[Process]) -> tuple[float, int]:
        used_s, now = sum(process.cpu_s for process in found), time.monotonic()
        before, self._cpu_before = self._cpu_before, (used_s, now)
        share = 0.0
        if before is not None and now > before[1]:
            share = max(0.0, (used_s - before[0]) / (now - before[1]))  # processes may have ended
        return round(100 * share, 1), sum(process.rss_bytes for process in found)

    @property
    def shim_pid(self) -> int | None:
        """The process above all of the pod's; None: not known yet, or there is none."""
        with self._lock:
            return None if self._shim is None else self._shim.pid

    @property
    def holds_slots(self) -> bool:
        return self.local().phase is not PodPhase.EXITED

    # --- actions

    def start(self) -> None:
        """Begin to start the pod; `state` shows how far that is."""
        self._spawn(self._start_and_follow)

    def adopt(self) -> bool:
        """Take over a pod that an earlier client of this folder has started.

        Returns:
            False: it had not been started yet, so that it can be started afresh.
        """
        shim, ended = pod_folder.read_shim(self.folder), pod_folder.read_exit(self.folder)
        if shim is None and ended is None:
            return False
        self._begun = True
        self._last_save = pod_folder.read_saved(self.folder)
        self._untold = self._last_save is not None
        if shim is not None and shim.is_alive():
            self._shim = shim
            if ended is None:
                pod_folder.write_server(self.folder, self._context.config.server_url)
                self._set(PodPhase.RUNNING)
            else:  # the shim stays for what it holds, or is about to end
                self._snapshot = shims.newest_held(self.folder, ANSWER_S)
                self._finish(ended)
            self._spawn(self._adopted)
        elif ended is not None:
            self._holds = False
            self._finish(ended)
        else:
            self._holds = False
            self._bury(f"{SHIM_DIED} while no client was there")
        return True

    def stop(self, grace_s: float, reason: str, *, at_most: bool = False) -> None:
        """SIGTERM to every process of the pod, SIGKILL after the grace; returns at once.

        Args:
            at_most: a longer `--grace_s` does not count.
        """
        grace_s = min(grace_s, self._grace(grace_s)) if at_most else self._grace(grace_s)
        with self._lock:
            if self._phase is PodPhase.EXITED:
                return
            self._stop_grace_s, self._stop_reason = grace_s, reason
            self._phase = PodPhase.STOPPING
            self._cancel.set()
            shim, begun = self._shim, self._begun
        logger.info("pod %s: stop, grace %g s: %s", self.spec.pod_id, grace_s, reason)
        if not begun:
            self._finish(_NEVER_BEGUN)
        if shim is not None:
            self._spawn(lambda: self._end({"op": "stop", "grace_s": grace_s}, grace_s))
        self._context.changed()

    def kill(self, reason: str) -> None:
        """SIGKILL to every process of the pod; returns at once."""
        with self._lock:
            if self._phase is PodPhase.EXITED:
                return
            self._killed, self._stop_grace_s, self._stop_reason = True, 0.0, reason
            self._phase = PodPhase.STOPPING
            self._cancel.set()
            shim, begun = self._shim, self._begun
        logger.info("pod %s: kill: %s", self.spec.pod_id, reason)
        if not begun:
            self._finish(_NEVER_BEGUN)
        if shim is not None:
            self._spawn(lambda: self._end({"op": "kill"}, 0.0))
        self._context.changed()

    def save(self, order: Save | None) -> None:
        """Write the state that the shim holds, as the server orders it; None: cancel that."""
        before = self._saving
        if before is not None and (order is None or order.id != before.order.id):
            before.cancel()
            if not before.is_over:
                return  # called again later: two writers must not write to one folder
            self._saving = None
        if order is not None and self._saving is None:
            self.rouse_shim("its state is to be written")
            self._saving = self.saving(order, [self.folder])
            self._saving.start()

    def saving(self, order: Save, folders: list[Path]) -> SaveAttempt:
        """Return an attempt, not started, to save the state of these shims of this pod's job."""
        return SaveAttempt(order, folders, self._environment(), self._context.changed)

    @property
    def at_work(self) -> SaveAttempt | None:
        """The running attempt to save the shim's state; None: there is none."""
        saving = self._saving
        ended = saving is None or saving.is_over or saving.state.phase is not SavePhase.WRITING
        return None if ended else saving

    def is_saved(self, state: SaveState) -> None:
        """Report from now on, also after a restart of the client, where the last state is."""
        self._last_save, self._saving = replace(state, id=0), None
        self._untold = True
        pod_folder.write_saved(self.folder, self._last_save)

    def is_told(self) -> None:
        """The server has heard where the last state is."""
        self._untold = False

    def release(self, reason: str) -> None:
        """End the shim, and drop the state that it holds. Only for a pod that has exited.

        The next client of this folder finds the pod again if the server still has to hear of it.
        """
        self.save(None)
        logger.info("pod %s: released: %s", self.spec.pod_id, reason)
        if self._shim is not None and self._shim.is_alive():
            self._ask({"op": "release"})
        if not self._untold:
            pod_folder.release(self.folder)

    def _grace(self, grace_s: float) -> float:
        chosen = self._context.config.grace_s
        return grace_s if chosen is None else chosen

    def _ask(self, request: dict[str, object]) -> bool:
        """Return whether the shim has answered."""
        try:
            shim_wire.request(self.folder, request, timeout_s=ANSWER_S)
        except ShimError as error:  # it is about to end, or dead: its thread will notice
            logger.debug("pod %s: %s", self.spec.pod_id, error)
            return False
        return True

    def _end(self, request: dict[str, object], grace_s: float) -> None:
        """Have the shim end the pod; after the grace, without one that is stopped (SIGSTOP) again.

        The state that it holds is lost with it. One that only is slow to answer is waited for.
        """
        deadline = time.monotonic() + grace_s
        self.rouse_shim("its pod is to end")
        is_told = self._ask(request)
        while not self._ended.wait(max(0.0, deadline - time.monotonic())):
            answers = self._ask({"op": "status"} if is_told else request)
            is_told |= answers
            if not answers and self._shim_is_stopped():
                break
            deadline = time.monotonic() + ANSWER_S
        if not self._ended.is_set():
            logger.error("pod %s: its shim is stopped again; killing all", self.spec.pod_id)
            self._clean(except_pid=None)

    def _shim_is_stopped(self) -> bool:
        with self._lock:
            shim = self._shim
        found = None if shim is None else processes.read(shim.pid)
        if shim is None or found is None or found.start_time != shim.start_time:
            return False
        return found.state in "Tt"

    def wake_shim(self) -> None:
        """Have a shim that was stopped (SIGSTOP) go on once a process of its pod has ended.

        Nobody else tells of a script's end. Beside a pod that runs, its stop is left as it is.
        """
        shim = self._shim
        if shim is None or self._ended.is_set() or not self._shim_is_stopped():
            return
        try:
            table = processes.read_all()
        except OSError:  # no descriptor, no memory: at the next look
            return
        if any(each.ppid == shim.pid and each.state == "Z" for each in table.values()):
            self.rouse_shim("a process of its pod has ended")

    def rouse_shim(self, why: str) -> None:
        """Have the shim go on if it was stopped (SIGSTOP), or is about to be."""
        shim = self._shim
        if shim is None:
            return
        if self._shim_is_stopped():
            logger.warning("pod %s: its shim was stopped, and goes on: %s", self.spec.pod_id, why)
        processes.send_signal(shim.pid, shim.start_time, signal.SIGCONT)

    def keep_folder(self) -> None:
        """Make the folder anew where somebody has deleted it, and have the shim listen there.

        So it does where its socket alone is gone, as after a cleaner of old files.
        """
        shim = self._shim
        is_gone = pod_folder.is_gone(self.folder)
        if shim is None or not (is_gone or pod_folder.is_deaf(self.folder)) or not shim.is_alive():
            return
        if is_gone and not self._make_folder_again():
            return
        processes.send_signal(shim.pid, shim.start_time, signal.SIGHUP)

    def _make_folder_again(self) -> bool:
        """Return whether it is there."""
        logger.error("pod %s: %s was deleted, with its log", self.spec.pod_id, self.folder)
        try:
            pod_folder.prepare(self.folder, self.spec)
        except OSError as error:
            logger.error("pod %s: %s", self.spec.pod_id, error)
            return False
        pod_folder.write_server(self.folder, self._context.config.server_url)
        return True

    def keep_log_short(self) -> None:
        """Cut the pod's log where it has become too long; its writers go on."""
        with contextlib.suppress(OSError):  # gone, or the disk is full: tried again
            cut_log(self.folder / "log")

    # --- its thread

    def _spawn(self, work: Callable[[], None]) -> None:
        # Daemons: with --keep_pods the client ends while its pods go on.
        name = f"pod {self.spec.pod_id}"
        thread = threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
        start_thread(thread)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PodStartError as error:
            if self._ended.is_set():  # stopped before it began: its folder may be a later pod's
                return
            self._clean(except_pid=None)
            self._finish(_failed_start(error, self.folder))
        # The outermost loop of this thread: without it the pod's end would never be noticed.
        except Exception as error:
            logger.exception("pod %s: its thread failed", self.spec.pod_id)
            if self._ended.is_set() and not self._begun:  # as above
                return
            self._bury(f"the client failed: {error}")

    def _start_and_follow(self) -> None:
        spec = self.spec
        try:
            pod_folder.prepare(self.folder, spec)
        except OSError as error:
            raise PodStartError(f"--log_dir: cannot write {self.folder}: {error}") from None
        for slot in spec.slots:
            obstacle = self._context.inventory.obstacle(slot)
            if obstacle:
                raise PodStartError(obstacle)
        recipe = folders.recipe_for(self._context.config, spec)
        environment = {**self._environment(), env.POD_FOLDER: str(recipe.folder)}
        log = self.folder / "log"
        if recipe.package_sh is not None and not self._begins():
            return
        folders.make_folder(recipe, spec.pod_id, environment, log, self._cancel)
        if not self._begins():
            return
        if self._cancel.is_set():
            raise PodStartError("stopped before it was started")
        command = ["bash", str(recipe.script), *recipe.args]
        shim = shims.start(self.folder, command, cwd=recipe.folder, env=environment)
        with self._lock:
            self._shim = shim
            if self._stop_grace_s is None:
                self._phase = PodPhase.RUNNING
            stop_grace_s, killed = self._stop_grace_s, self._killed
        logger.info(
            "pod %s of job %s: started, slots %s, shim %d", spec.pod_id, spec.job_id,
            ",".join(map(str, spec.slots)), shim.pid,
        )  # fmt: skip
        if killed:
            self._spawn(lambda: self._end({"op": "kill"}, 0.0))
        elif stop_grace_s is not None:
            self._spawn(lambda: self._end({"op": "stop", "grace_s": stop_grace_s}, stop_grace_s))
        self._context.changed()
        self._follow(shim)

    def _begins(self) -> bool:
        """Enter that processes of the pod may be there from now on; False: it was stopped before.

        Until then its end is told as soon as it is stopped: a folder on a file server that is away
        may never answer, and its slots are for others. Its folder may be a later pod's by then.
        """
        with self._lock:
            self._begun |= not self._cancel.is_set()
            return self._begun

    def _environment(self) -> dict[str, str]:
        spec, context = self.spec, self._context
        pod = env.PodEnv(
            job_server=context.config.server_url,
            job_id=spec.job_id,
            pod_id=spec.pod_id,
            pod_dir=self.folder,
            node_id=context.node_id,
            run_marker=context.marker,
            slots=spec.slots,
            slot_kind=context.inventory.kind,
            max_trainers=spec.max_trainers,
            grace_s=self._grace(spec.grace_s),
            token_file=context.token_file,
            service=spec.service,
            addr=context.addr(),
            ports=spec.ports,
            submitted_at=spec.submitted_at,
            args=spec.args,
        )
        return env.pod_environment(context.config.environ, pod)

    def _adopted(self) -> None:
        shim = self._shim
        assert shim is not None
        logger.info("pod %s: adopted, shim %d", self.spec.pod_id, shim.pid)
        try:
            status, _ = shim_wire.request(self.folder, {"op": "status"})
            if status.get("stopping"):
                self._set(PodPhase.STOPPING)
        except ShimError as error:
            logger.info("pod %s: %s", self.spec.pod_id, error)
        self._follow(shim)

    def _follow(self, shim: ShimProcess) -> None:
        """Wait until the pod has ended, and then until its shim has."""
        while True:
            try:
                ended = shims.follow(self.folder)
            except ShimError as error:
                logger.debug("pod %s: %s", self.spec.pod_id, error)
                ended = None
            ended = ended or pod_folder.read_exit(self.folder)
            if ended is not None:
                self._clean(except_pid=shim.pid)
                self._snapshot = shims.newest_held(self.folder, ANSWER_S)
                self._finish(ended)
                shims.wait_closed(self.folder)  # the shim may stay, for the state that it holds
                if not shim.is_alive():
                    self._holds = False
                    self._context.changed()
                return
            # A shim that is alive and does not answer is stopped or starved, not dead.
            if processes.wait_gone(shim.pid, shim.start_time, 0.2):
                ended = pod_folder.read_exit(self.folder)
                self._holds = False
                if ended is None:
                    self._bury(SHIM_DIED)
                else:
                    self._finish(ended)
                return

    def _bury(self, reason: str) -> None:
        """Kill what is left of a pod whose shim died without a report."""
        killed = self._clean(except_pid=None)
        if killed:
            reason += f"; {killed} processes of the pod were left and have been killed"
        ended = PodExit(
            code=None, signal=9, reason=reason, last_lines=last_lines(self.folder / "log")
        )
        pod_folder.write_exit(self.folder, ended)
        self._finish(ended)

    def _clean(self, *, except_pid: int | None) -> int:
        """SIGKILL the processes with this pod's mark, except one; return how many they were."""
        folder = str(self.folder)
        while True:
            try:
                killed = processes.kill_marked(
                    env.RUN_MARKER,
                    self._context.marker,
                    lambda pid, environ: pid == except_pid or environ.get("EDL_POD_DIR") != folder,
                )
                break
            except OSError as error:  # no descriptor, no memory: its end is told once that is done
                logger.warning("pod %s: what is left cannot be found: %s", self.spec.pod_id, error)
                time.sleep(AGAIN_S)
        if killed:
            logger.warning("pod %s: killed what was left: pids %s", self.spec.pod_id, killed)
        # The processes may have been killed together with the shim, and need a moment to die.
        remove_shared_memory({*killed, *noted_forks(self.folder)}, wait_s=KILL_WAIT_S)
        return len(killed)

    def _finish(self, ended: PodExit) -> None:
        with self._lock:
            if self._stop_reason and self._stop_reason not in ended.reason:
                ended = _with_reason(ended, self._stop_reason)
            if self._exit == ended:
                return
            self._exit, self._phase = ended, PodPhase.EXITED
            self._ended.set()
        logger.info("pod %s: exited: %s", self.spec.pod_id, ended.reason)
        self._context.changed()

    def _set(self, phase: PodPhase) -> None:
        with self._lock:
            self._phase = phase
        self._context.changed()


_NEVER_BEGUN = PodExit(
    code=None, signal=None, reason="stopped before it was started", last_lines=()
)


def _failed_start(error: PodStartError, folder: Path) -> PodExit:
    ended = PodExit(
        code=error.code if error.code is None or error.code >= 0 else None,
        signal=-error.code if error.code is not None and error.code < 0 else None,
        reason=error.reason,
        last_lines=last_lines(folder / "log"),
    )
    pod_folder.write_exit(folder, ended)
    return ended


def _with_reason(ended: PodExit, why: str) -> PodExit:
    return PodExit(
        code=ended.code,
        signal=ended.signal,
        reason=f"{ended.reason} ({why})",
        last_lines=ended.last_lines,
    )
