"""Check and hold the arguments of the loop."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pod_runtime.trainer.data.step import WEIGHTS
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.progress.promises import check_promise
from pod_runtime.trainer.progress.scaling import check_policy

ALL_REDUCE = ("flat", "overlapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The arguments of `Loop` that are not objects; `Loop` says what they mean."""

    epochs: int
    seed: int
    checkpoint: str | None  # None: no checkpoints
    save_steps: int
    keep_checkpoints: int
    shards: int | None  # None: as stored, else the most trainers
    promise: str
    loss: str
    policy: Any  # None: the job's
    lr_warmup_steps: int
    steps_per_epoch: int | None  # None: by the dataset's length
    snapshot_steps: int | str
    all_reduce: str
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), np.integer):
                object.__setattr__(self, each.name, int(value))
        for name, low in (
            ("epochs", 1),
            ("seed", 0),
            ("save_steps", 1),
            ("keep_checkpoints", 1),
            ("lr_warmup_steps", 0),
            ("accumulation_steps", 1),
        ):
            _check_whole(name, getattr(self, name), low)
        for name in ("shards", "steps_per_epoch"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        if self.snapshot_steps != "auto":
            _check_whole("snapshot_steps", self.snapshot_steps, 1, "auto, or ")
        if self.checkpoint == "":
            raise UsageError("checkpoint: is empty; give a folder or a URL, or None for none")
        if self.loss not in WEIGHTS:
            raise UsageError(f"loss: expected one of {', '.join(WEIGHTS)}, got {self.loss!r}")
        if self.all_reduce not in ALL_REDUCE:
            raise UsageError(
                f"all_reduce: expected one of {', '.join(ALL_REDUCE)}, got {self.all_reduce!r}"
            )
        if self.promise == "statistics" and self.shards is not None:
            raise UsageError(
                f"shards: with promise='statistics' a batch has as many shards as there are "
                f"trainers, got {self.shards}; leave it out"
            )
        try:
            check_promise(self.promise)
            if self.policy is not None:
                check_policy(self.policy)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def terms(self) -> dict[str, Any]:
        """Return every argument as JSON types, to compare between ranks.

        For a policy that the script wrote, this is its name. For the checkpoint path, it is whether
        there is one: every node may have its own, but any trainer may become rank 0, which writes.
        """
        path = None if self.checkpoint is None else "a path"
        policy = self.policy
        if callable(policy):
            policy = getattr(policy, "__qualname__", type(policy).__name__)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return given | {"policy": policy, "checkpoint": path}


def _check_whole(name: str, value: object, low: int, more: str = "") -> None:
    if type(value) is not int or value < low:
        raise UsageError(f"{name}: expected {more}a whole number of at least {low}, got {value!r}")
    if value >= 2**63:
        raise UsageError(f"{name}: expected a number below 2**63, got {value!r}")
