"""A predictor process: load every model on one device, then compute batches.

The front starts it with one end of a socket pair (service/predictors.py). It ends when the front
does.
"""

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from distill_reader.errors import BadRequest, ModelError, UsageError
from distill_reader.model.normalization import Normalization, check_inputs, read_folder
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.model.tensors import differ_beyond_rounding
from distill_reader.protocols.arena import Arena, attach
from distill_reader.teacher.predictor.backend import (
    PADDLE_BACKEND,
    Array,
    Backend,
    BackendFactory,
    Device,
)
from distill_reader.teacher.predictor.digest import digest_of
from distill_reader.teacher.predictor.encodings import Encoder, decode_input
from distill_reader.teacher.predictor.wire import (
    MessageKind,
    PredictorChannel,
    RunMessage,
    Shape,
    StartMessage,
    TensorAddress,
    decode_addresses,
    decode_run,
    encode_shapes,
    parse_start,
    specs_document,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
# Of the spread of a batch's outputs: by more an answer does not differ for rounding alone, which is
# up to 0.03 of it in a deep model of 8 bits.
_MOST_DIFFERENCE = 0.05
_REPEATS = 8  # of samples alone: some answers differ little by chance
# Operators raise these for bad input tensors: Paddle's InvalidArgument, OutOfRange, Unimplemented
# and more. After anything else, such as a lack of memory or an error of the device, the process
# may be unfit to continue.
_ABOUT_INPUTS = (BadRequest, ValueError, TypeError, LookupError, NotImplementedError)


class _DependsOnOthers(BadRequest):
    """The model's answer to a sample depends on the others: no request of it is to be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model as it is served."""

    backend: Backend
    spec: ModelSpec  # the backend's, with the further encodings that are accepted
    normalizations: Mapping[str, Normalization]  # by input


class PredictorLoop:
    """Answers the front's messages until the front is gone."""

    def __init__(
        self, channel: PredictorChannel, models: Sequence[LoadedModel], *, copies_inputs: bool
    ) -> None:
        """
        Args:
            copies_inputs: a backend may write to its inputs, and another predictor needs them as
                they came, should this one end.
        """
        self._channel = channel
        self._models = models
        self._copies_inputs = copies_inputs
        self._arenas: dict[int, Arena] = {}
        self._waiting: deque[RunMessage] = deque()
        self._proven: set[int] = set()  # models whose answers do not depend on other samples
        self._repeats: Counter[int] = Counter()  # by model: samples alone that were computed twice

    def serve(self) -> None:
        """Serve messages; return when the front closes the connection."""
        with contextlib.suppress(EOFError):
            while True:
                if self._waiting:
                    self._run(self._waiting.popleft())
                else:
                    self._waiting.append(decode_run(self._await(MessageKind.RUN)))

    def _await(self, wanted: MessageKind) -> tuple[int, ...]:
        """Return the numbers of the next RUN or WRITE. Other batches that come first are queued."""
        while True:
            kind, numbers, _, fd = self._channel.receive_with_fd()
            if kind is wanted:
                return numbers
            if kind is MessageKind.RUN:
                self._waiting.append(decode_run(numbers))
            elif kind is MessageKind.ARENA and fd is not None:
                self._arenas[numbers[0]] = attach(fd)
            elif kind is MessageKind.FORGET and numbers[0] in self._arenas:
                self._arenas.pop(numbers[0]).close()

    def _run(self, run: RunMessage) -> None:
        model = self._models[run.model]
        spec = model.spec
        samples = sum(rows.count for rows in run.rows)
        inputs = {
            tensor.name: self._gather(
                run.input_dtypes[at], shape, [(rows.inputs[at], rows.count) for rows in run.rows]
            )
            for at, (tensor, shape) in enumerate(zip(spec.inputs, run.input_shapes, strict=True))
        }
        started = time.perf_counter()
        try:
            for tensor in spec.inputs:
                normalization = model.normalizations.get(tensor.name)
                inputs[tensor.name] = decode_input(inputs[tensor.name], tensor, normalization)
            is_repeated = samples == 1 and self._repeats[run.model] >= _REPEATS
            is_proven = is_repeated or run.model in self._proven
            others = None if is_proven else _with_others(inputs, samples)
            outputs = _check_outputs(spec, model.backend.run(inputs), samples)
            if others is not None:
                self._channel.send(MessageKind.ALIVE)  # each of the two runs may take its time
                outputs = [output.copy() for output in outputs]  # the backend may use them again
                _check_apart(model, others, outputs)
                if samples > 1:
                    self._proven.add(run.model)
                else:
                    self._repeats[run.model] += 1
            encoder = Encoder(outputs, [tensor.name for tensor in spec.outputs])
            encoded = [encoder.encode(encoding) for encoding in run.encodings]
        except _ABOUT_INPUTS as error:
            numbers = run.batch, int(isinstance(error, _DependsOnOthers))
            self._channel.send(MessageKind.REFUSED, numbers, str(error).encode()[:4000])
            return
        computed_us = int((time.perf_counter() - started) * 1e6)
        shapes = tuple(output.shape[1:] for output in outputs)
        addresses: Sequence[tuple[TensorAddress | None, ...]] = [rows.outputs for rows in run.rows]
        expected = zip(run.output_shapes, shapes, strict=True)
        if any(want is not None and want != got for want, got in expected) or not any(addresses[0]):
            addresses = self._request_addresses(run, computed_us, shapes)
        self._scatter(encoded, run, addresses)
        self._channel.send(MessageKind.DONE, (run.batch, computed_us))

    def _request_addresses(
        self, run: RunMessage, computed_us: int, shapes: Sequence[Shape]
    ) -> list[tuple[TensorAddress | None, ...]]:
        """Send the shapes of the outputs to the front; return the addresses it allocates."""
        self._channel.send(MessageKind.SHAPES, encode_shapes(run.batch, computed_us, shapes))
        return decode_addresses(self._await(MessageKind.WRITE), len(run.encodings))

    def _gather(
        self, dtype: str, shape: Shape, parts: Sequence[tuple[TensorAddress, int]]
    ) -> Array:
        arrays = [self._array(dtype, address, (count, *shape)) for address, count in parts]
        if len(arrays) > 1:
            return np.concatenate(arrays)
        # Vector instructions need aligned arrays; a protocol may receive bytes at odd addresses.
        is_ready = arrays[0].flags.aligned and not self._copies_inputs
        return arrays[0] if is_ready else arrays[0].copy()

    def _scatter(
        self,
        encoded: Sequence[Array],
        run: RunMessage,
        addresses: Sequence[tuple[TensorAddress | None, ...]],
    ) -> None:
        start = 0
        for rows, wanted in zip(run.rows, addresses, strict=True):
            for output, address in zip(encoded, wanted, strict=True):
                if address is not None:
                    part = output[start : start + rows.count]
                    self._array(output.dtype.name, address, part.shape)[...] = part
            start += rows.count

    def _array(self, dtype: str, address: TensorAddress, shape: Shape) -> Array:
        arena, offset = address
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, self._arenas[arena].region(offset, size))


