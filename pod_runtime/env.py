"""Make and read the environments of pods and trainers; nothing else does. Stdlib only.

    job client --pod_environment()--> pod (script, launcher): PodEnv.read()
    launcher   --trainer_environment()--> trainer: TrainerEnv.read()

docs/architecture.md lists what a pod gets.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from job_server.api.wire import Order, PlanPod, SlotKind, StagePlan, Way

POD_ID = "EDL_POD_ID"
POD_FOLDER = "EDL_POD_FOLDER"
RUN_MARKER = "EDL_RUN_MARKER"
CHANNEL = "EDL_CHANNEL"
RUNNING_ENV = "PADDLE_EDL"
SUBMITTED_AT = "EDL_SUBMITTED_AT"
JOB_ARGS = "EDL_JOB_ARGS"  # JSON
TASK_TOKEN = "EDL_TASK_TOKEN"  # opens the server's task queues and nothing else

# How glibc's allocator keeps what a step frees for the next one. By default it gives that back to
# the system, and gets each page of it again: 5 to 20 % of a small network's step on a CPU.
ALLOCATOR = {
    # Bytes that are free at the heap's end, above which it gives them back.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # Bytes of a block that is mapped by itself; glibc comes to this, unless the other one is set.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}

_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
_SECRETS = frozenset({"EDL_TOKEN", "EDL_TOKEN_FILE"})

# Variables of an outer launcher, or of a pod around this one. Each of them, if it were kept, would
# send a trainer to the wrong group.
_OF_A_POD = frozenset(
    {
        "PADDLE_JOBSERVER", "PADDLE_JOB_ID", "PADDLE_POD_ID", POD_ID, POD_FOLDER,
        RUN_MARKER, "EDL_POD_DIR", "EDL_NODE_ID", "EDL_SLOTS", "EDL_SLOT_KIND",
        "EDL_MAX_TRAINERS", "EDL_GRACE_S", SUBMITTED_AT, "EDL_SERVICE", "EDL_ADDR", "EDL_PORT",
        "EDL_PORTS", JOB_ARGS, TASK_TOKEN,
        *_SECRETS,
    }
)  # fmt: skip
_OF_A_TRAINER = frozenset(
    {
        "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_CURRENT_ENDPOINT", "PADDLE_RUNING_ENV", "PADDLE_MASTER", "PADDLE_GLOBAL_RANK",
        "PADDLE_LOCAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE",
        "PADDLE_DISTRI_BACKEND", "FLAGS_selected_gpus", "RANK", "WORLD_SIZE", "LOCAL_RANK",
        "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EDL_STAGE", "EDL_RUN_DIR", CHANNEL,
    }
)  # fmt: skip
OF_A_LAUNCHER = _OF_A_POD | _OF_A_TRAINER  # what no process has that a launcher has not started


class EnvError(ValueError):
    """A variable is missing or malformed; the text names it, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnv:
    """What a pod knows about itself."""

    job_server: str  # URL
    job_id: str
    pod_id: str
    pod_dir: Path  # the shim's folder; those of the node's other pods are its siblings
    node_id: str
    run_marker: str  # carried by every process of the pod; the client cleans up by it
    slots: tuple[int, ...]
    slot_kind: SlotKind
    max_trainers: int
    grace_s: float
    token_file: Path | None = None  # None: the server wants no token
    service: str | None = None  # what the teacher serves; None: a pod of trainers
    addr: str = ""  # of the node, as others reach it; only for teachers
    ports: tuple[int, ...] = ()  # on `addr`, of a teacher
    submitted_at: float = 0.0  # when the job was: its id may be used again; 0: not known
    args: tuple[str, ...] = ()  # of the job, which the script is to hand on to the trainers

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Read what `pod_environment` made for a pod of trainers.

        Raises:
            EnvError: this is not the environment of a pod.
        """
        kind = _text(environ, "EDL_SLOT_KIND")
        if kind not in {member.value for member in SlotKind}:
            raise EnvError(f"EDL_SLOT_KIND: expected gpu or cpu, got {kind!r}")
        token_file = environ.get("EDL_TOKEN_FILE")
        return cls(
            job_server=_text(environ, "PADDLE_JOBSERVER"),
            job_id=_text(environ, "PADDLE_JOB_ID"),
            pod_id=_text(environ, POD_ID),
            pod_dir=Path(_text(environ, "EDL_POD_DIR")),
            node_id=_text(environ, "EDL_NODE_ID"),
            run_marker=_text(environ, RUN_MARKER),
            slots=_slots(_text(environ, "EDL_SLOTS")),
            slot_kind=SlotKind(kind),
            max_trainers=_whole(environ, "EDL_MAX_TRAINERS", low=1),
            grace_s=_number(environ, "EDL_GRACE_S"),
            token_file=Path(token_file) if token_file else None,
            submitted_at=_number(environ, SUBMITTED_AT) if SUBMITTED_AT in environ else 0.0,
            args=_args(environ.get(JOB_ARGS, "[]")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnv:
    """What a trainer knows when it starts. Outside EDL: a world of one, or of Paddle's launcher."""

    rank: int  # in EDL, when its process was started: its stage's plan has the present one
    world_size: int  # likewise
    local_rank: int
    pod_id: str | None  # None: outside EDL
    pod_dir: Path | None  # None: outside EDL
    channel: str | None  # name of the launcher's abstract socket; None: outside EDL
    stage: int | None  # None: outside EDL
    max_trainers: int | None  # None: not known
    run_dir: Path | None  # None: not known
    join_on_gpu: bool = False  # try joining on GPUs, which is not tested
    job_server: str | None = None  # URL; None: outside EDL
    take_over: bool = False  # outside EDL: replace the training that has the folder of checkpoints

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Read what the launcher, `paddle.distributed.launch` or torchrun made, if any did.

        Raises:
            EnvError: a variable is malformed, or the rank is not below the world size.
        """
        rank_name, size_name = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"
        if size_name not in environ and {"RANK", "WORLD_SIZE"} <= environ.keys():  # torchrun's
            rank_name, size_name = "RANK", "WORLD_SIZE"
        world_size = _whole(environ, size_name, low=1, default=1)
        rank = _whole(environ, rank_name, low=0, default=0)
        if rank >= world_size:
            raise EnvError(f"{rank_name}: {rank} is not below {size_name}, {world_size}")
        channel = environ.get(CHANNEL) or None
        run_dir = environ.get("EDL_RUN_DIR")
        pod_dir = environ.get("EDL_POD_DIR")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_whole(environ, "LOCAL_RANK", low=0, default=rank),
            pod_id=environ.get(POD_ID) or None,
            pod_dir=Path(pod_dir) if pod_dir else None,
            channel=channel,
            stage=_whole(environ, "EDL_STAGE", low=0) if "EDL_STAGE" in environ else None,
            max_trainers=(
                _whole(environ, "EDL_MAX_TRAINERS", low=1)
                if "EDL_MAX_TRAINERS" in environ
                else None
            ),
            run_dir=Path(run_dir) if run_dir else None,
            join_on_gpu=environ.get("EDL_JOIN_ON_GPU") == "1",
            job_server=environ.get("PADDLE_JOBSERVER") or None,
            take_over=environ.get("EDL_TAKE_OVER") == "1",
        )


def pod_environment(base: Mapping[str, str], pod: PodEnv) -> dict[str, str]:
    """Return the environment of a pod's script: `pod`, and `base` without proxies and leftovers."""
    env = _without(base, _OF_A_POD | _OF_A_TRAINER)
    env |= {
        "PADDLE_JOBSERVER": pod.job_server,
        "PADDLE_JOB_ID": pod.job_id,
        "PADDLE_POD_ID": pod.pod_id,
        POD_ID: pod.pod_id,
        RUN_MARKER: pod.run_marker,
        "EDL_POD_DIR": str(pod.pod_dir),
        "EDL_NODE_ID": pod.node_id,
        "EDL_SLOTS": ",".join(map(str, pod.slots)),
        "EDL_SLOT_KIND": pod.slot_kind.value,
        "EDL_MAX_TRAINERS": str(pod.max_trainers),
        "EDL_GRACE_S": f"{pod.grace_s:g}",
        "PADDLE_RUNING_ENV": RUNNING_ENV,
        SUBMITTED_AT: repr(pod.submitted_at),
    }
    if pod.args:
        env[JOB_ARGS] = json.dumps(pod.args)
    if pod.service is not None:
        env |= {"EDL_SERVICE": pod.service, "EDL_ADDR": pod.addr}
        if pod.ports:
            env |= {"EDL_PORT": str(pod.ports[0]), "EDL_PORTS": ",".join(map(str, pod.ports))}
    elif pod.token_file is not None:
        # Not for a teacher: it has no launcher, and would use the server's token as its own.
        env["EDL_TOKEN_FILE"] = str(pod.token_file)
    return env | _devices(pod)


