"""Choose the adapter of a training: the one place that names the frameworks."""

from typing import Any

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.adapter import Adapter


def make_adapter(model: Any, optimizer: Any, **options: Any) -> Adapter:
    """Return the adapter for `model`; its framework is imported here, and not before.

    Raises:
        UsageError: the framework's adapter refuses an argument.
    """
    models = model if isinstance(model, list | tuple) else [model]
    if any(_is_of_torch(each) for each in (optimizer, *models)):
        from pod_runtime.trainer.frameworks.torch.adapter import TorchAdapter

        return TorchAdapter(model, optimizer, **options)
    try:
        from pod_runtime.trainer.frameworks.paddle.adapter import PaddleAdapter
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        raise UsageError(
            f"model: expected a torch.nn.Module or a paddle.nn.Layer, got {type(model).__name__}; "
            f"PaddlePaddle is not installed"
        ) from None
    return PaddleAdapter(model, optimizer, **options)


def _is_of_torch(thing: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(thing).__mro__)
