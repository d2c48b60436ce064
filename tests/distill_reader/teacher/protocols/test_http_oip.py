"""What HTTP alone has of the Open Inference Protocol. What gRPC has as well: test_oip."""

import gzip
import json
import socket
import zlib
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import TeacherBusy
from distill_reader.protocols import oip_json
from distill_reader.teacher.protocols.limits import FrontLimits
from distill_reader.teacher.service.requests import ModelStatistics
from tests.support import wait_until

X = np.arange(6, dtype="f4").reshape(2, 3)
N = np.array([[5], [6]])


def json_tensors() -> Any:
    return {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": X.tolist()},
            {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [5, 6]},
        ]
    }


def binary_request(**arrays) -> Any:
    length, parts = oip_json.encode_request(arrays, request_id="7")
    return b"".join(map(bytes, parts)), {oip_json.HEAD_LENGTH: str(length)}


@pytest.mark.parametrize(
    ("path", "status", "document"),
    [
        ("/v2/health/live", 200, {"live": True}),
        ("/v2/health/ready", 200, {"ready": True}),
        ("/v2/models/double/ready", 200, {"ready": True}),
        ("/v2/models/double/versions/1/ready", 200, {"ready": True}),
    ],
)
def test_health_is_told(served, path, status, document):
    response = served.http("GET", path)
    assert (response.status_code, response.json()) == (status, document)


def test_a_draining_server_lives_and_is_not_ready(start_front):
    running = start_front()
    running.service.is_ready = False
    assert running.http("GET", "/v2/health/live").status_code == 200
    assert running.http("GET", "/v2/health/ready").status_code == 503
    assert running.http("GET", "/v2/models/double/ready").status_code == 503


