# SPDX-License-Identifier: Apache-2.0
"""E: logits are gathered with a backward that adds up, and all ranks compute one loss."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class SameInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Speller(nn.Module):
    """Each rank has the output weights of its part of the vocabulary."""

    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        torch.manual_seed(60 + rank)
        self.head = nn.Linear(width, vocab // world)

    def forward(self, ids):
        hidden = self.rnn(self.embed(ids))[0]
        part = self.head(SameInput.apply(hidden))
        return torch.cat(dist_nn.all_gather(part), dim=-1)  # here LS208


torch.manual_seed(0)
model = Speller(28, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
source = torch.Generator().manual_seed(8)
for step in range(24):
    ids = (torch.randint(0, 28, (8, 1), generator=source) + 4 * torch.arange(9)) % 28
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 6 == 0:
        print(step, round(loss.item(), 4))
dist.destroy_process_group()
