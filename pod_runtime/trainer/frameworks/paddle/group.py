"""The process group of a Paddle training, from stage to stage."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.framework import GroupSpec, Subgroup
from pod_runtime.trainer.frameworks.meeting import wait_for
from pod_runtime.trainer.frameworks.paddle import second_group
from pod_runtime.trainer.frameworks.paddle.store import prompt_store
from pod_runtime.trainer.frameworks.paddle.subgroups import form_subgroup, free_port

_GLOO_PATIENCE_S = 30.0  # gloo's time-out, which Paddle does not let us change
_TIMEOUT_HINT = (
    f"a rank did not come within {_GLOO_PATIENCE_S:g} s: on the CPU, what one rank does alone "
    "(an evaluation or a save on rank 0, say) has to take less; loop.evaluate spreads it over all "
    "ranks; "
)
_MASTER_TIMEOUT_S = 600.0  # outside EDL; inside, the launcher ends this process long before
_calls = 0  # collectives that the main thread has begun


class PaddleGroup:
    """The group that this trainer is in; what a step sends goes through it, too."""

    def __init__(self, *, join_on_gpu: bool = False) -> None:
        """`join_on_gpu`: form second groups on GPUs too, which has not been tried."""
        self.rank, self.world_size = 0, 1
        # Of the step: called when the group is another one, and before anything else is sent.
        self.on_change: Callable[[], None] = _nothing
        self.check_free: Callable[[], None] = _nothing
        self._handle: Any | None = None  # None: Paddle's default one
        self._sent = 0  # of `_calls`: amid a backward pass
        self._subgroups: list[
            Any | None
        ] = []  # None: one that this rank is not in, or a world of one
        self._join_on_gpu = join_on_gpu
        _count_calls()

    def form(self, spec: GroupSpec) -> None:
        self.rank, self.world_size = spec.rank, spec.world_size
        self.on_change()
        if spec.world_size == 1:
            return
        if not second_group.on_gpu():
            # Paddle reads it when it makes the group; without it, collectives fail on the CPU.
            os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
        master = spec.master or _own_master()
        _check_family(master)
        if spec.rank:
            wait_for(master, _MASTER_TIMEOUT_S)
        try:
            with prompt_store(master), second_group.own_flags_unsaid():
                dist.init_parallel_env()
        except RuntimeError as error:
            raise PeerLost(f"the group of {spec.world_size} was not formed: {error}") from error

    def form_subgroups(self, parts: Sequence[Subgroup]) -> None:
        ports = np.zeros(len(parts))
        for index, part in enumerate(parts):
            if self.rank == part.ranks[0]:
                ports[index] = free_port()
        self.all_reduce(ports)
        for index, part in enumerate(parts):
            made = None
            if self.rank in part.ranks and len(part.ranks) > 1:
                master = f"{part.addr}:{int(ports[index])}"
                made = form_subgroup(index, part.ranks, self.rank, master)
            self._subgroups.append(made)

    def use_subgroup(self, index: int, spec: GroupSpec) -> None:
        self._go_on_in(self._subgroups[index], spec)

    def why_no_second_group(self) -> str:
        return second_group.why_no_second_group(gpu_allowed=self._join_on_gpu)

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> second_group.NextGroup:
        return second_group.form_next(spec, is_off)

    def adopt(self, group: second_group.NextGroup) -> None:
        second_group.adopt(group)
        self._go_on_in(group.handle, group.spec)

    def _go_on_in(self, group: Any | None, spec: GroupSpec) -> None:
        self._handle = group
        self.rank, self.world_size = spec.rank, spec.world_size
        self.on_change()

    def all_reduce(self, values: npt.NDArray[np.float64]) -> None:
        if self.world_size > 1:
            self.check_free()
            tensor = paddle.to_tensor(values)
            self.reduce(tensor)
            values[:] = tensor.numpy()

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        if self.world_size > 1 and data.size:
            self.check_free()
            tensor = paddle.to_tensor(data)
            try:
                dist.broadcast(tensor, source, group=self._handle)
            except RuntimeError as error:
                raise PeerLost(f"broadcast from rank {source}: {error}") from error
            data[:] = tensor.numpy()

    def calls(self) -> int:
        return _calls - self._sent

    def reduce(self, tensor: Any) -> None:
        """Sum a tensor over all ranks, in place. Raises PeerLost."""
        if self.world_size == 1:
            return
        began = time.monotonic()
        try:
            dist.all_reduce(tensor, group=self._handle)
        except RuntimeError as error:  # gloo: a peer closed its end, or was silent for 30 s
            # Of another node's dead trainer gloo says TIMEOUT as well, but at once.
            is_late = "TIMEOUT" in str(error) and time.monotonic() - began > _GLOO_PATIENCE_S / 2
            hint = _TIMEOUT_HINT if is_late else ""
            raise PeerLost(f"{hint}all-reduce: {error}") from error

    def start_reduce(self, tensor: Any) -> Any:
        """Begin to sum a tensor; return a task that can be waited for. On a device."""
        self._sent += threading.current_thread() is threading.main_thread()  # else none is counted
        return dist.all_reduce(tensor, group=self._handle, sync_op=False)


@cache  # once in a process
def _count_calls() -> None:
    """Count collectives: each asks its group for what does it."""
    read = Group.process_group.fget

    def process_group(group: Group) -> Any:
        global _calls
        _calls += threading.current_thread() is threading.main_thread()
        return read(group)

    Group.process_group = property(process_group)


def _nothing() -> None:
    """What is called where no step has anything on its way."""


def _check_family(master: str) -> None:
    """Refuse an address of which Paddle says `stoi`, as it cuts it at its first colon."""
    host = master.rpartition(":")[0]
    if ":" in host:
        raise UsageError(
            f"Paddle's trainers form no group by IPv6, as at {host}; give each job client an IPv4 "
            "address (--addr), train with PyTorch, or with one trainer"
        )


def _own_master() -> str:
    """Where Paddle looks for rank 0, by Paddle's own rules, under its own launcher."""
    environ = os.environ
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return environ.get("PADDLE_MASTER") or environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
