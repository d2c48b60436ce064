"""Compare the terms of the training, which must be the same on all ranks: arguments, data, model.

Each rank decides by itself which samples are its own, how a loss is weighted and when gradients are
exchanged. Ranks with different terms would train anyway: on samples that count twice or never, with
gradients of different weights.
"""

import contextlib
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from pod_runtime.trainer.data.sampling import REMEDY as SAMPLER_REMEDY
from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.framework import FrameworkGroup
from pod_runtime.trainer.frameworks.plain_values import rough_digest
from pod_runtime.trainer.progress.epoch_order import OrderRecord

_MOST_ARRAYS = 100  # of a script, that are looked at
_MOST_FILES = 100
_PACKAGES = frozenset(("site-packages", "dist-packages"))
_VERSIONS = frozenset(("torch", "paddle", "numpy"))
_REMEDY = (
    "every trainer has to pass the same: a value that a process makes itself, such as "
    "int(time.time()), random.random(), a host's name, the number or order of its files, or a "
    "split of data or a permutation without a seed, differs from trainer to trainer; write it down "
    "once, in the script or its arguments, seed all generators first, and sort files that are found"
)


def check_same_terms(
    group: FrameworkGroup, terms: Mapping[str, Any], *, rank: int, world_size: int
) -> None:
    """Compare this rank's terms with those of rank 0. All ranks of the group call it.

    Args:
        terms: JSON types, by the names that users know.

    Raises:
        UsageError: a rank differs. The text is the same on every rank; it names the rank, the
            argument, both values and the remedy.
        PeerLost: a rank is gone.
    """
    if world_size == 1:
        return
    mine = json.loads(json.dumps(terms))
    first = json.loads(_from_rank(group, 0, json.dumps(mine) if rank == 0 else None))
    differs = "" if first == mine else _describe(mine, first, rank)
    _refuse_if_any(group, differs, _REMEDY, rank=rank, world_size=world_size)


def script_values() -> dict[str, Any]:
    """Return the tensors and arrays that the script has, by its names; trained ones are left out.

    And files that are mapped.
    """
    found: dict[str, Any] = {}
    for name, value in [*vars(sys.modules["__main__"]).items()]:
        is_trained = getattr(value, "requires_grad", False) or not getattr(
            value, "stop_gradient", True
        )
        is_array = type(value) is np.ndarray or type(value).__name__ == "Tensor"
        if is_array and not is_trained and not name.startswith("_"):
            found[name] = value
    return found


def script_arrays(values: Mapping[str, Any]) -> dict[str, int]:
    """Return checksums of these tensors and arrays, by their names; of some if there are many."""
    found: dict[str, int] = {}
    for name, value in values.items():
        if len(found) == _MOST_ARRAYS:
            break
        digest = rough_digest(value)
        if digest is not None:
            found[name] = digest
    return found


def script_sources() -> dict[str, int]:
    """Return checksums of what should be the same on all nodes, by what to call it.

    The script's file, modules below its folder that are imported by now, and versions.
    """
    found: dict[str, int] = {}
    main = vars(sys.modules["__main__"]).get("__file__")
    # As it was named, and where links lead, as its imports are.
    paths = () if main is None else (os.path.abspath(main), os.path.realpath(main))
    folders = tuple(os.path.join(os.path.dirname(each), "") for each in paths)
    for name, module in [*sys.modules.items()]:
        known = getattr(module, "__dict__", {})  # a module may make what it has not, and take long
        if name in _VERSIONS and "__version__" in known:
            found[f"version of {name}"] = zlib.crc32(str(known["__version__"]).encode())
        file = paths[0] if name == "__main__" and paths else known.get("__file__") or ""
        folder = next(filter(file.startswith, folders), None)
        if folder is None or len(found) > _MOST_FILES or _PACKAGES & {*Path(file).parts}:
            continue
        with contextlib.suppress(OSError):
            found[file.removeprefix(folder)] = zlib.crc32(Path(file).read_bytes())
    return found


