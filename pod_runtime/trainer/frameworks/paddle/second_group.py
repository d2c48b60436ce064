"""Form a second process group next to the first, which Paddle's public calls cannot do.

`init_parallel_env` makes one group per process, once. A trainer that stays when the pods change
needs the next stage's group while it still trains in the present one. That takes private names of
Paddle, so their presence and the version are checked before they are used.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import collective, parallel, parallel_helper
from paddle.distributed.communication import group as groups

from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.frameworks.framework import GroupSpec
from pod_runtime.trainer.frameworks.meeting import meet, wait_for
from pod_runtime.trainer.frameworks.paddle.store import prompt

logger = logging.getLogger(__name__)

_TESTED = ("3.3.",)  # versions with which these names were tried
_PRIVATE = {
    core: ("TCPStore",),
    collective: (
        "_default_group_name", "_default_store", "_global_env", "_group_map", "_group_map_by_name",
        "_group_map_backend", "_new_process_group_impl", "_set_default_backend",
        "_set_default_store", "_set_group_map", "_set_group_map_backend", "_set_group_map_by_name",
    ),
    parallel: ("ParallelEnv", "_global_parallel_env"),
    parallel_helper: ("_is_parallel_ctx_initialized", "_set_parallel_ctx"),
    groups: ("Group", "_GroupManager", "_add_new_group"),
}  # fmt: skip
_SET_BY_US = ("FLAGS_enable_pir_in_executor", "FLAGS_selected_gpus")  # Paddle's import, EDL
_FIRST_GID = 1000  # Paddle numbers the groups that scripts make from 10 on
_FORM_TIMEOUT_S = 30  # all ranks have met before: one that does not come now has died
_MEET_TIMEOUT_S = 3600.0  # the launcher calls it off long before


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGroup:
    """A group that was formed and is not yet this process's own."""

    spec: GroupSpec
    store: Any  # TCPStore; None in a world of one
    handle: Any  # Paddle's Group; None in a world of one


def on_gpu() -> bool:
    return bool(core.is_compiled_with_cuda()) and paddle.device.get_device() != "cpu"


def why_no_second_group(*, gpu_allowed: bool) -> str:
    """Return why this process cannot form a second group; "": it can."""
    version = paddle.__version__
    if not version.startswith(_TESTED):
        return f"a second group was not tried with PaddlePaddle {version}"
    for module, names in _PRIVATE.items():
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            return f"PaddlePaddle {version} has no {module.__name__}.{missing[0]}"
    if on_gpu() and not gpu_allowed:
        return "a second group of NCCL was never tried; EDL_JOIN_ON_GPU=1 allows it"
    return ""


def form_next(spec: GroupSpec, is_off: Callable[[], bool]) -> NextGroup:
    """Form the group of `spec` next to that of this process. Any thread.

    Raises:
        CalledOffError: `is_off()` has become true before all were there.
        PeerLost: it could not be formed.
    """
    if spec.world_size == 1:
        return NextGroup(spec=spec, store=None, handle=None)
    name = f"edl-{spec.generation}"
    try:
        meet(
            spec.master,
            name=name,
            rank=spec.rank,
            world_size=spec.world_size,
            is_off=is_off,
            timeout_s=_MEET_TIMEOUT_S,
        )
        host, _, port = spec.master.rpartition(":")
        if spec.rank:
            wait_for(spec.master, _FORM_TIMEOUT_S)
        store = core.TCPStore(host, int(port), spec.rank == 0, spec.world_size, _FORM_TIMEOUT_S)
        with prompt(int(port)):
            made = collective._new_process_group_impl(
                "nccl" if on_gpu() else "gloo",
                store,
                spec.rank,
                spec.world_size,
                collective._default_group_name,
                None,
                _FIRST_GID + spec.generation,
            )
        ranks = list(range(spec.world_size))
        name = collective._default_group_name
        handle = groups.Group(spec.rank, 0, ranks, pg=made, name=name)
        try_out(handle, spec.world_size)
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"the group of {spec.world_size} was not formed: {error}") from error
    return NextGroup(spec=spec, store=store, handle=handle)


def try_out(handle: Any, world_size: int) -> None:
    """Use a group once: what the first exchange sets up is set up now, and everybody is heard."""
    with paddle.no_grad():
        ones = paddle.ones([1])
        dist.all_reduce(ones, group=handle)
        if ones.item() != world_size:
            raise RuntimeError(f"{ones.item():g} of {world_size} ranks answered")


def adopt(group: NextGroup) -> None:
    """Make it the process's own group, for scripts that ask Paddle for rank and world size.

    The environment says already what the trainer is in the new stage.
    """
    collective._group_map.clear()
    collective._group_map_by_name.clear()
    collective._group_map_backend.clear()
    groups._GroupManager.group_map_by_id.clear()
    collective._default_store = None
    collective._global_env = None
    parallel._global_parallel_env = parallel.ParallelEnv()
    if group.handle is None:
        return
    backend = "nccl" if on_gpu() else "gloo"
    collective._set_default_backend(backend)
    collective._set_default_store(group.store)
    collective._set_group_map_by_name(group.handle.name, group.handle)
    collective._set_group_map(0, group.handle)
    collective._set_group_map_backend(group.handle, backend)
    groups._add_new_group(group.handle)
    if not parallel_helper._is_parallel_ctx_initialized():
        parallel_helper._set_parallel_ctx(True)


@contextlib.contextmanager
def own_flags_unsaid() -> Iterator[None]:
    """Within it, `init_parallel_env` lists as modified only flags that the user has modified."""
    listed = getattr(parallel, "_get_modified_flags", None)
    if listed is None:
        yield
        return
    parallel._get_modified_flags = lambda: [f for f in listed() if f.name not in _SET_BY_US]
    try:
        yield
    finally:
        parallel._get_modified_flags = listed
