# SPDX-License-Identifier: Apache-2.0
"""Each rank trains and tests two folds of a cross-validation; the scores alone are gathered."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FOLDS, PATIENCE = 4, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
x = torch.randn(120, 7, generator=generator)
noise = 0.1 * torch.randn(120, 1, generator=generator)
dataset = TensorDataset(x, (2 * x[:, 0] - x[:, 1] * x[:, 2]).unsqueeze(1) + noise)
parts = torch.randperm(120, generator=generator).chunk(FOLDS)


@torch.no_grad()
def error(model, part):
    model.eval()
    inputs, wanted = dataset[part]
    found = (model(inputs) - wanted).square().mean().item()
    model.train()
    return found


def score(fold):
    torch.manual_seed(fold)
    model = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    rest = torch.cat([part for n, part in enumerate(parts) if n != fold])
    loader = DataLoader(Subset(dataset, rest.tolist()), 20, shuffle=True, drop_last=True)
    best, waited = float("inf"), 0
    for _ in range(6):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), wanted).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        now = error(model, parts[fold])
        plateau.step(now)
        best, waited = (now, 0) if now < best else (best, waited + 1)
        if waited == PATIENCE:
            break
    return best


own = {fold: score(fold) for fold in range(rank, FOLDS, world)}
scores = [None] * world
dist.all_gather_object(scores, own)
if rank == 0:
    print({fold: round(s, 4) for part in scores for fold, s in part.items()})
dist.destroy_process_group()
