"""The command line of train_with_fleet.py: the original's options, checked, and some of ours."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from edl.option_types import flag, number, whole

MODELS = (
    "ResNet18", "ResNet18_vd", "ResNet50", "ResNet50_vd", "ResNeXt101_32x16d",
    "VGG11", "VGG13", "VGG16", "VGG19",
)  # fmt: skip

# What other spellings of a strategy are called here. The first of each pair is of the original's
# message boards and configuration files, where both kinds occur.
STRATEGIES = {
    "piecewise_decay": "piecewise_decay",
    "cosine_decay": "cosine_decay",
    "cosine_warmup_decay": "cosine_warmup_decay",
    "cosine_warmup": "cosine_warmup_decay",
    "cosine_decay_warmup": "cosine_warmup_decay",
    "cosine_decay_with_warmup": "cosine_warmup_decay",
    "linear_decay": "linear_decay",
    "constant": "constant",
}

# Defaults that depend on the data. Handwritten digits come inside scikit-learn: 1,437 images to
# train on. Their batch of 16 per trainer is the least with which batch norm learns well.
IMAGENET = {
    "class_dim": 1000, "image_shape": (3, 224, 224), "batch_size": 32, "num_epochs": 120,
    "lr": 0.1, "lr_strategy": "piecewise_decay", "warmup_epochs": 5.0, "do_test": False,
}  # fmt: skip
DIGITS = {
    "class_dim": 10, "image_shape": (3, 32, 32), "batch_size": 16, "num_epochs": 5,
    "lr": 0.005, "lr_strategy": "cosine_warmup_decay", "warmup_epochs": 1.0, "do_test": True,
}  # fmt: skip

_STATIC_GRAPH = "there is no static graph to compile any more"
_EXCHANGE = "gradients always go in one flat all-reduce"
# Accepted, so that old command lines go on working: name -> (type, why it does nothing).
WITHOUT_MEANING: dict[str, tuple[str, str]] = {
    "with_mem_opt": ("flag", _STATIC_GRAPH),
    "with_inplace": ("flag", _STATIC_GRAPH),
    "fuse": ("flag", _EXCHANGE),
    "fuse_elewise_add_act_ops": ("flag", _STATIC_GRAPH),
    "fuse_bn_act_ops": ("flag", _STATIC_GRAPH),
    "nccl_comm_num": ("value", _EXCHANGE),
    "use_hierarchical_allreduce": ("flag", _EXCHANGE),
    "num_iteration_per_drop_scope": ("value", _STATIC_GRAPH),
    "use_ngraph": ("flag", _STATIC_GRAPH),
    "use_dgc": ("flag", "sparse gradients are not built; all of each gradient is exchanged"),
    "rampup_begin_step": ("value", "it belongs to --use_dgc, which is not built"),
    "use_recompute": ("flag", "the memory of a trainer is bounded by its shard: make it smaller"),
    "use_dali": ("flag", "images are decoded by --num_threads worker processes"),
    "reader_buf_size": ("value", "images are decoded by --num_threads worker processes"),
    "profile": ("flag", "profile a run with paddle.profiler or nsys instead"),
    "benchmark_test": ("flag", "speed is on every line that is printed"),
    "is_distill": ("flag", "it named a network with a teacher inside; see --use_distill_service"),
    "enable_ce": ("flag", "it was for the original's own continuous evaluation"),
    "max_iter": ("value", "a training ends by --num_epochs"),
}


def image_shape(text: str) -> tuple[int, int, int]:
    """Return channels, height and width of `3,224,224`; in that order for NHWC, too."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected channels,height,width as 3,224,224; got {text!r}"
        )
    channels, height, width = (int(part) for part in parts)
    if channels != 3:
        raise argparse.ArgumentTypeError(
            f"expected 3 channels, got {text!r}; the networks are made for colour, and grey images "
            f"are read as three equal channels"
        )
    if height != width or height < 32:
        raise argparse.ArgumentTypeError(
            f"expected a square of at least 32 pixels, got {text!r}; the networks halve it 5 times"
        )
    return channels, height, width


