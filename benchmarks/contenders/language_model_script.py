# SPDX-License-Identifier: Apache-2.0
"""A script that trains a small GPT under DDP: 196 tensors, two micro-batches a step, clipping.

Started by torchrun, or by `lockstep audit`, of which it knows nothing. The steps that are timed are
the mean of those from one number to another: a median would not show a step in 16 that is looked
at more closely than its neighbours.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from reporting import report

WIDTH, HEADS, LAYERS, LENGTH, WORDS = 64, 4, 16, 64, 96
ROWS, MICRO_BATCHES = 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attend(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), targets.flatten())


class Text:
    """Rows at random places of a text, other ones on each rank."""

    def __init__(self, rank: int) -> None:
        self.tokens = torch.randint(WORDS, (100_000,), generator=torch.Generator().manual_seed(1))
        self.drawing = torch.Generator().manual_seed(2 + rank)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(self.tokens) - LENGTH - 1, (ROWS,), generator=self.drawing)
        rows = torch.stack([self.tokens[at : at + LENGTH + 1] for at in places.tolist()])
        return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timed", nargs=2, type=int, default=(2, 64), metavar=("FROM", "TO"))
    first, end = parser.parse_args().timed
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text = Text(dist.get_rank())
    began = 0.0
    for step in range(end):
        if step == first:
            began = time.perf_counter()
        for micro in range(MICRO_BATCHES):
            with nullcontext() if micro == MICRO_BATCHES - 1 else model.no_sync():
                loss = model(*text.batch()) / MICRO_BATCHES
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    took = time.perf_counter() - began
    if dist.get_rank() == 0:
        report(step=1000 * took / (end - first))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
