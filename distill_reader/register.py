"""`edl register`, `python -m distill_reader.register`: keeps a teacher registered while it is up.

edl register --discovery 10.0.0.5:7001 --service_name resnet --server 10.0.0.7:9292
edl register --db_endpoints 10.0.0.9:6379 --service_name resnet --server 10.0.0.7:9292
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from distill_reader.balance.addresses import (
    RegistryAddress,
    check_endpoint,
    check_name,
    registry_addresses,
)
from distill_reader.balance.registry.redis_registry import require_packages
from distill_reader.balance.registry.registrar import (
    LEASE_S,
    PortProbe,
    RegistrarConfig,
    register_until,
)
from distill_reader.balance.tasks import run
from distill_reader.balance.wire.messages import LEASE_S as LEASE_BOUNDS_S
from distill_reader.balance.wire.messages import MAX_INFO
from distill_reader.command_line import (
    add_redis_arguments,
    make_parser,
    parse_redis,
    report_error,
    start_logging,
    stop_event,
)
from distill_reader.errors import DistillError, UsageError
from distill_reader.tokens import read_token

_DESCRIPTION = """\
Keep a teacher registered with discovery for as long as its port answers: any server that speaks a
protocol of DistillReader's (Triton, KServe, Paddle Serving). `edl serve --register` does the same
by itself."""

_EPILOG = """\
A teacher that refuses connections is withdrawn at once. A teacher that does not answer, or reports
by HTTP that it is not ready (/v2/health/ready), is withdrawn after some seconds. It is registered
again when it answers. This program waits for the teacher and for the registry without a time limit.

SIGTERM withdraws the teacher and ends with 0. Exit codes: 0 ended by a signal, 2 wrong arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal comes; return the exit code."""
    args = parser().parse_args(argv)
    start_logging(args)
    try:
        config = parse_config(args)
        probe = PortProbe(config.server, ca_file=args.ca_file)
    except DistillError as error:
        return report_error("register", error)
    run(_register(config, probe))
    return 0


def parse_config(args: argparse.Namespace) -> RegistrarConfig:
    """Return the configuration that the arguments describe.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    redis = parse_redis(args)
    if (args.discovery is None) == (args.db_endpoints is None):
        raise UsageError("give one of --discovery HOST:PORT and --db_endpoints HOST:PORT")
    addresses: tuple[RegistryAddress, ...] = redis
    if args.discovery is not None:
        addresses = registry_addresses(args.discovery, "--discovery")
    require_packages(addresses)
    least, most = LEASE_BOUNDS_S
    if not least <= args.lease_s <= most:
        raise UsageError(f"--lease_s: expected {least:g} to {most:g} seconds, got {args.lease_s:g}")
    read: Callable[[], str] = partial(read_token, args.token_file, os.environ)
    if args.service_token:
        read = partial(str, args.service_token)
    read()  # else only the log would say that it cannot be read
    if len(args.info) > MAX_INFO:
        raise UsageError(f"--info: expected up to {MAX_INFO} characters, got {len(args.info)}")
    return RegistrarConfig(
        addresses=addresses,
        service=check_name(args.service_name, "--service_name"),
        server=check_endpoint(args.server, "--server"),
        read_token=read,
        lease_s=args.lease_s,
        info=args.info,
    )


async def _register(config: RegistrarConfig, probe: PortProbe) -> None:
    await register_until(config, stop_event(), probe)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = make_parser("register", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add(
        "--discovery",
        metavar="HOST:PORT",
        help="the discovery servers, with commas; the first that answers is used",
    )
    add_redis_arguments(parser, "or the Redis that they use")
    add("--service_name", required=True, metavar="NAME", help="the service that students ask for")
    add(
        "--server",
        required=True,
        metavar="HOST:PORT",
        help="the teacher's address for students; also SCHEME://HOST:PORT/MODEL, and behind an "
        "ingress https://HOST:PORT/PATH/MODEL",
    )
    add(
        "--ca_file",
        metavar="FILE",
        help="certificates in PEM that the teacher's is checked against, where it speaks TLS; "
        "default: the system's",
    )
    add("--service_token", metavar="T", help="the token of the discovery server")
    add("--token_file", metavar="FILE", help="a file that holds it; default: EDL_TEACHER_TOKEN")
    add(
        "--lease_s",
        type=float,
        default=LEASE_S,
        help="seconds until the teacher is off the lists if this program dies; "
        f"default {LEASE_S:g}",
    )
    add("--info", default="", help="a text to store with it, for people")
    return parser


if __name__ == "__main__":
    sys.exit(main())
