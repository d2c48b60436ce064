"""Three jobs share the slots of this machine, as in EDL's first tutorial, with real trainers.

    python examples/shared_cluster/story.py [--slots 6] [--epochs 150]

The first job takes all slots. The second comes, then the third: it is pending until the others have
given way, and all three run. `edl top --lines` prints it meanwhile. At the end `edl verify` proves
of each job that every sample of every epoch was trained exactly once. The exit code is 0 if all of
that has happened.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from job_server.api.api_client import ApiClient
from job_server.api.errors import ServerAway
from job_server.api.wire import JobSpec, JobState, JobStatus, ScriptKind, ScriptSpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
END_S = 60.0  # for a program to end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=6, help="CPU slots, 5 or more (6)")
    parser.add_argument("--epochs", type=int, default=150, help="of each job (150)")
    parser.add_argument("--limit_s", type=float, default=600.0, help="for each act (600)")
    parser.add_argument("--folder", type=Path, help="for logs and checkpoints; else one that goes")
    args = parser.parse_args()
    if args.slots < 5:
        parser.error(f"--slots: three jobs need 5 or more, got {args.slots}")
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        return tell(stack, folder, args.slots, args.epochs, args.limit_s)


def tell(stack: ExitStack, folder: Path, slots: int, epochs: int, limit_s: float) -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {
        **os.environ,
        "EDL_CHECKPOINTS": str(folder / "checkpoints"),
        "EDL_EPOCHS": str(epochs),
        "OMP_NUM_THREADS": "1",
    }
    db = str(folder / "server.sqlite")
    start(stack, folder, environ, "server", "--no_job", "--server_port", str(port), "--db", db)
    api = stack.enter_context(ApiClient(url))
    wait_until(lambda: answers(api), limit_s, "the server answers")
    start(
        stack, folder, environ, "client", "--job_server", url, "--cpu_slots", str(slots),
        "--jobs_dir", str(HERE / "jobs"), "--port_range", "auto",
        "--log_dir", str(folder / "client"), "--pod_path", str(folder / "pods"),
    )  # fmt: skip
    wait_until(lambda: any(node.report for node in api.nodes()), limit_s, "the client reports")
    start(stack, None, environ, "top", "--server", url, "--lines", "--interval_s", "5")

    submit(api, "example", least=1, most=slots)
    wait_until(lambda: pods(api) == {"example": slots}, limit_s, "example has all slots")
    submit(api, "example1", least=2, most=slots - 2)
    wait_until(lambda: runs(api, 2), limit_s, "example has given way to example1")
    submit(api, "example2", least=2, most=slots - 2)
    wait_until(lambda: runs(api, 3), limit_s, "all three run")
    together = pods(api)
    print("all run:", " | ".join(f"{name} {count}" for name, count in together.items()), flush=True)
    wait_until(lambda: all(job.state.ended for job in api.jobs()), limit_s, "all have ended")

    failed = [job for job in api.jobs() if job.state is not JobState.SUCCEEDED]
    for job in failed:
        print(f"{job.job_id}: {job.state.value}: {job.reason}")
    proven = [verify(folder / "checkpoints" / name) for name in together]
    return 0 if all(proven) and not failed else 1


def start(
    stack: ExitStack, folder: Path | None, environ: Mapping[str, str], verb: str, *args: str
) -> None:
    """Start `edl VERB`, which ends with the story. `folder`: for its log; None: it is shown."""
    log = None if folder is None else stack.enter_context((folder / f"{verb}.log").open("ab"))
    command = [sys.executable, "-m", "edl", verb, *args]
    program = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    stack.callback(end, program)


def end(program: "subprocess.Popen[bytes]") -> None:
    program.terminate()
    try:
        program.wait(END_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def submit(api: ApiClient, name: str, least: int, most: int) -> None:
    print(
        f"edl submit --name {name} --folder digits --share --min {least} --max {most}", flush=True
    )
    api.submit(
        JobSpec(
            job_id=name, folder="digits", share=True, min_pods=least, max_pods=most,
            script=ScriptSpec(kind=ScriptKind.NONE),
        )
    )  # fmt: skip


def pods(api: ApiClient) -> dict[str, int]:
    """Return how many pods each job trains on."""
    return {job.job_id: len(job.pods) if trains(job) else 0 for job in api.jobs()}


def trains(job: JobStatus) -> bool:
    return job.state is JobState.RUNNING and any(each.first_step_at for each in job.stages)


def runs(api: ApiClient, count: int) -> bool:
    found = pods(api)
    if any(job.state.ended for job in api.jobs()):
        raise SystemExit(f"a job has ended before {count} could run together: give more --epochs")
    return len(found) == count and all(found.values())


def verify(checkpoint: Path) -> bool:
    """Print what `edl verify` says of a job; return whether it is proven."""
    command = [sys.executable, "-m", "edl", "verify", str(checkpoint)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def answers(api: ApiClient) -> bool:
    try:
        api.health()
    except ServerAway:
        return False
    return True


def wait_until(done: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
