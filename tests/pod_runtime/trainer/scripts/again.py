"""Three trainings in one script; where each began, and how many descriptors are open after it."""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--checkpoint", help="one for all of them")
parser.add_argument("--folders", help="each has a folder of checkpoints in this one")
parser.add_argument("--in_turn", action="store_true", help="make two, and begin with the first")
args = parser.parse_args()

data = [np.full(3, i, "float32") / 20 for i in range(20)]
descriptors, began = [], []
for number in range(3):
    folder = f"{args.folders}/{number}" if args.folders else args.checkpoint
    model = paddle.nn.Linear(3, 1)
    optimizer = paddle.optimizer.Adam(0.05, parameters=model.parameters())
    loop = elastic.Loop(
        model, optimizer, data, batch_size=6, epochs=1, snapshot_steps=1, checkpoint=folder
    )
    if args.in_turn:
        other = elastic.Loop(model, optimizer, data, batch_size=6, epochs=1)
    began.append(loop.step_count)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
            step.update()
            time.sleep(args.step_s)
    descriptors.append(len(os.listdir("/proc/self/fd")))
(args.out / f"open.{loop.rank}").write_text(json.dumps(descriptors))
(args.out / f"began.{loop.rank}").write_text(json.dumps(began))
