"""Train a small classifier of texts, with teachers or without, on trainers that come and go.

python train_student.py --labelled 200                                            alone
python train_student.py --labelled 200 --unlabelled all --use_distill_service True \\
    --distill_teachers 127.0.0.1:9292                                             taught
edl run --min 1 --max 4 train_student.py ... --checkpoint ckpt                    elastic
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
from text_data import (
    NO_LABEL,
    DataError,
    Texts,
    TextSet,
    Vocabulary,
    choose,
    find_classes,
    read_lines,
    read_texts,
)
from text_models import INPUT, OUTPUT, STUDENTS, teachers_classes
from text_options import parse_student
from text_training import Training, choose_device

from distill_reader.errors import DistillError
from edl import DistillReader, elastic, kl_divergence


class Student:
    """Its network, its texts, and how it learns from both sides."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        train_file, test_file = (options.data_dir / name for name in ("train.txt", "dev.txt"))
        taught = options.use_distill_service
        self.classes = teachers_classes(options.teacher_dir) if taught else find_classes(train_file)
        everything = read_texts(train_file, self.classes)
        # Of all texts, also of those that it does not train on: with and without a teacher alike.
        self.words = Vocabulary.build(
            everything.texts,
            unit=options.unit,
            size=options.vocabulary_size,
            max_tokens=options.max_tokens,
        )
        self.texts = self.choose_texts(everything)
        # What teachers are sent comes first; they have learned another vocabulary.
        vocabularies = [self.words]
        if taught:
            vocabularies.insert(0, Vocabulary.load(options.teacher_dir / "vocabulary.json"))
        self.train_set = TextSet(self.texts, vocabularies, with_keys=taught)
        self.test_set = TextSet(read_texts(test_file, self.classes), [self.words])
        paddle.seed(options.seed)
        self.network = STUDENTS[options.model](len(self.words), len(self.classes))

    def choose_texts(self, everything: Texts) -> Texts:
        """Return what is trained on: texts with their labels, then others without."""
        options = self.options
        texts, others = choose(everything, options.labelled, options.seed)
        count = len(others) if options.unlabelled is None else options.unlabelled
        if count > len(others):
            raise DataError(
                f"--unlabelled {count}: beside those with a label there are {len(others)} texts; "
                f"ask for fewer, or name more in --unlabelled_file"
            )
        texts += others.take(range(count))
        if options.unlabelled_file is not None:
            more = [text for _label, text in read_lines(options.unlabelled_file)]
            texts += Texts.without_label(more)
        return texts

    def ask_teachers(self, training: Training) -> Iterator[Any]:
        """Return this trainer's batches from the cursor on, each with the teachers' scores."""
        options = self.options
        # What loop.shards yields: epoch, step, shard, keys of texts, both kinds of ids, labels.
        reader = DistillReader(ins=[None, None, None, "key", INPUT, None, None], predicts=[OUTPUT])
        reader.set_cache(options.distill_cache, id="key")
        if options.distill_teachers:
            reader.set_fixed_teacher(options.distill_teachers)
        elif options.distill_discovery:
            reader.set_dynamic_teacher(
                options.distill_discovery.split(","),
                options.distill_service_name,
                options.distill_max_teacher,
            )
        reader.set_no_teacher_timeout(options.no_teacher_timeout_s)
        reader.set_batch_generator(training.loop.shards(training.train_set))
        return reader()

    def loss(self, ids, labels):
        """Return the mean loss against the labels."""
        return F.cross_entropy(self.network(ids), labels)

    def taught_loss(self, _keys, _teachers_ids, ids, labels, logits):
        """Return the mean of the losses against labels and teachers; `logits`: (N, classes)."""
        options = self.options
        scores = self.network(ids)
        # Texts without a label add nothing here, but count in the mean.
        hard = F.cross_entropy(scores, labels, ignore_index=NO_LABEL, reduction="sum")
        hard = hard / len(labels)
        soft = kl_divergence(scores, logits, temperature=options.temperature)
        return options.alpha * soft + (1 - options.alpha) * hard

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        paddle.save(self.network.state_dict(), str(folder / "weights.pdparams"))
        self.words.save(folder / "vocabulary.json")
        (folder / "classes.json").write_text(json.dumps(self.classes))


def train(options: argparse.Namespace) -> None:
    student = Student(options)
    taught = options.use_distill_service
    training = Training(
        options,
        student.network,
        student.train_set,
        student.test_set,
        student.taught_loss if taught else student.loss,
        student.ask_teachers if taught else None,
    )
    teachers = "no teacher"
    if taught:
        teachers = f"teachers {options.distill_teachers or options.distill_discovery}"
    training.say(
        f"{options.model} on {len(student.texts)} texts of {len(student.classes)} classes, "
        f"{int((student.texts.labels != NO_LABEL).sum())} with a label; {teachers}; "
        f"{len(student.words)} tokens; batches of {options.batch_size} in "
        f"{training.loop.shards_per_batch} shards, {training.loop.world_size} trainers, "
        f"{paddle.device.get_device()}"
    )
    accuracy = training.run()
    if accuracy is not None:
        training.say(f"accuracy on {len(student.test_set)} test texts: {100 * accuracy:.2f}%")
    if options.model_save_dir is not None and training.loop.rank == 0:
        student.save(options.model_save_dir)


def main() -> int:
    options = parse_student()
    try:
        choose_device(options)
        train(options)
    except (DataError, DistillError, elastic.ElasticError) as error:  # they say what to change
        print(f"train_student.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, elastic.UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
