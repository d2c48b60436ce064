"""Train a CNN on the digits, elastically: an ordinary elastic script, which knows of no search.

A trial of a search gets its parameters as arguments, and is judged by the accuracy on the
validation images that it logs after each epoch. The test images count for nothing before the end.
"""

import argparse

import paddle
import paddle.nn.functional as F
from cells import OPERATIONS, Part, make

from edl import elastic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=["cells", "lenet"], default="cells")
for node in ("first", "second", "third"):
    parser.add_argument(f"--{node}", choices=OPERATIONS, default="conv3", help="of a cell's nodes")
parser.add_argument("--cells", type=int, default=2)
parser.add_argument("--width", type=int, default=16, help="channels")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint")


def judge(images, labels):
    """Return how many are right."""
    return {"right": (model(images).argmax(axis=1) == labels).sum()}


args = parser.parse_args()
paddle.seed(args.seed)
model, side = make(args)
optimizer = paddle.optimizer.Momentum(args.lr, parameters=model.parameters())
train_set, validation_set, test_set = (Part(name, side) for name in ("train", "validation", "test"))
loop = elastic.Loop(
    model, optimizer, train_set, batch_size=64, epochs=args.epochs, checkpoint=args.checkpoint
)
for epoch in loop.epochs():
    model.train()
    for step in epoch:
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        step.update()
    model.eval()
    right = loop.evaluate(validation_set, judge, batch_size=256)["right"]
    if epoch.number == args.epochs - 1:
        test = loop.evaluate(test_set, judge, batch_size=256)["right"]
        loop.log(test_accuracy=test / len(test_set))
    loop.log(accuracy=right / len(validation_set))
