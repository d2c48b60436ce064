"""The format of the fast path between a student and a teacher. Pure; `stream.py` does the I/O.

A connection begins with a greeting in each direction. Then the student sends one frame at a time
and waits for the answer; concurrent requests use a connection each. All numbers are little-endian.

    greeting   magic "EDLT", version u16, flags u16, body bytes u32; body: JSON
        hello      {"model", "nonce"}, then CR LF CR LF, so that an HTTP server refuses it at once;
                   the nonce only with a token (older students send the token itself: "token")
        challenge  {"challenge": nonce}, from a teacher that wants a token; the answer is a
        proof      {"proof"} of the student
        welcome    {"model": spec, "limits", "unix", "shared_memory", "proof"}  or  {"error": ...}
    frame      kind u8, flags u8, tensors u16, outputs u16, 0 u16, request id u32,
               meta bytes u32, payload bytes u64; meta; payload
        PREDICT    meta: wanted outputs (u16 each; none: all), tensors; payload: their bytes in
                   order, or nothing if SHARED: then they are in the shared memory.
                   If NAMED, a wanted output is a u16 of bytes and its name, which may name an
                   encoding (output_encodings.py); only for a model with `takes_forms`
        ANSWER     meta: tensors; payload: their bytes
        ERROR      meta: JSON {"kind", "text"}, with "delay_s" if the teacher is busy, "tries" if
                   it failed more than once, "too_large": true if fewer samples may work
        SHARE      the next byte carries the descriptor of the student's memory (SCM_RIGHTS)
        SHARED     answers SHARE: the teacher has mapped it
    tensor     position u16, dtype u8, axes u8, offset u64, then u64 per axis;
               position: among the model's inputs or outputs, in the answer to a NAMED request
               among the wanted outputs; offset: in the shared memory if SHARED, else 0
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distill_reader.errors import (
    BadRequest,
    DistillError,
    FastPathError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    UsageError,
)
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.spec_json import json_object, spec_from_json, spec_to_json, text_of

MAGIC = b"EDLT"  # begins every greeting; a server on a shared port knows the fast path by it
VERSION = 1

GREETING = struct.Struct("<4sHHI")
HEAD = struct.Struct("<BBHHHIIQ")
_TENSOR = struct.Struct("<HBBQ")

PREDICT, ANSWER, ERROR, SHARE, SHARED = range(1, 6)  # kinds of frames
IN_SHARED_MEMORY, NAMED_OUTPUTS = 1, 2  # flags of PREDICT

MAX_HELLO_BYTES = 16 << 10
MAX_WELCOME_BYTES = 4 << 20  # a spec of many tensors
MAX_META_BYTES = 256 << 10
_MAX_TEXT = 8 << 10  # characters of an error's text
_HELLO_END = b"\r\n\r\n"

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(DTYPES)}
_ITEM_BYTES = tuple(np.dtype(name).itemsize for name in DTYPES)
_MAX_AXES = 32
_MAX_NAME_BYTES = 4096
_MAX_ITEMS = 1 << 48  # of a tensor, counting axes of length 0 as 1: no product can overflow

_ERRORS: dict[str, type[DistillError]] = {
    "bad_request": BadRequest,
    "model_not_found": ModelNotFound,
    "busy": TeacherBusy,
    "refused": UsageError,  # the token, the version
    "failed": TeacherFailed,
}


class WireTensor(NamedTuple):  # a tuple, like FrameHead: made three times as fast, every request
    """A tensor as a frame describes it."""

    position: int
    dtype: str
    shape: tuple[int, ...]  # axis 0: samples
    offset: int = 0  # in the shared memory, if the request is there

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[_CODES[self.dtype]]


class FrameHead(NamedTuple):
    """The fixed part of a frame."""

    kind: int
    flags: int
    tensors: int
    outputs: int
    reserved: int
    request_id: int
    meta_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentHello:
    """A student's greeting."""

    model: str = ""  # "": the only one
    token: str = ""  # sent by students of older releases only
    nonce: str = ""  # "": the student has no token


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherWelcome:
    """A teacher's greeting."""

    spec: ModelSpec
    max_request_bytes: int  # of all inputs of a request
    unix: str = ""  # abstract name of its unix socket, for students on the same host; "": none
    shared_memory: bool = False  # whether it maps the student's memory, over the unix socket
    proof: str = ""  # proves that it has the token; "": it wants none


