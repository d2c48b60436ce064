"""The command line of train_with_fleet.py: the original's options, checked, and some of ours."""

import argparse
from collections.abc import Callable, Sequence

from edl.option_types import all_or_whole, flag, number, whole

MODELS = ("cnn", "mlp", "softmax")


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
    add("no_teacher_timeout_s", number(0, above=True), None, "give up when there has been none "
        "for so long (never: wait)")  # fmt: skip
    add("temperature", number(0, above=True), 4.0, "softens the teachers' predictions (4)")
    add("alpha", number(0, 1), 0.7, "weight of the loss against the teachers; the one "
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
    add(
        "lr",
        number(0, above=True),
        0.002,
        "learning rate at the start; falls to 0 as a cosine (0.002)",
    )
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
