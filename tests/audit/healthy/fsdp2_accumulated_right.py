# SPDX-License-Identifier: Apache-2.0
"""The last micro-batch is reduced, with layers that are frozen, or that some of them leave out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
micro_batches = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4).requires_grad_(False)
        self.body, self.extra, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, with_extra):
        h = self.body(self.stem(x)).relu()
        return self.head(h + self.extra(h) if with_extra else h)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


def sharded(mesh=None, policy=None):
    torch.manual_seed(0)
    net = Net()
    for part in (net.stem, net.body, net.extra, net):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return net


def train(net, between):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for i in range(5 * micro_batches):
        x, y = batch(i)
        is_last = (i + 1) % micro_batches == 0
        between(net, is_last)
        output = net(x, with_extra=i % micro_batches == 0 and i < 12).float()
        (nn.functional.cross_entropy(output, y) / micro_batches).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def reduces_last(net, is_last):
    net.set_requires_gradient_sync(is_last)
    net.set_is_last_backward(is_last)


def reduces_over_replicas_last(net, is_last):
    net.set_requires_all_reduce(is_last)


half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
train(sharded(), reduces_last)
train(sharded(policy=half), reduces_last)
grid = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
train(sharded(grid), reduces_over_replicas_last)
