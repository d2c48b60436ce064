"""Show elastic training on this machine: one job, seven stages, one kill -9, and the proof.

`./scripts/quickstart.sh` installs what is needed and starts this. Exit code 0 means that everything
promised held; 1 that something did not; 130 after Ctrl-C, with everything cleaned up.
"""

import argparse
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that this file also runs by its path

from job_server.api.api_client import ApiClient, ApiError  # noqa: E402 - after the path
from job_server.api.errors import ConfigError  # noqa: E402
from job_server.api.wire import USUAL_SPARES, JobEvent, JobSpec, JobStatus  # noqa: E402
from pod_runtime.cgroups import usable_cores  # noqa: E402
from scripts import quickstart_view as view  # noqa: E402
from scripts.quickstart_io import (  # noqa: E402
    JOB_ID,
    Processes,
    QuickstartError,
    Screen,
    free_port,
    tail,
)
from scripts.quickstart_plan import (  # noqa: E402
    RECIPES,
    TRAIN_IMAGES,
    Director,
    Pace,
    Recipe,
    checks,
    committed,
    deaths,
    epochs_for,
    images_per_second,
    plan_acts,
)

EXAMPLES = {"paddle": ROOT / "examples" / "digits", "torch": ROOT / "examples" / "digits_torch"}
INSTALL_PAGES = {
    "paddle": "https://www.paddlepaddle.org.cn/en/install/quick (the newest paddlepaddle-gpu that "
    "pip finds by itself, 2.6.2, does not run on newer GPUs)",
    "torch": "https://pytorch.org/get-started/locally/",
}
SILENCE_S = 120.0  # without a step or a change: something hangs
LOOK_S = 0.2
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRIAL_EPOCHS = 4
TAIL_GAPS = 4  # that training may go on behind the last act


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    framework: str  # "paddle" or "torch"
    model: str
    pods: int  # at most; the job starts with one fewer
    epochs: int | None  # None: as many as outlast the acts on this machine
    gap_s: float
    seed: int
    gpus: bool
    out: Path

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.model]

    @property
    def example(self) -> Path:
        return EXAMPLES[self.framework]

    @property
    def model_options(self) -> list[str]:
        """What the script takes to choose its model; PyTorch's has one."""
        return ["--model", self.model] if self.framework == "paddle" else []

    @property
    def threads(self) -> int | None:
        """Of each trainer; None: it computes on a GPU."""
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return None if self.gpus else int(asked) if asked.isdecimal() else 1


# --- the acts -----------------------------------------------------------------------------------