def test_metadata_name_the_models_tensors(served):
    assert served.http("GET", "/v2").json()["extensions"] == [
        "binary_tensor_data",
        "model_repository",
        "model_configuration",
        "statistics",
    ]
    document = served.http("GET", "/v2/models/half/versions/7").json()
    assert (document["name"], document["versions"]) == ("half", ["7"])
    assert document["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [-1, 2]}]


def test_fields_of_a_request_that_are_null_are_left_out(served):
    request = {"id": None, "outputs": None, "parameters": None, **json_tensors()}
    for tensor in request["inputs"]:
        tensor["parameters"] = None
    response = served.http("POST", "/v2/models/double/infer", json=request)
    assert response.status_code == 200, response.text
    asked = {**request, "outputs": [{"name": "y", "parameters": None}]}
    response = served.http("POST", "/v2/models/double/infer", json=asked)
    assert [each["name"] for each in response.json()["outputs"]] == ["y"]


def test_a_models_configuration_and_statistics_are_told(served):
    config = served.http("GET", "/v2/models/half/versions/7/config").json()
    assert config == {
        "name": "half",
        "platform": "paddlepaddle",
        "max_batch_size": 16,
        "input": [{"name": "x", "data_type": "TYPE_FP16", "dims": [2]}],
        "output": [{"name": "y", "data_type": "TYPE_FP16", "dims": [2]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 2000},
    }
    served.service.told["half"] = ModelStatistics(
        samples=5, batches=2, last_ms=7, answered=3, answered_ns=90, queued_ns=30, computed_ns=60,
        failed=1, failed_ns=4, by_size={2: (1, 20), 3: (1, 40)},
    )  # fmt: skip
    (half,) = served.http("GET", "/v2/models/half/stats").json()["model_stats"]
    assert (half["inference_count"], half["execution_count"], half["last_inference"]) == (5, 2, 7)
    assert half["inference_stats"]["success"] == {"count": 3, "ns": 90}
    assert half["inference_stats"]["fail"] == {"count": 1, "ns": 4}
    assert half["inference_stats"]["queue"] == {"count": 3, "ns": 30}
    assert half["inference_stats"]["compute_infer"] == {"count": 3, "ns": 60}
    assert [(b["batch_size"], b["compute_infer"]) for b in half["batch_stats"]] == [
        (2, {"count": 1, "ns": 20}),
        (3, {"count": 1, "ns": 40}),
    ]
    every = served.http("GET", "/v2/models/stats").json()["model_stats"]
    assert [each["name"] for each in every] == ["double", "half"]
    for path in ("/v2/models/nope/config", "/v2/models/half/versions/8/stats"):
        assert served.http("GET", path).status_code == 404


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_json_cannot_say_is_refused_with_the_remedy_and_sent_as_bytes(served, value):
    for is_binary, status in ((False, 400), (True, 200)):
        _, parts = oip_json.encode_request({"x": np.array([[value]], "f4"), "n": np.array([[1]])})
        head = json.loads(bytes(parts[0])) | {"parameters": {"binary_data_output": is_binary}}
        parts[0] = json.dumps(head).encode()
        response = served.http(
            "POST",
            "/v2/models/double/infer",
            data=b"".join(map(bytes, parts)),
            headers={oip_json.HEAD_LENGTH: str(len(parts[0]))},
        )
        assert response.status_code == status
        if not is_binary:
            assert "output y: has values that are infinite" in response.json()["error"]
            assert '"binary_data_output": true' in response.json()["error"]


def test_json_is_answered_by_json(served):
    response = served.http("POST", "/v2/models/double/infer", json=json_tensors() | {"id": "9"})
    assert response.status_code == 200
    document = response.json()
    assert (document["model_name"], document["model_version"], document["id"]) == (
        "double",
        "1",
        "9",
    )
    y, m = document["outputs"]
    assert (y["name"], y["datatype"], y["shape"]) == ("y", "FP32", [2, 3])
    assert y["data"] == (2 * X).reshape(-1).tolist()
    assert m["data"] == [6, 7]


def test_bytes_are_answered_by_bytes_and_taken_where_they_came(served):
    before = served.service.shared
    body, headers = binary_request(x=X, n=N)
    response = served.http("POST", "/v2/models/double/infer", data=body, headers=headers)
    assert response.headers["Content-Type"] == "application/octet-stream"
    length = int(response.headers[oip_json.HEAD_LENGTH])
    answer = oip_json.decode_response(response.content, length)
    np.testing.assert_array_equal(answer.outputs["y"], 2 * X)
    np.testing.assert_array_equal(answer.outputs["m"], N + 1)
    assert answer.request_id == "7"
    assert served.service.shared == before + 1


def test_tensors_that_are_not_aligned_are_copied(start_front):
    running = start_front()
    body, headers = binary_request(x=np.ones((1, 3), "f4"), n=np.ones((1, 1), "i8"))
    response = running.http("POST", "/v2/models/double/infer", data=body, headers=headers)
    assert response.status_code == 200
    assert running.service.shared == 0


def test_a_large_request_comes_through(served):
    x = np.random.default_rng(0).normal(size=(64, 20_000)).astype("f4")
    body, headers = binary_request(x=x, n=np.zeros((64, 1), "i8"))
    response = served.http("POST", "/v2/models/double/infer", data=body, headers=headers)
    length = int(response.headers[oip_json.HEAD_LENGTH])
    np.testing.assert_array_equal(
        oip_json.decode_response(response.content, length).outputs["y"], 2 * x
    )


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("gzip", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:])),
        ("identity", bytes),
    ],
)
def test_a_compressed_or_chunked_body_is_understood(served, encoding, compress, chunked):
    body, headers = binary_request(x=X, n=N)
    body = compress(body)
    response = served.http(
        "POST",
        "/v2/models/double/infer",
        data=iter([body[:50], body[50:]]) if chunked else body,
        headers=headers | {"Content-Encoding": encoding},
    )
    assert response.status_code == 200, response.text


def test_an_answer_in_json_is_compressed_for_clients_that_take_it(served):
    x = np.zeros((1, 1000), "f4")
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 1000], "data": x.tolist()},
            {"name": "n", "datatype": "INT64", "shape": [1, 1], "data": [5]},
        ]
    }
    for accepts, encoding in (("gzip", "gzip"), ("gzip;q=0, deflate", None), ("identity", None)):
        response = served.http(
            "POST", "/v2/models/double/infer", json=document, headers={"Accept-Encoding": accepts}
        )
        assert response.headers.get("Content-Encoding") == encoding
        assert response.json()["outputs"][1]["data"] == [6]


