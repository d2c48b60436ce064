"""The elastic loop that trains teachers and students of texts."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from text_data import DataError, TextSet, collate

from edl import elastic

_TEST_BATCH = 256


def choose_device(options: argparse.Namespace) -> None:
    """Use this trainer's GPU, or the CPU.

    Raises:
        DataError: a GPU was asked for, and there is none.
    """
    there_is_one = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if options.use_gpu and not there_is_one:
        raise DataError("--use_gpu True: Paddle finds no GPU here; leave it out to use the CPU")
    on_gpu = there_is_one if options.use_gpu is None else options.use_gpu
    paddle.set_device("gpu" if on_gpu else "cpu")  # "gpu": the one that the launcher has chosen


class Training:
    """One trainer's network and loop."""

    def __init__(
        self,
        options: argparse.Namespace,
        network: nn.Layer,
        train_set: TextSet,
        test_set: TextSet,
        loss: Callable[..., Any],
        reader: Callable[["Training"], Any] | None = None,
    ) -> None:
        """
        Args:
            loss: loss(*batch), the mean over the batch's texts.
            reader: called in every stage, returns the batches of this trainer; None: those of
                `train_set`.
        """
        self.options = options
        self.network = network
        self.train_set = train_set
        self.test_set = test_set
        self._loss = loss
        self.steps = options.num_epochs * -(-len(train_set) // options.batch_size)
        self.rate = paddle.optimizer.lr.LambdaDecay(options.lr, self.rate_factor)
        optimizer = paddle.optimizer.AdamW(
            self.rate, parameters=network.parameters(), weight_decay=options.weight_decay
        )
        self.loop = elastic.Loop(
            network,
            optimizer,
            train_set,
            batch_size=options.batch_size,
            collate_fn=collate,
            epochs=options.num_epochs,
            seed=options.seed,
            checkpoint=options.checkpoint,
            save_steps=options.save_steps,
            reader=None if reader is None else lambda where: reader(self),
        )

    def rate_factor(self, step: int) -> float:
        """Return what multiplies the learning rate: up for a tenth of the steps, then down."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (self.steps - step) / max(1, self.steps - warmup))

    def run(self) -> float | None:
        """Return the accuracy on the test texts; None: the training was over already."""
        accuracy = None
        for epoch in self.loop.epochs():
            self.network.train()
            for step in epoch:
                self.rate.step(self.loop.step_count)
                losses = [self._train_shard(step, *batch) for batch in step]
                step.update()
                if step.number % self.options.fetch_steps == 0 and losses:
                    self.say(
                        f"epoch {epoch.number}, step {step.number}/{self.steps}: "
                        f"loss {losses[0].item():.5f}"
                    )
            sums = self.loop.evaluate(
                self.test_set, self._judge, batch_size=_TEST_BATCH, collate_fn=collate
            )
            loss, accuracy = (sums[name] / len(self.test_set) for name in ("loss", "hits"))
            self.loop.log(loss=loss, accuracy=accuracy)
            self.say(f"epoch {epoch.number}: test loss {loss:.5f}, accuracy {accuracy:.5f}")
        if self.loop.rank == 0 and self.options.json is not None:
            told = {"texts": len(self.train_set), "seed": self.options.seed, "accuracy": accuracy}
            self.options.json.write_text(json.dumps(told))
        return accuracy

    def _train_shard(self, step: elastic.Step, *batch):
        """Add one shard's gradient; return its loss."""
        loss = self._loss(*batch)
        step.backward(loss)
        return loss.detach()

    def _judge(self, *batch) -> dict[str, paddle.Tensor]:
        """Return sums over a batch of test texts."""
        *_, ids, labels = batch
        scores = self.network(ids)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "hits": (scores.argmax(axis=1) == labels).sum(),
        }

    def say(self, text: str) -> None:
        """Print once, not once per trainer."""
        if self.loop.rank == 0:
            print(text, flush=True)
