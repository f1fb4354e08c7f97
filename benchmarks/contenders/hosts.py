# SPDX-License-Identifier: Apache-2.0
"""A step of `lockstep.replicate` against DDP's on two hosts, whose ranks are neighbours.

`benchmarks.network_namespaces` starts it, once for each rank.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from blocks import Pairs, interleaved
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = 2


def _bytes_over_the_cable() -> int:
    folder = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


class _Counted:
    """A step, and how much went over the cable in each call."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self.mebibytes: list[float] = []

    def __call__(self) -> None:
        before = _bytes_over_the_cable()
        self._step()
        self.mebibytes.append((_bytes_over_the_cable() - before) / 2**20)


def _measure(options: argparse.Namespace) -> dict[str, Pairs]:
    width = options.width
    torch.manual_seed(0)
    samples = torch.randn(options.batch_size, width)

    def make_side(wrap: Callable[[nn.Module], object]) -> _Counted:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        wrapped = wrap(model)
        called = wrapped if isinstance(wrapped, nn.Module) else model

        def step() -> None:
            optimizer.zero_grad()
            called(samples).square().mean().backward()
            optimizer.step()

        return _Counted(step)

    ours = make_side(lockstep.replicate)
    theirs = make_side(lambda one: DistributedDataParallel(one, gradient_as_bucket_view=True))
    interleaved(ours, theirs, pairs=WARM_UP, meet=dist.barrier)
    times = interleaved(ours, theirs, pairs=options.pairs, meet=dist.barrier)
    carried = {"ours": ours.mebibytes[WARM_UP:], "theirs": theirs.mebibytes[WARM_UP:]}
    return {"seconds": times, "mebibytes": carried}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048, help="of six layers: 25 M parameters")
    parser.add_argument("--batch-size", type=int, default=16, help="of one rank")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = _measure(options)
    if dist.get_rank() == 0:
        report(**measured)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
