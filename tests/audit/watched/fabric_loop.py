# SPDX-License-Identifier: Apache-2.0
"""`watching` around a loop of Fabric's; wrong: the model that Fabric was given is called."""

import contextlib

import torch
from _tried import try_out
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep.audit

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()


def train(watch, how):
    torch.manual_seed(0)
    with watch or contextlib.nullcontext():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = fabric.setup(net, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(FEATURES), batch_size=4))
        for number, (features,) in enumerate(loader):
            if how == "raises" and number == 2:
                raise KeyError("no such row")
            optimizer.zero_grad()
            answers = (net if how == "wrong" else model)(features)
            fabric.backward(nn.functional.mse_loss(answers[:, 0], features.sum(1)))
            optimizer.step()
    return net


try_out(train, lockstep.audit.watching)
