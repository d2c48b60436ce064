"""A node that is drained by an operator, or by its own client."""

import json

from job_server.api import wire
from job_server.server.service import JobService
from tests.job_server.serving import cpu_node, open_service

ASKED = "its client was asked to end"


def usable(service: JobService) -> int:
    (known,) = service.node_statuses()
    return sum(slot.usable for slot in known.node.slots)


def report(service: JobService, **fields: str) -> wire.Acknowledgement:
    answer = service.report_node("node-a", wire.NodeReport(node_id="node-a", **fields))  # type: ignore[arg-type]
    return wire.decode(wire.Acknowledgement, json.loads(answer.body))


def test_a_drain_by_an_operator_outlives_the_server_and_a_new_client(tmp_path):
    path = tmp_path / "server.db"
    drain = wire.NodeLimit(slots=0, drain=True)
    with open_service(path) as service:
        service.register(cpu_node())
        assert usable(service) == 2
        service.limit_node("node-a", drain)
        assert usable(service) == 0
    with open_service(path) as service:
        assert usable(service) == 0
        service.register(cpu_node())
        report(service)
        assert usable(service) == 0
        service.limit_node("node-a", wire.NodeLimit(slots=None))
        assert usable(service) == 2
    with open_service(path) as service:
        assert usable(service) == 2


def test_a_client_that_drains_hears_whether_jobs_are_on_the_move_and_its_successor_does_not():
    with open_service() as service:
        service.register(cpu_node())
        assert report(service).moving is None
        assert report(service, draining=ASKED).moving is False
        (known,) = service.node_statuses()
        assert (usable(service), known.draining) == (0, ASKED)
        assert report(service).moving is None
        assert usable(service) == 2
