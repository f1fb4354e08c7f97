# SPDX-License-Identifier: Apache-2.0
"""A LightningModule on two workers ends where Lightning's own trainer ends on one process."""

import os
import random
import signal

import lightning
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import WorkerDiedError
from lockstep.testing import Strike, struck

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def _fitted(module, loader, **arguments):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **arguments,
    )
    trainer.fit(module, loader)
    return module


def _farthest(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def _rows(count, width):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(count)]


def _boring_model(config):
    torch.manual_seed(1)
    return BoringModel().double()


@pytest.mark.slow
def test_lightnings_own_module_unchanged():
    """61 rows: the last global batch of 8 has 5, and the workers 3 and 2 of them."""
    rows = _rows(61, 32)
    expected = _fitted(_boring_model({}), DataLoader(rows, batch_size=8), max_epochs=3)
    operator = TrainingOperator.from_lightning(_boring_model, DataLoader(rows, batch_size=4))
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        results = [trainer.train() for _ in range(3)]
        model = trainer.get_model()
        rates = trainer.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
    assert _farthest(model, expected) < 1e-10
    assert results[-1]["num_samples"] == 61
    assert rates == [pytest.approx(1e-4)] * 2


class Autoencoder(lightning.LightningModule):
    """The module of Lightning's introduction: parts from outside, Adam, one logged loss."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def training_step(self, batch, batch_idx):
        rows, _ = batch
        rows = rows.view(rows.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(rows)), rows)
        self.log("reconstruction", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _autoencoder(config):
    torch.manual_seed(2)
    encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))
    return Autoencoder(encoder, decoder).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_shards": 3, "reproducible": True},
        {"sync": "parameter_server"},
        {"clip_grad_norm": 0.01},
    ],
)
def test_the_autoencoder_of_the_introduction(arguments):
    digits = load_digits()
    images = torch.tensor(digits.images[:310] / 16)
    data = TensorDataset(images, torch.tensor(digits.target[:310]))
    clip = {"gradient_clip_val": 0.01} if "clip_grad_norm" in arguments else {}
    shards = arguments.get("num_shards", 2)
    expected = _fitted(
        _autoencoder({}), DataLoader(data, batch_size=8 * shards), max_epochs=2, **clip
    )
    operator = TrainingOperator.from_lightning(_autoencoder, DataLoader(data, batch_size=8))
    with TorchTrainer(training_operator_cls=operator, num_workers=2, **arguments) as trainer:
        trainer.train()
        result = trainer.train()
        assert _farthest(trainer.get_model(), expected) < 1e-10
    assert result["reconstruction"] == pytest.approx(result["train_loss"])


class Products(torchmetrics.Metric):
    """Keeps what it is given in lists that torchmetrics does not join, as retrieval does."""

    def __init__(self):
        super().__init__()
        self.add_state("ones", [], dist_reduce_fx=None)
        self.add_state("others", [], dist_reduce_fx=None)

    def update(self, ones, others):
        self.ones.append(ones)
        self.others.append(others.float())

    def compute(self):
        pairs = zip(self.ones, self.others, strict=True)
        return sum((one * other.double()).sum() for one, other in pairs)


class Scorer(BoringModel):
    def __init__(self):
        super().__init__()
        self.double()
        self.largest = torchmetrics.MaxMetric()
        self.rows = torchmetrics.CatMetric()
        self.products = Products()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.99
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "mean"}

    def validation_step(self, batch, batch_idx):
        self.largest(batch.max())
        self.rows(batch[:, 0])
        self.products.update(batch[:, 0], batch[:, 1])
        self.log("products", self.products)
        self.log("largest", self.largest)
        self.log("mean", batch.mean())

    def on_validation_epoch_end(self):
        self.log("rows", self.rows.compute().numel())
        self.rows.reset()


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("count", [33, 1])
def test_metrics_are_gathered_from_all_workers(count, joint):
    """Also where one of them has no sample, or borrows one; and a plateau is one for all."""
    rows = _rows(count, 32)
    operator = TrainingOperator.from_lightning(
        Scorer, DataLoader(_rows(8, 32)), DataLoader(rows, batch_size=2)
    )

    class Joint(operator):
        joint_loss = joint

    with TorchTrainer(training_operator_cls=Joint, num_workers=2) as trainer:
        for _ in range(3):
            trainer.train()
            result = trainer.validate()
        rates = trainer.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
    whole = torch.stack(rows)
    assert result["largest"] == pytest.approx(whole.max().item())
    assert result["mean"] == pytest.approx(whole.mean().item())
    assert result["rows"] == result["num_samples"] == count
    products = whole[:, 0] * whole[:, 1].float().double()
    assert result["products"] == pytest.approx(products.sum().item())
    assert rates == [pytest.approx(0.1 * 0.1**2)] * 2


class _LogsItsMetric(BoringModel):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean.update(batch.abs())
        self.log("mean", self.mean)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_metric_that_one_worker_has_not_updated_since_the_last_call_is_gathered():
    """Worker 1 has no samples in the second call, and had computed the metric in the first."""
    rows = _rows(5, 32)
    operator = TrainingOperator.from_lightning(
        lambda config: _LogsItsMetric().double(), DataLoader(rows, batch_size=2)
    )
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        trainer.train(num_steps=1)
        result = trainer.train()
    assert result["mean"] == pytest.approx(torch.stack(rows).abs().mean().item())


class _CountsSamples(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("width", batch.abs().mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _made_to_count(config):
    torch.manual_seed(1)
    return _CountsSamples().double()


@pytest.mark.slow
def test_after_a_death_logged_values_count_once():
    """What rank 1 had logged is lost with it: 3 steps of 4 samples."""

    def epochs(*strikes):
        operator = TrainingOperator.from_lightning(_made_to_count, DataLoader(rows, batch_size=4))
        operator = struck(operator, *strikes) if strikes else operator
        with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
            results = [trainer.train() for _ in range(2)]
            return results, trainer.status()["recoveries"], trainer.get_model()

    rows = _rows(61, 32)
    (first, second), recoveries, model = epochs(Strike("kill", rank=1, step=3, phase="backward"))
    (_, expected), _, undisturbed = epochs()
    assert len(recoveries) == 1
    assert first["samples"] == 61 - 3 * 4
    assert second["samples"] == expected["samples"] == 61
    assert second["width"] == pytest.approx(expected["width"], rel=1e-12)
    assert _farthest(model, undisturbed) < 1e-12


class _ValidatesByMetrics(BoringModel):
    """With metrics that it computes itself, so that `self.log` knows nothing of them."""

    def __init__(self):
        super().__init__()
        self.rows, self.mean = torchmetrics.CatMetric(), torchmetrics.MeanMetric()

    def validation_step(self, batch, batch_idx):
        self(batch)
        self.rows.update(batch[:, 0])
        self.mean.update(batch.abs())

    def on_validation_epoch_end(self):
        self.log("rows", self.rows.compute().numel())
        self.log("mean", self.mean.compute())
        self.rows.reset()
        self.mean.reset()


@pytest.mark.slow
def test_after_a_death_within_a_validation_every_sample_counts_once():
    """Rank 0 has counted all of its own samples when it hears of the death of rank 1."""
    rows = _rows(37, 32)
    operator = TrainingOperator.from_lightning(
        lambda config: _ValidatesByMetrics().double(), DataLoader(_rows(8, 32)), DataLoader(rows)
    )
    operator = struck(operator, Strike("kill", rank=1, step=1, phase="validation"))
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        trainer.train(num_steps=1)
        result = trainer.validate()
        assert len(trainer.status()["recoveries"]) == 1
    assert result["rows"] == result["num_samples"] == 37
    assert result["mean"] == pytest.approx(torch.stack(rows).abs().mean().item())


class _DiesBehindAnEpoch(_CountsSamples):
    """Its worker ends after the last step of the first epoch, once."""

    def __init__(self, mark):
        super().__init__()
        self.mark, self.ended = mark, []

    def on_train_epoch_end(self):
        self.ended.append(self.current_epoch)
        if self.trainer.global_rank == 1 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_death_behind_an_epoch_begins_no_other_epoch(tmp_path):
    mark = str(tmp_path / "died")
    operator = TrainingOperator.from_lightning(
        lambda config: _DiesBehindAnEpoch(mark).double(), DataLoader(_rows(61, 32), batch_size=4)
    )
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        steps = []
        for _ in range(2):
            result = trainer.train()
            assert result["batch_count"] == 8
            assert {"train_loss", "last_train_loss"} <= result.keys()
            steps.append(trainer.status()["step"])
        assert len(trainer.status()["recoveries"]) == 1
        ended = trainer.apply_all_operators(lambda operator: operator.module.ended)[0]
    assert steps == [8, 16]
    assert ended[-1] == 1
    assert set(ended) == {0, 1}


class _DrawsAroundItsEpochs(_CountsSamples):
    def __init__(self):
        super().__init__()
        self.drawn = {}

    def _draw(self, kind):
        draws = (random.random(), np.random.rand(), torch.rand(()).item())
        self.drawn[kind, self.current_epoch] = draws

    def on_train_epoch_start(self):
        self._draw("begin")

    def on_train_epoch_end(self):
        self._draw("end")


@pytest.mark.slow
def test_what_hooks_of_an_epoch_draw_is_the_same_on_each_worker_also_after_a_death():
    """The worker that takes the dead one's place begins the epoch in its middle."""

    def drawn(*strikes):
        operator = TrainingOperator.from_lightning(
            lambda config: _DrawsAroundItsEpochs().double(), DataLoader(_rows(61, 32), batch_size=4)
        )
        operator = struck(operator, *strikes) if strikes else operator
        with TorchTrainer(
            training_operator_cls=operator, num_workers=2, spare_workers=len(strikes)
        ) as trainer:
            for _ in range(2):
                trainer.train()
            assert len(trainer.status()["recoveries"]) == len(strikes)
            return trainer.apply_all_operators(lambda operator: operator.module.drawn)

    one, other = drawn()
    assert one == other
    assert len(set(one.values())) == 4
    assert drawn(Strike("kill", rank=1, step=3, phase="backward")) == [one, one]


