# SPDX-License-Identifier: Apache-2.0
"""What a row of RaySGD's surface claims, and whether calling it bears that out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LockstepError, TorchTrainer, TrainingOperator, metrics

WIDTH = 110
"""Of a line, in characters."""

ROWS = 21
"""Of the data that all programs here train on."""


class Points(TrainingOperator):
    """Points of two classes; three batches of seven."""

    def setup(self, config):
        random = torch.Generator().manual_seed(0)
        points = torch.randn(ROWS, 3, generator=random)
        model = nn.Linear(3, 2)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
        )
        loader = DataLoader(TensorDataset(points, (points[:, 0] > 0).long()), batch_size=7)
        self.register_data(train_loader=loader, validation_loader=loader)


class Sums(Points):
    """As a custom loop of RaySGD's: a dict for each batch."""

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "step": batch_info["global_step"], "mine": batch_info["mine"]}


class OfRows(Points):
    """Batches of a Ray dataset are dicts."""

    def compute_loss(self, batch, batch_info):
        return self.criterion(self.model(batch["point"].float()), batch["target"])


def registering(**further: Any) -> type[TrainingOperator]:
    """An operator that hands `register` these as well; each is called with model and optimizer."""

    class Registers(Points):
        def setup(self, config):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            made = {name: make(optimizer) for name, make in further.items()}
            self.back = self.register(models=model, optimizers=optimizer, **made)

    return Registers


def with_trainer(
    ask: Callable[[TorchTrainer], Any], operator: Any = Points, **arguments: Any
) -> Any:
    """What `ask` gets from a trainer, which is shut down afterwards."""
    with TorchTrainer(training_operator_cls=operator, **arguments) as trainer:
        return ask(trainer)


def inside(ask: Callable[[Any], Any], operator: Any = Points, **arguments: Any) -> Any:
    """What `ask` gets from the operator of a trainer's only worker."""
    return with_trainer(lambda one: ask(one.get_local_operator()), operator, **arguments)


def average():
    meter = metrics.AverageMeter()
    meter.update(1.0, n=3)
    meter.update(5.0)
    found = meter.val, meter.sum, meter.count, meter.avg
    meter.reset()
    return found == (5.0, 8.0, 4, 2.0) and meter.count == 0


def averages():
    collection = metrics.AverageMeterCollection()
    collection.update({"loss": 1.0}, n=3)
    collection.update({"loss": 5.0})
    return collection.summary() == {
        "batch_count": 2,
        "num_samples": 4,
        "loss": 2.0,
        "last_loss": 5.0,
    }


def timer():
    stat = metrics.TimerStat(window_size=2)
    for seconds in (1.0, 2.0, 4.0):
        stat.push(seconds)
        stat.push_units_processed(6)
    found = [getattr(stat, each) for each in ("mean", "median", "sum", "max", "first", "last")]
    return (*found, stat.size, stat.count, stat.mean_units_processed, stat.mean_throughput) == (
        *(3.0, 3.0, 6.0, 4.0, 2.0, 4.0),
        *(2, 3, 6.0, 2.0),
    )


def timers():
    collection = metrics.TimerCollection()
    with collection.record("step"):
        pass
    named = set(collection.stats(mean=True, last=True)) == {"mean_step_s", "last_step_s"}
    collection.reset()
    collection.disable()
    with collection.record("step"):
        pass
    silent = collection.stats() == {}
    collection.enable()
    return named and silent


class Table:
    """Rows of a name, a verdict, and what to know; printed as they come.

    Attributes:
        wrong: names of rows whose claim is not borne out.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.names: list[str] = []

    def head(self, title: str) -> None:
        print(f"\n{title}")

    def same(self, name: str, call: Callable[[], Any], expected: Any = True) -> None:
        """`call` gives what it gave with RaySGD."""
        got = call()
        self._row(name, "same", "", got == expected, got)

    def better(self, name: str, how: str, call: Callable[[], Any], expected: Any = True) -> None:
        """`call` gives what `how` says."""
        got = call()
        self._row(name, "better", how, got == expected, got)

    def refused(self, name: str, call: Callable[[], Any]) -> None:
        """`call` raises an error of lockstep's; its first line and its advice are shown."""
        said = None
        try:
            call()
        except LockstepError as error:
            first, *lines = str(error).splitlines()
            told = dict(line.split(maxsplit=1) for line in lines)
            said = f"{first}: {told.get('fix') or told['expected']}"
        self._row(name, "refused", said or "", said is not None, "no error")

    def gone(self, name: str, instead: str, call: Callable[[], Any]) -> None:
        """Python itself says that there is no such name; `instead` needs none."""
        is_gone = False
        with suppress(AttributeError, ImportError):
            call()
            is_gone = True
        self._row(name, "gone", instead, not is_gone, "it is there")

    def _row(self, name: str, verdict: str, how: str, holds: bool, got: Any) -> None:
        self.names.append(name)
        if not holds:
            self.wrong.append(f"{name}: {got!r}")
        begun = f"  {name:<44} {verdict if holds else 'WRONG':<8} "
        lines = textwrap.wrap(begun + how, WIDTH, subsequent_indent=" " * len(begun))
        print("\n".join(lines) if how else begun.rstrip())
