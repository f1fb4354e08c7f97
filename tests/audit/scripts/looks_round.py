# SPDX-License-Identifier: Apache-2.0
"""Asks what a program can ask of Python and torch, and says what is not as it should be."""

import dataclasses
import os
import pickle
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class OwnNames(nn.Linear):
    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)


def say(line):
    """At once: `print` writes the end of the line by itself, and the ranks share the output."""
    sys.stdout.write(f"{line}\n")


def trained(rate, steps):
    config = locals()
    model = DistributedDataParallel(OwnNames(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(max_norm=1.0, parameters=iter(model.parameters()))
        dist.all_reduce(loss.data)
        optimizer.step()
    return config


say(f"before anything else {os.environ['RANK']}")
here = os.getcwd()
os.chdir("/")
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
wrong = [
    name
    for name, holds in {
        "annotations": Settings.__annotations__ == {"rate": float},
        "file": os.path.isfile(__file__),
        "builtins": __builtins__.print is print,
        "folder": here not in sys.path,
        "pickle": pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce,
        "clip": pickle.loads(pickle.dumps(nn.utils.clip_grad_norm_)) is nn.utils.clip_grad_norm_,
        "one": dist.barrier is dist.distributed_c10d.barrier,
        "locals": trained(0.1, 2) == {"rate": 0.1, "steps": 2},
    }.items()
    if not holds
]
try:
    nn.utils.clip_grad_norm_([])
except TypeError as error:
    wrong += [] if "clip_grad_norm_()" in str(error) else [str(error)]
say(f"rank {dist.get_rank()}: {wrong}")
if dist.get_rank():
    os.kill(os.getpid(), 9)
dist.destroy_process_group()