# --- greetings


def pack_hello(hello: StudentHello) -> bytes:
    body = {"model": hello.model, "token": hello.token, "nonce": hello.nonce}
    return _greeting(json.dumps(body).encode() + _HELLO_END)


def pack_challenge(nonce: str) -> bytes:
    return _greeting(json.dumps({"challenge": nonce}).encode())


def pack_proof(proof: str) -> bytes:
    return _greeting(json.dumps({"proof": proof}).encode())


def pack_welcome(welcome: TeacherWelcome) -> bytes:
    body = {
        "model": spec_to_json(welcome.spec),
        "limits": {"max_request_bytes": welcome.max_request_bytes},
        "unix": welcome.unix,
        "shared_memory": welcome.shared_memory,
        "proof": welcome.proof,
    }
    return _greeting(json.dumps(body).encode())


def pack_refusal(error: DistillError) -> bytes:
    return _greeting(json.dumps({"error": _error_to_json(error)}).encode())


def parse_greeting(head: bytes, *, max_bytes: int) -> int:
    """Return how many bytes the body has.

    Raises:
        FastPathError: it does not begin with the magic, or is longer than `max_bytes`.
        UsageError: the other end speaks another version.
    """
    magic, version, _flags, body_bytes = GREETING.unpack(head)
    if magic != MAGIC:
        raise FastPathError(f"expected {MAGIC!r} first, got {magic!r}")
    if version != VERSION:
        raise UsageError(
            f"the other end speaks version {version} of the fast path, this one version {VERSION}:"
            " install the same release of edl on both"
        )
    if body_bytes > max_bytes:
        raise FastPathError(f"greeting of {body_bytes} bytes; allowed are {max_bytes}")
    return int(body_bytes)


def parse_hello(body: bytes) -> StudentHello:
    """Raises: FastPathError."""
    fields = json_object(body)
    return StudentHello(
        model=text_of(fields, "model"),
        token=text_of(fields, "token"),
        nonce=text_of(fields, "nonce"),
    )


def parse_challenge(body: bytes) -> str | None:
    """Return the teacher's nonce; None: the greeting is no challenge. Raises: FastPathError."""
    fields = json_object(body)
    return text_of(fields, "challenge") if "challenge" in fields else None


def parse_proof(body: bytes) -> str:
    """Raises: FastPathError."""
    return text_of(json_object(body), "proof")


def parse_welcome(body: bytes) -> TeacherWelcome:
    """Return what the teacher offers.

    Raises:
        DistillError: the teacher refuses: the error that it names.
        FastPathError: the body is malformed.
    """
    fields = json_object(body)
    if "error" in fields:
        raise _error_from_json(fields["error"])
    limits = fields.get("limits")
    max_request_bytes = limits.get("max_request_bytes") if isinstance(limits, dict) else None
    if not isinstance(max_request_bytes, int) or max_request_bytes < 0:
        raise FastPathError(f"welcome: limits: expected max_request_bytes, got {limits!r}")
    return TeacherWelcome(
        spec=spec_from_json(fields.get("model")),
        max_request_bytes=max_request_bytes,
        unix=text_of(fields, "unix"),
        shared_memory=fields.get("shared_memory") is True,
        proof=text_of(fields, "proof"),
    )


# --- frames


def pack_predict(
    request_id: int,
    tensors: Sequence[WireTensor],
    outputs: Sequence[int] | Sequence[str],
    *,
    in_shared_memory: bool,
) -> bytes:
    """Return head and meta. The caller sends the payload, if any, after them.

    Raises:
        BadRequest: a dtype that the format does not know, or too many tensors.
    """
    flags = IN_SHARED_MEMORY if in_shared_memory else 0
    if any(isinstance(output, str) for output in outputs):
        flags |= NAMED_OUTPUTS
        meta = _pack_names([str(output) for output in outputs])
    else:
        meta = struct.pack(f"<{len(outputs)}H", *outputs)
    meta += _pack_tensors(tensors)
    payload_bytes = 0 if in_shared_memory else sum(tensor.size_bytes for tensor in tensors)
    head = HEAD.pack(
        PREDICT, flags, len(tensors), len(outputs), 0, request_id, len(meta), payload_bytes
    )
    return head + meta


