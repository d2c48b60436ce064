"""gRPC's health protocol, as Kubernetes' probes and gRPC's own clients use it."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from distill_reader.protocols.oip_messages import SERVICE, encode_request
from distill_reader.teacher.protocols import grpc_server
from tests.distill_reader.protobuf_messages import HEALTH_MESSAGES, OIP_MESSAGES
from tests.distill_reader.teacher.conftest import Running
from tests.support import free_port, wait_until

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
REQUEST, ANSWER = HEALTH_MESSAGES["HealthCheckRequest"], HEALTH_MESSAGES["HealthCheckResponse"]
INFER = encode_request("double", {"x": [np.ones((2, 3), "f4")], "n": [np.array([[5], [6]])]})


def channel_to(port: int) -> Any:
    return grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
    )


def check(port: int, service: str = "", **options: Any) -> int:
    with channel_to(port) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = call(REQUEST(service=service).SerializeToString(), timeout=30, **options)
        return int(ANSWER.FromString(answer).status)


def watch(channel: Any, service: str = "") -> Any:
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return call(REQUEST(service=service).SerializeToString(), timeout=120)


def statuses(stream: Any) -> Iterator[int]:
    for answer in stream:
        yield int(ANSWER.FromString(answer).status)


@pytest.fixture(params=["the shared port", "a port of its own"])
def guarded(request, start_front) -> tuple[Running, int]:
    """A teacher that wants a token, and its port for gRPC."""
    if request.param == "the shared port":
        running = start_front(token="secret")
        return running, running.port
    port = free_port()
    return start_front(token="secret", grpc_port=port), port


def test_health_is_told_to_whoever_asks(guarded):
    running, port = guarded
    for service in ("", "double", SERVICE):
        assert check(port, service) == SERVING
    running.service.is_ready = False
    for service in ("", "double", SERVICE):
        assert check(port, service) == NOT_SERVING


def test_health_is_told_however_many_calls_wait_for_a_slow_model(start_front, monkeypatch):
    monkeypatch.setattr(grpc_server, "_THREADS", 2)
    running = start_front()
    running.service.gate.clear()
    with channel_to(running.port) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        calls = [infer.future(INFER) for _ in range(8)]
        wait_until(lambda: len(running.service.protocols) == 2)
        assert check(running.port) == SERVING
        list_models = channel.unary_unary(f"/{SERVICE}/RepositoryIndex")  # as students that connect
        assert list_models(b"", timeout=30)
        stream = watch(channel)
        assert next(statuses(stream)) == SERVING
        stream.cancel()
        running.service.gate.set()
        assert all(call.result(timeout=30) for call in calls)


def test_an_unknown_service_is_not_found_and_no_model_is_named(guarded):
    _, port = guarded
    with pytest.raises(grpc.RpcError) as caught:
        check(port, "nope")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "double" not in caught.value.details()


def test_the_open_inference_protocols_own_probes_need_no_token_and_nothing_else_is_told(guarded):
    _, port = guarded
    with channel_to(port) as channel:

        def call(method: str, request: bytes = b"") -> Any:
            answer = channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=30)
            return OIP_MESSAGES[f"{method}Response"].FromString(answer)

        assert call("ServerLive").live
        assert call("ServerReady").ready
        ready = OIP_MESSAGES["ModelReadyRequest"]
        assert call("ModelReady", ready(name="double").SerializeToString()).ready
        for method in ("ServerMetadata", "RepositoryIndex", "ModelConfig", "ModelStatistics"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_watch_hears_of_every_change(guarded):
    running, port = guarded
    with channel_to(port) as channel:
        stream = watch(channel)
        told = statuses(stream)
        assert next(told) == SERVING
        running.service.is_ready = False
        assert next(told) == NOT_SERVING
        running.service.is_ready = True
        assert next(told) == SERVING
        stream.cancel()


def test_a_watch_of_an_unknown_service_waits_for_it(guarded):
    _, port = guarded
    with channel_to(port) as channel:
        stream = watch(channel, "nope")
        assert next(statuses(stream)) == SERVICE_UNKNOWN
        stream.cancel()


def test_watches_end_when_the_teacher_ends(start_front):
    running = start_front()
    with channel_to(running.port) as channel:
        stream = watch(channel)
        told = statuses(stream)
        assert next(told) == SERVING
        running.front.close(60.0)  # waits for what is at work: watches must not take all of it
        with pytest.raises(grpc.RpcError):
            list(told)


def test_watches_are_bounded_and_checks_go_on(start_front, monkeypatch):
    monkeypatch.setattr(grpc_server, "_WATCHES", 2)
    running = start_front(token="secret")
    with channel_to(running.port) as channel:
        streams = [watch(channel) for _ in range(2)]
        assert [next(statuses(stream)) for stream in streams] == [SERVING] * 2
        with pytest.raises(grpc.RpcError) as caught:
            next(statuses(watch(channel)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert check(running.port) == SERVING
        for stream in streams:
            stream.cancel()

        def is_free() -> bool:
            stream = watch(channel)
            try:
                return next(statuses(stream)) == SERVING
            except grpc.RpcError:
                return False
            finally:
                stream.cancel()

        wait_until(is_free)


def test_who_has_no_token_and_sends_no_message_holds_no_thread_for_long(start_front, monkeypatch):
    monkeypatch.setattr(grpc_server, "_OPEN_CALLS", 2)
    monkeypatch.setattr(grpc_server, "_OPEN_S", 0.5)
    port = free_port()
    start_front(token="secret", grpc_port=port)
    with channel_to(port) as channel:
        ended = threading.Event()

        def silent() -> Iterator[bytes]:
            ended.wait(60)
            yield b""

        calls = [
            channel.stream_unary("/grpc.health.v1.Health/Check").future(silent()) for _ in range(4)
        ]
        try:
            for call in calls:
                assert call.code() in (
                    grpc.StatusCode.CANCELLED,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )

            def is_serving() -> bool:
                try:  # a call may have ended here a little before its place is free there
                    return check(port) == SERVING
                except grpc.RpcError:
                    return False

            wait_until(is_serving)
        finally:
            ended.set()


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_what_is_no_message_is_refused(served, method, caplog):
    with channel_to(served.port) as channel:
        call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff", timeout=30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
