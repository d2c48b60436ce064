"""Detect gradients that a script touches before the update: they are this rank's part only.

Of either framework, which says what a mark is.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.unowned import WHOLE_STEPS, check_noted

_EVERY = 16  # of the parameters one is looked at, in later steps
_NODES = 32  # of a loss's graph, that are looked at


class LossScaling:
    """Scales losses by the loop's scaler, and sees whether the script has done so before.

    A script may scale other things, as the loss whose gradient is a penalty.
    """

    def __init__(self, scaler: Any) -> None:
        self._scale = getattr(type(scaler), "scale").__get__(scaler)  # noqa: B009
        self._nodes: list[Any] = []  # of graphs: what the script has scaled since the last backward

    @classmethod
    def of(cls, scaler: Any | None) -> "LossScaling | None":
        """Return that of a scaler, whose `scale` it takes over; None: there is no scaler."""
        if scaler is None:
            return None
        found = vars(scaler).get("scale")
        made = found if isinstance(found, cls) else cls(scaler)
        made._nodes.clear()
        scaler.scale = made
        return made

    def __call__(self, loss: Any) -> Any:
        """The script scales a loss."""
        scaled = self._scale(loss)
        if scaled is not loss:  # else it is switched off
            several = scaled if isinstance(scaled, list | tuple) else [scaled]
            nodes = [getattr(each, "grad_fn", None) for each in several]
            self._nodes += [node for node in nodes if node is not None]
        return scaled

    def scaled(self, loss: Any) -> Any:
        """Return a loss times the scale.

        Raises:
            UsageError: it was scaled before.
        """
        if self._nodes:
            is_done = self._comes_of_scaled(loss)
            self._nodes.clear()  # they keep their graphs
            if is_done:
                raise UsageError(
                    "step.backward(loss): it scales the loss by the scaler that Loop has, and the "
                    "script has called scaler.scale before; pass the loss as it is, and leave out "
                    "scaler.scale, unscale_, step and update"
                )
        return self._scale(loss)

    def _comes_of_scaled(self, loss: Any) -> bool:
        """Whether it is what the script has scaled, or is computed of that in a few operations."""
        found, at = [loss.grad_fn], 0
        while at < len(found) and at < _NODES:
            node, at = found[at], at + 1
            if any(node is each for each in self._nodes):
                return True
            for each in getattr(node, "next_functions", ()):
                found.append(each[0] if isinstance(each, tuple) else each)
        return False


class GradientMarks:
    """The marks of an optimizer's gradients, which differ when these do."""

    def __init__(
        self, count: int, mark: Callable[[int], Any], name: Callable[[int], str], *, clip: str
    ) -> None:
        """
        Args:
            count: of the parameters.
            mark: returns the mark of a parameter's gradient; None: it has none.
            name: returns a parameter's name.
            clip: how a script clips.
        """
        self._count, self._mark, self._name, self._clip = count, mark, name, clip
        # (index of the parameter, mark); None: none was noted since the last update.
        self._marks: list[tuple[int, Any]] | None = None
        self._first = 0  # index of a parameter that had a gradient last time
        self._updates = 0  # before this one
        self._is_updating = False

    def note(self, *, for_update: bool) -> None:
        """Remember gradients as they are.

        Args:
            for_update: mark all parameters in a process's first steps, then a few in turn, as
                clipping changes all of them. Else mark the first, which clearing would remove.
        """
        if for_update:
            few = self._updates >= WHOLE_STEPS
            indices = range(self._updates % _EVERY, self._count, _EVERY) if few else self._all
            self._marks = [(index, self._mark(index)) for index in indices]
            return
        self._marks = []
        for index in chain((self._first,), self._all):
            mark = self._mark(index)
            if mark is not None:
                self._first, self._marks = index, [(index, mark)]
                return

    @property
    def _all(self) -> range:
        return range(self._count)

    def begin_update(self) -> None:
        """The gradients are those of all ranks now, and the optimizer may step."""
        self._is_updating = True

    def forget(self) -> None:
        """Forget them: the update is made, or is not going to be."""
        self._marks, self._is_updating = None, False
        self._updates += 1

    def check_step(self) -> None:
        """Check that the optimizer may step: the script does not call it by itself.

        Raises:
            UsageError: it does.
        """
        if self._marks is not None and not self._is_updating:
            raise UsageError(
                "optimizer: the script steps it by the gradients of step.backward(loss), which are "
                "this trainer's part, and step.update() steps it once more. Leave optimizer.step() "
                "or minimize() out: step.update() does that, and clears the gradients"
            )

    def check(self) -> None:
        """Check that what was noted is unchanged, and that nothing is there that was not.

        Of that, all is looked at in a process's first steps, later the first gradient.

        Raises:
            UsageError: it is not.
        """
        if self._marks is None:
            looked = self._all if self._updates < WHOLE_STEPS else (self._first,)
            check_noted(self._name(each) for each in looked if self._mark(each) is not None)
        for index, mark in self._marks or ():
            if self._mark(index) != mark:
                raise UsageError(
                    f"gradients: that of {self._name(index)} was changed after "
                    f"step.backward(loss). Until step.update() each trainer has a part of the "
                    f"gradient only, so what is done to it would depend on their number. Clip by "
                    f"{self._clip}, scale the loss, pass a loss scaler as scaler=; "
                    f"step.update() clears gradients itself"
                )
