"""Kinds of PyTorch models that the loop trains, and those that it refuses.

As a script it trains all of the first beside each other, each by its own part of the loss.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pod_runtime import elastic

WORDS = 7


class Words(nn.Module):
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
        self.words.requires_grad_(False)


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(4, WORDS, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) + self.decoder(self.words(ids)).mean(1, keepdim=True)


class Counting(Words):
    """Its buffers are counters: of whole numbers, and yes or no."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_used", torch.zeros((), dtype=torch.bool))

    def forward(self, ids: Any) -> Any:
        if self.training:
            self.calls += 1
            self.is_used = torch.ones((), dtype=torch.bool)
        return super().forward(ids)


class Infinite(Words):
    """Its buffers are a mask, and a limit that its first batch makes finite."""

    lowest: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("lowest", torch.full((1,), torch.inf))

    def forward(self, ids: Any) -> Any:
        vectors = self.words(ids)
        if self.training:
            self.lowest = torch.minimum(self.lowest, vectors.detach().amin())
        return self.out(vectors + torch.exp(self.mask))


class Spread(Words):
    """Its running mean begins as one number that is seen as four."""

    center: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1).expand(4))

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
        return found + self.rare(self.words(ids)) if (ids == 3).any() else found


class Normed(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Any) -> Any:
        return self.out(self.norm(self.words(ids)))


class Scripted(Normed):
    """A layer of TorchScript, whose buffers are in no dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.2)))


class Reparametrized(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.utils.parametrizations.weight_norm(self.out)


class Number(Words):
    """A parameter without a dimension, and one without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * self.scale + self.nothing.sum()


class Half(Words):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class SparseCall(Words):
    def forward(self, ids: Any) -> Any:
        return self.out(functional.embedding(ids, self.words.weight, sparse=True))


class SparseLayer(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)


class BuiltLate(Words):
    """Builds a layer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None

    def forward(self, ids: Any) -> Any:
        if self.late is None:
            self.late = nn.Linear(4, 1)
        return self.late(self.words(ids)) + super().forward(ids)


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
    """Has a buffer that gets its size from the first batch, as observers of channels have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peaks", torch.zeros(0))

    def forward(self, ids: Any) -> Any:
        found = super().forward(ids)
        if self.training:
            self.peaks.resize_(4).copy_(self.words.weight.detach().amax(0))
        return found


class Lazy(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.LazyLinear(1)


class Wrapped(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.DataParallel(self.out)


class Turning(Words):
    """Turns vectors by a constant that no state has, as rotary embeddings do."""

    turn: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.ones(4, dtype=torch.complex64), persistent=False)

    def forward(self, ids: Any) -> Any:
        return self.out(self.words(ids) * self.turn.real)


class Complex(Words):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def compiled() -> Any:
    return torch.compile(Words(), backend="eager")


def without_values() -> Any:
    with torch.device("meta"):
        return Words()


TRAINED: dict[str, Callable[[], Any]] = {
    "plain": Words, "frozen": Frozen, "tied": Tied, "counting": Counting, "infinite": Infinite,
    "copying": Copying, "spread": Spread,
    "sometimes": Sometimes, "scripted": Scripted,
    "normed": Normed, "reparametrized": Reparametrized, "number": Number, "turning": Turning,
    "in_bfloat16": Half,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "given late": (GivenLate, r"it has got peak since the Loop was made"),
    "resizing": (Resizing, r"its buffer peaks was \[0\], .*: it could not be carried"),
    "limited norm": (LimitedNorm, r"words has max_norm.*renorm_\(.*2, 0, 0\.5\)"),
    "sparse layer": (SparseLayer, r"words\.weight has sparse gradients.*sparse=False"),
    "lazy": (Lazy, "out has no parameters before its first batch; give it one"),
    "wrapped": (lambda: nn.DataParallel(Words()), "pass the bare model, not DataParallel: "),
    "wrapped within": (Wrapped, r"pass the bare model, not DataParallel \(out\)"),
    "complex": (Complex, r"turn is complex64.*torch\.view_as_real"),
    "without values": (without_values, "on the device 'meta', without values.*to_empty"),
    "sparse call": (SparseCall, r"words\.weight has sparse gradients.*F\.embedding"),
    "built late": (BuiltLate, r"it has got late\.weight, late\.bias since the Loop was made"),
}


class Noisy(torch.optim.Adam):
    """Adds noise when it steps, as for Langevin dynamics."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter += 1e-2 * torch.randn_like(parameter)
        return found


class Ids(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index % WORDS, np.array([index % 5], np.float32)


def train(model: Any, *, epochs: int, checkpoint: Path | None, shards: int = 3) -> dict[str, Any]:
    """Train one model, or several by name; return their values."""
    parts = list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
    optimizer = Noisy(model.parameters(), 0.05)
    loop = elastic.Loop(
        model, optimizer, Ids(), batch_size=6, epochs=epochs, shards=shards, checkpoint=checkpoint
    )
    for epoch in loop.epochs():
        model.train()
        for step in epoch:
            size = random.random() * np.random.rand() + torch.rand(()).item()  # of this batch
            for ids, numbers in step:
                numbers = size * numbers.double()
                step.backward(
                    sum(functional.mse_loss(part(ids).double(), numbers) for part in parts)
                )
            optimizer.param_groups[0]["lr"] = 0.03 + 0.02 * random.random()
            step.update()
    return {name: each.double().numpy() for name, each in model.state_dict().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    everything = nn.ModuleDict({name: make() for name, make in TRAINED.items()})
    values = train(everything, epochs=2, checkpoint=None)
    np.savez(args.out / "final.npz", **values)
