"""An elastic PyTorch training script: plain.py beside it, with a dozen lines changed.

python train.py                                        alone, as any script
edl run --min 1 --max 4 train.py --checkpoint ckpt     elastic, on this machine
"""

import argparse

import torch
import torch.nn.functional as F
from digits import Digits, LeNet
from torch.utils.data import DataLoader

from edl import elastic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint", default="checkpoint")


def judge(images, labels):
    """Return sums over a batch of test images."""
    scores = model(images)
    return {
        "accuracy": (scores.argmax(1) == labels).sum(),
        "loss": F.cross_entropy(scores, labels, reduction="sum"),
    }


args = parser.parse_args()
torch.manual_seed(args.seed)
model, train_set, test_set = LeNet(), Digits("train"), Digits("test")
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
loop = elastic.Loop(
    model, optimizer, loader, epochs=args.epochs, checkpoint=args.checkpoint, promise="statistics"
)
for epoch in loop.epochs():
    model.train()
    for step in epoch:
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        step.update()
    model.eval()
    sums = loop.evaluate(test_set, judge, batch_size=256)
    loop.log(**{name: total / len(test_set) for name, total in sums.items()})
