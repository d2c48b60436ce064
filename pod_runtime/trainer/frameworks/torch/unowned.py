"""Watch the model's trainable parameters that the optimizer does not have: they must not change."""

from typing import Any

import torch

from pod_runtime.trainer.errors import UsageError


class TorchUnownedParameters:
    """The model's trainable parameters that the optimizer does not have.

    Most models have none. A change is found by the count of changes in place that PyTorch keeps,
    and by the place of the data.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._optimizer = optimizer
        owned = owned_parameters(optimizer)
        self._named = [(n, p) for n, p in model.named_parameters() if id(p) not in owned]
        self._marks: dict[str, Any] | None = None  # None: not noted

    @property
    def names(self) -> list[str]:
        """Those that are trainable now."""
        return [name for name, each in self._named if each.requires_grad]

    def note(self) -> None:
        """Remember them as they are, unless they are remembered already."""
        if self._marks is None:
            self._marks = self._read()

    def forget(self) -> None:
        """Forget them: they were changed by a load."""
        self._marks = None

    def check(self) -> None:
        """Check that they are as they were noted.

        Raises:
            UsageError: the script has changed one.
        """
        if self._marks is None or not self._named:
            return
        now = self._read()
        for name, mark in now.items():
            if self._marks.get(name, mark) != mark:
                raise UsageError(
                    f"model: {name} has changed, and the loop's optimizer does not have it: a "
                    f"second optimizer steps by this trainer's own gradients, so trainers differ. "
                    f"Give the loop's optimizer a group of parameters for it. What the script sets "
                    f"by hand, the same on every trainer, is frozen before: requires_grad_(False)"
                )
        self._marks = now

    def _read(self) -> dict[str, Any]:
        if not self._named:
            return {}
        owned = owned_parameters(self._optimizer)  # it may get more
        with torch.no_grad():
            return {
                name: (each._version, each.data_ptr(), float(each.sum()))
                for name, each in self._named
                if each.requires_grad and id(each) not in owned
            }


def owned_parameters(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(each) for group in optimizer.param_groups for each in group["params"]}
