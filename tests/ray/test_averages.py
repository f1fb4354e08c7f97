# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights, and what follows a step, with several workers and without some."""

import copy
import hashlib

import pytest
import torch
from tests.ray.operators import GLOBAL_BATCH, DefaultLoop, farthest, net, problem, sgd
from tests.ray.surviving import Averaged, AveragedPlayers, trainer_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike

OTHERS = [
    pytest.param(sync, marks=pytest.mark.slow) for sync in ("ddp", "fsdp", "parameter_server")
]

pytestmark = pytest.mark.timeout(240)

STEPS = 6


class AveragedLoop(DefaultLoop):
    def setup(self, config):
        self.plain = model = net()  # what register returns may be a wrapper
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss(), ema=0.8
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))

    def after_step(self):
        self.plain.first.bias.add_(torch.randn_like(self.plain.first.bias), alpha=0.01)
        self.plain.second.weight.clamp_(-0.3, 0.3)


def one_process():
    """torch's average, and the noise that one worker draws."""
    features, targets = problem()
    noise = []

    class Noisy(AveragedLoop):
        def after_step(self):
            before = self.plain.first.bias.detach().clone()
            super().after_step()
            noise.append(self.plain.first.bias.detach() - before)

    config = {BATCH_SIZE: GLOBAL_BATCH}
    with TorchTrainer(training_operator_cls=Noisy, config=config, num_shards=2) as one:
        one.train(num_steps=STEPS)
    model = net()
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    starts = range(0, len(features), GLOBAL_BATCH)
    for step in range(STEPS):
        start = starts[step % len(starts)]
        rows = slice(start, start + GLOBAL_BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            model.first.bias += noise[step]
            model.second.weight.clamp_(-0.3, 0.3)
        average.update_parameters(model)
    return average.module


@pytest.fixture(scope="module")
def truth():
    return one_process()


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["replicate", *OTHERS])
def test_two_workers_average_what_one_process_averages(sync, truth, tmp_path):
    arguments = {"training_operator_cls": AveragedLoop, "num_workers": 2, "sync": sync}
    with TorchTrainer(config={BATCH_SIZE: GLOBAL_BATCH}, **arguments) as two:
        two.train(num_steps=STEPS - 2)
        path = two.save(tmp_path / "state")
    with TorchTrainer(config={BATCH_SIZE: GLOBAL_BATCH}, **arguments) as two:
        two.load(path)
        two.train(num_steps=2)
        assert farthest(two.get_averaged_model(), truth) < 1e-12
        drawn = two.apply_all_operators(lambda op: copy.deepcopy(op.ema.module.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(*(d.values() for d in drawn), strict=True))


class CallsSuper(DefaultLoop):
    """The default step, which an override calls."""

    def train_batch(self, batch, batch_info):
        return super().train_batch(batch, batch_info)


def test_the_default_step_is_exact_where_an_override_calls_it():
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    windows = [range(24), range(24, 37)] * 2  # two batches of 12 each, the last of one row
    for rows in windows:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    with TorchTrainer(
        training_operator_cls=CallsSuper,
        num_workers=2,
        config={BATCH_SIZE: GLOBAL_BATCH},
        accumulate=2,
        clip_grad_norm=0.2,
    ) as two:
        two.train()
        two.train()
        assert farthest(two.get_model(), model) < 1e-12


def digest(models):
    models = models if isinstance(models, list) else [models]
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def averaged(operator_cls, strikes=(), **arguments):
    with trainer_of(operator_cls, strikes, **arguments) as run:
        run.train()
        run.train(num_steps=4)
        recoveries = len(run.status()["recoveries"])
        return digest(run.get_averaged_model()), digest(run.get_model()), recoveries


@pytest.mark.slow
def test_rank_0_dies_and_the_averages_go_on_with_the_same_bits():
    arguments = {"num_shards": 4, "reproducible": True}
    strikes = [Strike("kill", rank=0, step=5, phase="applied")]
    expected = averaged(Averaged, num_workers=1, **arguments)
    assert averaged(Averaged, strikes, **arguments) == (*expected[:2], 1)


@pytest.mark.slow
def test_a_spare_takes_averages_over():
    strikes = [Strike("kill", rank=1, step=5, phase="buckets")]
    expected = averaged(Averaged)
    assert averaged(Averaged, strikes, spare_workers=1) == (*expected[:2], 1)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["replicate", "parameter_server"])
def test_an_average_of_a_step_that_was_taken_back_is_taken_back(sync):
    strikes = [Strike("kill", rank=1, step=5, phase="buckets")]
    expected = averaged(AveragedPlayers, sync=sync)
    assert averaged(AveragedPlayers, strikes, spare_workers=1, sync=sync) == (*expected[:2], 1)
