"""Hold the configuration of a job client."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KEEP_FOLDERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """A valid command line, its paths made absolute against the folder of the client."""

    # Where it stands
    cwd: Path
    log_dir: Path
    log_level: int
    node_id: str | None = None  # None: made of the host's name and the log folder's marker

    # What it runs: one script, or jobs by the name of their folder
    script: str | None = None  # as given; None: --jobs_dir
    script_args: tuple[str, ...] = ()
    package_sh: Path | None = None  # None: the client makes the pod's folder itself
    jobs_dir: Path | None = None  # None: a script was given
    pod_path: Path  # pods' own folders are made here
    keep_folders: int = KEEP_FOLDERS  # of pods that are over, in log_dir; 0: all
    environ: Mapping[str, str]  # what pods start from

    # The server
    server_url: str
    job_id: str | None = None  # None: the server's only job, or any with --jobs_dir
    token: str | None = None  # None: the server wants none
    token_file: Path | None = None  # None: no token, or it came without a file

    # What it offers
    addr: str | None = None  # None: found out
    port_range: tuple[int, int] | None = None  # None: chosen, and chosen again when taken
    cpu_slots: int | None = None  # None: GPUs where there are any
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES; None: all

    # When pods end
    grace_s: float | None = None  # None: as each job says
    stop_after_s: float | None = None  # None: pods go on however long the server is away
    keep_pods: bool = False
    preemption_notice: str | None = None  # for bash; None: nothing is asked
