"""The original's REST, as its clients use it."""

import pytest

from job_server.server.config import read_config
from job_server.server.service import JobService
from job_server.server.store import Store
from tests.job_server.serving import browse, open_service, running_server
from tests.support import wait_until


def default_job(*args: str):
    config = read_config([*args], {})
    assert config.job is not None
    return config.job, config.legacy_nodes


@pytest.fixture
def service():
    with open_service() as service:
        yield service


@pytest.fixture
def client(service):
    return browse(service)


def submit(service, *args: str) -> None:
    job, nodes = default_job(*args)
    service.submit(job, legacy_nodes=nodes)


def query(client, job_id: str = "default_job"):
    answer = client.get(f"/rest/1.0/get/query_pods?job_id={job_id}")
    assert answer.status_code == 200, answer.json
    return answer.get_json()


def test_the_first_stage_is_as_in_the_original(service, client):
    submit(service, "--node_ips", "10.0.0.1,10.0.0.2", "--pod_num_of_node", "2")
    answer = query(client)
    assert set(answer) == {"job_id", "job_stage_flag", "pods"}
    assert answer["job_id"] == "default_job"
    assert answer["job_stage_flag"] == -1
    assert [pod["pod_id"] for pod in answer["pods"]] == [f"pod_{rank}_0" for rank in range(4)]
    assert [pod["addr"] for pod in answer["pods"]] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    for pod in answer["pods"]:
        assert set(pod) == {"pod_id", "running", "addr", "pod_port", "trainer_ports", "gpus"}
        assert pod["running"] is True
        assert len(pod["gpus"]) == len(pod["trainer_ports"]) == 4
        assert pod["pod_port"] == pod["trainer_ports"][0]
        assert all(1024 <= port < 32768 for port in pod["trainer_ports"])
    on_one = [port for pod in answer["pods"][:2] for port in pod["trainer_ports"]]
    assert len(set(on_one)) == 8
    assert sorted(gpu for pod in answer["pods"][:2] for gpu in pod["gpus"]) == list(range(8))


def test_changes_alternate_and_ids_are_never_reused():
    clock = [1_000_000.0]
    service = JobService(Store(":memory:"), now=lambda: clock[0])  # its timer is the test
    client = browse(service)
    submit(
        service,
        *("--pod_num_of_node", "2", "--job_id", "j", "--time_interval_to_change", "10"),
    )
    seen: dict[int, list[str]] = {}
    for _ in range(5):
        answer = query(client, "j")
        seen[answer["job_stage_flag"]] = [pod["pod_id"] for pod in answer["pods"]]
        clock[0] += 10
        with service.engine.lock:
            service.engine.tick()
    service.close()
    assert seen[-1] == ["pod_0_0", "pod_1_0"]
    assert seen[0] == ["pod_0_0"]
    assert seen[1] == ["pod_0_0", "pod_1_1"]
    assert seen[2] == ["pod_0_0"]
    assert seen[3] == ["pod_0_0", "pod_1_3"]


def test_an_unknown_job_is_a_404(service, client):
    submit(service)
    answer = client.get("/rest/1.0/get/query_pods?job_id=nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json["error"]


def test_without_an_id_the_only_job_is_meant(service, client):
    assert client.get("/rest/1.0/get/query_pods").status_code == 404
    submit(service, "--job_id", "one")
    assert client.get("/rest/1.0/get/query_pods").get_json()["job_id"] == "one"
    submit(service, "--job_id", "two")
    answer = client.get("/rest/1.0/get/query_pods")
    assert answer.status_code == 400
    assert "one, two" in answer.json["error"]


def test_the_estimated_run_time_is_kept(service, client):
    submit(service)
    path = "/rest/1.0/post/job_runtime_static"
    body = {"job_id": "default_job", "estimated_run_time": 3600}
    assert client.post(path, json=body).status_code == 200
    status = client.get("/api/v1/jobs/default_job").get_json()
    assert status["estimated_run_time_s"] == 3600


def test_estimates_that_come_again_and_again_drive_no_event_out(service, client):
    submit(service)
    for seconds in range(1, 6):
        body = {"job_id": "default_job", "estimated_run_time": seconds}
        assert client.post("/rest/1.0/post/job_runtime_static", json=body).status_code == 200
    assert client.get("/api/v1/jobs/default_job").get_json()["estimated_run_time_s"] == 5
    events = client.get("/api/v1/jobs/default_job/events").get_json()["events"]
    assert [event["text"] for event in events if "estimated" in event["text"]] == [
        "estimated run time: 1 s"
    ]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"job_id": "nobody", "estimated_run_time": 1}, 404, id="unknown job"),
        pytest.param({"job_id": "default_job"}, 400, id="no time"),
        pytest.param({"job_id": "default_job", "estimated_run_time": -1}, 400, id="negative"),
        pytest.param({"job_id": "default_job", "estimated_run_time": 1e300}, 400, id="huge"),
        pytest.param({"job_id": "default_job", "estimated_run_time": True}, 400, id="boolean"),
        pytest.param({"job_id": 5, "estimated_run_time": 1}, 400, id="id is a number"),
        pytest.param([1], 400, id="a list"),
    ],
)
def test_a_wrong_run_time_is_refused(service, client, body, status):
    submit(service)
    assert client.post("/rest/1.0/post/job_runtime_static", json=body).status_code == status


def test_a_resize_shows_at_once(service, client):
    submit(service, "--pod_num_of_node", "4", "--change_script", "none")
    client.post("/api/v1/jobs/default_job/resize", json={"pods": 2})
    answer = query(client)
    assert answer["job_stage_flag"] == 0
    assert [pod["pod_id"] for pod in answer["pods"]] == ["pod_0_0", "pod_1_0"]


def test_a_killed_server_comes_back_in_the_middle_of_its_script(tmp_path):
    args = ("--pod_num_of_node", "2", "--time_interval_to_change", "0.5", "--heartbeat_s", "0.5")
    with running_server(tmp_path, *args) as server:

        def flag() -> int:
            with server.api() as api:
                return api.status("default_job").flag

        wait_until(lambda: flag() >= 2)
        server.kill()
        server.start()
        with server.api() as api:
            status = api.status("default_job")
            assert status.flag >= 2
            before = status.flag
            wait_until(lambda: flag() >= before + 2)
            records = api.status("default_job").stages
        assert [record.stage for record in records] == list(range(1, len(records) + 1))
        assert [record.flag for record in records] == list(range(-1, len(records) - 1))
        pods = [record.pods for record in records]
        assert pods == [2 - index % 2 for index in range(len(pods))]  # none skipped, none twice
