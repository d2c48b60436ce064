"""A state as plain memory, as snapshots, broadcasts and checkpoints use it."""

import contextlib
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from job_server.api.wire import WireError, decode
from pod_runtime.cgroups import available_memory, freed_since_peak
from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.layout import StateLayout, layout_from_json
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.state.storage import absolute


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where a state in memory goes when its job ends; it is stored with the state."""

    checkpoint: str  # folder or URL; "": the script has none
    keep: int = 3  # how many checkpoints stay there
    run_dir: str = ""  # "": not known
    python: str = ""  # the interpreter, which has what the path needs
    job_id: str = ""  # the holder of the checkpoints, with the two below: see `owner.job_holder`
    submitted_at: float = 0.0
    server: str = ""

    @classmethod
    def of(cls, checkpoint: str | None, keep: int, run_dir: Path | None, **job: Any) -> Self:
        """Return a target that means the same in any folder; `job`: the last three fields."""
        return cls(
            checkpoint=absolute(checkpoint) if checkpoint else "",
            keep=keep,
            run_dir="" if run_dir is None else str(run_dir),
            python=sys.executable or "",
            **job,
        )

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Return what `to_json` made; None for a state of a version that wrote none."""
        try:
            return None if value is None else decode(cls, value)
        except WireError:
            return None

    def to_json(self) -> Mapping[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Tensors as one flat run of bytes, and everything else as JSON types."""

    status: LoopStatus
    scalars: dict[str, Any]  # learning rate, scheduler, loss scaler, extra
    layout: StateLayout
    data: memoryview  # layout.total_bytes long
    save_target: SaveTarget | None = None  # None: not of a snapshot, or of an older version's

    def meta(self) -> bytes:
        return meta_bytes(json.dumps(self.status.to_json()), json.dumps(self.scalars), self.layout)


def room_for(size: int) -> memoryview:
    """Return `size` bytes for a copy of the state, in memory or, if that is short, in a file.

    The file is in the working folder, without a name. The kernel can write its pages back, where
    memory of this process would have it kill one.
    """
    if size and available_memory() < size + freed_since_peak():
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=Path.cwd()) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return memoryview(mmap.mmap(file.fileno(), size))
    return memoryview(bytearray(size))


def meta_bytes(
    status_json: str, scalars_json: str, layout: StateLayout, target_json: str = "null"
) -> bytes:
    """Return the JSON that stands before a state's bytes, padded so that those are aligned."""
    text = (
        f'{{"status": {status_json}, "scalars": {scalars_json}, "layout": {layout.text}, '
        f'"places": {target_json}}}'
    )
    data = text.encode()
    return data.ljust(-(-len(data) // 64) * 64)


def status_from(meta: bytes) -> LoopStatus:
    """Return the progress that `meta_bytes` wrote. Raises StateError: it is malformed."""
    return LoopStatus.from_json(_read(meta)["status"])


def host_state_from(meta: bytes, data: memoryview) -> HostState:
    """Build a state from what `meta_bytes` made and the tensors' bytes.

    Raises:
        StateError: they do not fit each other, or are malformed.
    """
    value = _read(meta)
    made = layout_from_json(value["layout"])
    if made.total_bytes != len(data):
        raise StateError(f"state: {len(data)} bytes, its layout wants {made.total_bytes}")
    return HostState(
        status=LoopStatus.from_json(value["status"]),
        scalars=value["scalars"],
        layout=made,
        data=data,
        save_target=SaveTarget.from_json(value.get("places")),
    )


def _read(meta: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(meta)
        missing = {"status", "scalars", "layout"} - value.keys()
    except (ValueError, AttributeError) as error:
        raise StateError(f"state: its description is damaged: {error!r}") from error
    if missing:
        raise StateError(f"state: its description is damaged: no {', '.join(sorted(missing))}")
    return value
