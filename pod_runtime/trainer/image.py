"""A state as plain memory: what snapshots, broadcasts and checkpoints have in common."""

import json
from dataclasses import dataclass
from typing import Any

from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.layout import Layout, layout_from_json
from pod_runtime.trainer.loop_status import LoopStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StateImage:
    """Tensors as one flat run of bytes, and everything else as JSON types."""

    status: LoopStatus
    scalars: dict[str, Any]  # learning rate, scheduler, loss scaler, extra
    layout: Layout
    data: memoryview  # layout.total_bytes long

    def meta(self) -> bytes:
        return meta_bytes(json.dumps(self.status.to_json()), json.dumps(self.scalars), self.layout)


def meta_bytes(status_json: str, scalars_json: str, layout: Layout) -> bytes:
    """Return the JSON that stands before a state's bytes, padded so that those are aligned."""
    text = f'{{"status": {status_json}, "scalars": {scalars_json}, "layout": {layout.text}}}'
    data = text.encode()
    return data.ljust(-(-len(data) // 64) * 64)


def image_from(meta: bytes, data: memoryview) -> StateImage:
    """Build an image from what `meta_bytes` made and the tensors' bytes.

    Raises:
        StateError: they do not fit each other, or are malformed.
    """
    try:
        value = json.loads(meta)
        status, scalars, layout = value["status"], value["scalars"], value["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"state: its description is damaged: {error!r}") from error
    made = layout_from_json(layout)
    if made.total_bytes != len(data):
        raise StateError(f"state: {len(data)} bytes, its layout wants {made.total_bytes}")
    return StateImage(status=LoopStatus.from_json(status), scalars=scalars, layout=made, data=data)
