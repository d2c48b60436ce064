"""Convert the generator's items into rows to send, and answers into what the user gets.

Pure. Nothing is copied: rows are the user's arrays, and predictions are views of an answer.
"""

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distill_reader.errors import BadRequest, UsageError
from distill_reader.model.tensors import array_of, has_objects, memory_of, rebuilt
from distill_reader.student.batches.label_index import Keys
from distill_reader.student.batches.tries import Tries
from distill_reader.student.clients.client import Array
from distill_reader.student.options import Padding

# Type and shape of one sample of each sent field. Samples of one request have the same.
Signature = tuple[tuple[Any, tuple[int, ...]], ...]
# First sample in the item, number of samples, a request's outputs, first row there.
Answer = tuple[int, int, tuple[Array, ...], int]
Combine = Callable[[Sequence[Sequence[Array]]], tuple[Array, ...]]

_ITEM_BYTES = 1024  # the memory of an item without its arrays
_LOOKED_AT = 1024  # values of an array, to tell whether it has changed
_LOOKS = 4096  # so many arrays of an iteration are looked at


class _Yielded(weakref.ref[Array]):
    """An array that the generator has yielded; it is gone once nobody has it any more."""

    check: int | None = None  # of its values; None: its memory has come once


class ItemPiece:
    """Samples of one item that go into one request."""

    __slots__ = (
        "first", "is_overdue", "item", "rows", "samples", "signature", "size_bytes", "tries",
    )  # fmt: skip

    def __init__(
        self,
        item: "ReaderItem",
        first: int,
        samples: int,
        rows: tuple[Sequence[Array], ...],
        signature: Signature,
        size_bytes: int,
    ) -> None:
        self.item = item
        self.first = first  # index in the item of the first sample here
        self.samples = samples
        self.rows = rows  # of each sent field: one array, or one of length 1 per sample
        self.signature = signature
        self.size_bytes = size_bytes
        self.is_overdue = False  # it was with a teacher that is lost
        self.tries: Tries | None = None  # tries that ended without an answer; None: there are none

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the generator's order."""
        return self.item.number, self.first

    def __str__(self) -> str:
        last = self.first + self.samples - 1
        return f"item {self.item.number}, samples {self.first} to {last} of {self.item.samples}"

    def cut(self, samples: int) -> tuple["ItemPiece", "ItemPiece"]:
        """Return the first `samples`, which must be fewer than there are, and the rest."""
        size_bytes = self.size_bytes * samples // self.samples
        head, tail = [], []
        for arrays in self.rows:
            if len(arrays) == self.samples:
                head.append(arrays[:samples])
                tail.append(arrays[samples:])
            else:
                head.append([arrays[0][:samples]])
                tail.append([arrays[0][samples:]])
        rest = self.samples - samples
        return (
            ItemPiece(self.item, self.first, samples, tuple(head), self.signature, size_bytes),
            ItemPiece(
                self.item,
                self.first + samples,
                rest,
                tuple(tail),
                self.signature,
                self.size_bytes - size_bytes,
            ),
        )


def unpadded(piece: ItemPiece, padded: Sequence[int]) -> ItemPiece | None:
    """Return the first sample as it was before it was padded; None: it was not padded.

    Args:
        padded: which of the sent fields are.
    """
    lengths = piece.item.lengths
    length = lengths[piece.first if len(lengths) > 1 else 0]
    rows = [arrays[0][:1] for arrays in piece.rows]
    for index in padded:
        rows[index] = rows[index][:, :length]
    signature = tuple([(row.dtype, row.shape[1:]) for row in rows])
    if signature == piece.signature:
        return None
    size_bytes = sum([row.nbytes for row in rows])
    return ItemPiece(
        piece.item, piece.first, 1, tuple([[row] for row in rows]), signature, size_bytes
    )


