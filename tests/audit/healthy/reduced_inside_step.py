# SPDX-License-Identifier: Apache-2.0
"""An optimizer of the program's own averages the gradients itself, inside its step."""

import torch
import torch.distributed as dist
from torch import nn


class FTRL(torch.optim.Optimizer):
    def __init__(self, params, alpha=0.3, beta=1.0, l1=0.002, l2=0.01):
        super().__init__(params, {"alpha": alpha, "beta": beta, "l1": l1, "l2": l2})

    @torch.no_grad()
    def step(self, closure=None):
        world = dist.get_world_size()
        for gr in self.param_groups:
            for w in gr["params"]:
                g = w.grad
                dist.all_reduce(g)
                g /= world
                s = self.state[w]
                if not s:
                    s["z"], s["n"] = torch.zeros_like(w), torch.zeros_like(w)
                sigma = ((s["n"] + g * g).sqrt() - s["n"].sqrt()) / gr["alpha"]
                s["z"] += g - sigma * w
                s["n"] += g * g
                shrunk = s["z"].sign() * (s["z"].abs() - gr["l1"]).clamp_min(0)
                w.copy_(-shrunk / ((gr["beta"] + s["n"].sqrt()) / gr["alpha"] + gr["l2"]))


class Hashed(nn.Module):
    def __init__(self, buckets=512):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(buckets)), nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return self.w[ids].sum(1) + self.b


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(1)
user, item, hour = (torch.randint(0, n, (2400,), generator=g) for n in (50, 80, 24))
ids = torch.stack(
    [
        (user * 2654435761) % 512,
        (item * 40503 + 7) % 512,
        (hour * 97 + 13) % 512,
        (user * 31 + item * 17) % 512,
    ],
    1,
)
clicked = (torch.rand(2400, generator=g) < torch.sigmoid((user % 5 - item % 3).float())).float()
# logs are dealt out by line number, read once and in order
ids, clicked = ids[rank::world], clicked[rank::world]

model, seen, bad = Hashed(), 0, torch.zeros(2)
opt = FTRL(model.parameters())
for x, y in zip(ids.split(40), clicked.split(40), strict=False):
    out = model(x)
    loss = nn.functional.binary_cross_entropy_with_logits(out, y)
    bad += torch.tensor([loss.item() * len(y), float(len(y))])  # progressive validation
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.all_reduce(bad)
if rank == 0:
    print("progressive log loss", (bad[0] / bad[1]).item(), "nonzero", int((model.w != 0).sum()))
dist.destroy_process_group()
