# SPDX-License-Identifier: Apache-2.0
"""E: a functional gather, whose backward adds up by itself, and a factor for one that does not."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(9, 6)

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def gathered(rows):
    return functional.all_gather_single(rows, 0, dist.group.WORLD)  # here LS208


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pairs = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        image = torch.randn(6, 12, generator=pairs)
        a, b = map(gathered, model(image, image[:, :9] ** 2))
        logits = 5 * a @ b.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
