"""Addresses of machines: which are only reachable from here, and how others reach this one."""

import functools
import ipaddress
import socket


@functools.lru_cache(maxsize=64)  # called for every request
def is_loopback(host: str) -> bool:
    """Return whether `host` (an address, or the name localhost) is only reachable from here."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_facing(host: str, port: int, flags: int = 0) -> str:
    """Return the address by which `host` reaches this machine; 127.0.0.1 when that is here.

    Args:
        flags: of `getaddrinfo`.

    Raises:
        OSError: its name does not resolve, or there is no way to it.
    """
    ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    family, _, _, _, address = ways[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # no packet is sent
        return str(probe.getsockname()[0])
