"""Post each service's demand to a job server, which runs more or fewer teachers by it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import requests

from distill_reader.balance.server.balancer import Balancer
from distill_reader.balance.server.metrics import samples_per_s, wait_share
from distill_reader.balance.table import ServiceState
from distill_reader.balance.tasks import in_thread
from distill_reader.errors import UsageError

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_TIMEOUT_S = 5.0
_LOG_EVERY_S = 30.0
_OF_NO_JOB = "service: "  # in the job server's 404 where no job has such teachers


def demand_of(name: str, service: ServiceState) -> dict[str, Any] | None:
    """Return the demand of a service; None: no student reads, so it is unknown. Pure."""
    students = service.students.values()
    if all(student.wait_share is None for student in students):
        return None  # a wait share of 0 would mean that they need no teachers
    return {
        "service": name,
        "students": len(students),
        "teachers": len(service.teachers),
        "wait_share": wait_share(service),
        "samples_per_s": samples_per_s(service),
    }


class DemandPoster:
    """Posts the demand every 2 s. Belongs to one event loop."""

    def __init__(
        self,
        balancer: Balancer,
        job_server: str,
        read_token: Callable[[], str],
        *,
        certificates: str | None = None,
    ) -> None:
        """
        Args:
            job_server: URL, e.g. http://10.0.0.1:8180.
            read_token: returns its token by now, "": none; or raises a UsageError.
            certificates: file of those to check its own against; None: well-known authorities.
        """
        self._balancer = balancer
        self._url = job_server.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy for calls within EDL
        self._session.verify = certificates or True
        self._read_token = read_token
        self._use(read_token())
        self._logged_s = -_LOG_EVERY_S

    def _use(self, token: str) -> None:
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"

    async def run(self) -> None:
        """Run until cancelled. While the job server is away, go on trying."""
        while True:
            try:
                trouble = await self._notify()
            except Exception:  # a defect here must not end the discovery server
                logger.exception("the demand cannot be posted to the job server; trying again")
                trouble = ""
            if trouble and time.monotonic() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = time.monotonic()
                logger.warning("the demand cannot be posted to the job server: %s", trouble)
            await asyncio.sleep(_PERIOD_S)

    async def _notify(self) -> str:
        services = self._balancer.view.services.items()
        demands = [demand_of(name, service) for name, service in services]
        return await in_thread(lambda: self._post(demands))

    def _post(self, demands: Sequence[dict[str, Any] | None]) -> str:
        """Post in a thread; return what went wrong, or ""."""
        trouble = ""
        for demand in demands:
            if demand is None:
                continue
            url = f"{self._url}/api/v1/services/{demand['service']}/demand"
            try:
                answer = self._session.post(
                    url, json=demand, timeout=_TIMEOUT_S, allow_redirects=False
                )
            except requests.exceptions.SSLError as error:
                return f"{error} (SSL_CERT_FILE names the certificates to check against)"
            except OSError as error:  # all of requests' are, and that of a file of certificates
                return str(error)
            if answer.is_redirect:  # never followed: a POST would become a GET
                trouble = f"{url}: sends requests to {answer.headers['Location'][:200]}: name that"
            elif answer.status_code == HTTPStatus.NOT_FOUND and _OF_NO_JOB in answer.text[:200]:
                logger.debug("%s: %s", url, answer.text[:200])  # this service is not on demand
            elif not answer.ok:
                if answer.status_code == HTTPStatus.UNAUTHORIZED:
                    with contextlib.suppress(UsageError):  # it is about to be written
                        self._use(self._read_token())
                trouble = f"{url}: {answer.status_code} {answer.text[:200]}"
        return trouble
