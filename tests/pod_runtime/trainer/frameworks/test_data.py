"""What a collate function returns reaches the script as it is, with tensors for its arrays."""

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.full  # loads both frameworks

Pair = namedtuple("Pair", "x y")


class Holder(list[Any]):
    """A list that is not made of a list alone."""

    def __init__(self, items: Any, name: str) -> None:
        super().__init__(items)
        self.name = name


class Sized(namedtuple("Sized", "x y")):
    """A named tuple that is made of something else."""

    def __new__(cls, parts: Any) -> "Sized":
        return super().__new__(cls, *parts)


class Fields(dict[str, Any]):
    """Fields by name, as attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.fixture(params=["paddle", "torch"])
def kit(request) -> tuple[Any, Any]:
    """Return the framework's data, and its kind of tensor."""
    library = pytest.importorskip(request.param)
    if request.param == "paddle":
        from pod_runtime.trainer.frameworks.paddle.data import PaddleData

        return PaddleData(), library.Tensor
    from pod_runtime.trainer.frameworks.torch.data import TorchData

    return TorchData(library.device("cpu")), library.Tensor


X, Y = np.ones((2, 3), np.float32), np.arange(2)


@pytest.mark.parametrize(
    "batch",
    [(X, Y), [X, Y], {"x": X, "y": Y}, Pair(X, Y), Fields(x=X, y=Y), OrderedDict(x=X, y=Y),
     UserDict(x=X, y=Y), Holder([X, Y], "a"), Sized((X, Y))],
    ids=lambda batch: type(batch).__name__,
)  # fmt: skip
def test_a_container_keeps_its_kind(kit, batch):
    data, tensor = kit
    made = data.to_batch(batch)
    assert type(made) is type(batch)
    parts = list(made.values() if hasattr(made, "values") else made)
    assert [type(each) for each in parts] == [tensor, tensor]
    assert [each.tolist() for each in parts] == [X.tolist(), Y.tolist()]
    before = list(batch.values() if hasattr(batch, "values") else batch)
    assert before[0] is X, "the batch itself is as it was: it may be read again"


def test_what_containers_have_besides_their_parts_stays(kit):
    data, tensor = kit
    assert data.to_batch(Holder([X], "a")).name == "a"
    assert isinstance(data.to_batch(Fields(x=X)).x, tensor)
    assert isinstance(data.to_batch(Pair(X, Y)).y, tensor)


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array(["2020-01-01"], "datetime64[D]"), np.array([None, 1], object)],
    ids=["text", "dates", "objects"],
)
def test_an_array_that_can_be_no_tensor_stays_one(kit, array):
    found, number = kit[0].to_batch((array, Y))
    assert found is array
    assert number.tolist() == [0, 1]


def test_an_array_may_be_seen_backwards_or_be_read_only(kit):
    data, _tensor = kit
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert data.to_batch((Y[::-1], fixed))[0].tolist() == [1, 0]
    assert data.to_batch(fixed).tolist() == [0, 1, 2]


def test_a_packed_sequence_stays_one():
    torch = pytest.importorskip("torch")
    from pod_runtime.trainer.frameworks.torch.data import TorchData

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    (made,) = TorchData(torch.device("cpu")).to_batch([packed])
    assert type(made) is type(packed)
    assert made.batch_sizes.tolist() == [2, 2, 1]
