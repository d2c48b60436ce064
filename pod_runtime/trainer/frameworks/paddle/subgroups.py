"""Form groups of some of the ranks, which can go on when the others are lost.

Each has a store of its own. Paddle's `new_group` would have them share one, where its gloo groups
use the same keys, and a rank may take the address that a peer gave for another group.
"""

import socket
from collections.abc import Sequence
from typing import Any

from paddle.base import core
from paddle.distributed.communication.group import Group

from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.frameworks.meeting import wait_for
from pod_runtime.trainer.frameworks.paddle.second_group import try_out
from pod_runtime.trainer.frameworks.paddle.store import prompt

_FIRST_ID = 1_000_000  # far above the numbers that Paddle and scripts give to groups
_TIMEOUT_S = 30  # all ranks have met in the group of all just before


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def form_subgroup(index: int, ranks: Sequence[int], mine: int, master: str) -> Any:
    """Return the group of `ranks`, of which this process is `mine`; all of them call it.

    Raises:
        PeerLost: one of them did not.
    """
    rank, size = ranks.index(mine), len(ranks)
    host, _, port = master.rpartition(":")
    try:
        if rank:
            wait_for(master, _TIMEOUT_S)
        store = core.TCPStore(host, int(port), rank == 0, size, _TIMEOUT_S)
        with prompt(int(port)):
            made = core.ProcessGroupGloo.create(store, rank, size, _FIRST_ID + index)
        # Numbered from 0 on, as it will be the group of all.
        group = Group(rank, _FIRST_ID + index, list(range(size)), pg=made, name=f"part_{index}")
        try_out(group, size)
    except RuntimeError as error:
        raise PeerLost(f"the group without a part of the ranks was not formed: {error}") from error
    return group
