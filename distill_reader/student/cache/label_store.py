"""Soft labels on disk, of one version of one teacher. Many processes read and append.

A folder holds `header.json` (the layout of a row), `rows` and `keys`; row n and key n belong to one
sample. A row is written before its key, and the number of whole keys is the number of rows: a
process that is killed leaves at most a rest, which the next writer overwrites. Files never shrink,
so that mappings of other processes stay valid. Each key has a checksum of itself and its row, which
finds rows that a power failure has lost. `inputs` has a checksum of the teacher's input, for one
row in 64.

The processes must be on one machine: `lock` is held for an append, `users` (a shared lock) marks
the folder as in use.

LMDB was measured in place of these files: it reads 1.3 to 2 times as fast, but a commit that
survives a power failure takes a sync (10 ms here, a tenth of the labels per second), and without
it the whole cache is lost then, not some rows.
"""

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill_reader.backoff import backoff_s
from distill_reader.errors import UsageError
from distill_reader.student.batches.label_index import Keys, LabelIndex, mix
from distill_reader.student.cache import label_space as space
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import ServedOutput

logger = logging.getLogger(__name__)

FORMAT = 1
_KEY = np.dtype([("variant", "<u8"), ("id", "<u8"), ("check", "<u4"), ("mark", "<u4")])
_MARK = 0x4C44_4531  # in every key; a page that was never written lacks it
_GUARD = 64  # the first of so many rows has a checksum of its input; a power of two
_INPUT = struct.Struct("<Q")  # 0: unknown, as for rows of an older release
# What may pass, and is no mistake of the user's: a student goes on without the cache.
_PASSING = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
        errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip
_LOCK_WAIT_S = 2.0  # not longer: a label that is not stored is only asked for again
_LOCK_LOOK_S = 0.005
# Half the first pause then, and the longest: who holds it may have been stopped, for hours.
_LOCK_PAUSE_S = (1.0, 60.0)
_MEASURED_S = 1.0  # for so long it counts what the other folders had

# Name, dtype and shape of each input of a sample; -1: samples differ in this length.
Described = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The layout of a row: the columns of one sample, one after the other."""

    columns: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape for one sample
    served: tuple[ServedOutput, ...]  # the outputs that the columns encode
    inputs: Described = ()  # (): unknown, as written by an older release

    @property
    def row_bytes(self) -> int:
        return sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            for dtype, shape in self.columns
        )

    def split(self, rows: Array) -> tuple[Array, ...]:
        """Return the columns of (N, row_bytes) uint8."""
        columns = []
        at = 0
        for dtype, shape in self.columns:
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            # A copy, also of a single row: its bytes may lie where this type must not begin.
            part = rows[:, at : at + size].copy()
            columns.append(part.view(dtype).reshape(len(rows), *shape))
            at += size
        return tuple(columns)

    def join(self, columns: Sequence[Array]) -> Array:
        """Return (N, row_bytes) uint8."""
        samples = len(columns[0])
        parts = [
            np.ascontiguousarray(column, dtype).reshape(samples, -1).view(np.uint8)
            for column, (dtype, _) in zip(columns, self.columns, strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": [[dtype, list(shape)] for dtype, shape in self.columns],
            "served": [each.to_json() for each in self.served],
            "inputs": self.inputs,
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "RowLayout":
        return RowLayout(
            columns=tuple((str(dtype), tuple(shape)) for dtype, shape in fields["columns"]),
            served=tuple(map(ServedOutput.from_json, fields["served"])),
            inputs=tuple(
                (str(name), str(dtype), tuple(map(int, shape)))
                for name, dtype, shape in fields.get("inputs", ())
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs that teachers were given."""

    layout: Described
    check: Callable[[int], int]  # row -> 64-bit checksum of its inputs
    also: tuple[Described, ...] = ()  # layouts of other teachers' labels that these fit as well


