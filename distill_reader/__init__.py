"""Service distillation: a student reads its batches with soft labels from teacher services.

Names are loaded when they are first used: a teacher's front process and the command line must not
load what only a student needs.
"""

import importlib
from typing import Any

_LAZY = {  # name -> module
    "Discovered": "distill_reader.student.options",
    "DistillReader": "distill_reader.student.reader",
    "distillation_loss": "distill_reader.student.labels.losses",
    "kl_divergence": "distill_reader.student.labels.losses",
    "soft_cross_entropy": "distill_reader.student.labels.losses",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'distill_reader' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
