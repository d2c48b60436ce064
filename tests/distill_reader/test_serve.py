"""`edl serve`: its arguments, and the real server with its predictors, as a process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import requests

from distill_reader import serve
from distill_reader.errors import UsageError
from distill_reader.model.normalization import Normalization
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols import oip_messages
from distill_reader.teacher.predictor.backend import Device
from tests.distill_reader.protobuf_messages import SERVING_MESSAGES
from tests.support import standing_still, wait_until

TOYS = "tests.distill_reader.teacher.toy_backends"


class Server:
    """A server process; `ready` is the line that it prints."""

    def __init__(self, *arguments: str, backend: str = "sums", **environment: str) -> None:
        command = [sys.executable, "-m", "distill_reader.serve", "--port", "0", *arguments]
        if backend:
            command += ["--backend", f"{TOYS}:{backend}"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"ready on \S+:(\d+):", self.ready)
        self.port = int(found[1]) if found else 0

    def http(self, method: str, path: str, **arguments) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            url = f"http://127.0.0.1:{self.port}{path}"
            return session.request(method, url, timeout=30, **arguments)

    def predictors(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """SIGTERM; return the exit code and what was logged."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An empty folder is all that a toy needs."""
    path: Path = tmp_path_factory.mktemp("models") / "toy"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    running = Server("--model", str(folder), f"other={folder}")
    yield running
    running.close()


@pytest.fixture
def start(folder):
    """Start a server of the test's own."""
    started: list[Server] = []

    def begin(*arguments: str, **options: str) -> Server:
        started.append(Server("--model", str(folder), *arguments, **options))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def infer(server: Server, image, model: str = "toy"):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary(f"/{oip_messages.SERVICE}/ModelInfer")
        data = call(oip_messages.encode_request(model, {"image": image}, ["sum"]), timeout=120)
    return oip_messages.decode_response(data).outputs["sum"]


def test_it_says_once_where_it_serves_what(server):
    assert "toy(image: float32[N, 4]) -> sum: float32[N, 1], mean: float32[N, 1]" in server.ready
    assert "other(" in server.ready
    assert "Open Inference" in server.ready


def test_every_protocol_leads_to_the_predictors(server):
    image = np.arange(8, dtype="f4").reshape(2, 4)
    np.testing.assert_array_equal(infer(server, image), [[6], [22]])
    np.testing.assert_array_equal(infer(server, image, "other"), [[6], [22]])
    message = SERVING_MESSAGES["Request"](fetch_var_names=["sum"])
    message.tensor.add(
        name="x_0", alias_name="image", elem_type=1, shape=[2, 4], float_data=range(8)
    )
    response = server.http(
        "POST",
        "/GeneralModelService/inference",
        data=message.SerializeToString(),
        headers={"Content-Type": "application/proto"},
    )
    (tensor,) = SERVING_MESSAGES["Response"].FromString(response.content).outputs[0].tensor
    assert (tensor.name, list(tensor.float_data)) == ("y_0", [6, 22])
    document = {
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [2, 4], "data": [*range(8)]}]
    }
    response = server.http("POST", "/v2/models/toy/infer", json=document)
    assert response.json()["outputs"][0]["data"] == [6, 22]


def test_metrics_count_requests_by_protocol(server):
    infer(server, np.zeros((1, 4), "f4"))
    text = server.http("GET", "/metrics").text
    assert re.search(
        r'edl_teacher_requests_total\{model="toy",outcome="ok",protocol="oip-grpc"\} [1-9]', text
    )


def test_after_sigterm_it_answers_what_it_has_takes_nothing_more_and_ends_with_0(start):
    server = start("--thread", "2", backend="slow_sums")
    predictors = server.predictors()
    assert len(predictors) == 2
    image = np.ones((200, 4), "f4")
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary(f"/{oip_messages.SERVICE}/ModelInfer")
        data = oip_messages.encode_request("toy", {"image": image}, ["sum"])
        call(data, timeout=120)
        wait_until(lambda: not _metric(server, "edl_teacher_memory_bytes"))
        with standing_still(predictors):
            future = call.future(data, timeout=120)
            wait_until(lambda: _metric(server, "edl_teacher_memory_bytes") > 0)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _is_ready(server))
            response = server.http("POST", "/v2/models/toy/infer", json={"inputs": []})
            assert response.status_code in (400, 503)
            with pytest.raises(grpc.RpcError) as caught:
                call(data, timeout=120)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        outputs = oip_messages.decode_response(future.result()).outputs
    np.testing.assert_array_equal(outputs["sum"], np.full((200, 1), 4))
    _, log = server.process.communicate(timeout=120)
    assert server.process.returncode == 0, log
    assert "Traceback" not in log
    wait_until(lambda: not any(predictor.is_running() for predictor in predictors))


