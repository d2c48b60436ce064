"""The README of 2020, followed with `-m` added: real programs by the original's names."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from job_server.api.api_client import ApiClient
from job_server.api.errors import Retryable
from job_server.api.wire import JobState
from tests.distill_reader.balance.redis_process import RedisProcess
from tests.support import free_port, wait_until

PACKAGE = """\
while true ; do
  case "$1" in
    -pod_id) pod_id="$2" ; shift 2 ;;
    *) break ;;
  esac
done
mkdir -p resnet50_pod/${pod_id}
cp src/* resnet50_pod/${pod_id}/
"""
PRETRAIN = """\
python -m paddle_edl.collective.launch --log_dir log --log_level 20 ./train.py --out {out}
"""
TRAIN = """\
import json, os, sys
from pathlib import Path

from paddle_edl.collective.edl_utils import *

env = Edlenv()
assert env.is_under_edl()
cluster, pod = env.get_cluster()
me = cluster.trainers_endpoints()[int(os.environ["PADDLE_TRAINER_ID"])]
assert me in [trainer.endpoint for trainer in pod.trainers]
said = {
    "argv": sys.argv[1:], "flag": cluster.job_stage_flag,
    "pods": [each.id for each in cluster.pods],
    "trainers": cluster.trainers_nranks(), "rank": pod.rank, "gpus": pod.get_visible_gpus(),
    "nobody": cluster.get_pod_by_id("pod_9_9"),
}
Path(sys.argv[2], os.environ["PADDLE_TRAINER_ID"]).write_text(json.dumps(said))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `python -u -m paddle_edl.NAME ...` in the test's folder; it is ended with the test."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "EDL_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with ExitStack() as stack:

        def run(name: str, *args: str, **env: str) -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", f"paddle_edl.{name}", *args],
                cwd=tmp_path,
                env=inherited | {"PATH": path} | env,
                stdout=log,
                stderr=log,
                text=True,
            )
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        yield run


def log_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()


def has_succeeded(api: ApiClient) -> bool:
    try:
        return api.status("test_job_id_1234").state is JobState.SUCCEEDED
    except Retryable:
        return False  # the server is still starting


def test_the_resnet50_experiment_starts_by_the_commands_of_2020(tmp_path, start):
    source = tmp_path / "src"
    source.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "package.sh").write_text(PACKAGE)
    (source / "train_pretrain.sh").write_text(PRETRAIN.format(out=out))
    (source / "train.py").write_text(TRAIN)
    (tmp_path / "resnet50_pod").mkdir()
    port = str(free_port())
    server = ("--node_ips", "127.0.0.1", "--pod_num_of_node", "2", "--gpu_num_of_node", "2")
    start(
        "demo.collective.job_server_demo",
        *(*server, "--time_interval_to_change", "900", "--server_port", port),
    )
    url = f"http://127.0.0.1:{port}"
    start(
        "demo.collective.job_client_demo",
        *("--log_level", "20", "--package_sh", "./package.sh", "--pod_path", "./resnet50_pod"),
        *("--port_range", "auto", "./train_pretrain.sh"),
        PADDLE_RUNING_ENV="PADDLE_EDL",
        PADDLE_JOBSERVER=url,
        PADDLE_JOB_ID="test_job_id_1234",
        PADDLE_POD_ID="not set",
    )
    client_log = tmp_path / "demo.collective.job_client_demo.log"
    with ApiClient(url) as api:
        wait_until(lambda: has_succeeded(api), 120, f"the job succeeds: {client_log}")
    said = [json.loads((out / rank).read_text()) for rank in ("0", "1")]
    assert [one.pop("rank") for one in said] == [0, 1]
    assert [one.pop("gpus") for one in said] == ["0", "1"]
    assert said[0] == said[1]
    assert said[0] == {
        "argv": ["--out", str(out)],
        "flag": -1,
        "pods": ["pod_0_0", "pod_1_0"],
        "trainers": 2,
        "nobody": None,
    }


def test_nodes_of_other_machines_need_a_token_as_the_server_listens_to_all(tmp_path, start):
    server = start("demo.collective.job_server_demo", "--node_ips", "10.0.0.1,10.0.0.2")
    assert server.wait(60) == 2
    assert "--bind: 0.0.0.0 can be reached from other machines, which needs a token" in log_of(
        tmp_path, "demo.collective.job_server_demo"
    )


def teachers(discovery: str) -> list[str]:
    """Return the teachers of the service t, as the server shows them to people."""
    with requests.Session() as session:
        session.trust_env = False
        try:
            answer = session.get(f"http://{discovery}/services", timeout=10)
        except requests.ConnectionError:
            return []
    found: list[str] = answer.json()["services"].get("t", {"teachers": []})["teachers"]
    return found


def listening_teacher(stack: ExitStack) -> str:
    """Return the address of a port that answers: all that a registrar asks of a teacher."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("with_redis", [True, False], ids=["by a Redis", "by the server's memory"])
def test_a_teacher_is_registered_and_found(tmp_path, start, with_redis):
    discovery = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        teacher = listening_teacher(stack)
        named = ("--service_name", "t", "--server", teacher)
        if with_redis:
            redis = RedisProcess(tmp_path)
            stack.callback(redis.close)
            database = ("--db_endpoints", redis.endpoint)
            start("distill.redis.balance_server", "--server", discovery, *database)
            start("distill.redis.server_register", *database, *named)
        else:
            start("distill.discovery_server", "--server", discovery)
            start("discovery.register", "--discovery", discovery, *named)
        wait_until(lambda: teachers(discovery) == [teacher], 60, "the teacher is registered")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("distill.discovery_server", ["--server", "127.0.0.1:0"]),
        ("distill.redis.balance_server", ["--server", "127.0.0.1:0"]),
        ("discovery.register", ["--service_name", "t", "--server", "127.0.0.1:1"]),
        ("distill.redis.server_register", ["--service_name", "t", "--server", "127.0.0.1:1"]),
    ],
)
def test_etcd_is_refused_by_name_with_the_remedy(tmp_path, start, name, args):
    assert start(name, *args, "--db_type", "etcd").wait(60) == 2
    assert "--db_type etcd: expected redis" in log_of(tmp_path, name)


def test_the_balance_server_listens_to_all_as_the_original_did_and_wants_a_token(tmp_path, start):
    assert start("distill.redis.balance_server").wait(60) == 2
    said = log_of(tmp_path, "distill.redis.balance_server")
    assert "--server 0.0.0.0:7001: other machines can reach this address: set a token" in said


def test_the_reader_is_imported_as_before():
    from distill_reader import DistillReader as Ours
    from paddle_edl.distill.distill_reader import DistillReader

    assert DistillReader is Ours