class _FollowsBehindSteps(BoringModel):
    """A target follows the weights behind each step, and a worker ends itself in the last one."""

    def __init__(self, dying_rank, mark):
        super().__init__()
        self.dying_rank, self.mark = dying_rank, mark
        self.target = nn.Linear(32, 2).requires_grad_(False)

    def _die(self):
        is_last = self.trainer.global_step == 3 and self.trainer.global_rank == self.dying_rank
        if is_last and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def lr_scheduler_step(self, scheduler, metric):
        """Called on every rank, behind the optimizer's step."""
        scheduler.step()
        if self.dying_rank:
            self._die()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._die()
        with torch.no_grad():
            self.target.weight.lerp_(self.layer.weight, 0.3)


def _operator_that_follows(dying_rank, mark):
    """Three ranks, and 13 rows: of the third global batch the first rank alone has a sample."""

    def made(config):
        torch.manual_seed(1)
        return _FollowsBehindSteps(dying_rank, mark).double()

    return TrainingOperator.from_lightning(made, DataLoader(_rows(13, 32), batch_size=2))


def _targets(trainer):
    return trainer.apply_all_operators(lambda operator: operator.module.target.weight.detach())


@pytest.mark.slow
def test_after_a_death_behind_an_epochs_last_step_all_have_what_the_batch_end_hook_wrote(tmp_path):
    targets = []
    for dying_rank in (2, None):
        operator = _operator_that_follows(dying_rank, str(tmp_path / "died"))
        with TorchTrainer(training_operator_cls=operator, num_workers=3, num_shards=3) as trainer:
            trainer.train()
            assert len(trainer.status()["recoveries"]) == (dying_rank is not None)
            targets.append(_targets(trainer))
    (one, other), expected = targets
    assert torch.equal(one, other)
    assert (one - expected[0]).abs().max() < 1e-12


