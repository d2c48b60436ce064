"""Read a job from flags and a YAML file, for `edl submit` and `edl simulate`."""

import argparse
import shlex
from typing import Any

from job_server.api.amounts import argument, cores, megabytes, seconds
from job_server.api.codec import WireError, decode, encode
from job_server.api.command_line import add_hang_flags, read_script_file
from job_server.api.errors import ConfigError
from job_server.api.failure_policy import read_policy_file
from job_server.api.wire import USUAL_SPARES, JobKind, JobSpec, ScriptKind
from job_server.cli.job_file import check_fixed_size, read_job_file

_BUDGETS = ("max_failures", "max_preemptions", "max_resizes")
_SCRIPT_FLAGS = {
    "time_interval_to_change": "interval_s",
    "del_pods_one_step": "del_pods",
    "add_pods_one_step": "add_pods",
    "walk_seed": "seed",
}


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per field of JobSpec; a flag that is not given leaves the file's value."""
    add = parser.add_argument
    add(
        "--job_id",
        "--name",
        dest="job_id",
        metavar="NAME",
        help="of the job; letters, digits, '.', '_', '-'",
    )
    add("--file", metavar="JOB.yaml", help="a job in a file; flags override it")
    add("--kind", choices=[kind.value for kind in JobKind], help="training, if not given")
    add("--service", metavar="NAME", help="of teachers: the name that students ask for")
    add("--min", "--min_pods", dest="min_pods", type=int, metavar="N", help="fewest pods")
    add("--max", "--max_pods", dest="max_pods", type=int, metavar="N", help="most pods")
    add(
        "--pods",
        type=int,
        metavar="N",
        help="at the first start; else the most, of teachers the fewest",
    )
    add("--slots_per_pod", type=int, metavar="N", help="trainers per pod")
    add("--folder", help="subfolder of the clients' --jobs_dir; else their own script")
    add(
        "--args",
        type=shlex.split,
        metavar="'ARG ...'",
        help="of that script, behind its own: --args='--lr 0.1'",
    )
    _add_sharing_flags(parser)
    add("--policy", choices=("fixed_global", "linear"), help="what a change does to the batch")
    add(
        "--overlap",
        choices=("on", "off", "join", "auto"),
        help="make new trainers ready beside the old; join: keep the old, add only new ones",
    )
    add("--spares", type=int, metavar="N", help="warm trainers per pod (1), 150 MB each")
    add(
        "--standby",
        type=int,
        metavar="N",
        help="1: a second set of trainers for crashes; 2: and lost pods",
    )
    add("--prepare_timeout_s", type=float, metavar="S", help="else a change is abandoned")
    add(
        "--take_over",
        action="store_true",
        default=None,
        help="replace another training that has the folder of checkpoints",
    )
    add("--start_timeout_s", type=float, metavar="S", help="a first start waits so long for nodes")
    add("--expected_nodes", type=int, metavar="N", help="a first start waits for so many")
    add("--grace_s", type=float, metavar="S", help="between SIGTERM and SIGKILL")
    add(
        "--keep_failed_s",
        type=float,
        metavar="S",
        help="how long a state that cannot be written at the end stays in memory (3600)",
    )
    for name in _BUDGETS:
        add(f"--{name}", type=_budget, metavar="N|none", help="then the job has failed")
    add(
        "--failure_policy",
        metavar="FILE.yaml",
        help="which failures are tried again, where, and which end the job; docs/failures.md",
    )
    add_hang_flags(add)
    add("--max_restarts_without_progress", type=int, metavar="N", help="then the job has failed")
    add(
        "--demand_timeout_s",
        type=float,
        metavar="S",
        help="of teachers: after so long without students, the fewest are enough",
    )
    add(
        "--demand_interval_s", type=float, metavar="S", help="of teachers: a report counts so often"
    )
    add(
        "--change_script",
        "--timeline",
        metavar="alternate|none|walk|FILE.yaml|FILE.csv",
        help="which pods come and go, and when",
    )
    add("--time_interval_to_change", type=float, metavar="S", help="of alternate and walk")
    add("--del_pods_one_step", type=int, metavar="N", help="of alternate")
    add("--add_pods_one_step", type=int, metavar="N", help="of alternate")
    add("--walk_seed", type=int, metavar="N", help="of walk")


def _add_sharing_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a job that shares the cluster").add_argument
    add(
        "--share",
        action="store_true",
        default=None,
        help="the server chooses how many pods it has, from --min to --max, or lets it wait",
    )
    add("--priority", type=int, metavar="N", help="-1000 to 1000 (0); the highest goes first")
    add("--user", metavar="NAME", help="whose share of the cluster it takes")
    add(
        "--after",
        action="append",
        metavar="JOB",
        help="starts once that one has succeeded; may be given several times",
    )
    add(
        "--cpu",
        dest="cpu_milli",
        type=argument(cores),
        metavar="CORES",
        help="of a trainer, such as 0.5 or 2 (not counted)",
    )
    add(
        "--memory",
        dest="memory_mb",
        type=argument(megabytes),
        metavar="AMOUNT",
        help="of a trainer, such as '500 MB' or 2GB (not counted)",
    )
    add(
        "--max_run_time",
        dest="max_run_time_s",
        type=argument(seconds),
        metavar="TIME",
        help="of running, not of waiting, such as 90s, 45min or 2h; then it is stopped",
    )


def _budget(text: str) -> int | str:
    # "none" stands for no limit; None would look like a flag that was not given.
    return text if text == "none" else int(text)


def read_job(args: argparse.Namespace, default_id: str | None = None) -> JobSpec:
    """Return the job that the flags and the file describe.

    Args:
        default_id: the job's id if neither has one; None: that is an error.

    Raises:
        ConfigError: a file or value is wrong; the text names the flag or field and the remedy.
    """
    named = [name for name in (getattr(args, "job_file", None), args.file) if name]
    if len(named) > 1:
        raise ConfigError(f"--file: {named[0]} is named as well; give one file")
    fields = read_job_file(named[0]) if named else {}
    for name in JobSpec.__struct_fields__:
        given = getattr(args, name, None)
        if given is not None:
            fields[name] = None if given == "none" and name in _BUDGETS else given
    if not fields.pop("fault_tolerant", True):
        check_fixed_size(named[0], fields)
    fields["script"] = _script(args, fields.get("script", {}))
    if args.failure_policy is not None:
        rules = read_policy_file("--failure_policy", args.failure_policy)
        fields["failure_policy"] = encode(rules)
    if fields.get("kind") != JobKind.TEACHER.value:
        fields.setdefault("spares", USUAL_SPARES)
    if "job_id" not in fields:
        if default_id is None:
            raise ConfigError("--job_id: missing; name the job, or give a file that does")
        fields["job_id"] = default_id
    try:
        return decode(JobSpec, fields)
    except WireError as error:
        raise ConfigError(str(error)) from None


def _script(args: argparse.Namespace, from_file: Any) -> Any:
    named = args.change_script
    if named is None:
        script = from_file
    elif named in (ScriptKind.NONE.value, ScriptKind.ALTERNATE.value, ScriptKind.WALK.value):
        script = {"kind": named}
    else:
        script = encode(read_script_file("--change_script", named))
    for flag, field in _SCRIPT_FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            script = {**script, field: value}
    return script
