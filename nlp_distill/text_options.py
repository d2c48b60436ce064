"""The command lines of train_teacher.py and train_student.py, checked."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from text_data import UNITS

from edl.option_types import all_or_whole, flag, number, whole

STUDENTS = ("bow", "cnn")
TEACHER_DIR = "text_teacher_model"


class Parser(argparse.ArgumentParser):
    """Knows what both programs take."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def option(self, name: str, kind: Callable[[str], object], default: object, text: str) -> None:
        """Add an option; `text` says what it is, its default is added to that."""
        extra = {"nargs": "?", "const": True} if kind is flag else {}
        shown = "" if default is None else f" ({default})"
        self.add_argument(
            f"--{name}", type=kind, default=default, metavar="BOOL" if kind is flag else "V",
            help=f"{text}{shown}".replace("%", "%%"), **extra,
        )  # fmt: skip

    def add_training(self, *, epochs: int, batch: int, lr: float) -> None:
        add = self.option
        add("data_dir", Path, Path("text_data"), "folder of train.txt and dev.txt, lines of "
            "label<TAB>text; make_data.py makes one")  # fmt: skip
        add("num_epochs", whole(1), epochs, "passes over the texts")
        add("batch_size", whole(1), batch, "texts of a step, of all trainers together")
        add(
            "lr",
            number(0, above=True),
            lr,
            "highest learning rate; a tenth of the steps lead up to it",
        )
        add("weight_decay", number(0), 0.05, "of AdamW")
        add("seed", whole(0), 1, "of weights, order and the choice of texts with labels")
        add("use_gpu", flag, None, "not given: a GPU where there is one")
        add("checkpoint", str, None, "folder or URL to resume from and save to")
        add("save_steps", whole(1), 200, "steps between two checkpoints; one more at each epoch's "
            "end")  # fmt: skip
        add("fetch_steps", whole(1), 50, "steps between two printed lines")
        add("json", Path, None, "file for the accuracy at the end")

    def add_vocabulary(self) -> None:
        self.add_argument(
            "--unit", choices=UNITS, default=UNITS[0], help="what texts are split into (words)"
        )
        self.option("vocabulary_size", whole(3), 8000, "most tokens that are told apart")
        self.option("max_tokens", whole(1), 40, "of a text; what is behind them is cut off")


def parse_teacher(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of train_teacher.py; wrong ones end the program with code 2."""
    parser = Parser("Train a transformer to classify texts, and save it to be served.")
    add = parser.option
    parser.add_training(epochs=6, batch=32, lr=2e-3)
    parser.add_vocabulary()
    add("layers", whole(1), 1, "of the transformer")
    add("width", whole(1), 64, "of a token's vector")
    add("heads", whole(1), 4, "of attention; they divide the width")
    add("dropout", number(0, 0.9), 0.3, "share of values that is dropped")
    add("word_dropout", number(0, 0.9), 0.15, "share of tokens that is hidden")
    add("pretrained", Path, None, "folder of an earlier teacher: its vocabulary, size and weights")
    add("serving_model_dir", Path, Path(TEACHER_DIR), "where it is saved")
    options = parser.parse_args(argv)
    if options.width % options.heads:
        parser.error(
            f"argument --heads: {options.heads} do not divide --width {options.width}; give one "
            f"that does"
        )
    return options


def parse_student(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of train_student.py; wrong ones end the program with code 2."""
    parser = Parser("Train a small classifier of texts, with teachers or without.")
    add = parser.option
    parser.add_training(epochs=20, batch=32, lr=4e-3)
    parser.add_vocabulary()
    parser.add_argument("--model", choices=STUDENTS, default="bow", help="the network (bow)")
    add("labelled", all_or_whole(1), None, "train on so many texts with their labels, or `all`; "
        "not given: all")  # fmt: skip
    add("use_distill_service", flag, False, "learn from teachers, too")
    add("distill_teachers", str, None, "their endpoints: HOST:PORT,HOST:PORT")
    add("distill_discovery", str, None, "or the discovery servers that know them: HOST:PORT,...")
    add("distill_service_name", str, None, "what the teachers are called there")
    add("distill_max_teacher", whole(1), 4, "how many a trainer asks for there")
    add("distill_cache", Path, None, "folder that keeps what teachers say of each text: a second "
        "epoch asks nobody")  # fmt: skip
    add("no_teacher_timeout_s", number(0, above=True), None, "give up when there has been none "
        "for so long; not given: wait")  # fmt: skip
    add("teacher_dir", Path, Path(TEACHER_DIR), "folder that train_teacher.py has made: it has the "
        "vocabulary")  # fmt: skip
    add("unlabelled", all_or_whole(0), 0, "learn from so many of the other texts, or `all`, by the "
        "teachers alone")  # fmt: skip
    add("unlabelled_file", Path, None, "and from each line of this file")
    add("temperature", number(0, above=True), 2.0, "softens the teachers' scores")
    add("alpha", number(0, 1), 0.9, "weight of the loss against the teachers; the one "
        "against the labels has the rest")  # fmt: skip
    add("model_save_dir", Path, None, "folder for weights and vocabulary at the end")
    options = parser.parse_args(argv)
    discovery = options.distill_discovery or os.environ.get("PADDLE_DISTILL_BALANCE_SERVER")
    if options.use_distill_service:
        if options.distill_teachers and options.distill_discovery:
            parser.error("argument --distill_discovery: not with --distill_teachers; give one")
        if not discovery and not (options.distill_teachers or "").strip(", "):
            parser.error(
                "argument --use_distill_service: needs --distill_teachers HOST:PORT,..., or "
                "--distill_discovery HOST:PORT with --distill_service_name"
            )
        name = options.distill_service_name or os.environ.get("PADDLE_DISTILL_SERVICE_NAME")
        if discovery and not name:
            parser.error("argument --distill_discovery: needs --distill_service_name")
    elif options.unlabelled != 0 or options.unlabelled_file is not None:
        parser.error(
            "argument --unlabelled: texts without a label need a teacher: add "
            "--use_distill_service True"
        )
    return options
