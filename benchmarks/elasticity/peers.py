"""A training under torchrun, or under Paddle's own elastic launcher, for resize.py and recovery.py.

Both have a launcher per node, and no command to change the number of nodes: one more is started, or
one gets SIGTERM, as an operator or a scheduler does it.
"""

import os
import subprocess
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

from benchmarks.elasticity.jobs import (
    Job,
    end,
    kill_tree,
    trainer_options,
    wait_port,
)
from benchmarks.harness import HOST, free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    python: str
    tuned: bool
    own_store: bool = False  # torchrun: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    most: int = 3  # nodes
    save_steps: int = 20


class PeerJob(Job):
    """A launcher per node, one trainer each."""

    limit_s = 90.0  # what comes at all comes within 50 s, on two quiet cores

    def __init__(self, folder: Path, *, task: str, steps: int, options: PeerOptions) -> None:
        super().__init__(folder, task=task, steps=steps)
        self.options = options
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def start(self, trainers: int) -> None:
        for _ in range(trainers):
            self.grow()

    def grow(self) -> None:
        self.launchers.append(self.launch())
        self._started += 1

    def shrink(self) -> None:
        end(self.launchers.pop())  # never the first, which may hold the store

    def kill_node(self) -> None:
        kill_tree(self.launchers.pop())

    def is_alive(self) -> bool:
        return any(launcher.poll() is None for launcher in self.launchers)

    def trainer(self) -> list[str]:
        return trainer_options(self, self.folder / "checkpoint", self.options.save_steps)

    @abstractmethod
    def launch(self) -> subprocess.Popen[bytes]:
        """Start the launcher of one more node."""


class TorchrunJob(PeerJob):
    """One torchrun agent per node; the first holds the c10d store."""

    def __init__(self, folder: Path, *, task: str, steps: int, options: PeerOptions) -> None:
        super().__init__(folder, task=task, steps=steps, options=options)
        self._port = free_port()

    def launch(self, script: str = "train_torch.py") -> subprocess.Popen[bytes]:
        conf = [f"is_host={int(self._started == 0)}"]
        command = [self.options.python, "-m", "torch.distributed.run"]
        command += [f"--nnodes=1:{self.options.most}", "--nproc_per_node=1", "--max_restarts=100"]
        command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={HOST}:{self._port}"]
        command += ["--rdzv_id=bench", f"--local_addr={HOST}"]
        if self.options.tuned:
            # The least that it takes. Fewer attempts than 3 gave two worlds at once.
            conf += ["last_call_timeout=1", "keep_alive_interval=1", "keep_alive_max_attempt=3"]
            command += ["--monitor_interval=0.1"]
        command += [f"--rdzv_conf={','.join(conf)}"]
        command += [str(Path(__file__).with_name(script)), *self.trainer()]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.options.own_store else {}
        # All at once, so that they meet in the first rendezvous; who is early waits for the store.
        return self.spawn(command, f"agent{self._started}", env)


class PaddleJob(PeerJob):
    """One `paddle.distributed.launch` per node, which meet in an etcd of their own."""

    def __init__(self, folder: Path, *, task: str, steps: int, options: PeerOptions) -> None:
        super().__init__(folder, task=task, steps=steps, options=options)
        self._etcd = free_port()

    def start(self, trainers: int) -> None:
        client = f"http://{HOST}:{self._etcd}"
        peer = f"http://{HOST}:{free_port()}"
        command = ["etcd", "--data-dir", str(self.folder / "etcd"), "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"default={peer}"]
        self.spawn(command, "etcd")
        wait_port(self._etcd)
        super().start(trainers)

    def launch(self) -> subprocess.Popen[bytes]:
        command = [self.options.python, "-m", "paddle.distributed.launch"]
        command += ["--master", f"etcd://{HOST}:{self._etcd}", "--host", HOST]
        command += ["--nnodes", f"1:{self.options.most}", "--nproc_per_node", "1"]
        command += ["--job_id", "bench", "--max_restart", "100", "--elastic_level", "1"]
        command += ["--log_dir", str(self.folder / f"log{self._started}")]
        more = []
        if self.options.tuned:
            # A launcher whose trainer failed takes up to 5 s to show itself again; with less than
            # that the others find nobody, and end.
            command += ["--elastic_timeout", "6"]
            more = ["--wait_for_master"]
        script = Path(__file__).with_name("train_paddle.py")
        command += [str(script), *self.trainer(), *more]
        env = {
            "CUDA_VISIBLE_DEVICES": "",
            "PADDLE_DISTRI_BACKEND": "gloo",
            # Its client of etcd is older than the protobuf that may be installed.
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": os.environ.get(
                "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python"
            ),
        }
        return self.spawn(command, f"launcher{self._started}", env)
