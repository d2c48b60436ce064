"""What teachers behind an ingress want: headers, and TLS by an authority of one's own."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from distill_reader.errors import TeacherGone, UsageError
from distill_reader.tls import client_context

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # gRPC allows no other characters
_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_OURS = (
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
    "inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding",
    "upgrade",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TeacherAccess:
    """Headers for all teachers of a reader, and whose certificates it trusts."""

    headers: tuple[tuple[str, str], ...] = ()
    ca_file: str | None = None  # certificates in PEM; None: those of the system

    def __post_init__(self) -> None:
        names = [name.lower() for name, _ in self.headers]
        for name, value in self.headers:
            is_grpcs = name.lower().startswith("grpc-") or name.lower().endswith("-bin")
            if not _NAME.fullmatch(name) or is_grpcs or name.lower() in _OURS:
                raise UsageError(
                    f"headers: {name!r} cannot be set: expected letters, digits and - _ . and none "
                    "of those that the protocols set themselves"
                )
            if not _VALUE.fullmatch(value):
                raise UsageError(
                    f"headers: {name}: expected printable ASCII characters, without spaces around "
                    "them (is a line break at the end?)"
                )
            if name.lower() == "host" and not _HOST.fullmatch(value):
                raise UsageError(f"headers: Host: expected NAME or NAME:PORT, got {value!r}")
            if names.count(name.lower()) > 1:
                raise UsageError(f"headers: {name}: is given twice")
        if self.ca_file is not None:
            client_context(self.ca_file)

    def __repr__(self) -> str:
        """Leave out the values, which are secrets: `print_config` prints this."""
        names = ", ".join(name for name, _ in self.headers) or "none"
        return f"TeacherAccess(headers: {names}; ca_file: {self.ca_file or 'of the system'})"

    @property
    def host(self) -> str | None:
        """The header Host; None: it is not set."""
        return next((value for name, value in self.headers if name.lower() == "host"), None)

    def shown(self, token: str) -> dict[str, str]:
        """Return the headers of a request, but Host. A token goes as Authorization if none does.

        Raises:
            UsageError: no header can show the token.
        """
        found = {name: value for name, value in self.headers if name.lower() != "host"}
        if token and not any(name.lower() == "authorization" for name in found):
            if not _VALUE.fullmatch(token):
                raise UsageError(
                    "EDL_TEACHER_TOKEN: this token (or that of EDL_TEACHER_TOKEN_FILE) has other "
                    "characters than printable ASCII, which HTTP and gRPC cannot show: choose "
                    "another one for teachers and students, or use fast://"
                )
            found["Authorization"] = f"Bearer {token}"
        return found

    def context(self) -> ssl.SSLContext:
        """Return what checks certificates, by the file as it is now.

        Raises:
            TeacherGone: it cannot be read, as while it is written; it could before.
        """
        try:
            return client_context(self.ca_file)
        except UsageError as error:
            raise TeacherGone(str(error)) from error

    def server_name(self, host: str) -> str:
        """Return whose certificate is expected of the teacher at `host`."""
        return host if self.host is None else urlsplit(f"//{self.host}").hostname or host


def access_of(headers: Mapping[str, str] | None, ca_file: str | None) -> TeacherAccess:
    """Check and return the access.

    Raises:
        UsageError: a header, or the file, is wrong; names it, and no value.
    """
    given = headers or {}
    for name, value in given.items():
        if not all(isinstance(text, str) for text in (name, value)):
            raise UsageError(f"headers: {name!r}: expected two texts, a name and a value")
    return TeacherAccess(headers=tuple(given.items()), ca_file=ca_file)
