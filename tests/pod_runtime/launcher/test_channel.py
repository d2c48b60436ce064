"""The trainers' socket, from both of its ends."""

import json
import os
import socket
import time
from dataclasses import replace

import pytest

from job_server.api.codec import encode
from job_server.api.wire import Order, PlanPod, SnapshotRef
from pod_runtime.channel_wire import (
    Cut,
    Disinvitation,
    Drained,
    Go,
    Invitation,
    Preview,
    Resume,
    SegmentMade,
    Stepped,
    TrainerHello,
    Welcome,
    parse_launcher,
    parse_trainer,
    to_json,
)
from pod_runtime.errors import ChannelError
from pod_runtime.launcher.channel import TrainerChannel, TrainerConnection, close_all
from pod_runtime.shim_wire import LineSocket
from tests.pod_runtime.fake_job_server import make_plan
from tests.programs import run_code
from tests.support import no_descriptor_free, wait_until

POD = PlanPod(pod_id="a", pod_rank=0, node_id="n", addr="h", slots=(0,), ranks=(0,), ports=(1,))
PLAN = make_plan(3, Order.PREPARE, (POD,))
REF = SnapshotRef(stage=2, step=7, digest="d", serial=1)


@pytest.fixture
def ends():
    """(the launcher's end, the trainer's end) of one connection."""
    channel = TrainerChannel("pod_0_0")
    trainer = socket.socket(socket.AF_UNIX)
    trainer.connect(f"\0{channel.name}")
    connection = channel.accept()
    assert connection is not None
    yield connection, LineSocket(trainer)
    connection.close()
    trainer.close()
    channel.close()


def test_the_connecting_process_is_known(ends):
    assert ends[0].peer_pid == os.getpid()


def test_nobody_waiting_is_no_error():
    channel = TrainerChannel("pod_0_0")
    assert channel.accept() is None
    channel.close()


def test_a_trainer_that_comes_when_no_descriptor_is_free_is_let_in_later():
    channel, trainer = TrainerChannel("pod_0_0"), socket.socket(socket.AF_UNIX)
    trainer.connect(f"\0{channel.name}")
    with no_descriptor_free():
        before = time.monotonic()
        assert channel.accept() is None
        assert time.monotonic() >= before + 0.05  # or its caller would try without a pause
    connection = channel.accept()
    assert connection is not None
    connection.close()
    trainer.close()
    channel.close()


def test_two_launchers_of_one_pod_have_different_channels():
    one, two = TrainerChannel("pod_0_0"), TrainerChannel("pod_0_0")
    assert one.name != two.name
    one.close()
    two.close()


def test_messages_come_in_order_with_their_descriptors(ends):
    connection, trainer = ends
    assert list(connection.messages()) == []
    read, write = os.pipe()
    trainer.send({"say": "hello", "rank": 1, "stage": 2, "pid": 3})
    trainer.send({"say": "segment", "stage": 2, "size_bytes": 5, "fds": 1}, (write,))
    (hello, no_fds), (segment, fds) = connection.messages()
    assert hello == TrainerHello(rank=1, stage=2, pid=3)
    assert no_fds == ()
    assert segment == SegmentMade(stage=2, size_bytes=5)
    os.close(write)
    os.write(fds[0], b"x")
    assert os.read(read, 1) == b"x"
    close_all(fds)
    os.close(read)
    assert connection.open


def test_half_a_message_blocks_nobody_and_is_kept_until_the_rest_comes(ends):
    connection, trainer = ends
    trainer.socket.sendall(b'{"say": "dra')
    assert list(connection.messages()) == []
    trainer.socket.sendall(b'ined", "step": 4}\n{"say"')
    assert [said for said, _ in connection.messages()] == [Drained(step=4)]
    assert connection.open


def test_what_was_said_before_hanging_up_is_heard(ends):
    connection, trainer = ends
    trainer.send({"say": "drained", "step": 4, "id": 2})
    trainer.close()
    assert [said for said, _ in connection.messages()] == [Drained(step=4, id=2)]
    assert not connection.open