class ReaderItem:
    """What the generator yielded once, and the answers to it so far."""

    __slots__ = (
        "answers",
        "charge_bytes",
        "error",
        "fields",
        "keys",
        "lengths",
        "missing",
        "number",
        "output_bytes",
        "pieces",
        "samples",
    )

    def __init__(self, fields: Any, samples: int) -> None:
        self.fields = fields
        self.samples = samples
        self.number = 0  # its place in the generator's order, once it is added
        self.missing = samples  # samples without an answer; 0: the item may be yielded
        self.pieces: list[ItemPiece] = []  # until they are sent
        self.lengths: list[int] = []  # of the padded fields before: per sample, or of the batch
        self.keys: Keys | None = None  # of its samples in the cache; None: there is no cache
        self.answers: list[Answer] = []
        self.error: Exception | None = None  # raised instead of an answer; None: there is none
        self.charge_bytes = 0  # counted against the memory bound
        self.output_bytes = 0  # of one sample's predictions, as counted in `charge_bytes`

    @property
    def size_bytes(self) -> int:
        """Bytes of the sent arrays and of the item itself."""
        return sum(piece.size_bytes for piece in self.pieces) + _ITEM_BYTES

    def clone(self) -> "ReaderItem":
        """Return a copy with the same fields and rows, for another service to answer."""
        clone = ReaderItem(self.fields, self.samples)
        clone.keys, clone.charge_bytes = self.keys, self.charge_bytes
        clone.lengths = self.lengths
        clone.pieces = [
            ItemPiece(clone, each.first, each.samples, each.rows, each.signature, each.size_bytes)
            for each in self.pieces
        ]
        return clone

    def rows(self, first: int, end: int) -> tuple[Array, ...]:
        """Return the predictions of samples that one request has answered."""
        start, _, outputs, begin = max(
            [each for each in self.answers if each[0] <= first], key=_first
        )
        return tuple([output[begin + first - start : begin + end - start] for output in outputs])

    def columns(self, names: Sequence[str] = ()) -> tuple[Array, ...]:
        """Return the predictions of all samples. All must be answered.

        Args:
            names: of the predictions, for the message.

        Raises:
            BadRequest: requests were answered in different shapes.
        """
        answers = self.answers
        if len(answers) == 1:
            _, samples, outputs, begin = answers[0]
            if begin == 0 and len(outputs[0]) == samples:
                return outputs
            return tuple([output[begin : begin + samples] for output in outputs])
        answers.sort(key=_first)
        columns = zip(*[outputs for _, _, outputs, _ in answers], strict=True)
        spans = [(begin, begin + samples) for _, samples, _, begin in answers]
        found = []
        for number, column in enumerate(columns):
            shapes = list(dict.fromkeys([part.shape[1:] for part in column]))
            if len(shapes) > 1:
                name = names[number] if number < len(names) else number
                raise BadRequest(
                    f"output {name}: samples of one batch "
                    f"came in shapes {list(shapes[0])} and {list(shapes[1])}, as the model has it "
                    "for each request: yield lists of samples (set_sample_list_generator)"
                )
            parts = [part[a:b] for part, (a, b) in zip(column, spans, strict=True)]
            found.append(np.concatenate(parts))
        return tuple(found)


class ItemFormat(Protocol):
    """One of the three formats of the user's generator."""

    name: str

    def item(self, given: Any) -> ReaderItem:
        """Return the item with its pieces.

        Raises:
            UsageError: `given` has another format; says what is expected.
        """
        ...

    def column(self, item: ReaderItem, position: int) -> Any:
        """Return the values of a field that is not sent, one per sample or one for all."""
        ...

    def result(self, item: ReaderItem) -> Any:
        """Return the user's item with its predictions. All samples must be answered."""
        ...

    def without_predictions(self, item: ReaderItem) -> Any:
        """Return the user's item with None for each prediction."""
        ...


