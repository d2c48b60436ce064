"""Run the controller of TrainingJobs (`python -m k8s_controller`)."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from types import FrameType

from kubernetes.config import ConfigException

from job_server.api.command_line import OptionParser
from job_server.sharing.policies import POLICIES
from k8s_controller import election as elections
from k8s_controller.autoscaler import Autoscaler
from k8s_controller.controller import Controller
from k8s_controller.election import Election
from k8s_controller.handlers import watch
from k8s_controller.kube_api import KubeApi, load_config
from k8s_controller.metrics import Metrics, serve

logger = logging.getLogger("k8s_controller")


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m k8s_controller",
        description="Make TrainingJobs train, with as many pods as they are to have.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--namespace", action="append", default=[], help="look after this one; again: more; or all")
    add("--kubeconfig", help="default: the pod's account, else KUBECONFIG")
    add("--interval_s", type=float, default=2.0, help="between two looks at a quiet job")
    add("--autoscale_interval_s", type=float, default=5.0, help="between two looks at all of them")
    add("--sharing", choices=sorted(POLICIES), default="goodput", help="policy of `autoscale`")
    add("--no_leader_elect", action="store_true", help="act without a lease: run one only")
    add("--lease_name", default="edl-controller", help="of controllers of which one acts")
    add("--lease_namespace", help="default: POD_NAMESPACE, else `default`")
    add("--liveness_port", type=int, default=8081, help="of /healthz, /readyz, /metrics; 0: any")
    add("--probe_address", default="", help="where --liveness_port listens; none: everywhere")
    add("--log_level", type=int, default=20, help="10 debug, 20 info, 30 warnings")
    add("--log_format", choices=("text", "json"), default="text", help="json: one object per line")
    return parser


class JsonLines(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit code, 2 for a wrong command line."""
    args = build_parser().parse_args(argv)
    for name in ("interval_s", "autoscale_interval_s"):
        if not 0.1 <= getattr(args, name) <= 300:
            print(
                f"python -m k8s_controller: --{name}: must be between 0.1 and 300, "
                f"got {getattr(args, name):g}",
                file=sys.stderr,
            )
            return 2
    _log(args.log_level, args.log_format)
    try:
        load_config(args.kubeconfig)
    except ConfigException as error:
        print(
            f"python -m k8s_controller: --kubeconfig: {error}; name a file, or run in a cluster",
            file=sys.stderr,
        )
        return 2
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    metrics = Metrics()
    try:
        probes = serve(metrics, args.probe_address, args.liveness_port)
    except (OSError, OverflowError) as error:
        where = f"--liveness_port: {args.liveness_port}"
        if args.probe_address:
            where += f" at --probe_address {args.probe_address}"
        print(f"python -m k8s_controller: {where}: {error}; name another", file=sys.stderr)
        return 2
    logger.info("probes and metrics at port %d", probes.server_address[1])
    namespaces = [each for each in args.namespace if each != "all"]
    election = None
    if not args.no_leader_elect:
        namespace = args.lease_namespace or os.environ.get("POD_NAMESPACE") or "default"
        identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        short = KubeApi(elections.ANSWER_S)
        election = Election(short, namespace, args.lease_name, identity)
        if not election.win(stop):
            logger.info("ended")
            return 0
    kube = KubeApi() if election is None else KubeApi(may_write=election.leads)
    controller = Controller(kube, metrics, args.interval_s)
    policy, interval_s = POLICIES[args.sharing], args.autoscale_interval_s
    scaler = Autoscaler(kube, controller.look_at, metrics, policy, interval_s, namespaces)

    def watch_all() -> None:
        watch(controller, namespaces, stop, args.kubeconfig)

    return _lead(controller, scaler, metrics, watch_all, election, stop)


def _lead(
    controller: Controller,
    scaler: Autoscaler,
    metrics: Metrics,
    watch_all: Callable[[], None],
    election: Election | None,
    stop: threading.Event,
) -> int:
    logger.info("this one leads")
    metrics.leads = True

    def lose() -> None:
        logger.error("the lease is lost: another one may lead, so this one ends at once")
        os._exit(1)  # a pass that waits for an answer would act after that

    if election is not None:
        threading.Thread(
            target=election.keep, args=(stop, lose), name="election", daemon=True
        ).start()
    controller.start()
    scaler.start()
    try:
        watch_all()
    finally:
        scaler.stop()
        controller.stop()
        if election is not None:
            election.give_back()
    logger.info("ended")
    return 0


def _log(level: int, form: str) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])
    for name in ("kopf", "urllib3"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


if __name__ == "__main__":
    sys.exit(main())
