"""Serve models to students and other clients: `edl serve`, `python -m distill_reader.serve`.

edl serve --model ./lenet --port 9292 --gpu_ids 0,1
edl serve --model teacher_a=./a --model teacher_b=./b --thread 4
"""

import argparse
import contextlib
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from distill_reader.balance.registry.registrar import RegistrarThread
from distill_reader.command_line import make_parser, report_error, start_logging
from distill_reader.errors import DistillError, UsageError
from distill_reader.listening import bracketed, is_loopback
from distill_reader.model.normalization import Normalization, parse_option
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.registering import RegisterConfig, add_register_arguments, parse_register
from distill_reader.teacher.front import Front, FrontConfig
from distill_reader.teacher.predictor.backend import PADDLE_BACKEND, Device
from distill_reader.teacher.protocols.limits import FrontLimits
from distill_reader.teacher.service.service import PredictorService, ServiceConfig
from distill_reader.tokens import read_token

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a model; needs no escapes in URLs
_PROTOCOLS = "fast, Open Inference (gRPC, HTTP), Paddle Serving (HTTP, gRPC)"
_ANSWER_GRACE_S = 5.0  # for sending the answers that are computed
_SAME_STOP_S = 2.0  # within which a second signal says nothing new

_DESCRIPTION = """\
Serve inference models to students (DistillReader) and to clients of the Open Inference Protocol
(Triton, KServe) and of Paddle Serving, all on one port."""

_EPILOG = """\
A model folder is one of Paddle Serving (serving_server_conf.prototxt), Paddle 3 (.json), Paddle 2
(.pdmodel) or Paddle 1.x (__model__). `edl convert` makes one with tensor names of your choice.

On the port
  students          DistillReader(...).set_fixed_teacher(["HOST:PORT"])
  Open Inference    gRPC inference.GRPCInferenceService; HTTP /v2/models/MODEL/infer
  Paddle Serving    HTTP POST /GeneralModelService/inference (protobuf or JSON), and gRPC; its
                    requests name no model: they are for the first --model, or in HTTP for
                    /MODEL/GeneralModelService/inference
  /metrics          for Prometheus
  health, without a token:  /v2/health/live, /v2/health/ready;  gRPC grpc.health.v1.Health

Predictors are processes: one per GPU of --gpu_ids (--thread N: N per GPU), or N on the CPU. If one
dies or hangs, it is restarted, and its batch is computed again.

SIGTERM: the teacher withdraws from discovery, accepts no more requests, answers those that it has,
and ends with 0. Another SIGTERM, two seconds later or more, ends it at once.
Exit codes: 0 ended by a signal, 1 failed, 2 wrong arguments or a model that cannot be served.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit code."""
    args = parser().parse_args(argv)
    start_logging(args)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    try:
        service_config, front_config = parse_config(args)
        register = parse_register(args)
        with _signals() as stopping:
            return _serve(service_config, front_config, register, args.drain_timeout_s, stopping)
    except DistillError as error:
        return report_error("serve", error)


