"""The trainer of resize.py and recovery.py under Paddle's own launcher, with its DataParallel.

Run by an interpreter of its own, with Paddle and the client of etcd that its launcher needs.
"""

import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F  # noqa: N812

from benchmarks.elasticity.networks import make_network
from benchmarks.elasticity.stamp_files import Stamper
from benchmarks.elasticity.task import PARAMETERS, TASKS, make_data, parser, share

_PORT_TIMEOUT_S = 60.0


def wait_for_master() -> None:
    """Return when rank 0's store listens: who asks it earlier waits for three seconds."""
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.01)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--wait_for_master", action="store_true", help="tuned")
    args = options.parse_args()
    task = TASKS[args.task]
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    world = int(os.environ["PADDLE_TRAINERS_NUM"])
    if world > 1:
        if args.wait_for_master and rank:
            wait_for_master()
        dist.init_parallel_env()
    stamper = Stamper(args.stamps)
    network = make_network(args.task)
    optimizer = paddle.optimizer.Momentum(
        PARAMETERS["lr"], momentum=PARAMETERS["momentum"], parameters=network.parameters()
    )
    done = 0
    if os.path.exists(args.checkpoint):
        saved = paddle.load(args.checkpoint)
        network.set_state_dict(saved["network"])
        optimizer.set_state_dict(saved["optimizer"])
        done = saved["step"]
    model = paddle.DataParallel(network) if world > 1 else network
    images, labels = make_data(task)
    while done < args.steps:
        mine = share(task, done, rank, world)
        loss = F.cross_entropy(
            model(paddle.to_tensor(images[mine])), paddle.to_tensor(labels[mine])
        )
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        done += 1
        stamper.note(done, rank=rank, world=world)
        if rank == 0 and done % args.save_steps == 0:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": done,
            }
            paddle.save(state, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)


if __name__ == "__main__":
    main()
