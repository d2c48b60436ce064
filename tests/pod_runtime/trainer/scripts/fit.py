"""A script of the high-level API, for tests: it writes down what it trains, and dies on demand.

python fit.py OUT EPOCHS [kill|term EPOCH STEP]
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import ElasticCheckpoint

out, epochs = Path(sys.argv[1]), int(sys.argv[2])
how, at_epoch, at_step = (*sys.argv[3:], "", "-1", "-1")[:3]
SAMPLES, BATCH = 96, 8


class Numbers(paddle.io.Dataset):
    """Points of a plane with its height; also tells which it was asked for."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = np.array([np.sin(index), np.cos(3 * index)], np.float32)
        return x, x @ np.array([[2.0], [-1.0]], np.float32) + 0.5


class Notes(paddle.callbacks.Callback):
    """Appends one line per event."""

    def say(self, **words: object) -> None:
        with (out / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"run": run, **words}) + "\n")

    def on_train_begin(self, logs=None):
        self.say(begin=checkpoint.initial_epoch, lr=self.model._optimizer.get_lr())

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, step, logs=None):
        self.say(epoch=self.epoch, step=step, loss=float(np.ravel(logs["loss"])[0]))
        if (self.epoch, step) == (int(at_epoch), int(at_step)) and how:
            if how == "term" and rank != paddle.distributed.get_world_size() - 1:
                return  # only the last rank is asked
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        self.say(ended=epoch)

    def on_train_end(self, logs=None):
        self.say(done=True, lr=self.model._optimizer.get_lr())


run = os.getpid()
rank = paddle.distributed.get_rank()
paddle.seed(7)
network = paddle.nn.Linear(2, 1)
model = paddle.Model(network)
schedule = paddle.optimizer.lr.ExponentialDecay(0.2, gamma=0.98)
model.prepare(paddle.optimizer.Adam(schedule, parameters=network.parameters()), paddle.nn.MSELoss())
checkpoint = ElasticCheckpoint(out / "ckpt", save_steps=4)
model.fit(
    Numbers(),
    eval_data=Numbers(),
    batch_size=BATCH,
    epochs=epochs,
    verbose=0,
    callbacks=[checkpoint, Notes()],
)
if rank == 0:
    np.save(out / "weight.npy", network.weight.numpy())
