"""The process group of PyTorch, between two processes."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests import warm
from tests.support import free_port, wait_until

pytest.importorskip("torch")

RANK = """
import datetime, sys
import torch
import numpy as np
from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.frameworks.framework import GroupSpec
from pod_runtime.trainer.frameworks.torch import group

group.SILENT = datetime.timedelta(seconds=1)
together = group.TorchGroup(torch.device("cpu"))
master, rank = sys.argv[1], int(sys.argv[2])
together.form(GroupSpec(rank=rank, world_size=2, master=master, generation=1))
try:
    while True:
        together.all_reduce(np.ones(1))
        print("together", flush=True)
except PeerLost as error:
    print("lost:", error, flush=True)
"""


def test_a_rank_that_was_stopped_is_lost_to_the_others(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    master = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryFile() as other, (tmp_path / "out").open("wb") as out:
        ranks = [
            warm.start([str(script), master, str(rank)], dict(os.environ), to.fileno())
            for rank, to in enumerate((out, other))
        ]
        try:
            text = (tmp_path / "out").read_text
            wait_until(lambda: "together" in text(), what="the group works")
            ranks[1].send_signal(signal.SIGSTOP)
            wait_until(lambda: "lost: all-reduce" in text(), what="rank 0 gives rank 1 up")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(60)