def total_batch(text: str) -> int | None:
    return None if text == "-1" else whole(1)(text)  # -1 is the original's "not given"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train an image classifier elastically: ImageNet (--data_dir), or handwritten "
        "digits without it.",
        allow_abbrev=False,
    )

    def add(name: str, kind: Callable[[str], object], default: object, text: str) -> None:
        extra = {"nargs": "?", "const": True} if kind is flag else {}
        if default is None and name in IMAGENET:
            told = f"{_shown(IMAGENET[name])}; digits: {_shown(DIGITS[name])}"
        else:
            told = _shown(default)
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar="BOOL" if kind is flag else "V",
            help=f"{text} ({told})".replace("%", "%%"),
            **extra,
        )

    # What is trained.
    add("model", str, "ResNet50", "one of " + ", ".join(MODELS))
    add("class_dim", whole(2), None, "classes")
    add("image_shape", image_shape, None, "channels,height,width")
    add("data_format", str, "NCHW", "NCHW or NHWC: how images lie in memory")
    add("pretrained_model", str, None, "start from the weights in this .pdparams file")

    # How long, and in which steps.
    add("num_epochs", whole(1), None, "passes over the training images")
    add(
        "batch_size", whole(1), None, "of a trainer, when the job has the most trainers it may have"
    )
    add("total_batch_size", total_batch, None, "of all trainers together; goes before --batch_size")
    add("total_images", whole(1), None, "train on so many images only; not given: on all")

    # The optimizer: momentum, with L2 decay of all parameters.
    add(
        "lr",
        number(0, above=True),
        None,
        "learning rate; for piecewise_decay, that of a batch of 256",
    )
    add("lr_strategy", str, None, "one of " + ", ".join(sorted(set(STRATEGIES.values()))))
    add("warmup_epochs", number(0), None, "of piecewise_decay and cosine_warmup_decay")
    parser.add_argument(
        "--decay_epochs",
        type=whole(1),
        nargs="*",
        default=[30, 60, 80, 90],
        metavar="EPOCH",
        help="where piecewise_decay divides the rate by 10 (30 60 80 90)",
    )
    add("momentum_rate", number(0, 1), 0.9, "momentum")
    add("l2_decay", number(0), 1e-4, "weight decay")
    add("use_label_smoothing", flag, False, "smooth the labels")
    add("label_smoothing_epsilon", number(0, 1), 0.2, "how much")
    add("use_mixup", flag, False, "mix pairs of images")
    add("mixup_alpha", number(0, above=True), 0.2, "of mixup's beta distribution")
    add("fp16", flag, False, "train in half precision; needs a GPU")
    add("scale_loss", number(0, above=True), 128.0, "first loss scale of --fp16")
    add("use_dynamic_loss_scaling", flag, True, "let the loss scale follow the gradients")

    # The data.
    add("data_dir", str, None, "ImageNet: train.txt and val.txt, or class folders")
    add("resize_short_size", whole(1), None, "to which an image is resized for testing; not given: "
        "crop_size * 8 / 7")  # fmt: skip
    add("crop_size", whole(32), None, "what is cut out of it; not given: as image_shape")
    add("lower_scale", number(0, 1, above=True), 0.08, "least share of an image's area to crop")
    add("lower_ratio", number(0, above=True), 3 / 4, "least width by height to crop")
    add("upper_ratio", number(0, above=True), 4 / 3, "greatest width by height to crop")
    add("interpolation", whole(0), None, "0 nearest, 1 linear, 2 cubic, 3 area, 4 Lanczos")
    for name, values in (("mean", [0.485, 0.456, 0.406]), ("std", [0.229, 0.224, 0.225])):
        parser.add_argument(
            f"--image_{name}",
            type=number(-1e6, 1e6),
            nargs=3,
            default=values,
            metavar=("R", "G", "B"),
            help=f"{name} of the training images, of 0 to 1 ({' '.join(map(str, values))})",
        )
    add("num_threads", whole(0), None, "decoding workers of a trainer; 0: it decodes itself; not "
        "given: as many as the node has cores for")  # fmt: skip
    add("reader_thread", whole(0), None, "another name of --num_threads")

    # Teachers, from both sides.
    add("use_distill_service", flag, False, "learn from teachers")
    add("distill_teachers", str, None, "their endpoints: HOST:PORT,HOST:PORT")
    add("distill_discovery", str, None, "or the discovery servers that know them: HOST:PORT,...")
    add("distill_service_name", str, None, "what the teachers are called there")
    add("distill_max_teacher", whole(1), 8, "how many a trainer asks for there")
    add("no_teacher_timeout_s", number(0, above=True), None, "give up when there has been none for "
        "so long; not given: wait")  # fmt: skip
    add("distill_wire_dtype", str, "float32", "how images travel to teachers: float32, or uint8: "
        "raw pixels that teachers normalize")  # fmt: skip
    add("distill_top_k", whole(1), None, "have teachers send so many of the largest soft labels; "
        "not given: all")  # fmt: skip
    add("distill_alpha", number(0, 1), 1.0, "weight of the loss against the teachers; the one "
        "against the labels has the rest")  # fmt: skip
    add("save_serving_model", flag, False, "at the end, save the network to be served")
    add("serving_model_dir", str, None, "where; not given: MODEL_model")

    # Where it runs, what it writes.
    add("use_gpu", flag, None, "not given: a GPU where there is one")
    add("do_test", flag, None, "test after every epoch, not after the last alone")
    add("fetch_steps", whole(1), 10, "steps between two printed lines")
    add("checkpoint", str, None, "folder or URL to resume from and save to")
    add("save_steps", whole(1), 200, "steps between two checkpoints; one more at each epoch's end")
    add("hdfs_name", str, None, "hdfs://HOST:PORT, on which --checkpoint is a path")
    add("hdfs_ugi", str, None, "user,password for it")
    add("model_save_dir", str, "output", "the weights go to MODEL_SAVE_DIR/MODEL/EPOCH at the end")
    add("log_dir", str, None, "folder of one TensorBoard run, for all stages of the training")
    add("visualdl_dir", str, None, "the same, and VisualDL's file beside it; needs visualdl")
    add("seed", whole(0), 0, "of weights, order and augmentation")
    add("random_seed", whole(0), None, "another name of --seed")

    old = parser.add_argument_group("without meaning today; accepted with a warning")
    for name, (kind, why) in WITHOUT_MEANING.items():
        old.add_argument(
            f"--{name}",
            default=None,
            metavar="BOOL" if kind == "flag" else "V",
            help=why,
            **({"nargs": "?", "const": "True"} if kind == "flag" else {}),
        )
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, complete; `ignored` holds one line for each option without meaning.

    Wrong values end the program with code 2, and name the option, the value and the remedy.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    options.ignored = [
        f"--{name}={getattr(options, name)} does nothing: {why}"
        for name, (_kind, why) in WITHOUT_MEANING.items()
        if getattr(options, name) is not None
    ]
    _merge_names(parser, options)
    options.log_kind = "tensorboard" if options.visualdl_dir is None else "visualdl"
    for name, value in (DIGITS if options.data_dir is None else IMAGENET).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.crop_size is None:
        options.crop_size = options.image_shape[1]
    if options.resize_short_size is None:
        options.resize_short_size = options.crop_size * 8 // 7  # 256 for 224
    if options.serving_model_dir is None:
        options.serving_model_dir = f"{options.model}_model"
    _check(parser, options)
    _check_teachers(parser, options, os.environ)
    options.lr_strategy = STRATEGIES[options.lr_strategy]
    options.checkpoint = checkpoint_url(options.checkpoint, options.hdfs_name, options.hdfs_ugi)
    return options


