"""What the body of an epoch sets before its state comes."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pod_runtime.trainer.frameworks.torch.framework import torch_framework  # noqa: E402
from pod_runtime.trainer.loop.script_changes import ScriptChanges  # noqa: E402


def test_a_mask_of_infinities_is_no_change():
    model: Any = torch.nn.Linear(4, 4)
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch_framework(model, optimizer, header_size=3).state
    cursor: Any = SimpleNamespace(epoch=1, step=0, global_step=10)
    numbers: Any = SimpleNamespace(has_drawn=lambda: False, guess=1)
    changes = ScriptChanges(state, enter=lambda: cursor, load_again=lambda: None)
    changes.watch(numbers)
    changes.note()
    changes.state_loaded_in_body(cursor)  # raises StateError if the body has set more than modes
