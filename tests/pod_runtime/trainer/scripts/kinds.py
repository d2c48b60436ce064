"""Kinds of Paddle models that the loop trains, and those that it refuses: as in kinds_torch.py."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional
from paddle.quantization.quanters.abs_max import FakeQuanterWithAbsMaxObserverLayer

from pod_runtime import elastic

WORDS = 7


class Words(nn.Layer):
    """What all have in common: a vector for each of some words, and a number of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        return self.out(self.words(ids))


class Frozen(Words):
    """Its vectors are shorter than its embedding allows, and stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, max_norm=100.0)
        self.words.weight.stop_gradient = True


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WORDS, 4, bias_attr=False)
        self.decoder.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        found = self.words(ids)
        scores = paddle.matmul(found, self.decoder.weight, transpose_y=True)
        return self.out(found) + scores.mean(1, keepdim=True)


class Counting(Words):
    """Its buffers are counters: of whole numbers, and yes or no."""

    calls: Any
    is_used: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", paddle.zeros([1], dtype="int64"))
        self.register_buffer("is_used", paddle.zeros([1], dtype="bool"))

    def forward(self, ids: Any) -> Any:
        if self.training:
            self.calls = self.calls + 1
            self.is_used = paddle.ones([1], dtype="bool")
        return super().forward(ids)


class Infinite(Words):
    """Its buffers are a mask, and a limit that its first batch makes finite."""

    mask: Any
    lowest: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", paddle.full([4], -float("inf")))
        self.register_buffer("lowest", paddle.full([1], float("inf")))

    def forward(self, ids: Any) -> Any:
        vectors = self.words(ids)
        if self.training:
            self.lowest = paddle.minimum(self.lowest, vectors.detach().min())
        return self.out(vectors + paddle.exp(self.mask))


class Spread(Words):
    """Its running mean begins as one number that is seen as four."""

    center: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", paddle.zeros([1]).expand([4]))

    def forward(self, ids: Any) -> Any:
        vectors = self.words(ids)
        if self.training:
            self.center = 0.9 * self.center + 0.1 * vectors.detach().mean(0)
        return self.out(vectors - self.center)


class Sometimes(Words):
    """A layer gets a gradient in shards that have the word 3, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        found = super().forward(ids)
        return found + self.rare(self.words(ids)) if bool((ids == 3).any()) else found