class LabelStore:
    """One such folder. Any thread of the process that opened it may call its methods."""

    def __init__(self, root: Path, identity: Mapping[str, Any], *, max_bytes: int) -> None:
        """Open the folder of this identity below `root`, or create it.

        Where that fails for what may pass, as a full disk, it logs that, and neither finds nor
        keeps anything.

        Args:
            identity: everything that determines the labels, as JSON.
            max_bytes: bound on everything below `root`.

        Raises:
            UsageError: the folder cannot be used; names it.
        """
        self._root = root
        self._max_bytes = max_bytes
        self._identity = dict(identity)
        self._lock = threading.Lock()
        self._index = LabelIndex()
        self._count = 0  # keys in the index
        self._layout: RowLayout | None = None
        self._rows: mmap.mmap | None = None
        self._keys: mmap.mmap | None = None
        self._is_full = False
        self._has_warned = False  # that not all labels are kept
        self._is_closed = True  # until it is open
        self._pid = os.getpid()
        self._others_bytes = 0  # size of the other folders
        self._measured_s = float("-inf")  # when that was measured
        self._misses = 0  # of the lock that all processes share, in a row
        self._locks_after_s = float("-inf")  # when to try it again
        self.folder = root
        self._opened: list[int] = []  # descriptors
        try:
            self._open()
            self._refresh()
        except OSError as error:
            self._close()
            if error.errno not in _PASSING and not self._is_read_only_now(error):
                raise UsageError(
                    f"cache: {error.filename or root}: {error.strerror}; name a folder on a local "
                    "disk that can be written to"
                ) from error
            self._note_loss(error)
        except BaseException:
            self._close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether it neither finds nor keeps anything."""
        return self._is_closed

    @property
    def layout(self) -> RowLayout | None:
        """The layout of a row; None: nothing was stored yet."""
        return self._layout

    def __len__(self) -> int:
        """Return the number of known rows; a sample may be counted twice."""
        return self._count

    def find(self, keys: Keys) -> tuple[Any, Array, dict[int, int]]:
        """Look up keys.

        Returns:
            For each key whether it is there; the rows of those that are, as uint8; and for one row
            in 64 the checksum of its input, by the index of its key.
        """
        mixes = mix(keys)
        nothing = np.zeros(len(keys), bool), np.empty((0, 0), np.uint8), dict[int, int]()
        with self._lock:
            if self._is_closed:
                return nothing
            try:
                return self._find(mixes, keys) or nothing
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                self._close()
                self._note_loss(error)
                return nothing

    def add(
        self, keys: Keys, columns: Sequence[Array], served: Sequence[ServedOutput], inputs: Inputs
    ) -> int:
        """Store the rows that are not there yet; return how many were added.

        None are added if the cache or the disk is full, or if another process holds the lock. A row
        with NaN is not stored: what went wrong may pass, and is asked for again.
        """
        with self._lock:
            if self._is_full or self._is_closed or time.monotonic() < self._locks_after_s:
                return 0
            try:
                with self._exclusive():
                    self._misses = 0
                    return self._append(keys, columns, tuple(served), inputs)
            except BlockingIOError:
                self._misses += 1
                pause_s = backoff_s(self._misses, *_LOCK_PAUSE_S)
                self._locks_after_s = time.monotonic() + pause_s
                logger.warning(
                    "cache %s: another process holds it; for %g s no labels are kept",
                    self.folder,
                    pause_s,
                )
            except OSError as error:
                self._is_full = True
                logger.warning("cache %s: no more is kept: %s", self.folder, error)
        return 0

    def close(self) -> None:
        """Close the files. A second call has no effect."""
        with self._lock:
            self._close()

    def __del__(self) -> None:
        # In a copy after fork the lock may be held for ever by a thread of the parent.
        if not getattr(self, "_is_closed", True) and os.getpid() == self._pid:
            self.close()

    # --- with the lock of this object

    def _open(self) -> None:
        self.folder, users = space.enter(self._root, self._identity)
        self._opened.append(users)
        self._guard = self._open_file("lock")
        self._files = {name: self._open_file(name) for name in ("keys", "rows")}
        self._inputs = self._open_file("inputs")  # not counted: one byte for 8 rows
        self._is_closed = False

    def _open_file(self, name: str) -> int:
        fd = space.open_file(self.folder / name)
        self._opened.append(fd)
        return fd

    def _close(self) -> None:
        self._is_closed = True
        self._rows = self._keys = None
        while self._opened:
            os.close(self._opened.pop())

    def _is_read_only_now(self, error: OSError) -> bool:
        """Return whether labels were kept there before: the kernel has closed a disk with errors.

        A folder that never was one of labels is a mistake of the user's.
        """
        header = space.folder_of(self._root, self._identity) / "header.json"
        return error.errno == errno.EROFS and header.exists()

    def _note_loss(self, error: OSError) -> None:
        logger.warning(
            "cache %s: %s; the training goes on without it: labels are asked for, and not kept",
            error.filename or self.folder,
            error.strerror,
        )

    def _find(self, mixes: Any, keys: Keys) -> tuple[Any, Array, dict[int, int]] | None:
        """See `find`; None: no key is there."""
        places = self._index.find(mixes)
        if (places < 0).any() and self._refresh():
            places = self._index.find(mixes)
        is_there = places >= 0
        if self._layout is None or not is_there.any():
            return None
        rows, is_good = self._read(places[is_there], keys[is_there])
        if not is_good.all():
            self._index.forget(mixes[is_there][~is_good])
            is_there[is_there] = is_good
            rows = rows[is_good]
        return is_there, rows, self._read_inputs(places, is_there)

    def _refresh(self) -> bool:
        """Read the keys that other processes have appended; return whether there are any."""
        if self._layout is None:
            self._layout = self._read_header()
            if self._layout is None:
                return False
        # After a power failure there may be keys without rows: these do not count.
        count = min(
            os.fstat(self._files["keys"]).st_size // _KEY.itemsize,
            os.fstat(self._files["rows"]).st_size // self._layout.row_bytes,
        )
        if count <= self._count:
            return False
        data = os.pread(
            self._files["keys"],
            (count - self._count) * _KEY.itemsize,
            self._count * _KEY.itemsize,
        )
        records: Any = np.frombuffer(data[: len(data) // _KEY.itemsize * _KEY.itemsize], _KEY)
        self._index.add(mix(_keys_of(records)), self._count)
        self._count += len(records)
        return True

    def _read(self, places: Any, keys: Keys) -> tuple[Array, Any]:
        """Return rows, and for each whether it is undamaged and belongs to its key."""
        layout = self._layout
        assert layout is not None
        self._keys = self._map("keys", self._keys, _KEY.itemsize)
        self._rows = self._map("rows", self._rows, layout.row_bytes)
        all_records: Any = np.frombuffer(self._keys, _KEY, self._count)
        records = all_records[places]
        all_rows = np.frombuffer(self._rows, np.uint8, self._count * layout.row_bytes)
        rows = all_rows.reshape(self._count, layout.row_bytes)[places]
        is_good = (records["mark"] == _MARK) & (_keys_of(records) == keys).all(axis=1)
        is_good &= records["check"] == _checks(keys, rows)
        return rows, is_good

    def _read_inputs(self, places: Any, is_there: Any) -> dict[int, int]:
        checks = {}
        for number in np.flatnonzero((places & (_GUARD - 1)) == 0).tolist():
            if not is_there[number]:
                continue
            at = int(places[number]) // _GUARD * _INPUT.size
            data = os.pread(self._inputs, _INPUT.size, at)
            if len(data) == _INPUT.size and any(data):
                (checks[number],) = _INPUT.unpack(data)
        return checks

    def _map(self, name: str, mapped: mmap.mmap | None, item_bytes: int) -> mmap.mmap:
        """Return a mapping that reaches to the last known row."""
        size = self._count * item_bytes
        if mapped is not None and len(mapped) >= size:
            return mapped
        # Map all of the file, which may have grown further, to map less often while it grows.
        size = max(size, os.fstat(self._files[name]).st_size)
        try:
            return mmap.mmap(self._files[name], size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # over a network; a file that was cut off
            text = f"cannot be mapped into memory ({error}): labels want a local disk"
            raise OSError(errno.EIO, text, str(self.folder / name)) from error

    def _append(
        self, keys: Keys, columns: Sequence[Array], served: tuple[ServedOutput, ...], inputs: Inputs
    ) -> int:
        self._refresh()
        layout = self._layout or self._write_header(columns, served, inputs)
        if layout is not None and layout.inputs not in ((), inputs.layout, *inputs.also):
            # Texts of another length have labels of another length.
            self._note_others("samples of another size or type than the first", inputs.layout)
            return 0
        if layout is None or not _fits(layout, columns):
            shown = [f"{column.dtype} {list(column.shape[1:])}" for column in columns]
            self._note_others("labels of varying shape or type", shown)
            return 0
        _, firsts = np.unique(keys, axis=0, return_index=True)
        new = np.sort(firsts)
        new = new[(self._index.find(mix(keys[new])) < 0) & ~_has_nan(columns)[new]]
        item_bytes = layout.row_bytes + _KEY.itemsize
        new = new[: self._room_bytes(len(new) * item_bytes) // item_bytes]
        if not len(new):
            return 0
        keys = keys[new]
        rows = layout.join([column[new] for column in columns])
        records = np.zeros(len(new), _KEY)
        records["variant"], records["id"] = keys[:, 0], keys[:, 1]
        records["check"], records["mark"] = _checks(keys, rows), _MARK
        _write(self._files["rows"], rows.tobytes(), self._count * layout.row_bytes)
        for number in range(-self._count % _GUARD, len(new), _GUARD):
            check = _INPUT.pack(inputs.check(int(new[number])) or 1)
            _write(self._inputs, check, (self._count + number) // _GUARD * _INPUT.size)
        _write(self._files["keys"], records.tobytes(), self._count * _KEY.itemsize)
        self._index.add(mix(keys), self._count)
        self._count += len(new)
        return len(new)

    def _note_others(self, what: str, got: object) -> None:
        """Log once that not all labels are kept."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cache %s: %s are not kept; got %s", self.folder, what, got)

    def _room_bytes(self, more_bytes: int) -> int:
        """Return for how many of `more_bytes` there is room."""
        own = sum(os.fstat(fd).st_size for fd in self._files.values())
        if time.monotonic() - self._measured_s >= _MEASURED_S:
            self._measure()
        if own + self._others_bytes + more_bytes <= self._max_bytes:
            return more_bytes
        space.evict(self._root, self._max_bytes - own - more_bytes, besides=self.folder)
        self._measure()
        room = self._max_bytes - own - self._others_bytes
        if room >= more_bytes:
            return more_bytes
        self._is_full = True
        logger.warning(
            "cache %s: %d MiB are full; no more labels are kept, those that are there stay",
            self._root,
            self._max_bytes >> 20,
        )
        return max(0, room)

    def _measure(self) -> None:
        """Measure the other folders, which others may be writing as well."""
        self._others_bytes = space.used_bytes(self._root, besides=self.folder)
        self._measured_s = time.monotonic()

    # --- the header

    def _read_header(self) -> RowLayout | None:
        try:
            text = (self.folder / "header.json").read_text(encoding="utf-8")
            document, check = json.loads(text)
            if check != _check_of(document):
                raise ValueError("it is damaged")
            if document["format"] != FORMAT or document["identity"] != self._identity:
                raise ValueError("it is of another release, or of other labels")
            return RowLayout.from_json(document)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                raise
            raise UsageError(
                f"cache: {self.folder / 'header.json'}: {error!r}; remove that folder"
            ) from error

    def _write_header(
        self, columns: Sequence[Array], served: tuple[ServedOutput, ...], inputs: Inputs
    ) -> RowLayout | None:
        """Write the layout of the first rows as that of all. The caller holds the file lock."""
        layout = RowLayout(
            columns=tuple((column.dtype.name, column.shape[1:]) for column in columns),
            served=served,
            inputs=inputs.layout,
        )
        if not layout.row_bytes:
            return None
        document = {"format": FORMAT, "identity": self._identity, **layout.to_json()}
        draft = self.folder / "header.draft"
        with draft.open("w", encoding="utf-8") as file:
            json.dump([document, _check_of(document)], file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.folder / "header.json")
        self._layout = layout
        return layout

    @contextlib.contextmanager
    def _exclusive(self) -> Any:
        """Hold the lock that all processes share. Raises: BlockingIOError."""
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_LOOK_S)
        try:
            yield
        finally:
            fcntl.flock(self._guard, fcntl.LOCK_UN)


def _check_of(document: Any) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _fits(layout: RowLayout, columns: Sequence[Array]) -> bool:
    return len(columns) == len(layout.columns) and all(
        column.shape[1:] == shape and column.dtype == np.dtype(dtype)
        for column, (dtype, shape) in zip(columns, layout.columns, strict=True)
    )


def _has_nan(columns: Sequence[Any]) -> Any:
    """Return for each row whether it has NaN."""
    found = np.zeros(len(columns[0]), bool)
    for column in columns:
        if column.dtype.kind in "fc":
            found |= np.isnan(column).reshape(len(column), -1).any(axis=1)
    return found


def _keys_of(records: Any) -> Keys:
    keys: Keys = np.stack([records["variant"], records["id"]], axis=1)
    return keys


def _checks(keys: Any, rows: Any) -> Any:
    crc32 = zlib.crc32
    return np.array(
        [crc32(row, crc32(key)) for key, row in zip(keys, rows, strict=True)], np.uint32
    )


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
