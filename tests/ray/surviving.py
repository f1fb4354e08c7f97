# SPDX-License-Identifier: Apache-2.0
"""Operators whose workers die, and what their runs come to when nobody does."""

import hashlib
import time
from functools import cache

import torch
from examples.digits import Digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.testing import struck

ROWS, GLOBAL_BATCH = 104, 16
STEPS_IN_EPOCH = 7


def _data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 10, generator=generator)
    return TensorDataset(features, torch.randint(5, (ROWS,), generator=generator))


def _network():
    return nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5)
    )


class Classifier(TrainingOperator):
    """The default loop, with everything that a step changes before it is committed."""

    def setup(self, config):
        model = _network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=scheduler,
        )
        data = _data()
        self.register_data(
            train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, config[BATCH_SIZE]),
        )


class TwoPlayers(TrainingOperator):
    """Two optimizers step in one batch, the second after further communication."""

    def setup(self, config):
        one, other = _network(), nn.Linear(5, 5)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (one, other)]
        self.models, self.optimizers = self.register(models=[one, other], optimizers=optimizers)
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for player, optimizer in zip(range(2), self.optimizers, strict=True):
            output = self.models[0](features)
            if player:
                output = self.models[1](output.detach())
            loss = nn.functional.cross_entropy(output, classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"train_loss": loss.item()}


class FreezesInTurn(TwoPlayers):
    """Each player trains while the other one is frozen, as Lightning's toggle_optimizer does it."""

    def setup(self, config):
        players = [
            nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))
            for width in (10, 5)
        ]
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in players]
        self.models, self.optimizers = self.register(models=players, optimizers=optimizers)
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for player in (1, 0):
            optimizer = self.optimizers[player]
            other = self.models[1 - player]
            others, mode = list(other.parameters()), other.training
            flags = [each.requires_grad for each in others]
            other.eval().requires_grad_(False)
            output = self.models[1](self.models[0](features))
            loss = nn.functional.cross_entropy(output, classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            other.train(mode)
            for each, flag in zip(others, flags, strict=True):
                each.requires_grad_(flag)
        return {"train_loss": loss.item()}


class FreezesInItsLoss(Classifier):
    """One of the two terms of the loss does not train the last layer."""

    def compute_loss(self, batch, batch_info):
        features, classes = batch
        last = self.model[-1]
        flags = [each.requires_grad for each in last.parameters()]
        last.requires_grad_(False)
        penalty = self.model(features).square().mean()
        for each, flag in zip(last.parameters(), flags, strict=True):
            each.requires_grad_(flag)
        return self.criterion(self.model(features), classes) + penalty / 100


class FreezesInTurnInItsOwnEpoch(FreezesInTurn):
    def train_epoch(self, iterator, info):
        losses = [self.train_batch(batch, {})["train_loss"] for batch in iterator]
        return {"train_loss": sum(losses) / len(losses)}


class LearnsABaseline(TwoPlayers):
    """What the loop keeps in its `state_dict` weighs the loss: a tensor, a number, a list."""

    def setup(self, config):
        super().setup(config)
        self.baseline, self.seen, self.recent = torch.zeros(2), 0, []

    def state_dict(self):
        return {"baseline": self.baseline, "counts": (self.seen, self.recent)}

    def load_state_dict(self, state):
        self.baseline = state["baseline"]
        self.seen, self.recent = state["counts"]

    def train_batch(self, batch, batch_info):
        self.baseline.mul_(0.9).add_(1)
        self.seen += 1
        self.recent.append(self.seen / 10)
        features, classes = batch
        weight = 1 + self.baseline.sum() / 20 + self.recent[-1] / 10 + len(self.recent) / 100
        for player, optimizer in zip(range(2), self.optimizers, strict=True):
            output = self.models[0](features)
            if player:
                output = self.models[1](output.detach())
            loss = weight * nn.functional.cross_entropy(output, classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"train_loss": loss.item()}


class CountsItsLosses(Classifier):
    """The default loop, with a loss that depends on how many there were before."""

    def setup(self, config):
        super().setup(config)
        self.count = torch.zeros(())

    def state_dict(self):
        return self.count

    def load_state_dict(self, state):
        self.count = state

    def compute_loss(self, batch, batch_info):
        self.count += 1
        return super().compute_loss(batch, batch_info) * (1 + self.count / 10)


class OwnEpoch(Classifier):
    """Only this loop knows what lies between two batches."""

    def train_epoch(self, iterator, info):
        losses = []
        for features, classes in iterator:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), classes)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return {"train_loss": sum(losses) / len(losses)}


class AroundTheEpoch(Classifier):
    def train_epoch(self, iterator, info):
        return super().train_epoch(iterator, info)


