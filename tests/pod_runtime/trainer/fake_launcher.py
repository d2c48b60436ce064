"""A launcher, a shim and a server in one, for tests: real trainers, scripted stages.

It speaks the channel's protocol and keeps the segments that trainers hand over, as a shim would.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from job_server.api.codec import encode
from job_server.api.wire import Order, PlanPod, RestoreFrom, SlotKind, SnapshotRef, StagePlan, Way
from pod_runtime.env import PodEnv, trainer_environment
from pod_runtime.launcher.channel import close_all
from pod_runtime.segment_header import read_newest, read_slots
from pod_runtime.shim_wire import LineSocket
from tests import warm
from tests.support import free_port, wait_until

Process = subprocess.Popen[bytes] | warm.WarmProcess
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 90.0  # the machine that runs these tests may be busy


class Trainer:
    """One trainer process and what it has said."""

    def __init__(self, rank: int, process: Process, log: Path, pod_id: str) -> None:
        self.rank = rank
        self.process = process
        self.log = log
        self.pod_id = pod_id
        self.said: list[dict[str, Any]] = []
        self.lines: LineSocket | None = None
        self.later: Trainer | None = None  # the same process, as one of a later stage

    def goes_on(self, rank: int) -> "Trainer":
        """Return the same process as trainer `rank` of another stage, of which nobody has heard."""
        trainer = Trainer(rank, self.process, self.log, self.pod_id)
        trainer.lines = self.lines
        return trainer

    def end_workers(self) -> None:
        """Kill the loader's workers once the trainer has ended, as the launcher does.

        They hold the trainer's connections, which tell the other ranks of its end.
        """
        self.process.wait(TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def words(self, word: str) -> list[dict[str, Any]]:
        return [each for each in list(self.said) if each["say"] == word]

    def tell(self, **message: Any) -> None:
        assert self.lines is not None
        self.lines.send(message)


class Stage:
    """The trainers of one stage."""

    def __init__(self, launcher: "FakeLauncher", number: int, trainers: list[Trainer]) -> None:
        self.launcher = launcher
        self.number = number
        self.trainers = trainers
        self.plan: StagePlan | None = None  # None: not started
        self.restored_from = (0, 0)  # (stage, step)
        self.stayed: dict[int, Trainer] = {}  # rank -> the same process in the stage before

    def wait_all(self, word: str) -> list[dict[str, Any]]:
        """Wait until every trainer has said `word`; return each one's newest."""
        self._wait(lambda: all(trainer.words(word) for trainer in self.trainers), word)
        return [trainer.words(word)[-1] for trainer in self.trainers]

    def wait_step(self, step: int) -> None:
        """Wait until every trainer has said a step of at least `step`."""

        def reached() -> bool:
            return all(
                any(said["step"] >= step for said in trainer.words("step"))
                for trainer in self.trainers
            )

        self._wait(reached, f"step {step}")

    def _wait(self, condition: Any, what: str) -> None:
        def done() -> bool:
            for trainer in self.trainers:
                code = trainer.process.poll()
                assert code in (None, 0), f"rank {trainer.rank} ended with {code}:\n{self.logs()}"
            return bool(condition())

        wait_until(done, TIMEOUT_S, f"{what} of stage {self.number}\n{self.logs()}")

    def go(self) -> None:
        self.wait_all("loaded")
        for trainer in self.trainers:
            trainer.tell(do="go")

    def wait_prepared(self) -> None:
        """Wait until the new trainers are prepared, and the others have formed the group."""
        new = [each for each in self.trainers if each.rank not in self.stayed]
        old = list(self.stayed.values())
        self._wait(
            lambda: (
                all(each.words("prepared") for each in new)
                and all({"say": "formed", **self.key} in each.words("formed") for each in old)
            ),
            "prepared, or formed",
        )

    @property
    def key(self) -> dict[str, int]:
        assert self.plan is not None
        return {"stage": self.plan.stage, "attempt": self.plan.attempt}

    def commit(
        self,
        restore_from: tuple[int, int],
        give_to: list[int] | None = None,
        local_on_all_nodes: bool = False,
    ) -> None:
        """Have trainers that were prepared beside an older stage begin from that state.

        Args:
            give_to: new ranks that get the segments; None: all.
            local_on_all_nodes: they are told that nobody has to be asked for it.
        """
        self.wait_prepared()
        assert self.plan is not None
        self.restored_from = restore_from
        stage, step = restore_from
        serials = [
            header.stamp.serial
            for fd in self.launcher.segments[stage]
            if (header := read_newest(fd)) is not None and header.stamp.step == step
        ]
        restore = RestoreFrom(
            stage=stage,
            step=step,
            pods=("pod_0_0",),
            serial=max(serials, default=0),
            local_on_all_nodes=local_on_all_nodes,
        )
        self.plan = replace(self.plan, order=Order.GO, restore_from=restore)
        plan = encode(self.plan)
        for trainer in self.trainers:
            assert trainer.lines is not None
            if trainer.rank in self.stayed:
                self.stayed[trainer.rank].later = trainer
                trainer.tell(do="go", plan=plan)
                continue
            given = give_to is None or trainer.rank in give_to
            fds = tuple(self.launcher.segments[restore.stage]) if given else ()
            trainer.lines.send({"do": "go", "plan": plan, "fds": len(fds)}, fds)

    def preview(self, step: int) -> None:
        """Show prepared trainers what those of the stage before have parked with."""
        for fd in self.launcher.segments[self.number - 1]:
            header = read_newest(fd)
            if header is not None and header.stamp.step == step:
                stamp = header.stamp
                ref = SnapshotRef(stage=stamp.stage, step=stamp.step, serial=stamp.serial)
                message = {"do": "preview", "snapshot": encode(ref), "fds": 1}
                for trainer in self.trainers:
                    assert trainer.lines is not None
                    trainer.lines.send(message, (fd,))
                return
        raise AssertionError(f"no segment of stage {self.number - 1} holds step {step}")

    def drop(self) -> None:
        """The change that others were prepared for is off."""
        for trainer in self.stayed.values():
            trainer.tell(do="drop")

    def cut(
        self,
        cut_id: int = 1,
        durable: bool = False,
        ranks: list[int] | None = None,
        patient: bool = False,
        halt: str = "",
    ) -> None:
        for trainer in self.trainers:
            if ranks is None or trainer.rank in ranks:
                trainer.tell(do="cut", id=cut_id, durable=durable, patient=patient, halt=halt)

    def resume(self, cut_id: int = 1) -> None:
        for trainer in self.trainers:
            trainer.tell(do="resume", id=cut_id)

    def drained(self) -> int:
        """Wait until all are parked, and return the step, which must be one."""
        steps = {said["step"] for said in self.wait_all("drained")}
        assert len(steps) == 1, steps
        return int(steps.pop())

    def end(self) -> None:
        """Kill what is left, with the loaders' workers."""
        for trainer in self.trainers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.process.pid, signal.SIGKILL)
            trainer.process.wait()

    def codes(self) -> list[int]:
        """Wait for the end of all and return their exit codes."""
        wait_until(
            lambda: all(trainer.process.poll() is not None for trainer in self.trainers),
            TIMEOUT_S,
            f"the end of stage {self.number}",
        )
        return [trainer.process.wait() for trainer in self.trainers]

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {trainer.rank}: said {[each['say'] for each in trainer.said][-5:]}\n"
            + "\n".join(trainer.log.read_text(errors="replace").splitlines()[-60:])
            for trainer in self.trainers
        )


