"""Train a transformer to classify texts, on trainers that come and go, and save it to be served.

python make_data.py text_data                                     texts of this machine
python train_teacher.py --data_dir text_data                      writes text_teacher_model/
python -m distill_reader.serve --model text_teacher_model --port 9292 --thread 1
python train_teacher.py --data_dir mine --pretrained text_teacher_model      goes on from it
"""

import sys

import paddle
import paddle.nn.functional as F
from text_data import DataError, TextSet, Vocabulary, choose, find_classes, read_texts
from text_models import (
    INPUT,
    OUTPUT,
    Transformer,
    TransformerSize,
    load_weights,
    save_teacher,
    teachers_size,
)
from text_options import parse_teacher
from text_training import Training, choose_device

from distill_reader.errors import DistillError
from edl import elastic


def train(options) -> None:
    train_file, test_file = (options.data_dir / name for name in ("train.txt", "dev.txt"))
    classes = find_classes(train_file)
    texts, _others = choose(read_texts(train_file, classes), None, options.seed)
    test = read_texts(test_file, classes)
    if options.pretrained is None:
        words = Vocabulary.build(
            texts.texts,
            unit=options.unit,
            size=options.vocabulary_size,
            max_tokens=options.max_tokens,
        )
        size = TransformerSize(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            dropout=options.dropout,
            word_dropout=options.word_dropout,
        )
    else:
        words = Vocabulary.load(options.pretrained / "vocabulary.json")
        size = teachers_size(options.pretrained)

    paddle.seed(options.seed)
    network = Transformer(len(words), words.max_tokens, len(classes), size)
    taken = None if options.pretrained is None else load_weights(network, options.pretrained)

    def loss(ids, labels):
        return F.cross_entropy(network(ids), labels)

    training = Training(options, network, TextSet(texts, [words]), TextSet(test, [words]), loss)
    if taken is not None:
        training.say(taken)
    training.say(
        f"transformer of {size.layers} layers, {size.width} wide, on {len(texts)} texts of "
        f"{len(classes)} classes; {len(words)} tokens; {training.loop.world_size} trainers, "
        f"{paddle.device.get_device()}"
    )
    accuracy = training.run()
    if accuracy is not None:
        training.say(f"accuracy on {len(test)} test texts: {100 * accuracy:.2f}%")
    if training.loop.rank == 0:
        save_teacher(
            network, options.serving_model_dir, vocabulary=words, classes=classes, size=size
        )
        training.say(f"servable: {options.serving_model_dir}, takes {INPUT}, returns {OUTPUT}")


def main() -> int:
    options = parse_teacher()
    try:
        choose_device(options)
        train(options)
    except (DataError, DistillError, elastic.ElasticError) as error:  # they say what to change
        print(f"train_teacher.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, elastic.UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
