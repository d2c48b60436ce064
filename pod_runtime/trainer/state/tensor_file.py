"""The safetensors format: length, JSON header, raw bytes. Written and read without copies.

The library's numpy interface knows no bfloat16 and wants whole arrays; a state is one flat run of
bytes already.
"""

import json
import struct
from collections.abc import Iterator, Sequence

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.layout import StateTensor

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "complex128": "C128",
}  # fmt: skip
_NAMES = {code: name for name, code in _DTYPES.items()}


def tensor_chunks(specs: Sequence[tuple[str, StateTensor]], data: memoryview) -> Iterator[bytes]:
    """Yield the parts of a file with `specs`, each (name in the file, place in `data`)."""
    header: dict[str, object] = {}
    at = 0
    for name, spec in specs:
        header[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield struct.pack("<Q", len(text)) + text
    for _name, spec in specs:
        yield data[spec.offset : spec.offset + spec.size_bytes]  # type: ignore[misc]  # a buffer


def parse_tensors(
    content: memoryview, where: str
) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """Return (name, dtype, shape, bytes) of each tensor of a file, in the file's order.

    Raises:
        CheckpointError: the file is malformed; the text begins with `where`.
    """
    try:
        (size,) = struct.unpack_from("<Q", content)
        header = json.loads(bytes(content[8 : 8 + size]))
        body = content[8 + size :]
        tensors = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            piece = body[start:stop]
            if len(piece) != stop - start:
                raise CheckpointError(f"{where}: {name} reaches beyond the end of the file")
            tensors.append((name, _NAMES[entry["dtype"]], tuple(entry["shape"]), piece))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: no safetensors file: {error!r}") from error
    return tensors
