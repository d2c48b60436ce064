"""`edl discovery`, `python -m distill_reader.discovery`: tells students which teachers to use.

edl discovery --server 127.0.0.1:7001
edl discovery --server 10.0.0.5:7001 --db_endpoints 10.0.0.9:6379 --token_file token
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from distill_reader.balance.addresses import (
    RedisAddress,
    check_endpoint,
    host_port_of,
    redis_address,
)
from distill_reader.balance.registry.memory import MemoryRegistry
from distill_reader.balance.registry.redis_registry import RedisRegistry
from distill_reader.balance.server.demand import DemandPoster
from distill_reader.balance.server.server import DiscoveryServer, DiscoveryServerConfig
from distill_reader.balance.tasks import end_tasks
from distill_reader.errors import DistillError, UsageError
from distill_reader.listening import bind, bracketed, is_loopback, raise_file_limit
from distill_reader.tokens import read_job_token, read_password, read_token

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Tell students (DistillReader.set_dynamic_teacher) which teachers of their service to use, evenly and
with as few changes as can be, as both come and go."""

_EPILOG = """\
Without --db_endpoints this server keeps who is there in its memory: enough for one server, and when
it is started again, teachers and students are back within seconds. With a Redis, any number of
servers tell the same; give students all of them.

  teachers   edl serve --register HOST:PORT --service_name NAME, or edl register
  students   DistillReader(...).set_dynamic_teacher(["HOST:PORT"], "NAME", require_max_teacher=4)
  people     http://HOST:PORT/services, /metrics (for Prometheus), /health

Students and registrars of the original work with it unchanged: the former carry no token
(--insecure_legacy), the latter need the Redis.

SIGTERM: ends; students keep their teachers, and go to another server.
Exit codes: 0 ended by a signal, 1 failed, 2 wrong arguments.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """What the arguments say."""

    host: str
    port: int
    redis: tuple[RedisAddress, ...]  # (): the registry is in memory
    server: DiscoveryServerConfig
    job_server: str | None  # None: nobody is told of the demand
    job_token: str


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = parse_config(args)
        listener = bind(config.host, config.port, "--server")
    except DistillError as error:
        sys.stderr.write(f"edl discovery: error: {error}\n")
        return 2
    raise_file_limit()
    with listener:
        return asyncio.run(_serve(config, listener))


def parse_config(args: argparse.Namespace) -> DiscoveryConfig:
    """Return what the arguments ask for.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    if args.db_type != "redis":
        raise UsageError(f"--db_type {args.db_type}: expected redis, the only one there is")
    if args.worker_num < 1:
        raise UsageError(f"--worker_num: must be at least 1, got {args.worker_num}")
    if args.worker_num > 1:
        logger.info("--worker_num %d: one process does all the work", args.worker_num)
    host, port = _address(args.server)
    password = read_password(args.db_passwd, args.db_passwd_file)
    texts = [text.strip() for text in (args.db_endpoints or "").split(",") if text.strip()]
    if password and not texts:
        raise UsageError("--db_passwd: is for a Redis; give --db_endpoints HOST:PORT")
    token = read_token(args.token_file, os.environ)
    if not token and not args.insecure and not is_loopback(host):
        raise UsageError(
            f"--server {args.server}: others than this machine can reach it, so it wants a token "
            "(--token_file or EDL_TEACHER_TOKEN), or --insecure"
        )
    job_server = args.job_server
    if job_server is not None and not job_server.startswith(("http://", "https://")):
        raise UsageError(f"--job_server {job_server}: expected a URL such as http://HOST:8180")
    return DiscoveryConfig(
        host=host,
        port=port,
        redis=tuple(redis_address(text, password) for text in texts),
        server=DiscoveryServerConfig(
            token="" if args.insecure else token, is_open_to_legacy=args.insecure_legacy
        ),
        job_server=job_server,
        job_token=read_job_token(args.job_server_token_file, os.environ) if job_server else "",
    )


async def _serve(config: DiscoveryConfig, listener: socket.socket) -> int:
    registry = RedisRegistry(config.redis) if config.redis else MemoryRegistry()
    server = DiscoveryServer(registry, config.server)
    tasks = [asyncio.create_task(server.run(listener))]
    if config.job_server is not None:
        poster = DemandPoster(server.balancer, config.job_server, config.job_token)
        tasks.append(asyncio.create_task(poster.run()))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    host, port = listener.getsockname()[:2]
    where = ", ".join(map(str, config.redis)) or "in memory"
    sys.stdout.write(f"discovery ready on {bracketed(host)}:{port}; registry: {where}\n")
    sys.stdout.flush()
    ended = asyncio.create_task(stopping.wait())
    done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done - {ended}:
        if not task.cancelled() and task.exception() is not None:
            logger.error("a part of the server has ended", exc_info=task.exception())
    await end_tasks(ended, *tasks)
    await registry.close()
    logger.info("ended")
    return 0 if ended in done else 1


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if port == "0" and host:  # any that is free
        return host_port_of(check_endpoint(f"{host}:1", "--server"))[0], 0
    return host_port_of(check_endpoint(text, "--server"))


def _level(text: str) -> int | str:
    return int(text) if text.isdigit() else text.upper()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl discovery",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--server",
        default="127.0.0.1:7001",
        metavar="HOST:PORT",
        help="where to listen; default 127.0.0.1:7001",
    )
    add(
        "--db_endpoints",
        metavar="HOST:PORT",
        help="the Redis; several, with commas, are ways to the same one; default: none",
    )
    add("--db_passwd", metavar="P", help="its password; seen by who may list processes")
    add("--db_passwd_file", metavar="FILE", help="a file with it")
    add("--db_type", default="redis", help="redis")
    add("--worker_num", type=int, default=1, help="taken, as by the original, and not needed")
    add(
        "--job_server",
        metavar="URL",
        help="tell this job server how the students are fed, for teachers on demand",
    )
    add("--job_server_token_file", metavar="FILE", help="its token; default: EDL_TOKEN")
    add(
        "--token_file",
        metavar="FILE",
        help="the token that students and teachers must show; default: EDL_TEACHER_TOKEN",
    )
    add("--insecure_legacy", action="store_true", help="take the original's students without one")
    add("--insecure", action="store_true", help="take anybody without one")
    add("--log_level", type=_level, default="INFO", help="e.g. 20 or INFO (default), DEBUG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