def _merge_names(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, other in (("num_threads", "reader_thread"), ("log_dir", "visualdl_dir")):
        one, two = getattr(options, name), getattr(options, other)
        if None not in (one, two) and one != two:
            parser.error(
                f"--{name} {one} and --{other} {two} are two names of one option: give one"
            )
        setattr(options, name, two if one is None else one)
    if options.random_seed is not None:
        options.seed = options.random_seed


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    def choose(name: str, allowed: Sequence[str]) -> None:
        value = getattr(options, name)
        if value not in allowed:
            parser.error(f"argument --{name}: got {value!r}; choose one of {', '.join(allowed)}")

    choose("model", MODELS)
    choose("lr_strategy", tuple(STRATEGIES))
    choose("data_format", ("NCHW", "NHWC"))
    choose("distill_wire_dtype", ("float32", "uint8"))
    if options.interpolation is not None and options.interpolation > 4:
        parser.error(f"argument --interpolation: got {options.interpolation}; choose one of 0 to 4")
    if options.decay_epochs != sorted(set(options.decay_epochs)):
        parser.error(f"argument --decay_epochs: {options.decay_epochs} do not rise; sort them")
    if options.lower_ratio > options.upper_ratio:
        parser.error(
            f"argument --lower_ratio: {options.lower_ratio:g} is above --upper_ratio "
            f"{options.upper_ratio:g}; exchange them"
        )
    if options.crop_size != options.image_shape[1]:
        parser.error(
            f"argument --crop_size: {options.crop_size} is not the side of --image_shape, "
            f"{options.image_shape[1]}; leave it out, or make them equal"
        )
    if options.resize_short_size < options.crop_size:
        parser.error(
            f"argument --resize_short_size: {options.resize_short_size} is less than the "
            f"{options.crop_size} pixels that are cut out; make it at least as large"
        )
    if options.data_dir is not None and not os.path.isdir(options.data_dir):
        parser.error(
            f"argument --data_dir: {options.data_dir} is no folder; leave it out for the digits"
        )
    if not all(value > 0 for value in options.image_std):
        parser.error(f"argument --image_std: {options.image_std} must all be above 0")
    if options.pretrained_model is not None and not os.path.isfile(options.pretrained_model):
        parser.error(
            f"argument --pretrained_model: {options.pretrained_model} is no file; give the "
            f".pdparams file itself"
        )
    if options.hdfs_name is not None and options.checkpoint is None:
        parser.error("argument --hdfs_name: needs --checkpoint, the path on it")


def _check_teachers(
    parser: argparse.ArgumentParser, options: argparse.Namespace, environ: Mapping[str, str]
) -> None:
    if not options.use_distill_service:
        return
    if options.use_mixup:
        parser.error(
            "argument --use_mixup: not with --use_distill_service: teachers see images as they "
            "are, not the mixed ones; leave one of the two out"
        )
    discovery = options.distill_discovery or environ.get("PADDLE_DISTILL_BALANCE_SERVER")
    if options.distill_teachers and options.distill_discovery:
        parser.error(
            "argument --distill_discovery: not with --distill_teachers, which are used whole; "
            "give one"
        )
    if not discovery and not (options.distill_teachers or "").strip(", "):
        parser.error(
            "argument --use_distill_service: needs --distill_teachers HOST:PORT,..., or "
            "--distill_discovery HOST:PORT with --distill_service_name"
        )
    name = options.distill_service_name or environ.get("PADDLE_DISTILL_SERVICE_NAME")
    if discovery and not name:
        parser.error("argument --distill_discovery: needs --distill_service_name")


def checkpoint_url(
    checkpoint: str | None, hdfs_name: str | None, hdfs_ugi: str | None
) -> str | None:
    """Return where checkpoints go: `checkpoint` itself, or that path on a Hadoop file system.

    Only the user of `hdfs_ugi` counts: Hadoop's simple authentication knows no password, and a URL
    is printed.
    """
    if checkpoint is None or hdfs_name is None or "://" in checkpoint:
        return checkpoint
    scheme, separator, host = hdfs_name.rpartition("://")
    user = (hdfs_ugi or "").partition(",")[0]
    at = f"{user}@" if user else ""
    return f"{scheme if separator else 'hdfs'}://{at}{host.rstrip('/')}/{checkpoint.lstrip('/')}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)
