"""`edl run`: an elastic training on this machine, from one command, as torchrun has it.

    edl run --min 1 --max 8 train.py ARGS...
    python -m pod_runtime.run --cpu_slots 4 --change_script changes.yaml train.py ARGS...

Starts a job server and a job client of its own, runs one job, shows what happens and what the
trainers print, and leaves nothing running. Exit code 0: the training has succeeded; 1: it has not,
with the reason; 2: a wrong command line; 130: Ctrl-C.
"""

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from job_server.api.amounts import argument, cores, megabytes, seconds
from job_server.api.command_line import (
    add_hang_flags,
    make_token,
    read_script_file,
    read_token,
    utf8_path,
)
from job_server.api.errors import ConfigError
from job_server.api.failure_policy import read_policy_file
from job_server.api.wire import (
    USUAL_SPARES,
    HangLimits,
    JobSpec,
    ScriptKind,
    ScriptSpec,
    WireError,
    check_range,
)
from pod_runtime.cgroups import usable_cores
from pod_runtime.errors import LaunchError
from pod_runtime.local.old_runs import KEEP_RUNS
from pod_runtime.local.session import LocalSession, RunConfig


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl run",
        usage="edl run [OPTIONS] SCRIPT [ARGS...]",
        description="Train on this machine, elastically; everything in one command.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("how many pods").add_argument
    add("--min", type=int, default=1, metavar="N", help="fewest pods (1)")
    add("--max", type=int, metavar="N", help="most pods (as many as there are slots for)")
    add("--pods", type=int, metavar="N", help="pods at the start (as many as fit, up to --max)")
    add("--fixed", action="store_true", help="always --max pods: no less")
    add("--slots_per_pod", type=int, default=1, metavar="N", help="trainers of a pod (1)")
    add("--cpu_slots", type=int, metavar="N", help="train on the CPU, with N slots")

    add = parser.add_argument_group("how they change").add_argument
    add(
        "--change_script",
        default="none",
        metavar="none|alternate|walk|FILE",
        help="pods that come and go by themselves; a FILE ends in .yaml or .csv",
    )
    add("--interval_s", type=float, default=900.0, metavar="S", help="of alternate and walk (900)")
    add("--seed", type=int, default=0, metavar="N", help="of walk (0)")
    add(
        "--overlap",
        choices=("auto", "on", "off", "join"),
        default="auto",
        help="on: the next trainers get ready beside the present ones; off: when these have "
        "stopped; join: only new ones start, the others stay; auto (default): on, or join on GPUs "
        "without room for both",
    )
    add(
        "--prepare_timeout_s",
        type=float,
        default=120.0,
        metavar="S",
        help="else a change is given up (120)",
    )
    add(
        "--policy",
        choices=("fixed_global", "linear"),
        default="fixed_global",
        help="fixed_global (default): the batch stays the same; linear: it grows with the number "
        "of trainers, and the learning rate with it",
    )

    add = parser.add_argument_group("beside other programs").add_argument
    add(
        "--share",
        action="store_true",
        help="as many pods, from --min to --max, as the other programs of this machine leave "
        "room for, by --cpu and --memory; with less room than for --min it waits",
    )
    add(
        "--cpu",
        type=argument(cores),
        metavar="CORES",
        help="that a trainer uses, such as 0.5 or 2 (not counted)",
    )
    add(
        "--memory",
        type=argument(megabytes),
        metavar="AMOUNT",
        help="that a trainer uses, such as '500 MB' or 2GB (not counted)",
    )
    add(
        "--max_run_time",
        type=argument(seconds),
        metavar="TIME",
        help="with --share: of running, not of waiting, such as 45min or 2h; then it is stopped",
    )

    add = parser.add_argument_group("what a crash costs").add_argument
    add(
        "--spares",
        type=int,
        default=USUAL_SPARES,
        metavar="N",
        help="warm trainers per pod (1), for a quick recovery; 150 MB each",
    )
    add("--preload", metavar="MODULE,...", help="what spares import besides the framework")
    add(
        "--standby",
        type=int,
        default=0,
        metavar="N",
        help="1: trainers ready for a crash; 2: or a lost pod",
    )
    add("--max_failures", type=int, default=20, metavar="N", help="then the job has failed (20)")
    add(
        "--max_restarts_without_progress",
        type=int,
        default=3,
        metavar="N",
        help="failures in a row without a new step; then the job has failed (3)",
    )
    add(
        "--failure_policy",
        metavar="FILE.yaml",
        help="which failures are tried again, where, and which end the job; see docs/failures.md",
    )

    add_hang_flags(parser.add_argument_group("what hangs, or is slow").add_argument)

    add = parser.add_argument_group("how it ends").add_argument
    add("--grace_s", type=float, default=15.0, metavar="S", help="from SIGTERM to SIGKILL (15)")
    add(
        "--keep_failed_s",
        type=float,
        default=3600.0,
        metavar="S",
        help="how long a state that cannot be written at the end stays in memory (3600)",
    )

    add = parser.add_argument_group("this run").add_argument
    add(
        "--log_dir",
        type=Path,
        default=Path("edl_run"),
        metavar="DIR",
        help="each run has a folder in it",
    )
    add(
        "--keep_runs",
        type=int,
        default=KEEP_RUNS,
        metavar="N",
        help="folders of runs before the newest N (200) are deleted once nothing was written "
        "there for 30 days, and no state is in them; 0: none",
    )
    add("--job_id", default="run", metavar="NAME", help="name of the job (run)")
    add(
        "--take_over",
        action="store_true",
        help="replace another training that has the folder of checkpoints",
    )
    add("--heartbeat_s", type=float, default=1.0, metavar="S", help="of the job server (1)")

    add = parser.add_argument
    add("script", help="training script; what follows are its arguments")
    add("args", nargs=argparse.REMAINDER)
    parser.set_defaults(hang_policy="restart", hang_limits={}, straggler_policy="say")
    return parser


