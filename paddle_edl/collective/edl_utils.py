"""What a script asked about its cluster: the pods of the running stage, from the job server.

`Edlenv().get_cluster()` asks by the original's route `query_pods`. What only the original's own
launcher called is not here: barriers and its key-value server. Our launcher needs neither.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from job_server.api.api_client import ApiClient
from job_server.api.command_line import read_token
from job_server.api.errors import Retryable
from job_server.api.wire import OriginalPods

__all__ = ["Cluster", "Edlenv", "Hdfs", "Pod", "Trainer", "edl_barrier"]

RUNNING_ENV = "PADDLE_EDL"
PATIENCE_S = 30 * 60.0
RETRY_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Hdfs:
    """Where the original's launcher was told to keep checkpoints. EDL looks at none of it."""

    hdfs_name: str | None = None
    hdfs_ugi: str | None = None
    hdfs_path: str | None = None

    def is_valid(self) -> bool:
        """Return whether all three are given."""
        return None not in (self.hdfs_name, self.hdfs_ugi, self.hdfs_path)


@dataclass(slots=True, kw_only=True)
class Trainer:
    endpoint: str  # host:port
    rank: int  # in the job
    gpus: list[int]  # its number in the pod


@dataclass(slots=True, kw_only=True)
class Pod:
    rank: int
    id: str
    addr: str
    port: int
    gpus: list[int]
    trainers: list[Trainer]

    def get_visible_gpus(self) -> str:
        """Return the pod's GPUs as CUDA_VISIBLE_DEVICES has them."""
        return ",".join(map(str, self.gpus))


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The pods of the running stage, in the order of their ranks."""

    job_server: str
    job_id: str
    job_stage_flag: int  # -1 before the first change
    pods: list[Pod] = field(default_factory=list)
    hdfs: Hdfs | None = None

    def trainers_endpoints(self) -> list[str]:
        """Return host:port of each trainer, by rank."""
        return [trainer.endpoint for pod in self.pods for trainer in pod.trainers]

    def trainers_nranks(self) -> int:
        """Return the number of trainers."""
        return len(self.trainers_endpoints())

    def pods_endpoints(self) -> list[str]:
        """Return host:port of each pod, by rank."""
        return [f"{pod.addr}:{pod.port}" for pod in self.pods]

    def pods_nranks(self) -> int:
        """Return the number of pods."""
        return len(self.pods)

    def get_pod_by_id(self, pod_id: str) -> Pod | None:
        """Return the pod of this id; None: the running stage has none."""
        return next((pod for pod in self.pods if pod.id == str(pod_id)), None)


class Edlenv:
    """What a pod's environment says: its job server, its job and its own id."""

    def __init__(self) -> None:
        self.running_env = os.getenv("PADDLE_RUNING_ENV", "")  # the original's spelling
        self.job_server = os.getenv("PADDLE_JOBSERVER")
        self.job_id = os.getenv("PADDLE_JOB_ID")
        self.pod_id = os.getenv("PADDLE_POD_ID")

    def is_under_edl(self) -> bool:
        """Return whether this process belongs to a pod."""
        return self.running_env == RUNNING_ENV

    def get_cluster(self, hdfs: Hdfs | None = None) -> tuple[Cluster, Pod | None]:
        """Ask the job server for the running stage; try again for up to 30 minutes.

        Returns:
            The cluster, and this pod in it: None if the running stage is without it.

        Raises:
            RuntimeError: this process belongs to no pod.
            JobServerError: there is no such job, or no server answered in time.
        """
        if not self.is_under_edl() or not self.job_server or not self.job_id:
            raise RuntimeError(
                "Edlenv: this process is in no pod (PADDLE_RUNING_ENV, PADDLE_JOBSERVER and "
                "PADDLE_JOB_ID are not all set); start it by a job client"
            )
        found = self._query(self.job_server, self.job_id)
        cluster = Cluster(
            job_server=self.job_server,
            job_id=found.job_id,
            job_stage_flag=found.job_stage_flag,
            pods=_pods(found),
            hdfs=hdfs,
        )
        return cluster, cluster.get_pod_by_id(self.pod_id or "")

    def _query(self, job_server: str, job_id: str) -> OriginalPods:
        give_up = time.monotonic() + PATIENCE_S
        with ApiClient(job_server, read_token(None, os.environ)) as client:
            while True:
                try:
                    return client.query_pods(job_id)
                except Retryable as error:
                    if time.monotonic() > give_up:
                        raise
                    logger.warning("%s; trying again", error)
                    time.sleep(RETRY_S)


def edl_barrier(*_args: object, **_options: object) -> NoReturn:
    """Refuse: the original's launcher made its pods wait for each other by it."""
    raise RuntimeError(
        "edl_barrier: the launcher lets a pod's trainers start when the stage is complete; start "
        "the script by python -m paddle_edl.collective.launch, and leave this call out"
    )


def _pods(found: OriginalPods) -> list[Pod]:
    pods: list[Pod] = []
    rank = 0
    for number, each in enumerate(found.pods):
        trainers = _trainers(each.addr, each.trainer_ports, rank)
        rank += len(trainers)
        pods.append(
            Pod(
                rank=number,
                id=each.pod_id,
                addr=each.addr,
                port=each.pod_port,
                gpus=list(each.gpus),
                trainers=trainers,
            )
        )
    return pods


def _trainers(addr: str, ports: Sequence[int], first_rank: int) -> list[Trainer]:
    return [
        Trainer(endpoint=f"{addr}:{port}", rank=first_rank + index, gpus=[index])
        for index, port in enumerate(ports)
    ]
