"""What can go wrong in a pod's runtime.

    PodRuntimeError
    ├── LaunchError      the launcher, or `edl run`, cannot do what its command line asks for
    ├── ChannelError     a message between launcher and trainer does not fit the protocol
    └── SpawnError       a trainer's process could not be started

`env.EnvError` (a malformed environment) and `shim_wire.ShimError` (no shim, or a refusal) live with
their contracts.
"""


class PodRuntimeError(Exception):
    """Root of this package's own errors."""


class LaunchError(PodRuntimeError):
    """The program cannot go on; the text says what is wrong and how to correct it."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # 2: a wrong command line


class ChannelError(PodRuntimeError):
    """A message between launcher and trainer does not fit the protocol; the sender is cut off."""


class SpawnError(PodRuntimeError):
    """The operating system refused to start a trainer."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason
