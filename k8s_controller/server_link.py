"""The conversation with the job server of one TrainingJob."""

from collections.abc import Callable

from job_server.api.api_client import ApiClient
from job_server.api.errors import NotFound, Retryable
from k8s_controller.decisions.observed import ServerView, server_view

TIMEOUT_S = 5.0


class TrainingServer:
    """Used by one thread at a time."""

    def __init__(self, url: str, token: str, job_id: str) -> None:
        self.url, self.token = url, token
        self._api = ApiClient(url, token, timeout_s=TIMEOUT_S)
        self._job_id = job_id

    def close(self) -> None:
        self._api.close()

    def view(self) -> ServerView | None:
        """Return what the server says; None: it does not answer."""
        try:
            sharing = self._api.sharing()
            try:
                job = self._api.status(self._job_id)
            except NotFound:
                job = None
        except Retryable:
            return None
        return server_view(job, sharing)

    def ask(self, question: Callable[[ApiClient], object]) -> None:
        """Ask for something. Raises a JobServerError."""
        question(self._api)