class Windows(Classifier):
    """Gradients of two batches in one step, in a loop of its own."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        if batch_info["batch_idx"] % 2 == 0:
            self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        if batch_info["batch_idx"] % 2 == 1:
            self.optimizer.step()
        return {"train_loss": loss.item()}


class GathersBehindItsStep(Classifier):
    """The loss of all ranks behind the step, and then what the next steps depend on."""

    def setup(self, config):
        super().setup(config)
        self.losses = 0.0

    def train_batch(self, batch, batch_info):
        features, classes = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        self.optimizer.step()
        self.losses += lockstep.gather(loss.detach().reshape(1)).sum().item()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.losses)
        return {"train_loss": loss.item()}

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


class SAM(torch.optim.Optimizer):
    """As it is widely written: the loop calls two steps, and an optimizer within takes the second.

    What it perturbs the weights by is a mean over steps, in a state of its own.
    """

    def __init__(self, params, base_optimizer, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base_optimizer(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _each(self):
        return [(group, p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for _, p in self._each()]).norm()
        for group, p in self._each():
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad / norm, 0.5)
            self.state[p]["old_p"] = p.data.clone()
            p.add_(mean, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for _, p in self._each():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class SharpnessAware(Classifier):
    """The `step` of its optimizer is never called."""

    def setup(self, config):
        model = _network()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        self.model, self.optimizer, self.criterion, _, self.ema = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=scheduler,
            ema=0.9,
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for step in (self.optimizer.first_step, self.optimizer.second_step):
            loss = self.criterion(self.model(features), classes)
            loss.backward()
            step()
        return {"train_loss": loss.item()}


def digits_of(strikes=(), **arguments):
    """A trainer of the example that classifies digits."""
    operator_cls = struck(Digits, *strikes) if strikes else Digits
    config = {"lr": 0.1, "epochs": 2, BATCH_SIZE: 64}
    return TorchTrainer(
        training_operator_cls=operator_cls, config=config, scheduler_step_freq="batch", **arguments
    )


def digest(trainer):
    """Of parameters and buffers, bit by bit."""
    return digest_of(trainer.get_model())


def digest_of(models):
    models = models if isinstance(models, list) else [models]
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def trainer_of(operator_cls, strikes=(), **arguments):
    arguments = {"num_workers": 2, "config": {BATCH_SIZE: GLOBAL_BATCH}} | arguments
    if issubclass(operator_cls, Classifier):
        arguments.setdefault("scheduler_step_freq", "batch")
    operator_cls = struck(operator_cls, *strikes) if strikes else operator_cls
    return TorchTrainer(training_operator_cls=operator_cls, **arguments)


def until_complete(trainer, workers):
    """Wait until everybody who was lost has been replaced by somebody who is ready."""
    deadline = time.monotonic() + 100
    while sum(trainer.status()[key] for key in ("workers", "spares")) < workers:
        assert time.monotonic() < deadline, trainer.status()
        trainer._workers._engine.workers.pause(0.1)


def run(trainer, epochs=3):
    """Epochs and a part of one; results and the digest of the weights."""
    results = [trainer.train() for _ in range(epochs)]
    results.append(trainer.train(num_steps=4))
    return results, digest(trainer)


@cache
def undisturbed(operator_cls, epochs=3, **arguments):
    with trainer_of(operator_cls, **arguments) as trainer:
        return run(trainer, epochs)


class CountsItsPasses(Sampler):
    """Another order for each pass over it, which begins wherever a worker begins to read."""

    def __init__(self, size):
        self.size, self.passes = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        return iter(torch.randperm(self.size, generator=generator).tolist())


class ReadsByItsPasses(Classifier):
    def setup(self, config):
        super().setup(config)
        data = _data()
        loader = DataLoader(data, config[BATCH_SIZE], sampler=CountsItsPasses(len(data)))
        self.register_data(train_loader=loader)


class _Rows(IterableDataset):
    def __iter__(self):
        return iter(list(_data()))


class StreamInItsOwnEpoch(Classifier):
    """The default loop over a stream that does not say how long it is."""

    def setup(self, config):
        super().setup(config)
        self.register_data(train_loader=DataLoader(_Rows(), config[BATCH_SIZE]))

    def train_epoch(self, iterator, info):
        return super().train_epoch(iterator, info)


class Averaged(Classifier):
    """An average of the weights, and a step that is not over with the optimizer's."""

    def setup(self, config):
        model = _network()
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
            criterion=nn.CrossEntropyLoss(),
            ema=0.9,
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def after_step(self):
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class AveragedPlayers(TwoPlayers):
    """The first model's optimizer steps before the second one's gradients are reduced."""

    def setup(self, config):
        one, other = _network(), nn.Linear(5, 5)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (one, other)]
        self.models, self.optimizers, self.averages = self.register(
            models=[one, other], optimizers=optimizers, ema=0.9
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))


class Follower(nn.Module):
    """A second encoder follows the first in every forward, as in momentum contrast."""

    def __init__(self):
        super().__init__()
        self.leading, self.following = nn.Linear(10, 5), nn.Linear(10, 5)
        self.following.load_state_dict(self.leading.state_dict())
        self.following.requires_grad_(False)

    def forward(self, features):
        if self.training:
            pairs = zip(self.leading.parameters(), self.following.parameters(), strict=True)
            for leader, follower in pairs:
                follower.data = follower.data * 0.5 + leader.data * 0.5
        return self.leading(features) + self.following(features)


class Momentum(TrainingOperator):
    def setup(self, config):
        model = Follower()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.leading.parameters(), lr=0.01),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))
