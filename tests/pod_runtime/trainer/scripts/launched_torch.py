"""Runs under torchrun: a world of two outside EDL."""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from pod_runtime import elastic

folder, epochs, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
torch.manual_seed(7 + rank)  # the ranks' fresh models differ: rank 0's counts
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.05)
data = [np.full(3, i, "float32") / 20 for i in range(20)]
loop = elastic.Loop(
    model, optimizer, data, batch_size=6, epochs=epochs, shards=2, checkpoint=folder / "ckpt"
)
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            step.backward((model(batch) ** 2).mean())
        step.update()
total = loop.evaluate(data, lambda batch: {"sum": batch.sum()}, batch_size=7)["sum"]
(folder / f"said.{rank}").write_text(
    f"rank {loop.rank} of {loop.world_size}: {loop.step_count} steps, sum {total:.1f}, "
    f"weight {model.weight.detach().numpy().tobytes().hex()}"
)