class _Fields:
    """What the three formats share: which fields are sent, and padding."""

    def __init__(
        self,
        sent: tuple[tuple[int, str], ...],
        fields: int,
        predicts: int,
        padding: Padding | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        """
        Args:
            sent: positions and names of the fields that may be sent.
            fields: the least number of fields of a tuple.
            predicts: number of predictions.
            padding: of fields that are sent; None: as they are.
            outputs: the output of each prediction, for padding and messages.
        """
        self._sent = sent
        self._positions = [position for position, _ in sent]
        self._fields = fields
        self._outputs = tuple(outputs)
        self._no_predictions = (None,) * predicts
        self._padding = padding
        names = [name for _, name in sent]
        values = () if padding is None else padding.values
        self._padded = [(names.index(name), name, value) for name, value in values]
        cut = () if padding is None else padding.outputs or ()
        self._cut = [position for position, name in enumerate(outputs) if name in cut]
        self._yielded: dict[int, _Yielded] = {}  # the first ones, by address
        self._looks = _LOOKS

    def _take(self, given: Any) -> tuple[tuple[Any, ...], list[Array]]:
        """Return the fields for the user, and the arrays of those that are sent."""
        if type(given) is not tuple:
            if not isinstance(given, tuple | list):
                raise UsageError(
                    f"reader: expected a tuple of fields, got {type(given).__name__}; "
                    f"{self._see_setters()}"
                )
            given = tuple(given)
        if len(given) < self._fields:
            raise UsageError(
                f"reader: expected {self._fields} fields as in `ins`, got {len(given)}; "
                f"{self._see_setters()}"
            )
        given = tuple(each if type(each) is np.ndarray else _own(each) for each in given)
        arrays = [given[position] for position in self._positions]
        for index, value in enumerate(arrays):
            if type(value) is not np.ndarray:
                given = self._convert(given, arrays, index)
            if self._looks:
                self._looks -= 1
                self._check_unchanged(self._sent[index][1], arrays[index])
        return given, arrays

    def _check_unchanged(self, name: str, array: Array) -> None:
        """Refuse a field whose memory was yielded before, is in use, and has other values now.

        Values are looked at from the second time on. Raises: UsageError.
        """
        address = array.__array_interface__["data"][0]
        before = self._yielded.get(address)
        now = self._yielded[address] = _Yielded(array)
        earlier = None if before is None else before()
        if before is None or earlier is None or earlier.dtype != array.dtype:
            return
        if earlier.shape == array.shape and earlier.strides == array.strides:
            now.check = _check_of(array)
            if before.check not in (None, now.check):
                raise UsageError(
                    f"field {name}: the generator writes into memory that it has yielded and that "
                    "is still needed, so that samples would get the predictions of others: yield "
                    "a new array, such as a copy"
                )

    def _convert(self, given: tuple[Any, ...], arrays: list[Any], index: int) -> tuple[Any, ...]:
        """Put the field's array into `arrays`; return the fields for the user.

        Lists and numbers become arrays there, too. A framework's tensor stays as it is, for the
        user may want it on its device.
        """
        position, name = self._sent[index]
        value = given[position]
        if isinstance(value, np.ma.MaskedArray):
            raise UsageError(
                f"field {name}: is a masked array, and its mask would be lost: yield "
                "`array.filled(...)`, and the mask as a field of its own"
            )
        is_tensor = hasattr(value, "numpy")
        try:
            array = array_of(value) if is_tensor else np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UsageError(f"field {name}: cannot be made an array: {error}") from error
        if array.dtype == object:
            what = "has objects" if array.ndim else f"is {type(value).__name__}"
            raise UsageError(
                f"field {name}: {what}, and teachers take numbers: yield it as such, or have None "
                "in its place in `ins` if it is not for them"
            )
        arrays[index] = array
        if is_tensor:
            return given
        return (*given[:position], array, *given[position + 1 :])

    def _pad(self, item: ReaderItem, arrays: list[Array], axis: int) -> None:
        """Pad the fields of one sample, or of a batch.

        Raises:
            UsageError: a field has no such axis, another length than the first one, or a type that
                cannot hold the padding value.
        """
        padding = self._padding
        if padding is None:
            return
        lengths = []
        for index, name, value in self._padded:
            array = arrays[index]
            if array.ndim <= axis:
                raise UsageError(f"field {name}: has no axis to pad, its samples are numbers")
            lengths.append(array.shape[axis])
            if lengths[-1] != lengths[0]:
                raise UsageError(
                    f"fields {self._padded[0][1]} and {name}: padded fields of a sample must be "
                    f"equally long, got {lengths[0]} and {lengths[-1]}"
                )
            shape = list(array.shape)
            shape[axis] = padding.length(lengths[0])
            if shape[axis] != lengths[0]:
                if not _has(array.dtype, value):
                    raise UsageError(f"padding: {name} is {array.dtype}, which has no {value:g}")
                longer = np.full(shape, value, array.dtype)
                longer[(slice(None),) * axis + (slice(lengths[0]),)] = array
                arrays[index] = longer
        item.lengths.append(lengths[0])

    def _cut_to(self, length: int, rows: Sequence[Any], axis: int) -> tuple[Any, ...]:
        """Return the predictions, with those that are per position cut to `length`.

        Raises:
            BadRequest: one of these is not as long as the padded fields.
        """
        cut = list(rows)
        assert self._padding is not None
        padded = self._padding.length(length)
        for position in self._cut:
            shape = cut[position].shape
            if len(shape) <= axis or shape[axis] != padded:
                raise BadRequest(
                    f"padding: output {self._outputs[position]}: expected a value for each of "
                    f"{padded} positions, got shape {list(shape[axis:])} per sample: leave it out "
                    "of set_padding(outputs=)"
                )
            cut[position] = cut[position][(slice(None),) * axis + (slice(length),)]
        return tuple(cut)

    def _see_setters(self) -> str:
        return "see set_sample_generator, set_sample_list_generator and set_batch_generator"

    def _other_bytes(self, fields: tuple[Any, ...]) -> int:
        """Return the bytes of the fields that are not sent, as objects never are."""
        return sum(
            memory_of(value)
            for position, value in enumerate(fields)
            if position not in self._positions or has_objects(value)
        )


def _own(value: Any, deep: int = 2) -> Any:
    """Return a field without the memory that a worker of a framework's DataLoader shares.

    Each such tensor takes a part of /dev/shm for as long as it lives, and keeps a file open
    (PyTorch's) or a mapping, of which a process may have 65,530 (Paddle's). The reader reads far
    more of them ahead than a loader.
    """
    if hasattr(value, "is_shared"):
        try:
            is_shared = value.device.type == "cpu" and value.is_shared()
        except NotImplementedError:  # of a sparse tensor
            return value
        return value.clone() if is_shared else value
    if hasattr(value, "stop_gradient"):  # Paddle's do not tell whether they share their memory
        may_share = value.stop_gradient and value.is_dense() and value.place.is_cpu_place()
        return value.clone() if may_share else value
    return rebuilt(value, lambda each: _own(each, deep - 1)) if deep else value


class BatchFormat(_Fields):
    """Tuples of arrays with samples on axis 0; so are the predictions."""

    name = "batch"

    def item(self, given: Any) -> ReaderItem:
        """See ItemFormat."""
        fields, arrays = self._take(given)
        item = ReaderItem(fields, 0)
        self._pad(item, arrays, 1)
        signature = []
        samples = -1
        size_bytes = 0
        for index, array in enumerate(arrays):
            shape = array.shape
            if not shape or (samples >= 0 and shape[0] != samples):
                raise self._unequal(index, samples, shape)
            samples = shape[0]
            signature.append((array.dtype, shape[1:]))
            size_bytes += array.nbytes
        if not samples:
            raise UsageError("reader: it yielded a batch without samples; leave it out")
        item.samples = item.missing = samples
        rows = tuple([[array] for array in arrays])
        item.pieces.append(ItemPiece(item, 0, samples, rows, tuple(signature), size_bytes))
        item.charge_bytes = size_bytes + self._other_bytes(fields) + _ITEM_BYTES
        return item

    def result(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        columns = item.columns(self._outputs)
        return item.fields + (self._cut_to(item.lengths[0], columns, 1) if self._cut else columns)

    def column(self, item: ReaderItem, position: int) -> Any:
        """See ItemFormat."""
        return item.fields[position]

    def without_predictions(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        return item.fields + self._no_predictions

    def _unequal(self, index: int, samples: int, shape: tuple[int, ...]) -> UsageError:
        name = self._sent[index][1]
        if not shape:
            return UsageError(f"field {name}: a batch's field has samples on axis 0, got a number")
        return UsageError(
            f"fields {self._sent[0][1]} and {name}: must have equally many samples, got {samples} "
            f"and {shape[0]}; a field that has no samples is None in `ins`"
        )


class SampleFormat(_Fields):
    """One tuple per sample; a prediction is the sample's row."""

    name = "sample"

    def column(self, item: ReaderItem, position: int) -> Any:
        """See ItemFormat."""
        return [item.fields[position]]

    def item(self, given: Any) -> ReaderItem:
        """See ItemFormat."""
        fields, arrays = self._take(given)
        item = ReaderItem(fields, 1)
        self._pad(item, arrays, 0)
        piece = _piece_of_one(item, arrays)
        item.pieces.append(piece)
        item.charge_bytes = piece.size_bytes + self._other_bytes(fields) + _ITEM_BYTES
        return item

    def result(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        _, _, outputs, begin = item.answers[0]
        rows = [output[begin] for output in outputs]
        return (*item.fields, *(self._cut_to(item.lengths[0], rows, 0) if self._cut else rows))

    def without_predictions(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        return item.fields + self._no_predictions


class SampleListFormat(_Fields):
    """One list of such tuples per batch."""

    name = "sample list"

    def column(self, item: ReaderItem, position: int) -> Any:
        """See ItemFormat."""
        return [fields[position] for fields in item.fields]

    def item(self, given: Any) -> ReaderItem:
        """See ItemFormat. Samples that differ in shape or type go into different requests."""
        if not isinstance(given, list | tuple):
            raise UsageError(
                f"reader: expected a list of tuples, got {type(given).__name__}; "
                f"{self._see_setters()}"
            )
        samples: list[tuple[Any, ...]] = []
        item = ReaderItem(samples, len(given))
        run: list[list[Array]] = []  # consecutive samples of one shape, each with its sent arrays
        signature: Signature | None = None
        other_bytes = 0
        for one in given:
            fields, arrays = self._take(one)
            samples.append(fields)
            other_bytes += self._other_bytes(fields)
            self._pad(item, arrays, 0)
            of_this = tuple([(array.dtype, array.shape) for array in arrays])
            if of_this != signature and run:
                item.pieces.append(_piece_of_run(item, len(samples) - 1 - len(run), run, signature))
                run = []
            signature = of_this
            run.append(arrays)
        if run:
            item.pieces.append(_piece_of_run(item, len(samples) - len(run), run, signature))
        item.charge_bytes = item.size_bytes + other_bytes
        return item

    def result(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        samples: list[Any] = list(item.fields)
        for first, count, outputs, begin in item.answers:
            for offset in range(count):
                position, sample = begin + offset, first + offset
                rows = tuple([output[position] for output in outputs])
                samples[sample] += (
                    self._cut_to(item.lengths[sample], rows, 0) if self._cut else rows
                )
        return samples

    def without_predictions(self, item: ReaderItem) -> Any:
        """See ItemFormat."""
        return [fields + self._no_predictions for fields in item.fields]


def combined_answers(items: Sequence[ReaderItem], combine: Combine) -> list[Answer]:
    """Return one answer in place of those of several services to the same samples.

    They are combined part by part, for samples of a list may differ in shape.
    """
    starts = sorted({first for item in items for first, *_ in item.answers})
    return [
        (first, end - first, combine([item.rows(first, end) for item in items]), 0)
        for first, end in zip(starts, [*starts[1:], items[0].samples], strict=True)
    ]


def _has(dtype: np.dtype[Any], value: float) -> bool:
    """Return whether a type has a value; floats have all within their range, about."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.asarray(value).astype(dtype)
    return bool(np.isinf(cast) == np.isinf(value) if dtype.kind == "f" else cast == value)


def _check_of(array: Array) -> int:
    """Return a checksum of values that are spread over the array."""
    flat = array.reshape(-1)
    step = flat.size // _LOOKED_AT | 1  # odd: not the same column of each row
    return zlib.crc32(flat[::step].tobytes())


def _first(answer: Answer) -> int:
    return answer[0]


def _piece_of_one(item: ReaderItem, arrays: list[Array]) -> ItemPiece:
    rows = tuple([[array[None]] for array in arrays])
    signature = tuple([(array.dtype, array.shape) for array in arrays])
    return ItemPiece(item, 0, 1, rows, signature, sum([array.nbytes for array in arrays]))


def _piece_of_run(
    item: ReaderItem, first: int, run: list[list[Array]], signature: Signature | None
) -> ItemPiece:
    assert signature is not None
    rows = tuple([[array[None] for array in column] for column in zip(*run, strict=True)])
    size_bytes = len(run) * sum([array.nbytes for array in run[0]])
    return ItemPiece(item, first, len(run), rows, signature, size_bytes)


ITEM_FORMATS = {kind.name: kind for kind in (SampleFormat, SampleListFormat, BatchFormat)}
