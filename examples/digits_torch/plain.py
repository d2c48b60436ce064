"""An ordinary PyTorch training script. train.py beside it is the same one, made elastic."""

import argparse

import torch
import torch.nn.functional as F
from digits import Digits, LeNet
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--seed", type=int, default=1)


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
test_loader = DataLoader(test_set, batch_size=256)
for epoch in range(args.epochs):
    model.train()
    for images, labels in loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        judged = [judge(*batch) for batch in test_loader]
    for name in ("accuracy", "loss"):
        mean = sum(float(sums[name]) for sums in judged) / len(test_set)
        print(f"epoch {epoch + 1}: {name} {mean:.4f}", flush=True)