def load_models(start: StartMessage) -> list[LoadedModel]:
    """Load every model with the backend's factory.

    Raises:
        UsageError: there is no such factory, or a normalization does not fit its input.
        ModelError: a model cannot be served.
    """
    factory = _find_factory(start.backend)
    given: dict[str, dict[str, Normalization]] = {name: {} for name, _ in start.models}
    for model, tensor, normalization in start.normalizations:
        given[model][tensor] = normalization
    device = start.device
    return [_load(factory, folder, name, device, given[name]) for name, folder in start.models]


def _load(
    factory: BackendFactory,
    folder: str,
    name: str,
    device: Device,
    given: Mapping[str, Normalization],
) -> LoadedModel:
    """Load a model. The given normalizations replace those of its folder."""
    backend = factory(folder, name, device)
    spec = backend.spec
    try:
        normalizations = check_inputs(read_folder(folder), spec.inputs)
        normalizations |= check_inputs(given, spec.inputs)
    except UsageError as error:
        raise UsageError(f"model {name}: {error}") from error
    how = [f"{key} {asdict(normalizations[key])}" for key in sorted(normalizations)]
    return LoadedModel(
        backend=backend,
        spec=replace(
            spec,
            inputs=tuple(
                replace(tensor, accepts=_accepts(tensor, normalizations.get(tensor.name)))
                for tensor in spec.inputs
            ),
            takes_encodings=True,
            digest=digest_of(folder, [], spec.digest, *how) if spec.digest and how else spec.digest,
        ),
        normalizations=normalizations,
    )


def _accepts(tensor: TensorSpec, normalization: Normalization | None) -> tuple[InputEncoding, ...]:
    encodings = list(tensor.accepts)
    if tensor.dtype in ("float32", "float64"):
        encodings.append(InputEncoding(dtype="float16", shape=tensor.shape))
    if normalization is not None:
        encodings.append(normalization.accepted(tensor))
    return tuple(encodings)


def _find_factory(backend: str) -> BackendFactory:
    module, _, function = backend.partition(":")
    try:
        factory: BackendFactory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--backend {backend}: {error}; expected module:function, importable from here"
        ) from error
    return factory


