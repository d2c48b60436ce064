"""What command lines share: how they refuse, tokens, flags of several of them, the version."""

import argparse
import contextlib
import functools
import hashlib
import hmac
import importlib.metadata
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from job_server.api.amounts import argument, hang_limits
from job_server.api.errors import ConfigError
from job_server.api.wire import HANG_POLICIES, STRAGGLER_POLICIES, ScriptKind, ScriptSpec

DEFAULT_PORT = 8180
DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"


class OptionParser(argparse.ArgumentParser):
    """Refuses in one line, of the same form as all other errors, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def add_hang_flags(add: Callable[..., object]) -> None:
    """Add what is done about trainers that hang, or are slow; what is not given is None.

    Args:
        add: `add_argument` of a parser, or of a group of it.
    """
    add(
        "--hang_policy",
        choices=HANG_POLICIES,
        help="about a trainer that gives no sign of life for ten times its limit: say it, restart "
        "(default) or fail; at the limit its stacks are shown",
    )
    add(
        "--hang_limits",
        type=argument(hang_limits),
        metavar="NAME=TIME,...",
        help="step=60s, or steps=20 times as long as one takes; first=10min, data=10min, "
        "evaluation=30min, saving=30min",
    )
    add(
        "--straggler_policy",
        choices=STRAGGLER_POLICIES,
        help="about a rank that computes twice as long as the median: say it (default), or evict "
        "its pod to a free slot elsewhere",
    )


def read_script_file(flag: str, name: str) -> ScriptSpec:
    """Return the script in a .yaml or .csv file, not yet parsed.

    Raises:
        ConfigError: the file cannot be read, or has another ending.
    """
    kinds = {
        ".yaml": ScriptKind.TIMELINE,
        ".yml": ScriptKind.TIMELINE,
        ".csv": ScriptKind.TRACE,
    }
    kind = kinds.get(Path(name).suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{flag}: {name!r} is no change script; expected alternate, none, walk, "
            "or a file that ends in .yaml or .csv"
        )
    try:
        return ScriptSpec(kind=kind, text=Path(name).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {name} cannot be read: {error}") from None


def read_token(
    token_file: str | None, environ: Mapping[str, str], *, private: bool = False
) -> str | None:
    """Return the token of the file, else of that in EDL_TOKEN_FILE, else EDL_TOKEN, else None.

    Args:
        token_file: value of --token_file.
        private: refuse a file that others may read.

    Raises:
        ConfigError: the file cannot be read, or what it holds is no token.
    """
    if token_file is not None:
        return token_in(Path(token_file), "--token_file", private=private)
    if environ.get("EDL_TOKEN_FILE"):
        return token_in(Path(environ["EDL_TOKEN_FILE"]), "EDL_TOKEN_FILE", private=private)
    if environ.get("EDL_TOKEN"):
        return _checked(environ["EDL_TOKEN"], "EDL_TOKEN")
    return None


def task_token(token: str) -> str:
    """Return what opens the task queues of a server that has this token, and nothing else."""
    return hmac.new(token.encode(), b"task queues", hashlib.sha256).hexdigest()


def token_in(path: Path, named_by: str, *, private: bool = False) -> str:
    """Return the token in a file; raises as `read_token`.

    Args:
        named_by: flag or variable that names the file, for errors.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            open_to_others = os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH)
            text = file.read(4097)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{named_by}: {path} cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    if private and open_to_others:
        raise ConfigError(f"{named_by}: {path} can be read by others; chmod 600 it")
    return _checked(text, f"{named_by}: {path}")


def token_now(path: Path | None, before: str | None) -> str | None:
    """Return the token as a file has it by now; `before` where there is no file, or none in it."""
    if path is not None:
        with contextlib.suppress(ConfigError):  # it is about to be written
            return token_in(path, "token")
    return before


def make_token() -> str:
    """Return a new token, for a server that is started for its user."""
    return secrets.token_urlsafe(24)


def keep_token(path: Path, token: str) -> None:
    """Write a token where only this user reads it; raises OSError."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")


def utf8_path(flag: str, path: Path) -> Path:
    """Return a path as absolute, of what a program writes to and tells others of.

    Raises:
        ConfigError: it is not UTF-8, as all that programs tell each other.
    """
    absolute = path.absolute()
    try:
        str(absolute).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{flag}: {str(absolute)!a} is not UTF-8; name a path that is, or start this from a "
            "folder whose name is, in a UTF-8 locale"
        ) from None
    return absolute


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if not 8 <= len(token) <= 4096 or not token.isascii() or any(c.isspace() for c in token):
        raise ConfigError(f"{source}: expected one word of at least 8 ASCII characters as token")
    return token


@functools.cache  # of this process, whatever is installed later, and with no descriptor left
def version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("edl")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a checkout that is not installed
