"""The cache of soft labels of one service: looks up a reader's items, and stores answers."""

import logging
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest, UsageError
from distill_reader.model.specs import ModelSpec
from distill_reader.student.batches.feed import Request
from distill_reader.student.batches.items import ItemPiece, ReaderItem, Signature
from distill_reader.student.cache import label_space as space
from distill_reader.student.cache.label_store import Described, Inputs, LabelStore, RowLayout
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import Labels, ServedOutput
from distill_reader.student.options import CacheOptions

logger = logging.getLogger(__name__)

_CHECKED_BLOCKS, _BLOCK = 8, 512  # of a large sample, so many blocks of bytes are compared


class LabelCache:
    """The cached labels of one service. Any thread may call it; forked processes make their own."""

    def __init__(
        self,
        options: CacheOptions,
        labels: Labels,
        wire_ins: Sequence[tuple[str, str]],
        *,
        sent: Sequence[str] = (),
        scope: str = "",
    ) -> None:
        """
        Args:
            wire_ins: how inputs are changed before they are sent, for that changes the labels.
            sent: names of the fields that may be sent.
            scope: the service's name, if there are several and the user names the version.

        Raises:
            UsageError: the folder cannot be used.
        """
        self._options = options
        self._labels = labels
        self._wire_ins = sorted(map(list, wire_ins))
        self._sent = tuple(sent)
        self._taken: frozenset[str] = frozenset()  # inputs that teachers take; empty: unknown
        # Of this layout and these inputs.
        self._known_places: tuple[RowLayout | None, frozenset[str], tuple[int, ...]]
        self._known_places = (None, frozenset(), ())
        self._known_signature: Signature | None = None  # of the last items that were compared
        self._scope = scope
        self._lock = threading.Lock()
        self._version: str | None = None  # None: no teacher has told it yet
        self._store: LabelStore | None = None  # None: the version is unknown
        if options.teacher_version is not None:
            self._open(f"given {options.teacher_version}")

    @property
    def is_open(self) -> bool:
        """Whether the version is known, so that labels can be looked up."""
        return self._store is not None

    def __len__(self) -> int:
        """Return the number of samples."""
        return 0 if self._store is None else len(self._store)

    def meet(self, endpoint: str, spec: ModelSpec, taken: Collection[str]) -> None:
        """Learn the version from the first teacher; check that others serve the same.

        Args:
            taken: the fields that it takes.

        Raises:
            BadRequest: it serves another version, or does not tell which.
            UsageError: the folder cannot be used.
        """
        if not self._taken:
            self._taken = frozenset(taken)
            self._known_signature = None  # what was compared before was compared without it
        if self._options.teacher_version is not None:
            return
        if not spec.digest:
            raise BadRequest(
                f"{endpoint}: does not tell which version of the model it serves, so its labels "
                "cannot be cached: name it by set_cache(teacher_version=...), or leave out "
                "set_cache"
            )
        with self._lock:
            if self._version is None:
                self._open(spec.digest)
            elif self._version != spec.digest:
                raise BadRequest(
                    f"{endpoint}: serves version {spec.digest} of the model; this reader keeps the "
                    f"labels of {self._version}, and does not mix them: call set_cache again to "
                    "begin with the new one"
                )

    def _open(self, version: str) -> None:
        identity: dict[str, Any] = {
            "version": version,
            "scope": self._scope if version.startswith("given ") else "",
            "wire_ins": self._wire_ins,
            **self._labels.identity(),
        }
        if self._options.data is not None:  # else as older releases had it
            identity["data"] = self._options.data
        root = Path(self._options.folder)
        self._store = LabelStore(root, identity, max_bytes=self._options.max_bytes)
        self._version = version
        if self._store.is_closed:
            return
        logger.info("cache %s: %d labels", self._store.folder, len(self._store))
        if space.is_of_one_pod(root, os.environ):
            logger.warning(
                "cache %s: is in the folder of this pod alone: other pods of the job, and those "
                "that come later, have their own, and ask for all labels again. Name an absolute "
                "path",
                root,
            )

    def find(self, item: ReaderItem) -> int:
        """Answer the samples of an item that are cached; its pieces are then the other samples.

        Returns:
            The bytes of one sample's predictions; 0: no sample is cached.

        Raises:
            UsageError: the cached labels were made of other inputs.
        """
        store = self._store
        if store is None or item.keys is None or not item.samples:
            return 0
        is_there, rows, checks = store.find(item.keys)
        layout = store.layout
        if layout is None or not len(rows):
            return 0
        for piece in item.pieces:
            is_found = is_there[piece.first : piece.first + piece.samples].any()
            if piece.signature == self._known_signature or not is_found:
                continue  # what is not kept may have another size or type than what is
            described = self._describe(piece.signature, layout)
            if layout.inputs and _of_any_length(layout.inputs) == _of_any_length(described):
                if layout.inputs not in (described, _of_any_length(described)):
                    return 0  # labels have the length of their texts, and these texts have another
            elif layout.inputs:
                raise self._other_inputs(
                    f"were made of {_shown(_of_any_length(layout.inputs))}, and the reader's are "
                    f"{_shown(_of_any_length(described))}"
                )
            self._known_signature = piece.signature
        find, places = _finder(item.pieces), self._places(layout)
        for number, check in checks.items():
            own = _check_input(*find(number), places) or 1
            # A text is padded to the longest of its batch: with another length nothing is known.
            if own >> 32 == check >> 32 and own != check:
                raise self._other_inputs(
                    f"were made of other inputs: that of sample {number} of this batch, at least, "
                    "has changed"
                )
        arrays = self._labels.restore(layout.split(rows), layout.served)
        begin = 0
        for first, samples in _runs(is_there):
            item.answers.append((first, samples, arrays, begin))
            begin += samples
        item.missing -= begin
        item.pieces = [part for piece in item.pieces for part in _left(piece, is_there)]
        return sum([array.nbytes for array in arrays]) // begin

    def keep(
        self, request: Request, columns: Sequence[Array], served: Sequence[ServedOutput]
    ) -> None:
        """Store the answer to a request, before the consumer can change its arrays."""
        store = self._store
        keys = [
            piece.item.keys[piece.first : piece.first + piece.samples]
            for piece in request.pieces
            if piece.item.keys is not None
        ]
        if store is not None and len(keys) == len(request.pieces):
            layout = store.layout
            described = self._describe(request.signature, layout)
            of_any_length = _of_any_length(described)
            varies = self._labels.vary(columns, served)
            inputs = Inputs(
                layout=described if varies else of_any_length,
                also=(described, of_any_length),
                check=_row_check(request, self._places(layout)),
            )
            store.add(np.concatenate(keys), columns, served, inputs)

    def _places(self, layout: RowLayout | None) -> tuple[int, ...]:
        """Return which of the fields that may be sent are the inputs that labels are made of.

        A label's own field, which no teacher takes, may change. Labels of older releases have all
        fields in their layout.
        """
        known, taken, places = self._known_places
        if layout is None or layout is not known or taken is not self._taken:
            taken = self._taken
            names = [name for name in self._sent if not taken or name in taken]
            if layout is not None and layout.inputs:
                # In the order of who wrote it, for any other reader may have another one.
                made_of = [name for name, *_ in layout.inputs]
                new = [name for name in names if taken and name not in made_of]
                names = [name for name in made_of if name in self._sent] + new
            places = tuple(self._sent.index(name) for name in names)
            self._known_places = layout, taken, places
        return places

    def _describe(self, signature: Signature, layout: RowLayout | None) -> Described:
        """Return name, dtype and shape of each input."""
        inputs = [(self._sent[place], *signature[place]) for place in self._places(layout)]
        return tuple([(name, dtype.name, shape) for name, dtype, shape in inputs])

    def _other_inputs(self, how: str) -> UsageError:
        assert self._store is not None
        return UsageError(
            f"cache: the labels in {self._store.folder} {how}. Give each data set, and each way of "
            "preparing its samples, a name of its own by set_cache(data=...); name what random "
            "augmentation follows from by set_cache(variant=...); or remove that folder"
        )