def read_config(argv: Sequence[str] | None, environ: Mapping[str, str]) -> RunConfig:
    """Return the checked configuration.

    Raises:
        LaunchError: a value is wrong; the text names it and the remedy.
        SystemExit: as argparse does.
    """
    args = build_parser().parse_args(argv)
    script = Path(args.script).absolute()
    try:
        if not script.is_file():
            raise LaunchError(f"script: {args.script} does not exist in {Path.cwd()}", 2)
    except OSError as error:  # in a folder that this user may not enter, say
        raise LaunchError(f"script: {args.script}: {error.strerror}", 2) from None
    if args.args[:1] == ["--"]:
        args.args = args.args[1:]
    try:
        check_range("--slots_per_pod", args.slots_per_pod, 1, 4096)
        check_range("--heartbeat_s", args.heartbeat_s, 0.1, 3600)
        check_range("--keep_runs", args.keep_runs, 0, 1_000_000)
        if args.cpu_slots is not None:
            check_range("--cpu_slots", args.cpu_slots, 1, 4096)
        spec, cpu_slots = _spec(args, environ)
        log_dir = utf8_path("--log_dir", args.log_dir)
        token = read_token(None, environ, private=True) or make_token()
    except (ConfigError, WireError) as error:
        raise LaunchError(str(error), 2) from error
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return RunConfig(
        spec=spec,
        cpu_slots=cpu_slots,
        script=script,
        script_args=tuple(args.args),
        preload=args.preload,
        cwd=Path.cwd(),
        folder=log_dir / f"{now}-{secrets.token_hex(4)}",
        heartbeat_s=args.heartbeat_s,
        token=token,
        keep_runs=args.keep_runs,
    )


