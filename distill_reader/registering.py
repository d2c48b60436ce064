"""The options by which `edl serve` registers itself with discovery."""

import argparse
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass

from distill_reader.balance.addresses import (
    RegistryAddress,
    check_endpoint,
    check_name,
    registry_addresses,
)
from distill_reader.balance.registry.redis_registry import require_packages
from distill_reader.balance.registry.registrar import RegistrarConfig, RegistrarThread
from distill_reader.errors import UsageError
from distill_reader.listening import bracketed, is_loopback
from distill_reader.tokens import read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterConfig:
    """Where a teacher registers, and under which name."""

    addresses: tuple[RegistryAddress, ...]
    service: str
    host: str | None  # its host for students; None: the address it listens on, or this host's
    token: str

    def registrar(self, bound: str, port: int, is_ready: Callable[[], bool]) -> RegistrarThread:
        """Return a registrar for a server that listens on `bound` and `port`.

        Raises:
            UsageError: the advertised endpoint is invalid, or no other host can reach it.
        """
        host = bracketed(bound) if self.host is None else _written(self.host)
        others = [each for each in self.addresses if not is_loopback(each.host_port[0])]
        if self.host is None and is_loopback(bound) and others:
            raise UsageError(
                f"--register: {others[0]} is for other hosts, too, and they cannot reach {bound}, "
                "where this teacher listens: say --bind ADDRESS, or --advertise 127.0.0.1 if the "
                "registry and all students are on this host"
            )
        config = RegistrarConfig(
            addresses=self.addresses,
            service=self.service,
            server=check_endpoint(f"{host}:{port}", "--advertise"),
            # It asks its students for this one, whatever the file has by now.
            read_token=lambda: self.token,
        )
        return RegistrarThread(config, is_ready)


def _written(host: str) -> str:
    """Return a host as it is written before a port. Raises: UsageError: it has a port already."""
    if host.endswith("]") or ":" not in host:
        return host
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise UsageError(
            f"--advertise {host}: expected a host alone; where students reach this teacher by "
            "another port than --port, register it by `edl register --server HOST:PORT`"
        ) from None
    return bracketed(host)


def parse_register(args: argparse.Namespace) -> RegisterConfig | None:
    """Return where to register; None: the arguments name no registry.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    if args.register is None:
        for flag, value in (("--service_name", args.service_name), ("--advertise", args.advertise)):
            if value is not None:
                raise UsageError(f"{flag}: is for --register HOST:PORT, which is not given")
        return None
    if args.service_name is None:
        raise UsageError("--register: give --service_name NAME, which students ask for")
    addresses = registry_addresses(args.register, "--register")
    require_packages(addresses)
    return RegisterConfig(
        addresses=addresses,
        service=check_name(args.service_name, "--service_name"),
        host=args.advertise,
        token=read_token(args.token_file, os.environ),
    )


def add_register_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `parse_register` reads."""
    add = parser.add_argument
    add(
        "--register",
        metavar="HOST:PORT",
        help="register with these discovery servers (with commas), or with redis://HOST:PORT",
    )
    add("--service_name", metavar="NAME", help="the service that it is a teacher of")
    add(
        "--advertise",
        metavar="HOST",
        help="its host for students; default: --bind, or this host as discovery sees it",
    )
