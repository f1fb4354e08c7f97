# SPDX-License-Identifier: Apache-2.0
"""One of the five models as an operator, and as the loop that a user writes by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep import TrainingOperator
from models import WORKLOADS, make_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LEARNING_RATE, MOMENTUM = 0.001, 0.9


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def dataset_for(name: str, num_samples: int) -> TensorDataset:
    return TensorDataset(*WORKLOADS[name].make_samples(num_samples))


class ModelOperator(TrainingOperator):
    """``config``: ``model`` (a name), ``num_samples`` of the dataset."""

    def setup(self, config: dict[str, Any]) -> None:
        workload = WORKLOADS[config["model"]]
        model = make_model(config["model"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer_for(model), criterion=workload.criterion
        )
        dataset = dataset_for(config["model"], config["num_samples"])
        self.register_data(
            train_loader=DataLoader(dataset, batch_size=workload.batch_size, shuffle=True)
        )


class HandLoop:
    """DDP, a DistributedSampler, a DataLoader, and the loss read after every step."""

    def __init__(self, name: str, num_samples: int, device: torch.device) -> None:
        workload = WORKLOADS[name]
        dataset = dataset_for(name, num_samples)
        self._sampler = DistributedSampler(dataset, shuffle=True, seed=0)
        self._loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=self._sampler)
        self._device = device
        self._model = DistributedDataParallel(
            make_model(name).to(device),
            device_ids=None if device.type == "cpu" else [device.index or 0],
            gradient_as_bucket_view=True,
        )
        self._optimizer = optimizer_for(self._model)
        self._criterion = workload.criterion
        self._epoch = 0

    def epoch(self) -> float:
        """Train on everything once; seconds."""
        start = time.perf_counter()
        self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        total = 0.0
        for features, targets in self._loader:
            self._optimizer.zero_grad()
            loss = self._criterion(self._model(features.to(self._device)), targets.to(self._device))
            loss.backward()
            self._optimizer.step()
            total += loss.item()
        return time.perf_counter() - start


_LOOPS: dict[str, HandLoop] = {}
"""In a worker: the hand-written loops that live there, beside its operator."""


def hand_epoch(name: str, num_samples: int) -> Callable[[], float]:
    """What a worker runs: an epoch of the hand-written loop, over torch's default group."""

    def run() -> float:
        if name not in _LOOPS:
            if not dist.is_initialized():  # one worker has no peers, and DDP wants a group
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            cuda = torch.cuda.is_available()
            place = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
            _LOOPS[name] = HandLoop(name, num_samples, torch.device(place))
        dist.barrier()
        return _LOOPS[name].epoch()

    return run
