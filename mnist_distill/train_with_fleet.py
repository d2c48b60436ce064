"""Train a digit classifier, with or without teachers, on trainers that come and go.

python train_with_fleet.py --save_serving_model True                         a teacher
python -m distill_reader.serve --model mnist_cnn_model --port 9292           serves it
python train_with_fleet.py --use_distill_service True \\
    --distill_teachers 127.0.0.1:9292                                        its student
edl run --min 1 --max 4 train_with_fleet.py ... --checkpoint ckpt            elastic
"""

import argparse
import json
import sys
from pathlib import Path

import paddle
import paddle.nn.functional as F
from mnist_data import NO_LABEL, DataError, ImageSet, choose, load
from mnist_models import INPUT, MODELS, OUTPUT, save_teacher
from mnist_options import parse

from distill_reader.errors import DistillError
from edl import DistillReader, elastic, kl_divergence
from edl.option_types import OptionError


def choose_device(options: argparse.Namespace) -> None:
    """Use this trainer's GPU, or the CPU."""
    there_is_one = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if options.use_gpu and not there_is_one:
        raise OptionError("--use_gpu True: Paddle finds no GPU here; leave it out to use the CPU")
    on_gpu = there_is_one if options.use_gpu is None else options.use_gpu
    paddle.set_device("gpu" if on_gpu else "cpu")  # "gpu": the one that the launcher has chosen


class Trainer:
    """One trainer's network and loop, and its teachers if it has some."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        everything, test = load(options.data_dir)
        # Images without a label are of use to those alone who have a teacher.
        others = options.unlabelled if options.use_distill_service else 0
        chosen = choose(everything, options.labelled, others, options.seed)
        self.train_set, self.test_set = ImageSet(chosen), ImageSet(test)

        paddle.seed(options.seed)
        self.network = MODELS[options.model]()
        steps = options.num_epochs * -(-len(chosen) // options.batch_size)
        self.rate = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, T_max=steps)
        optimizer = paddle.optimizer.Adam(self.rate, parameters=self.network.parameters())
        self.loop = elastic.Loop(
            self.network,
            optimizer,
            self.train_set,
            batch_size=options.batch_size,
            epochs=options.num_epochs,
            seed=options.seed,
            checkpoint=options.checkpoint,
            save_steps=options.save_steps,
            reader=self.ask_teachers if options.use_distill_service else None,
        )
        self.images_with_label = int((chosen.labels != NO_LABEL).sum())

    def ask_teachers(self, where: elastic.ReadFrom):
        """Return this trainer's batches from `where` on, each with the teachers' predictions.

        The loop calls it in every stage: predictions for batches that another trainer computes by
        then are dropped with the reader, and asked for again there.
        """
        # What loop.shards yields: (epoch, step, shard, images, labels). Only images are sent.
        reader = DistillReader(ins=[None, None, None, INPUT, None], predicts=[OUTPUT])
        reader.set_fixed_teacher(self.options.distill_teachers)
        reader.set_no_teacher_timeout(self.options.no_teacher_timeout_s)
        reader.set_batch_generator(self.loop.shards(self.train_set))
        return reader()

    def loss(self, images, labels, prediction=None):
        """Return a shard's mean loss; `prediction`: (N, 10) probabilities of a teacher."""
        scores = self.network(images)  # (N, 10)
        # Images without a label add nothing here, but count in the mean.
        hard = F.cross_entropy(scores, labels, ignore_index=NO_LABEL, reduction="sum")
        hard = hard / len(labels)
        if prediction is None:
            return hard
        # The logarithm of a softmax is its logits, but for a number per row that changes nothing:
        # so any teacher that serves probabilities will do, at any temperature.
        teacher_scores = prediction.clip(min=1e-30).log()
        soft = kl_divergence(scores, teacher_scores, temperature=self.options.temperature)
        return self.options.alpha * soft + (1 - self.options.alpha) * hard

    def train(self) -> float | None:
        """Return the accuracy on the test images; None: the training was over already."""
        accuracy = None
        for epoch in self.loop.epochs():
            self.network.train()
            for step in epoch:
                self.rate.step(self.loop.step_count)
                costs = [self.train_shard(step, *batch) for batch in step]
                step.update()
                if step.number % self.options.fetch_steps == 0 and costs:
                    self.say(
                        f"Pass {step.number}, Epoch {epoch.number}, Cost {costs[0].item():.5f}"
                    )
            done = epoch.number + 1
            if done % self.options.test_epochs and done < self.options.num_epochs:
                continue
            sums = self.loop.evaluate(self.test_set, self.judge, batch_size=256)
            cost, accuracy = (sums[name] / len(self.test_set) for name in ("cost", "hits"))
            self.loop.log(cost=cost, accuracy=accuracy)
            self.say(f"Test with Epoch {epoch.number}, avg_cost: {cost:.5f}, acc: {accuracy:.5f}")
        return accuracy

    def train_shard(self, step: elastic.Step, *batch):
        """Add one shard's gradient; return its loss."""
        loss = self.loss(*batch)
        step.backward(loss)
        return loss.detach()

    def judge(self, images, labels) -> dict[str, paddle.Tensor]:
        """Return sums over a batch of test images."""
        scores = self.network(images)
        return {
            "cost": F.cross_entropy(scores, labels, reduction="sum"),
            "hits": (scores.argmax(axis=1) == labels).sum(),
        }

    def say(self, text: str) -> None:
        """Print once, not once per trainer."""
        if self.loop.rank == 0:
            print(text, flush=True)


def introduce(trainer: Trainer) -> None:
    """Say what is trained, on what, and by whom."""
    options, loop = trainer.options, trainer.loop
    data = "scikit-learn's digits (no --data_dir)" if options.data_dir is None else "MNIST"
    teachers = (
        f"teachers {options.distill_teachers}" if options.use_distill_service else "no teacher"
    )
    if options.unlabelled != 0 and not options.use_distill_service:
        trainer.say("--unlabelled does nothing: images without a label need a teacher")
    trainer.say(
        f"{options.model} on {len(trainer.train_set)} images of {data}, "
        f"{trainer.images_with_label} with a label; {teachers}; batches of {options.batch_size} in "
        f"{loop.shards_per_batch} shards, {loop.world_size} trainers, {paddle.device.get_device()}"
    )


def finish(trainer: Trainer, accuracy: float | None) -> None:
    """Say how it went and write what was asked for. Rank 0 alone."""
    options = trainer.options
    if accuracy is not None:
        print(f"The classification accuracy is {100 * accuracy:.2f}%", flush=True)
    if options.save_serving_model:
        save_teacher(trainer.network, Path(options.serving_model_dir))
        print(f"servable: {options.serving_model_dir}, takes {INPUT}, returns {OUTPUT}", flush=True)
    if options.json is not None:
        told = {"model": options.model, "seed": options.seed, "accuracy": accuracy}
        Path(options.json).write_text(json.dumps(told))


def main() -> int:
    options = parse()
    try:
        choose_device(options)
        trainer = Trainer(options)
        introduce(trainer)
        accuracy = trainer.train()
        if trainer.loop.rank == 0:
            finish(trainer, accuracy)
    except (OptionError, DataError, DistillError, elastic.ElasticError) as error:
        print(f"train_with_fleet.py: {error}", file=sys.stderr)  # they say what to change
        return 2 if isinstance(error, OptionError | elastic.UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
