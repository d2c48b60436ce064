"""The server's command line, checked whole before anything starts."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from job_server.api.addresses import is_loopback
from job_server.api.codec import WireError
from job_server.api.command_line import (
    DEFAULT_PORT,
    OptionParser,
    read_script_file,
    read_token,
    utf8_path,
)
from job_server.api.errors import ConfigError
from job_server.api.wire import (
    USUAL_SPARES,
    JobSpec,
    Node,
    ScriptKind,
    ScriptSpec,
    Slot,
    SlotKind,
    check_range,
)

LEGACY_PORT_LOW = 20000  # below the ephemeral ports, which begin at 32768
LEGACY_PORTS_PER_SLOT = 20  # a change may come before the sockets of the last one are gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    bind: str
    port: int
    token: str | None  # None: there is none, and the server is on loopback
    token_file: Path | None  # None: there is no token, or it came without a file
    insecure_legacy: bool
    db: str
    heartbeat_s: float
    max_watchers: int
    log_level: int
    dry_run: bool
    job: JobSpec | None  # None: --no_job
    legacy_nodes: tuple[Node, ...]
    sharing: str


def read_config(argv: list[str], environ: Mapping[str, str]) -> ServerConfig:
    """Return the checked configuration.

    Raises:
        ConfigError: a value is wrong; the text names the flag and the remedy.
        SystemExit: --help, or flags that argparse refuses (code 2).
    """
    args = build_parser().parse_args(argv)
    token = read_token(args.token_file, environ, private=True)
    token_file = args.token_file or environ.get("EDL_TOKEN_FILE")
    if args.db != ":memory:":
        utf8_path("--db", Path(args.db))
    if not args.bind:
        raise ConfigError("--bind: expected an address, got an empty one")
    if token is None and not is_loopback(args.bind):
        raise ConfigError(
            f"--bind: {args.bind} can be reached from other machines, which needs a token; "
            "give --token_file FILE or EDL_TOKEN, or bind to 127.0.0.1"
        )
    try:
        check_range("--server_port", args.server_port, 0, 65535)
        check_range("--heartbeat_s", args.heartbeat_s, 0.1, 3600)
        check_range("--max_watchers", args.max_watchers, 1, 20000)
        check_range("--log_level", args.log_level, 0, 50)
        job = None if args.no_job else _job(args, environ)
        legacy_nodes = () if job is None else _legacy_nodes(args, job.job_id)
    except WireError as error:
        raise ConfigError(str(error)) from None
    return ServerConfig(
        bind=args.bind,
        port=args.server_port,
        token=token,
        token_file=Path(token_file) if token_file else None,
        insecure_legacy=args.insecure_legacy,
        db=args.db,
        heartbeat_s=args.heartbeat_s,
        max_watchers=args.max_watchers,
        log_level=args.log_level,
        dry_run=args.dry_run,
        job=job,
        legacy_nodes=legacy_nodes,
        sharing=args.sharing,
    )


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m job_server",
        description="Decide which pods of training jobs run, and change that over time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--node_ips", default="127.0.0.1", metavar="IP[,IP]", help="nodes of the default job")
    add("--gpu_num_of_node", type=int, default=8, help="slots per node, until a client says")
    add("--pod_num_of_node", type=int, default=1, help="pods per node")
    add("--time_interval_to_change", type=float, default=900, metavar="S", help="between changes")
    add("--del_pods_one_step", type=int, default=1, help="pods that one change removes")
    add("--add_pods_one_step", type=int, default=1, help="pods that the next change adds")
    add("--server_port", type=int, default=DEFAULT_PORT, help="0: any free one")
    add("--bind", default="127.0.0.1", help="any other address needs a token")
    add("--token_file", help="holds the token; else EDL_TOKEN_FILE, EDL_TOKEN")
    add("--insecure_legacy", action="store_true", help="the original's two routes need no token")
    add("--db", default="./edl_job_server.sqlite", metavar="FILE", help="or :memory:")
    add("--job_id", help="of the default job; else PADDLE_JOB_ID, else default_job")
    add("--no_job", action="store_true", help="start without a default job")
    add(
        "--change_script",
        default="alternate",
        metavar="alternate|none|walk|FILE.yaml|FILE.csv",
        help="which pods come and go, and when",
    )
    add("--walk_seed", type=int, default=0, help="of --change_script walk")
    add("--min_pods", type=int, default=1, help="fewest pods of the default job")
    add("--max_pods", type=int, help="most pods; else all of the nodes'")
    add("--dry_run", action="store_true", help="print what the change script does, and end")
    add("--start_timeout_s", type=float, default=60, help="wait so long for all nodes")
    add("--heartbeat_s", type=float, default=1, help="four silent ones: a node is lost")
    add("--prepare_timeout_s", type=float, default=120, help="else a change is abandoned")
    add(
        "--overlap",
        choices=("on", "off", "join", "auto"),
        default="auto",
        help="whether the next trainers are made ready beside those that train; join: only new "
        "ones, the others stay; auto: on where a GPU has room for both, else join",
    )
    add(
        "--spares",
        type=int,
        default=USUAL_SPARES,
        help="warm trainer processes per pod (1), for a quick recovery; 150 MB each",
    )
    add(
        "--standby",
        type=int,
        default=0,
        help="1: a second set of trainers for crashes; 2: and lost pods",
    )
    add("--policy", choices=("fixed_global", "linear"), default="fixed_global", help="of the batch")
    add(
        "--sharing",
        choices=("goodput", "fulfilment"),
        default="goodput",
        help="how shared jobs share the nodes: who ends soonest by a pod more, or equally",
    )
    add("--log_level", type=int, default=20, help="10 debug, 20 info, 30 warnings, 40 errors")
    add("--max_watchers", type=int, default=1500, help="requests that may wait for news at once")
    return parser


def _job(args: argparse.Namespace, environ: Mapping[str, str]) -> JobSpec:
    """Return the default job, its change script checked by the caller's submit()."""
    nodes = _node_ips(args)
    check_range("--gpu_num_of_node", args.gpu_num_of_node, 1, 1024)
    check_range("--pod_num_of_node", args.pod_num_of_node, 1, 1024)
    if args.gpu_num_of_node % args.pod_num_of_node:
        raise ConfigError(
            f"--pod_num_of_node: {args.gpu_num_of_node} slots (--gpu_num_of_node) cannot be "
            f"divided among {args.pod_num_of_node} pods; choose a divisor of {args.gpu_num_of_node}"
        )
    all_pods = args.pod_num_of_node * len(nodes)
    max_pods = all_pods if args.max_pods is None else args.max_pods
    return JobSpec(
        job_id=args.job_id or environ.get("PADDLE_JOB_ID") or "default_job",
        min_pods=args.min_pods,
        max_pods=max_pods,
        pods=max(min(all_pods, max_pods), args.min_pods),
        slots_per_pod=args.gpu_num_of_node // args.pod_num_of_node,
        script=_script(args),
        policy=args.policy,
        overlap=args.overlap,
        spares=args.spares,
        standby=args.standby,
        prepare_timeout_s=args.prepare_timeout_s,
        start_timeout_s=args.start_timeout_s,
        expected_nodes=len(nodes),
    )


