"""Parameter i counts how often sample i was trained; what happens besides is up to the flags.

The loss of sample i is -w[i] times the size of the global batch, the learning rate is 1: a pass
over the data adds exactly 1 to every parameter.
"""

import argparse
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=203)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--checkpoint")
parser.add_argument("--save_steps", type=int, default=1000)
parser.add_argument("--keep", type=int, default=3)
parser.add_argument("--snapshot_steps", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--all_reduce", default="flat")
parser.add_argument("--padding", type=int, default=0, help="parameters besides, to have a size")
parser.add_argument("--evaluate_while", type=Path, help="evaluate as long as this file exists")
parser.add_argument("--slow", type=Path, help="evaluate once, slowly while this file exists")
parser.add_argument("--starve", type=Path, help="rank 1 gets no data while this file exists")
parser.add_argument("--promise", default="rounding")
parser.add_argument("--policy", default=None)
parser.add_argument("--drop_last", action="store_true")
parser.add_argument("--fail_at", type=int, default=-1, help="rank 1 dies in this step, unreduced")
parser.add_argument("--turn", action="store_true", help="a scheduler steps before each update")
parser.add_argument(
    "--tally", choices=("buffer", "parameter", "extra", "attribute"), help="steps, at their top"
)
parser.add_argument("--reads", action="store_true", help="the model, in an epoch before its steps")
parser.add_argument("--watches", action="store_true", help="loop and model, in a thread")
parser.add_argument("--made_in_thread", action="store_true", help="the loop, in one that ends")
parser.add_argument("--asks", action="store_true", help="the loop, in a thread that is no daemon")
parser.add_argument("--own_seed", action="store_true", help="every process makes its own")
parser.add_argument("--own_target", action="store_true", help="a frozen one, built unseeded")
parser.add_argument("--own_features", action="store_true", help="of the script, drawn unseeded")
parser.add_argument("--own_table", action="store_true", help="of the model, drawn unseeded")
parser.add_argument("--best", action="store_true", help="epoch 1's state is the best")
parser.add_argument("--best_first", action="store_true", help="before it evaluates")
parser.add_argument("--only_rank_0", choices=("evaluate", "save_best"))
parser.add_argument("--until", type=Path, help="once this file exists, no epoch follows")
parser.add_argument("--own_sigterm", action="store_true", help="ends the training, as on a spot VM")
parser.add_argument("--draws", action="store_true", help="a number in each epoch, which it notes")
parser.add_argument("--evaluates_first", action="store_true", help="in each epoch before its steps")
args = parser.parse_args()
if "COUNTING_FAILS" in os.environ:
    raise SystemExit(1)
STAGE = os.environ.get("EDL_STAGE", "0")
paddle.set_default_dtype("float64")


class Ids(paddle.io.Dataset):
    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Counter(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        zero = paddle.nn.initializer.Constant(0.0)
        self.seen = self.create_parameter([args.samples], default_initializer=zero)
        if args.padding:
            self.padding = self.create_parameter([args.padding], default_initializer=zero)
        self.steps = 0
        self.register_buffer("tally", paddle.zeros([1]))
        self.kept = self.create_parameter([1], default_initializer=zero)
        self.kept.stop_gradient = True

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.gather(self.seen, ids)


class Tally:
    def __init__(self) -> None:
        self.steps = 0

    def add(self) -> None:
        self.steps += 1
        model.steps += args.tally == "attribute"
        if args.tally == "buffer":
            model.tally.set_value(model.tally + 1)
        if args.tally == "parameter":  # as an average that is a part of the model
            model.kept.set_value(model.kept + 1)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps if args.tally == "extra" else 0}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Many(paddle.io.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


def slowly(ids):
    if args.slow.exists():
        time.sleep(0.1)
    return {"ids": ids.sum()}


def starving(where: elastic.ReadFrom):
    """The training set's shards, which stop coming on rank 1 while the file exists."""
    for item in loop.shards(Ids()):
        while where.rank == 1 and item[1] >= 2 and args.starve.exists():
            time.sleep(0.01)
        yield item


told: list[int] = []
if args.own_sigterm:
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
data = Ids()
if args.workers:
    data = paddle.io.DataLoader(data, batch_size=32, shuffle=True, num_workers=args.workers)
model, tally = Counter(), Tally()
np.random.seed()
paddle.seed(os.getpid())
target = paddle.nn.Linear(3, 2) if args.own_target else None
if target is not None:
    target.register_buffer("mask", paddle.full([2, 2], -3e38))  # beside which weights are tiny
if target is not None:
    target.eval()
    for parameter in target.parameters():
        parameter.stop_gradient = True
features = np.random.rand(40) if args.own_features else np.zeros(40)
if args.own_table:
    model.table = np.random.permutation(40)
rate = paddle.optimizer.lr.LambdaDecay(1.0, lambda _count: 1.0)
optimizer = paddle.optimizer.SGD(rate if args.turn else 1.0, parameters=model.parameters())
make = partial(
    elastic.Loop,
    model, optimizer, data, batch_size=32, epochs=args.epochs, checkpoint=args.checkpoint,
    save_steps=args.save_steps, keep_checkpoints=args.keep,
    snapshot_steps=args.snapshot_steps or "auto", reader=starving if args.starve else None,
    all_reduce=args.all_reduce, promise=args.promise, extra={"tally": tally},
    seed=os.getpid() if args.own_seed else 0, policy=args.policy, drop_last=args.drop_last or None,
)  # fmt: skip
loop = ThreadPoolExecutor(1).submit(make).result() if args.made_in_thread else make()
if args.watches:

    def watch() -> None:
        while True:
            assert (float(model.seen.sum()), loop.step_count) >= (0.0, 0)
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
if args.asks:
    threading.Thread(target=lambda: loop.step_count).start()
RANK = os.environ["PADDLE_TRAINER_ID"]
noted = (args.out / f"noted.{STAGE}.{RANK}").open("a")  # stays open, and is never flushed
for epoch in loop.epochs():
    drawn = random.random() if args.draws else 0.0
    read = float(model.seen.sum()) if args.reads else -1.0
    if args.evaluates_first:
        loop.evaluate(Ids(), lambda ids: {"ids": ids.sum()}, batch_size=args.samples)
    for step in epoch:
        if args.draws and not step.is_warmup:
            with (args.out / f"drawn.{epoch.number}").open("a") as file:
                print(drawn, file=file)
        if not step.is_warmup:
            assert os.environ["PADDLE_TRAINER_ID"] == str(loop.rank)
            assert os.environ["PADDLE_TRAINERS_NUM"] == str(loop.world_size)
        if read >= 0 and not step.is_warmup:
            assert read == float(model.seen.sum()), "another model was read than is trained on"
            read = -1.0
        if args.turn:
            rate.step()
        if args.tally:
            tally.add()
        if args.starve:
            (args.out / f"begun.{loop.rank}.{step.number}").touch()
        for batch in step:
            ids = batch[0] if isinstance(batch, list) else batch
            step.backward(-model(ids).mean() * step.samples)
        if loop.rank == 1 and step.number == args.fail_at and STAGE == "1":
            os.kill(os.getpid(), 9)
        step.update()
        if not step.is_warmup:
            print(step.number, file=noted)
        if told:
            loop.stop()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
    if args.best_first:
        loop.save_best("epoch", epoch.number)
    if args.only_rank_0 == "evaluate" and loop.rank == 0:
        loop.evaluate(Ids(), lambda ids: {"ids": ids.sum()}, batch_size=16)
    if args.only_rank_0 == "save_best" and loop.rank == 0:
        loop.save_best("epoch", epoch.number)
    if args.slow and epoch.number == 0:
        (args.out / f"evaluating.{STAGE}.{loop.rank}").touch()
        assert loop.evaluate(Many(), slowly, batch_size=1)["ids"] == 1000 * 999 / 2
    if args.until and args.until.exists():
        loop.stop()
    loop.log(epoch=epoch.number)
    if args.best:
        value = [0.5, 0.9, 0.7][epoch.number]
        best = loop.save_best("accuracy", value)
        print(json.dumps([epoch.number, best.value, best.epoch, best.step, best.folder]))
    while args.evaluate_while and args.evaluate_while.exists():
        (args.out / f"evaluating.{STAGE}.{loop.rank}").touch()
        found = loop.evaluate(Ids(), lambda ids: {"ids": ids.sum()}, batch_size=16)
        assert found["ids"] == sum(range(args.samples)), found
found = {"extra": tally.steps, "attribute": model.steps, "buffer": float(model.tally.sum())}
found["parameter"] = float(model.kept.sum())
assert not args.tally or found[args.tally] == loop.step_count, found
assert not args.turn or rate.last_epoch == loop.step_count, rate.last_epoch
if loop.rank == 0:
    np.save(args.out / "counts.npy", model.seen.numpy())
