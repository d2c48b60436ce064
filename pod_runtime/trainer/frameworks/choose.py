"""Choose the adapter of a training: the one place that names the frameworks."""

from typing import Any

from pod_runtime.trainer.frameworks.adapter import Adapter


def make_adapter(model: Any, optimizer: Any, **options: Any) -> Adapter:
    """Return the adapter for `model`; its framework is imported here, and not before."""
    from pod_runtime.trainer.frameworks.paddle.adapter import PaddleAdapter

    return PaddleAdapter(model, optimizer, **options)