def parse_config(args: argparse.Namespace) -> tuple[ServiceConfig, FrontConfig]:
    """Return the configuration that the arguments ask for.

    Raises:
        UsageError: an argument is wrong; names it and the remedy.
    """
    for flag, value, least in (
        ("--port", args.port, 0),
        ("--grpc_port", args.grpc_port, 1),
        ("--thread", args.thread, 1),
        ("--max_request_mb", args.max_request_mb, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{flag}: must be at least {least}, got {value}")
    max_request_bytes = args.max_request_mb << 20
    models = _models(args.model, args.name)
    if args.register is not None and len(models) > 1:
        raise UsageError(
            "--register: a service has one model, and students could not tell which of these they "
            "want: register each by `edl register --service_name NAME --server HOST:PORT/MODEL`"
        )
    service = ServiceConfig(
        models=models,
        normalizations=_normalizations(args.normalize, [name for name, _ in models]),
        devices=_devices(args.gpu_ids, args.thread, memory_optim=args.mem_optim),
        backend=args.backend,
        max_batch=args.max_batch,
        batch_timeout_s=args.batch_timeout_ms / 1000,
        max_queue=args.max_queue,
        max_request_bytes=max_request_bytes,
        predict_timeout_s=args.predict_timeout_s,
    )
    token = read_token(args.token_file, os.environ)
    if not token and not args.insecure and not is_loopback(args.bind):
        raise UsageError(
            f"--bind {args.bind}: other machines can reach it, so it needs a token "
            "(--token_file or EDL_TEACHER_TOKEN), or --insecure: "
            "clients of Paddle Serving cannot send a token"
        )
    front = FrontConfig(
        bind=args.bind,
        port=args.port,
        grpc_port=args.grpc_port,
        token="" if args.insecure else token,
        limits=FrontLimits(
            max_request_bytes=max_request_bytes,
            max_unfinished_bytes=max(1 << 30, 2 * max_request_bytes),
        ),
    )
    return service, front


def describe(spec: ModelSpec) -> str:
    """Describe a model's inputs and outputs in one line."""
    inputs = ", ".join(map(_describe_tensor, spec.inputs))
    outputs = ", ".join(map(_describe_tensor, spec.outputs))
    return f"{spec.name}({inputs}) -> {outputs}"


def _serve(
    service_config: ServiceConfig,
    front_config: FrontConfig,
    register: RegisterConfig | None,
    drain_timeout_s: float,
    stopping: threading.Event,
) -> int:
    service = PredictorService(service_config, on_outdated=stopping.set)
    front = Front(service, front_config, service.metrics.text)
    registrar: RegistrarThread | None = None
    try:
        front.bind()  # fails on a port in use before the models are loaded
        if register is not None:
            registrar = register.registrar(*front.address, lambda: service.is_ready)
        service.start(is_unwanted=stopping.is_set)
        if stopping.is_set():
            logger.info("ended before its models were loaded")
            return 0
        front.start()
        host, port = front.address
        models = "; ".join(describe(spec) for spec in service.models().values())
        shown = bracketed(host)
        sys.stdout.write(f"teacher ready on {shown}:{port}: {models}; protocols: {_PROTOCOLS}\n")
        sys.stdout.flush()
        if registrar is not None:
            registrar.start()
        stopping.wait()
        if registrar is not None:
            registrar.stop()  # students should leave before they are refused
        logger.info("ending: no more requests are accepted")
        if not service.drain(drain_timeout_s):
            logger.warning("some requests were not answered within %g s", drain_timeout_s)
        front.close(_ANSWER_GRACE_S)
    finally:
        if registrar is not None:
            registrar.stop()
        front.close(0.0)
        service.close()
    logger.info("ended")
    return 1 if service.is_outdated else 0


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield the event that the first SIGTERM or SIGINT sets; a later one ends the process."""
    stopping, first_s = threading.Event(), math.inf

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        now = time.monotonic()
        # Who ends a whole unit (systemd, Slurm) signals a pod's launcher, too, which passes it on.
        if now >= first_s + _SAME_STOP_S:
            os._exit(128 + number)  # the kernel kills the predictors
        first_s = min(first_s, now)
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _models(arguments: Sequence[str], name: str | None) -> tuple[tuple[str, str], ...]:
    """Return the name and the folder of each model."""
    if name is not None and len(arguments) > 1:
        raise UsageError(f"--name {name}: there are several models; write --model NAME=DIR")
    models = []
    for argument in arguments:
        given, separator, folder = argument.partition("=")
        if not separator or "/" in given:  # the folder's own name may contain "="
            given, folder = "", argument
        if not Path(folder).exists():
            raise UsageError(f"--model {argument}: there is no {folder}")
        model = name or given or Path(folder).resolve().name
        if not _NAME.fullmatch(model):
            raise UsageError(
                f"--model {argument}: {model!r} cannot be the name of a model (letters, digits, "
                "'.', '_', '-'); write --model NAME=DIR"
            )
        models.append((model, folder))
    return tuple(models)


def _normalizations(
    options: Sequence[str], models: Sequence[str]
) -> tuple[tuple[str, str, Normalization], ...]:
    """Return the model, the input and the normalization of each `--normalize`."""
    found: list[tuple[str, str, Normalization]] = []
    for option in options:
        model, name, normalization = parse_option(option)
        if not model and len(models) == 1:
            (model,) = models
        if model not in models:
            raise UsageError(
                f"--normalize {option}: name the model, as MODEL/{name}; the models are "
                f"{', '.join(models)}"
            )
        if any((model, name) == (other, known) for other, known, _ in found):
            raise UsageError(f"--normalize {option}: {name} of {model} is named twice")
        found.append((model, name, normalization))
    return tuple(found)


def _devices(gpu_ids: str, thread: int | None, *, memory_optim: bool) -> tuple[Device, ...]:
    """Return the device of each predictor."""
    per_device = 1 if thread is None else thread
    gpus: list[int | None] = []
    for text in filter(None, (part.strip() for part in gpu_ids.split(","))):
        if not text.removeprefix("-").isdigit() or int(text) < -1:
            raise UsageError(f"--gpu_ids {gpu_ids}: {text!r} is no index of a GPU; write e.g. 0,1")
        gpus.append(None if text == "-1" else int(text))  # -1: the original's value for the CPU
    if len(set(gpus)) != len(gpus):
        raise UsageError(f"--gpu_ids {gpu_ids}: one is named twice; --thread N puts N on each")
    return tuple(
        Device(gpu=gpu, memory_optim=memory_optim)
        for gpu in gpus or [None]
        for _ in range(per_device)
    )


def _describe_tensor(spec: TensorSpec) -> str:
    shape = ", ".join("?" if length < 0 else str(length) for length in spec.shape)
    pixels = " or uint8" if any(encoding.dtype == "uint8" for encoding in spec.accepts) else ""
    return f"{spec.name}: {spec.dtype}{pixels}[N{', ' if shape else ''}{shape}]"


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")
    return values[text.lower()]


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"must be 0 to 60000, got {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be 0 to 1000000, got {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = make_parser("serve", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add(
        "--model",
        action="extend",
        nargs="+",
        required=True,
        metavar="[NAME=]DIR",
        help="a model's folder; repeat it to serve several; default name: the folder's",
    )
    add("--name", help="the name of the model, if it is the only one; default: the folder's")
    add(
        "--normalize",
        action="extend",
        nargs="+",
        default=[],
        metavar="[MODEL/]INPUT:KEY=VALUE:...",
        help="accept raw uint8 pixels, too, and compute (pixel * scale - mean) / std; keys: scale "
        "(default 1/255), mean, std (A, or A,B,C by channel), layout (CHW, HWC, HWC-CHW); "
        "default: the setting of `edl convert --normalize` in the folder",
    )
    add("--port", type=int, default=9292, help="default 9292; 0: any free port")
    add("--bind", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    add(
        "--grpc_port",
        type=int,
        help="a further port for gRPC alone, for trusted clients: saves a copy, and does not "
        "bound what unfinished requests hold; default: none",
    )
    add("--gpu_ids", default="", help="GPUs to compute on, e.g. 0,1; default: the CPU")
    add("--thread", type=int, help="predictors per GPU, or in all on the CPU; default 1")
    add(
        "--mem_optim",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="True|False",
        help="let Paddle reuse the memory of intermediate tensors; default False",
    )
    add("--max_batch", type=int, default=64, help="samples computed at once; default 64")
    add(
        "--batch_timeout_ms",
        type=_milliseconds,
        default=2.0,
        help="how long a batch waits to become full; default 2",
    )
    add("--max_queue", type=int, default=256, help="queued requests; default 256")
    add("--max_request_mb", type=int, default=512, help="of one request's inputs; default 512")
    add(
        "--backend",
        default=PADDLE_BACKEND,
        metavar="MODULE:FUNCTION",
        help="loads the models; default: Paddle Inference",
    )
    add(
        "--token_file",
        help="file with the token that clients must send; default: EDL_TEACHER_TOKEN",
    )
    add("--insecure", action="store_true", help="serve anyone who can connect, without a token")
    add_register_arguments(parser)
    add(
        "--drain_timeout_s",
        type=_seconds,
        default=30.0,
        help="how long requests may take to be answered after SIGTERM; default 30",
    )
    add(
        "--predict_timeout_s",
        type=_seconds,
        default=120.0,
        help="kill a predictor that needs longer for a batch; default 120",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
