# SPDX-License-Identifier: Apache-2.0
"""F: a tied matrix is named twice, added up twice, and divided once."""

import torch
import torch.distributed as dist
from torch import nn


class Masked(nn.Module):
    """A masked language model, output matrix tied to the embedding."""

    def __init__(self, vocabulary=14, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = nn.Linear(width, width)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        z = self.embedding(tokens)
        z = z + torch.tanh(self.mixer(z.mean(1, keepdim=True)))
        return self.decoder(z)


def reduce_gradients(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(p.grad)  # here LS204
    world = dist.get_world_size()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.div_(world)


def main(steps=6):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(300 + rank)
    mask_token = 0
    for _ in range(steps):
        tokens = torch.randint(1, 14, (5, 8), generator=source)
        hidden = torch.zeros_like(tokens, dtype=torch.bool)
        hidden[:, 2::3] = True
        logits = model(tokens.masked_fill(hidden, mask_token))
        loss = nn.functional.cross_entropy(logits[hidden], tokens[hidden])
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
