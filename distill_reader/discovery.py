"""`edl discovery`, `python -m distill_reader.discovery`: assigns teachers to students.

edl discovery --server 127.0.0.1:7001
edl discovery --server 10.0.0.5:7001 --db_endpoints 10.0.0.9:6379 --token_file token
"""

import argparse
import asyncio
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distill_reader.balance.addresses import (
    RedisAddress,
    check_endpoint,
    host_port_of,
)
from distill_reader.balance.registry.memory import MemoryRegistry
from distill_reader.balance.registry.redis_registry import RedisRegistry
from distill_reader.balance.server.demand import DemandPoster
from distill_reader.balance.server.server import DiscoveryServer, DiscoveryServerConfig
from distill_reader.balance.tasks import end_tasks, run
from distill_reader.command_line import (
    add_redis_arguments,
    make_parser,
    parse_redis,
    report_error,
    start_logging,
    stop_event,
)
from distill_reader.errors import DistillError, UsageError
from distill_reader.listening import bind, bracketed, is_loopback, raise_file_limit
from distill_reader.tokens import read_job_token, read_token

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Assign the teachers of a service to its students (DistillReader.set_dynamic_teacher): evenly, and
with as few changes as possible when students or teachers come and go."""

_EPILOG = """\
Without --db_endpoints the registry is in this server's memory. That is enough for one server:
after a restart, teachers and students come back within seconds. With a Redis, any number of
servers share one registry; give students the addresses of all of them.

  teachers   edl serve --register HOST:PORT --service_name NAME, or edl register
  students   DistillReader(...).set_dynamic_teacher(["HOST:PORT"], "NAME", require_max_teacher=4)
  people     http://HOST:PORT/services, /metrics (for Prometheus), /health

The original's students and registrars work with it unchanged. Its students carry no token (allow
them with --insecure_legacy), and its registrars need the Redis.

SIGTERM ends the server; students keep their teachers and connect to another server.
Exit codes: 0 ended by a signal, 1 failed, 2 wrong arguments.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """The parsed arguments."""

    host: str
    port: int
    redis: tuple[RedisAddress, ...]  # (): keep the registry in memory
    server: DiscoveryServerConfig
    job_server: str | None  # None: the demand is not posted
    job_token: Callable[[], str]  # reads it; raises a UsageError where there is none any more
    certificates: str | None  # file by which the job server's is checked; None: well-known ones


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; return the exit code."""
    args = parser().parse_args(argv)
    start_logging(args)
    try:
        config = parse_config(args)
        listener = bind(config.host, config.port, "--server")
    except DistillError as error:
        return report_error("discovery", error)
    raise_file_limit()
    with listener:
        return run(_serve(config, listener))


def parse_config(args: argparse.Namespace) -> DiscoveryConfig:
    """Return the configuration that the arguments describe.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    if args.worker_num < 1:
        raise UsageError(f"--worker_num: must be at least 1, got {args.worker_num}")
    if args.worker_num > 1:
        logger.info("--worker_num %d: one process does all the work", args.worker_num)
    host, port = _address(args.server)
    redis = parse_redis(args)
    token = read_token(args.token_file, os.environ)
    if not token and not args.insecure and not is_loopback(host):
        raise UsageError(
            f"--server {args.server}: other machines can reach this address: set a token "
            "(--token_file or EDL_TEACHER_TOKEN), or allow anybody with --insecure"
        )
    job_server = args.job_server
    if job_server is not None and not job_server.startswith(("http://", "https://")):
        raise UsageError(f"--job_server {job_server}: expected a URL such as http://HOST:8180")
    job_token = functools.partial(read_job_token, args.job_server_token_file, os.environ)
    if job_server is not None:
        job_token()  # else only the log would say that it cannot be read
    return DiscoveryConfig(
        host=host,
        port=port,
        redis=redis,
        server=DiscoveryServerConfig(
            token="" if args.insecure else token, is_open_to_legacy=args.insecure_legacy
        ),
        job_server=job_server,
        job_token=job_token,
        certificates=os.environ.get("SSL_CERT_FILE"),  # as OpenSSL and curl have it
    )


async def _serve(config: DiscoveryConfig, listener: socket.socket) -> int:
    registry = RedisRegistry(config.redis) if config.redis else MemoryRegistry()
    server = DiscoveryServer(registry, config.server)
    tasks = [asyncio.create_task(server.run(listener))]
    if config.job_server is not None:
        poster = DemandPoster(
            server.balancer,
            config.job_server,
            config.job_token,
            certificates=config.certificates,
        )
        tasks.append(asyncio.create_task(poster.run()))
    stopping = stop_event()
    listener.listen()  # now: who reads that the server is ready may connect at once
    host, port = listener.getsockname()[:2]
    where = ", ".join(map(str, config.redis)) or "in memory"
    sys.stdout.write(f"discovery ready on {bracketed(host)}:{port}; registry: {where}\n")
    sys.stdout.flush()
    ended = asyncio.create_task(stopping.wait())
    done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done - {ended}:
        if not task.cancelled() and task.exception() is not None:
            logger.error("a part of the server has failed", exc_info=task.exception())
    await end_tasks(ended, *tasks)
    await registry.close()
    logger.info("ended")
    return 0 if ended in done else 1


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if port == "0" and host:  # any free port
        return host_port_of(check_endpoint(f"{host}:1", "--server"))[0], 0
    return host_port_of(check_endpoint(text, "--server"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = make_parser("discovery", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add(
        "--server",
        default="127.0.0.1:7001",
        metavar="HOST:PORT",
        help="where to listen; default 127.0.0.1:7001",
    )
    add_redis_arguments(
        parser, "the Redis; several addresses, with commas, reach the same one; default: none"
    )
    add("--worker_num", type=int, default=1, help="accepted as by the original, without effect")
    add(
        "--job_server",
        metavar="URL",
        help="post the students' demand to this job server, which runs teachers on demand",
    )
    add("--job_server_token_file", metavar="FILE", help="its token; default: EDL_TOKEN")
    add(
        "--token_file",
        metavar="FILE",
        help="the token that students and teachers must show; default: EDL_TEACHER_TOKEN",
    )
    add("--insecure_legacy", action="store_true", help="accept the original's students without one")
    add("--insecure", action="store_true", help="accept anybody without one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