def train_alone(config: Config, processes: Processes, screen: Screen) -> tuple[float, float]:
    """Run the training script by itself for a few short epochs.

    Returns:
        Images per second, and the seconds until the first step, as on an idle machine: of processor
        time and time, the shorter one counts. What else runs now may be over in ten seconds, and a
        training that was planned too short would end before the kill.
    """
    started = time.monotonic()
    argv = [
        sys.executable, str(config.example / "train.py"), *config.model_options,
        "--epochs", str(TRIAL_EPOCHS), "--batch_size", str(config.recipe.batch_size),
        "--checkpoint", str(config.out / "alone"),
    ]  # fmt: skip
    if config.recipe.trial_images < TRAIN_IMAGES:
        argv += ["--images", str(config.recipe.trial_images)]
    env = {**processes.env, "EDL_MAX_TRAINERS": str(config.pods)}
    log = processes.log("alone")
    epochs: list[tuple[float, float]] = []  # when each ended, in time and in processor time
    with (
        log.open("w") as copy,
        subprocess.Popen(
            argv, env=env, cwd=config.example, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        trainer = psutil.Process(process.pid)
        try:
            for line in process.stdout:
                copy.write(line)
                if "accuracy" in line:
                    used = trainer.cpu_times()
                    epochs.append((time.monotonic() - started, used.user + used.system))
                    screen.live(line[line.find("epoch") :].strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode or len(epochs) < 2:
        raise QuickstartError(
            f"{config.example / 'train.py'} alone ended with exit code {process.returncode}; "
            f"{log} ends so:\n{tail(log)}"
        )
    took = [
        min(after[clock] - before[clock] for clock in (0, 1))
        for before, after in itertools.pairwise(epochs)
    ]
    fastest = max(0.001, min(took))
    startup_s = max(0.0, min(epochs[0]) - fastest)
    return images_per_second(config.recipe.trial_images, fastest), startup_s


def start_server(config: Config, processes: Processes) -> ApiClient:
    port = free_port()
    processes.start(
        "job_server",
        [
            sys.executable, "-m", "job_server", "--no_job", "--server_port", str(port),
            "--db", str(config.out / "job_server.db"), "--heartbeat_s", "0.5",
            "--max_watchers", "100",
        ],
    )  # fmt: skip
    api = ApiClient(f"http://127.0.0.1:{port}", processes.token)
    deadline = time.monotonic() + 30
    while True:
        try:
            api.health()
            return api
        except ApiError as error:
            processes.check()
            if time.monotonic() > deadline:
                raise QuickstartError(f"the job server does not answer: {error}") from error
            time.sleep(0.05)


def start_job(config: Config, epochs: int, api: ApiClient, processes: Processes) -> None:
    api.submit(
        JobSpec(
            job_id=JOB_ID,
            min_pods=1,
            max_pods=config.pods,
            pods=config.pods - 1,
            grace_s=5.0,
            spares=USUAL_SPARES,
        )
    )
    slots = [] if config.gpus else ["--cpu_slots", str(config.pods)]
    processes.start(
        "job_client",
        [
            sys.executable, "-m", "job_client", "--job_server", api.url,
            "--log_dir", str(config.out / "logs"), "--pod_path", str(config.out / "pods"),
            *slots, "--port_range", "auto", "--grace_s", "5", str(config.example / "train.sh"),
            *config.model_options, "--epochs", str(epochs), "--seed", str(config.seed),
            "--batch_size", str(config.recipe.batch_size), "--lr", str(config.recipe.lr),
            "--checkpoint", str(config.out / "checkpoint"),
        ],
    )  # fmt: skip


def direct(
    config: Config, api: ApiClient, processes: Processes, screen: Screen
) -> tuple[JobStatus, list[JobEvent], bool]:
    """Make the acts one after the other, and show the job's life until it has ended.

    Returns:
        Its last status, all its events, and whether it was stopped behind the last act.
    """
    before: JobStatus | None = None
    events: list[JobEvent] = []
    pace = Pace()
    director = Director(plan_acts(config.pods), config.gap_s)
    stopped = False
    while True:
        status = api.status(JOB_ID)
        new = api.events(JOB_ID, after=events[-1].number if events else 0)
        events += new
        for text in deaths(new):
            screen.news(f"{screen.style.red('kill -9')}  {text}")
        for line in view.news(before, status, screen.style):
            screen.news(line)
        if status.state.ended:
            return status, events, stopped
        now = time.monotonic()
        pace.see(status.stage, status.step, now)
        act = director.next_act(status, now)
        if act is not None and act.kill_rank is not None:
            api.kill(JOB_ID, rank=act.kill_rank)
        elif act is not None:
            api.resize(JOB_ID, act.pods)
        left_s = remaining_s(status, pace.steps_per_s)
        tail_s = TAIL_GAPS * config.gap_s
        if config.epochs is None and left_s > tail_s and director.is_over(status, now):
            screen.news(
                f"all is shown, and {left_s:.0f} s of training are left: the job is stopped"
            )
            api.stop(JOB_ID)
            stopped = True
        if pace.still_s > SILENCE_S:
            raise QuickstartError(
                f"no step for {SILENCE_S:.0f} s: {status.state.value}, {status.reason}; "
                f"the logs are in {config.out / 'logs'}"
            )
        images_per_s = pace.steps_per_s and pace.steps_per_s * config.recipe.batch_size
        screen.live(
            view.live_line(status, images_per_s, pace.still_s, config.threads, screen.style)
        )
        before = status
        processes.check()
        time.sleep(LOOK_S)


def remaining_s(status: JobStatus, steps_per_s: float | None) -> float:
    """Return how long the rest of the training takes at this speed; 0 where it is not known."""
    if not status.total_steps or not steps_per_s:
        return 0.0
    return (status.total_steps - status.step) / steps_per_s


def verify(config: Config, processes: Processes) -> tuple[bool, str]:
    """Return whether the ledger proves that each sample counted once per epoch, and its words."""
    done = subprocess.run(
        [sys.executable, "-m", "pod_runtime.verify", str(config.out / "checkpoint")],
        env=processes.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    processes.log("verify").write_text(done.stdout + done.stderr)
    said = (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()
    return done.returncode == 0, "verify: " + "; ".join(said[-2:])


def show_end(
    config: Config,
    status: JobStatus,
    killed: int,
    stopped: bool,
    verified: tuple[bool, str],
    leftovers: tuple[str, ...],
    screen: Screen,
) -> bool:
    """Print the table and the checks; return whether all held."""
    style = screen.style
    screen.say()
    header, *rows = view.stage_table(committed(status.stages))
    screen.say("  " + style.bold(header))
    for row in rows:
        screen.say("  " + row)
    screen.say()
    screen.say("  " + view.account_line(status.account))
    screen.say()
    results = checks(
        status,
        killed=killed,
        stopped=stopped,
        verified=verified[0],
        verdict=verified[1],
        floor=config.recipe.floor,
        leftovers=leftovers,
    )
    for line in view.check_lines(results, style):
        screen.say("  " + line)
    screen.say()
    for name, path in (
        ("logs", "logs"), ("checkpoints", "checkpoint"), ("status page, as it was", "status.html"),
    ):  # fmt: skip
        screen.say(f"  {name:<24}{config.out / path}")
    return all(each.holds for each in results)


def plan_epochs(config: Config, processes: Processes, screen: Screen) -> int:
    """Return how many epochs suit this machine, as the script alone shows it."""
    if config.epochs is not None:
        return config.epochs
    screen.news("first the script alone, as any script, to learn how fast it is here")
    speed, startup_s = train_alone(config, processes, screen)
    screen.news(
        f"{speed:,.0f} images/s by {view.workers(1, config.threads)}, and {startup_s:.1f} s to its "
        "first step"
    )
    cores = None if config.gpus else usable_cores()
    acts = plan_acts(config.pods)
    return epochs_for(acts, config.gap_s, speed, startup_s, config.pods, cores)


def run(config: Config, screen: Screen) -> bool:
    style = screen.style
    kind = "GPUs" if config.gpus else "CPU slots"
    name = {"paddle": "PaddlePaddle", "torch": "PyTorch"}[config.framework]
    title = f"EDL quickstart: {config.model} in {name} on 1,797 handwritten digits"
    screen.say(style.bold(title))
    each = "" if config.threads is None else f" of {view.plural(config.threads, 'thread')}"
    screen.say(f"  {config.pods} {kind}, one trainer{each} each; everything goes to {config.out}")
    processes = Processes(config.out)
    try:
        api = start_server(config, processes)
        screen.say(f"  status page: {api.url}/")
        screen.say(f"  a browser opens it, once, by {api.page_link()}")
        screen.say()
        epochs = plan_epochs(config, processes, screen)
        screen.news(
            f"now elastic: {epochs} epochs; the pods change when a stage has trained for "
            f"{config.gap_s:g} s; one kill -9"
        )
        start_job(config, epochs, api, processes)
        status, events, stopped = direct(config, api, processes, screen)
        screen.news(style.bold(f"{status.state.value}: {status.reason.rpartition(': ')[2]}"))
        (config.out / "status.html").write_text(api.page())
    except ApiError:
        time.sleep(0.5)  # its port is closed before it has ended
        processes.check()  # says more, if it has
        raise
    finally:
        # From here on Ctrl-C would only leave processes behind.
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        screen.live("stopping what was started")
        leftovers = processes.stop()
    verified = verify(config, processes)
    return show_end(config, status, len(deaths(events)), stopped, verified, leftovers, screen)


# --- the command line ---------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=sorted(EXAMPLES), default="paddle")
    parser.add_argument("--model", choices=sorted(RECIPES), default="lenet")
    parser.add_argument("--pods", type=int, help="the most pods; default: 3, or the GPUs up to 4")
    parser.add_argument("--epochs", type=int, help="default: as many as this needs to show itself")
    parser.add_argument("--gap_s", type=float, help="seconds that a stage trains before a change")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--out", type=Path, help="folder for all that is written; must not exist")
    args = parser.parse_args(argv)
    if args.framework == "torch" and args.model != "lenet":
        parser.error(f"argument --model: {args.model} is only there with --framework paddle")
    if importlib.util.find_spec(args.framework) is None:
        parser.error(
            f"argument --framework: {args.framework} is not installed for {sys.executable}; "
            f"./scripts/quickstart.sh --framework {args.framework} installs it"
        )
    usable, why_not = usable_gpus(args.framework) if args.device != "cpu" else (0, "")
    pods = args.pods if args.pods is not None else (min(4, usable) if usable >= 2 else 3)
    for name, value, low in (("--pods", pods, 2), ("--epochs", args.epochs, 1)):
        if value is not None and value < low:
            parser.error(f"argument {name}: must be at least {low}, got {value}")
    if args.gap_s is not None and not 0.5 <= args.gap_s <= 3600:
        parser.error(f"argument --gap_s: must be between 0.5 and 3600, got {args.gap_s:g}")
    if args.device == "gpu" and usable < pods:
        parser.error(f"argument --device: {usable} usable GPUs for {pods} pods: {why_not}")
    if why_not and args.device == "auto":
        print(f"  CPU it is: {why_not}", file=sys.stderr)
    out = args.out or ROOT / "edl_run" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"argument --out: {out}: {error.strerror}; name a folder that can be made")
    return Config(
        framework=args.framework,
        model=args.model,
        pods=pods,
        epochs=args.epochs,
        gap_s=args.gap_s or RECIPES[args.model].gap_s,
        seed=args.seed,
        gpus=usable >= pods,
        out=out.resolve(),
    )


def usable_gpus(framework: str) -> tuple[int, str]:
    """Return how many GPUs the trainers can use, and why not more where GPUs are seen."""
    try:
        seen = int(subprocess.check_output(["nvidia-smi", "--list-gpus"]).count(b"GPU "))
    except (OSError, subprocess.CalledProcessError):
        return 0, ""
    if seen == 0 or os.environ.get("EDL_NO_GPU"):
        return 0, ""
    if seen == 1:
        return 1, "this machine has one GPU, and pods that come and go need two or more"
    probe = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), framework],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode == 0:
        return seen, ""
    said = (probe.stdout.strip() or probe.stderr.strip()[-300:]).splitlines()
    return 0, (
        f"{said[-1] if said else 'it does not run on the GPUs'}. For the GPUs, install the build "
        f"that fits your driver into .venv: {INSTALL_PAGES[framework]}"
    )


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    config = parse()
    screen = Screen(sys.stdout)
    for number in _ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    try:
        held = run(config, screen)
    except KeyboardInterrupt:
        screen.say("Interrupted; everything that was started has been stopped.")
        return 130
    except (QuickstartError, ApiError, ConfigError) as error:
        screen.say(f"{screen.style.cross} {error}")
        return 1
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
