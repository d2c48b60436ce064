"""Read the token that students, teachers and discovery servers share, and prove knowledge of it.

Our own protocols never send the token. Each end sends a nonce, and shows an HMAC-SHA256 of both.
The end that connects proves first, so that a server gives strangers nothing to guess the token by.
"""

import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from distill_reader.errors import UsageError


def read_token(token_file: str | None, environ: Mapping[str, str]) -> str:
    """Return the token of a teacher or discovery server; "": there is none.

    Read from the file, else from EDL_TEACHER_TOKEN_FILE, EDL_TEACHER_TOKEN, EDL_TOKEN_FILE or
    EDL_TOKEN.

    Raises:
        UsageError: the file cannot be read, is empty, or has several lines.
    """
    return _read(token_file, "--token_file", ("EDL_TEACHER_TOKEN", "EDL_TOKEN"), environ)


def read_student_token(environ: Mapping[str, str]) -> str:
    """Return the token of EDL_TEACHER_TOKEN_FILE or EDL_TEACHER_TOKEN; "": there is none.

    EDL_TOKEN does not count: it may be the job server's, which teachers must not see.

    Raises:
        UsageError: the file cannot be read, is empty, or has several lines.
    """
    return _read(None, "", ("EDL_TEACHER_TOKEN",), environ)


def read_job_token(token_file: str | None, environ: Mapping[str, str]) -> str:
    """Return the job server's token: of the file, EDL_TOKEN_FILE or EDL_TOKEN; "": none.

    Raises:
        UsageError: the file cannot be read, is empty, or has several lines.
    """
    return _read(token_file, "--job_server_token_file", ("EDL_TOKEN",), environ)


def read_password(password: str | None, password_file: str | None) -> str | None:
    """Return the password of --db_passwd or --db_passwd_file; None: neither is given.

    Raises:
        UsageError: the file cannot be read.
    """
    if password_file is None:
        return password or None
    try:
        return Path(password_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--db_passwd_file: {password_file}: {error}") from error


def same_token(shown: object, wanted: str) -> bool:
    """Return whether `shown`, which may be anything, is the wanted token."""
    return isinstance(shown, str) and hmac.compare_digest(_bytes(shown), _bytes(wanted))


def new_nonce() -> str:
    """Return a random number to be used once."""
    return secrets.token_hex(16)


def prove(token: str, who: str, client_nonce: str, server_nonce: str) -> str:
    """Return the proof that `who` knows the token, for these nonces.

    Args:
        who: the protocol and which end of it, so that one end's proof is useless to the other.
    """
    text = f"edl {who} {client_nonce} {server_nonce}"
    return hmac.new(_bytes(token), _bytes(text), "sha256").hexdigest()


def proves(shown: object, token: str, who: str, client_nonce: str, server_nonce: str) -> bool:
    """Return whether `shown` is what `prove` returns."""
    return same_token(shown, prove(token, who, client_nonce, server_nonce))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # any text is valid


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
        token = Path(token_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {token_file}: {error}") from error
    if not token:
        raise UsageError(f"{flag} {token_file}: is empty")
    if len(token.splitlines()) > 1:
        raise UsageError(f"{flag} {token_file}: has several lines; leave one, with the token")
    return token
