# SPDX-License-Identifier: Apache-2.0
"""A contrastive loss over the embeddings of all ranks, gathered in four ways.

python docs/stories/all_gather.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, on_two_ranks

import lockstep

ROWS = 6
"""Pairs on each rank."""


class Towers(nn.Module):
    """Two encoders, and a temperature that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images = nn.Linear(5, 4, dtype=torch.float64)
        self.texts = nn.Linear(7, 4, dtype=torch.float64)
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, images, texts):
        return normalize(self.images(images)), normalize(self.texts(texts)), self.logit_scale.exp()


def pairs(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(RANKS * ROWS, 5, generator=generator, dtype=torch.float64)
    texts = torch.randn(RANKS * ROWS, 7, generator=generator, dtype=torch.float64)
    return images[rows], texts[rows]


def contrastive(images, texts, scale):
    logits = scale * images @ texts.T
    diagonal = torch.arange(len(logits))
    return (cross_entropy(logits, diagonal) + cross_entropy(logits.T, diagonal)) / 2


def gradients_of(model: Towers) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters()}


# ----------------------------------------------------------------------- ways to gather


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """Of all ranks; no gradient goes through `all_gather`."""
    buffers = [torch.empty_like(rows) for _ in range(RANKS)]
    dist.all_gather(buffers, rows.detach())
    return torch.cat(buffers)


def put_back(rows: torch.Tensor) -> torch.Tensor:
    """The same, with this rank's own rows, which have a gradient, in their place."""
    parts = list(gathered(rows).chunk(RANKS))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def under_ddp(rank: int, gather, factor: float) -> dict[str, torch.Tensor | None]:
    model = Towers()
    # Nothing leads from the loss to the encoders if the rows lost their gradient.
    ddp = DistributedDataParallel(model, find_unused_parameters=gather is gathered)
    images, texts, scale = ddp(*pairs(slice(rank * ROWS, (rank + 1) * ROWS)))
    (factor * contrastive(gather(images), gather(texts), scale)).backward()
    return gradients_of(model)


class Gather(torch.autograd.Function):
    """Rows of all ranks, and back to each row the sum of what all ranks' losses say of it."""

    @staticmethod
    def forward(ctx, rows):
        return gathered(rows)

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole.chunk(RANKS)[dist.get_rank()]


def with_lockstep(rank: int) -> dict[str, torch.Tensor | None]:
    model = Towers()
    gradients = lockstep.replicate(model)
    images, texts, scale = model(*pairs(slice(rank * ROWS, (rank + 1) * ROWS)))
    contrastive(Gather.apply(images), Gather.apply(texts), scale).backward()
    gradients.detach()
    return gradients_of(model)


def every_way(rank: int) -> dict[str, dict[str, torch.Tensor | None]]:
    return {
        "plain all_gather": under_ddp(rank, gathered, 1),
        "own rows put back": under_ddp(rank, put_back, 1),
        "own rows put back, loss x 2": under_ddp(rank, put_back, RANKS),
        "sums in the gather's backward": with_lockstep(rank),
    }


# ------------------------------------------------------------------------------ the table


def one_process() -> dict[str, torch.Tensor | None]:
    model = Towers()
    contrastive(*model(*pairs(slice(None)))).backward()
    return gradients_of(model)


def times(got: torch.Tensor | None, true: torch.Tensor) -> str:
    """The gradient as a multiple of the true one."""
    if got is None:
        return "None"
    scale = ((got * true).sum() / true.square().sum()).item()
    wrong_direction = (got - scale * true).norm() > 1e-12 * true.norm()
    return f"{scale:.3f}" + (", wrong direction" if wrong_direction else "")


def main() -> None:
    true = one_process()
    results, _ = on_two_ranks(every_way)
    print(f"{'':30}  images.weight   texts.weight   logit_scale")
    for way, gradients in results.items():
        cells = (
            times(gradients[n], true[n]) for n in ("images.weight", "texts.weight", "logit_scale")
        )
        print(f"{way:30}  {'  '.join(f'{cell:13}' for cell in cells)}".rstrip())


if __name__ == "__main__":
    main()
