"""The interface of training scripts: `from edl import elastic`.

loop = elastic.Loop(model, optimizer, train_loader, epochs=10, checkpoint="ckpt")
for epoch in loop.epochs():
    model.train()
    for step in epoch:
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        step.update()
"""

from pod_runtime.trainer.data.readers import ReadFrom
from pod_runtime.trainer.data.step import Epoch, Step
from pod_runtime.trainer.errors import (
    CheckpointError,
    ElasticError,
    LinkError,
    PeerLost,
    StateError,
    UsageError,
)
from pod_runtime.trainer.loop.loop import Loop
from pod_runtime.trainer.progress.best import BestCheckpoint
from pod_runtime.trainer.progress.scaling import Scale

__all__ = [
    "BestCheckpoint",
    "CheckpointError",
    "ElasticError",
    "Epoch",
    "LinkError",
    "Loop",
    "PeerLost",
    "ReadFrom",
    "Scale",
    "StateError",
    "Step",
    "UsageError",
]
