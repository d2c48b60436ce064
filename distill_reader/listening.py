"""Addresses and names of hosts, and listening sockets."""

import contextlib
import errno
import re
import resource
import socket

from distill_reader.errors import UsageError

_LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|::1|localhost")
_WANTED_FILES = 65536
# Errors of `accept` that pass when connections end.
OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return bool(_LOOPBACK.fullmatch(host))


def are_apart(own: str, other: str) -> bool:
    """Return whether the addresses of a connection's two ends are those of two hosts."""
    return own != other and not is_loopback(other)


def host_name() -> str:
    """Return this host's name in letters that any protocol takes."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())


def bracketed(host: str) -> str:
    """Return `host` as it is written before `:PORT`: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Return a bound socket that does not listen yet.

    Args:
        port: 0: any free port.
        flag: names it in errors.

    Raises:
        UsageError: the address cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::" and socket.has_dualstack_ipv6():
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(
            f"{flag} {port}: cannot listen on {host}: {reason}; choose another port or address"
        ) from error
    return listener


def cannot_accept(error: OSError) -> str:
    """Return what to log of an error of OUT_OF."""
    text = f"no connection can be accepted: {error}"
    if error.errno != errno.EMFILE:
        return text
    return f"{text}: raise its hard limit (ulimit -Hn; LimitNOFILE= of systemd)"


def raise_file_limit() -> None:
    """Raise the limit on open files as far as the system allows without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
