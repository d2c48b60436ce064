"""The errors of a trainer.

ElasticError
├── UsageError         the training script uses the loop in a way that cannot be right
├── StateError         a state does not fit this script, its data or its model
│   └── ElsewhereError  the state is on a node that the stage has no pod on
├── CheckpointError    a checkpoint could not be written or read
│   └── InUseError     another training has the folder
├── SnapshotError      no memory for a snapshot; the training goes on without one
├── LinkError          the launcher is gone, or sent something unknown
└── PeerLost           another trainer of the stage is gone; this one is not the cause
"""

from typing import Any

from pod_runtime.errors import PodRuntimeError


class ElasticError(PodRuntimeError):
    """Any of these."""


class UsageError(ElasticError):
    """The script uses the loop in a way that cannot be right; says what to write instead."""


class StateError(ElasticError):
    """A state does not fit this script, its data or its model; names what differs."""


class ElsewhereError(StateError):
    """No trainer sees the state, which another node has written. The job server waits for that."""


class CheckpointError(ElasticError):
    """A checkpoint could not be written or read; names the folder and the reason."""


class InUseError(CheckpointError):
    """The text names both trainings and the remedy."""


class SnapshotError(ElasticError):
    """The text names the size that was wanted and the remedy."""


class LinkError(ElasticError):
    """The launcher is gone, or sent something unknown. Not for scripts to handle."""


class StageChanged(Exception):  # noqa: N818  not an error
    """This trainer has parked, and goes on in the next stage. Control flow, not an error."""

    def __init__(self, start: Any) -> None:
        """`start`: the link's `Start`."""
        super().__init__("this trainer goes on in another stage")
        self.start = start


class PeerLost(ElasticError):  # noqa: N818  the word of the protocol
    """Another trainer is gone; this one ends, and is started again. Not for scripts to handle."""
