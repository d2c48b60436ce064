"""What runs inside a pod. Training scripts write `from edl import elastic`, or take it from here.

Names are loaded when they are first used: the launcher and the shim import this package too, and
must not load numpy or a framework.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pod_runtime.trainer import elastic as elastic
    from pod_runtime.trainer.data.cloud_reader import CloudReader as CloudReader
    from pod_runtime.trainer.data.cloud_reader import cloud_reader as cloud_reader
    from pod_runtime.trainer.data.cloud_reader import write_shards as write_shards
    from pod_runtime.trainer.epochs.epoch_checkpoint import TrainStatus as TrainStatus
    from pod_runtime.trainer.epochs.epoch_checkpoint import load_checkpoint as load_checkpoint
    from pod_runtime.trainer.epochs.epoch_checkpoint import save_checkpoint as save_checkpoint
    from pod_runtime.trainer.epochs.file_systems import HDFSClient as HDFSClient
    from pod_runtime.trainer.epochs.file_systems import LocalFS as LocalFS
    from pod_runtime.trainer.epochs.paddle_callback import ElasticCheckpoint as ElasticCheckpoint
    from pod_runtime.trainer.tensorboard.summary import RunLog as RunLog
else:  # so that type checkers see an error in a wrong name
    # name -> (module, attribute in it; None: the module itself)
    _LAZY = {
        "CloudReader": ("pod_runtime.trainer.data.cloud_reader", "CloudReader"),
        "cloud_reader": ("pod_runtime.trainer.data.cloud_reader", "cloud_reader"),
        "write_shards": ("pod_runtime.trainer.data.cloud_reader", "write_shards"),
        "elastic": ("pod_runtime.trainer.elastic", None),
        "TrainStatus": ("pod_runtime.trainer.epochs.epoch_checkpoint", "TrainStatus"),
        "load_checkpoint": ("pod_runtime.trainer.epochs.epoch_checkpoint", "load_checkpoint"),
        "save_checkpoint": ("pod_runtime.trainer.epochs.epoch_checkpoint", "save_checkpoint"),
        "LocalFS": ("pod_runtime.trainer.epochs.file_systems", "LocalFS"),
        "ElasticCheckpoint": ("pod_runtime.trainer.epochs.paddle_callback", "ElasticCheckpoint"),
        "RunLog": ("pod_runtime.trainer.tensorboard.summary", "RunLog"),
        "HDFSClient": ("pod_runtime.trainer.epochs.file_systems", "HDFSClient"),
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'pod_runtime' has no attribute {name!r}")
        module_name, attribute = _LAZY[name]
        module = importlib.import_module(module_name)
        return module if attribute is None else getattr(module, attribute)

    def __dir__():
        return sorted([*globals(), *_LAZY])
