"""Run the job server (`python -m job_server`)."""

if __name__ == "__main__":  # before anything is imported that has a lock or a socket
    from gevent import monkey

    monkey.patch_all()

import logging
import os
import sys
from pathlib import Path

from job_server.api.codec import WireError
from job_server.api.command_line import version
from job_server.api.errors import ConfigError, Conflict
from job_server.api.local_servers import listed
from job_server.api.wire import JobState
from job_server.cluster.change_script import parse_script, timeline
from job_server.server.app import create_app
from job_server.server.config import ServerConfig, read_config
from job_server.server.guard import Guard
from job_server.server.hearing import OwnHeartbeat
from job_server.server.http_server import HttpServer
from job_server.server.service import JobService
from job_server.server.store import Store

logger = logging.getLogger("job_server")


def main(argv: list[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit code (2: wrong command line)."""
    try:
        config = read_config(sys.argv[1:] if argv is None else argv, os.environ)
        if config.job is not None:
            parse_script(config.job.script, config.job)
        if config.dry_run:
            return _dry_run(config)
        return _serve(config)
    except (ConfigError, WireError) as error:
        print(f"python -m job_server: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 1


def _dry_run(config: ServerConfig) -> int:
    if config.job is None:
        raise ConfigError("--dry_run: there is no job to show (--no_job); leave one of them out")
    print("\n".join(timeline(config.job.script, config.job)))
    return 0


def _serve(config: ServerConfig) -> int:
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    store = Store(config.db)
    service = JobService(
        store,
        heartbeat_s=config.heartbeat_s,
        max_watchers=config.max_watchers,
        sharing=config.sharing,
    )
    try:
        guard = Guard(token=config.token, insecure_legacy=config.insecure_legacy)
        app = create_app(service, guard)
        server = HttpServer(
            app, bind=config.bind, port=config.port, max_watchers=config.max_watchers
        )
        service.start()
        _add_default_job(service, config)
        logger.info(
            "version %s, server %s: %s/ with database %s",
            version(),
            service.server_id,
            _url(config.bind, server.port),
            config.db,
        )
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.bind, config.bind)
        url, engine = _url(here, server.port), service.engine
        OwnHeartbeat(engine.registry.hearing, url, config.token, engine.lock).start()
        with listed(
            url,
            token_file=config.token_file,
            folder=Path(config.db).parent,
            environ=os.environ,
        ):
            server.run(on_stop=service.close)
    finally:
        service.close()
    logger.info("ended")
    return 0


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _add_default_job(service: JobService, config: ServerConfig) -> None:
    """Submit the job of the command line, unless the database has it already."""
    job = config.job
    if job is None:
        return
    try:
        created = service.submit(job, legacy_nodes=config.legacy_nodes).status == 201
    except Conflict as error:
        if job.job_id not in service.job_ids():  # it is in the database, but cannot be read
            logger.error("%s", error)
            return
        logger.warning(
            "job %s: goes on as the database %s has it, not as the command line says; "
            "`edl delete %s` first, or another --db, starts it from the beginning",
            job.job_id,
            config.db,
            job.job_id,
        )
        return
    if created:
        return
    state = next((s.state for s in service.statuses() if s.job_id == job.job_id), None)
    if state is not None and (state.ended or state is JobState.STOPPING):
        logger.warning(
            "job %s: %s; `edl delete %s` first, or another --db, starts it from the beginning",
            job.job_id,
            f"has ended ({state.value}) and stays so" if state.ended else "is being stopped",
            job.job_id,
        )


if __name__ == "__main__":
    sys.exit(main())
