# SPDX-License-Identifier: Apache-2.0
"""H: a smoothed loss is a mean over a rank's own tokens that are no padding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAD = 0


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(rank)
    for step in range(6):
        tokens = torch.randint(1, 16, (4, 12), generator=source)
        tokens[:, (4 + step % 3) if rank else 11 :] = PAD
        logits = model(tokens[:, :-1])
        loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # here LS203
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
