"""Jobs share the nodes of one server."""

from pathlib import Path

import pytest

from job_server.api import wire
from job_server.api.errors import NotFound
from tests.job_server.serving import browse, cpu_node, open_service


def test_a_limit_of_a_node_outlives_the_server_and_the_clients_next_registration(tmp_path: Path):
    with open_service(tmp_path / "server.db") as service:
        service.register(cpu_node())
        limited = browse(service).post("/api/v1/nodes/node-a/limit", json={"slots": 1}).get_json()
        assert limited["limit"] == 1
    with open_service(tmp_path / "server.db") as service:
        service.register(cpu_node())
        assert [status.limit for status in service.node_statuses()] == [1]
        assert [node.limit for node in service.sharing().nodes] == [1]
        service.limit_node("node-a", wire.NodeLimit(slots=None))
        assert [status.limit for status in service.node_statuses()] == [None]
        with pytest.raises(NotFound, match="node 'node-b' is not registered"):
            service.limit_node("node-b", wire.NodeLimit(slots=1))


def test_the_overview_parts_slots_of_shared_jobs_from_those_of_others():
    with open_service() as service:
        service.register(cpu_node(job_id=None, folders=("digits",), cpu_milli=4000))
        service.submit(wire.JobSpec(job_id="digits", folder="digits"))
        sharing = browse(service).get("/api/v1/sharing").get_json()
    assert sharing["nodes"][0] | {"alive": True} == {
        "node_id": "node-a", "alive": True, "slots": 2, "used_shared": 0, "used_others": 1,
        "limit": None, "barred": "", "quarantine": "", "closed": False, "cpu_milli": 4000,
        "cpu_used_milli": 0, "memory_mb": 0, "memory_used_mb": 0, "gpu_percent": None,
        "job_id": None, "folders": ["digits"],
    }  # fmt: skip
    assert sharing["jobs"] == []


def test_the_page_shows_the_queue_and_who_uses_the_nodes():
    with open_service() as service:
        assert "Queue" not in browse(service).get("/").text
        service.register(cpu_node(job_id=None, folders=("digits",), cpu_milli=4000))
        service.submit(wire.JobSpec(job_id="alone", folder="digits"))
        service.submit(wire.JobSpec(job_id="mine", folder="other", share=True, user="ann"))
        page = browse(service).get("/").text
    assert "<h2>Queue</h2>" in page
    assert '<a href="#mine">mine</a>' in page
    assert "no node that can be reached has a folder" in page
    assert "<code>edl client</code>" in page
    assert '<i class="others" style="flex: 1"></i>' in page
    assert "1 of others, 1 free, CPU 0 %" in page
