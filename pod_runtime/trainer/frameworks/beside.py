"""Watch the models, and copies of the model, that a script keeps beside what the loop has.

A moving average, a target network, a critic with an optimizer of its own: no state carries what
changes in them, and a trainer that starts later has them as the script builds them.
"""

import gc
import sys
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.plain_values import differ, is_of_script

_DICTS = frozenset((dict, OrderedDict))
_CONTAINERS = _DICTS | {list}
_DEEPEST = 4  # objects within an object of `extra=` that are looked through
_ALWAYS = 4  # looks of a process that may take as long as they do
_SHARE = 500  # of the time that passes, later looks take one part

# A thing, its tensors by name or place, or numbers, and a reference to it or its first tensor.
Found = tuple[Any, dict[Any, Any], Callable[[], Any] | None]


class Beside:
    """What is beside the loop's model and `extra=`, in all of the process. Of either framework."""

    def __init__(
        self,
        models: Sequence[Any],
        extra: Mapping[str, Any],
        model_type: type,
        *,
        address: Callable[[Any], int | None],
        fingerprint: Callable[[Any], float],
        is_trained: Callable[[Any], bool],
        checks: Mapping[type, Callable[[Any], None]] | None = None,
        checks_of_later: Mapping[type, Callable[[Any], None]] | None = None,
        numbers: Mapping[type, Callable[[Any], Mapping[str, float]]] | None = None,
    ) -> None:
        """
        Args:
            models: the loop's.
            model_type: what models are, with `named_parameters` and the like.
            address: returns where a tensor's values are; None: it is no tensor, or has none.
            fingerprint: returns a number that tells whether a tensor is another one.
            is_trained: whether a parameter is.
            checks: by their type, of other objects of the process, also of types derived from it;
                they raise UsageError.
            checks_of_later: the same, of objects that were not there at the first look.
            numbers: by their type, return those of other objects that tell whether they go on.
        """
        self._numbers = numbers or {}
        self._checks, self._checks_of_later = checks or {}, checks_of_later or {}
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()  # at the first look
        self._models, self._extra, self._model_type = models, extra, model_type
        self._address, self._fingerprint, self._is_trained = address, fingerprint, is_trained
        # By id: a reference that tells whether it is still the same, and marks of its tensors.
        self._seen: dict[int, tuple[Callable[[], Any] | None, dict[str, float]]] = {}
        self._looks = 0
        self._due_at = 0.0  # by time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next look costs a training little: it goes through a million objects."""
        return self._looks < _ALWAYS or time.monotonic() >= self._due_at

    def of_models(self) -> tuple[float, list[float]]:
        """Return what the newest look has found of models, as numbers: of which kinds, and values.

        There are as many values on all trainers where the first number is the same. One by one: a
        mask has such large ones that all others would not count in a sum.
        """
        found = sorted(
            (f"{type(thing).__name__} {sorted(marks)}", [*marks.values()])
            for reference, marks in self._seen.values()
            if reference and issubclass(type(thing := reference()), self._model_type)
        )
        kinds = zlib.crc32(repr([kind for kind, _values in found]).encode())
        return float(kinds), [each for _kind, values in found for each in values]

    def changed(self, *, copies: bool) -> list[str]:
        """Return what has changed since the last call, in words; nothing at the first one.

        Args:
            copies: also of dicts with the names of the model's tensors. From step to step these
                are averages; later, they may be copies of a best model, made anew each time.

        Raises:
            UsageError: one of these cannot be right.
        """
        began_at = time.monotonic()
        names = [dict(each.named_parameters()).keys() for each in self._models] if copies else []
        shapes = list(self._shapes()) if copies else []
        objects = self._objects(copies=copies)
        if self._failing_check(objects) is not None:
            objects.clear()
            gc.collect()  # it may be one that nothing but itself refers to any more
            objects = self._objects(copies=copies)
            if (error := self._failing_check(objects)) is not None:
                raise error
        if not self._looks:
            later = tuple(self._checks_of_later)
            self._there.update(each for each in objects if issubclass(type(each), later))
        found, now = [], {}
        known = self._known()
        models = [each for each in objects if issubclass(type(each), self._model_type)]
        dicts = self._dicts(objects, {next(iter(each), None) for each in names})
        sizes = set(map(len, shapes))
        lists = [each for each in objects if type(each) is list and len(each) in sizes]
        for thing, tensors, reference in (
            *self._of_models(models, known),
            *self._of_dicts(dicts, names, known),
            *self._of_lists(lists, shapes, known),
            *self._of_others(objects, known),
        ):
            marks = {
                name: each if isinstance(each, float) else self._fingerprint(each)
                for name, each in tensors.items()
            }
            last, before = self._seen.get(id(thing), (None, {}))
            if last is None or last() is not None:
                moved = [
                    name for name in marks if differ(before.get(name, marks[name]), marks[name])
                ]
                if moved and not (type(thing) is list and self._is_of_framework(thing)):
                    found.append(f"{moved[0]} of {_words(thing)}")
            now[id(thing)] = reference, marks
        self._seen = now
        self._looks += 1
        ended_at = time.monotonic()
        self._due_at = ended_at + _SHARE * (ended_at - began_at)
        return found

    def _objects(self, *, copies: bool) -> list[Any]:
        """Return the process's objects that are looked into."""
        objects = gc.get_objects()
        wanted = {
            kind
            for kind in set(map(type, objects))
            if issubclass(
                kind, (self._model_type, *self._checks, *self._checks_of_later, *self._numbers)
            )
            or (copies and (kind in _CONTAINERS or is_of_script(kind.__module__)))
        }
        return [each for each in objects if type(each) in wanted]

    def _failing_check(self, objects: list[Any]) -> UsageError | None:
        """Return what is wrong with one of these objects; None: nothing."""
        later = self._checks_of_later if self._looks else {}
        for base, check in (*self._checks.items(), *later.items()):
            for each in objects:
                if issubclass(type(each), base) and each not in self._there:
                    try:
                        check(each)
                    except UsageError as error:
                        return UsageError(str(error))  # without the frames that refer to the object
        return None

    def _dicts(self, objects: list[Any], keys: Collection[Any]) -> list[Any]:
        """Return the dicts with one of these keys."""
        if not keys:
            return []
        dicts = [each for each in objects if type(each) in _DICTS]
        # Python does not list dicts whose values hold no other objects: Paddle's tensors.
        holders = [vars(sys.modules["__main__"])]
        holders += [
            each
            for each in objects
            if type(each) not in _CONTAINERS and not issubclass(type(each), self._model_type)
        ]
        for holder in holders:
            dicts += [each for each in gc.get_referents(holder) if type(each) in _DICTS]
        return list({id(each): each for each in dicts if any(key in each for key in keys)}.values())

    def _shapes(self) -> Iterator[list[list[int]]]:
        """Yield shapes of what a list may hold of a model, whatever its order.

        All parameters, the trained ones, or all tensors.
        """
        for model in self._models:
            of_all = list(model.parameters())
            trained = [each for each in of_all if self._is_trained(each)]
            for tensors in (of_all, trained, [*of_all, *model.buffers()]):
                if tensors:
                    yield sorted(list(each.shape) for each in tensors)

    def _of_models(self, models: list[Any], known: set[int]) -> Iterator[Found]:
        inner = {id(child) for model in models for child in model.children()}
        for model in models:
            if id(model) in inner or id(model) in known:
                continue
            named = (*model.named_parameters(), *model.named_buffers())
            tensors = {name: each for name, each in named if self._is_other(each, known)}
            if tensors:
                yield model, tensors, weakref.ref(model)

    def _of_dicts(
        self, dicts: list[Any], names: Sequence[Collection[str]], known: set[int]
    ) -> Iterator[Found]:
        for each in dicts:
            tensors = {name: value for name, value in each.items() if self._is_other(value, known)}
            if id(each) not in known and any(
                2 * len(tensors.keys() & of_model) > len(of_model) for of_model in names
            ):
                yield each, tensors, None

    def _of_lists(
        self, lists: list[Any], shapes: Sequence[list[list[int]]], known: set[int]
    ) -> Iterator[Found]:
        for each in lists:
            # Not by index: another thread may be about to make this list, and has not filled it.
            tensors = gc.get_referents(each)[::-1]
            if (
                len(tensors) == len(each)
                and all(self._is_other(value, known) for value in tensors)
                and sorted(list(value.shape) for value in tensors) in shapes
            ):
                # Lists are made anew where tensors are: what counts is whether these stay.
                yield each, dict(enumerate(tensors)), weakref.ref(tensors[0])

    def _of_others(self, objects: list[Any], known: set[int]) -> Iterator[Found]:
        for base, numbers in self._numbers.items():
            for each in objects:
                if issubclass(type(each), base) and id(each) not in known and (of := numbers(each)):
                    yield each, dict(of), weakref.ref(each)

    def _is_of_framework(self, thing: Any) -> bool:
        """Whether a list is the framework's, or ours: of gradients, and views of them."""
        holders = gc.get_referrers(thing)
        holders += [owner for each in holders if type(each) is dict
                    for owner in gc.get_referrers(each)]  # fmt: skip
        modules = {type(each).__module__.partition(".")[0] for each in holders}
        return not modules.isdisjoint(("pod_runtime", "torch", "paddle"))

    def _is_other(self, tensor: Any, known: set[int]) -> bool:
        return (address := self._address(tensor)) is not None and address not in known

    def _known(self) -> set[int]:
        """Return where the tensors are that the loop has, and the ids of what holds them."""
        found: set[int] = set()
        for thing in (*self._models, *self._extra.values()):
            self._note(thing, found, _DEEPEST)
        return found

    def _note(self, thing: Any, found: set[int], depth: int) -> None:
        address = self._address(thing)
        if address is not None:
            found.add(address)
        elif depth and id(thing) not in found:
            found.add(id(thing))
            inner: Iterable[Any] = ()
            if issubclass(type(thing), self._model_type):
                inner = (*thing.parameters(), *thing.buffers())
            elif isinstance(thing, Mapping):
                inner = thing.values()
            elif isinstance(thing, list | tuple):
                inner = thing
            elif issubclass(type(thing), tuple(self._numbers)):  # it may be made of others
                inner, depth = vars(thing).values(), _DEEPEST
            elif hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType):
                inner = vars(thing).values()  # also of packages, as torch_ema has averages
            for each in inner:
                self._note(each, found, depth - 1)


def _words(thing: Any) -> str:
    """Return what to call it."""
    if type(thing) is list:
        return "a copy beside the loop's model (a list)"
    if type(thing) not in _DICTS:
        what = "scheduler" if hasattr(thing, "last_epoch") else "model"
        return f"a {what} beside the loop's ({type(thing).__name__})"
    for holder in gc.get_referrers(thing):
        owner = vars(holder) if hasattr(holder, "__dict__") else {}
        for name, value in owner.items():
            if value is thing:
                return f"a copy beside the loop's model ({type(holder).__name__}.{name})"
    return "a copy beside the loop's model (a dict)"
