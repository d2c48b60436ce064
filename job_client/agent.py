"""Keep this node's pods as the server's plan wants them: compare, act, report, repeat."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from urllib.parse import urlsplit

from job_client.client_dir import ClientDir
from job_client.config import ClientConfig
from job_client.devices.gpus import Inventory
from job_client.devices.host import NOT_KNOWN, Host, trees
from job_client.devices.node_load import NodeMeter
from job_client.errors import JobClientError, SetupError
from job_client.pods import folders, pod_folder
from job_client.pods.saving import SaveAttempt
from job_client.pods.supervisor import PodContext, PodSupervisor
from job_client.preemption import ENDING, SEEN, Departure, PreemptionNotice
from job_client.reconcile import KillPod, PodKey, ReleasePod, StartPod, StopPod, plan_changes
from job_client.server_link import Callbacks, NodeApi, NodeLink, find_job
from job_client.wake_event import WakeEvent
from job_server.api.addresses import address_facing
from job_server.api.command_line import keep_token
from job_server.api.text import saving_text
from job_server.api.wire import (
    Acknowledgement,
    Node,
    NodeLoad,
    NodePlan,
    NodeReport,
    PodPhase,
    Save,
    SavePhase,
    SlotUsage,
    WireError,
    is_same_job,
)
from pod_runtime import env, processes
from pod_runtime.network import interface_of

logger = logging.getLogger(__name__)

TICK_S = 1.0  # all events wake the loop; the tick is for what only time changes
STUCK_S = 60.0  # the loop has done nothing for so long: a call of it hangs
FENCE_GRACE_S = 1.0  # the server takes the pods for ended 6 s after `stop_after`
SAVE_STALL_S = 60.0  # a writer that writes nothing for so long is given up
SHOW_EVERY_S = 2.0  # its progress, in the log
GOODBYE_S = 5.0  # for a server that has to hear where the last state is
END_EXTRA_S = 10.0  # beyond the longest grace, for pods that are ending


class EndMode(Enum):
    """How the client has been asked to end."""

    STOP = "stop"  # its pods first, with their grace
    KEEP = "keep"  # pods stay for a successor
    KILL = "kill"  # pods first, at once


class Agent:
    """The job client of one node.

    Args:
        make_api: makes a connection to the server; each thread has its own.
        inventory: this node's slots.
    """

    def __init__(
        self,
        config: ClientConfig,
        client_dir: ClientDir,
        inventory: Inventory,
        make_api: Callable[[], NodeApi],
    ) -> None:
        self._config = config
        self._inventory = inventory
        self._host = Host()
        self._foreign = NOT_KNOWN
        self._meter = NodeMeter(self._host, (client_dir.log_dir, config.pod_path))
        self._load: NodeLoad | None = None  # None: not known yet
        self._make_api = make_api
        lives = any(pod_folder.has_shim(each) for each, _ in pod_folder.find(client_dir.pods_dir))
        self._node_id = config.node_id or client_dir.default_node_id(stays=lives)
        self._addr = config.addr or own_address(config.server_url)
        self._job_id: str | None = None  # None: any job that comes by folder
        jobs_dir = config.jobs_dir
        self._jobs_dir = None if jobs_dir is None else folders.JobsDir(jobs_dir)
        self._pods_dir = client_dir.pods_dir
        self._client = client_dir.client_id()
        self._pods: dict[PodKey, PodSupervisor] = {}
        self._lock = threading.Lock()  # guards _pods, _plan, _end and _contact_at
        self._wake = WakeEvent()
        self._plan: NodePlan | None = None  # None: not received yet
        self._contact_at = time.monotonic()
        self._end: EndMode | None = None  # None: go on
        self._failure: JobClientError | None = None  # None: none
        self._usage: tuple[SlotUsage, ...] = ()
        self._link: NodeLink | None = None  # None: not connected yet
        self._draining = ""  # why jobs are to leave this node; "": they may stay
        self._turned_at = time.monotonic()  # when the loop came round last
        self._is_stuck = False  # ... and whether that is long ago
        self._thread_id: int | None = None  # of the loop
        self._leaving: Departure | None = None  # None: not asked to end
        token_file = config.token_file
        if token_file is None and config.token is not None:
            token_file = client_dir.log_dir / "token"
            keep_token(token_file, config.token)
        self._context = PodContext(
            config=config,
            node_id=self._node_id,
            addr=self._address,
            marker=client_dir.marker,
            inventory=inventory,
            token_file=token_file,
            changed=self._changed,
        )

    def run(self) -> int:
        """Work until asked to end; return the exit code.

        Raises:
            JobClientError: the command line does not fit the server, or it refuses this client.
                Pods that run stay as they are.
        """
        self._thread_id = threading.get_ident()
        self._adopt()
        self._clean_orphans()
        if not self._choose_job():
            return self._leave()
        try:
            self._node()
        except WireError as error:  # too few ports for the slots, an address that is none
            raise SetupError(f"this node cannot be registered: {error}") from None
        callbacks = Callbacks(
            node=self._node,
            address=self._address,
            plan=self._take_plan,
            report=self._report,
            reported=self._note_reported,
            contact=self._note_contact,
            fatal=self._failed,
        )
        self._link = NodeLink(
            self._make_api, callbacks, choose_ports=self._config.port_range is None
        )
        self._turned_at = time.monotonic()
        self._link.start()
        command = self._config.preemption_notice
        notice = None if command is None else PreemptionNotice(command, lambda: self._drain(SEEN))
        if notice is not None:
            notice.start()
        while self._failure is None and not self._is_over():
            self._wake.wait(self._reconcile())
            self._turned_at = time.monotonic()
        self._turned_at = math.inf  # what follows has time limits of its own
        if notice is not None:
            notice.close()
        if self._failure is not None:
            self._link.close()
            raise self._failure
        return self._leave()

    def end(self, how: EndMode) -> None:
        """Ask the client to end; KILL has it end at once. Thread-safe."""
        self._end = how
        self._wake.set()

    def _is_over(self) -> bool:
        """Return whether the loop is to end. Jobs that can go on elsewhere leave first."""
        if self._end is not EndMode.STOP:
            return self._end is not None
        if not self._pods:
            return True
        now = time.monotonic()
        if self._leaving is None:
            logger.info("asked to end: jobs that can go on elsewhere leave first")
            self._leaving = Departure(now)
            self._drain(ENDING)
        grace_s = max(pod.local().grace_s for pod in self._pods.values())
        return not self._leaving.goes_on(now, grace_s)

    def _drain(self, why: str) -> None:
        """Have the jobs leave this node. Thread-safe."""
        self._draining = why
        self._changed()

    # --- beginning

    def _adopt(self) -> None:
        for folder, spec in pod_folder.find(self._pods_dir):
            pod = PodSupervisor(self._context, spec, folder)
            if pod.adopt():
                with self._lock:
                    self._pods[spec.job_id, spec.pod_id] = pod

    def _clean_orphans(self) -> None:
        """Kill processes that an earlier client's pods left behind without a living shim."""
        supervised = {
            str(pod.folder) for pod in self._pods.values() if pod_folder.has_shim(pod.folder)
        }
        killed = processes.kill_marked(
            env.RUN_MARKER,
            self._context.marker,
            lambda _, environ: environ.get("EDL_POD_DIR") in supervised,
        )
        if killed:
            logger.warning("killed what earlier pods of this client left: pids %s", killed)

    def _choose_job(self) -> bool:
        """Choose the job that this node serves; False: the client was asked to end meanwhile."""
        if self._config.jobs_dir is not None:
            return True
        living = {job_id for (job_id, _), pod in self._pods.items() if pod.holds_slots}
        if self._config.job_id is not None:
            self._job_id = self._config.job_id
        elif len(living) == 1:
            self._job_id = living.pop()
        else:  # the job of pods that have ended may be long over
            known = {job_id for job_id, _ in self._pods}
            self._job_id = find_job(self._make_api(), self._wait_to_end, known)
        if self._job_id is not None:
            logger.info("serving job %s", self._job_id)
        return self._job_id is not None

    def _wait_to_end(self, timeout_s: float) -> bool:
        self._wake.wait(timeout_s)
        return self._end is not None

    # --- callbacks of the link, called from its threads

    def _node(self) -> Node:
        low, high = self._config.port_range or (1024, 65535)  # or: the link knows the block
        return Node(
            node_id=self._node_id,
            addr=self._address(),
            slots=self._inventory.slots(self._held_slots()),
            port_low=low,
            port_high=high,
            job_id=self._job_id,
            stop_after_s=self._config.stop_after_s,
            saves=True,
            gives_args=True,
            client=self._client,
            folders=() if self._jobs_dir is None else self._jobs_dir.jobs(),
            cpu_milli=self._host.cpu_milli,
            memory_mb=self._host.memory_mb,
        )

    def _address(self) -> str:
        """Return this node's address: another one where no interface has that of before."""
        # No network, which may come back as it was; or no descriptor to look with.
        with contextlib.suppress(SetupError, OSError):
            if self._config.addr is None and interface_of(self._addr) is None:
                self._addr = own_address(self._config.server_url)
        return self._addr

    def _take_plan(self, plan: NodePlan) -> None:
        with self._lock:
            self._plan = plan
        self._wake.set()

    def _note_contact(self, sent_at: float) -> None:
        with self._lock:
            self._contact_at = max(self._contact_at, sent_at)

    def _failed(self, error: JobClientError) -> None:
        self._failure = error
        self._wake.set()

    def _report(self, fresh: bool) -> NodeReport | None:
        """Return what to report; None: nothing, as nobody here does what the server wants."""
        stuck_s = time.monotonic() - self._turned_at
        if stuck_s > STUCK_S and not self._is_stuck:
            logger.error(
                "this client has hung for %.0f s: it reports nothing until it goes on, so that its "
                "node counts as lost; where it hangs:\n%s", stuck_s, _stack_of(self._thread_id),
            )  # fmt: skip
        self._is_stuck = stuck_s > STUCK_S
        if self._is_stuck:
            return None
        table = None
        with self._lock:
            pods = list(self._pods.values())
        if fresh:
            try:
                table = processes.read_all()
                shims = [pod.shim_pid for pod in pods if pod.shim_pid]
                ours = trees([os.getpid(), *shims], table)
                self._foreign = self._host.foreign(ours, time.monotonic(), shims=shims)
                self._usage = self._inventory.usage(self._held_slots())
                self._load = self._meter.read(time.monotonic())
            except OSError as error:  # no descriptor, no memory: a report says more than figures
                logger.warning("what the pods use is not known: %s", error)
        usage = self._usage
        if self._end not in (None, EndMode.KEEP):  # so that the server places nothing here any more
            usage = tuple(replace(each, stranger="its client, which is ending") for each in usage)
        return NodeReport(
            node_id=self._node_id,
            pods=tuple(pod.state(table) for pod in pods),
            slots=usage,
            client=self._client,
            draining=self._draining,
            foreign_cpu_milli=self._foreign.cpu_milli,
            foreign_memory_mb=self._foreign.memory_mb,
            sent_ms=int(time.monotonic() * 1000),
            load=self._load,
        )

    def _note_reported(self, report: NodeReport, answer: Acknowledgement) -> None:
        leaving = self._leaving
        if leaving is not None and report.draining:  # for whatever reason: a notice may have come
            leaving.moving, leaving.answered = answer.moving, True
            self._wake.set()
        with self._lock:
            for state in report.pods:
                pod = self._pods.get((state.job_id, state.pod_id))
                if pod is not None and state.save is not None and state.save.id == 0:
                    pod.is_told()

    def _changed(self) -> None:
        self._wake.set()
        if self._link is not None:
            self._link.wake_report()

    def _held_slots(self) -> set[int]:
        with self._lock:
            pods = list(self._pods.values())
        return {slot for pod in pods if pod.holds_slots for slot in pod.spec.slots}

    # --- the loop

    def _reconcile(self) -> float:
        """Do what is to be done now; return how long to wait for something new."""
        with self._lock:
            plan, silent_s = self._plan, time.monotonic() - self._contact_at
            pods = dict(self._pods)
        limit_s = self._config.stop_after_s
        if limit_s is not None and silent_s >= limit_s:
            self._fence(pods, limit_s)
            return TICK_S
        for pod in pods.values():
            pod.keep_folder()
            pod.keep_log_short()
            pod.wake_shim()
        wait_s = TICK_S if limit_s is None else min(TICK_S, limit_s - silent_s)
        if plan is None:
            return wait_s
        for action in plan_changes([pod.local() for pod in pods.values()], plan.pods):
            match action:
                case StartPod(spec):
                    folder = pod_folder.folder_of(self._pods_dir, spec)
                    pod = PodSupervisor(self._context, spec, folder)
                    with self._lock:
                        self._pods[spec.job_id, spec.pod_id] = pod
                    pod.start()
                case StopPod(key, grace_s, reason):
                    pods[key].stop(grace_s, reason)
                case KillPod(key, reason):
                    pods[key].kill(reason)
                case ReleasePod(key, reason):
                    self._release(key, reason)

        for spec in plan.pods:
            known = pods.get((spec.job_id, spec.pod_id))
            if known is not None and is_same_job(known.spec.submitted_at, spec.submitted_at):
                known.save(spec.save)
        return wait_s

    def _release(self, key: PodKey, reason: str) -> None:
        with self._lock:
            pod = self._pods.pop(key)
        pod.release(reason)
        if self._config.keep_folders:
            try:
                pod_folder.drop_oldest(self._pods_dir, self._config.keep_folders)
            except OSError as error:  # tried at the next end
                logger.warning("the folders of old pods stay: %s", error)

    def _fence(self, pods: dict[PodKey, PodSupervisor], limit_s: float) -> None:
        """Stop all pods: from now on the server may start the same work elsewhere."""
        reason = f"no answer from the server for {limit_s:g} s (--on_server_loss stop_after)"
        for pod in pods.values():
            if pod.local().phase in (PodPhase.STARTING, PodPhase.RUNNING):
                pod.stop(FENCE_GRACE_S, reason, at_most=True)

    # --- ending

    def _leave(self) -> int:
        if self._end is EndMode.KEEP:
            logger.info("ending; %d pods stay for the next client", len(self._pods))
            if self._link is not None:
                self._link.close()
            return 0
        if not self._stop_all():
            logger.error("ending, though some pods have not: see the log above")
        self._save_what_is_held()
        if self._link is not None:
            # The shims are about to end, and what they hold is gone then.
            states = tuple(replace(pod.state(), holds=False) for pod in self._pods.values())
            untold = any(pod.local().untold for pod in self._pods.values())
            self._link.say_goodbye(
                NodeReport(node_id=self._node_id, pods=states, leaving=True, client=self._client),
                patience_s=GOODBYE_S if untold else 0.0,
            )
        for key in list(self._pods):
            self._release(key, "this client ends")
        logger.info("ended")
        return 0

    def _save_what_is_held(self) -> None:
        """Write the newest state of each job whose last state this node has to write.

        The server may be gone, and this client may be killed at any moment. So it begins at once,
        logs its progress, and goes on as long as bytes are written. If the server has ordered the
        same save, its writer goes on instead: two must not write to one folder. A client that has
        not heard whose task it is writes what its pods hold, to their run folders.
        """
        plan = self._plan
        if plan is not None:
            wanted = {pod.job_id: pod.submitted_at for pod in plan.pods if pod.last_save}
        else:
            held = [each for each in self._pods.values() if each.state().snapshot is not None]
            wanted = {each.spec.job_id: each.spec.submitted_at for each in held}
        begun: list[tuple[str, list[PodSupervisor], SaveAttempt]] = []
        for job_id, submitted_at in sorted(wanted.items()):
            pods = [
                pod
                for key, pod in self._pods.items()
                if key[0] == job_id and is_same_job(pod.spec.submitted_at, submitted_at)
            ]
            if not pods:
                continue
            logger.info("job %s: writing its newest state; a second signal ends this", job_id)
            at_work = [pod.at_work for pod in pods if pod.at_work is not None]
            saving = next(iter(at_work), None)
            if saving is None:
                for pod in pods:
                    pod.rouse_shim("its state is to be written")
                order = Save(id=0, spare=plan is None)
                saving = pods[0].saving(order, [pod.folder for pod in pods])
                if self._end is not EndMode.KILL:
                    saving.start()
            begun.append((job_id, pods, saving))
        for job_id, pods, saving in begun:
            self._follow_last(job_id, pods, saving)

    def _follow_last(self, job_id: str, pods: list[PodSupervisor], saving: SaveAttempt) -> None:
        state, grown_at = saving.state, time.monotonic()
        shown_at = grown_at
        while not saving.is_over:
            late = time.monotonic() > grown_at + SAVE_STALL_S
            if self._end is EndMode.KILL or late:
                saving.cancel()
                break
            self._wake.wait(0.2)
            if saving.state != state:
                state, grown_at = saving.state, time.monotonic()
                if grown_at > shown_at + SHOW_EVERY_S:
                    shown_at = grown_at
                    logger.info("job %s: %s", job_id, saving_text(state))
        if saving.state.phase is not SavePhase.WRITTEN:
            logger.error(
                "job %s: the state that its pods here held in memory is lost: %s", job_id,
                saving.state.reason or saving_text(saving.state),
            )  # fmt: skip
            return
        for pod in pods:
            pod.is_saved(saving.state)

    def _stop_all(self) -> bool:
        """Stop every pod and wait until all have exited; return whether all have."""
        with self._lock:
            pods = list(self._pods.values())
        killing = self._end is EndMode.KILL  # it may become so at any time: see below
        for pod in pods:
            if killing:
                pod.kill("this client ends at once")
            else:
                pod.stop(pod.spec.grace_s, "this client ends")
        longest_s = max((pod.local().grace_s for pod in pods), default=0.0)
        deadline = time.monotonic() + longest_s + END_EXTRA_S
        while any(pod.holds_slots for pod in pods):
            if time.monotonic() > deadline:
                return False
            if self._end is EndMode.KILL and not killing:
                killing = True
                for pod in pods:
                    pod.kill("asked a second time to end")
            self._wake.wait(0.2)
        return True


def install_signals(agent: Agent, *, keep_pods: bool) -> None:
    """Make SIGTERM and SIGINT end the agent: in order the first time, at once the second."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        first = EndMode.KEEP if keep_pods else EndMode.STOP
        agent.end(first if len(received) == 1 else EndMode.KILL)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _stack_of(thread_id: int | None) -> str:
    frame = sys._current_frames().get(thread_id or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "not known"


def own_address(server_url: str) -> str:
    """Return the address of this machine that faces the server; 127.0.0.1 when that is here.

    Raises:
        SetupError: the server's name does not resolve.
    """
    parts = urlsplit(server_url)
    try:
        return address_facing(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise SetupError(
            f"--job_server: cannot find the way to {parts.hostname}: {error}; check the name, or "
            "give this node's own address by --addr"
        ) from None