@pytest.mark.slow
def test_what_the_batch_end_hook_wrote_is_not_lost_in_silence(tmp_path):
    """The rank that has died was the only one with a sample of the batch."""
    operator = _operator_that_follows(0, str(tmp_path / "died"))
    with (
        TorchTrainer(training_operator_cls=operator, num_workers=3, num_shards=3) as trainer,
        pytest.raises(WorkerDiedError, match=r"(?s)behind step 3.*on_train_batch_end"),
    ):
        trainer.train()


class _WritesBehindAnEpoch(BoringModel):
    """Its epoch's end changes weights and what it has collected, and a worker ends itself there."""

    def __init__(self, mark, gathers):
        super().__init__()
        self.mark, self.gathers, self.outputs = mark, gathers, []
        self.temperature = nn.Parameter(torch.ones(1), requires_grad=False)
        self.rows = torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.outputs.append(output["loss"].detach())
        self.rows.update(batch[:, 0])
        return output

    def on_train_epoch_end(self):
        assert torch.stack(self.outputs).isfinite().all()
        with torch.no_grad():
            self.temperature.mul_(0.9)
        if self.trainer.global_rank == 1 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.gathers:
            self.log("rows", float(self.rows.compute().numel()))
            self.rows.reset()
        self.outputs.clear()


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
def test_after_a_death_in_on_train_epoch_end_it_has_run_once_for_the_epoch(gathers, tmp_path):
    """Of the rank that lives it has run to its end, or waits for the dead one in a gather."""
    mark, rows = str(tmp_path / "died"), _rows(16, 32)
    operator = TrainingOperator.from_lightning(
        lambda config: _WritesBehindAnEpoch(mark, gathers).double(), DataLoader(rows, batch_size=4)
    )
    with TorchTrainer(
        training_operator_cls=operator, num_workers=2, spare_workers=int(not gathers)
    ) as trainer:
        first = trainer.train()
        assert len(trainer.status()["recoveries"]) == 1
        second = trainer.train()
        temperatures = trainer.apply_all_operators(
            lambda operator: operator.module.temperature.item()
        )
    assert temperatures == [pytest.approx(0.81)] * len(temperatures)
    assert not gathers or (first["rows"], second["rows"]) == (8, 16)
