import json
from typing import Any

import numpy as np
import pytest

from job_server.api.wire import decode, encode
from pod_runtime.trainer.progress.scaling import Scale, Scaling, first_scaling, rescale, shards_for


def grown(policy, *, to: int, step: int = 100, warmup: int = 10, base: int = 64, first: int = 2):
    return rescale(
        policy,
        first_scaling(base, first),
        base_batch_size=base,
        world_size=to,
        step=step,
        warmup_steps=warmup,
    )


def test_with_fixed_global_neither_batch_nor_learning_rate_notice_the_world():
    scaling = grown("fixed_global", to=4)
    assert (scaling.batch_size, scaling.lr_factor(100), scaling.lr_factor(105)) == (64, 1, 1)
    assert shards_for(scaling, 64, 4) == 4


def test_linear_keeps_the_batch_of_a_trainer_and_warms_the_learning_rate_up():
    scaling = grown("linear", to=4)
    assert scaling.batch_size == 128
    factors = [scaling.lr_factor(step) for step in (100, 105, 110, 500)]
    assert factors == [1.0, 1.5, 2.0, 2.0]
    assert shards_for(scaling, 64, 4) == 8  # a shard stays as large as it was


def test_a_jump_amid_a_warm_up_starts_from_where_the_factor_is():
    half = grown("linear", to=4)
    back = rescale("linear", half, base_batch_size=64, world_size=1, step=105, warmup_steps=10)
    assert back.batch_size == 32
    assert [back.lr_factor(step) for step in (105, 115)] == [1.5, 0.5]


def test_a_stage_of_the_same_world_size_changes_nothing_even_amid_a_warm_up():
    scaling = grown("linear", to=4)
    again = rescale("linear", scaling, base_batch_size=64, world_size=4, step=105, warmup_steps=10)
    assert again == scaling


def test_a_hook_gets_both_worlds_and_decides():
    asked = []

    def policy(old: int, new: int) -> Scale:
        asked.append((old, new))
        return Scale(batch_size=48, lr_factor=0.5)

    scaling = grown(policy, to=3)
    assert asked == [(2, 3)]
    assert (scaling.batch_size, scaling.lr_factor(100)) == (48, 0.5)


def test_a_hook_that_answers_none_leaves_all_as_it_was():
    scaling = grown(lambda _old, _new: None, to=3)
    assert (scaling.batch_size, scaling.lr_factor(100), scaling.world_size) == (64, 1.0, 3)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("cubic", "policy: expected fixed_global, linear or a callable"),
        (lambda _old, _new: 3, "expected a Scale or None, it returned 3"),
    ],
)
def test_a_wrong_policy_is_refused(policy, text):
    with pytest.raises(ValueError, match=text):
        grown(policy, to=3)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"lr_factor": 0.0}, {"lr_factor": float("nan")},
              {"warmup_steps": -1}, {"batch_size": 96.0}, {"warmup_steps": 1.5}]
)  # fmt: skip
def test_a_scale_is_valid_or_not_made(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scale(**({"batch_size": 1} | wrong))


def test_numbers_of_numpy_make_a_scale_that_a_state_can_hold():
    size: Any = np.int64(96)
    scaling = grown(lambda _old, _new: Scale(batch_size=size, lr_factor=np.sqrt(1.5)), to=3)
    assert decode(Scaling, json.loads(json.dumps(encode(scaling)))) == scaling
