"""Run a model with Paddle Inference. No other module of the teacher imports Paddle."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distill_reader.errors import ModelError
from distill_reader.model.specs import ModelSpec
from distill_reader.teacher.predictor.backend import Array, Device
from distill_reader.teacher.predictor.digest import digest_of, stamp
from distill_reader.teacher.predictor.model_folder import (
    ModelFiles,
    Signature,
    check_whole,
    find_model,
    read_signature,
)

logger = logging.getLogger(__name__)

_GPU_POOL_MB = 256  # at the start; Paddle's allocator takes more as needed


def load(folder: str, name: str, device: Device) -> "PaddleBackend":
    """Load the model in `folder`; a BackendFactory.

    Raises:
        ModelError: it cannot be served; names the file and the remedy.
    """
    files = find_model(folder)
    signature = read_signature(files, name)
    tensors = (*signature.spec.inputs, *signature.spec.outputs)
    names = [f"{tensor.name} {tensor.variable}" for tensor in tensors]
    before = stamp(files.paths)
    check_whole(files)
    spec = replace(signature.spec, digest=digest_of(files.folder, files.paths, *names))
    signature = replace(signature, spec=spec)
    backend = PaddleBackend(signature, _create_predictor(files, device))
    if stamp(files.paths) != before:
        raise ModelError(f"{folder}: its files changed while they were loaded; start again")
    backend.warm_up()
    return backend


class PaddleBackend:
    """A model. If its axis 0 is fixed, batches are split and padded to that length."""

    def __init__(self, signature: Signature, predictor: Any) -> None:
        self._spec = signature.spec
        self._batch = signature.batch
        self._predictor = predictor
        self._inputs = {
            tensor.name: predictor.get_input_handle(tensor.variable)
            for tensor in signature.spec.inputs
        }
        self._outputs = {
            tensor.name: predictor.get_output_handle(tensor.variable)
            for tensor in signature.spec.outputs
        }
        if self._batch is not None:
            logger.warning(
                "model %s: always computes %d samples at a time, however few are sent; "
                "export it with axis 0 left open (InputSpec([None, ...])) to save the rest",
                self._spec.name,
                self._batch,
            )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs by name, as new arrays."""
        if self._batch is None:
            return self._run(inputs)
        samples = len(next(iter(inputs.values())))
        parts = [
            self._run_filled_up(inputs, start, min(self._batch, samples - start))
            for start in range(0, samples, self._batch)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def warm_up(self) -> None:
        """Compute one sample of zeros, so that defects show now and not at the first request."""
        inputs: dict[str, Array] = {}
        for tensor in self._spec.inputs:
            if any(length < 0 for length in tensor.shape):
                return  # we cannot know which lengths fit together
            inputs[tensor.name] = np.zeros((1, *tensor.shape), tensor.dtype)
        try:
            self.run(inputs)
        except Exception as error:  # noqa: BLE001 - Paddle raises whatever its operators do
            # The model may be unable to compute zeros, and still be fine: requests will show.
            logger.warning("model %s: cannot compute a sample of zeros: %s", self._spec.name, error)

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name, handle in self._inputs.items():
            handle.copy_from_cpu(np.ascontiguousarray(inputs[name]))
        self._predictor.run()
        return {name: handle.copy_to_cpu() for name, handle in self._outputs.items()}

    def _run_filled_up(
        self, inputs: Mapping[str, Array], start: int, count: int
    ) -> dict[str, Array]:
        assert self._batch is not None
        rows = {name: array[start : start + count] for name, array in inputs.items()}
        if count < self._batch:
            rows = {
                # Repeat the last sample: the model might be unable to compute zeros.
                name: np.concatenate([array, np.repeat(array[-1:], self._batch - count, axis=0)])
                for name, array in rows.items()
            }
        return {name: array[:count] for name, array in self._run(rows).items()}


def _create_predictor(files: ModelFiles, device: Device) -> Any:
    try:
        import paddle
        from paddle import inference
    except ImportError as error:
        raise ModelError(
            f"Paddle cannot be imported ({error}); install paddlepaddle or paddlepaddle-gpu, "
            "or name another --backend"
        ) from error
    paddle.disable_signal_handler()  # it prints a stack trace when the front ends a predictor
    if files.params is None:
        config = inference.Config(str(files.folder))
    else:
        config = inference.Config(str(files.program), str(files.params))
    config.disable_glog_info()
    if device.gpu is None:
        config.disable_gpu()
        # Loading a ResNet50 takes 1.4-2.5 s longer, and convolutions are 5-10 times as fast.
        config.enable_mkldnn()
        config.set_cpu_math_library_num_threads(device.threads)
    else:
        _check_gpu(paddle, device.gpu)
        config.enable_use_gpu(_GPU_POOL_MB, device.gpu)
    if device.memory_optim:
        if files.is_pir:
            # Paddle 3.3 then fails with "Not find predictor_id 0 and pass_name ...".
            logger.info("%s: Paddle optimizes the memory of .json models by itself", files.program)
        else:
            config.enable_memory_optim(True)
    try:
        return inference.create_predictor(config)
    except Exception as error:
        # Paddle's C++ errors map to many classes. All mean the same here.
        raise ModelError(f"{files.program}: Paddle cannot load it: {_first_line(error)}") from error


def _check_gpu(paddle: Any, gpu: int) -> None:
    if not paddle.device.is_compiled_with_cuda():
        raise ModelError(
            f"GPU {gpu}: the installed Paddle computes on CPUs only; "
            "use --thread N, or install paddlepaddle-gpu"
        )
    count = paddle.device.cuda.device_count()
    if gpu >= count:
        raise ModelError(f"GPU {gpu}: Paddle sees {count} GPUs here; --gpu_ids counts from 0")


def _first_line(error: Exception) -> str:
    """Return the message without Paddle's C++ stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("(") or "Error" in line]
    return (telling or lines or [repr(error)])[0]
