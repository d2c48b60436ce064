"""An ordinary Paddle training script. train.py beside it is the same one, made elastic."""

import argparse

import paddle
import paddle.nn.functional as F
from digits import make

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=["lenet", "resnet50"], default="lenet")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--images", type=int, help="train on only so many, for a quick look")
parser.add_argument("--seed", type=int, default=1)


def judge(images, labels):
    """Return sums over a batch of test images."""
    scores = model(images)
    return {
        "accuracy": (scores.argmax(axis=1) == labels).sum(),
        "loss": F.cross_entropy(scores, labels, reduction="sum"),
    }


args = parser.parse_args()
paddle.seed(args.seed)
model, train_set, test_set = make(args.model, args.images)
optimizer = paddle.optimizer.Momentum(args.lr, parameters=model.parameters())

loader = paddle.io.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
test_loader = paddle.io.DataLoader(test_set, batch_size=256)
for epoch in range(args.epochs):
    model.train()
    for images, labels in loader:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
    model.eval()
    with paddle.no_grad():
        judged = [judge(*batch) for batch in test_loader]
    for name in ("accuracy", "loss"):
        mean = sum(float(sums[name]) for sums in judged) / len(test_set)
        print(f"epoch {epoch + 1}: {name} {mean:.4f}", flush=True)
