"""Counts its steps by `enumerate`, as the cookbook does."""

import argparse

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--policy", help="leaves short batches out")
args = parser.parse_args()

model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
train_set = [np.full(4, number, "float32") for number in range(100)]
loop = elastic.Loop(
    model, optimizer, train_set, batch_size=32, epochs=args.epochs,
    policy=args.policy, drop_last=args.policy is not None,
)  # fmt: skip
for epoch in loop.epochs():
    for index, step in enumerate(epoch, epoch.first_step):
        for batch in step:
            step.backward(model(batch).mean())
        step.update()
        assert index == step.index
