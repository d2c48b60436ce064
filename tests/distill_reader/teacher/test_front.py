"""The port: who is served by which protocol, and who is sent away."""

import contextlib
import select
import socket
import struct
import threading
from dataclasses import replace

import grpc
import pytest

from distill_reader.errors import UsageError
from distill_reader.protocols import wire
from distill_reader.protocols.oip_messages import SERVICE
from distill_reader.teacher.front import Front, FrontConfig
from distill_reader.teacher.protocols.http2_frames import PREFACE
from distill_reader.teacher.protocols.limits import FrontLimits, bearer_matches
from tests.distill_reader.protobuf_messages import OIP_MESSAGES
from tests.distill_reader.teacher.fake_service import FakeService
from tests.support import free_port, wait_until

QUICK = FrontLimits(
    max_request_bytes=4 << 20,
    max_unfinished_bytes=1 << 20,
    idle_s=0.3,
    stall_s=0.4,
    least_rate=64 << 20,
)
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n"


def connect(running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=20)


def receive_all(sock: socket.socket) -> bytes:
    """Return what comes until the server ends the connection, in whatever way."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


def is_served(running) -> bool:
    """Whether both loops of the front still answer."""
    with grpc.insecure_channel(
        f"127.0.0.1:{running.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        live = channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", timeout=20)
    is_live = OIP_MESSAGES["ServerLiveResponse"].FromString(live).live
    return bool(is_live) and running.http("GET", "/v2/health/live").ok


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_begin(headers: bytes = b"") -> bytes:
    """Return what a client sends before the body of a ModelInfer; HPACK without compression.

    `headers`: further ones, encoded.
    """
    own = b""
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{SERVICE}/ModelInfer".encode()),
        (b":authority", b"t"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ):
        own += b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
    return PREFACE + frame(4, 0) + frame(1, 1, own + headers, flags=4)


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_the_first_bytes_may_come_one_by_one(served, split):
    with connect(served) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(GET[:split])
        assert not select.select([sock], [], [], 0.05)[0]
        sock.sendall(GET[split:])
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_the_fast_path_is_greeted_on_the_same_port(served):
    with connect(served) as sock:
        sock.sendall(wire.pack_hello(wire.StudentHello(model="double")))
        assert sock.recv(4) == wire.MAGIC


@pytest.mark.parametrize("first", [b"PRPC\0\0\0\0", b"PR", b"", b"\0\0\0\0"])
def test_whoever_speaks_something_else_is_sent_away(served, first):
    with connect(served) as sock:
        sock.sendall(first)
        with contextlib.suppress(OSError):  # the server was quicker
            sock.shutdown(socket.SHUT_WR)
        answer = receive_all(sock)
    assert answer == b"" or answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert is_served(served)


def test_a_silent_connection_is_dropped(start_front):
    running = start_front(limits=replace(QUICK, first_byte_s=0.3))
    with connect(running) as sock:
        assert receive_all(sock) == b""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"GET /v2", id="half a head"),
        pytest.param(GET, id="nothing after a request"),
    ],
)
def test_an_idle_http_connection_is_dropped(start_front, start):
    running = start_front(limits=QUICK)
    with connect(running) as sock:
        sock.sendall(start)
        assert receive_all(sock).count(b"HTTP/1.1 200") == start.count(b"\r\n\r\n")


def test_a_head_that_comes_byte_by_byte_does_not_keep_a_connection(start_front):
    running = start_front(limits=QUICK)
    with connect(running) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(GET[:-2])
        for _ in range(2000):
            sock.sendall(b"a: b\r\n"[:1])
            if select.select([sock], [], [], 0.01)[0]:
                break
        else:
            pytest.fail("the connection was not dropped")


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_go_on_is_given_up(start_front, head):
    running = start_front(limits=QUICK)
    with connect(running) as sock:
        sock.sendall(f"POST /v2/models/double/infer HTTP/1.1\r\nHost: t\r\n{head}\r\n\r\n".encode())
        assert receive_all(sock).startswith(b"HTTP/1.1 408")
    wait_until(running.is_idle)


@pytest.mark.full
def test_a_client_that_does_not_take_its_answer_loses_it(start_front):
    running = start_front(limits=replace(QUICK, stall_s=3.0))  # the request is not to stall
    width = 900_000
    x = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],' % width
    head = (
        x + b'"parameters":{"binary_data_size":%d}},' % (4 * width)
        + b'{"name":"n","datatype":"INT64","shape":[1,1],"data":[5]}],'
        + b'"parameters":{"binary_data_output":true}}'
    )  # fmt: skip
    request = (
        b"POST /v2/models/double/infer HTTP/1.1\r\nHost: t\r\n"
        b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
        % (len(head), len(head) + 4 * width)
    )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(request + head + bytes(4 * width))
        wait_until(lambda: running.service.protocols)
        wait_until(running.is_idle)  # while the client is still connected, taking nothing


@pytest.mark.full
def test_a_grpc_message_that_does_not_go_on_ends_its_connection(start_front):
    running = start_front(limits=replace(QUICK, least_rate=1 << 16))
    with connect(running) as sock:
        sock.sendall(grpc_begin() + frame(0, 1, b"\0\0\1\0\0" + bytes(100)))
        receive_all(sock)
    assert is_served(running)


def test_a_grpc_message_that_does_not_go_on_is_given_up_on_a_port_of_grpcs_own(start_front):
    port = free_port()
    start_front(limits=QUICK, grpc_port=port)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(grpc_begin() + frame(0, 1, b"\0\0\1\0\0" + bytes(100)))
        data = b""
        while b"CANCELLED" not in data:
            data += sock.recv(65536)


def test_grpc_messages_that_take_too_much_memory_end_their_connection(start_front):
    running = start_front(limits=FrontLimits(max_unfinished_bytes=4096))
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(bytes(32 << 20), timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert is_served(running)


def test_an_idle_grpc_connection_is_kept(start_front):
    running = start_front(limits=QUICK)
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerLive")
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        for _ in range(3):
            call(b"", timeout=20)
            assert not threading.Event().wait(QUICK.stall_s)  # idle for longer than it may stall
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_connections_are_bounded_and_served_again_when_some_end(start_front):
    running = start_front(limits=FrontLimits(max_connections=3))
    held = [connect(running) for _ in range(3)]
    for sock in held:
        sock.sendall(GET)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    with connect(running) as sock:
        assert receive_all(sock) == b""
    for sock in held:
        sock.close()
    wait_until(lambda: _answers(running))


def _answers(running) -> bool:
    with connect(running) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(GET)
        return sock.recv(100).startswith(b"HTTP/1.1 200")
    return False


def test_every_route_but_health_wants_the_token(start_front):
    running = start_front(token="secret")
    for path in ("/v2", "/v2/models/double", "/v2/models/double/config", "/metrics", "/nope"):
        response = running.http("GET", path)
        assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    response = running.http("POST", "/GeneralModelService/inference", data=b"{}")
    assert response.status_code == 401
    shown = {"Authorization": "Bearer secret"}
    assert running.http("GET", "/v2/models/double", headers=shown).ok
    for path in ("health/live", "health/ready", "models/double/ready"):
        assert running.http("GET", f"/v2/{path}").ok
        assert running.http("GET", f"/v2/{path}", headers={"Authorization": "Bearer \xff"}).ok
    unknown = running.http("GET", "/v2/models/nope/ready")
    assert (unknown.status_code, "double" in unknown.text) == (404, False)


_HELLO = struct.Struct("<4sHHI")
STRANGE = [
    b"GET /v2/models/%ff%fe HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /v2/models/\xff HTTP/1.1\r\nHost: t\r\n\r\n",
    b"\xff\xff\xff / HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET http://[x/ HTTP/1.1\r\nHost: t\r\n\r\n",
    *(
        b"POST /v2/models/double/infer HTTP/1.1\r\nHost: t\r\n" + header + b"\r\n\r\n{}"
        for header in (
            b"Authorization: Bearer \xff\r\nContent-Length: 2",
            b"Authorization: \xed\xa0\x80\r\nContent-Length: 2",
            b"Content-Length: \xb2",
            b"Content-Encoding: \xff\r\nContent-Length: 2",
            b"Inference-Header-Content-Length: \xb2\r\nContent-Length: 2",
            b"Transfer-Encoding: \xff",
        )
    ),
    *(
        _HELLO.pack(wire.MAGIC, 1, 0, len(text)) + text
        for text in (
            b'{"token": "\\ud800"}',
            b'{"model": "\\ud800"}',
            b'{"nonce": "\\ud800"}',
            b'{"nonce": ' + b"[" * 1000 + b"}",
            b'{"nonce": ' + b"9" * 3000 + b"}",
            b"\xff\xfe",
        )
    ),
]


@pytest.mark.parametrize("token", ["", "secret"])
def test_nothing_that_a_stranger_sends_writes_a_traceback(start_front, caplog, token):
    running = start_front(token=token)
    for data in STRANGE:
        with contextlib.suppress(OSError), connect(running) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            receive_all(sock)
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for method in (
            f"/{SERVICE}/ModelInfer",
            f"/{SERVICE}/ModelReady",
            "/grpc.health.v1.Health/Check",
        ):
            for metadata in ((("authorization-bin", b"\xff"),), (("authorization", "Bearer "),)):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(f"/{method}")(b"\xff\xff", metadata=metadata, timeout=30)
    assert running.http("GET", "/v2/health/live").ok
    assert not [record for record in caplog.records if record.exc_info]
    assert "Traceback" not in caplog.text


def test_a_path_that_is_no_text_does_not_end_grpc(start_front):
    running = start_front()
    with connect(running) as sock:
        sock.sendall(grpc_begin().replace(b"/inference", b"/\xff\xff\xff\xfference"))
        assert sock.recv(65536)
        assert is_served(running)


@pytest.mark.parametrize(
    ("header", "token", "expected"),
    [
        ("", "", True),
        ("anything", "", True),
        ("Bearer t", "t", True),
        ("bearer  t ", "t", True),
        ("Bearer", "t", False),
        ("Basic t", "t", False),
        ("Bearer \xe9", "t", False),
        ("Bearer \xe9", "\xe9", True),
        ("Bearer \udcff", "t", False),
        ("", "t", False),
    ],
)
def test_a_bearer_is_compared_whole(header, token, expected):
    assert bearer_matches(header, token) is expected


def test_prometheus_is_told(served):
    response = served.http("GET", "/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text == "edl_up 1\n"
    assert served.http("POST", "/metrics").status_code == 405


def test_what_is_not_there_says_what_is(served):
    response = served.http("GET", "/")
    assert response.status_code == 404
    assert "/v2/models/MODEL/infer" in response.text


def test_grpc_may_have_a_port_of_its_own(start_front):
    port = free_port()
    start_front(grpc_port=port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", timeout=20)


@pytest.mark.parametrize("flag", ["port", "grpc_port"])
def test_a_port_in_use_is_named(served, flag):
    service = FakeService()
    config = {"port": 0, flag: served.port}
    with pytest.raises(UsageError, match=f"--{flag} {served.port}: cannot listen on 127.0.0.1"):
        Front(service, FrontConfig(**config), lambda: b"").start()
    service.close()


def test_closing_waits_for_requests_at_work():
    service = FakeService()
    front = Front(service, FrontConfig(port=0), lambda: b"")
    front.start()
    service.gate.clear()
    body = b'{"tensor":[{"alias_name":"x","elem_type":1,"shape":[1,1],"float_data":[1]},' \
        b'{"alias_name":"n","elem_type":0,"shape":[1,1],"int64_data":[1]}]}'  # fmt: skip
    with socket.create_connection(front.address, timeout=20) as busy:
        with socket.create_connection(front.address, timeout=20) as idle:
            idle.sendall(GET)
            assert idle.recv(100)
            busy.sendall(
                b"POST /GeneralModelService/inference HTTP/1.1\r\nHost: t\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: service.protocols)
            closing = threading.Thread(target=front.close, args=(20.0,))
            closing.start()
            receive_all(idle)
        service.gate.set()
        assert receive_all(busy).startswith(b"HTTP/1.1 200")
    closing.join(20)
    assert not closing.is_alive()
    service.close()
