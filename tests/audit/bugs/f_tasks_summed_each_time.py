# SPDX-License-Identifier: Apache-2.0
"""F: a learner of learners adds the gradients up after each of its tasks, and divides once."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

TASKS = 3


def prediction(x, weights):
    return torch.tanh(x @ weights[0] + weights[1]) @ weights[2]


def adapted(weights, x, y):
    gradients = torch.autograd.grad(mse_loss(prediction(x, weights), y), weights, create_graph=True)
    return [w - 0.02 * g for w, g in zip(weights, gradients, strict=True)]


def add_up(weights):
    flat = torch.cat([w.grad.reshape(-1) for w in weights])
    dist.all_reduce(flat)  # here LS204
    for w, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        w.grad.copy_(part.view_as(w))


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=g) for shape in ((1, 16), (16,), (16, 1))]
    for w in weights:
        w.requires_grad_()
    tasks = torch.Generator().manual_seed(40 + dist.get_rank())
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(TASKS):
            height, shift = torch.rand(2, generator=tasks)
            x = 4 * torch.rand(20, 1, generator=tasks) - 2
            y = (1 + height) * torch.sin(x + shift)
            inner = adapted(weights, x[:8], y[:8])
            (mse_loss(prediction(x[8:], inner), y[8:]) / TASKS).backward()
            add_up(weights)
        for w in weights:
            w.grad /= dist.get_world_size()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
