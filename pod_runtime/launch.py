"""Run a pod's trainers, stage by stage, as the job server says.

    python -m pod_runtime.launch --log_dir log --log_level 20 train.py [ARGS...]

Started by a pod's script. Outside a pod (no PADDLE_JOBSERVER) the same command is `edl run` with
a fixed number of pods of one slot each: it starts a job server and a job client of its own.
"""

import argparse
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from job_server.api.api_client import ApiClient
from job_server.api.command_line import OptionParser, task_token, token_in, token_now
from job_server.api.errors import ConfigError
from pod_runtime.env import JOB_ARGS, TASK_TOKEN, EnvError, PodEnv, checkpoint_path
from pod_runtime.errors import LaunchError
from pod_runtime.launcher.loop import Launcher
from pod_runtime.launcher.segments import highest_stage
from pod_runtime.launcher.trainer_pool import KEEP_LOGS, LaunchConfig
from pod_runtime.shim_wire import read_server

logger = logging.getLogger(__name__)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(prog="python -m pod_runtime.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--log_dir", type=Path, default=Path("log"), help="trainers' logs")
    parser.add_argument("--log_level", type=int, default=20, help="10 debug, 20 info, 30 warnings")
    parser.add_argument(
        "--run_dir", type=Path, help="folder of the training's ledger (LOG_DIR/run)"
    )
    parser.add_argument(
        "--preload",
        default="",
        metavar="MODULE,...",
        help="installed modules that warm spares import besides the trainers' framework",
    )
    parser.add_argument(
        "--keep_logs",
        type=int,
        default=KEEP_LOGS,
        metavar="STAGES",
        help=f"how many newest stages' trainer logs stay ({KEEP_LOGS}); 0: all. "
        "What was written within a day stays as well",
    )
    parser.add_argument("script", help="training script; arguments after it are the script's")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def find_script(name: str) -> str:
    """Return the path of the training script.

    Raises:
        LaunchError: there is no such file, or it is neither Python nor executable.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix != ".py" and not os.access(path, os.X_OK):
            raise LaunchError(f"script: {name} is neither a .py file nor executable", 2)
        return str(path.absolute())
    found = shutil.which(name) if os.sep not in name else None
    if found is None:
        raise LaunchError(f"script: {name} does not exist in {Path.cwd()}", 2)
    return found


def trainer_command(script: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return a trainer's command: by this interpreter, or the script itself if not Python."""
    if script.endswith(".py"):
        return sys.executable, script, *args
    return script, *args


def check_args(of_job: Sequence[str], of_script: Sequence[str]) -> None:
    """See that the pod's script hands the job's arguments on.

    Raises:
        LaunchError: it does not: the training would run with others than its user asked for.
    """
    count = len(of_job)
    places = range(len(of_script) - count + 1)
    if not any(list(of_script[at : at + count]) == list(of_job) for at in places):
        raise LaunchError(
            f"args: the job's arguments ({shlex.join(of_job)[:200]}) do not come to the training "
            f'script; end the launch line of train.sh with "$@", or `unset {JOB_ARGS}` before it '
            "where train.sh hands them on in another form",
            2,
        )


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    args = parse_args(argv)
    logging.basicConfig(
        level=args.log_level,
        format="%(asctime)s %(levelname)s launcher: %(message)s",
        stream=sys.stderr,
    )
    try:
        if args.keep_logs < 0:
            raise LaunchError(f"--keep_logs: expected a number of stages, got {args.keep_logs}", 2)
        script = find_script(args.script)
        if not environ.get("PADDLE_JOBSERVER"):
            return _run_alone(args)
        pod_env = PodEnv.read(environ)
        check_args(pod_env.args, args.args)
        token_file = pod_env.token_file
        token = None if token_file is None else token_in(token_file, "EDL_TOKEN_FILE")
        checkpoint = checkpoint_path(environ)
        config = LaunchConfig(
            command=trainer_command(script, args.args),
            log_dir=args.log_dir.absolute(),
            run_dir=(args.run_dir or args.log_dir / "run").absolute(),
            highest_stage=highest_stage(checkpoint) if checkpoint is not None else 0,
            preload=tuple(name for name in args.preload.split(",") if name),
            keep_logs=args.keep_logs,
        )

        def connect() -> ApiClient:
            url = read_server(pod_env.pod_dir) or pod_env.job_server
            return ApiClient(url, token_now(token_file, token))

        try:
            connect().close()  # it connects later: this only checks the URL
        except ValueError as error:
            raise LaunchError(f"PADDLE_JOBSERVER: {error}", 2) from error
        if token is not None:  # trainers do not get it, but they may read by a task queue
            environ = {**environ, TASK_TOKEN: task_token(token)}
        return Launcher(config, pod_env, environ, connect).run()
    except (EnvError, ConfigError) as error:
        sys.stderr.write(f"launch: {error}\n")
        return 2
    except LaunchError as error:
        sys.stderr.write(f"launch: {error}\n")
        return error.exit_code


def _run_alone(args: argparse.Namespace) -> int:
    from pod_runtime import run  # only here: a pod's launcher does not need it

    if args.run_dir is not None:
        raise LaunchError("--run_dir: only in a pod; else the ledger is in LOG_DIR/latest/run", 2)
    if args.keep_logs != KEEP_LOGS:
        raise LaunchError("--keep_logs: only in a pod; else `edl run --keep_runs` keeps runs", 2)
    preload = ["--preload", args.preload] if args.preload else []
    return run.main(["--fixed", "--log_dir", str(args.log_dir), *preload, args.script, *args.args])


if __name__ == "__main__":
    sys.exit(main())
