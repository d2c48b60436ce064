"""`edl register`, `python -m distill_reader.register`: keeps a teacher registered while it answers.

edl register --discovery 10.0.0.5:7001 --service_name resnet --server 10.0.0.7:9292
edl register --db_endpoints 10.0.0.9:6379 --service_name resnet --server 10.0.0.7:9292
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from distill_reader.balance.addresses import (
    RegistryAddress,
    check_endpoint,
    check_name,
    redis_address,
    registry_addresses,
)
from distill_reader.balance.registry.redis_registry import require_packages
from distill_reader.balance.registry.registrar import (
    LEASE_S,
    PortProbe,
    RegistrarConfig,
    register_until,
)
from distill_reader.balance.wire.messages import LEASE_S as LEASE_BOUNDS_S
from distill_reader.balance.wire.messages import MAX_INFO
from distill_reader.errors import DistillError, UsageError
from distill_reader.tokens import read_password, read_token

_DESCRIPTION = """\
Keep a teacher registered with discovery for as long as its port answers: any server that speaks a
protocol of DistillReader's (Triton, KServe, Paddle Serving). `edl serve --register` does the same
by itself."""

_EPILOG = """\
A teacher whose port is refused is withdrawn at once; one that is silent, or says by HTTP that it is
not ready (/v2/health/ready), after some seconds. It is registered again when it answers. This
program waits for the teacher, and for the registry to come back, for as long as it takes.

SIGTERM: withdraws the teacher and ends with 0. Exit codes: 0 ended by a signal, 2 wrong arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Work until a signal comes; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = parse_config(args)
    except DistillError as error:
        sys.stderr.write(f"edl register: error: {error}\n")
        return 2
    asyncio.run(_register(config))
    return 0


def parse_config(args: argparse.Namespace) -> RegistrarConfig:
    """Return what the arguments ask for.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    if args.db_type != "redis":
        raise UsageError(f"--db_type {args.db_type}: expected redis, the only one there is")
    if (args.discovery is None) == (args.db_endpoints is None):
        raise UsageError("give one of --discovery HOST:PORT and --db_endpoints HOST:PORT")
    addresses = _addresses(args)
    require_packages(addresses)
    least, most = LEASE_BOUNDS_S
    if not least <= args.lease_s <= most:
        raise UsageError(f"--lease_s: expected {least:g} to {most:g} seconds, got {args.lease_s:g}")
    if len(args.info) > MAX_INFO:
        raise UsageError(f"--info: expected up to {MAX_INFO} characters, got {len(args.info)}")
    return RegistrarConfig(
        addresses=addresses,
        service=check_name(args.service_name, "--service_name"),
        server=check_endpoint(args.server, "--server"),
        token=args.service_token or read_token(args.token_file, os.environ),
        lease_s=args.lease_s,
        info=args.info,
    )


def _addresses(args: argparse.Namespace) -> tuple[RegistryAddress, ...]:
    if args.discovery is not None:
        return registry_addresses(args.discovery, "--discovery")
    password = read_password(args.db_passwd, args.db_passwd_file)
    texts = [text.strip() for text in args.db_endpoints.split(",")]
    return tuple(redis_address(text, password) for text in texts)


async def _register(config: RegistrarConfig) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await register_until(config, stopping, PortProbe(config.server))


def _level(text: str) -> int | str:
    return int(text) if text.isdigit() else text.upper()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl register",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--discovery",
        metavar="HOST:PORT",
        help="the discovery servers, with commas: any one that answers is told",
    )
    add("--db_endpoints", metavar="HOST:PORT", help="or the Redis that they use")
    add("--db_passwd", metavar="P", help="its password; seen by who may list processes")
    add("--db_passwd_file", metavar="FILE", help="a file with it")
    add("--db_type", default="redis", help="redis")
    add("--service_name", required=True, metavar="NAME", help="what students ask for")
    add(
        "--server",
        required=True,
        metavar="HOST:PORT",
        help="the teacher, as students shall call it; also SCHEME://HOST:PORT/MODEL",
    )
    add("--service_token", metavar="T", help="what the discovery server wants to see")
    add("--token_file", metavar="FILE", help="a file with it; default: EDL_TEACHER_TOKEN")
    add(
        "--lease_s",
        type=float,
        default=LEASE_S,
        help=f"off the lists so long after this program's death; default {LEASE_S:g}",
    )
    add("--info", default="", help="a text that is kept with it, for people")
    add("--log_level", type=_level, default="INFO", help="e.g. 20 or INFO (default), DEBUG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
