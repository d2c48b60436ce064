"""What runs on a cluster of Kubernetes: for `edl top --kubernetes`. Also a program:

    python -m k8s_controller.collector --count 1

It asks the cluster of your kubeconfig, and needs to list TrainingJobs, pods and nodes.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable

from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from job_server.api.command_line import OptionParser
from job_server.api.wire import WireError, check_range
from job_server.cli.cluster_load import ClusterLoad, load_json, load_line
from k8s_controller.decisions.capacity import capacity_of, requests_of
from k8s_controller.decisions.spec import KIND, Object, SpecError, parse
from k8s_controller.kube_api import KubeApi, KubeError, load_config

PATIENCE_S = 60.0  # with an API server that has answered before
_AGAIN_S = 10.0  # after which it is asked again, however rarely else


def load_of(jobs: Iterable[Object], pods: Iterable[Object], nodes: Iterable[Object]) -> ClusterLoad:
    """Return what runs, from what the API server lists.

    CPUs and GPUs are what running pods, anybody's, have asked for, as parts of what nodes have.
    """
    live = [job for job in jobs if not _has_ended(job)]
    running = tuple((_name(job, live), _trainers(job)) for job in live)
    held = [requests_of(pod["spec"]) for pod in pods if _is_running(pod)]
    have = [capacity_of(node) for node in nodes]
    return ClusterLoad(
        submitted=len(live),
        pending=sum(count == 0 for _, count in running),
        running=running,
        cpu=_part(sum(each.cpu_milli for each in held), sum(each.cpu_milli for each in have)),
        gpu=_part(sum(each.slots for each in held), sum(each.slots for each in have)),
    )


def _has_ended(job: Object) -> bool:
    return any(
        each["type"] in ("Complete", "Failed") and each["status"] == "True"
        for each in (job.get("status") or {}).get("conditions") or ()
    )


def _name(job: Object, jobs: Iterable[Object]) -> str:
    """Return a job's name, with its namespace where another one has the same."""
    meta = job["metadata"]
    same = [each for each in jobs if each["metadata"]["name"] == meta["name"]]
    return str(meta["name"] if len(same) == 1 else f"{meta['namespace']}/{meta['name']}")


def _trainers(job: Object) -> int:
    pods = int((job.get("status") or {}).get("trainingReplicas") or 0)
    try:
        return pods * parse(job).slots_per_pod
    except SpecError:  # it has none, or trains on with what it was before
        return pods * _slots(job.get("spec") or {})


def _slots(spec: Object) -> int:
    """Return the trainers of a pod, as far as they can be read from a spec that is wrong."""
    try:
        gpus = requests_of((spec.get("template") or {}).get("spec") or {}).slots
    except (ValueError, TypeError, AttributeError):
        gpus = 0
    return int(spec.get("slotsPerPod") or gpus or 1)


def _is_running(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _part(held: int, of: int) -> float | None:
    return held / of if of else None


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="edl top --kubernetes",
        description="Show what runs on the cluster of your kubeconfig, again and again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--kubeconfig", help="default: the pod's account, else KUBECONFIG")
    add("--namespace", help="TrainingJobs of this one only")
    add("--interval_s", type=float, default=10.0, help="between two looks (default 10)")
    add("--count", type=int, metavar="N", help="end after so many looks")
    add("--json", action="store_true", help="print an object each time")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print lines until Ctrl-C; return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        check_range("--interval_s", args.interval_s, 0.1, 86400)
        if args.count is not None:
            check_range("--count", args.count, 1, 1_000_000)
        load_config(args.kubeconfig)
        _show(KubeApi(), args)
    except KeyboardInterrupt:
        return 130
    except ConfigException as error:
        where = args.kubeconfig or "the usual places"
        print(f"edl top --kubernetes: --kubeconfig: {where}: {error}; name a file", file=sys.stderr)
        return 2
    except (WireError, KubeError, HTTPError) as error:
        print(f"edl top --kubernetes: {error}", file=sys.stderr)
        return 2 if isinstance(error, WireError) else 1
    return 0


def _show(kube: KubeApi, args: argparse.Namespace) -> None:
    if not args.json:
        print(load_line(None))
    shown = 0
    failing_since: float | None = None  # None: it has answered, or was not asked yet
    while True:
        try:
            load = load_of(
                kube.list_all(KIND, args.namespace), kube.list_all("Pod"), kube.list_all("Node")
            )
        except (KubeError, HTTPError) as error:
            passes = not isinstance(error, KubeError) or error.status == 429 or error.status >= 500
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            if not (passes and shown) or now > failing_since + PATIENCE_S:
                raise
            print(f"edl top --kubernetes: trying again: {error}", file=sys.stderr)
            time.sleep(min(args.interval_s, _AGAIN_S))
            continue
        failing_since = None
        line = json.dumps(load_json(load, time.time())) if args.json else load_line(load)
        print(line, flush=True)
        shown += 1
        if shown == args.count:
            return
        time.sleep(args.interval_s)


if __name__ == "__main__":
    sys.exit(main())
