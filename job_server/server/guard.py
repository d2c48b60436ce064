"""Check each request: it has the token, and no web page of another site sends it."""

import hmac
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from flask import Request

from job_server.api import routes
from job_server.api.addresses import is_loopback
from job_server.api.command_line import task_token
from job_server.api.errors import Forbidden, Unauthorized
from job_server.server.page_login import PageLogin, cookie_name

_OF_READERS = tuple(route.name for route in routes.ROUTES if route.who == "readers")
_LEGACY_PATHS = (routes.QUERY_PODS.path, routes.RUN_TIME.path)
_REMEDIES = {
    routes.PAGE.path: "; `edl page` prints a link that opens this page",
    **dict.fromkeys(
        _LEGACY_PATHS,
        "; for clients of the original, which have none, start the server with --insecure_legacy",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Checks every request before its route does anything."""

    token: str | None = None  # None: any program of this machine may ask
    insecure_legacy: bool = False  # the original's two routes need no token
    login: PageLogin = field(default_factory=PageLogin)  # of browsers, by a link instead of it

    def check(self, request: Request) -> None:
        """Raise Unauthorized or Forbidden unless this request may go on."""
        origin = request.headers.get("Origin")
        if origin is not None and _netloc(origin) != request.host:
            raise Forbidden(f"Origin: {origin[:100]!r} is another site; ask from a program instead")
        if self.token is None:
            # A web page may have its own name resolve to our address; Host is that name then.
            # With a token there is no danger: the page does not know it.
            if not is_loopback(_hostname(request.host)):
                raise Forbidden(
                    f"Host: {request.host[:100]!r} is not this machine's loopback address; "
                    "use 127.0.0.1 or localhost, or start the server with a token"
                )
            return
        if request.endpoint in _OF_READERS and self._is_given(request, task_token(self.token)):
            return
        if self.insecure_legacy and request.path in _LEGACY_PATHS:
            return
        if request.endpoint == routes.HEALTH.name and "Authorization" not in request.headers:
            return  # probes have no token
        if request.endpoint == routes.OPEN_PAGE.name:
            return  # what stands in the link is checked where it is used up
        if request.path == routes.PAGE.path and self.has_cookie(request):
            return
        if not self._is_given(request, self.token):
            raise Unauthorized(
                "Authorization: expected 'Bearer TOKEN' with the server's token (EDL_TOKEN, or "
                "EDL_TOKEN_FILE or --token_file: where `edl run` or start_job_server.sh made it, "
                "the file `token` in its folder)" + _REMEDIES.get(request.path, "")
            )

    def has_cookie(self, request: Request) -> bool:
        """Return whether a browser asks that was let in by a link."""
        return self.login.knows(request.cookies.get(cookie_name(request.host), ""))

    @staticmethod
    def _is_given(request: Request, token: str) -> bool:
        given = ""
        authorization = request.authorization
        if authorization is not None and authorization.type == "bearer":
            given = authorization.token or ""
        elif (
            authorization is not None
            and authorization.type == "basic"
            # A browser can ask its user for a password, not for a bearer's token.
            and request.path == routes.PAGE.path
        ):
            given = authorization.password or ""
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:  # `http://[`
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
