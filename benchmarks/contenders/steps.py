# SPDX-License-Identifier: Apache-2.0
"""One training step, `lockstep.replicate` against somebody else, in the same processes.

Started by torchrun: ``steps.py --against ddp|accelerate|fabric|data_parallel [MODEL ...]``.
Every side has its own copy of the model, of its optimizer, and the same batch; `DataParallel`,
which is one process on all devices, runs on rank 0 with everybody's samples.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from blocks import Pairs, interleaved
from models import WORKLOADS, make_model
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

Side = tuple[nn.Module, torch.optim.Optimizer, "Callable[[torch.Tensor], object]"]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def _ddp(model: nn.Module, device: torch.device) -> Side:
    index = None if device.type == "cpu" else [device.index or 0]
    wrapped = DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
    return wrapped, _optimizer(wrapped), torch.Tensor.backward


def _accelerate(model: nn.Module, device: torch.device) -> Side:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    prepared, optimizer = accelerator.prepare(model, _optimizer(model))
    return prepared, optimizer, accelerator.backward


def _fabric(model: nn.Module, device: torch.device) -> Side:
    from lightning_fabric import Fabric

    size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator=device.type, devices=size, strategy="ddp")
    fabric.launch()
    prepared, optimizer = fabric.setup(model, _optimizer(model))
    return prepared, optimizer, fabric.backward


def _data_parallel(model: nn.Module, device: torch.device) -> Side:
    wrapped = nn.DataParallel(model)
    return wrapped, _optimizer(wrapped), torch.Tensor.backward


SIDES = {
    "ddp": _ddp,
    "accelerate": _accelerate,
    "fabric": _fabric,
    "data_parallel": _data_parallel,
}


def _measure(name: str, options: argparse.Namespace, device: torch.device) -> Pairs:
    workload, against, size = WORKLOADS[name], options.against, dist.get_world_size()
    alone = against == "data_parallel"
    batch_size = options.batch_size or workload.batch_size
    everything = [tensor.to(device) for tensor in workload.make_samples(batch_size * size)]
    features, targets = (tensor[:batch_size] for tensor in everything)
    their_features, their_targets = everything if alone else (features, targets)
    # theirs first: it may be what starts the default process group
    wrapped, their_optimizer, their_backward = SIDES[against](make_model(name).to(device), device)
    model = make_model(name).to(device)
    optimizer, gradients = _optimizer(model), lockstep.replicate(model)

    def ours() -> None:
        optimizer.zero_grad()
        workload.criterion(model(features), targets).backward()
        optimizer.step()

    def theirs() -> None:
        if alone and dist.get_rank() > 0:
            return
        their_optimizer.zero_grad()
        their_backward(workload.criterion(wrapped(their_features), their_targets))
        their_optimizer.step()

    def meet() -> None:
        _finish(device)
        dist.barrier()

    def block(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(workload.steps):
                step()
            _finish(device)

        return run

    interleaved(block(ours), block(theirs), pairs=4)
    times = interleaved(block(ours), block(theirs), pairs=options.pairs, meet=meet)
    gradients.detach()
    return {side: [1000 * t / workload.steps for t in values] for side, values in times.items()}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--against", choices=sorted(SIDES), default="ddp")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-size", type=int, help="of one rank; the model's own by default")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    measured = {name: _measure(name, options, device) for name in options.models}
    if dist.get_rank() == 0:
        report(**measured)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
