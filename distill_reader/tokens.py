"""The secret that students, teachers and discovery servers share: as programs are given it, and how
they prove that they have it.

Where the protocol is ours the secret itself is never sent: each end makes a number that is used
once, and shows an HMAC-SHA256 of both. Who comes proves it first: who is dialed by strangers gives
them nothing to guess by.
"""

import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from distill_reader.errors import UsageError


def read_token(token_file: str | None, environ: Mapping[str, str]) -> str:
    """Return the token of the file, else of the environment; "": there is none.

    That is EDL_TEACHER_TOKEN_FILE, EDL_TEACHER_TOKEN, EDL_TOKEN_FILE or EDL_TOKEN. Students are
    given the teachers' token and never the job server's, which EDL_TOKEN may be.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    return _read(token_file, "--token_file", ("EDL_TEACHER_TOKEN", "EDL_TOKEN"), environ)


def read_job_token(token_file: str | None, environ: Mapping[str, str]) -> str:
    """Return the job server's token of the file, else of EDL_TOKEN_FILE, EDL_TOKEN; "": none.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    return _read(token_file, "--job_server_token_file", ("EDL_TOKEN",), environ)


def read_password(password: str | None, password_file: str | None) -> str | None:
    """Return Redis's password, as --db_passwd or --db_passwd_file gives it; None: neither does.

    Raises:
        UsageError: the file cannot be read.
    """
    if password_file is None:
        return password or None
    try:
        return Path(password_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--db_passwd_file: {password_file}: {error}") from error


def same_token(shown: object, wanted: str) -> bool:
    """Return whether somebody shows the secret, whatever that is."""
    return isinstance(shown, str) and hmac.compare_digest(_bytes(shown), _bytes(wanted))


def new_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def prove(token: str, who: str, client_nonce: str, server_nonce: str) -> str:
    """Return what shows that `who` has the secret, in an exchange with these numbers.

    Args:
        who: the protocol and which end of it, so that nobody is shown what another end has said.
    """
    text = f"edl {who} {client_nonce} {server_nonce}"
    return hmac.new(_bytes(token), _bytes(text), "sha256").hexdigest()


def proves(shown: object, token: str, who: str, client_nonce: str, server_nonce: str) -> bool:
    """Return whether that is what `prove` returns."""
    return same_token(shown, prove(token, who, client_nonce, server_nonce))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # whatever comes, it is no error


def _read(
    token_file: str | None, flag: str, names: Sequence[str], environ: Mapping[str, str]
) -> str:
    for name in names:
        if token_file is None and environ.get(f"{name}_FILE"):
            token_file, flag = environ[f"{name}_FILE"], f"{name}_FILE"
        elif token_file is None and environ.get(name, "").strip():
            return environ[name].strip()
    if token_file is None:
        return ""
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {token_file}: {error}") from error
    if not token:
        raise UsageError(f"{flag} {token_file}: is empty")
    return token
