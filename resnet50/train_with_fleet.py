"""Train an image classifier on trainers that come and go.

python train_with_fleet.py                                      alone, handwritten digits
python -m paddle.distributed.launch --nproc_per_node 2 train_with_fleet.py    a fixed number
edl run --min 1 --max 4 train_with_fleet.py --checkpoint ckpt   elastic, on this machine
python train_with_fleet.py --use_distill_service True --distill_teachers HOST:PORT    distilled
"""

import argparse
import math
import os
import sys
import time

import numpy as np
import paddle
import paddle.nn.functional as F
from distillation import DistillError, Teachers, as_input, save_teacher, taught_loss
from images import DataError, make_sets, train_loader_args
from networks import load_pretrained, make_network
from options import parse
from schedules import make_schedule
from transforms import mixup

from edl import elastic
from edl.option_types import OptionError
from pod_runtime.env import TrainerEnv
from pod_runtime.trainer.tensorboard.summary import RunLog

LEAST_SHARD = 16  # samples: with fewer, batch norm learns badly
ENV = TrainerEnv.read(os.environ)


def say(text: str) -> None:
    """Print once, not once per trainer."""
    if ENV.rank == 0:
        print(text, flush=True)


def choose_device(options: argparse.Namespace) -> None:
    """Use this trainer's GPU, or the CPU.

    Raises:
        OptionError: what was asked for is not there.
    """
    there_is_one = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if options.use_gpu and not there_is_one:
        raise OptionError("--use_gpu=True: Paddle finds no GPU here; leave it out to use the CPU")
    on_gpu = there_is_one if options.use_gpu is None else options.use_gpu
    if options.fp16 and not on_gpu:
        raise OptionError(
            "--fp16=True: half precision needs a GPU, this training is on the CPU; leave it out"
        )
    paddle.set_device("gpu" if on_gpu else "cpu")  # "gpu": the one that the launcher has chosen


