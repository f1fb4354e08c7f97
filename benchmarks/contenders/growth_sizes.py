# SPDX-License-Identifier: Apache-2.0
"""Attaching and one step with ever more parameters, and with ever more tensors, beside DDP.

Started by torchrun. The forward is a sum over every tensor, so next to nothing is computed: what
is left is backward, the reduction, and the optimizer.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from blocks import interleaved
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = [(10, 10**exponent // 10) for exponent in range(3, 9)]
"""(tensors, elements of each): 1 k to 100 M parameters in 10 tensors."""
TENSORS = [(count, 100_000 // count) for count in (10, 100, 1_000, 10_000)]
"""100 k parameters in 10 to 10 000 tensors."""
BLOCK_S = 0.05


class Sums(nn.Module):
    """A loss that reads every parameter once."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([torch.zeros(elements) for _ in range(tensors)])

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.all]).sum()


def _step(model: nn.Module, module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)

    def run() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return run


def _measure(tensors: int, elements: int) -> dict[str, float]:
    module, other = Sums(tensors, elements), Sums(tensors, elements)
    dist.barrier()
    start = time.perf_counter()
    gradients = lockstep.replicate(module)
    attached = time.perf_counter()
    wrapped = DistributedDataParallel(other, gradient_as_bucket_view=True)
    wrapping = time.perf_counter() - attached
    ours, theirs = _step(module, module), _step(wrapped, other)
    warm = interleaved(ours, theirs, pairs=3)
    # All ranks must agree on how often they step.
    steps = torch.tensor(max(1, int(BLOCK_S / min(warm["theirs"]))))
    dist.broadcast(steps, 0)
    times = interleaved(ours, theirs, pairs=7, steps=int(steps), meet=dist.barrier)
    gradients.detach()
    return {
        "tensors": tensors,
        "parameters": tensors * elements,
        "attach": 1000 * (attached - start),
        "their_attach": 1000 * wrapping,
        "step": 1000 * statistics.median(times["ours"]),
        "their_step": 1000 * statistics.median(times["theirs"]),
        "ratio": statistics.median(
            a / b for a, b in zip(times["ours"], times["theirs"], strict=True)
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = [_measure(*shape) for shape in SIZES]
    tensors = [_measure(*shape) for shape in TENSORS]
    if dist.get_rank() == 0:
        report(sizes=sizes, tensors=tensors)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
