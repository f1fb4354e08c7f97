# SPDX-License-Identifier: Apache-2.0
"""A layer that a run has unfrozen, and given to its optimizer, outlives the death of a worker."""

import pytest
import torch
from tests.ray.surviving import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BEGINS_AT, STEPS = 3, 8


class Unfreezes(TrainingOperator):
    """A head trains alone until step 3; then the backbone trains as well, at a rate of its own."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(6, 3)))
        self.backbone = model.double()[0].requires_grad_(False)
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=torch.optim.Adam(model[1].parameters(), lr=0.05),
            shard=config["shard"],
        )
        features = torch.randn(80, 4, generator=torch.Generator().manual_seed(1)).double()
        data = TensorDataset(features, features.sum(1).sign().long() + 1)
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        if self.global_step == BEGINS_AT:
            self.backbone.requires_grad_(True)
            self.optimizer.add_param_group({"params": self.backbone.parameters(), "lr": 0.01})
        features, classes = batch
        loss = nn.functional.cross_entropy(self.model(features), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def _trainer(sync, shard, strikes=(), **arguments):
    return TorchTrainer(
        training_operator_cls=struck(Unfreezes, *strikes) if strikes else Unfreezes,
        num_workers=2,
        sync=sync,
        config={BATCH_SIZE: 8, "shard": shard},
        spare_workers=1,
        memory_checkpoint_every=2,
        **arguments,
    )


@pytest.mark.parametrize(
    ("sync", "shard"),
    [
        ("replicate", "whole"),
        ("ddp", "whole"),
        ("parameter_server", "whole"),
        ("fsdp", "whole"),
        ("fsdp", [nn.Sequential]),
    ],
)
@pytest.mark.parametrize("step", [BEGINS_AT, BEGINS_AT + 2])
def test_a_worker_that_joins_trains_what_the_run_trains(sync, shard, step):
    with _trainer(sync, shard) as trainer:
        trainer.train(num_steps=STEPS)
        expected = digest(trainer)
    with _trainer(sync, shard, [Strike("kill", rank=1, step=step, phase="backward")]) as trainer:
        trainer.train(num_steps=STEPS)
        (recovery,) = trainer.status()["recoveries"]
        assert recovery["lost"]
        assert digest(trainer) == expected


def _given():
    """A model whose head trains, its optimizer and its loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(features, features.sum(1).sign().long() + 1)
    return model, torch.optim.Adam(model[1].parameters(), lr=0.05), DataLoader(data, 4)


def _unfreeze(operator):
    operator.model[0].requires_grad_(True)
    operator.optimizer.add_param_group({"params": operator.model[0].parameters(), "lr": 0.01})


def _around_given(folder):
    model, optimizer, loader = _given()
    given = {"optimizer": optimizer, "criterion": nn.CrossEntropyLoss(), "train_loader": loader}
    run = TorchTrainer(
        training_operator_cls=TrainingOperator.from_model(model, **given),
        num_workers=2,
        checkpoint_dir=folder,
        checkpoint_every=5,
        resume="auto",
    )
    return model, optimizer, run


def test_objects_that_were_given_get_the_added_group_and_the_run_resumes(tmp_path):
    model, optimizer, run = _around_given(tmp_path)
    with run:
        run.train()
        run.apply_all_operators(_unfreeze)
        run.train()
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    resumed, optimizer, run = _around_given(tmp_path)
    with run:
        assert all(map(torch.equal, resumed.parameters(), model.parameters()))
        assert len(optimizer.state) == 4
        run.train()
    expected, plain, loader = _given()
    for epoch in range(3):
        if epoch == 1:
            expected.requires_grad_(True)
            plain.add_param_group({"params": expected[0].parameters(), "lr": 0.01})
        batches = list(loader)
        for pair in zip(batches[::2], batches[1::2], strict=True):  # a worker has a batch of 4
            features, classes = map(torch.cat, zip(*pair, strict=True))
            plain.zero_grad()
            nn.functional.cross_entropy(expected(features), classes).backward()
            plain.step()
    for got, value in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(got, value, rtol=1e-9, atol=1e-12)
