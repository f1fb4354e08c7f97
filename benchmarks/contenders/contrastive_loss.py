# SPDX-License-Identifier: Apache-2.0
"""The loss of CLIP over the rows of two ranks, forward and backward: seconds, and peak memory.

    torchrun --nproc-per-node 2 contrastive_loss.py WAY BATCH REPETITIONS

Only the loss: the embeddings are there already. WAY is `lockstep` or one of the dense forms.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize

from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 256
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
OPEN_CLIP = "OPEN_CLIP_FOLDER"


def dense(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    similar = scale * a @ b.T
    labels = torch.arange(len(a))
    return (cross_entropy(similar, labels) + cross_entropy(similar.T, labels)) / 2


def put_back(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Gather without gradient, put one's own rows back, multiply the loss by the ranks."""

    def gathered(rows: torch.Tensor) -> torch.Tensor:
        everyone = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, rows.detach())
        everyone[dist.get_rank()] = rows
        return torch.cat(everyone)

    return dense(gathered(a), gathered(b), scale) * dist.get_world_size()


def torch_gather(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from torch.distributed.nn.functional import all_gather

    return dense(torch.cat(all_gather(a)), torch.cat(all_gather(b)), scale)


def lockstep_loss(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    import lockstep

    return lockstep.info_nce(a, b, scale)


def open_clip_loss() -> Callable[..., torch.Tensor]:
    """Its loss in its best mode. The file alone: the package would import vision models."""
    path = Path(os.environ[OPEN_CLIP], "open_clip", "loss.py")
    specification = importlib.util.spec_from_file_location("open_clip_loss", path)
    assert specification is not None
    assert specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    loss: Callable[..., torch.Tensor] = module.ClipLoss(
        local_loss=True,
        gather_with_grad=True,
        cache_labels=True,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    return loss


def mebibytes(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def once(loss: Callable[..., torch.Tensor], batch: int) -> tuple[float, float, float, float]:
    """Of one forward and backward: seconds, mebibytes, the loss, and processor time."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    a, b = (
        normalize(torch.randn(batch, WIDTH, generator=generator)).requires_grad_() for _ in "ab"
    )
    scale = torch.tensor(14.0, requires_grad=True)
    dist.barrier()
    CLEAR.write_text("5")
    before = mebibytes("VmRSS")
    start, busy = time.perf_counter(), time.process_time()
    value = loss(a, b, scale)
    value.backward()
    seconds = time.perf_counter() - start
    busy = time.process_time() - busy
    return seconds, mebibytes("VmHWM") - before, float(value.detach()), busy


def main() -> None:
    way, batch, repetitions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    ways = {"lockstep": lockstep_loss, "put-back": put_back, "torch": torch_gather}
    loss = open_clip_loss() if way == "open_clip" else ways[way]
    once(loss, 64)
    local = batch // dist.get_world_size()
    runs = torch.tensor([once(loss, local) for _ in range(repetitions)], dtype=torch.float64)
    # The slowest rank's fastest run, the largest rank's largest.
    found = torch.stack([runs[:, 0].min(), runs[:, 1].max(), runs[0, 2], runs[:, 3].min()])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        seconds, memory, value, busy = found.tolist()
        report(seconds=seconds, mebibytes=memory, loss=value, processor_seconds=busy)
    dist.barrier()
    dist.destroy_process_group()
    # As in torchrun_startup.py: gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
