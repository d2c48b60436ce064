"""A training whose samples cost time, but hardly any processor time: as if a device computed them.

So trainers do not fight for the cores of a small machine, and jobs that run at the same time go as
fast as each would alone. All else is real: processes, groups, changes, checkpoints, the ledger.
"""

import argparse
import time

from pod_runtime import elastic

BATCH = 48
SHARDS = 12  # so 1, 2, 3, 4, 6 and 12 trainers have as much to do


def main() -> None:
    import torch  # here, since other programs read the numbers above
    from torch import nn
    from torch.utils.data import DataLoader

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sample_s", type=float, required=True)
    parser.add_argument("--checkpoint", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(BATCH * args.steps, 16, generator=torch.Generator().manual_seed(1))
    loader: DataLoader[torch.Tensor] = DataLoader(images, batch_size=BATCH, shuffle=True)
    loop = elastic.Loop(
        model, optimizer, loader, epochs=1, checkpoint=args.checkpoint, shards=SHARDS
    )
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                time.sleep(args.sample_s * len(batch))
                step.backward(model(batch).square().mean())
            step.update()


if __name__ == "__main__":
    main()
