"""The process group of a PyTorch training, from stage to stage."""

import atexit
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist

from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.framework import GroupSpec, Subgroup
from pod_runtime.trainer.frameworks.meeting import wait_for

_formed: GroupSpec | None = None  # None: this process has formed none
# The tensor of the newest collective, which a thread of gloo's may still have: to drop the last
# reference takes the interpreter, which in PyTorch 2.4 to 2.6 the end of a group holds while
# it waits for that thread.
_sent: Any | None = None

_TIMEOUT = timedelta(minutes=30)  # until all have met, and for a collective of NCCL
# So long a rank may keep the others waiting on the CPU. One that was stopped, or that only its
# peers cannot reach, is noticed by this alone: its launcher lives, and the job server hears that.
SILENT = timedelta(minutes=2)


class TorchGroup:
    """The group that this trainer is in; what a step sends goes through it, too."""

    def __init__(self, device: Any) -> None:
        self.rank, self.world_size = 0, 1
        self._device = device
        self._handle: Any | None = None  # None: the default one
        self._subgroups: list[Any | None] = []  # None: one that this rank is not in

    def form(self, spec: GroupSpec) -> None:
        self.rank, self.world_size = spec.rank, spec.world_size
        _form(spec, self._device)

    def form_subgroups(self, parts: Sequence[Subgroup]) -> None:
        timeout = _patience(self._device)
        try:
            for part in parts:
                self._subgroups.append(dist.new_group(list(part.ranks), timeout=timeout))
        except RuntimeError as error:
            raise PeerLost(f"a group for a loss was not formed: {error}") from error

    def use_subgroup(self, index: int, spec: GroupSpec) -> None:
        self._handle = self._subgroups[index]
        self.rank, self.world_size = spec.rank, spec.world_size

    def why_no_second_group(self) -> str:
        return "with PyTorch a trainer cannot form a second group yet"

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> NoReturn:
        raise PeerLost(self.why_no_second_group())

    def adopt(self, group: Any) -> NoReturn:
        raise PeerLost(self.why_no_second_group())

    def all_reduce(self, values: npt.NDArray[np.float64]) -> None:
        if self.world_size > 1:
            tensor = torch.from_numpy(values).to(self._device)
            self.reduce(tensor)
            values[:] = tensor.cpu().numpy()

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        if self.world_size > 1 and data.size:
            tensor = _keep(torch.from_numpy(data).to(self._device))
            group = self._handle or dist.group.WORLD
            try:  # group_src= came with PyTorch 2.6
                dist.broadcast(tensor, dist.get_global_rank(group, source), group)
            except RuntimeError as error:
                raise PeerLost(f"broadcast from rank {source}: {error}") from error
            data[:] = tensor.cpu().numpy()

    def calls(self) -> int:
        if self.world_size == 1:
            return 0
        count: int = dist.group.WORLD._get_sequence_number_for_group()
        return count

    def reduce(self, tensor: Any) -> None:
        """Sum a tensor over all ranks, in place. Raises PeerLost."""
        try:
            group = self._handle or dist.group.WORLD
            group.allreduce([_keep(tensor)]).wait()  # dist.all_reduce adds a fifth to it by checks
        except RuntimeError as error:  # a peer closed its end
            raise PeerLost(f"all-reduce: {error}") from error


def _keep(tensor: Any) -> Any:
    """Return a tensor that is to be sent, and keep it until the next one is."""
    global _sent
    _sent = tensor
    return tensor


def _form(spec: GroupSpec, device: Any) -> None:
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
            if spec.rank:
                wait_for(f"{host}:{port}", _TIMEOUT.total_seconds())
            store = dist.TCPStore(host, port, spec.world_size, spec.rank == 0, timeout=_TIMEOUT)
            ours = {"store": store, "rank": spec.rank, "world_size": spec.world_size}
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, timeout=_patience(device), **ours)
    except RuntimeError as error:
        raise PeerLost(f"the group of {spec.world_size} was not formed: {error}") from error
    _formed = spec
    atexit.register(_leave, os.getpid())


def _patience(device: Any) -> timedelta:
    """Return how long a collective waits for the slowest rank."""
    return SILENT if device.type == "cpu" else _TIMEOUT


def _leave(pid: int) -> None:
    """Let go of the group: its threads end the process by SIGABRT if they outlive its end.

    A fork of the script has none of them, and would wait for them for ever.
    """
    if dist.is_initialized() and os.getpid() == pid:
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
