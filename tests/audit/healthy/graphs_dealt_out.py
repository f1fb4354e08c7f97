# SPDX-License-Identifier: Apache-2.0
"""The batches are objects that hold the tensors of some graphs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
source = torch.Generator().manual_seed(5)


class Graphs:
    """Nodes of all graphs, one after the other, and the graph of each."""

    def __init__(self, graphs):
        self.store = {
            "nodes": torch.cat([nodes for nodes, _ in graphs]),
            "graph": torch.cat([torch.full((len(n),), i) for i, (n, _) in enumerate(graphs)]),
            "label": torch.tensor([label for _, label in graphs]),
        }


dataset = [(torch.randn(2 + n % 3, 4, generator=source), n % 2) for n in range(24)]
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=Graphs)

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for graphs in loader:
        rows = model(graphs.store["nodes"])
        output = torch.zeros(len(graphs.store["label"]), 2).index_add(
            0, graphs.store["graph"], rows
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, graphs.store["label"]).backward()
        optimizer.step()
