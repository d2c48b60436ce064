"""How errors become statuses of HTTP."""

import math

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
)


class HttpError(DistillError):
    """A request that is answered by a status."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        """`close`: the connection is of no more use, what is left of the body is not read."""
        super().__init__(text)
        self.status = status
        self.headers = headers or {}
        self.close = close


def as_http(error: DistillError) -> HttpError:
    """Return the status, text and headers that say what an error says."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TeacherBusy):
        headers = {
            "Retry-After": str(math.ceil(error.delay_s)),
            "retry-after-ms": str(int(error.delay_s * 1000)),
        }
        return HttpError(503, str(error), headers=headers)
    if isinstance(error, ModelNotFound):
        return HttpError(404, str(error))
    if isinstance(error, RequestTooLarge):
        return HttpError(413, str(error))
    if isinstance(error, BadRequest):
        return HttpError(400, str(error))
    return HttpError(500, str(error))
