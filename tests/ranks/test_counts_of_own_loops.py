# SPDX-License-Identifier: Apache-2.0
"""What a `train_epoch` of one's own counts where a worker was lent batches of another one.

Nine samples in global batches of four: in the third step rank 1 has none, and borrows rank 0's.
"""

import logging

import pytest
from torch.utils.data import DataLoader, TensorDataset

from harness import reset, rows
from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.trainer.report_merge import merge_reports
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.table import run_workers
from ranks.table_operators import mlp, sgd

X = rows(9, 4, seed=30)


class Counts(TrainingOperator):
    """Adds up everything that its iterator delivers."""

    counts_borrowed, key = True, "num_samples"

    def setup(self, config):
        model = reset(mlp(), 7)
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        self.register_data(train_loader=DataLoader(TensorDataset(X), config[BATCH_SIZE]))

    def train_epoch(self, iterator, info):
        total, num_samples, self.borrowed = 0.0, 0, []
        for (features,) in iterator:
            loss = self.model(features).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.borrowed.append(self.is_borrowed_batch)
            if self.counts_borrowed or not self.is_borrowed_batch:
                total += loss.item() * len(features)
                num_samples += len(features)
        assert not self.is_borrowed_batch
        return {"train_loss": total / num_samples, self.key: num_samples}


class CountsItsOwn(Counts):
    counts_borrowed = False


class CountsTokens(Counts):
    """What it counts is not what the batches hold."""

    def train_epoch(self, iterator, info):
        result = super().train_epoch(iterator, info)
        return result | {"num_samples": 5 * result["num_samples"]}


def trained(operator_cls, num_workers=2, epochs=1):
    """The merged result of the last epoch, and each worker's operator."""
    spec = WorkerSpec(operator_cls, {BATCH_SIZE: 4}, num_workers, num_workers, seed=0)

    def body(worker):
        for _ in range(epochs):
            report = worker.train(LoopRequest("train", None, False, {}))
        return report, worker.operator

    reports, operators = zip(*run_workers(spec, body), strict=True)
    return merge_reports(reports), operators


def test_a_loop_that_leaves_borrowed_batches_out_counts_every_sample_once(caplog):
    result, operators = trained(CountsItsOwn)
    true, _ = trained(CountsItsOwn, num_workers=1)
    assert [each.borrowed for each in operators] == [[False] * 3, [False, False, True]]
    assert result["num_samples"] == true["num_samples"] == 9
    assert result["train_loss"] == pytest.approx(true["train_loss"], rel=1e-12)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_loop_that_counts_borrowed_batches_is_told_once(caplog):
    """Its loss is a mean over ten samples of nine, which nobody can take apart."""
    trained(Counts, epochs=2)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    text = record.getMessage()
    assert "rank 1" in text
    assert "num_samples=5" in text
    assert "its own 4" in text
    assert "self.is_borrowed_batch" in text


@pytest.mark.parametrize("operator_cls", [CountsTokens, Counts])
def test_what_holds_no_borrowed_batch_is_not_told(operator_cls, caplog):
    trained(operator_cls, num_workers=2 if operator_cls is CountsTokens else 1)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
