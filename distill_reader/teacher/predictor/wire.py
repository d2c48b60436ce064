"""The messages between the service and a predictor process, over a socket pair.

A message is one packet (SOCK_SEQPACKET): its kind, a count and that many numbers, all little-endian
integers of 64 bits, then JSON in some. Tensors are in arenas, which have ids; the descriptor of an
arena is sent once.

    front:      START (JSON), ARENA (id; a descriptor), FORGET (id), RUN, WRITE
    predictor:  READY (JSON), DONE, SHAPES, REFUSED (batch, 1 if all others are to be refused as
                well; a text), BROKEN (JSON; it ends after that), ALIVE
"""

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from distill_reader.model.normalization import Normalization, from_json
from distill_reader.model.output_encodings import INDICES, LOG_REST, VALUES, WHOLE, OutputEncoding
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.protocols.wire import DTYPES
from distill_reader.teacher.predictor.backend import Device

Shape = tuple[int, ...]
TensorAddress = tuple[int, int]  # where a tensor's bytes begin: arena, offset

MAX_MESSAGE_BYTES = 1 << 20
_HEAD = struct.Struct("<2q")  # kind, how many numbers follow
_ROOM_FOR_FD = socket.CMSG_SPACE(4)
_PARTS = (WHOLE, VALUES, INDICES, LOG_REST)


class MessageKind(IntEnum):
    START = 1
    ARENA = 2
    FORGET = 3
    RUN = 4
    WRITE = 5
    READY = 11
    DONE = 12
    SHAPES = 13
    REFUSED = 14
    BROKEN = 15
    ALIVE = 16


_KINDS = {kind.value: kind for kind in MessageKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage:
    """What a predictor must load."""

    backend: str  # module:function
    models: tuple[tuple[str, str], ...]  # name, folder; later messages use the index
    device: Device
    paths: tuple[str, ...]  # where Python searches for modules
    normalizations: tuple[tuple[str, str, Normalization], ...] = ()  # model, input, how


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The samples of one request in a batch, and the addresses of their inputs and outputs."""

    count: int
    inputs: tuple[TensorAddress, ...]
    outputs: tuple[TensorAddress | None, ...]  # None: not wanted, or the address is not known yet


@dataclass(frozen=True, slots=True)
class RunMessage:
    """Compute a batch: the samples of all `rows`, concatenated."""

    batch: int
    model: int
    input_dtypes: tuple[str, ...]  # as received
    input_shapes: tuple[Shape, ...]  # of one sample, as received
    output_shapes: tuple[Shape | None, ...]  # as the model returns them; None: not known yet
    encodings: tuple[OutputEncoding, ...]  # every one that any of `rows` wants
    rows: tuple[BatchRows, ...]


class PredictorChannel:
    """One end of the socket pair. Any thread may send, but only one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._packet = bytearray(MAX_MESSAGE_BYTES)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, MAX_MESSAGE_BYTES)

    def send(self, kind: MessageKind, numbers: Sequence[int] = (), text: bytes = b"") -> None:
        """Raises: OSError: the other end is gone."""
        self.sock.send(struct.pack(f"<{len(numbers) + 2}q", kind, len(numbers), *numbers) + text)

    def send_arena(self, arena: int, fd: int) -> None:
        """Raises: OSError: the other end is gone."""
        head = struct.pack("<3q", MessageKind.ARENA, 1, arena)
        socket.send_fds(self.sock, [head], [fd])

    def send_json(self, kind: MessageKind, document: Any) -> None:
        """Raises: OSError: the other end is gone."""
        self.send(kind, (), json.dumps(document).encode())

    def receive(self) -> tuple[MessageKind, tuple[int, ...], bytes]:
        """Return the next message: kind, numbers, text.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            size = self.sock.recv_into(self._packet)
        except ConnectionError:
            size = 0
        return _parse(self._packet, size)

    def receive_with_fd(self) -> tuple[MessageKind, tuple[int, ...], bytes, int | None]:
        """Like `receive`, with the descriptor that came with the message."""
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into(
                [self._packet], _ROOM_FOR_FD, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            size, ancillary = 0, []
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        for fd in fds[1:]:
            os.close(fd)
        return *_parse(self._packet, size), fds[0] if fds else None

    def close(self) -> None:
        self.sock.close()


def encode_run(run: RunMessage) -> list[int]:
    """Return the numbers of a RUN message."""
    numbers = [run.batch, run.model, len(run.input_shapes), len(run.output_shapes)]
    numbers += [len(run.encodings), len(run.rows), *map(DTYPES.index, run.input_dtypes)]
    for shape in (*run.input_shapes, *run.output_shapes):
        if shape is None:
            numbers.append(-1)
        else:
            numbers.append(len(shape))
            numbers += shape
    for encoding in run.encodings:
        numbers += (
            encoding.output_index,
            _PARTS.index(encoding.part),
            encoding.top_k,
            DTYPES.index(encoding.dtype),
        )
    for rows in run.rows:
        numbers.append(rows.count)
        for address in rows.inputs:
            numbers += address
        for address_or_none in rows.outputs:
            numbers += address_or_none or (0, 0)  # arenas count from 1
    return numbers


def decode_run(numbers: Sequence[int]) -> RunMessage:
    """Return the message that `encode_run` encoded."""
    batch, model, inputs, outputs, encoding_count, count = numbers[:6]
    at = 6 + inputs
    dtypes = tuple(DTYPES[code] for code in numbers[6:at])
    shapes: list[Shape | None] = []
    for _ in range(inputs + outputs):
        rank = numbers[at]
        at += 1
        if rank < 0:
            shapes.append(None)
            continue
        shapes.append(tuple(numbers[at : at + rank]))
        at += rank
    encodings = []
    for _ in range(encoding_count):
        place, part, top_k, dtype = numbers[at : at + 4]
        encodings.append(OutputEncoding(place, _PARTS[part], top_k, DTYPES[dtype]))
        at += 4
    all_rows: list[BatchRows] = []
    for _ in range(count):
        samples = numbers[at]
        flat = numbers[at + 1 : at + 1 + 2 * (inputs + encoding_count)]
        at += 1 + len(flat)
        addresses = list(zip(flat[::2], flat[1::2], strict=True))
        all_rows.append(
            BatchRows(
                samples,
                tuple(addresses[:inputs]),
                tuple(address if address[0] else None for address in addresses[inputs:]),
            )
        )
    return RunMessage(
        batch,
        model,
        dtypes,
        tuple(shape for shape in shapes[:inputs] if shape is not None),
        tuple(shapes[inputs:]),
        tuple(encodings),
        tuple(all_rows),
    )


def encode_addresses(batch: int, rows: Sequence[tuple[TensorAddress | None, ...]]) -> list[int]:
    """Return the numbers of a WRITE message: for each piece where each column goes to."""
    numbers = [batch]
    for addresses in rows:
        for address in addresses:
            numbers += address or (0, 0)
    return numbers


def decode_addresses(
    numbers: Sequence[int], encodings: int
) -> list[tuple[TensorAddress | None, ...]]:
    """Return the addresses of a WRITE message, for a batch of so many encodings."""
    flat = numbers[1:]
    addresses = [
        address if address[0] else None for address in zip(flat[::2], flat[1::2], strict=True)
    ]
    return [tuple(addresses[at : at + encodings]) for at in range(0, len(addresses), encodings)]


def encode_shapes(batch: int, computed_us: int, shapes: Sequence[Shape]) -> list[int]:
    """Return the numbers of a SHAPES message: of one sample of each output."""
    numbers = [batch, computed_us]
    for shape in shapes:
        numbers.append(len(shape))
        numbers += shape
    return numbers


def decode_shapes(numbers: Sequence[int]) -> tuple[Shape, ...]:
    """Return the shapes of a SHAPES message."""
    shapes: list[Shape] = []
    at = 2
    while at < len(numbers):
        rank = numbers[at]
        shapes.append(tuple(numbers[at + 1 : at + 1 + rank]))
        at += 1 + rank
    return tuple(shapes)


def start_document(start: StartMessage) -> dict[str, Any]:
    """Return START's JSON."""
    return asdict(start)


