"""The files of one checkpoint: tensors, a status, and a manifest that is written last.

The manifest is the commit, on object stores too: a folder without one was never a checkpoint, and
with one every byte is checked by size and SHA-256.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pod_runtime.trainer.errors import CheckpointError
from pod_runtime.trainer.layout import StateLayout, StateTensor, make_layout
from pod_runtime.trainer.state.storage import Chunk, Storage
from pod_runtime.trainer.state.tensor_file import parse_tensors, tensor_chunks

MANIFEST = "manifest.json"
STATUS = "train_status.json"
_TENSORS = ".safetensors"


def write_files(
    storage: Storage,
    folder: str,
    *,
    layout: StateLayout,
    data: memoryview,
    status: Mapping[str, Any],
    head: Mapping[str, Any],
    commit: Callable[[str, bytes], None] | None = None,
) -> None:
    """Write one checkpoint into `folder`, which has no other writer.

    Args:
        layout, data: tensors; the part of a name before the first `/` says which file it goes to.
        status: JSON types.
        head: what stands at the top of the manifest.
        commit: writes the manifest; None: the storage does.

    Raises:
        OSError: as the storage does; there is no manifest then.
    """
    files: dict[str, dict[str, object]] = {}
    groups: dict[str, list[tuple[str, StateTensor]]] = {}
    for spec in layout.specs:
        group, _, name = spec.name.partition("/")
        groups.setdefault(group, []).append((name, spec))
    parts: list[tuple[str, Iterable[Chunk]]] = [
        (f"{group}{_TENSORS}", tensor_chunks(specs, data)) for group, specs in groups.items()
    ]
    parts.append((STATUS, [json.dumps(status, indent=1).encode()]))
    for name, chunks in parts:
        counted = _Counted(chunks)
        storage.write(f"{folder}/{name}", counted)
        files[name] = {"size_bytes": counted.size, "sha256": counted.hash.hexdigest()}
    manifest = {"format": 1, **head, "files": files}
    content = json.dumps(manifest, indent=1).encode()
    (commit or storage.commit)(f"{folder}/{MANIFEST}", content)


def read_head(storage: Storage, folder: str) -> dict[str, Any]:
    """Return what a manifest says; {} where there is none, or a damaged one. Raises OSError."""
    try:
        manifest = json.loads(storage.read(f"{folder}/{MANIFEST}"))
    except (FileNotFoundError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def read_files(storage: Storage, folder: str) -> tuple[dict[str, Any], StateLayout, memoryview]:
    """Read and verify one checkpoint: its status, and its tensors in one flat run of bytes.

    Raises:
        FileNotFoundError: with MANIFEST as text where that is missing.
        CheckpointError, StateError: it is damaged; the text says which file and how.
        OSError: as the storage does.
    """
    try:
        manifest = json.loads(storage.read(f"{folder}/{MANIFEST}"))
        entries = {
            name: (int(entry["size_bytes"]), str(entry["sha256"]))
            for name, entry in dict(manifest["files"]).items()
        }
    except FileNotFoundError:
        raise FileNotFoundError(MANIFEST) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST}: damaged: {error!r}") from error
    contents = {name: _verified(storage, folder, name, *entry) for name, entry in entries.items()}
    if STATUS not in contents:
        raise CheckpointError(f"{MANIFEST}: does not name {STATUS}")
    status = json.loads(contents.pop(STATUS))
    layout, data = _assemble(contents)
    return status, layout, data


def _verified(storage: Storage, folder: str, name: str, size_bytes: int, sha256: str) -> bytes:
    try:
        content = storage.read(f"{folder}/{name}")
    except FileNotFoundError:
        raise CheckpointError(f"{name}: missing") from None
    if len(content) != size_bytes:
        raise CheckpointError(f"{name}: {len(content)} bytes, the manifest says {size_bytes}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{name}: its SHA-256 is not the manifest's: damaged content")
    return content


def _assemble(contents: Mapping[str, bytes]) -> tuple[StateLayout, memoryview]:
    tensors = []
    for name, content in contents.items():
        group = name.removesuffix(_TENSORS)
        for tensor, dtype, shape, piece in parse_tensors(memoryview(content), name):
            tensors.append((f"{group}/{tensor}", dtype, shape, piece))
    layout = make_layout([(name, dtype, shape) for name, dtype, shape, _piece in tensors])
    data = bytearray(layout.total_bytes)
    for spec, (_name, _dtype, _shape, piece) in zip(layout.specs, tensors, strict=True):
        if len(piece) != spec.size_bytes:
            raise CheckpointError(f"{spec.name}: {len(piece)} bytes, expected {spec.size_bytes}")
        data[spec.offset : spec.offset + spec.size_bytes] = piece
    return layout, memoryview(data)


class _Counted:
    """Passes chunks on and notes their size and digest."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks = chunks
        self.size = 0
        self.hash = hashlib.sha256()

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.chunks:
            self.size += len(chunk)
            self.hash.update(chunk)
            yield chunk
