"""What Triton's perf_analyzer asks of a server, in its order, by the protocol of its C++ client.

Its source: github.com/triton-inference-server/perf_analyzer, of December 2025. It reads metadata
and configuration of the model (perf_analyzer.cc, model_parser.cc), the extensions of the server
(inference_profiler.cc), and for each window the statistics, before and behind its requests.
The tool itself is in no package that pip could install.
"""

import json
from typing import Any

import numpy as np
import pytest

from distill_reader.protocols import oip_json
from tests.distill_reader.student.teacher_process import TeacherProcess

grpc_client = pytest.importorskip("tritonclient.grpc")
http_client = pytest.importorskip("tritonclient.http")

REQUESTS = 12  # of a window
STATISTICS = (
    "success", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit",
    "cache_miss",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "toy"
    teacher = TeacherProcess(folder, shape=(3,), options=["--max_batch", "8"])
    teacher.start()
    teacher.wait()
    yield teacher
    teacher.kill()


class GrpcAnalyzer:
    """It asks by gRPC, and reads what came as JSON, as the tool does."""

    def __init__(self, endpoint: str) -> None:
        self._client = grpc_client.InferenceServerClient(endpoint)

    def metadata(self) -> Any:
        return self._client.get_model_metadata("toy", as_json=True)

    def config(self) -> Any:
        return self._client.get_model_config("toy", as_json=True)["config"]

    def extensions(self) -> Any:
        return self._client.get_server_metadata(as_json=True)["extensions"]

    def statistics(self) -> Any:
        (stats,) = self._client.get_inference_statistics("toy", as_json=True)["model_stats"]
        return stats

    def infer(self, number: int, batch: int) -> Any:
        return infer(grpc_client, self._client, number, batch)

    def close(self) -> None:
        self._client.close()


class HttpAnalyzer:
    """It asks by HTTP, with tensors as bytes."""

    def __init__(self, endpoint: str) -> None:
        self._client = http_client.InferenceServerClient(endpoint)

    def metadata(self) -> Any:
        return self._client.get_model_metadata("toy")

    def config(self) -> Any:
        return self._client.get_model_config("toy")

    def extensions(self) -> Any:
        return self._client.get_server_metadata()["extensions"]

    def statistics(self) -> Any:
        (stats,) = self._client.get_inference_statistics("toy")["model_stats"]
        for name in STATISTICS:  # its JSON parser demands all of them
            assert set(stats["inference_stats"][name]) == {"count", "ns"}
        return stats

    def infer(self, number: int, batch: int) -> Any:
        return infer(http_client, self._client, number, batch)

    def close(self) -> None:
        self._client.close()


def infer(module: Any, client: Any, number: int, batch: int) -> Any:
    x = np.full((batch, 3), number, "f4")
    tensor = module.InferInput("image", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    outputs = [module.InferRequestedOutput(name) for name in ("sum", "mean")]
    result = client.infer("toy", [tensor], outputs=outputs, request_id=str(number))
    np.testing.assert_array_equal(result.as_numpy("sum"), x.sum(1, keepdims=True))
    return result


def number_of(document: Any, *path: str) -> int:
    """Return a number of the statistics: protobuf's JSON leaves out zeros, and quotes 64 bits."""
    for name in path:
        document = document.get(name, {})
    return int(document or 0)


@pytest.mark.parametrize("analyzer", [GrpcAnalyzer, HttpAnalyzer])
@pytest.mark.parametrize("batch", [1, 8])
def test_perf_analyzers_calls_are_answered_and_its_figures_agree(teacher, analyzer, batch, run):
    tool = run(analyzer, teacher.endpoint)
    metadata, config = tool.metadata(), tool.config()
    names = [tensor["name"] for tensor in metadata["inputs"]]
    assert (metadata["name"], names) == ("toy", ["image"])
    assert config["max_batch_size"] == 8
    assert "ensemble_scheduling" not in config
    assert [tensor["name"] for tensor in config["input"]] == names  # else it ends with an error
    # With a batch size it takes the first of the shape for the batch, and the rest for a sample.
    assert [int(length) for length in metadata["inputs"][0]["shape"]] == [-1, 3]
    assert "statistics" in tool.extensions()  # else it reports nothing of the server
    for _ in range(2):
        before = tool.statistics()
        for number in range(REQUESTS):
            tool.infer(number, batch)
        after = tool.statistics()

        def grown(*path: str, before: Any = before, after: Any = after) -> int:
            return number_of(after, *path) - number_of(before, *path)

        assert grown("inference_count") == REQUESTS * batch
        assert 1 <= grown("execution_count") <= REQUESTS * batch
        for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert grown("inference_stats", name, "count") == REQUESTS
        assert grown("inference_stats", "fail", "count") == 0
        total, queue, computed = (
            grown("inference_stats", name, "ns") for name in ("success", "queue", "compute_infer")
        )
        assert computed > 0
        assert queue >= 0
        assert queue + computed <= total
        assert number_of(after, "last_inference") > number_of(before, "last_inference")
        sizes = {number_of(each, "batch_size") for each in after["batch_stats"]}
        assert batch in sizes


def test_requests_as_json_are_measured_too(teacher):
    """By `--input-tensor-format json`, as curl would send them."""
    import requests

    request = {
        "inputs": [{"name": "image", "shape": [2, 3], "datatype": "FP32", "data": [1.0] * 6}],
        "outputs": [{"name": "sum", "parameters": {"binary_data": False}}],
    }
    with requests.Session() as session:
        session.trust_env = False
        url = f"http://{teacher.endpoint}/v2/models/toy/infer"
        answer = session.post(url, data=json.dumps(request), timeout=30)
    assert answer.ok
    assert oip_json.HEAD_LENGTH not in answer.headers
    assert answer.json()["outputs"][0]["data"] == [3.0, 3.0]