def other_checksums(
    group: FrameworkGroup, mine: Mapping[str, int], *, rank: int, world_size: int
) -> list[str]:
    """Return which of rank 0's checksums are others on this or another rank, by their names.

    All ranks of the group call it. Raises PeerLost: a rank is gone.
    """
    if world_size == 1:
        return []
    first = json.loads(_from_rank(group, 0, json.dumps(mine) if rank == 0 else None))
    differs = np.array([float(mine.get(each, value) != value) for each, value in first.items()])
    if len(differs):
        group.all_reduce(differs)
    return [each for each, count in zip(first, differs, strict=True) if count]


def check_same_order(
    group: FrameworkGroup, name: str, record: OrderRecord, *, rank: int, world_size: int
) -> None:
    """Compare what the sampler `name` drew here for an epoch with what it drew on rank 0.

    All ranks of the group call it.

    Raises:
        UsageError: a rank differs; as `check_same_terms`.
        PeerLost: a rank is gone.
    """
    if world_size == 1:
        return
    first = _from_rank(group, 0, record.digest if rank == 0 else None)
    differs = ""
    if first != record.digest:
        differs = (
            f"train_set: the DataLoader's {name} drew other samples for epoch {record.epoch} on "
            f"rank {rank} than on rank 0"
        )
    _refuse_if_any(group, differs, SAMPLER_REMEDY, rank=rank, world_size=world_size)


def _refuse_if_any(
    group: FrameworkGroup, differs: str, remedy: str, *, rank: int, world_size: int
) -> None:
    """Raise the same UsageError on every rank if `differs` says on any what is wrong there."""
    found = np.zeros(world_size)
    found[rank] = bool(differs)
    group.all_reduce(found)
    if found.any():
        source = int(np.flatnonzero(found)[0])
        text = _from_rank(group, source, differs if rank == source else None)
        others = int(np.count_nonzero(found)) - 1
        more = f" ({others} more differ from rank 0, too)" if others else ""
        raise UsageError(f"{text}{more}; {remedy}")


def check_terms_of_state(stored: str, terms: Mapping[str, Any], *, rank: int) -> None:
    """Compare this rank's terms with those of the trainers that made a state, and still train.

    Args:
        stored: from `to_text`; "": made by a version that did not store them.

    Raises:
        StateError: they differ. All trainers are then restarted, with the script as it is now.
    """
    mine = json.loads(to_text(terms))
    if stored and (first := json.loads(stored)) != mine:
        raise StateError(
            f"{_describe(mine, first, rank)}, as all that stay; was the script edited while it "
            f"trains? That counts from the next start of all of its trainers, which is made now"
        )


def to_text(terms: Mapping[str, Any]) -> str:
    """Return terms as a state stores them: lists, such as a model's, by their checksum."""
    return json.dumps(
        {
            name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
            if isinstance(value, list)
            else value
            for name, value in terms.items()
        }
    )


def _from_rank(group: FrameworkGroup, source: int, text: str | None) -> str:
    """Return the text of rank `source`; `text`: None on other ranks."""
    data = np.frombuffer((text or "").encode(), np.uint8).copy()
    size = np.array([data.size], np.int64)
    group.broadcast(size.view(np.uint8), source)
    if text is None:
        data = np.zeros(int(size[0]), np.uint8)
    group.broadcast(data, source)
    return data.tobytes().decode()


def _describe(mine: Mapping[str, Any], first: Mapping[str, Any], rank: int) -> str:
    """Return the first difference between this rank's terms and those of rank 0."""
    names = dict.fromkeys((*first, *mine))
    name = next(each for each in names if mine.get(each) != first.get(each))
    here, there = mine.get(name), first.get(name)
    if isinstance(here, list) and isinstance(there, list):
        return f"{name}: {_first_difference(here, there, rank)}"
    return f"{name}: rank {rank} was told {here!r}, rank 0 {there!r}"


def _first_difference(here: list[Any], there: list[Any], rank: int) -> str:
    pairs = enumerate(zip_longest(here, there, fillvalue="missing"))
    index, (mine, first) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return f"entry {index} of rank {rank} is {mine!r}, of rank 0 {first!r}"