def trainer_environment(
    base: Mapping[str, str],
    pod: PodEnv,
    plan: StagePlan,
    rank: int,
    *,
    channel: str,
    run_dir: Path,
    interface: str | None = None,
) -> dict[str, str]:
    """Return the environment of the trainer `rank` of `plan`, one of this pod's.

    It has no token: a training script is the user's code and does not need it.

    Args:
        interface: the network interface that has this pod's address; None: not known. It is set for
            gloo, which otherwise listens at the address of the host's name: on many machines that
            is 127.0.0.1 or 127.0.1.1, where no other node finds it.

    Raises:
        ValueError: `rank` is not one of this pod's in `plan`.
    """
    mine = next((each for each in plan.pods if each.pod_id == pod.pod_id), None)
    if mine is None or rank not in mine.ranks:
        raise ValueError(f"rank: {rank} is not one of pod {pod.pod_id} in stage {plan.stage}")
    env = _without(base, _OF_A_TRAINER | _SECRETS)
    env |= _of_the_stage(plan, mine, rank)
    env |= {
        "PADDLE_JOB_ID": pod.job_id,
        "PADDLE_POD_ID": pod.pod_id,
        "PADDLE_JOBSERVER": pod.job_server,
        "PADDLE_RUNING_ENV": RUNNING_ENV,
        POD_ID: pod.pod_id,
        RUN_MARKER: pod.run_marker,
        "EDL_POD_DIR": str(pod.pod_dir),
        "EDL_RUN_DIR": str(run_dir),
        CHANNEL: channel,
    }
    env |= _devices(pod)
    if pod.slot_kind is SlotKind.GPU:
        env["FLAGS_selected_gpus"] = env["LOCAL_RANK"]
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env | _of_the_cpu(env, pod)


