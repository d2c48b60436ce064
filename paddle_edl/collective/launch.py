"""Run a pod's trainers (`python -m pod_runtime.launch`) with the original launcher's flags.

What named nodes, ports and GPUs had no effect in the original either, since the job server says
all that. In a pod such a flag is answered by a warning. Outside of one, where it would have to
mean something, it is an error.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from job_server.api.command_line import OptionParser
from pod_runtime.launch import main as launch

# What the job server says; the values are the defaults.
_ELSEWHERE = {
    "cluster_node_ips": "127.0.0.1",
    "node_ip": "127.0.0.1",
    "use_paddlecloud": False,
    "started_port": None,
    "selected_gpus": None,
}
_HDFS = ("hdfs_name", "hdfs_ugi", "hdfs_path")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a pod's trainers; return the exit code (2: wrong command line)."""
    args = _parser().parse_args(argv)
    named = [flag for flag, usual in _ELSEWHERE.items() if getattr(args, flag) != usual]
    if named and not environ.get("PADDLE_JOBSERVER"):
        _say(
            f"--{named[0]}: outside of a pod this starts a job on this machine, and cannot be told "
            "its nodes, ports or GPUs; leave the flag out and set CUDA_VISIBLE_DEVICES, or start a "
            "job server and a job client on each node"
        )
        return 2
    for flag in named:
        _say(f"--{flag}: without effect: the job server says where a pod runs")
    for flag in _HDFS:
        if getattr(args, flag) is not None:
            _say(f"--{flag}: without effect: the script's own arguments say where checkpoints are")
    ours = ["--log_dir", args.log_dir, "--log_level", str(args.log_level), args.script, *args.args]
    if args.print_config != "False":
        for name, value in sorted(vars(args).items()):
            _say(f"{name}: {value}")
    return launch(ours, environ)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m paddle_edl.collective.launch", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--log_dir", default="log", help="trainers' logs")
    add("--log_level", type=int, default=20, help="10 debug, 20 info, 30 warnings")
    add("--print_config", default="True", metavar="True|False", help="print these options")
    for flag in ("cluster_node_ips", "node_ip", "started_port", "selected_gpus"):
        add(f"--{flag}", default=_ELSEWHERE[flag], help="without effect")
    add("--use_paddlecloud", action="store_true", help="without effect")
    for flag in _HDFS:
        add(f"--{flag}", help="without effect")
    add("script", help="training script; arguments after it are the script's")
    add("args", nargs=argparse.REMAINDER)
    return parser


def _say(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
