"""Hold the descriptors of snapshot segments. Standard library only."""

import os

from pod_runtime.shim_wire import MAX_FDS, HeldSegment

_MAX_TEXT = 200


class SegmentStore:
    """Descriptors of segments by (pod_id, stage), at most as many as one answer can carry."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[HeldSegment, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, described: object, fds: tuple[int, ...]) -> None:
        """Keep a duplicate of the descriptor; it replaces one of the same (pod_id, stage).

        When there are too many, that of the lowest stage is dropped.

        Raises:
            ValueError: the description is malformed, or does not match the descriptor.
        """
        segment = _segment(described)
        if len(fds) != 1:
            raise ValueError(f"put: expected one file descriptor, got {len(fds)}")
        size = os.fstat(fds[0]).st_size
        if size < segment.size_bytes:
            raise ValueError(
                f"segment.size_bytes: {segment.size_bytes} announced, the descriptor has {size}"
            )
        key = (segment.pod_id, segment.stage)
        duplicate = os.dup(fds[0])
        self._forget(key)
        self._held[key] = (segment, duplicate)
        if len(self._held) > MAX_FDS:
            self._forget(min(self._held, key=lambda held: held[1]))

    def get(self, stage: object) -> list[tuple[HeldSegment, int]]:
        """Return the segments of `stage` (None: of all), newest first.

        Their descriptors stay this object's; do not close them.

        Raises:
            ValueError: `stage` is not a stage number.
        """
        wanted = None if stage is None else _whole("stage", stage)
        kept = [held for held in self._held.values() if wanted in (None, held[0].stage)]
        return sorted(kept, key=lambda held: (-held[0].stage, held[0].pod_id))

    def drop(self, below_stage: object) -> None:
        """Drop the segments of lower stages. Raises ValueError: not a stage number."""
        limit = _whole("below_stage", below_stage)
        for key in [key for key in self._held if key[1] < limit]:
            self._forget(key)

    def clear(self) -> None:
        for key in list(self._held):
            self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            os.close(held[1])


def _segment(data: object) -> HeldSegment:
    if not isinstance(data, dict):
        raise ValueError(f"segment: expected an object, got {data!r:.80}")
    return HeldSegment(
        pod_id=_text("segment.pod_id", data.get("pod_id")),
        stage=_whole("segment.stage", data.get("stage")),
        size_bytes=_whole("segment.size_bytes", data.get("size_bytes")),
        digest=_text("segment.digest", data.get("digest", "")),
    )


def _whole(field: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{field}: expected a whole number of at least 0, got {value!r:.80}")
    return value


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{field}: expected a text of at most {_MAX_TEXT} characters")
    return value