def stage_environment(plan: StagePlan, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the stage for the trainer that is `rank` of `plan`.

    Raises:
        EnvError: it is not of a pod of the plan.
    """
    mine = next((pod for pod in plan.pods if pod.pod_id == environ.get(POD_ID)), None)
    if mine is None or rank not in mine.ranks:
        raise EnvError(f"{POD_ID}: rank {rank} of stage {plan.stage} is not of this trainer's pod")
    return _of_the_stage(plan, mine, rank)


def own_rank(plan: StagePlan, env: TrainerEnv) -> int:
    """Return a trainer's rank in `plan`: its place in its pod stays the same in all stages.

    Raises:
        EnvError: it is not of a pod of the plan.
    """
    mine = next((pod for pod in plan.pods if pod.pod_id == env.pod_id), None)
    if mine is None or env.local_rank >= len(mine.ranks):
        raise EnvError(
            f"{POD_ID}: stage {plan.stage} has no trainer {env.local_rank} of pod {env.pod_id}; "
            f"leave the variables that the launcher sets alone"
        )
    return mine.ranks[env.local_rank]


def plan_outside_edl(env: TrainerEnv) -> StagePlan:
    """Return the one stage of a training that no launcher runs: each rank a pod and a node."""
    pods = tuple(
        PlanPod(
            pod_id=str(rank), pod_rank=rank, node_id=str(rank), addr="", slots=(), ranks=(rank,),
            ports=(),
        )
        for rank in range(env.world_size)
    )  # fmt: skip
    return StagePlan(
        job_id="", stage=1, flag=-1, way=Way.START, order=Order.GO, pods=pods,
        master="",  # the framework knows it
        max_trainers=env.max_trainers or env.world_size,
    )  # fmt: skip


def _of_the_stage(plan: StagePlan, mine: PlanPod, rank: int) -> dict[str, str]:
    endpoints = {
        each_rank: f"{each.addr}:{port}"
        for each in plan.pods
        for each_rank, port in zip(each.ranks, each.ports, strict=True)
    }
    master_addr, _, master_port = plan.master.rpartition(":")
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(plan.world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints[each] for each in sorted(endpoints)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(mine.ranks.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(mine.ranks)),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "EDL_STAGE": str(plan.stage),
        "EDL_MAX_TRAINERS": str(plan.max_trainers),
    }


def spare_environment(base: Mapping[str, str], pod: PodEnv) -> dict[str, str]:
    """Return a trainer's environment before its stage and rank are known.

    It has the devices and the number of threads, which a framework reads when it is imported.
    """
    env = _without(base, _OF_A_TRAINER | _SECRETS)
    env |= {POD_ID: pod.pod_id, RUN_MARKER: pod.run_marker, **_devices(pod)}
    return env | _of_the_cpu(env, pod)


def checkpoint_path(environ: Mapping[str, str]) -> Path | None:
    """Return the local folder of the job's checkpoints; None: not known, or a URL."""
    value = environ.get("EDL_CHECKPOINT") or environ.get("PADDLE_EDL_FLEET_CHECKPOINT_PATH") or ""
    return Path(value) if value and "://" not in value else None


def _of_the_cpu(env: Mapping[str, str], pod: PodEnv) -> dict[str, str]:
    if pod.slot_kind is SlotKind.GPU:
        return {}
    threads = env.get("OMP_NUM_THREADS", "1")  # a CPU slot is one core
    has_own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in env)
    allocator = {} if has_own else ALLOCATOR
    return {"PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": threads, **allocator}