def _script(args: argparse.Namespace) -> ScriptSpec:
    named = args.change_script
    if named in (ScriptKind.NONE.value, ScriptKind.ALTERNATE.value, ScriptKind.WALK.value):
        return ScriptSpec(
            kind=ScriptKind(named),
            interval_s=args.time_interval_to_change,
            del_pods=args.del_pods_one_step,
            add_pods=args.add_pods_one_step,
            seed=args.walk_seed,
            min_pods=args.min_pods,
        )
    return read_script_file("--change_script", named)


def _node_ips(args: argparse.Namespace) -> list[str]:
    nodes = [node.strip() for node in args.node_ips.split(",")]
    if not all(nodes):
        raise ConfigError(f"--node_ips: {args.node_ips!r} holds an empty address")
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if twice:
        raise ConfigError(f"--node_ips: {', '.join(twice)} named twice; name each node once")
    return nodes


def _legacy_nodes(args: argparse.Namespace, job_id: str) -> tuple[Node, ...]:
    """Return the nodes of --node_ips, for clients of the original: those register nothing."""
    slots = args.gpu_num_of_node
    ports = max(LEGACY_PORTS_PER_SLOT * slots, 100)
    port_high = min(LEGACY_PORT_LOW + ports, 32768) - 1
    return tuple(
        Node(
            node_id=f"legacy-{number}",
            addr=addr,
            slots=tuple(Slot(index=index, kind=SlotKind.GPU) for index in range(slots)),
            port_low=LEGACY_PORT_LOW,
            port_high=port_high,
            job_id=job_id,
        )
        for number, addr in enumerate(_node_ips(args))
    )
