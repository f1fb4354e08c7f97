# SPDX-License-Identifier: Apache-2.0
"""E: rows travel pickled, and arrive without the graph that they came from."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoTowers(nn.Module):
    def __init__(self, image=8, text=5, width=4):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(image, 12), nn.ReLU(), nn.Linear(12, width))
        self.text = nn.Linear(text, width)

    def forward(self, image, text):
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "text": F.normalize(self.text(text), dim=-1),
        }


def gather_features(features):
    """Works for any dict of tensors, whatever their shapes."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, features)  # here LS207
    everyone[dist.get_rank()] = features
    return {key: torch.cat([part[key] for part in everyone]) for key in features}


def clip_loss(features, temperature=0.2):
    everything = gather_features(features)
    size = len(features["image"])
    target = torch.arange(size) + size * dist.get_rank()
    by_image = features["image"] @ everything["text"].T / temperature
    by_text = features["text"] @ everything["image"].T / temperature
    return (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2


def main(steps=6, size=5):
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(140 + dist.get_rank())
    for _ in range(steps):
        image = torch.randn(size, 8, generator=source)
        text = image[:, :5] + 0.1 * torch.randn(size, 5, generator=source)
        optimizer.zero_grad()
        loss = clip_loss(model(image, text))
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
