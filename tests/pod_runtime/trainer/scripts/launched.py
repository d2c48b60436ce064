"""Runs under `python -m paddle.distributed.launch`: a world of two outside EDL."""

import sys

import numpy as np
import paddle

from pod_runtime import elastic

paddle.seed(7 + paddle.distributed.get_rank())  # the ranks' fresh models differ: rank 0's counts
model = paddle.nn.Linear(3, 1)
optimizer = paddle.optimizer.Adam(0.05, parameters=model.parameters())
data = [np.full(3, i, "float32") / 20 for i in range(20)]
loop = elastic.Loop(
    model, optimizer, data, batch_size=6, epochs=int(sys.argv[2]), shards=2, checkpoint=sys.argv[1]
)
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            step.backward((model(batch) ** 2).mean())
        step.update()
total = loop.evaluate(data, lambda batch: {"sum": batch.sum()}, batch_size=7)["sum"]
print(f"rank {loop.rank} of {loop.world_size}: {loop.step_count} steps, sum {total:.1f}, "
      f"weight {model.weight.numpy().tobytes().hex()}", flush=True)  # fmt: skip
