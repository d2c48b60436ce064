"""Errors of a job client.

    JobClientError
    ├── SetupError        the command line or this machine's set-up is wrong: exit code 2
    ├── FatalError        the server refuses this client for good: exit code 1
    └── PodStartError     one pod cannot start: reported as EXITED, the client goes on

Errors that the server answers are in `job_server.api.errors`.
"""


class JobClientError(Exception):
    """Root of all of these; the text names the field, the value and the remedy."""


class SetupError(JobClientError):
    pass


class FatalError(JobClientError):
    pass


class PodStartError(JobClientError):
    """A pod could not be started.

    Args:
        reason: for people.
        code: exit code of the package script; None: there was no such script or it was signalled.
    """

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