def make_folder(folder: str) -> None:
    """Make the folder of the weights now, not when a night's training has ended.

    Raises:
        OptionError: it cannot be made, or not be written.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--model_save_dir: {folder}: {error.strerror}; name another") from error
    if not os.access(folder, os.W_OK):
        raise OptionError(f"--model_save_dir: {folder} cannot be written; name another")


def total_batch_size(options: argparse.Namespace) -> int:
    """Return the global batch. It is fixed for the run, so it counts on the most trainers."""
    if options.total_batch_size is not None:
        return options.total_batch_size
    return options.batch_size * (ENV.max_trainers or ENV.world_size)


class Trainer:
    """One trainer's network, optimizer and loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        total_batch = total_batch_size(options)
        try:
            train_set, self.test_set = make_sets(options)
        except ValueError as error:  # of the options, or of what the folder holds
            raise OptionError(str(error)) from error
        except OSError as error:
            raise OptionError(f"--data_dir: cannot be read: {error}") from error
        if ENV.rank == 0:
            make_folder(options.model_save_dir)

        paddle.seed(options.seed)
        self.network = make_network(options)
        if options.pretrained_model is not None:
            say(load_pretrained(self.network, options.pretrained_model))
        rate = make_schedule(
            options.lr_strategy,
            lr=options.lr,
            total_batch=total_batch,
            num_epochs=options.num_epochs,
            warmup_epochs=options.warmup_epochs,
            decay_epochs=options.decay_epochs,
        )
        self.rate = paddle.optimizer.lr.LambdaDecay(1.0, rate)  # called with epochs, not steps
        optimizer = paddle.optimizer.Momentum(
            self.rate,
            momentum=options.momentum_rate,
            parameters=self.network.parameters(),
            weight_decay=options.l2_decay,
        )
        scaler = paddle.amp.GradScaler(
            enable=options.fp16,
            init_loss_scaling=options.scale_loss,
            use_dynamic_loss_scaling=options.use_dynamic_loss_scaling,
        )
        loader = paddle.io.DataLoader(
            train_set, batch_size=total_batch, shuffle=True, **train_loader_args(options)
        )
        teachers = Teachers(options, loader) if options.use_distill_service else None
        self.loop = elastic.Loop(
            self.network,
            optimizer,
            loader,
            epochs=options.num_epochs,
            seed=options.seed,
            checkpoint=options.checkpoint,
            save_steps=options.save_steps,
            scaler=scaler,
            reader=None if teachers is None else lambda where: teachers.read(self.loop),
        )
        self.shard = -(-total_batch // self.loop.shards_per_batch)
        self.log = None
        if options.log_dir is not None:
            self.log = RunLog(self.loop, options.log_dir, options.log_kind)
        say(
            f"{options.model} on {len(train_set)} images"
            f"{'' if options.data_dir else ' of handwritten digits (no --data_dir)'}: "
            f"batches of {total_batch} in {self.loop.shards_per_batch} shards, "
            f"{self.loop.world_size} trainers, {paddle.device.get_device()}"
            f"{'' if teachers is None else f'; taught by {teachers}'}"
        )
        if self.shard < LEAST_SHARD:
            say(
                f"warning: a shard has {self.shard} images; with fewer than {LEAST_SHARD} batch "
                f"norm learns badly: raise --total_batch_size, or lower the job's most trainers"
            )

    def run(self) -> None:
        last = self.options.num_epochs - 1
        for epoch in self.loop.epochs():
            self.network.train()
            told = [f"End pass {epoch.number}", *self.train(epoch)]
            if self.options.do_test or epoch.number == last:
                found = self.test()
                self.loop.log(**found)
                self.draw(**{f"test/{name}": value for name, value in found.items()})
                told += [f"test_{name} {found[name]:.5f}" for name in ("loss", "acc1", "acc5")]
            say(", ".join(told))
        if self.loop.rank == 0:
            self.save()
        if self.log is not None:
            self.log.close()

    def train(self, epoch: elastic.Epoch) -> list[str]:
        """Train what is left of an epoch, and return how that went, in words.

        Losses are those of this trainer's shards, speeds are those of all trainers.
        """
        began = since = time.monotonic()
        losses: list[float] = []
        images = images_before = 0
        for step in epoch:
            number = step.index
            self.rate.step(epoch.number + number / epoch.steps)
            parts = [self.train_shard(step, *batch) for batch in step]
            step.update()
            images += step.samples
            if number % self.options.fetch_steps and number + 1 < epoch.steps:
                continue
            # Only here are numbers read back: on a GPU that waits for all that was asked of it.
            loss = float(np.mean([part.item() for part in parts])) if parts else math.nan
            losses.append(loss)
            now = time.monotonic()
            speed = (images - images_before) / (now - since)
            since, images_before = now, images
            say(
                f"Pass {epoch.number}, trainbatch {number}/{epoch.steps}, loss {loss:.5f}, "
                f"lr {self.rate():.5f}, speed {speed:.2f} images/s"
            )
            self.draw(**{"train/loss": loss, "train/lr": self.rate(), "train/images_per_s": speed})
        if not losses:  # the pods have changed behind the epoch's last step
            return []
        speed = images / (time.monotonic() - began)
        return [f"train_loss {np.mean(losses):.5f}", f"speed {speed:.2f} images/s"]

    def train_shard(self, step: elastic.Step, images, labels, soft_labels=None):
        """Add one shard's gradient; return its loss.

        Args:
            soft_labels: (N, class_dim) probabilities of teachers; None: there are no teachers.
        """
        options = self.options
        smoothing = options.label_smoothing_epsilon if options.use_label_smoothing else 0.0
        with paddle.amp.auto_cast(enable=options.fp16, level="O1"):
            if soft_labels is not None:
                loss = taught_loss(
                    self.network(as_input(images, options)),
                    labels,
                    soft_labels,
                    alpha=options.distill_alpha,
                    smoothing=smoothing,
                )
            elif options.use_mixup:
                # numpy's stream belongs to this shard: the loop has seeded it.
                images, labels, others, share = mixup(
                    images, labels, options.mixup_alpha, np.random
                )
                scores = self.network(images)
                loss = share * F.cross_entropy(scores, labels, label_smoothing=smoothing)
                loss += (1 - share) * F.cross_entropy(scores, others, label_smoothing=smoothing)
            else:
                scores = self.network(images)
                loss = F.cross_entropy(scores, labels, label_smoothing=smoothing)
        step.backward(loss)
        return loss.detach()

    def test(self) -> dict[str, float]:
        """Return loss, acc1 and acc5 over all test images, and over all trainers."""
        loader = paddle.io.DataLoader(
            self.test_set, batch_size=max(self.shard, 32), **train_loader_args(self.options)
        )
        sums = self.loop.evaluate(loader, self.judge)
        return {name: total / len(self.test_set) for name, total in sums.items()}

    def judge(self, images, labels) -> dict[str, paddle.Tensor]:
        """Return sums over a batch of test images."""
        with paddle.amp.auto_cast(enable=self.options.fp16, level="O1"):
            scores = self.network(as_input(images, self.options)).astype("float32")
        best = scores.topk(min(5, scores.shape[1]), axis=1)[1]  # (N, 5) classes
        hits = best == labels.reshape([-1, 1])
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "acc1": hits[:, 0].sum(),
            "acc5": hits.any(axis=1).sum(),
        }

    def draw(self, **scalars: float) -> None:
        if self.log is not None:
            for tag, value in scalars.items():
                self.log.add_scalar(tag, value)

    def save(self) -> None:
        """Write the weights, for --pretrained_model and for others."""
        options = self.options
        folder = os.path.join(options.model_save_dir, options.model, str(options.num_epochs - 1))
        paddle.save(self.network.state_dict(), os.path.join(folder, "model.pdparams"))
        say(f"weights: {folder}/model.pdparams")
        if options.save_serving_model:
            say(save_teacher(self.network, options))


def main() -> int:
    options = parse()
    for line in options.ignored:
        say(f"warning: {line}")
    try:
        choose_device(options)
        Trainer(options).run()
    except (
        OptionError,
        DataError,
        DistillError,
        elastic.ElasticError,
    ) as error:  # they say what to change
        # Here `--batch_size` is that of a trainer.
        text = str(error).replace("continue with batch_size=", "continue with --total_batch_size=")
        print(f"train_with_fleet.py: {text}", file=sys.stderr)
        return 2 if isinstance(error, OptionError | elastic.UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
