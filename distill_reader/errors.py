"""The errors of this package.

DistillError
├── UsageError               an argument, option or file is wrong; the text names it and the remedy
├── ModelError               a model folder cannot be served; the text names the file
├── BadRequest               the teacher cannot answer this request, now or later; names the tensor
│   ├── ModelNotFound        the teacher serves no model of this name; lists those it serves
│   └── RequestTooLarge      more bytes or samples than the teacher takes; send fewer at once
├── FastPathError            bytes do not follow the format of the fast path
├── ReaderError              the user's generator failed; its exception is the cause
├── NoTeacher                no teacher answered for as long as the reader may wait
└── TransientFailure         the same request may succeed elsewhere, or later
    ├── TeacherGone          the connection ended, or nobody listens there
    │   └── TeacherFailed    the teacher reports that it failed, not why; the connection stays
    ├── TeacherBusy          its queue is full, or it drains; says how long to wait
    └── TeacherTimeout       no answer in time
"""


class DistillError(Exception):
    """Base class of the errors of this package."""


class UsageError(DistillError, ValueError):
    """An argument, option or file is wrong; names it and the remedy."""


class ModelError(DistillError):
    """A model folder cannot be served; names the file."""


class BadRequest(DistillError):
    """The teacher cannot answer this request, now or later; names the tensor."""


class ModelNotFound(BadRequest):
    """The teacher serves no model of this name."""


class RequestTooLarge(BadRequest):
    """The request has more bytes or samples than the teacher takes; send fewer at once."""


class FastPathError(DistillError):
    """Bytes do not follow the format: the other end speaks something else, or is broken."""


class ReaderError(DistillError):
    """The user's generator failed; its exception is the cause."""


class NoTeacher(DistillError):
    """No teacher answered for as long as the reader may wait."""


class TransientFailure(DistillError):
    """The same request may succeed elsewhere, or later."""


class TeacherGone(TransientFailure):
    """The connection ended, or nobody listens there."""


class TeacherFailed(TeacherGone):
    """The teacher reports a failure without naming the cause; the connection stays."""

    def __init__(self, text: str, *, tries: int = 1) -> None:
        super().__init__(text)
        self.tries = tries  # of the teacher itself


class TeacherBusy(TransientFailure):
    """The teacher's queue is full, or it drains."""

    def __init__(self, text: str, *, delay_s: float = 0.05) -> None:
        super().__init__(text)
        self.delay_s = delay_s


class TeacherTimeout(TransientFailure):
    """No answer in time."""
