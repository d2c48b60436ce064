"""Which of this machine's network interfaces has an address. Standard library only."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFCONF = 0x8912  # netdevice(7): all IPv4 addresses, those of aliases included
_IFREQ_BYTES = 40  # 16 of name, then a sockaddr: 2 of family, 2 of port, 4 of address
_MAX_INTERFACES = 512
_IF_INET6 = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name


def interface_of(addr: str) -> str | None:
    """Return the interface that has `addr`, an address or a name; None: no interface has it.

    All of 127.0.0.0/8 is the loopback's.
    """
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(addr, None)}
    except (OSError, UnicodeError):  # the latter: no name can be like that
        return None
    wanted = {ipaddress.ip_address(text) for text in found}
    for interface, own in _addresses():
        if own in wanted or (own.is_loopback and any(each.is_loopback for each in wanted)):
            return interface
    return None


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield (interface, address)."""
    answer = array.array("B", bytes(_MAX_INTERFACES * _IFREQ_BYTES))
    where, size = answer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        head = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, where))
    (used,) = struct.unpack_from("i", head)
    for at in range(0, used, _IFREQ_BYTES):
        name, addr = struct.unpack_from("16s4x4s", answer, at)
        label = name.rstrip(b"\0").decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(addr)  # eth0:1 is an alias of eth0
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        digits, *_rest, interface = line.split()
        yield interface, ipaddress.IPv6Address(bytes.fromhex(digits))
