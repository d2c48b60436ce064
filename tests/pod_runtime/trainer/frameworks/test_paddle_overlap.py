"""Gradients that are sent while the backward pass runs, in this process: order, lateness, loss."""

import threading
from typing import Any

import paddle
import pytest
from paddle import nn

from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.framework import GroupSpec
from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
from pod_runtime.trainer.frameworks.paddle.gradients import ShardBuffers
from pod_runtime.trainer.frameworks.paddle.overlap import (
    Hooks,
    OverlappedExchange,
    ThreadReducer,
    make_buckets,
)
from tests.pod_runtime.trainer.frameworks.test_paddle_framework import form_no_group

HEADER = 3
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


def double(tensor: Any, group: Any = None) -> None:
    """Stands for the all-reduce of two equal ranks."""
    paddle.assign(tensor * 2, tensor)


class RecordingReducer:
    """Sums at once, and remembers the sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, tensor: Any) -> None:
        self.sizes.append(tensor.shape[0])
        double(tensor)

    def wait(self) -> None:
        pass


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.spare = nn.Linear(2, 5)
        self.norm = nn.BatchNorm1D(2, momentum=0.5)

    def forward(self, inputs: Any) -> Any:
        return self.norm(self.second(self.first(inputs)))


def make(
    on_host: bool, bucket_bytes: int = 1
) -> tuple[Any, OverlappedExchange, Any, RecordingReducer]:
    net, reducer = Net(), RecordingReducer()
    parameters = [each for each in net.parameters() if not each.stop_gradient]
    buffers = ShardBuffers(net, on_host)
    exchange = OverlappedExchange(parameters, buffers, HEADER, on_host, reducer, bucket_bytes)
    Hooks().listen_with(exchange)
    return net, exchange, buffers, reducer


def grads(net: Any) -> dict[str, Any]:
    return {
        name: None if each.grad is None else each.grad.numpy().copy()
        for name, each in net.named_parameters()
    }


@pytest.mark.parametrize("on_host", [True, False])
def test_what_two_ranks_would_exchange_adds_up(on_host):
    net, exchange, buffers, reducer = make(on_host)
    inputs = paddle.to_tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])
    buffers.begin_step()
    net(inputs).square().sum().backward()  # a shard before the last
    buffers.end_shard()
    assert reducer.sizes == []
    exchange.arm()
    (net(inputs).sum(axis=1) ** 3).sum().backward()
    buffers.end_shard()
    # From the end on, up to the one that nothing reaches: the others wait for it.
    assert reducer.sizes == [2, 2]
    assert exchange.is_open
    before = grads(net)
    assert exchange.run([1.0, 0.0, 3.0], True, double) == [2.0, 0.0, 6.0]
    assert len(reducer.sizes) == 8
    for name, grad in grads(net).items():
        assert (grad is None and before[name] is None) or (grad == before[name]).all(), "untouched"
    assert exchange.run([1.0, 0.0, 3.0], True, double) == [2.0, 0.0, 6.0]  # so it may be repeated
    mean = net.norm._mean.numpy().copy()
    exchange.put_back(filled_shards=4)
    for name, grad in grads(net).items():
        if "spare" in name or before[name] is None:
            assert grad is None, "no rank had a gradient: the optimizer has to skip it"
        else:
            assert (grad == 2 * before[name]).all()
    assert (net.norm._mean.numpy() != mean).any()
    # A rank without data adds zeros.
    assert exchange.run([0.0, 1.0, 0.0], False, double) == [0.0, 2.0, 0.0]

    for sent in ([2, 2, 2, 8, 4, 12], [2, 2]):
        reducer.sizes.clear()
        exchange.arm()
        (net(inputs).sum(axis=1) ** 3).sum().backward()
        assert reducer.sizes == sent, "what nothing reaches holds up nothing, once that is known"
        exchange.start_over()  # in another group it is not known


def test_gradients_that_change_once_sent_are_sent_again_and_from_then_on_at_the_end():
    net, exchange, buffers, reducer = make(True)
    inputs = paddle.to_tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])
    for early in (True, False):
        reducer.sizes.clear()
        buffers.begin_step()
        for _ in range(2):
            exchange.arm()
            (net(inputs).sum(axis=1) ** 3).sum().backward()
            assert exchange.is_open is early
        buffers.end_shard()
        before = grads(net)
        assert exchange.run([0.0] * HEADER, True, double) == [0.0] * HEADER
        assert len(reducer.sizes) == (16 if early else 8)
        exchange.put_back(filled_shards=2)
        for name, grad in grads(net).items():
            assert before[name] is None or (grad == 2 * before[name]).all()
        for parameter in net.parameters():
            parameter.clear_gradient(False)


def test_parameters_are_dealt_from_the_models_end_to_buckets_of_one_type():
    parameters = [paddle.ones([10]), paddle.ones([10], "float64"), paddle.ones([10], "float64")]
    parameters += [paddle.ones([10], "bfloat16"), paddle.ones([]), paddle.ones([100])]
    buckets = make_buckets(parameters, (), 200, True)
    assert [bucket.indices for bucket in buckets] == [[5], [4, 3], [2, 1], [0]]
    assert [bucket.flat.dtype for bucket in buckets] == ["float32"] * 2 + ["float64", "float32"]
    buckets = make_buckets(parameters, {5, 4}, 10_000, True)
    assert [bucket.indices for bucket in buckets] == [[3], [2, 1], [0], [5, 4]]


def test_a_lost_peer_is_noticed_in_the_thread_and_raised_by_who_waits():
    main = threading.get_ident()
    seen: list[int] = []

    def fail(tensor: Any) -> None:
        seen.append(tensor)
        assert threading.get_ident() != main
        if tensor == 2:
            raise PeerLost("rank 1")

    reducer = ThreadReducer(fail)
    reducer.send(1)
    reducer.wait()
    for tensor in (2, 3):
        reducer.send(tensor)
    with pytest.raises(PeerLost, match="rank 1"):
        reducer.wait()
    assert seen == [1, 2], "nothing more is sent to ranks that are out of step"


def test_nothing_else_is_sent_while_gradients_are_on_their_way(monkeypatch):
    form_no_group(monkeypatch)
    monkeypatch.setattr("paddle.distributed.all_reduce", double)
    monkeypatch.setattr("pod_runtime.trainer.frameworks.paddle.overlap.BUCKET_BYTES", 1)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    framework = paddle_framework(net, optimizer, header_size=HEADER, all_reduce="overlapped")
    framework.group.form(GroupSpec(rank=0, world_size=2, master="127.0.0.1:1", generation=1))
    votes = paddle.zeros([1]).numpy().astype("float64")

    def backward() -> None:
        framework.step.begin()
        framework.step.backward(net(paddle.ones([4, 3])).sum(), 0.5, is_last=True)
        framework.step.end_shard()

    backward()
    with pytest.raises(UsageError, match=r"between step\.backward and step\.update"):
        framework.group.all_reduce(votes)
    net[0].weight.stop_gradient = True
    with pytest.raises(UsageError, match="freeze and unfreeze before or after"):
        framework.step.exchange([0.0] * HEADER, True)
    net[0].weight.stop_gradient = False
    assert framework.step.exchange([1.0, 0.0, 4.0], True) == [2.0, 0.0, 8.0]
    framework.step.apply(filled_shards=2, lr_factor=1.0)
    framework.group.all_reduce(votes)

    backward()
    framework.step.drop()  # a peer was lost: the step is over
    net[0].weight.stop_gradient = True  # between two steps a script may
    backward()
    assert framework.step.exchange([1.0, 0.0, 4.0], True) == [2.0, 0.0, 8.0]
    framework.step.apply(filled_shards=2, lr_factor=1.0)
    assert net[0].weight.grad is None
