"""Choose the framework of a training: the one place that names the frameworks."""

from typing import Any

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.plain_values import as_list


def make_framework(model: Any, optimizer: Any, **options: Any) -> Framework:
    """Return the framework of the models, which is imported here, and not before.

    Args:
        model: one, a list, or a dict of names.
        optimizer: one, or a list.

    Raises:
        UsageError: the framework's folder refuses an argument.
    """
    if any(_is_of_torch(each) for each in (*as_list(optimizer), *as_list(model))):
        from pod_runtime.trainer.frameworks.torch.framework import torch_framework

        return torch_framework(model, optimizer, **options)
    try:
        from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        raise UsageError(
            f"model: expected a torch.nn.Module or a paddle.nn.Layer, got {type(model).__name__}; "
            f"PaddlePaddle is not installed"
        ) from None
    return paddle_framework(model, optimizer, **options)


def _is_of_torch(thing: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(thing).__mro__)
