"""Soft labels that were answered once: found for the items of a reader, and kept for later ones."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.specs import ModelSpec
from distill_reader.student.client import Array
from distill_reader.student.feed import Request
from distill_reader.student.items import Item, Piece
from distill_reader.student.label_store import LabelStore
from distill_reader.student.labels import Labels, Served
from distill_reader.student.options import CacheOptions

logger = logging.getLogger(__name__)


class LabelCache:
    """The labels of one service. Any thread may call it; forked processes make their own."""

    def __init__(
        self,
        options: CacheOptions,
        labels: Labels,
        wire_ins: Sequence[tuple[str, str]],
        *,
        scope: str = "",
    ) -> None:
        """
        Args:
            wire_ins: inputs that are rounded give other labels.
            scope: of a version that the user gave, where there are several services.

        Raises:
            UsageError: the folder cannot be used.
        """
        self._options = options
        self._labels = labels
        self._wire_ins = sorted(map(list, wire_ins))
        self._scope = scope
        self._lock = threading.Lock()
        self._version: str | None = None  # None: no teacher has told yet
        self._store: LabelStore | None = None  # None: as long as that
        if options.teacher_version is not None:
            self._open(f"given {options.teacher_version}")

    @property
    def is_open(self) -> bool:
        """Whether it is known of which version labels are wanted."""
        return self._store is not None

    def __len__(self) -> int:
        """Return how many samples it holds."""
        return 0 if self._store is None else len(self._store)

    def meet(self, endpoint: str, spec: ModelSpec) -> None:
        """Learn the version from a teacher, or see that it serves the one that is known.

        Raises:
            BadRequest: it serves another one, or does not say which.
            UsageError: the folder cannot be used.
        """
        if self._options.teacher_version is not None:
            return
        if not spec.digest:
            raise BadRequest(
                f"{endpoint}: does not say which version of the model it serves, so that labels "
                "cannot be kept for later: name it by set_cache(teacher_version=...), or leave "
                "out set_cache"
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
        root = Path(self._options.folder)
        self._store = LabelStore(root, identity, max_bytes=self._options.max_bytes)
        self._version = version
        logger.info("cache %s: %d labels", self._store.folder, len(self._store))

    def find(self, item: Item) -> int:
        """Answer what is known of an item; return the bytes of one sample's predictions, 0: none.

        Its pieces are then what is not known.
        """
        store = self._store
        if store is None or item.keys is None or not item.samples:
            return 0
        is_there, rows = store.find(item.keys)
        layout = store.layout
        if layout is None or not len(rows):
            return 0
        arrays = self._labels.restore(layout.split(rows), layout.served)
        begin = 0
        for first, samples in _runs(is_there):
            item.answers.append((first, samples, arrays, begin))
            begin += samples
        item.missing -= begin
        item.pieces = [part for piece in item.pieces for part in _left(piece, is_there)]
        return sum([array.nbytes for array in arrays]) // begin

    def keep(self, request: Request, columns: Sequence[Array], served: Sequence[Served]) -> None:
        """Keep the answer to a request."""
        store = self._store
        keys = [
            piece.item.keys[piece.first : piece.first + piece.samples]
            for piece in request.pieces
            if piece.item.keys is not None
        ]
        if store is not None and len(keys) == len(request.pieces):
            store.add(np.concatenate(keys), columns, served)


def _runs(mask: Any) -> list[tuple[int, int]]:
    """Return start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [
        (int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _left(piece: Piece, is_there: Any) -> list[Piece]:
    """Return the parts of a piece whose samples are not there."""
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
