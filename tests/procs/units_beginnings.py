# SPDX-License-Identifier: Apache-2.0
"""Cases for `fsdp_ranks.py`: the first values of models in shards, beside those of one worker."""

from __future__ import annotations

import torch
from tests.procs.units_cases import Block
from torch import nn

from lockstep.sync.meta_device import initialise
from lockstep.sync.parameter_shards import gather_whole
from lockstep.sync.shard_units import find_units
from lockstep.sync.sharded_sync import ShardedSync


class RandomFeatures(nn.Module):
    """Buffers alone; it puts other tensors in their place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("phases", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        self.phases = torch.rand_like(self.phases)


class NetOfFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = RandomFeatures()
        self.blocks = nn.Sequential(Block(), Block())


def several_models_on_meta(group):
    """They begin as with one worker, which gives them their values one after the other."""

    def made():
        with torch.device("meta"):
            return [NetOfFeatures(), RandomFeatures(), NetOfFeatures()]

    ours, truths = made(), made()
    torch.manual_seed(5)
    for module in truths:
        units = find_units(module, [Block]) if any(True for _ in module.parameters()) else {}
        initialise(module, units.values(), torch.device("cpu"))
    torch.manual_seed(5 + group.rank)  # rank 0's values are those of all
    params = [param for module in ours for param in module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    ShardedSync(ours, group, [optimizer], shard=[Block])
    pairs = [
        (gather_whole(one), other)
        for ours_, truth in zip(ours, truths, strict=True)
        for one, other in zip(
            (*ours_.parameters(), *ours_.buffers()),
            (*truth.parameters(), *truth.buffers()),
            strict=True,
        )
    ]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


SAME = [several_models_on_meta]
