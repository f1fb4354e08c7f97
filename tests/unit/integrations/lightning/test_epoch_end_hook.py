# SPDX-License-Identifier: Apache-2.0
"""on_train_epoch_end runs once for an epoch; with peers one that fails has changed nothing.

There it runs again, as a peer's death may interrupt it.
"""

import pytest
import torch
import torchmetrics
from tests.unit.integrations.lightning.modules import SAMPLES, Classifier, loader

from lockstep import TorchTrainer, TrainingOperator
from lockstep.integrations.lightning import epoch_end_hook

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


class FailsOnce(Classifier):
    """Its first epoch's end fails when it has changed weights, a buffer, a rate and a metric."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ends", torch.zeros(()))
        self.temperature = torch.nn.Parameter(torch.ones(()).double(), requires_grad=False)
        self.rows = torchmetrics.CatMetric()
        self.counted, self.has_failed = [], False

    def training_step(self, batch, batch_idx):
        self.rows.update(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.layers.parameters(), lr=0.3)

    def on_train_epoch_end(self):
        self.ends += 1
        with torch.no_grad():
            self.temperature.mul_(0.5)
        self.optimizers().param_groups[0]["lr"] *= 0.5
        count = self.rows.compute().numel()
        self.rows.reset()
        if not self.has_failed:
            self.has_failed = True
            raise LookupError("no such file")
        self.counted.append((self.current_epoch, count))


def found(operator):
    module, optimizer = operator.module, operator.optimizer
    return module.ends.item(), module.temperature.item(), optimizer.param_groups[0]["lr"]


def counted(operator):
    return operator.module.counted


def test_an_end_that_has_failed_is_made_up_for_before_the_next_epoch(monkeypatch):
    monkeypatch.setattr(epoch_end_hook, "_has_peers", lambda _: True)
    operator = TrainingOperator.from_lightning(FailsOnce, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        with pytest.raises(LookupError):
            trainer.train()
        trained = trainer.get_local_operator()
        assert found(trained) == (0, 1, 0.3)
        trainer.train()
        assert found(trained) == (2, 0.25, 0.075)
        assert counted(trained) == [(0, SAMPLES), (1, SAMPLES)]


def test_without_peers_nothing_is_copied_or_put_back(monkeypatch):
    """Nothing repeats the hook after a death."""
    monkeypatch.delattr(epoch_end_hook, "_Start")
    operator = TrainingOperator.from_lightning(FailsOnce, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        with pytest.raises(LookupError):
            trainer.train()
        trained = trainer.get_local_operator()
        assert found(trained) == (1, 0.5, 0.15)
        trainer.train()
        assert found(trained) == (2, 0.25, 0.075)
        assert counted(trained) == [(1, SAMPLES)]
