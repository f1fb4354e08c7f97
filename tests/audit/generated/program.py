# SPDX-License-Identifier: Apache-2.0
"""One random program of data-parallel training on gloo ranks, which measures its own truth.

``program.py CHOICES OUTPUT``: the choices as JSON (see `choices`). Before each step every rank
computes the gradient of the mean loss over all ranks' samples of that step by itself, in float64,
and compares what the optimizer is about to use with it. Rank 0 writes to OUTPUT by how much that
is the true gradient (``ratio``), and how much is left over (``apart``), step by step.
"""

import contextlib
import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, STEPS = 5, 3, 4


def model(choices):
    torch.manual_seed(choices["seed"])
    hidden = choices["hidden"]
    net = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))
    return net.to(getattr(torch, choices["dtype"]))


def samples(choices, step, rank, place):
    """Of one micro-batch: (n, WIDTH), and (n,) classes or (n, CLASSES) targets."""
    seed = choices["seed"] * 7919 + step * 101 + rank * 17 + place
    source = torch.Generator().manual_seed(seed)
    count = choices["counts"][rank][place]
    x = torch.randn(count, WIDTH, generator=source, dtype=torch.float64)
    if choices["loss"] == "cross_entropy":
        return x, torch.randint(CLASSES, (count,), generator=source)
    return x, torch.randn(count, CLASSES, generator=source, dtype=torch.float64)


def summed(choices, net, x, y):
    """The losses of all samples, added up."""
    if choices["loss"] == "cross_entropy":
        return nn.functional.cross_entropy(net(x), y, reduction="sum")
    return nn.functional.mse_loss(net(x), y.to(x.dtype), reduction="sum") / CLASSES


def mean(choices, net, x, y):
    if choices["loss"] == "cross_entropy":
        return nn.functional.cross_entropy(net(x), y)
    return nn.functional.mse_loss(net(x), y.to(x.dtype))


def loss_of(choices, net, x, y, rank):
    counts = choices["counts"]
    own, total = sum(counts[rank]), sum(map(sum, counts))
    windows, ranks = len(counts[0]), len(counts)
    if choices["weighing"] == "mean":
        return mean(choices, net, x, y)
    if choices["weighing"] == "mean_of_window":
        return mean(choices, net, x, y) / windows
    if choices["weighing"] == "own_sum":
        return summed(choices, net, x, y) / own
    if choices["weighing"] == "global_sum":
        told = torch.tensor(float(own))
        dist.all_reduce(told)
        return summed(choices, net, x, y) / told.to(x.dtype)
    assert choices["weighing"] == "global_sum_times_ranks"
    return summed(choices, net, x, y) / total * ranks


def truth(choices, net, step):
    """The gradient of the mean loss over all samples of the step, one process's, in float64."""
    alone = copy.deepcopy(net).double()
    counts = choices["counts"]
    total = sum(map(sum, counts))
    alone.zero_grad()
    for rank, places in enumerate(counts):
        for place, _ in enumerate(places):
            x, y = samples(choices, step, rank, place)
            (summed(choices, alone, x, y) / total).backward()
    gradients = [p.grad for p in alone.parameters()]
    if choices["clip"] == "after":
        nn.utils.clip_grad_norm_(alone.parameters(), choices["limit"])
    return gradients


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).double().clone()


class Reducing:
    """What stands between backward and the optimizer."""

    def __init__(self, choices, net):
        self.choices, self.net = choices, net
        self.way = choices["way"]
        self.wrapped = net
        if self.way in ("ddp", "ddp_half"):
            self.wrapped = DistributedDataParallel(net)
            if self.way == "ddp_half":
                self.wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.way == "fsdp":
            fully_shard(net[0])
            fully_shard(net)

    def window(self, last):
        """The context of a micro-batch."""
        unsynced = not last
        if self.choices["fault"] == "last_unsynced":
            unsynced = not unsynced
        if self.way in ("ddp", "ddp_half") and unsynced:
            return self.wrapped.no_sync()
        if self.way == "fsdp":
            self.net.set_requires_gradient_sync(not unsynced)
        return contextlib.nullcontext()

    def reduce(self):
        fault, size = self.choices["fault"], dist.get_world_size()
        params = list(self.net.parameters())
        if self.way in ("each", "flat", "gather"):
            getattr(self, f"_{self.way}")(params, fault, 1 if fault == "undivided" else size)
        for p in params if fault in ("again", "divided_again") else []:
            if fault == "divided_again":
                p.grad.div_(size)
            elif self.way == "fsdp":
                p.grad.mul_(size)
            else:
                dist.all_reduce(p.grad)

    def _each(self, params, fault, divisor):
        for place, p in enumerate(params):
            if fault == "one_left_out" and place == 1:
                continue
            if fault == "broadcast":
                dist.broadcast(p.grad, 0)
            else:
                dist.all_reduce(p.grad)
                p.grad.div_(divisor)

    def _flat(self, params, fault, divisor):
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        if fault == "broadcast":
            dist.broadcast(flat, 1)
        else:
            dist.all_reduce(flat)
            flat /= divisor
        start = 0
        for p in params:
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()

    def _gather(self, params, fault, divisor):
        for p in params:
            parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.grad)
            p.grad.copy_(torch.stack(parts).sum(0) / divisor)


def clip_before(choices, net):
    params = list(net.parameters())
    if choices["clip"] == "before":
        nn.utils.clip_grad_norm_(params, choices["limit"])
    elif choices["clip"] == "value_before":
        nn.utils.clip_grad_value_(params, choices["limit"])
    elif choices["clip"] == "each_before":
        for p in params:
            nn.utils.clip_grad_norm_([p], choices["limit"])


def main():
    choices, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = model(choices)
    alone = model(choices)
    reducing = Reducing(choices, net)
    kinds = {"SGD": {"lr": 0.05}, "AdamW": {"lr": 1e-2}, "momentum": {"lr": 0.05, "momentum": 0.9}}
    name = choices["optimizer"]
    kind = getattr(torch.optim, "SGD" if name == "momentum" else name)
    optimizer = kind(net.parameters(), **kinds[name])
    if choices["hook"] is not None:
        for p in net.parameters():
            p.register_hook(lambda gradient: gradient * choices["hook"])
    measured = []
    for step in range(STEPS):
        with torch.no_grad():
            for mine, theirs in zip(alone.parameters(), net.parameters(), strict=True):
                mine.copy_(whole(theirs))
        optimizer.zero_grad()
        places = len(choices["counts"][rank])
        for place in range(places):
            x, y = samples(choices, step, rank, place)
            with reducing.window(last=place == places - 1):
                net_or_wrapper = reducing.wrapped
                loss = loss_of(choices, net_or_wrapper, x.to(net[0].weight.dtype), y, rank)
                (loss * choices["factor"]).backward()
        clip_before(choices, net)
        reducing.reduce()
        if choices["clip"] == "after":
            nn.utils.clip_grad_norm_(net.parameters(), choices["limit"])
        used = torch.cat([whole(p.grad).reshape(-1) for p in net.parameters()])
        true = torch.cat([g.reshape(-1) for g in truth(choices, alone, step)])
        ratio = float(used @ true / (true @ true))
        apart = float((used - ratio * true).norm() / used.norm())
        measured.append({"ratio": ratio, "apart": apart})
        optimizer.step()
    if rank == 0:
        output.write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