def main() -> None:
    """Load the models of the START message and serve them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair")
    parser.add_argument("--front", type=int, required=True, help="process id of the front")
    args = parser.parse_args()
    _end_with(args.front)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s predictor {os.getpid()} %(levelname)s %(name)s: %(message)s",
    )
    channel = PredictorChannel(socket.socket(fileno=args.fd))
    _, _, text = channel.receive()
    start = parse_start(text)
    sys.path += [path for path in start.paths if path not in sys.path]
    try:
        models = load_models(start)
    except Exception as error:
        # A backend may raise anything, and the front must know.
        is_expected = isinstance(error, ModelError | UsageError)
        if not is_expected:
            logger.exception("loading failed")
        channel.send_json(
            MessageKind.BROKEN,
            {
                "kind": "usage" if isinstance(error, UsageError) else "model",
                "text": str(error) if is_expected else f"loading failed: {error!r}",
            },
        )
        return
    channel.send_json(MessageKind.READY, specs_document([model.spec for model in models]))
    try:
        PredictorLoop(channel, models, copies_inputs=start.backend != PADDLE_BACKEND).serve()
    except BrokenPipeError:
        return  # the front is gone
    except Exception as error:
        # After an error that the inputs do not explain, a new process is safer.
        logger.exception("computing failed")
        channel.send_json(MessageKind.BROKEN, {"kind": "compute", "text": repr(error)[:4000]})
        raise SystemExit(1) from error


def _end_with(front: int) -> None:
    """Make the kernel kill this process when the front ends, for whatever reason."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front, which lets us finish
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != front:
        raise SystemExit("the front is gone")


def _check_outputs(spec: ModelSpec, outputs: Mapping[str, Array], samples: int) -> list[Array]:
    """Return the outputs in the spec's order.

    Raises:
        BadRequest: an output is missing, has another type or shape, or not one row per sample.
    """
    if not isinstance(outputs, Mapping):
        raise BadRequest(
            f"the backend returned a {type(outputs).__name__}, not a dict of arrays by output"
        )
    return [_check_output(tensor, outputs.get(tensor.name), samples) for tensor in spec.outputs]


def _with_others(inputs: Mapping[str, Array], samples: int) -> dict[str, Array] | None:
    """Return a batch with the first sample in place of those of the second half.

    None: it would be the same batch. One sample alone comes again as it is: its answer may differ
    each time, as by dropout.
    """
    places = np.arange(samples)
    places[_kept(samples) :] = 0
    others = {name: each[places] for name, each in inputs.items()}
    differ = any((others[name] != each).any() for name, each in inputs.items())
    return others if differ or samples == 1 else None


def _check_apart(model: LoadedModel, others: Mapping[str, Array], outputs: Sequence[Array]) -> None:
    """Compute `_with_others` of a batch, whose first half must get the answers that it had.

    Raises:
        _DependsOnOthers: it does not, as of a model in training mode.
    """
    spec, kept = model.spec, _kept(len(outputs[0]))
    again = _check_outputs(spec, model.backend.run(others), len(outputs[0]))
    for tensor, before, after in zip(spec.outputs, outputs, again, strict=True):
        if differ_beyond_rounding(before[:kept], after[:kept], before, _MOST_DIFFERENCE):
            raise _DependsOnOthers(
                f"output {tensor.name}: the answer to a sample depends on the others that are "
                "computed with it, or differs each time, as of a model in training mode (batch "
                "norm, dropout): call its eval() before it is exported, or in the backend"
            )


def _kept(samples: int) -> int:
    return -(-samples // 2)


def _check_output(tensor: TensorSpec, array: Array | None, samples: int) -> Array:
    if array is None:
        raise BadRequest(f"output {tensor.name}: the model did not return it")
    if not isinstance(array, np.ndarray):
        raise BadRequest(
            f"output {tensor.name}: expected an array of numpy, got a {type(array).__name__}"
        )
    if array.dtype != np.dtype(tensor.dtype):
        raise BadRequest(f"output {tensor.name}: expected {tensor.dtype}, got {array.dtype}")
    if array.ndim == 0 or len(array) != samples:
        raise BadRequest(
            f"output {tensor.name}: has shape {list(array.shape)} for {samples} samples; "
            "axis 0 of every output must count samples"
        )
    fits = array.ndim == len(tensor.shape) + 1 and all(
        want in (-1, got) for want, got in zip(tensor.shape, array.shape[1:], strict=True)
    )
    if not fits:  # (N,) in place of (N, 1) would make (N, N) of a student's loss, in silence
        want = ", ".join(["N", *("?" if length < 0 else str(length) for length in tensor.shape)])
        raise BadRequest(
            f"output {tensor.name}: expected shape [{want}], as the model's spec says, got "
            f"{list(array.shape)}"
        )
    return array


if __name__ == "__main__":
    main()