def parse_start(text: bytes) -> StartMessage:
    """Return the message that `start_document` encoded."""
    document = json.loads(text)
    return StartMessage(
        backend=document["backend"],
        models=tuple((name, folder) for name, folder in document["models"]),
        device=Device(**document["device"]),
        paths=tuple(document["paths"]),
        normalizations=tuple(
            (model, name, from_json(fields)) for model, name, fields in document["normalizations"]
        ),
    )


def specs_document(specs: Sequence[ModelSpec]) -> list[dict[str, Any]]:
    """Return READY's JSON."""
    return [asdict(spec) for spec in specs]


def parse_specs(text: bytes) -> tuple[ModelSpec, ...]:
    """Return the specs that `specs_document` encoded."""
    return tuple(
        ModelSpec(
            name=document["name"],
            version=document["version"],
            inputs=tuple(map(_parse_tensor, document["inputs"])),
            outputs=tuple(map(_parse_tensor, document["outputs"])),
            takes_encodings=document["takes_encodings"],
            digest=document["digest"],
        )
        for document in json.loads(text)
    )


def _parse_tensor(document: dict[str, Any]) -> TensorSpec:
    accepts = tuple(
        InputEncoding(dtype=encoding["dtype"], shape=tuple(encoding["shape"]))
        for encoding in document["accepts"]
    )
    return TensorSpec(**{**document, "shape": tuple(document["shape"]), "accepts": accepts})


def _parse(packet: bytearray, size: int) -> tuple[MessageKind, tuple[int, ...], bytes]:
    if size == 0:
        raise EOFError("the other end is gone")
    kind, count = _HEAD.unpack_from(packet)
    end = _HEAD.size + count * 8
    numbers = struct.unpack_from(f"<{count}q", packet, _HEAD.size)
    return _KINDS[kind], numbers, bytes(packet[end:size])
