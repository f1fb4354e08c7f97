# SPDX-License-Identifier: Apache-2.0
"""`watching` around a loop of Accelerate's; wrong: the model without its wrapper is called."""

import contextlib

import torch
from _tried import try_out
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep.audit

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


def train(watch, how):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    with watch or contextlib.nullcontext():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer, loader = accelerator.prepare(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            DataLoader(TensorDataset(FEATURES), batch_size=4),
        )
        for number, (features,) in enumerate(loader):
            if how == "raises" and number == 2:
                raise KeyError("no such row")
            optimizer.zero_grad()
            called = accelerator.unwrap_model(model) if how == "wrong" else model
            loss = nn.functional.mse_loss(called(features)[:, 0], features.sum(1))
            accelerator.backward(loss)
            optimizer.step()
    return net


try_out(train, lockstep.audit.watching)