def pack_answer(request_id: int, tensors: Sequence[WireTensor]) -> bytes:
    """Return head and meta. The caller sends the payload after them. Raises: BadRequest."""
    meta = _pack_tensors(tensors)
    payload_bytes = sum(tensor.size_bytes for tensor in tensors)
    return HEAD.pack(ANSWER, 0, len(tensors), 0, 0, request_id, len(meta), payload_bytes) + meta


def pack_error(request_id: int, error: DistillError) -> bytes:
    meta = json.dumps(_error_to_json(error)).encode()
    return HEAD.pack(ERROR, 0, 0, 0, 0, request_id, len(meta), 0) + meta


def pack_share() -> bytes:
    return HEAD.pack(SHARE, 0, 0, 0, 0, 0, 0, 0)


def pack_shared() -> bytes:
    return HEAD.pack(SHARED, 0, 0, 0, 0, 0, 0, 0)


def parse_head(head: bytes | bytearray | memoryview) -> FrameHead:
    """Raises: FastPathError: the meta is longer than any may be, or the kind unknown."""
    fields = FrameHead._make(HEAD.unpack(head))
    if not PREDICT <= fields.kind <= SHARED:
        raise FastPathError(f"frame of unknown kind {fields.kind}")
    if fields.meta_bytes > MAX_META_BYTES:
        raise FastPathError(
            f"frame with {fields.meta_bytes} bytes of meta; allowed are {MAX_META_BYTES}"
        )
    return fields


def parse_predict(head: FrameHead, meta: bytes) -> tuple[list[WireTensor], list[int] | list[str]]:
    """Return the tensors of a PREDICT, and the outputs wanted, by index or by name.

    Raises:
        FastPathError: the meta is malformed, or the payload is not as long as the tensors.
    """
    outputs: list[int] | list[str]
    if head.flags & NAMED_OUTPUTS:
        outputs, wanted_bytes = _parse_names(meta, head.outputs)
    else:
        wanted_bytes = 2 * head.outputs
        if wanted_bytes > len(meta):
            raise FastPathError("frame too short for its outputs")
        outputs = list(struct.unpack_from(f"<{head.outputs}H", meta))
    tensors = _parse_tensors(meta, wanted_bytes, head.tensors)
    if not head.flags & IN_SHARED_MEMORY:
        _check_payload(head, tensors)
    elif head.payload_bytes:
        raise FastPathError("a request in shared memory has no payload")
    return tensors, outputs


def parse_answer(head: FrameHead, meta: bytes) -> list[WireTensor]:
    """Raises: FastPathError: malformed, or the payload is not as long as the tensors."""
    tensors = _parse_tensors(meta, 0, head.tensors)
    _check_payload(head, tensors)
    return tensors


def parse_error(meta: bytes) -> DistillError:
    """Return the error that the teacher names. Raises: FastPathError."""
    return _error_from_json(json_object(meta))


def dtype_name(dtype: "np.dtype[Any]") -> str:
    """Return the name under which the format knows a dtype.

    Raises:
        BadRequest: it does not.
    """
    name = dtype.name
    if name not in _CODES or not dtype.isnative:
        raise BadRequest(f"dtype {dtype} cannot be sent; possible are {', '.join(DTYPES)}")
    return name


# --- parts


def _greeting(body: bytes) -> bytes:
    return GREETING.pack(MAGIC, VERSION, 0, len(body)) + body


def _pack_names(names: Sequence[str]) -> bytes:
    parts = []
    for name in names:
        data = name.encode()
        if len(data) > _MAX_NAME_BYTES:
            raise BadRequest(f"output {name:.40}...: its name has {len(data)} bytes")
        parts.append(struct.pack("<H", len(data)) + data)
    return b"".join(parts)


