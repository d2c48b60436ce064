"""The description and the routes say the same."""

import inspect
import re

import pytest
from openapi_spec_validator import validate

from job_server.api import routes, wire
from job_server.api.api_client import ApiClient
from job_server.api.routes import ROUTES, markdown_table
from job_server.server.openapi import build_openapi
from tests.job_server.serving import browse, cpu_node, open_service
from tests.support import ROOT


@pytest.fixture(scope="module")
def description():
    return build_openapi()


def test_the_description_is_valid_openapi(description):
    validate(description)


def test_every_route_is_served_and_described_and_nothing_else_is(description):
    with open_service() as service:
        rules = list(browse(service).application.url_map.iter_rules())
    served = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD"}
    }
    described = {
        (method.upper(), path)
        for path, methods in description["paths"].items()
        for method in methods
    }
    assert served == described == {(route.method, route.path) for route in ROUTES}


def test_every_method_of_the_client_asks_a_route_of_its_own():
    names = set(re.findall(r"routes\.([A-Z_]+)", inspect.getsource(ApiClient)))
    of_others = {"OPENAPI", "QUERY_PODS", "RUN_TIME", "OPEN_PAGE"}  # of tools, of the original's
    # clients, and of browsers
    assert names | of_others == {
        name for name, value in vars(routes).items() if isinstance(value, routes.Route)
    }


def test_the_page_of_the_api_lists_the_routes():
    page = ROOT / "docs" / "rest.md"
    assert markdown_table() in page.read_text(), f"paste this:\n{markdown_table()}"


def test_the_server_serves_its_description(description):
    with open_service() as service:
        assert browse(service).get("/api/v1/openapi.json").json == description


def test_every_wire_type_is_described(description):
    schemas = description["components"]["schemas"]
    assert schemas["JobSpec"]["required"] == ["job_id"]
    pods = schemas["JobSpec"]["properties"]["pods"]
    assert [each["type"] for each in pods["anyOf"]] == ["integer", "null"]
    assert pods["default"] is None
    assert set(schemas["JobState"]["enum"]) == {state.value for state in wire.JobState}
    assert schemas["StagePlan"]["properties"]["way"] == {"$ref": "#/components/schemas/Way"}
    assert schemas["PodOrders"]["properties"]["plans"]["items"] == {
        "$ref": "#/components/schemas/StagePlan"
    }
    assert schemas["Node"]["required"] == ["node_id", "addr", "slots", "port_low", "port_high"]


def test_answers_have_the_fields_that_the_description_requires(description):
    schemas = description["components"]["schemas"]
    with open_service() as service:
        client = browse(service)
        status = client.post("/api/v1/jobs", json={"job_id": "digits"}).get_json()
        plan = client.post("/api/v1/nodes", json=wire.encode(cpu_node())).get_json()
    described = schemas["JobStatus"]
    assert set(described["required"]) <= set(status) == set(described["properties"])
    assert set(schemas["NodePlan"]["required"]) == set(plan)
