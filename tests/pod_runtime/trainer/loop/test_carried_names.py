"""Which variables of a script its epochs hand on."""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from pod_runtime.trainer.loop.carried_names import carried_names

found: list[str] = []


def epochs() -> Iterator[int]:
    frame = sys._getframe(1)
    found[:] = carried_names(frame)
    yield from range(2)


def test_counts_best_values_and_what_is_kept_of_them_are_handed_on():
    count, best, kept, patience, rate, unused = 0, 1e9, None, 3, 0.1, 5
    mean: Any = None
    for number in epochs():
        rate = rate * 0.9
        for each in range(3):
            count += 1
            mean = each if mean is None else 0.9 * mean + 0.1 * each
        if number < best:
            best, kept = number, {"weight": rate}
        else:
            patience -= 1
            if not patience + unused:
                break
    assert kept is not None
    assert found == ["best", "count", "kept", "mean", "patience", "rate"]


def test_what_an_epoch_sets_anew_reads_or_fills_is_not():
    total, rate, losses, began = 0.0, 0.1, [], time.time()
    model = SimpleNamespace(depth=1)
    for number in epochs():
        total = 0.0
        squares = [number * each for each in range(3)]
        with open("/dev/null") as file:
            line = file.readline()
        for each in squares:
            total += each * rate
        losses.append((total, line))
        model.depth += 1
        model = SimpleNamespace(depth=model.depth)
        took = time.time() - began
        began = time.time()
        assert took >= 0
    assert found == []


class Lazy:
    @property
    def dtype(self) -> str:
        raise RuntimeError("it is not built yet")


def test_objects_that_cannot_be_asked_end_no_training():
    kept = Lazy()
    for number in epochs():
        if number:
            kept = Lazy()
    assert (type(kept), found) == (Lazy, [])


def test_what_follows_from_the_loop_is_not():
    loop = SimpleNamespace(epochs=epochs, step_count=7)
    count = loop.step_count
    for _number in loop.epochs():
        count += 1
    assert (count, found) == (9, [])