class FakeLauncher:
    """Starts stage after stage of one training."""

    def __init__(self, folder: Path, script: str, max_trainers: int) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.script = SCRIPTS / script
        self.min_trainers = 0  # 0: not told
        self.max_trainers = max_trainers
        self.job_id = "job"
        self.submitted_at = 1.0  # of the job
        self.take_over = False
        self.segments: dict[int, list[int]] = {}  # stage -> descriptors
        self._giving = threading.Lock()  # what is being given to a trainer is not closed meanwhile
        self.stages: list[Stage] = []
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        world_size: int,
        *args: str,
        restore_from: tuple[int, int] | None = None,
        number: int | None = None,
        give_to: list[int] | None = None,
        nodes: str = "",
        prefix: tuple[str, ...] = (),
        overlaps: bool = False,
    ) -> Stage:
        """Start the trainers of the next stage.

        Args:
            give_to: ranks that get the segments; None: all.
            nodes: each rank's node, a letter each; "": all on one. A node has one pod.
            overlaps: an older stage trains: they are prepared, and begin with `commit`.
        """
        number = number or (self.stages[-1].number + 1 if self.stages else 1)
        pod_env, plan = self._plan(nodes or "a" * world_size, number, restore_from)
        if overlaps:
            plan = replace(plan, way=Way.REPLACE, order=Order.PREPARE)
        name, listener = self._listen(number, world_size)
        trainers = [
            self._spawn(rank, pod_env, plan, name, prefix, args) for rank in range(world_size)
        ]
        stage = Stage(self, number, trainers)
        stage.plan, stage.restored_from = plan, restore_from or (0, 0)
        self.stages.append(stage)
        serve = threading.Thread(
            target=self._serve, args=(listener, stage, plan, give_to), daemon=True
        )
        serve.start()
        self._threads.append(serve)
        return stage

    def join(
        self,
        old: Stage,
        ranks: list[int | None],
        *args: str,
        nodes: str = "",
        env: dict[str, str] | None = None,
    ) -> Stage:
        """Ask trainers of `old` to join the next stage, and start those that come new.

        Args:
            ranks: by new rank, the old one of who stays; None: a new process.
            nodes: as of `start`; who stays, stays on its node.
            env: of new processes, besides.
        """
        number = self.stages[-1].number + 1
        nodes = nodes or "a" * len(ranks)
        pod_env, plan = self._plan(nodes, number, None)
        stayed = {new: old.trainers[rank] for new, rank in enumerate(ranks) if rank is not None}
        pods = _pods_of(plan, stayed)
        plan = replace(plan, way=Way.JOIN, order=Order.PREPARE, pods=pods)
        name, listener = self._listen(number, len(ranks))
        trainers = []
        for rank in range(len(ranks)):
            if rank in stayed:
                stayed[rank].tell(do="join", plan=encode(plan), rank=rank)
                trainers.append(stayed[rank].goes_on(rank))
            else:
                new = self._spawn(rank, pod_env, plan, name, (), args, env or {})
                trainers.append(new)
        stage = Stage(self, number, trainers)
        stage.plan, stage.stayed = plan, stayed
        self.stages.append(stage)
        serve = threading.Thread(
            target=self._serve,
            args=(listener, stage, plan, []),
            daemon=True,
        )
        serve.start()
        self._threads.append(serve)
        return stage

    def newest(self) -> tuple[int, int]:
        """Return (stage, step) of the newest complete snapshot that was handed over."""
        found = [
            (newest.stamp.stage, newest.stamp.step)
            for fds in self.segments.values()
            for fd in fds
            if (newest := read_newest(fd)) is not None
        ]
        return max(found)

    def close_segments(self, stage: int, number: int | None = None) -> None:
        """Close the first `number` segments of a stage, or all, as shims do with old ones."""
        with self._giving:
            close_all(self.segments[stage][:number])
            del self.segments[stage][:number]

    def close(self) -> None:
        for stage in self.stages:
            stage.end()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for trainers
            listener.close()
        for thread in self._threads:
            thread.join(10)
        for fds in self.segments.values():
            close_all(fds)

    def _listen(self, number: int, backlog: int) -> tuple[str, socket.socket]:
        name = f"edl-test-{os.getpid()}-{id(self)}-{number}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind("\0" + name)
        listener.listen(backlog)
        self._listeners.append(listener)
        return name, listener

    def _spawn(
        self,
        rank: int,
        pod_env: PodEnv,
        plan: StagePlan,
        channel: str,
        prefix: tuple[str, ...],
        args: tuple[str, ...],
        more: dict[str, str] | None = None,
    ) -> Trainer:
        mine = next(pod.pod_id for pod in plan.pods if rank in pod.ranks)
        env = trainer_environment(
            dict(os.environ),
            replace(pod_env, pod_id=mine),
            plan,
            rank,
            channel=channel,
            run_dir=self.run_dir,
        )
        env |= warm.STARTUP | (more or {})
        log = self.folder / f"stage{plan.stage}.rank{rank}.log"
        with log.open("wb") as out:
            process: Process
            if prefix:
                process = subprocess.Popen(
                    [*prefix, sys.executable, str(self.script), *args],
                    env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            else:
                process = warm.start([str(self.script), *args], env, out.fileno())
        return Trainer(rank, process, log, mine)

    def _plan(
        self, nodes: str, number: int, restore_from: tuple[int, int] | None
    ) -> tuple[PodEnv, StagePlan]:
        world_size = len(nodes)
        pod_id = f"pod_0_{number}"
        pod_env = PodEnv(
            job_server="http://127.0.0.1:1", job_id=self.job_id, pod_id=pod_id,
            pod_dir=self.folder, node_id="node", run_marker="test", slots=tuple(range(world_size)),
            slot_kind=SlotKind.CPU, max_trainers=self.max_trainers, grace_s=1.0,
        )  # fmt: skip
        port = free_port()
        ranks = {
            node: tuple(rank for rank in range(world_size) if nodes[rank] == node)
            for node in sorted(set(nodes))
        }
        pods = tuple(
            PlanPod(
                pod_id=f"pod_{pod_rank}_{number}", pod_rank=pod_rank, node_id=node,
                addr="127.0.0.1", slots=mine, ranks=mine, ports=tuple(port + each for each in mine),
            )
            for pod_rank, (node, mine) in enumerate(ranks.items())
        )  # fmt: skip
        restore = None
        if restore_from is not None:
            restore = RestoreFrom(stage=restore_from[0], step=restore_from[1], pods=(pod_id,))
        plan = StagePlan(
            job_id=self.job_id, stage=number, flag=0, way=Way.DRAIN, order=Order.START, pods=pods,
            master=f"127.0.0.1:{port}", restore_from=restore, max_trainers=self.max_trainers,
            min_trainers=self.min_trainers,
            submitted_at=self.submitted_at, take_over=self.take_over,
        )  # fmt: skip
        return pod_env, plan

    def _segments_for(self, plan: StagePlan) -> tuple[int, ...]:
        """Return the segments of the state to start from, or, before a change, of the newest."""
        stages = [plan.restore_from.stage] if plan.restore_from else []
        if plan.order is Order.PREPARE:
            stages = sorted(self.segments)[-1:]
        return tuple(fd for stage in stages for fd in self.segments.get(stage, ()))

    def _serve(
        self,
        listener: socket.socket,
        stage: Stage,
        plan: StagePlan,
        give_to: list[int] | None,
    ) -> None:
        while True:  # a script may begin more than one loop
            try:
                connection, _addr = listener.accept()
            except OSError:
                return  # the test is over
            talk = threading.Thread(
                target=self._talk,
                args=(LineSocket(connection), stage, plan, give_to),
                daemon=True,
            )
            talk.start()
            self._threads.append(talk)

    def _talk(
        self,
        lines: LineSocket,
        stage: Stage,
        plan: StagePlan,
        give_to: list[int] | None,
    ) -> None:
        trainer: Trainer | None = None
        while True:
            try:
                received = lines.receive()
            except OSError:
                received = None
            if received is None:
                lines.close()
                return
            message, fds = received
            if message["say"] == "hello":
                trainer = stage.trainers[message["rank"]]
                trainer.lines = lines
                plan = stage.plan or plan  # a script's second loop comes when it is committed
                welcome = {"do": "welcome", "plan": encode(plan)}
                with self._giving, contextlib.suppress(OSError):  # it was killed meanwhile
                    given: tuple[int, ...] = ()
                    if give_to is None or trainer.rank in give_to:
                        given = self._segments_for(plan)
                    lines.send({**welcome, "fds": len(given)}, given)
            assert trainer is not None
            if message["say"] == "segment":
                self.segments.setdefault(message["stage"], []).extend(fds)
            while trainer.later is not None:
                trainer = trainer.later
            trainer.said.append(message)


def _pods_of(plan: StagePlan, stayed: dict[int, Trainer]) -> tuple[PlanPod, ...]:
    """Return the pods of a stage that some join: each process is of the pod it began in."""
    by_rank = {rank: pod for pod in plan.pods for rank in pod.ranks}
    owners = {
        rank: stayed[rank].pod_id if rank in stayed else by_rank[rank].pod_id
        for rank in sorted(by_rank)
    }
    pods = []
    for number, pod_id in enumerate(dict.fromkeys(owners.values())):
        ranks = tuple(rank for rank in owners if owners[rank] == pod_id)
        ports = tuple(by_rank[r].ports[by_rank[r].ranks.index(r)] for r in ranks)
        like = by_rank[ranks[0]]
        pods.append(
            replace(like, pod_id=pod_id, pod_rank=number, ranks=ranks, slots=ranks, ports=ports)
        )
    return tuple(pods)


def slots_of(launcher: FakeLauncher, stage: int) -> list[tuple[int, int]]:
    """Return (stage, step) of every complete slot of a stage's segments."""
    return [
        (header.stamp.stage, header.stamp.step)
        for fd in launcher.segments.get(stage, [])
        for _slot, header in read_slots(fd)
    ]


def sample_ids(folder: Path, stage: int, world_size: int) -> dict[int, list[int]]:
    """Return the sample ids of each global step, ranks one after the other, as trainers logged."""
    found: dict[int, list[int]] = {}
    for rank in range(world_size):
        path = folder / f"ids.{stage}.{rank}.jsonl"
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            step, ids = json.loads(line)
            found.setdefault(step, []).extend(ids)
    return found