def _of_any_length(inputs: Described) -> Described:
    """Return the inputs with any length on the first axis, if they have one or two axes."""
    return tuple(
        [
            (name, dtype, (-1, *shape[1:]) if 1 <= len(shape) <= 2 else shape)
            for name, dtype, shape in inputs
        ]
    )


def _row_check(request: Request, places: Sequence[int]) -> Callable[[int], int]:
    """Return a function: the checksum of the inputs of a sample, by its index over all pieces.

    0: the consumer may have altered them meanwhile.
    """
    find = _finder(request.pieces)

    def check(row: int) -> int:
        piece, at = find(row)
        found = _check_input(piece, at, places)
        return found if piece.item.missing and not request.is_answered else 0

    return check


def _finder(pieces: Sequence[ItemPiece]) -> Callable[[int], tuple[ItemPiece, int]]:
    """Return a function: the piece of a sample, and its index there, by that over all pieces."""
    ends = list(accumulate(piece.samples for piece in pieces))

    def find(row: int) -> tuple[ItemPiece, int]:
        number = bisect_right(ends, row)
        piece = pieces[number]
        return piece, row - ends[number] + piece.samples

    return find


def _check_input(piece: ItemPiece, at: int, places: Sequence[int]) -> int:
    """Return a checksum of one sample's inputs: of shapes in the upper 32 bits, then of values.

    Args:
        places: which of its fields are inputs.
    """
    shapes = values = 0
    for arrays in [piece.rows[place] for place in places]:
        is_each = len(arrays) == piece.samples
        sample = np.asarray(arrays[at][0] if is_each else arrays[0][at])
        shapes = zlib.crc32(f"{sample.dtype.str}{sample.shape}".encode(), shapes)
        values = zlib.crc32(_part(sample), values)
    return shapes << 32 | values


def _part(sample: Any) -> Any:
    """Return the bytes to compare: of a large sample, to save time, blocks spread over all of it.

    If its preparation has changed, nearly all of its bytes have.
    """
    step = -(-sample.nbytes // (_CHECKED_BLOCKS * _BLOCK))
    if step <= 1:
        return sample.tobytes()
    data = np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
    return b"".join(data[at : at + _BLOCK].data for at in range(0, len(data), step * _BLOCK))


def _shown(inputs: Described) -> str:
    return ", ".join(f"{name} ({dtype} {list(shape)})" for name, dtype, shape in inputs)


def _runs(mask: Any) -> list[tuple[int, int]]:
    """Return start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [
        (int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _left(piece: ItemPiece, is_there: Any) -> list[ItemPiece]:
    """Return the parts of a piece whose samples are missing in the cache."""
    missing = ~is_there[piece.first : piece.first + piece.samples]
    if missing.all():
        return [piece]
    parts = []
    done = 0
    for start, samples in _runs(missing):
        if start > done:
            _, piece = piece.cut(start - done)
        if samples < piece.samples:
            part, piece = piece.cut(samples)
        else:
            part = piece
        parts.append(part)
        done = start + samples
    return parts
