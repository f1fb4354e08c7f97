# SPDX-License-Identifier: Apache-2.0
"""A model whose weights, gradients and Adam states are 2.5 times what a worker may have."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

WIDTH, BLOCKS, LENGTH = 512, 24, 8
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
COPIES = 4
"""Weights, gradients, and two states of Adam."""


def transformer():
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
    )


def num_bytes():
    with torch.device("meta"):
        return 4 * sum(param.numel() for param in transformer().parameters())


def private_memory():
    """Private writable memory of this process in bytes, which RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmData in /proc/self/status")


class Large(TrainingOperator):
    """From `setup` on a worker may take as much memory as `config["allowed"]`, and no more."""

    def setup(self, config):
        torch.ones(1, requires_grad=True).sum().backward()  # its threads are not the model's
        # What is freed goes back at once: a heap that keeps it is as large as its gaps.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 19)
        before = private_memory()
        limit_to(before + config["allowed_in_setup"])
        with torch.device("meta"):
            model = transformer()
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False),
            shard="auto",
        )
        limit_to(before + config["allowed"])
        features = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(features), config[BATCH_SIZE])
        self.register_data(train_loader=loader)

    def compute_loss(self, batch, batch_info):
        return self.model(batch[0]).square().mean()


def limit_to(limit):
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def unlimited(operator):
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def trainer(sync, **arguments):
    allowed = int(COPIES * num_bytes() / 2.5)
    # A worker keeps a quarter of the weights, and threads; all of the weights were never there.
    in_setup = int(0.85 * num_bytes())
    return TorchTrainer(
        training_operator_cls=Large,
        config={BATCH_SIZE: 4, "allowed": allowed, "allowed_in_setup": in_setup},
        sync=sync,
        num_workers=4,
        memory_checkpoint_every=None,
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_trains_with_four_workers_and_is_saved(tmp_path):
    with trainer("fsdp") as run:
        first = run.train(num_steps=1)["train_loss"]
        assert run.train(num_steps=2)["last_train_loss"] < first
        run.save(tmp_path / "state")
        run.apply_all_operators(unlimited)  # the process may serve another trainer
    sizes = sorted(file.stat().st_size for file in (tmp_path / "state").glob("*.distcp"))
    assert len(sizes) == 4
    assert sizes[-1] < 1.02 * sizes[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_limit_is_one():
    # Whole weights take 1.2 times of what is allowed in `setup`.
    with pytest.raises(Exception, match="allocate memory"), trainer("replicate") as run:
        run.train(num_steps=1)