def _spec(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[JobSpec, int | None]:
    """Return the job, and how many CPU slots the client offers; None: it offers the GPUs."""
    gpus = 0 if args.cpu_slots is not None else count_gpus(environ)
    # Without GPUs a slot is not a device: there may be as many as the job wants.
    cpu_wanted = max(usable_cores(), (args.max or args.pods or args.min) * args.slots_per_pod)
    slots = args.cpu_slots or gpus or cpu_wanted
    fitting = slots // args.slots_per_pod
    most = args.max if args.max is not None else max(fitting, args.min, args.pods or 1)
    fewest = most if args.fixed else args.min
    check_range("--min", fewest, 1, 4096)
    if most < fewest:
        raise WireError(f"--max: {most} is less than --min, {fewest}")
    first = args.pods if args.pods is not None else max(fewest, min(most, fitting))
    if not fewest <= first <= most:
        raise WireError(f"--pods: {first} is not between {fewest} (--min) and {most} (--max)")
    if first > fitting:
        raise WireError(
            f"--{'min' if args.pods is None else 'pods'}: {first} pods of {args.slots_per_pod} "
            f"trainers do not fit into {slots} slots; use less, or more --cpu_slots"
        )
    spec = JobSpec(
        job_id=args.job_id,
        min_pods=fewest,
        max_pods=most,
        pods=args.pods if args.share else first,
        slots_per_pod=args.slots_per_pod,
        script=_change_script(args),
        policy=args.policy,
        overlap=args.overlap,
        spares=args.spares,
        standby=args.standby,
        prepare_timeout_s=args.prepare_timeout_s,
        max_failures=args.max_failures,
        max_restarts_without_progress=args.max_restarts_without_progress,
        grace_s=args.grace_s,
        take_over=args.take_over,
        keep_failed_s=args.keep_failed_s,
        share=args.share,
        cpu_milli=args.cpu or 0,
        memory_mb=args.memory or 0,
        max_run_time_s=args.max_run_time,
        hang_policy=args.hang_policy,
        hang_limits=HangLimits(**args.hang_limits),
        straggler_policy=args.straggler_policy,
        failure_policy=()
        if args.failure_policy is None
        else read_policy_file("--failure_policy", args.failure_policy),
    )
    return spec, None if gpus else slots


def _change_script(args: argparse.Namespace) -> ScriptSpec:
    named = args.change_script
    if named in (ScriptKind.NONE.value, ScriptKind.ALTERNATE.value, ScriptKind.WALK.value):
        return ScriptSpec(
            kind=ScriptKind(named),
            interval_s=args.interval_s,
            seed=args.seed,
            min_pods=max(1, args.min),
        )
    return read_script_file("--change_script", named)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a job client here would offer.

    Raises:
        LaunchError: their driver fails.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        import pynvml  # only here: a machine without GPUs may lack it
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        if error.value in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return 0  # no driver: no GPU
        raise LaunchError(
            f"the driver of the GPUs fails ({error}); see `nvidia-smi` (after an update of the "
            "driver a reboot helps), or train on the CPU: --cpu_slots N", 2
        ) from None  # fmt: skip
    pynvml.nvmlShutdown()
    return count


def train_sh(config: RunConfig) -> str:
    """Return the script that each pod runs: the launcher, in the user's folder."""
    launch = [
        sys.executable, "-m", "pod_runtime.launch",
        "--log_dir", str(config.folder / "trainers"), "--run_dir", str(config.folder / "run"),
        *(["--preload", config.preload] if config.preload else []),
        str(config.script), *config.script_args,
    ]  # fmt: skip
    return (
        "#!/usr/bin/env bash\n"
        "# Made by `edl run`. Not `exec`: when the pod's shim is killed, this shell dies with it\n"
        "# and the launcher lives on for the moment that it needs to clean up.\n"
        f"cd {shlex.quote(str(config.cwd))} || exit 1\n"
        f"{shlex.join(launch)}\n"
        "exit $?\n"
    )


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    try:
        config = read_config(argv, environ)
        return LocalSession(config, train_sh(config), environ).run()
    except LaunchError as error:
        sys.stderr.write(f"edl run: {error}\n")
        return error.exit_code
    except BrokenPipeError:  # as by `| head`; all has been stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
