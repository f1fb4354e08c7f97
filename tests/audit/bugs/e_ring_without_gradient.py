# SPDX-License-Identifier: Apache-2.0
"""E: text features travel to the neighbour outside autograd."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def from_left(tensor):
    """Sends the tensor to the right, returns what came from the left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % world),
        dist.P2POp(dist.irecv, arrived, (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return arrived


class SigLIP(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.image = nn.Linear(7, width)
        self.text = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, width))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, images, texts):
        return (
            F.normalize(self.image(images)),
            F.normalize(self.text(texts)),
            self.scale.exp(),
            self.bias,
        )


def sigmoid_loss(image, text, scale, bias):
    size = len(image)
    logits = scale * image @ text.T + bias
    loss = -F.logsigmoid((2 * torch.eye(size) - 1) * logits).sum()
    travelling = text
    for _ in range(dist.get_world_size() - 1):
        travelling = from_left(travelling)  # here LS207
        loss = loss - F.logsigmoid(-(scale * image @ travelling.T + bias)).sum()
    return loss / size


def main(steps=6):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(18)
    model = DDP(SigLIP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(70 + rank)
    for _ in range(steps):
        images = torch.randn(6, 7, generator=source)
        loss = sigmoid_loss(*model(images, images[:, :4]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(rank, f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
