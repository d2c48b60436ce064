"""What ranks were told is compared before they train; over a group of threads."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import paddle
import pytest

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.paddle.state import terms_of
from pod_runtime.trainer.membership.settings import LoopSettings
from pod_runtime.trainer.membership.terms import (
    check_same_order,
    check_same_terms,
    check_terms_of_state,
    script_arrays,
    script_values,
    to_text,
)
from pod_runtime.trainer.progress.epoch_order import EpochOrder, make_order


class Group:
    """The collective operations of a group, for ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self._barrier = Barrier(world_size, timeout=120)
        self._given: list[Any] = [None] * world_size

    def of_rank(self, rank: int) -> Any:
        group = self

        class OfRank:
            def all_reduce(self, values: Any) -> None:
                values[:] = sum(group._meet(rank, values.copy()))

            def broadcast(self, data: Any, source: int) -> None:
                sent = group._meet(rank, data.copy())[source]
                assert sent.size == data.size, "ranks disagree about a size"
                data[:] = sent

        return OfRank()

    def _meet(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


def said(terms: Sequence[Any], check: Callable[..., None] = check_same_terms) -> list[str]:
    """Return what each rank raises; "" if nothing."""
    group = Group(len(terms))

    def of_rank(rank: int) -> str:
        try:
            check(group.of_rank(rank), terms[rank], rank=rank, world_size=len(terms))
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(terms)) as pool:
        return list(pool.map(of_rank, range(len(terms))))


def drawn(*ids: int) -> EpochOrder:
    return make_order(5, np.array(ids, np.int64), None)


def test_ranks_whose_samplers_drew_others_are_told_which_and_what_to_do():
    def check(group: Any, order: EpochOrder, **where: int) -> None:
        check_same_order(group, "Buckets", order.record, **where)

    assert said([drawn(1, 2, 3)] * 3, check) == [""] * 3
    first, second, third = said([drawn(1, 2, 3), drawn(1, 2, 3), drawn(1, 3, 2)], check)
    assert first == second == third
    text = "train_set: the DataLoader's Buckets drew other samples for epoch 5 on rank 2 than on r"
    assert first.startswith(text)
    assert "set_epoch(epoch)" in first


def settings(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "epochs": 3, "seed": 1, "checkpoint": "ckpt", "save_steps": 200, "keep_checkpoints": 3,
        "promise": "rounding", "shards": None, "loss": "mean", "policy": None, "lr_warmup_steps": 0,
        "steps_per_epoch": None, "snapshot_steps": "auto", "all_reduce": "flat",
    }  # fmt: skip
    return LoopSettings(**given | changed).terms()


def test_ranks_that_were_told_the_same_may_begin():
    by_script: Callable[[int, int], None] = lambda old, new: None  # noqa: E731  it has no name
    for given in ({}, {"policy": by_script}, {"policy": "linear", "shards": 8}):
        assert said([settings(**given)] * 3) == ["", "", ""]
    assert said([settings()]) == [""]
    assert said([settings(), settings(checkpoint="of/another/node")]) == ["", ""]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"seed": 1_700_000_001}, "seed: rank 1 was told 1700000001, rank 0 1"),
        ({"epochs": 4}, "epochs: rank 1 was told 4, rank 0 3"),
        ({"shards": 8}, "shards: rank 1 was told 8, rank 0 None"),
        ({"promise": "statistics"}, "promise: rank 1 was told 'statistics', rank 0 'rounding'"),
        ({"loss": "sum"}, "loss: rank 1 was told 'sum', rank 0 'mean'"),
        ({"policy": "linear"}, "policy: rank 1 was told 'linear', rank 0 None"),
        ({"lr_warmup_steps": 9}, "lr_warmup_steps: rank 1 was told 9, rank 0 0"),
        ({"save_steps": 7}, "save_steps: rank 1 was told 7, rank 0 200"),
        ({"snapshot_steps": 5}, "snapshot_steps: rank 1 was told 5, rank 0 'auto'"),
        ({"checkpoint": None}, "checkpoint: rank 1 was told None, rank 0 'a path'"),
        ({"all_reduce": "overlapped"}, "all_reduce: rank 1 was told 'overlapped', rank 0 'flat'"),
    ],
)
def test_every_rank_says_which_one_differs_in_what(changed, text):
    first, second, third = said([settings(), settings(**changed), settings()])
    assert first == second == third
    assert first.startswith(f"{text}; every trainer has to pass the same: ")


def test_the_lowest_rank_that_differs_is_named_and_the_others_are_counted():
    texts = said([settings(seed=seed) for seed in (5, 5, 7, 8)])
    assert len(set(texts)) == 1
    assert "seed: rank 2 was told 7, rank 0 5 (1 more differ from rank 0, too); every" in texts[0]


def test_models_and_optimizers_that_differ_are_told_apart():
    def described(width: int = 4, frozen: bool = False, momentum: float = 0.9) -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Linear(4, width))
        model[0].weight.stop_gradient = frozen
        optimizer = paddle.optimizer.Momentum(0.1, momentum, parameters=model.parameters())
        return terms_of(model, [optimizer], on_host=True)

    same = described()
    assert said([same, described()]) == ["", ""], "values and Paddle's own names do not matter"
    assert (
        "model: entry 2 of rank 1 is '1.weight float32 [4, 5]', of rank 0 '1.weight float"
        in (said([same, described(width=5)])[0])
    )
    assert (
        "entry 0 of rank 1 is '0.weight float32 [3, 4] frozen'"
        in (said([same, described(frozen=True)])[0])
    )
    assert (
        "optimizer: entry 2 of rank 1 is 'momentum=0.8', of rank 0 'momentum=0.9'"
        in (said([same, described(momentum=0.8)])[1])
    )


def test_a_new_trainer_beside_those_that_stay_was_told_what_they_were():
    told = {**settings(), "model": ["weight float32 [3, 4]"], "optimizer": ["SGD"]}
    stored = to_text(told)
    assert len(to_text({"model": ["weight"] * 10_000})) < 40, "a state has many of them"
    check_terms_of_state(stored, told, rank=1)
    check_terms_of_state("", told, rank=1)
    with pytest.raises(StateError, match=r"^epochs: rank 1 was told 5, rank 0 3, as all that stay"):
        check_terms_of_state(stored, {**told, "epochs": 5}, rank=1)
    others: list[dict[str, Any]] = [{"optimizer": ["Adam"]}, {"model": []}, {"loss": "sum"}]
    for edited in others:
        with pytest.raises(StateError, match="was the script edited while it trains"):
            check_terms_of_state(stored, {**told, **edited}, rank=1)


def test_texts_of_any_length_and_kind_are_compared():
    terms = [{"note": "ü" * size} for size in (0, 10)]
    assert "note: rank 1 was told 'üüüüüüüüüü', rank 0 ''" in said(terms)[0]
    assert np.unique(said([{"only": 1}, {}])).tolist()[0].startswith("only: rank 1 was told None")


def test_tensors_of_a_type_of_the_scripts_are_left_out(monkeypatch):
    own = type("Tensor", (), {"shape": (3, 224, 224)})()  # as of a tool that describes models
    of_script = {"own": own, "drawn": np.random.rand(9)}
    for name, value in of_script.items():
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    assert script_arrays(script_values()).keys() & of_script.keys() == {"drawn"}
