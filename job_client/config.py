"""Hold the configuration of a job client."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """A valid command line, its paths made absolute against the folder of the client."""

    cwd: Path
    log_dir: Path
    log_level: int
    pod_path: Path  # pods' own folders are made here
    server_url: str
    environ: Mapping[str, str]  # what pods start from
    script: str | None = None  # as given; None: --jobs_dir
    script_args: tuple[str, ...] = ()
    package_sh: Path | None = None  # None: the client makes the pod's folder itself
    jobs_dir: Path | None = None  # None: a script was given
    job_id: str | None = None  # None: the server's only job, or any with --jobs_dir
    node_id: str | None = None  # None: made of the host's name and the log folder's marker
    addr: str | None = None  # None: found out
    port_range: tuple[int, int] | None = None  # None: chosen, and chosen again when taken
    cpu_slots: int | None = None  # None: GPUs where there are any
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES; None: all
    grace_s: float | None = None  # None: as each job says
    stop_after_s: float | None = None  # None: pods go on however long the server is away
    keep_pods: bool = False
    token: str | None = None  # None: the server wants none
    token_file: Path | None = None  # None: no token, or it came without a file
