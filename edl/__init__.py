"""Elastic training and service distillation: `from edl import elastic, DistillReader`.

Names are loaded when they are first used: the command `edl` starts without a framework, and a
training script loads only its own.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill_reader import Discovered as Discovered
    from distill_reader import DistillReader as DistillReader
    from distill_reader import distillation_loss as distillation_loss
    from distill_reader import kl_divergence as kl_divergence
    from distill_reader import soft_cross_entropy as soft_cross_entropy
    from pod_runtime import CloudReader as CloudReader
    from pod_runtime import ElasticCheckpoint as ElasticCheckpoint
    from pod_runtime import HDFSClient as HDFSClient
    from pod_runtime import LocalFS as LocalFS
    from pod_runtime import RunLog as RunLog
    from pod_runtime import TrainStatus as TrainStatus
    from pod_runtime import cloud_reader as cloud_reader
    from pod_runtime import elastic as elastic
    from pod_runtime import load_checkpoint as load_checkpoint
    from pod_runtime import save_checkpoint as save_checkpoint
    from pod_runtime import write_shards as write_shards
else:  # so that type checkers see an error in a wrong name
    _HOMES = {  # name -> package
        "CloudReader": "pod_runtime",
        "Discovered": "distill_reader",
        "DistillReader": "distill_reader",
        "ElasticCheckpoint": "pod_runtime",
        "HDFSClient": "pod_runtime",
        "LocalFS": "pod_runtime",
        "RunLog": "pod_runtime",
        "TrainStatus": "pod_runtime",
        "cloud_reader": "pod_runtime",
        "distillation_loss": "distill_reader",
        "elastic": "pod_runtime",
        "kl_divergence": "distill_reader",
        "load_checkpoint": "pod_runtime",
        "save_checkpoint": "pod_runtime",
        "soft_cross_entropy": "distill_reader",
        "write_shards": "pod_runtime",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'edl' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted([*globals(), *_HOMES])
