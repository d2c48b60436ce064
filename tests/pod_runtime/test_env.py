"""What pods and trainers find in their environments."""

from dataclasses import replace
from pathlib import Path

import pytest

from job_server.api.wire import Order, PlanPod, SlotKind, StagePlan, Way
from pod_runtime.env import (
    EnvError,
    PodEnv,
    TrainerEnv,
    own_rank,
    plan_outside_edl,
    pod_environment,
    trainer_environment,
)
from tests.programs import loaded_by

POD = PodEnv(
    job_server="http://127.0.0.1:8180",
    job_id="job",
    pod_id="pod_1_0",
    pod_dir=Path("/logs/pods/pod_1_0"),
    node_id="node-a",
    run_marker="f00d",
    slots=(4, 6),
    slot_kind=SlotKind.GPU,
    max_trainers=8,
    grace_s=2.5,
    token_file=Path("/logs/token"),
    submitted_at=1763815407.123457,
    args=("--lr", "0.1"),
)
PLAN = StagePlan(
    job_id="job",
    stage=5,
    flag=3,
    way=Way.DRAIN,
    order=Order.START,
    pods=(
        PlanPod(pod_id="pod_0_0", pod_rank=0, node_id="a", addr="10.0.0.1", slots=(0, 1),
                ranks=(0, 1), ports=(20000, 20001)),
        PlanPod(pod_id="pod_1_0", pod_rank=1, node_id="b", addr="10.0.0.2", slots=(4, 6),
                ranks=(2, 3), ports=(20010, 20011)),
    ),
    master="10.0.0.1:20000",
    max_trainers=8,
)  # fmt: skip


def trainer(rank: int = 3, pod: PodEnv = POD, **base: str) -> dict[str, str]:
    return trainer_environment(
        base | pod_environment({}, pod), pod, PLAN, rank, channel="edl-1", run_dir=Path("/run")
    )


def test_a_pod_reads_what_was_made_for_it():
    assert PodEnv.read(pod_environment({}, POD)) == POD
    without = replace(POD, token_file=None)
    assert PodEnv.read(pod_environment({}, without)) == without


def test_proxies_and_leftovers_of_other_launchers_do_not_reach_a_pod():
    base = {
        "http_proxy": "http://proxy:1", "HTTPS_PROXY": "http://proxy:1", "no_proxy": "x",
        "PADDLE_TRAINER_ENDPOINTS": "old:1", "RANK": "7", "EDL_TOKEN": "secret", "EDL_STAGE": "1",
        "PATH": "/bin", "PADDLE_EDL_IMAGENET_PATH": "/data",
    }  # fmt: skip
    env = pod_environment(base, POD)
    assert env["PATH"] == "/bin"
    assert env["PADDLE_EDL_IMAGENET_PATH"] == "/data"
    assert not set(base) - {"PATH", "PADDLE_EDL_IMAGENET_PATH"} & set(env)


