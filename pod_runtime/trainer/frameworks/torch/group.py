"""Form the process group of a stage."""

import atexit
import os
import socket
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.adapter import GroupSpec

_formed: GroupSpec | None = None  # None: this process has formed none

# A rank that is silent for so long is lost; in a cluster the job server notices far sooner.
_TIMEOUT = timedelta(minutes=30)


def form(spec: GroupSpec, device: Any) -> None:
    """Join the group of `spec`; returns when all ranks have.

    Raises:
        PeerLost: it could not be formed.
        UsageError: the script has formed a group of its own.
    """
    global _formed
    if dist.is_initialized():
        if spec == _formed:  # a second loop of the same script
            return
        raise UsageError(
            "torch.distributed: the script has called init_process_group; leave it out: the loop "
            "forms the group, and another one after each change"
        )
    if spec.world_size == 1:
        return
    host = spec.master.rpartition(":")[0] or os.environ["MASTER_ADDR"]
    if device.type == "cpu":
        _choose_interface(host)
    ours: dict[str, Any] = {}  # outside EDL torchrun says where the ranks meet
    try:
        if spec.master:
            port = int(spec.master.rpartition(":")[2])
            store = dist.TCPStore(host, port, spec.world_size, spec.rank == 0, timeout=_TIMEOUT)
            ours = {"store": store, "rank": spec.rank, "world_size": spec.world_size}
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl", timeout=_TIMEOUT, **ours
        )
    except RuntimeError as error:
        raise PeerLost(f"the group of {spec.world_size} was not formed: {error}") from error
    _formed = spec
    atexit.register(_leave)


def _leave() -> None:
    """Let go of the group: its threads end the process by SIGABRT if they outlive its end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_interface(master: str) -> None:
    """Have gloo listen where `master` is reached from, not at what the host's name stands for."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
