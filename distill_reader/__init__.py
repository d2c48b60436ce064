"""Service distillation: a student reads its batches with soft labels from teacher services.

Names are loaded when they are first used: a teacher's front process and the command line must not
load what only a student needs.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill_reader.student.labels.losses import distillation_loss as distillation_loss
    from distill_reader.student.labels.losses import kl_divergence as kl_divergence
    from distill_reader.student.labels.losses import soft_cross_entropy as soft_cross_entropy
    from distill_reader.student.options import Discovered as Discovered
    from distill_reader.student.reader import DistillReader as DistillReader
else:  # so that type checkers see an error in a wrong name
    _LAZY = {  # name -> module
        "Discovered": "distill_reader.student.options",
        "DistillReader": "distill_reader.student.reader",
        "distillation_loss": "distill_reader.student.labels.losses",
        "kl_divergence": "distill_reader.student.labels.losses",
        "soft_cross_entropy": "distill_reader.student.labels.losses",
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'distill_reader' has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)

    def __dir__():
        return sorted([*globals(), *_LAZY])