@pytest.mark.parametrize(
    ("interface", "base", "expected"),
    [
        pytest.param("eth1", {}, "eth1", id="that of the pod's address"),
        pytest.param("eth1", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0", id="the user knows better"),
        pytest.param(None, {}, None, id="not known"),
    ],
)
def test_gloo_is_told_where_to_listen(interface, base, expected):
    env = trainer_environment(
        base, POD, PLAN, 3, channel="edl-1", run_dir=Path("/run"), interface=interface
    )
    assert env.get("GLOO_SOCKET_IFNAME") == expected


def test_a_trainer_gets_the_contract_of_paddle_and_of_other_frameworks():
    env = trainer(rank=3)
    expected = {
        "PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:20000,10.0.0.1:20001,10.0.0.2:20010,10.0.0.2:20011",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:20011", "PADDLE_JOB_ID": "job",
        "PADDLE_POD_ID": "pod_1_0", "PADDLE_JOBSERVER": "http://127.0.0.1:8180",
        "PADDLE_RUNING_ENV": "PADDLE_EDL", "CUDA_VISIBLE_DEVICES": "4,6",
        "FLAGS_selected_gpus": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20000",
        "EDL_STAGE": "5", "EDL_MAX_TRAINERS": "8", "EDL_RUN_DIR": "/run",
        "EDL_POD_ID": "pod_1_0", "EDL_RUN_MARKER": "f00d", "EDL_CHANNEL": "edl-1",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected


def test_a_trainer_never_sees_the_token():
    assert not {"EDL_TOKEN", "EDL_TOKEN_FILE"} & set(trainer(EDL_TOKEN="secret"))


def test_a_cpu_trainer_uses_gloo_and_sees_no_gpu():
    env = trainer(pod=replace(POD, slot_kind=SlotKind.CPU))
    assert env["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "1"
    assert "FLAGS_selected_gpus" not in env


def test_the_users_own_number_of_threads_stays():
    env = trainer(pod=replace(POD, slot_kind=SlotKind.CPU), OMP_NUM_THREADS="4")
    assert env["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_settings_of_the_allocator_stay(name):
    base = {name: "1"}
    env = trainer(pod=replace(POD, slot_kind=SlotKind.CPU), rank=3, **base)
    found = {key: each for key, each in env.items() if key.startswith(("MALLOC", "GLIBC"))}
    assert found == base


def test_a_rank_of_another_pod_is_refused():
    with pytest.raises(ValueError, match="rank: 0 is not one of pod pod_1_0 in stage 5"):
        trainer(rank=0)


def test_a_trainer_reads_what_was_made_for_it():
    read = TrainerEnv.read(trainer(rank=2))
    assert (read.rank, read.world_size, read.local_rank) == (2, 4, 0)
    assert (read.stage, read.max_trainers, read.channel) == (5, 8, "edl-1")
    assert read.run_dir == Path("/run")


def test_a_trainer_finds_its_rank_in_every_plan_by_its_place_in_its_pod():
    second = TrainerEnv.read(trainer(rank=3))
    assert own_rank(PLAN, second) == 3
    left = replace(PLAN, pods=(replace(PLAN.pods[1], ranks=(0, 1)),), missing_pods=("pod_0_0",))
    assert own_rank(left, second) == 1
    with pytest.raises(EnvError, match="EDL_POD_ID: stage 5 has no trainer 1 of pod pod_1_0"):
        own_rank(replace(PLAN, pods=PLAN.pods[:1]), second)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(
            {"PADDLE_TRAINERS_NUM": "3", "PADDLE_TRAINER_ID": "2"}, id="Paddle's launcher"
        ),
        pytest.param({"WORLD_SIZE": "3", "RANK": "2"}, id="torchrun"),
    ],
)
def test_outside_edl_each_rank_is_a_pod_on_a_node_of_its_own(environ):
    env = TrainerEnv.read(environ)
    assert env.rank == 2
    plan = plan_outside_edl(env)
    assert (plan.world_size, plan.max_trainers, plan.master) == (3, 3, "")
    assert [(pod.node_id, pod.ranks) for pod in plan.pods] == [
        ("0", (0,)),
        ("1", (1,)),
        ("2", (2,)),
    ]


def test_outside_edl_a_trainer_is_a_world_of_one():
    read = TrainerEnv.read({})
    assert (read.rank, read.world_size, read.stage, read.channel) == (0, 1, None, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"EDL_SLOTS": ""}, "EDL_SLOTS: not set"),
        ({"EDL_SLOTS": "0;1"}, "EDL_SLOTS: expected numbers such as 0,1, got '0;1'"),
        ({"EDL_SLOT_KIND": "tpu"}, "EDL_SLOT_KIND: expected gpu or cpu, got 'tpu'"),
        ({"EDL_MAX_TRAINERS": "0"}, "EDL_MAX_TRAINERS: expected a whole number of at least 1"),
        ({"EDL_GRACE_S": "soon"}, "EDL_GRACE_S: expected seconds"),
        ({"EDL_GRACE_S": "nan"}, "EDL_GRACE_S: expected seconds"),
        ({"PADDLE_JOB_ID": ""}, "PADDLE_JOB_ID: not set; a pod's script is started by"),
    ],
)
def test_a_malformed_pod_environment_names_the_variable(change, text):
    with pytest.raises(EnvError) as refused:
        PodEnv.read(pod_environment({}, POD) | change)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"PADDLE_TRAINER_ID": "1"},
        {"PADDLE_TRAINER_ID": "x", "PADDLE_TRAINERS_NUM": "2"},
        {"PADDLE_TRAINERS_NUM": "0"},
    ],
)
def test_a_malformed_trainer_environment_is_refused(environ):
    with pytest.raises(EnvError):
        TrainerEnv.read(environ)


def test_importing_it_loads_no_framework():
    assert {"paddle", "numpy", "flask", "requests"}.isdisjoint(loaded_by("pod_runtime.env"))