def test_an_answer_arrives_with_descriptors_and_the_sender_keeps_its_own(ends):
    connection, trainer = ends
    with open(os.devnull) as file:
        connection.send(Welcome(plan=PLAN), (file.fileno(),))
        message, fds = trainer.receive()
        os.fstat(file.fileno())
    assert message == {"do": "welcome", "plan": json.loads(json.dumps(encode(PLAN))), "fds": 1}
    close_all(fds)


def test_sending_to_one_that_has_gone_says_so(ends):
    connection, trainer = ends
    trainer.close()
    with pytest.raises(OSError, match="Broken pipe"):
        connection.send(Go())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"say": "good day"}\n', "say: expected one of hello"),
        (b'{"say": ["hello"]}\n', "say: expected one of hello"),
        (b'{"say": "hello", "rank": "0", "stage": 1, "pid": 1}\n', "hello: rank: expected int"),
        (b'{"say": "loaded"}\n', "loaded: step: missing"),
        (b'{"say": "segment", "stage": 1, "size_bytes": 1, "fds": 1}\n', "fds: 1 announced"),
    ],
)
def test_what_is_not_of_the_protocol_is_refused_with_words(ends, line, words):
    connection, trainer = ends
    trainer.socket.sendall(line)
    with pytest.raises(ChannelError, match=words):
        list(connection.messages())


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (Welcome(plan=PLAN), {"do": "welcome", "plan": encode(PLAN)}),
        (Go(), {"do": "go"}),
        (Go(plan=PLAN), {"do": "go", "plan": encode(PLAN)}),
        (Preview(snapshot=REF), {"do": "preview", "snapshot": encode(REF)}),
        (
            Cut(id=3, durable=True, halt="pause"),
            {"do": "cut", "id": 3, "durable": True, "patient": False, "halt": "pause"},
        ),
        (Resume(id=3), {"do": "resume", "id": 3}),
        (Invitation(plan=PLAN, rank=1), {"do": "join", "plan": encode(PLAN), "rank": 1}),
        (Disinvitation(), {"do": "drop"}),
    ],
)
def test_what_a_launcher_sends_is_read_by_trainers_as_it_was_meant(message, sent):
    assert to_json(message) == sent
    assert parse_launcher({**sent, "fds": 0}) == message


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"do": "dance"}, "do: expected one of welcome, go, preview, cut, resume, join, drop"),
        ({"do": "cut"}, "cut: id: missing"),
        ({"do": "go", "plan": 3}, "go: plan: "),
    ],
)
def test_a_trainer_refuses_what_no_launcher_sends(sent, text):
    with pytest.raises(ChannelError, match=f"^{text}"):
        parse_launcher(sent)


def test_a_loss_of_nan_loses_the_metric_and_not_the_trainer():
    said = parse_trainer(
        {
            "say": "step",
            "step": 3,
            "step_s": float("nan"),
            "metrics": {"loss": float("nan"), "a": 1},
        }
    )
    assert said == Stepped(step=3, metrics={"a": 1.0})


def test_a_process_that_reads_nothing_is_given_up_after_a_while(monkeypatch):
    monkeypatch.setattr("pod_runtime.launcher.channel._SEND_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair()
    connection = TrainerConnection(ours, os.getpid())
    with pytest.raises(TimeoutError):
        connection.send(Welcome(plan=replace(PLAN, master="x" * 4_000_000)))
    connection.close()
    theirs.close()


def test_another_process_connects_by_the_name_alone():
    channel = TrainerChannel("pod_0_0")
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); "
        'import json; s.sendall(json.dumps({"say": "done", "step": 1}).encode() + b"\\n")'
    )
    run_code(code, channel.name)
    connection = channel.accept()
    assert connection is not None
    assert connection.peer_pid != os.getpid()
    wait_until(lambda: list(connection.messages()) or not connection.open)
    connection.close()
    channel.close()
