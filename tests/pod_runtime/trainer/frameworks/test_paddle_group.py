"""Which collectives count as the script's."""

import threading
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.communication.group import Group

from pod_runtime.trainer.frameworks.paddle.group import PaddleGroup


@pytest.mark.parametrize("is_main", [True, False])
def test_what_a_backward_pass_sends_is_not_the_scripts(monkeypatch, is_main):
    """Whichever thread trains."""
    group, asked = PaddleGroup(), Group(0, 0, [0, 1])
    monkeypatch.setattr(dist, "all_reduce", lambda *_args, **_more: asked.process_group)
    before = group.calls()

    def train() -> Any:
        return group.start_reduce(paddle.ones([1]))

    if is_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert group.calls() == before
    dist.all_reduce(paddle.ones([1]))
    assert group.calls() == before + 1
