"""The job client's command line: one client per node.

python -m job_client [flags] SCRIPT [ARGS...]
python -m job_client [flags] --jobs_dir DIR
"""

import argparse
import logging
import logging.handlers
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from job_client import ports
from job_client.agent import Agent, install_signals
from job_client.client_dir import ClientDir
from job_client.config import KEEP_FOLDERS, ClientConfig
from job_client.devices.gpus import find_inventory
from job_client.errors import JobClientError, SetupError
from job_client.preemption import check as check_notice
from job_server.api.api_client import ApiClient, server_url
from job_server.api.command_line import (
    DEFAULT_SERVER,
    OptionParser,
    read_token,
    token_in,
    token_now,
    utf8_path,
)
from job_server.api.errors import ConfigError
from job_server.api.local_servers import find_server
from job_server.api.wire import STOP_AFTER_RANGE_S, WireError, check_id
from pod_runtime import env, processes

logger = logging.getLogger("job_client")

MAX_CPU_SLOTS = 4096


def parse_args(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> ClientConfig:
    """Return the configuration.

    Raises:
        SetupError: a value cannot be right; names it and the remedy.
        SystemExit: 2, by argparse; or 0 for --help.
    """
    args = _parser().parse_args(argv)
    if (args.script is None) == (args.jobs_dir is None):
        raise SetupError("give either a training script or --jobs_dir DIR, and not both")
    if args.package_sh and args.jobs_dir:
        raise SetupError("--package_sh: with --jobs_dir each job has its own package.sh")
    for flag, value in (("--node_id", args.node_id), ("PADDLE_JOB_ID", _job_id(environ))):
        if value is not None:
            _check(flag, value)
    package_sh = _file("--package_sh", cwd, args.package_sh)
    if args.script is not None and args.script.endswith(".py"):
        call = f'python -m pod_runtime.launch "$(dirname "$0")/{Path(args.script).name}" "$@"'
        raise SetupError(
            f"training script: {args.script}: expected a shell script, got a Python program; write "
            f"a train.sh beside it that says `{call}`. `edl run` takes the program itself"
        )
    if args.script is not None and package_sh is None:
        _file("training script", cwd, args.script)
    url = _server_url(args.job_server or environ.get("PADDLE_JOBSERVER"))
    named = args.token_file or environ.get("EDL_TOKEN_FILE")
    if not named and not environ.get("EDL_TOKEN"):
        server = find_server(url, environ)  # of this user on this machine
        named = None if server is None else server.token_file
    token_file = cwd / named if named else None
    try:
        token = token_in(token_file, "--token_file") if token_file else read_token(None, environ)
        log_dir = utf8_path("--log_dir", cwd / args.log_dir)
        pod_path = utf8_path("--pod_path", cwd / args.pod_path)
    except ConfigError as error:
        raise SetupError(str(error)) from None
    return ClientConfig(
        cwd=cwd,
        log_dir=log_dir,
        log_level=args.log_level,
        pod_path=pod_path,
        keep_folders=_keep_folders(args.keep_folders),
        server_url=url,
        environ=_of_pods(environ, cwd),
        script=args.script,
        script_args=tuple(args.args),
        package_sh=package_sh,
        jobs_dir=_folder("--jobs_dir", cwd, args.jobs_dir),
        job_id=_job_id(environ),
        node_id=args.node_id,
        addr=args.addr,
        port_range=None if args.port_range == "auto" else ports.parse_range(args.port_range),
        cpu_slots=_cpu_slots(args.cpu_slots),
        visible_gpus=environ.get("CUDA_VISIBLE_DEVICES"),
        grace_s=_grace(args.grace_s),
        stop_after_s=_stop_after(args.on_server_loss),
        keep_pods=args.keep_pods,
        preemption_notice=args.preemption_notice,
        token=token,
        token_file=token_file,
    )


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m job_client",
        description="Run this node's pods as the job server wants them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--log_level", type=int, default=20, help="as Python's logging: 10 debug, 20 info")
    add("--log_dir", default="pod_log", help="logs, and what a restarted client needs")
    add("--package_sh", help="makes pod_path/ID when run with `-pod_id ID`; default: none")
    add("--pod_path", default="./edl_pods", help="where each pod gets a folder, named by its id")
    add(
        "--keep_folders",
        type=int,
        default=KEEP_FOLDERS,
        metavar="N",
        help=f"so many pods that are over stay in LOG_DIR, with logs ({KEEP_FOLDERS}); 0: all",
    )
    add("--jobs_dir", help="run jobs by name: its subfolders with a train.sh")
    add("--cpu_slots", type=int, help="CPU slots, also where there are GPUs")
    low, high = ports.blocks(ports.ephemeral_range())[0]
    add(
        "--port_range",
        default=f"{low}-{high}",
        help="LOW-HIGH for the trainers of this node, or auto: the next free block; "
        "two clients on one host need different ones",
    )
    add("--grace_s", type=float, help="between SIGTERM and SIGKILL; default: as the job says")
    add(
        "--on_server_loss",
        default="continue",
        help="continue, or stop_after=SECONDS: stop the pods when the server is away so long",
    )
    add("--keep_pods", action="store_true", help="SIGTERM leaves the pods to the next client")
    add(
        "--preemption_notice",
        metavar="COMMAND",
        help="asked every 5 s: exit code 0 says that this machine is about to be taken away, so "
        "its jobs go on elsewhere; docs/supervision.md has examples",
    )
    add("--node_id", help="name of this node; default: the host's, with a suffix")
    add("--addr", help="address that other nodes reach this one by; default: found out")
    add("--token_file", help="file with the server's token; default: EDL_TOKEN_FILE, EDL_TOKEN")
    add("--job_server", help="host:port or URL; default: PADDLE_JOBSERVER, " + DEFAULT_SERVER)
    add("script", nargs="?", help="training script, run by bash in the pod's folder")
    add("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _of_pods(environ: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Return what pods start from: in other folders, where a relative path leads elsewhere.

    A script finds `python` also where nobody has activated our virtual environment: in a service of
    systemd, or a job of cron.
    """
    path = environ.get("PATH") or os.defpath
    own = {**environ, "PATH": os.pathsep.join((path, str(Path(sys.executable).parent)))}
    if certificates := environ.get("SSL_CERT_FILE"):  # by which launchers, too, know their server
        own["SSL_CERT_FILE"] = str(cwd / certificates)
    return own


def _server_url(text: str | None) -> str:
    try:
        return server_url(text or DEFAULT_SERVER)
    except ValueError as error:
        raise SetupError(f"--job_server: {error}") from None


def _keep_folders(number: int) -> int:
    if number < 0:
        raise SetupError(f"--keep_folders: expected at least 0, got {number}")
    return number


def _job_id(environ: Mapping[str, str]) -> str | None:
    return environ.get("PADDLE_JOB_ID") or None


def _check(flag: str, value: str) -> None:
    try:
        check_id(flag, value)
    except WireError as error:
        raise SetupError(str(error)) from None


def _file(flag: str, cwd: Path, value: str | None) -> Path | None:
    return _existing(flag, cwd, value, "file", Path.is_file)


def _folder(flag: str, cwd: Path, value: str | None) -> Path | None:
    return _existing(flag, cwd, value, "folder", Path.is_dir)


def _existing(
    flag: str, cwd: Path, value: str | None, what: str, is_one: Callable[[Path], bool]
) -> Path | None:
    if value is None:
        return None
    try:
        why = "" if is_one(cwd / value) else f"no such {what}"
    except OSError as error:  # in a folder that this user may not enter, say
        why = str(error.strerror)
    if why:
        raise SetupError(f"{flag}: {value}: {why}")
    return cwd / value


def _cpu_slots(value: int | None) -> int | None:
    if value is not None and not 1 <= value <= MAX_CPU_SLOTS:
        raise SetupError(f"--cpu_slots: expected 1 to {MAX_CPU_SLOTS}, got {value}")
    return value


def _grace(value: float | None) -> float | None:
    if value is not None and not 0 <= value <= 3600:
        raise SetupError(f"--grace_s: expected 0 to 3600 seconds, got {value:g}")
    return value


def _stop_after(text: str) -> float | None:
    if text == "continue":
        return None
    match = re.fullmatch(r"stop_after=(\d+(?:\.\d+)?)", text)
    low, high = STOP_AFTER_RANGE_S
    if not match or not low <= float(match[1]) <= high:
        raise SetupError(
            "--on_server_loss: expected continue or stop_after=SECONDS, "
            f"{low:g} to {high:.0f}, got {text!r}"
        )
    return float(match[1])


def _configure_logging(config: ClientConfig) -> None:
    form = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = logging.StreamHandler()
    file = logging.handlers.RotatingFileHandler(
        config.log_dir / "job_client.log", maxBytes=10_000_000, backupCount=3
    )
    root = logging.getLogger()
    root.setLevel(config.log_level)
    for handler in (console, file):
        handler.setFormatter(form)
        root.addHandler(handler)
    logging.getLogger("urllib3").setLevel(logging.WARNING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job client; return its exit code: 2 for a wrong command line."""
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv, os.environ, Path.cwd())
        client_dir = ClientDir(config.log_dir)
    except SetupError as error:
        print(f"job_client: {error}", file=sys.stderr)
        return 2
    _configure_logging(config)
    try:
        if config.preemption_notice is not None:
            check_notice(config.preemption_notice)
        inventory = find_inventory(
            config.cpu_slots, config.visible_gpus, partial(is_ours, client_dir.marker)
        )
        inventory.watch()
        agent = Agent(config, client_dir, inventory, partial(_connect, config))
        install_signals(agent, keep_pods=config.keep_pods)
        return agent.run()
    except SetupError as error:
        logger.error("%s", error)
        return 2
    except JobClientError as error:
        logger.error("%s", error)
        return 1
    finally:
        client_dir.close()


def _connect(config: ClientConfig) -> ApiClient:
    return ApiClient(config.server_url, token_now(config.token_file, config.token))


def is_ours(marker: str, pid: int) -> bool:
    """Return whether a process, or one that it descends from, carries our marker.

    A trainer that writes over its own environment (to set its title) is known by its launcher.
    """
    while pid > 1:
        if processes.environment(pid).get(env.RUN_MARKER) == marker:
            return True
        found = processes.read(pid)
        pid = 0 if found is None else found.ppid
    return False


if __name__ == "__main__":
    sys.exit(main())