def _parse_names(meta: bytes, count: int) -> tuple[list[str], int]:
    """Return the names, and the offset of their end."""
    names, at = [], 0
    for _ in range(count):
        begin = at + 2
        if begin > len(meta):
            raise FastPathError("frame too short for its outputs")
        at = begin + int.from_bytes(meta[at:begin], "little")
        if at > len(meta):
            raise FastPathError("frame too short for its outputs")
        try:
            names.append(meta[begin:at].decode())
        except UnicodeDecodeError as error:
            raise FastPathError(f"an output's name is no UTF-8: {error}") from error
    return names, at


def _pack_tensors(tensors: Sequence[WireTensor]) -> bytes:
    parts = []
    for tensor in tensors:
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise BadRequest(f"dtype {tensor.dtype} cannot be sent: {', '.join(DTYPES)} can")
        axes = len(tensor.shape)
        parts.append(_TENSOR.pack(tensor.position, code, axes, tensor.offset))
        parts.append(struct.pack(f"<{axes}Q", *tensor.shape))
    return b"".join(parts)


def _parse_tensors(meta: bytes, at: int, count: int) -> list[WireTensor]:
    tensors = []
    for _ in range(count):
        if at + _TENSOR.size > len(meta):
            raise FastPathError("frame too short for its tensors")
        position, code, axes, offset = _TENSOR.unpack_from(meta, at)
        at += _TENSOR.size
        if code >= len(DTYPES):
            raise FastPathError(f"tensor of unknown dtype {code}")
        if not 1 <= axes <= _MAX_AXES:
            raise FastPathError(f"tensor of {axes} axes; possible are 1 to {_MAX_AXES}")
        if at + 8 * axes > len(meta):
            raise FastPathError("frame too short for its tensors")
        shape = struct.unpack_from(f"<{axes}Q", meta, at)
        at += 8 * axes
        if math.prod([length or 1 for length in shape]) > _MAX_ITEMS:
            raise FastPathError(f"tensor of shape {list(shape)} is too large")
        tensors.append(WireTensor(position, DTYPES[code], shape, offset))
    if at != len(meta):
        raise FastPathError(f"{len(meta) - at} bytes too many after the tensors")
    return tensors


def _check_payload(head: FrameHead, tensors: Sequence[WireTensor]) -> None:
    expected = sum(tensor.size_bytes for tensor in tensors)
    if head.payload_bytes != expected:
        raise FastPathError(f"payload of {head.payload_bytes} bytes; its tensors have {expected}")


def _error_to_json(error: DistillError) -> dict[str, Any]:
    kind = next((kind for kind, type_ in _ERRORS.items() if type(error) is type_), None)
    if kind is None:  # a subclass of one in the table
        kind = next((kind for kind, type_ in _ERRORS.items() if isinstance(error, type_)), "failed")
    fields: dict[str, Any] = {"kind": kind, "text": str(error)[:_MAX_TEXT]}
    if isinstance(error, TeacherBusy):
        fields["delay_s"] = error.delay_s
    if isinstance(error, TeacherFailed):
        fields["tries"] = error.tries
    if isinstance(error, RequestTooLarge):  # old students would take a new kind for TeacherGone
        fields["too_large"] = True
    return fields


def _error_from_json(value: object) -> DistillError:
    if not isinstance(value, dict):
        raise FastPathError(f"error: expected an object, got {value!r:.80}")
    kind, text = text_of(value, "kind"), text_of(value, "text")
    if kind == "busy":
        delay_s = value.get("delay_s")
        if isinstance(delay_s, int | float) and 0 <= delay_s < 3600:
            return TeacherBusy(text, delay_s=float(delay_s))
        return TeacherBusy(text)
    if kind == "failed":
        tries = value.get("tries")
        return TeacherFailed(text, tries=tries if type(tries) is int and 1 <= tries < 100 else 1)
    if kind == "bad_request" and value.get("too_large") is True:
        return RequestTooLarge(text)
    return _ERRORS.get(kind, TeacherGone)(text)
