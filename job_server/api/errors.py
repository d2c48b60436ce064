"""Errors between the job server and its callers.

JobServerError
├── Retryable               try again after `delay_s`
│   ├── ServerAway          no answer: the server is down, restarting or unreachable; or it
│   │                       `answers` with a 503. A ConnectionError, too
│   └── StoreTrouble        503: the server cannot write its database; nothing was changed
└── Rejected                the server understood and refused; carries the HTTP status
    ├── BadRequest          400 and other 4xx: the request itself is wrong
    ├── Unauthorized        401: the token is missing or wrong
    ├── Forbidden           403: a web page of another site asked
    ├── NotFound            404: no such job, node or route
    ├── Conflict            409: right in form, impossible now
    └── Gone                410: the pod is not wanted any more

ConfigError                 a wrong command line or file; the program ends with exit code 2

The server raises the same classes that its clients do; `status` is what crosses the wire.
"""


class JobServerError(Exception):
    """Root of what the job server and its client raise."""


class Retryable(JobServerError):  # noqa: N818 - it names what to do
    """May succeed later, unchanged."""

    status = 503

    def __init__(self, text: str, delay_s: float = 1.0) -> None:
        super().__init__(text)
        self.delay_s = delay_s  # wait at least so long


class ServerAway(Retryable, ConnectionError):  # noqa: N818 - as its family
    """No answer, or one that is not a job server's. Never take it for an empty answer."""

    answers = False  # True: it is there, and says why it cannot do this now


class StoreTrouble(Retryable):
    """The database cannot be written, mostly for a full disk. Nothing was changed."""


class Rejected(JobServerError):  # noqa: N818 - as above
    """Refused. Repeating the same request gives the same answer."""

    status = 400


class BadRequest(Rejected):
    """The request is wrong: its body, its query, its method or its size."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Unauthorized(Rejected):
    """The token is missing or is not the server's."""

    status = 401


class Forbidden(Rejected):
    """A web page of another site has sent the request."""

    status = 403


class NotFound(Rejected):
    """No such job, node or route."""

    status = 404


class Conflict(Rejected):
    """Right in form, impossible in the present state; the text says why."""

    status = 409


class Gone(Rejected):
    """The pod is not wanted any more. Its launcher ends the trainers and exits."""

    status = 410


class ConfigError(ValueError):
    """A wrong flag value, file or port; the text names it, its value and the remedy."""
