"""What the programs of this package share: parser, logging, Redis options, signals, error exit."""

import argparse
import asyncio
import logging
import signal
import sys

from distill_reader.balance.addresses import RedisAddress, redis_address
from distill_reader.errors import DistillError, UsageError
from distill_reader.tokens import read_password

WRONG_ARGUMENTS = 2  # exit code


def make_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of `edl NAME`, which knows --log_level."""
    parser = argparse.ArgumentParser(
        prog=f"edl {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--log_level", type=_level, default="INFO", help="e.g. 20 or INFO (default), DEBUG"
    )
    return parser


def start_logging(args: argparse.Namespace) -> None:
    """Log to stderr, from the level that --log_level names."""
    logging.basicConfig(
        level=args.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def report_error(name: str, error: DistillError | OSError) -> int:
    """Print why `edl NAME` cannot start; return the exit code."""
    sys.stderr.write(f"edl {name}: error: {error}\n")
    return WRONG_ARGUMENTS


def stop_event() -> asyncio.Event:
    """Return an event of the running loop that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def add_redis_arguments(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the options that `parse_redis` reads.

    Args:
        help_text: of --db_endpoints.
    """
    add = parser.add_argument
    add("--db_endpoints", metavar="HOST:PORT", help=help_text)
    add("--db_passwd", metavar="P", help="its password; anybody who lists processes sees it")
    add("--db_passwd_file", metavar="FILE", help="a file that holds its password")
    add("--db_type", default="redis", help="redis")


def parse_redis(args: argparse.Namespace) -> tuple[RedisAddress, ...]:
    """Return the Redis addresses of the arguments; (): none are given.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    if args.db_type != "redis":
        raise UsageError(
            f"--db_type {args.db_type}: expected redis, the only database there is; without a "
            "Redis leave out --db_type and --db_endpoints: a discovery server keeps the registry "
            "itself, and teachers register with it by --discovery HOST:PORT"
        )
    password = read_password(args.db_passwd, args.db_passwd_file)
    texts = [text.strip() for text in (args.db_endpoints or "").split(",") if text.strip()]
    if password and not texts:
        raise UsageError("--db_passwd: is for a Redis; give --db_endpoints HOST:PORT")
    return tuple(redis_address(text, password) for text in texts)


def _level(text: str) -> int | str:
    return int(text) if text.isdigit() else text.upper()