def _devices(pod: PodEnv) -> dict[str, str]:
    """Return the variables that show CUDA the pod's GPUs only, in NVML's order."""
    gpus = ",".join(map(str, pod.slots)) if pod.slot_kind is SlotKind.GPU else ""
    return {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _without(base: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    drop = frozenset(names)
    return {k: v for k, v in base.items() if k not in drop and k.lower() not in _PROXIES}


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise EnvError(f"{name}: not set; a pod's script is started by the job client or `edl run`")
    return value


def _whole(environ: Mapping[str, str], name: str, *, low: int, default: int | None = None) -> int:
    value = environ.get(name, "")
    if not value and default is not None:
        return default
    if not value.isascii() or not value.isdigit() or int(value) < low:
        raise EnvError(f"{name}: expected a whole number of at least {low}, got {value!r}")
    return int(value)


def _number(environ: Mapping[str, str], name: str) -> float:
    value = _text(environ, name)
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise EnvError(f"{name}: expected seconds, 0 or more, got {value!r}")
    return number


def _args(value: str) -> tuple[str, ...]:
    try:
        args = json.loads(value)
    except ValueError:
        args = None
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise EnvError(f"{JOB_ARGS}: expected a list of texts in JSON, got {value[:60]!r}")
    return tuple(args)


def _slots(value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise EnvError(f"EDL_SLOTS: expected numbers such as 0,1, got {value!r}")
    return tuple(map(int, parts))
