"""Watch the model's trainable parameters that no optimizer has: they must not change.

And that the model gets no others: no state could carry them, or no optimizer would step them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pod_runtime.trainer.errors import UsageError

WHOLE_STEPS = 3  # of a process, in which gradients are looked at more closely


class UnownedParameters:
    """The model's trainable parameters that the optimizer does not have. Of either framework.

    Most models have none.
    """

    def __init__(
        self,
        named_parameters: Callable[[], Iterable[tuple[str, Any]]],
        owned: Callable[[], Collection[int]],
        *,
        names: Callable[[], Iterable[str]],
        is_trained: Callable[[Any], bool],
        mark: Callable[[Any], Any],
        remedy: str,
    ) -> None:
        """
        Args:
            named_parameters: returns those that the model has now.
            owned: returns the ids of the parameters that the optimizer has now: it may get more.
            names: returns those of all tensors that belong to the model's state now.
            is_trained: whether a parameter is not frozen.
            mark: returns a mark of a parameter, which differs when its values differ.
            remedy: what to do about a parameter that has changed.
        """
        self._read_names, self._owned = names, owned
        self._is_trained, self._mark = is_trained, mark
        self._remedy = remedy
        before = owned()
        self._known = set(names())
        self._read_named = named_parameters
        self._built = {id(each): each for _name, each in named_parameters()}  # their ids stay taken
        self._named = [(name, each) for name, each in named_parameters() if id(each) not in before]
        self._marks: dict[str, Any] | None = None  # None: not noted

    @property
    def names(self) -> list[str]:
        """Those that are trainable now."""
        return [name for name, each in self._named if self._is_trained(each)]

    def note(self) -> None:
        """Remember them as they are, unless they are remembered already."""
        if self._marks is None:
            self._marks = self._read()

    def forget(self) -> None:
        """Forget them: they were changed by a load."""
        self._marks = None

    def check(self) -> None:
        """Check that they are as they were noted, and that the model has got no others.

        Raises:
            UsageError: the script has changed one, or the model has a new one, also in its place.
        """
        new = [name for name in self._read_names() if name not in self._known]
        if new:
            raise UsageError(
                f"model: it has got {', '.join(new[:3])}{' ...' if len(new) > 3 else ''} since the "
                f"Loop was made, as where a layer or a buffer is built in a forward pass: no "
                f"optimizer has that, and no state can carry it. Build all of them, or give the "
                f"model a first batch, before you make the optimizer and the Loop"
            )
        others = [
            name
            for name, each in self._read_named()
            if id(each) not in self._built and self._is_trained(each)
        ]
        if others:
            raise UsageError(other_parameters(others))
        if self._marks is None or not self._named:
            return
        now = self._read()
        for name, mark in now.items():
            if self._marks.get(name, mark) != mark:
                raise UsageError(
                    f"model: {name} has changed, and the loop's optimizer does not have it: a "
                    f"second optimizer steps by this trainer's own gradients, so trainers differ. "
                    f"{self._remedy}"
                )
        self._marks = now

    def _read(self) -> dict[str, Any]:
        if not self._named:
            return {}
        owned = self._owned()
        return {
            name: self._mark(each)
            for name, each in self._named
            if self._is_trained(each) and id(each) not in owned
        }


def check_noted(names: Iterable[str]) -> None:
    """Refuse gradients, of the parameters of these names, that no call of `backward` has left."""
    for name in names:
        raise UsageError(
            f"gradients: {name} has one that did not come by step.backward: write "
            f"step.backward(loss) instead of loss.backward(), for each loss. It counts a shard by "
            f"its share of the batch. Where the gradient of an input alone is wanted, as for an "
            f"adversarial one, take it by torch.autograd.grad or paddle.grad"
        )


def other_parameters(names: Sequence[str]) -> str:
    """Return why parameters that stand in the place of others are refused."""
    return (
        f"model: its {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} is another parameter "
        f"than when the Loop was made, as where a new layer takes a layer's place: the optimizer "
        f"steps the old one, and a trainer that starts later builds that. Give new values to the "
        f"old one (reset_parameters, under no_grad), or build all layers before the optimizer and "
        f"the Loop, and have an attribute say which one is used, or go on with the new one in a "
        f"second Loop, with a checkpoint= of its own"
    )


def check_later_optimizer(kind: str, parameters: Collection[int], known: Collection[int]) -> None:
    """Check that an optimizer that a script has made while it trains is not of the loop's models.

    Args:
        parameters: ids of the optimizer's; `known`: of the models'.

    Raises:
        UsageError: it is; no update would step it.
    """
    if not set(known).isdisjoint(parameters):
        raise UsageError(
            f"optimizer: another one ({kind}), of parameters of the loop's model, was made as the "
            f"training went on, and step.update() steps the one that the Loop was made with. Set "
            f"the learning rate and the options of that one instead, or go on with the new one in "
            f"a second Loop, with a checkpoint= of its own. One that is used no more: del it"
        )


def sparse_gradient(name: str) -> str:
    """Return why the sparse gradient of a parameter is refused."""
    return (
        f"model: {name} has sparse gradients, which are not summed over trainers; create its "
        f"layer, or call F.embedding, with sparse=False"
    )


def limited_norm(name: str, renormalize: str) -> str:
    """Return why an embedding with `max_norm` is refused."""
    return (
        f"model: {name} has max_norm, by which a forward pass changes the weights of the words "
        f"that it sees: others in each trainer. Leave it out, and limit them after step.update(): "
        f"{renormalize}"
    )


def check_disjoint(parameters: Sequence[Collection[int]]) -> None:
    """Check that no two optimizers have a parameter in common, by the ids of theirs.

    Raises:
        UsageError: they have one; it has one gradient and one place in a state.
    """
    seen: dict[int, int] = {}
    for index, mine in enumerate(parameters):
        for each in mine:
            if seen.setdefault(each, index) != index:
                raise UsageError(
                    f"optimizer: optimizers {seen[each]} and {index} have a parameter in common, "
                    f"and each would step it by the gradient of its own loss; give it to one of "
                    f"them, and send that one the sum of both losses"
                )
