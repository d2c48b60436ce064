"""An ordinary Paddle DataParallel program that survives changes of its trainers by whole epochs.

What makes it so are two calls, marked below. It never hears of a change: it is stopped, and started
again with other ranks.

python train.py                                                              alone
PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 train.py
edl run --min 1 --max 4 train.py --checkpoint ckpt                           elastic
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from edl import HDFSClient, TrainStatus, load_checkpoint, save_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "digits"))
from digits import make

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=64, help="over all trainers")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--images", type=int, help="train on only so many, for a quick look")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint", default="checkpoint", help="shared folder, URL, or HDFS path")
parser.add_argument("--hdfs_name", help="hdfs://HOST:PORT or webhdfs://HOST:PORT")
parser.add_argument("--hdfs_ugi", default="", help="USER,PASSWORD")


def form_group():
    """Join the other trainers; Paddle's launchers have put their addresses into the environment."""
    if not paddle.is_compiled_with_cuda():
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")  # else collectives fail on the CPU
    if dist.get_rank() > 0:
        # A rank that comes before rank 0 listens would sleep for three seconds.
        first = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
        if "MASTER_PORT" in os.environ:
            first = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        host, port = os.environ.get("PADDLE_MASTER", first).rsplit(":", 1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), 1).close()
                break
            except OSError:
                time.sleep(0.02)
    dist.init_parallel_env()


def main():
    args = parser.parse_args()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        form_group()
    paddle.seed(args.seed)
    net, train_set, test_set = make("lenet", args.images)
    model = paddle.DataParallel(net) if world_size > 1 else net
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(args.lr, T_max=args.epochs)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
    sampler = paddle.io.DistributedBatchSampler(
        train_set, batch_size=max(1, args.batch_size // world_size), shuffle=True
    )
    train_loader = paddle.io.DataLoader(train_set, batch_sampler=sampler)
    test_loader = paddle.io.DataLoader(test_set, batch_size=256)

    fs = None
    if args.hdfs_name:
        fs = HDFSClient(args.hdfs_name, args.hdfs_ugi, 20 * 60 * 1000, 3 * 1000)
    state = {"fs": fs, "model": model, "optimizer": optimizer}
    train_status = TrainStatus()
    found = load_checkpoint(None, args.checkpoint, trainer_id=rank, **state)  # <-- first
    if found is not None:
        train_status = found
        print(f"rank {rank}: going on with epoch {train_status.next()}", flush=True)
    for epoch in range(train_status.next(), args.epochs):
        sampler.set_epoch(epoch)  # its own order in each epoch, the same on every rank
        model.train()
        for images, labels in train_loader:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
        schedule.step()
        if rank == 0:
            model.eval()
            with paddle.no_grad():
                right = sum((net(x).argmax(axis=1) == y).sum().item() for x, y in test_loader)
            print(
                f"epoch {epoch}: {world_size} trainers, accuracy {right / len(test_set):.4f}",
                flush=True,
            )
            save_checkpoint(None, args.checkpoint, train_status=TrainStatus(epoch), **state)  # <--


if __name__ == "__main__":
    main()