def _metric(server: Server, name: str) -> float:
    """Return it, of whichever model; 0: it is not there yet."""
    text = server.http("GET", "/metrics").text
    found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _is_ready(server: Server) -> bool:
    return server.http("GET", "/v2/health/ready").status_code != 503


def test_it_ends_with_1_once_its_last_predictor_finds_another_model(tmp_path, start):
    server = start(str(tmp_path), "--thread", "2")
    (tmp_path / "shape").write_text("5")
    first, second = server.predictors()
    first.kill()
    wait_until(lambda: not first.is_running())
    image = np.ones((1, 4), "f4")
    np.testing.assert_array_equal(infer(server, image), [[4]])  # the other one serves on
    second.kill()
    _, log = server.process.communicate(timeout=120)
    assert server.process.returncode == 1, log
    assert "their files were replaced; start this server again" in log


def test_a_later_sigterm_ends_it_at_once_and_one_that_comes_twice_does_not(start):
    server = start(backend="slow_sums")
    predictors = server.predictors()
    data = oip_messages.encode_request("toy", {"image": np.ones((50_000, 4), "f4")}, ["sum"])
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        future = channel.unary_unary(f"/{oip_messages.SERVICE}/ModelInfer").future(data)
        wait_until(lambda: _metric(server, "edl_teacher_samples_total") > 0)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _is_ready(server))
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(2.0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        assert future.exception() is not None
    wait_until(lambda: not any(predictor.is_running() for predictor in predictors))


def test_sigterm_ends_it_while_it_loads_its_models(folder):
    command = [sys.executable, "-m", "distill_reader.serve", "--port", "0", "--model", str(folder)]
    with subprocess.Popen(
        [*command, "--backend", f"{TOYS}:late"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: psutil.Process(process.pid).children())
        process.send_signal(signal.SIGTERM)
        ready, log = process.communicate(timeout=60)
    assert (process.returncode, ready) == (0, "")
    assert "ended before its models were loaded" in log


def test_a_paddle_model_is_served(paddle_folder):
    kinds = sorted(path.name for path in paddle_folder.iterdir() if path.is_dir())
    running = Server("--model", str(paddle_folder / kinds[0]), backend="")
    try:
        assert running.port, running.process.stderr and running.process.stderr.read()
        document = running.http("GET", f"/v2/models/{kinds[0]}").json()
        inputs = [
            {
                "name": tensor["name"],
                "datatype": tensor["datatype"],
                "shape": [1, *(max(length, 1) for length in tensor["shape"][1:])],
                "data": [1] * int(np.prod([max(length, 1) for length in tensor["shape"][1:]])),
            }
            for tensor in document["inputs"]
        ]
        response = running.http("POST", f"/v2/models/{kinds[0]}/infer", json={"inputs": inputs})
        assert response.status_code == 200, response.text
        assert [t["name"] for t in response.json()["outputs"]] == [
            t["name"] for t in document["outputs"]
        ]
    finally:
        running.close()


# Arguments.


def parse(*arguments: str):
    return serve.parse_config(serve.parser().parse_args(arguments))


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in ("EDL_TOKEN", "EDL_TEACHER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        (["--model", "{folder}"], ["toy"]),
        (["--model", "{folder}/"], ["toy"]),
        (["--model", "{folder}/../toy/."], ["toy"]),
        (["--model", "{folder}", "--name", "a"], ["a"]),
        (["--model", "a={folder}", "b={folder}"], ["a", "b"]),
        (["--model", "a={folder}", "--model", "b={folder}"], ["a", "b"]),
    ],
)
def test_models_are_called_by_their_folder_or_as_given(folder, arguments, models):
    service, _ = parse(*(argument.format(folder=folder) for argument in arguments))
    assert [name for name, _ in service.models] == models


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ([], [Device()]),
        (["--thread", "3"], [Device()] * 3),
        (["--gpu_ids", "0"], [Device(gpu=0)]),
        (["--gpu_ids", "0,2"], [Device(gpu=0), Device(gpu=2)]),
        (["--gpu_ids", "0,1", "--thread", "2"], [Device(gpu=0)] * 2 + [Device(gpu=1)] * 2),
        (["--gpu_ids", "-1"], [Device()]),
        (["--mem_optim"], [Device(memory_optim=True)]),
        (["--mem_optim", "True"], [Device(memory_optim=True)]),
        (["--mem_optim", "False"], [Device()]),
    ],
)
def test_predictors_are_per_gpu_or_on_the_cpu(folder, arguments, devices):
    service, _ = parse("--model", str(folder), *arguments)
    assert list(service.devices) == devices


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--gpu_ids", "a"], "--gpu_ids a: 'a' is no index"),
        (["--gpu_ids", "0,0"], "--gpu_ids 0,0: one is named twice"),
        (["--thread", "0"], "--thread: must be at least 1, got 0"),
        (["--port", "-5"], "--port: must be at least 0, got -5"),
        (["--max_batch", "0"], "--max_batch: must be at least 1, got 0"),
        (["--max_queue", "0"], "--max_queue: must be at least 1"),
        (["--max_request_mb", "0"], "--max_request_mb: must be at least 1"),
        (["--model", "nowhere"], "--model nowhere: there is no nowhere"),
        (["--name", "a b"], "'a b' cannot be the name of a model"),
        (["--name", "a", "--model", "."], "--name a: there are several models"),
        (["--model", ".", "--register", "h:1"], "--register: .* `edl register .*HOST:PORT/MODEL`"),
        (["--bind", "0.0.0.0"], "--bind 0.0.0.0: .* needs a token"),
        (["--token_file", "nowhere"], "--token_file nowhere: "),
        (["--normalize", "x/image"], "--normalize x/image: name the model, as MODEL/image"),
        (
            ["--normalize", "image", "toy/image"],
            "toy/image: image of toy is named twice",
        ),
        (["--normalize", "image:std=0"], "scale and std must be > 0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(folder, arguments, match):
    with pytest.raises(UsageError, match=match):
        parse("--model", str(folder), *arguments)


def test_a_normalization_is_of_the_only_model_or_of_the_one_it_names(folder):
    option = "image:mean=0.5:std=0.25"
    expected = Normalization(mean=(0.5,), std=(0.25,))
    service, _ = parse("--model", str(folder), "--normalize", option)
    assert service.normalizations == (("toy", "image", expected),)
    two = ("--model", f"a={folder}", f"b={folder}")
    service, _ = parse(*two, "--normalize", f"b/{option}", "a/mask")
    assert service.normalizations == (("b", "image", expected), ("a", "mask", Normalization()))
    with pytest.raises(UsageError, match="name the model, as MODEL/image; the models are a, b"):
        parse(*two, "--normalize", option)


def test_models_of_one_name_are_refused(folder):
    with pytest.raises(UsageError, match="two models are called 'toy'"):
        parse("--model", str(folder), str(folder))


def test_others_than_this_machine_need_a_token_or_leave(folder, tmp_path, monkeypatch):
    everywhere = ("--model", str(folder), "--bind", "0.0.0.0")
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert parse(*everywhere, "--token_file", str(file))[1].token == "secret"
    assert parse(*everywhere, "--insecure")[1].token == ""
    monkeypatch.setenv("EDL_TOKEN", "other")
    assert parse(*everywhere)[1].token == "other"
    monkeypatch.setenv("EDL_TOKEN_FILE", str(file))  # as in a container
    assert parse(*everywhere)[1].token == "secret"
    monkeypatch.setenv("EDL_TEACHER_TOKEN", "the teachers'")
    assert parse(*everywhere)[1].token == "the teachers'"
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        parse(*everywhere, "--token_file", str(file))


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "x", "--mem_optim", "maybe"], ["--model", "x", "--nope"]]
)
def test_wrong_command_lines_end_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        serve.main(arguments)
    assert caught.value.code == 2