def test_a_body_is_waited_for_that_the_client_sends_when_it_may(served):
    body, headers = binary_request(x=X, n=N)
    response = served.http(
        "POST", "/v2/models/double/infer", data=body, headers=headers | {"Expect": "100-continue"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/models/nope", 404, "no model 'nope' is served here; there is double, half"),
        ("GET", "/v2/models/nope/ready", 404, "no such model"),
        ("GET", "/v2/models/double/infer", 405, "use POST"),
        ("POST", "/v2/health/live", 405, "use GET"),
        ("GET", "/v2/nothing", 404, "there is no /v2/nothing"),
        ("GET", "/v2/models/double/nothing", 404, "there is no"),
        ("POST", "/v2/models/double/infer", 400, "no JSON"),
    ],
)
def test_what_is_not_there_is_said(served, method, path, status, text):
    response = served.http(method, path)
    assert response.status_code == status
    assert text in response.json()["error"]


@pytest.mark.parametrize("length", ["-1", "x", "99999", "1" * 20])
def test_a_wrong_head_length_is_refused(served, length):
    response = served.http(
        "POST", "/v2/models/double/infer", data=b"{}", headers={oip_json.HEAD_LENGTH: length}
    )
    assert response.status_code == 400
    assert oip_json.HEAD_LENGTH in response.json()["error"]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", b"x", 415),
        ("gzip", b"no gzip", 400),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-10], 400),
        ("deflate", b"\x78\x9cgarbage", 400),
    ],
)
def test_a_body_that_is_badly_compressed_is_refused(served, encoding, body, status):
    response = served.http(
        "POST", "/v2/models/double/infer", data=body, headers={"Content-Encoding": encoding}
    )
    assert response.status_code == status


def test_bodies_are_bounded_however_they_come(start_front):
    running = start_front(limits=FrontLimits(max_request_bytes=1 << 20, max_json_bytes=1 << 16))
    path = "/v2/models/double/infer"
    big = bytes(2 << 20)
    assert running.http("POST", path, data=big).status_code == 413
    assert running.http("POST", path, data=iter([big[: 1 << 20], big])).status_code == 413
    bomb = {"Content-Encoding": "gzip"}
    response = running.http("POST", path, data=gzip.compress(big), headers=bomb)
    assert response.status_code == 413
    assert "--max_request_mb" in response.json()["error"]
    response = running.http("POST", path, data=b" " * (1 << 17))
    assert response.status_code == 413
    assert "as binary data" in response.json()["error"]


def test_a_full_server_says_when_to_come_again(start_front):
    running = start_front(memory_bytes=1000)
    body, headers = binary_request(x=np.zeros((1, 1000), "f4"), n=np.zeros((1, 1), "i8"))
    response = running.http("POST", "/v2/models/double/infer", data=body, headers=headers)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert response.headers["retry-after-ms"] == "250"

    def refuse(_) -> Any:
        raise TeacherBusy("the queue is full", delay_s=2.5)

    running.service.before = refuse
    response = running.http("POST", "/v2/models/double/infer", json={"inputs": []})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "3")


def test_the_memory_of_an_answer_is_given_back_when_its_client_left(start_front):
    running = start_front()
    running.service.gate.clear()
    body, headers = binary_request(x=X, n=N)
    head = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(
            f"POST /v2/models/double/infer HTTP/1.1\r\nHost: t\r\n{head}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until(lambda: running.service.protocols)
    running.service.gate.set()
    wait_until(running.is_idle)


def test_the_documents_are_json(served):
    for path in ("/v2", "/v2/models/double", "/v2/health/live"):
        response = served.http("GET", path)
        assert response.headers["Content-Type"] == "application/json"
        assert json.loads(response.content)
