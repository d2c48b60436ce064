"""What HTTP alone has of Paddle Serving, by the bytes and headers that its HttpClient sends."""

import gzip
import json
from typing import Any

import pytest

from distill_reader.errors import TeacherBusy
from distill_reader.protocols.serving_messages import SERVICE
from distill_reader.teacher.protocols.limits import FrontLimits
from tests.distill_reader.protobuf_messages import SERVING_MESSAGES

PATH = "/GeneralModelService/inference"
PROTO = {"Content-Type": "application/proto"}
Request, Response = SERVING_MESSAGES["Request"], SERVING_MESSAGES["Response"]


def client_request(*, fetch=("y",), samples=2, width=3, **fields) -> Any:
    """What the client builds: a message, field by field, with the batch in the shape."""
    message = Request(log_id=5, fetch_var_names=fetch, **fields)
    x, n = message.tensor.add(), message.tensor.add()
    x.name, x.alias_name, x.elem_type = "x_0", "x", 1
    x.float_data.extend([0.5] * samples * width)
    x.shape.extend([samples, width])
    n.name, n.alias_name, n.elem_type = "n", "n", 0
    n.int64_data.extend(range(samples))
    n.shape.extend([samples, 1])
    return message


JSON = {
    "fetch_var_names": ["y"],
    "log_id": 5,
    "tensor": [
        {"float_data": [0.5] * 6, "shape": [2, 3], "elem_type": 1,
         "name": "x_0", "alias_name": "x"},
        {"int64_data": [0, 1], "shape": [2, 1], "elem_type": 0,
         "name": "n", "alias_name": "n"},
    ],
}  # fmt: skip


def post(running, message, path=PATH, headers=()) -> Any:
    return running.http(
        "POST", path, data=message.SerializeToString(), headers=PROTO | dict(headers)
    )


@pytest.mark.parametrize("method", ["inference", "debug"])
def test_the_service_has_a_full_name_as_well(served, method):
    response = post(served, client_request(), f"/{SERVICE}/{method}")
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/proto"  # its client compares it so


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
def test_json_is_answered_by_json(served, content_type):
    response = served.http(
        "POST", PATH, data=json.dumps(JSON), headers={"Content-Type": content_type}
    )
    assert response.status_code == 200
    assert response.json() == {
        "outputs": [
            {
                "tensor": [
                    {
                        "float_data": [1.0] * 6,
                        "elem_type": 1,
                        "shape": [2, 3],
                        "name": "fc_0.tmp_1",
                        "alias_name": "y",
                    }
                ],
                "engine_name": "general_infer_0",
            }
        ],
        "log_id": 5,
    }


def test_the_profile_has_the_times_of_the_operations(served):
    message = Response.FromString(post(served, client_request(profile_server=True)).content)
    assert message.profile_server
    times = list(message.profile_time)
    assert len(times) == 6
    assert times == sorted(times)
    assert times[3] - times[2] == 50  # what the service computed


def test_compressed_requests_are_understood_and_answers_are_compressed(served):
    data = client_request(samples=200).SerializeToString()
    headers = PROTO | {"Content-Encoding": "gzip", "Accept-encoding": "gzip"}
    response = served.http("POST", PATH, data=gzip.compress(data), headers=headers)
    assert response.headers["Content-Encoding"] == "gzip"
    assert len(Response.FromString(response.content).outputs[0].tensor[0].float_data) == 600


def test_a_large_request_comes_through(served):
    response = post(served, client_request(samples=64, width=20_000))
    message = Response.FromString(response.content)
    assert list(message.outputs[0].tensor[0].shape) == [64, 20_000]


def test_short_answers_are_not_compressed(served):
    response = post(served, client_request(), headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in response.headers


def test_errors_are_said_in_the_form_of_the_request(served):
    response = post(served, client_request(fetch=["price"]))
    assert response.status_code == 400
    assert response.headers["x-bd-error-code"] == "-5100"
    assert response.headers["Content-Type"] == "application/proto"
    message = Response.FromString(response.content)
    assert (message.err_no, len(message.outputs)) == (-5100, 0)
    assert "no output 'price'" in message.err_msg


@pytest.mark.parametrize(
    ("headers", "data"),
    [(PROTO, b"\xff"), (PROTO, b"\x0a\x7f"), ({}, b"{"), ({}, b"[]"), ({}, b'{"tensor": 5}')],
)
def test_what_is_no_message_is_refused(served, headers, data):
    response = served.http("POST", PATH, data=data, headers=headers)
    assert response.status_code == 400
    assert response.headers["x-bd-error-code"] == "-5000"


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
def test_what_json_cannot_say_is_refused_with_the_remedy_and_sent_in_protobuf(served, value):
    document = json.dumps(JSON).replace("0.5", value)
    response = served.http("POST", PATH, data=document)
    assert response.status_code == 400
    assert response.headers["x-bd-error-code"] == "-5100"
    assert "output y: has values that are infinite" in response.json()["err_msg"]
    assert "application/proto" in response.json()["err_msg"]
    message = client_request(samples=1)
    message.tensor[0].float_data[0] = float(value.replace("Infinity", "inf"))
    assert post(served, message).ok


def test_what_is_no_text_is_cited_without_it(served):
    headers = {"Content-Encoding": b"gz\xa6ip", "Content-Type": "application/proto"}
    response = served.http("POST", PATH, data=b"x", headers=headers)
    assert response.status_code == 415
    assert "gz?ip" in Response.FromString(response.content).err_msg
    assert served.http("GET", "/%ff%fe").status_code == 404
    assert served.http("POST", "/GeneralModelService/%ff").status_code == 404


def test_other_methods_are_not_there(served):
    assert served.http("POST", "/GeneralModelService/train").status_code == 404
    assert served.http("GET", PATH).status_code == 405


def test_a_client_in_encryption_mode_is_told_that_there_is_none(served):
    response = served.http("POST", "/", json={"key": "abc"})
    assert response.status_code == 404
    assert "no encrypted models" in response.text


def test_a_full_server_answers_503(start_front):
    running = start_front()

    def refuse(_) -> Any:
        raise TeacherBusy("the queue is full", delay_s=0.05)

    running.service.before = refuse
    response = post(running, client_request())
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert Response.FromString(response.content).err_no == -5002


def test_much_json_is_refused_before_it_is_read(start_front):
    running = start_front(limits=FrontLimits(max_json_bytes=1000))
    response = running.http("POST", PATH, data=b" " * 1001)
    assert response.status_code == 413
