"""What runs inside a pod. Training scripts write `from pod_runtime import elastic`.

Names are loaded when they are first used: the launcher and the shim import this package too, and
must not load numpy or a framework.
"""

import importlib
from typing import Any

# name -> (module, attribute in it; None: the module itself)
_LAZY: dict[str, tuple[str, str | None]] = {
    "elastic": ("pod_runtime.trainer.elastic", None),
    "TrainStatus": ("pod_runtime.trainer.epochs.epoch_checkpoint", "TrainStatus"),
    "load_checkpoint": ("pod_runtime.trainer.epochs.epoch_checkpoint", "load_checkpoint"),
    "save_checkpoint": ("pod_runtime.trainer.epochs.epoch_checkpoint", "save_checkpoint"),
    "LocalFS": ("pod_runtime.trainer.epochs.file_systems", "LocalFS"),
    "ElasticCheckpoint": ("pod_runtime.trainer.epochs.paddle_callback", "ElasticCheckpoint"),
    "RunLog": ("pod_runtime.trainer.tensorboard.summary", "RunLog"),
    "HDFSClient": ("pod_runtime.trainer.epochs.file_systems", "HDFSClient"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pod_runtime' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