class Normed(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(4)

    def forward(self, ids: Any) -> Any:
        return self.out(self.norm(self.words(ids)))


class Reparametrized(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.utils.weight_norm(self.out)


class Recurrent(Words):
    """Paddle's LSTM keeps a tensor for dropout that has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2)

    def forward(self, ids: Any) -> Any:
        return self.out(self.lstm(self.words(ids).unsqueeze(1))[0][:, -1])


class Number(Words):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * self.scale


class Quantized(Words):
    """Learns of what size its vectors are, as quantization-aware training does."""

    def __init__(self) -> None:
        super().__init__()
        self.quanter = FakeQuanterWithAbsMaxObserverLayer(None, dtype="float32")

    def forward(self, ids: Any) -> Any:
        vectors = self.quanter(self.words(ids).astype("float32"))
        return self.out(vectors.astype(self.out.weight.dtype))


class Measuring(Words):
    """Keeps a mean of its own as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.center = self.create_parameter([4], attr=paddle.ParamAttr(trainable=False))

    def forward(self, ids: Any) -> Any:
        vectors = self.words(ids)
        self.center.set_value(0.9 * self.center + 0.1 * vectors.detach().mean(0))
        return self.out(vectors - self.center)


class SparseCall(Words):
    def forward(self, ids: Any) -> Any:
        return self.out(functional.embedding(ids, self.words.weight, sparse=True))


class SparseLayer(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)


class LimitedNorm(Words):
    """Its vectors are made shorter as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, max_norm=0.5)


class Copying(Words):
    """Its state_dict has copies, and leaves one out."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {name: each.clone() for name, each in found.items() if name != "out.bias"}


class GivenLate(Words):
    """Gives a buffer its first value in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", None)

    def forward(self, ids: Any) -> Any:
        found = super().forward(ids)
        self.peak = found.detach().max()
        return found


class Resizing(Words):
    """Has a buffer that gets its size from the first batch."""

    peaks: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peaks", paddle.zeros([1]))

    def forward(self, ids: Any) -> Any:
        if self.training:
            self.peaks = self.words.weight.detach().max(0)
        return super().forward(ids)


class BuiltLate(Words):
    """Builds a layer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None

    def forward(self, ids: Any) -> Any:
        if self.late is None:
            self.late = nn.Linear(4, 1)
        return self.late(self.words(ids)) + super().forward(ids)


class Wrapped(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = paddle.DataParallel(self.out)


class Turning(Words):
    """Turns vectors by a constant that no state has, as rotary embeddings do."""

    turn: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", paddle.ones([4], dtype="complex64"), persistable=False)

    def forward(self, ids: Any) -> Any:
        return self.out(self.words(ids) * self.turn.real())


class Complex(Words):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", paddle.ones([4], dtype="complex64"))


def compiled() -> Any:
    return paddle.jit.to_static(Words())


def without_values() -> Any:
    with paddle.LazyGuard():
        return Words()


TRAINED: dict[str, Callable[[], Any]] = {
    "plain": Words, "frozen": Frozen, "tied": Tied, "counting": Counting, "infinite": Infinite,
    "copying": Copying, "spread": Spread,
    "sometimes": Sometimes,
    "normed": Normed, "reparametrized": Reparametrized, "number": Number, "turning": Turning,
    "recurrent": Recurrent, "quantized": Quantized,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "given late": (GivenLate, r"it has got peak since the Loop was made"),
    "resizing": (Resizing, r"its buffer peaks is \[1\] .*: it could not be carried"),
    "limited norm": (LimitedNorm, r"words has max_norm.*set_value\(.*2, 0, 0\.5\)"),
    "sparse layer": (SparseLayer, r"words\.weight has sparse gradients.*sparse=False"),
    "wrapped": (lambda: paddle.DataParallel(Words()), r"the bare model, not paddle\.DataParallel:"),
    "wrapped within": (Wrapped, r"pass the bare model, not paddle\.DataParallel \(out\)"),
    "complex": (Complex, r"turn is complex64.*paddle\.as_real"),
    "without values": (without_values, r"has no values, as within paddle\.LazyGuard"),
    "measuring": (Measuring, r"center: set inside of .*counts in a forward pass.*register_buffer"),
    "sparse call": (SparseCall, r"has sparse gradients.*F\.embedding"),
    "built late": (BuiltLate, r"it has got late\.weight, late\.bias since the Loop was made"),
}


class Noisy(paddle.optimizer.Adam):
    """Adds noise when it steps, as for Langevin dynamics."""

    def step(self) -> None:
        super().step()
        with paddle.no_grad():
            for parameter in self._parameter_list:
                if parameter.grad is not None:
                    parameter.add_(1e-2 * paddle.randn(parameter.shape, parameter.dtype))


class Ids(paddle.io.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return np.int64(index % WORDS), np.array([index % 5], np.float32)


def train(model: Any, *, epochs: int, checkpoint: Path | None, shards: int = 3) -> dict[str, Any]:
    """Train one model, or several by name; return their values."""
    parts = list(model.values()) if isinstance(model, nn.LayerDict) else [model]
    optimizer = Noisy(0.05, parameters=model.parameters())
    loop = elastic.Loop(
        model, optimizer, Ids(), batch_size=6, epochs=epochs, shards=shards, checkpoint=checkpoint
    )
    for epoch in loop.epochs():
        model.train()
        for step in epoch:
            size = random.random() * np.random.rand() + paddle.rand([]).item()  # of this batch
            for ids, numbers in step:
                numbers = size * numbers.astype("float64")
                losses = [
                    functional.mse_loss(part(ids).astype("float64"), numbers) for part in parts
                ]
                step.backward(sum(losses[1:], losses[0]))
            step.clip(0.1 + random.random())
            step.update()
    return {name: each.astype("float64").numpy() for name, each in model.state_dict().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    paddle.set_default_dtype("float64")
    paddle.seed(1)
    # Paddle quantizes in float32 alone, where rounding shows.
    exact = {name: make for name, make in TRAINED.items() if name != "quantized"}
    everything = nn.LayerDict({name: make() for name, make in exact.items()})
    values = train(everything, epochs=2, checkpoint=None)
    np.savez(args.out / "final.npz", **values)
