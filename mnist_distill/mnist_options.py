"""The command line of train_with_fleet.py: the original's options, checked, and some of ours."""

import argparse
import math
from collections.abc import Callable, Sequence

MODELS = ("cnn", "mlp", "softmax")


class OptionError(Exception):
    """An option that looked right cannot be followed; the text names it and the remedy."""


def flag(text: str) -> bool:
    """Return what `--use_gpu True` and the like say."""
    low = text.lower()
    if low in ("y", "yes", "t", "true", "on", "1"):
        return True
    if low in ("n", "no", "f", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")


def whole(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of at least `low`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {low}, got {text!r}"
            )
        return value

    return read


def all_or_whole(low: int) -> Callable[[str], int | None]:
    """Return a reader of the word `all`, which is None, and of whole numbers from `low` on."""

    def read(text: str) -> int | None:
        return None if text == "all" else whole(low)(text)

    return read


def number(low: float, high: float = math.inf, *, above: bool = True) -> Callable[[str], float]:
    """Return a reader of finite numbers above `low` (from it on, if not `above`) up to `high`."""
    bounds = f"{'above' if above else 'of at least'} {low:g}" + (
        "" if math.isinf(high) else f" and at most {high:g}"
    )

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Written so that nan fails every comparison.
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text!r}")
        return value

    return read


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a teacher and save it to be served, or a student, with teachers or "
        "without. MNIST is in --data_dir; without it, smaller digits take its place.",
        allow_abbrev=False,
    )

    def add(name: str, kind: Callable[[str], object], default: object, text: str) -> None:
        extra = {"nargs": "?", "const": True} if kind is flag else {}
        metavar = "BOOL" if kind is flag else "V"
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar, help=text, **extra
        )

    # Teachers, from both sides.
    add("use_distill_service", flag, False, "learn from teachers, too (False)")
    add("distill_teachers", str, "127.0.0.1:9292", "their endpoints: HOST:PORT,HOST:PORT")
    add("no_teacher_timeout_s", number(0), None, "give up when there has been none for so long "
        "(never: wait)")  # fmt: skip
    add("temperature", number(0), 4.0, "softens the teachers' predictions (4)")
    add("alpha", number(0, 1, above=False), 0.7, "weight of the loss against the teachers; the one "
        "against the labels has the rest (0.7)")  # fmt: skip
    add("save_serving_model", flag, False, "at the end, save the network to be served (False)")
    add("serving_model_dir", str, "mnist_cnn_model", "where (mnist_cnn_model)")

    # Data and network.
    add("data_dir", str, None, "folder of MNIST's four files, or `paddle` to download them; not "
        "given: scikit-learn's digits")  # fmt: skip
    add("labelled", all_or_whole(1), None, "train on so many images with their labels (all)")
    add("unlabelled", all_or_whole(0), 0, "and on so many others, or `all`, by the teachers alone "
        "(0)")  # fmt: skip
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="the network (cnn with --save_serving_model, else mlp)",
    )

    # Training.
    add("num_epochs", whole(1), 5, "passes over the images (5)")
    add("batch_size", whole(1), 64, "images of a step, of all trainers together (64)")
    add("lr", number(0), 0.002, "learning rate at the start; falls to 0 as a cosine (0.002)")
    add("seed", whole(0), 1, "of weights, order and the choice of images with labels (1)")
    add("use_gpu", flag, None, "not given: a GPU where there is one")
    add("checkpoint", str, None, "folder or URL to resume from and save to")
    add("save_steps", whole(1), 200, "steps between two checkpoints; one more at each epoch's end")
    add("fetch_steps", whole(1), 100, "steps between two printed lines (100)")
    add("test_epochs", whole(1), 1, "epochs between two tests; one more after the last (1)")
    add("json", str, None, "file for the accuracy at the end")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, complete.

    Wrong values end the program with code 2, and name the option, the value and the remedy.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.model is None:
        options.model = "cnn" if options.save_serving_model else "mlp"
    if options.use_distill_service and not options.distill_teachers.strip(", "):
        parser.error("argument --distill_teachers: it is empty; name one: 127.0.0.1:9292")
    return options
