"""Find the interpreters of torchrun and of Paddle's own launcher, and check what they have."""

import argparse
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.elasticity.jobs import Job
from benchmarks.elasticity.peers import PaddleJob, PeerOptions, TorchrunJob

TORCH = "torch.distributed.run, numpy"
PADDLE = "etcd3, paddle, paddle.distributed.launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A launcher as it is set."""

    make: Callable[..., Job]
    python: str | None  # None: was not given
    tuned: bool
    own_store: bool = False

    def job(self, folder: Path, *, task: str, steps: int, most: int = 3) -> Job:
        assert self.python is not None
        options = PeerOptions(
            python=self.python, tuned=self.tuned, own_store=self.own_store, most=most
        )
        return self.make(folder, task=task, steps=steps, options=options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--torch_python",
        metavar="PATH",
        help="python of a venv with `pip install torch==2.13.0` (the CPU build) and numpy",
    )
    parser.add_argument(
        "--paddle_python",
        metavar="PATH",
        help="python of a venv with `pip install paddlepaddle==3.3.1 etcd3 protobuf==3.20.3`; "
        "needs etcd as well (Debian: etcd-server)",
    )


def peers(args: argparse.Namespace) -> dict[str, Peer]:
    """Return all peers, those included whose interpreter is not there."""
    torch, paddle = args.torch_python, args.paddle_python
    return {
        "torchrun-default": Peer(make=TorchrunJob, python=torch, tuned=False),
        "torchrun-tuned": Peer(make=TorchrunJob, python=torch, tuned=True),
        "torchrun-tuned-own-store": Peer(
            make=TorchrunJob, python=torch, tuned=True, own_store=True
        ),
        "paddle-default": Peer(make=PaddleJob, python=paddle, tuned=False),
        "paddle-tuned": Peer(make=PaddleJob, python=paddle, tuned=True),
    }


TUNED = """
Peers: torchrun-tuned: monitor_interval 0.1, last_call_timeout 1, keep_alive_interval 1, 3 attempts
(the least that it takes; fewer attempts gave two worlds at once); own-store: with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 as well, without which it is dead now and then. paddle-tuned:
elastic_timeout 6 (with less than its 5 s of heartbeat a crash ends the job), and ranks wait for
rank 0's port before they connect. All with a warm page cache and checkpoints every 20 steps; the
node that holds torchrun's store never leaves."""


def why_not(peer: Peer, known: Mapping[str, str]) -> str:
    """Return why a peer cannot be measured, or "". `known`: answers of `probe`."""
    name = "torch" if peer.make is TorchrunJob else "paddle"
    if peer.python is None:
        return f"no --{name}_python; --help says how to make one"
    return known.get(peer.python, "")


def probe(args: argparse.Namespace) -> dict[str, str]:
    """Import all that peers need, which also brings it into the page cache; return what failed."""
    failed = {}
    for python, modules in ((args.torch_python, TORCH), (args.paddle_python, PADDLE)):
        if python is None:
            continue
        env = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", "PATH": "/usr/bin:/bin"}
        try:
            done = subprocess.run(
                [python, "-c", f"import {modules}"], env=env, capture_output=True, text=True
            )
        except OSError as error:
            failed[python] = str(error)
            continue
        if done.returncode:
            failed[python] = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        elif modules == PADDLE and shutil.which("etcd") is None:
            failed[python] = "there is no etcd; Debian's package is etcd-server"
    return failed
