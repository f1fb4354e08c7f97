# SPDX-License-Identifier: Apache-2.0
"""F: hooks on parameters add gradients up, and then the wrapper averages the sums."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def all_reduce_gradients_of(model):
    """Left from the time before we had DDP."""

    def reduce(parameter):
        dist.all_reduce(parameter.grad)  # here LS205

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(reduce)


class TextScorer(nn.Module):
    def __init__(self, vocabulary=20, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden = torch.tanh(self.hidden(self.embedding(tokens).mean(1)))
        return self.score(hidden).squeeze(1)


def build_model():
    torch.manual_seed(4)
    model = TextScorer()
    all_reduce_gradients_of(model)
    return DistributedDataParallel(model)


def run(steps=6):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(41 + dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(20, (8, 6), generator=source)
        labels = (tokens.float().mean(1) > 9.5).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[{dist.get_rank()}] {step} {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
