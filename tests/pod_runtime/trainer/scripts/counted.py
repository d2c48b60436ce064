"""Counts its steps by `enumerate`, as the cookbook does."""

import numpy as np
import paddle

from pod_runtime import elastic

model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
train_set = [np.full(4, number, "float32") for number in range(100)]
loop = elastic.Loop(model, optimizer, train_set, batch_size=32, epochs=2)
for epoch in loop.epochs():
    for index, step in enumerate(epoch, epoch.first_step):
        for batch in step:
            step.backward(model(batch).mean())
        step.update()
        assert index == step.index