def test_a_model_that_cannot_be_loaded_ends_it_with_2(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    server = Server("--model", str(empty), backend="")
    _, log = server.process.communicate(timeout=120)
    assert server.process.returncode == 2
    assert f"edl serve: error: {empty}" in log
    assert "Traceback" not in log


def test_a_port_in_use_ends_it_with_2(folder, server):
    command = [
        sys.executable, "-m", "edl", "serve", "--model", str(folder), "--port", str(server.port),
        "--backend", f"{TOYS}:sums",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert f"--port {server.port}: cannot listen on 127.0.0.1: Address already in use" in (
        result.stderr
    )


@pytest.mark.parametrize("verb", ["serve", "convert"])
def test_edl_has_the_verb_and_loads_it_when_it_is_called(verb):
    script = (
        "import sys; from edl.__main__ import main; "
        "assert not any(name.startswith('distill_reader') for name in sys.modules); "
        f"main(['{verb}', '--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "model" in result.stdout


def test_a_token_of_the_environment_is_wanted(start):
    server = start(EDL_TOKEN="secret")
    assert server.http("GET", "/v2").status_code == 401
    shown = {"Authorization": "Bearer secret"}
    assert server.http("GET", "/v2", headers=shown).ok
    assert server.http("GET", "/v2/health/ready").ok  # probes have none


def test_a_model_is_described_in_one_line():
    spec = ModelSpec(
        name="m",
        inputs=(TensorSpec(name="x", dtype="float32", shape=(1, -1)),),
        outputs=(TensorSpec(name="y", dtype="int64", shape=()),),
    )
    assert serve.describe(spec) == "m(x: float32[N, 1, ?]) -> y: int64[N]"
