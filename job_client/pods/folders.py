"""Make the folder that a pod runs in, and find its script."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from job_client.config import ClientConfig
from job_client.errors import PodStartError
from job_server.api.wire import NodePod, WireError, check_id
from pod_runtime import shim_wire
from pod_runtime.processes import signal_name

logger = logging.getLogger(__name__)

TRAIN_SH = "train.sh"
PACKAGE_SH = "package.sh"
ANSWER_S = 1.0  # a folder that takes longer to list may never answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make one pod's folder and what to run in it."""

    package_sh: Path | None  # None: an empty folder will do
    package_dir: Path  # the package script's working folder
    folder: Path  # the pod's own; the package script makes it
    script: Path  # absolute
    args: tuple[str, ...]


class JobsDir:
    """What is in `--jobs_dir`. Read in a thread of its own: its file server may hang."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: tuple[str, ...] = ()  # as they were read last
        self._trouble = ""  # why they cannot be read; "": they can
        self._lock = threading.Lock()  # guards the next one
        self._reader: threading.Thread | None = None  # None: not read yet

    def jobs(self) -> tuple[str, ...]:
        """Return the jobs; those known last where it cannot be read now, or does not answer."""
        with self._lock:
            if self._reader is not None and self._reader.is_alive():
                return self._jobs
            reader = threading.Thread(target=self._read, name="jobs_dir", daemon=True)
            try:
                reader.start()
            except RuntimeError as error:  # no thread is to be had
                self._warn(str(error))
                return self._jobs
            self._reader = reader
            reader.join(ANSWER_S)
            if reader.is_alive():
                self._warn(f"{self._path} does not answer")
            return self._jobs

    def _read(self) -> None:
        try:
            self._jobs = list_jobs(self._path)
            self._trouble = ""
        except OSError as error:
            self._warn(str(error))

    def _warn(self, trouble: str) -> None:
        if self._trouble != trouble:
            logger.warning("--jobs_dir: %s; its jobs stay as they were", trouble)
        self._trouble = trouble


def list_jobs(jobs_dir: Path) -> tuple[str, ...]:
    """Return the jobs that can run from `jobs_dir`: its direct subfolders with a train.sh.

    Raises:
        OSError: `jobs_dir` cannot be read, say because its file server is away.
    """
    found = []
    for name in sorted(os.listdir(jobs_dir)):
        with contextlib.suppress(PodStartError):
            _job_folder(jobs_dir, name)
            found.append(name)
    return tuple(found)


def _job_folder(jobs_dir: Path, name: str) -> Path:
    """Return the job's folder, which is a direct subfolder of `jobs_dir`.

    Raises:
        PodStartError: the server names anything else.
    """
    try:
        check_id("folder", name)
    except WireError as error:
        raise PodStartError(str(error)) from None
    folder = jobs_dir / name
    script = folder / TRAIN_SH
    try:
        root = jobs_dir.resolve()
        if folder.resolve() != root / name or script.resolve() != root / name / TRAIN_SH:
            raise PodStartError(f"folder: {name} is a link out of --jobs_dir {jobs_dir}")
        if not script.is_file():
            raise PodStartError(f"folder: {name} has no {TRAIN_SH} in --jobs_dir {jobs_dir}")
    except (OSError, RuntimeError) as error:  # not to be read, or a link that leads to itself
        raise PodStartError(f"folder: {name} in --jobs_dir {jobs_dir}: {error}") from None
    return folder


def recipe_for(config: ClientConfig, pod: NodePod) -> Recipe:
    """Return how to make `pod`.

    Raises:
        PodStartError: it names a folder but this client has a single script, or the reverse.
    """
    if config.jobs_dir is not None:
        if pod.folder is None:
            raise PodStartError(
                f"folder: job {pod.job_id} names none, and this client was started with "
                f"--jobs_dir {config.jobs_dir}; submit it with one of its subfolders"
            )
        job_folder = _job_folder(config.jobs_dir, pod.folder)
        package = job_folder / PACKAGE_SH
        return Recipe(
            package_sh=package if package.is_file() else None,
            package_dir=job_folder,
            folder=config.pod_path / pod.job_id / pod.pod_id,
            script=job_folder / TRAIN_SH,
            args=pod.args,
        )
    if pod.folder is not None:
        raise PodStartError(
            f"folder: job {pod.job_id} names {pod.folder!r}, and this client was started with one "
            "script; start a client with --jobs_dir"
        )
    if config.script is None:
        raise PodStartError("script: this client was started without one")
    folder = config.pod_path / pod.pod_id
    base = folder if config.package_sh is not None else config.cwd
    return Recipe(
        package_sh=config.package_sh,
        package_dir=config.cwd,
        folder=folder,
        script=base / config.script,
        args=(*config.script_args, *pod.args),
    )


def make_folder(
    recipe: Recipe, pod_id: str, env: Mapping[str, str], log: Path, cancel: threading.Event
) -> None:
    """Make the pod's folder, and check that the script exists.

    Args:
        env: of the package script.
        log: takes the package script's output.
        cancel: once set, a running package script is ended.

    Raises:
        PodStartError: that failed; carries the package script's exit code.
    """
    # Before its files are written over; the shim makes sure of it. A link leads to what is shared.
    if recipe.folder.is_dir() and not recipe.folder.is_symlink():
        lock = shim_wire.lock_folder(recipe.folder)
        if lock is None:
            raise PodStartError(shim_wire.in_use(recipe.folder))
        os.close(lock)
    if recipe.package_sh is None:
        try:
            recipe.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PodStartError(f"--pod_path: cannot make {recipe.folder}: {error}") from None
    else:
        _run_package(recipe, recipe.package_sh, pod_id, env, log, cancel)
    if not recipe.script.is_file():
        remedy = "; the package script must put it there" if recipe.package_sh else ""
        raise PodStartError(f"training script {recipe.script}: no such file{remedy}", 127)


def _run_package(
    recipe: Recipe,
    package_sh: Path,
    pod_id: str,
    env: Mapping[str, str],
    log: Path,
    cancel: threading.Event,
) -> None:
    command = ["bash", str(package_sh), "-pod_id", pod_id]
    try:
        recipe.folder.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                cwd=recipe.package_dir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    except OSError as error:
        raise PodStartError(f"package script {package_sh}: cannot run: {error}") from None
    logger.info("pod %s: package script %s, pid %d", pod_id, package_sh, process.pid)
    code = _wait(process, cancel)
    if cancel.is_set():
        raise PodStartError("stopped before the package script had ended")
    if code != 0:
        raise PodStartError(f"package script {package_sh} {_outcome(code)}", code)
    if not recipe.folder.is_dir():
        raise PodStartError(
            f"package script {package_sh} did not make {recipe.folder}; "
            "it has to make pod_path/ID, where ID is the value of -pod_id"
        )


def _wait(process: subprocess.Popen[bytes], cancel: threading.Event) -> int:
    while True:
        try:
            return process.wait(0.05)
        except subprocess.TimeoutExpired:
            if cancel.is_set():
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()


def _outcome(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"ended by {signal_name(-code)}"
