"""Decide batch size and learning rate when the world size changes. Pure.

fixed_global   the global batch and the learning rate stay: the loss curve is unaffected
linear         the batch per trainer stays; the learning rate follows the world size, and
               warms up to its new value after a jump
a callable     policy(old_world, new_world) -> Scale, or None for "as it was"
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What holds at one world size; a `policy` of the loop's returns it."""

    batch_size: int  # global
    lr_factor: float = 1.0  # the optimizer's learning rate is multiplied by it
    warmup_steps: int = 0  # steps over which the factor moves there, linearly

    def __post_init__(self) -> None:
        for name in ("batch_size", "warmup_steps"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise ValueError(
                    f"{name}: expected a whole number, got {value!r}; round it"
                ) from None
        object.__setattr__(self, "lr_factor", float(self.lr_factor))  # a number of numpy's, say
        if self.batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {self.batch_size}")
        if not 0 < self.lr_factor < float("inf"):
            raise ValueError(f"lr_factor: must be a finite number above 0, got {self.lr_factor}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: must be 0 or more, got {self.warmup_steps}")


Policy = str | Callable[[int, int], Scale | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The scale in force and how the factor gets there; part of the training's state."""

    reference_world: int  # the world size that `batch_size` and the learning rate were chosen for
    world_size: int  # of the stage this was made for
    batch_size: int
    from_factor: float = 1.0
    to_factor: float = 1.0
    since_step: int = 0  # global step at which the world changed
    warmup_steps: int = 0

    def lr_factor(self, step: int) -> float:
        """Return the factor for global step `step` (committed steps before it)."""
        done = step - self.since_step
        if done >= self.warmup_steps:
            return self.to_factor
        return self.from_factor + (self.to_factor - self.from_factor) * done / self.warmup_steps


def check_policy(policy: object) -> None:
    """Raise a ValueError unless `policy` is a known name or a callable."""
    if policy not in ("fixed_global", "linear") and not callable(policy):
        raise ValueError(
            f"policy: expected fixed_global, linear or a callable (old_world, new_world) -> Scale, "
            f"got {policy!r}"
        )


def first_scaling(batch_size: int, world_size: int) -> Scaling:
    """Return the scaling of a training that starts afresh on `world_size` trainers."""
    return Scaling(reference_world=world_size, world_size=world_size, batch_size=batch_size)


def rescale(
    policy: Policy,
    before: Scaling,
    *,
    base_batch_size: int,
    world_size: int,
    step: int,
    warmup_steps: int = 0,
) -> Scaling:
    """Return the scaling that holds from `step` on, on `world_size` trainers.

    Args:
        base_batch_size: the global batch at the reference world.
        warmup_steps: for `linear`; a callable's Scale has its own.

    Raises:
        ValueError: the policy is unknown, or a callable's answer is no Scale.
    """
    check_policy(policy)
    if policy == "fixed_global" or world_size == before.world_size:
        target = Scale(batch_size=before.batch_size, lr_factor=before.to_factor)
        if world_size == before.world_size:
            return before
    elif policy == "linear":
        per_trainer = max(1, round(base_batch_size / before.reference_world))
        target = Scale(
            batch_size=per_trainer * world_size,
            lr_factor=world_size / before.reference_world,
            warmup_steps=warmup_steps,
        )
    else:
        assert callable(policy)
        answer = policy(before.world_size, world_size)
        if answer is None:
            answer = Scale(batch_size=before.batch_size, lr_factor=before.to_factor)
        if not isinstance(answer, Scale):
            raise ValueError(f"policy: expected a Scale or None, it returned {answer!r}")
        target = answer
    return Scaling(
        reference_world=before.reference_world,
        world_size=world_size,
        batch_size=target.batch_size,
        from_factor=before.lr_factor(step),
        to_factor=target.lr_factor,
        since_step=step,
        warmup_steps=target.warmup_steps if target.lr_factor != before.to_factor else 0,
    )


def shards_for(scaling: Scaling, base_batch_size: int, shards: int) -> int:
    """Return V for the batch in force: the size of a shard stays, so memory stays bounded."""
    if scaling.batch_size == base_batch_size:
        return shards
    micro_batch = -(-base_batch_size // shards)
    return max(scaling.world_size, -(-scaling.batch_size // micro_batch))
