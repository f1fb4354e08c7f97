# SPDX-License-Identifier: Apache-2.0
"""`trainer.verify` with four shards on one worker: right is right, wrong is named, all is kept."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError, NotAvailableError, TrainerClosedError
from lockstep.operator import Options
from lockstep.trainer.verification import refuse_unverifiable
from lockstep.worker import WorkerSpec
from unit.trainer.programs import (
    Regression,
    Streaming,
    by_hand,
    linear,
    loader,
    problem,
    same,
    sgd,
    trainer,
    weights,
)


def four_shards(operator=Regression, **arguments):
    return trainer(operator, num_shards=4, **arguments)


class Small(Regression):
    """Two rows a shard, so that an epoch has three steps: 8, 8 and 6 rows."""

    def data(self):
        return DataLoader(TensorDataset(*problem()), 2, shuffle=True)


class Summed(Small):
    def compute_loss(self, batch, batch_info):
        features, targets = batch
        return (self.model(features) - targets).square().sum()


class SaidToBeSummed(Summed):
    loss_reduction = "sum"


class ByTokens(Small):
    """A mean over the rows that count, unequally many in each shard."""

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        counts = (targets[:, 0] > 0).double()
        each = (self.model(features) - targets).square().sum(1)
        return (each * counts).sum() / counts.sum().clamp(min=1)


class OwnLoop(Small):
    """Two optimizers' worth of nothing special: a step of one's own, through no method of ours."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(features @ self.model.weight.T + self.model.bias, targets)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class OwnWindow(Small):
    """Unequal micro-batches, put together by hand."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        with self.no_sync():
            self.backward(self.criterion(self.model(features[:1]), targets[:1]), weight=1)
        self.backward(self.criterion(self.model(features[1:]), targets[1:]), len(targets) - 1)
        self.optimizer.step()
        return {}


class OwnEpoch(Small):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.optimizer.zero_grad()
            self.criterion(self.model(batch[0]), batch[1]).backward()
            self.optimizer.step()
        return {}


class Parametric(Small):
    """Parameters in the loss, and one that nobody uses."""

    def setup(self, config):
        self.model = nn.Sequential(linear(), nn.Linear(2, 2).double())
        self.criterion = nn.Module()
        self.criterion.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.criterion.idle = nn.Linear(3, 1).double()
        both = [*self.model.parameters(), *self.criterion.parameters()]
        self.optimizer = torch.optim.Adam(both, lr=0.1, weight_decay=0.1)
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=self.data())

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        return (self.model(features) * self.criterion.scale - targets).square().mean()


RIGHT = {
    "default": (Small, {}),
    "stream": (Streaming, {}),
    "sum": (SaidToBeSummed, {}),
    "own_loop": (OwnLoop, {}),
    "own_window": (OwnWindow, {}),
    "own_epoch": (OwnEpoch, {}),
    "parameters_in_the_loss": (Parametric, {}),
    "accumulated": (Small, {"accumulate": 2, "clip_grad_norm": 0.01}),
    "reproducible": (Small, {"reproducible": True}),
    "bf16": (Small, {"precision": "bf16"}),
}


@pytest.mark.parametrize(("operator", "arguments"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_equal_over_the_end_of_an_epoch(operator, arguments):
    with four_shards(operator, **arguments) as run:
        run.train(num_steps=1)
        report = run.verify(num_steps=4)
    assert report.ok, str(report)
    assert all(row.verdict == "equal" for row in report.rows)
    assert not report.notes
    assert "1 worker against one process: equal" in str(report)


def test_rows_name_every_parameter_and_a_notebook_shows_them():
    with four_shards(Parametric) as run:
        report = run.verify()
    names = [row.parameter for row in report.rows]
    assert names == [
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *("criterion.scale", "criterion.idle.weight", "criterion.idle.bias"),
    ]
    assert all(name in report._repr_html_() for name in names)


@pytest.mark.parametrize(
    ("operator", "explanation"),
    [(Summed, "0.250 times the true gradient"), (ByTokens, "without its WEIGHT")],
)
def test_what_is_no_mean_over_samples_is_found(operator, explanation):
    with four_shards(operator) as run:
        report = run.verify(num_steps=1)
    assert not report.ok
    assert explanation in str(report)
    assert {row.parameter for row in report.rows if not row.ok} == {"weight", "bias"}


class NotANumber(Small):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info) * torch.nan


def test_gradients_that_are_no_numbers_are_inconclusive():
    with four_shards(NotANumber) as run:
        report = run.verify(num_steps=1)
    assert report.ok is None, str(report)
    assert "is NaN or infinite in one process" in str(report).splitlines()[0]


def regularised(make_layer, as_function=None):
    class Regularised(Small):
        def setup(self, config):
            hidden = nn.Linear(3, 8).double()
            self.model = nn.Sequential(hidden, make_layer(), nn.Linear(8, 2).double())
            self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
            self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
            self.register_data(train_loader=self.data())

        def compute_loss(self, batch, batch_info):
            features, targets = batch
            if as_function is not None:
                features = as_function(features)
            return self.criterion(self.model(features), targets)

    return Regularised


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        (lambda: nn.Dropout(0.5), "dropout is off in layer `1`"),
        (lambda: nn.BatchNorm1d(8).double(), "layer `1` uses its running statistics"),
    ],
)
def test_layers_that_depend_on_the_split_are_pinned_and_named(layer, note):
    with four_shards(regularised(layer)) as run:
        report = run.verify(num_steps=2)
        model = run.get_local_operator().model
        run.train(num_steps=1)
        assert model.training
        assert model[1].training
    assert report.ok, str(report)
    assert [note in text for text in report.notes] == [True]


@pytest.mark.parametrize(
    "operator",
    [
        regularised(nn.Identity, lambda rows: rows + torch.rand_like(rows)),
        regularised(nn.Identity, lambda rows: rows + np.random.normal()),
        regularised(lambda: nn.BatchNorm1d(8, track_running_stats=False).double()),
    ],
    ids=["noise", "noise_of_numpy", "batch_statistics_only"],
)
def test_what_cannot_be_pinned_is_computed_by_shard_and_is_inconclusive(operator):
    with four_shards(operator) as run:
        report = run.verify(num_steps=2)
    assert report.ok is None, str(report)
    assert "computed shard after shard" in str(report).splitlines()[0]
    assert "one process: equal" not in str(report)


def drop_paths(rows):
    """As models with stochastic depth do."""
    return rows * rows.new_empty(len(rows), 1).bernoulli_(0.9).div_(0.9)


def attend(rows):
    heads = rows.view(1, 1, *rows.shape)
    return (
        nn.functional.scaled_dot_product_attention(
            rows[:, None], rows[:, None], rows[:, None], dropout_p=0.5
        )[:, 0]
        + 0 * heads.sum()
    )


@pytest.mark.parametrize("function", [nn.functional.dropout, drop_paths, attend])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_dropout_without_a_layer_is_off_and_the_batch_taken_whole(function, is_wrong):
    class Whole(regularised(nn.Identity, function)):
        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            return loss * len(batch[0]) if is_wrong else loss

    with four_shards(Whole) as run:
        report = run.verify(num_steps=2)
    assert report.ok is not is_wrong, str(report)
    assert report.inconclusive == ""
    assert "dropout is off in what calls it as a function, attention for one" in report.notes


def mask_at_random(rows):
    return rows * torch.empty(rows.shape, dtype=torch.bool).bernoulli_(0.5)


def test_a_mask_that_is_drawn_is_no_dropout():
    with four_shards(regularised(nn.Identity, mask_at_random)) as run:
        report = run.verify(num_steps=2)
    assert report.ok is None, str(report)
    assert not any("dropout" in note for note in report.notes)


def test_random_numbers_in_a_loop_of_ones_own_are_named_and_not_failed_on():
    class Noisy(OwnLoop):
        def train_batch(self, batch, batch_info):
            noisy = batch[0] + torch.rand_like(batch[0])
            return super().train_batch((noisy, batch[1]), batch_info)

    with four_shards(Noisy) as run:
        report = run.verify()
    assert report.ok is None
    assert "not against one process" in report.inconclusive
    assert all("not held against one process" in row.verdict for row in report.rows)
    assert "one process: equal" not in str(report)


class Counting(Small):
    """Fails in its second life, after a step: the first copy that verify makes."""

    lives = 0

    def setup(self, config):
        super().setup(config)
        type(self).lives += 1
        self.fails = type(self).lives == config.get("fails_in_life")

    def compute_loss(self, batch, batch_info):
        if self.fails and self.global_step > 1:
            random.random()
            raise ArithmeticError("as it happens")
        return super().compute_loss(batch, batch_info)


def everything(run):
    operator = run.get_local_operator()
    grads = [p.grad.clone() for p in operator.model.parameters()]
    generators = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    generators.append(torch.tensor(random.getstate()[1]))
    state = run.state_dict()
    momentum = [s["momentum_buffer"] for s in state["optimizers"][0]["state"].values()]
    return [*grads, *generators, *momentum, weights(operator.model)], state["position"]


@pytest.mark.parametrize("fails_in_life", [None, 2, 3])
def test_the_run_is_as_it_was_also_after_an_error(fails_in_life):
    class Fresh(Counting):
        pass

    with trainer(Fresh, num_shards=2, config={"fails_in_life": fails_in_life}) as run:
        run.train(num_steps=2)
        tensors, position = everything(run)
        if fails_in_life is None:
            assert run.verify(num_steps=3).ok
        else:
            with pytest.raises(ArithmeticError, match="as it happens") as caught:
                run.verify(num_steps=3)
            alone = "raised while one process computed the workers' global batch"
            assert (alone in getattr(caught.value, "__notes__", [])) == (fails_in_life == 3)
        after, position_after = everything(run)
        assert all(map(torch.equal, tensors, after))
        assert position == position_after
        assert run.train()["epoch"] == 1
        continued = weights(run.get_model())
    with trainer(Small, num_shards=2) as undisturbed:
        undisturbed.train()
        assert torch.equal(continued, weights(undisturbed.get_model()))


def test_objects_of_ones_own_stay_as_they_are():
    model = linear()
    optimizer = sgd(model)
    operator = TrainingOperator.from_model(
        model, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader()
    )
    with trainer(operator) as run:
        run.train(num_steps=1)
        assert run.verify(num_steps=2).ok
        assert same(weights(model), by_hand(1))
        run.train(num_steps=1)
    assert same(weights(model), by_hand(2))


class TakesApart(Small):
    """Its `setup` takes what it reads out of the config."""

    def setup(self, config):
        super().setup(config)
        assert config["model"]["layers"].pop("first") == 3


def test_a_config_that_setup_takes_apart_is_whole_for_the_next_setup():
    given = {"model": {"layers": {"first": 3}}, "shared": []}
    with four_shards(TakesApart, config=given) as run:
        run.train(num_steps=1)
        assert run.verify().ok
        assert run.get_local_operator().config["shared"] is given["shared"]
    assert given == {"model": {"layers": {"first": 3}}, "shared": []}


def test_an_open_window_is_left_open():
    with trainer(accumulate=3) as run:
        run.train(num_steps=1)
        waiting = [p.grad.clone() for p in run.get_local_operator().model.parameters()]
        assert run.verify(num_steps=2).ok
        kept = [p.grad for p in run.get_local_operator().model.parameters()]
        assert all(map(torch.equal, waiting, kept))
        run.train()
        interrupted = weights(run.get_model())
    with trainer(accumulate=3) as undisturbed:
        undisturbed.train()
        assert torch.equal(interrupted, weights(undisturbed.get_model()))


def test_workers_with_loaders_of_their_own_cannot_be_verified():
    def spec(num_workers):
        options = Options(add_dist_sampler=False)
        return WorkerSpec(Small, {}, num_workers, num_shards=num_workers, seed=0, options=options)

    with pytest.raises(NotAvailableError, match=r"LS003.*global batch"):
        refuse_unverifiable(spec(2))
    refuse_unverifiable(spec(1))


def test_what_cannot_be_verified_says_why():
    class Idle(Small):
        def train_batch(self, batch, batch_info):
            return {}

    with trainer(Idle) as run, pytest.raises(NotAvailableError, match=r"LS003.*nothing to verify"):
        run.verify()

    class NoLoader(Small):
        def data(self):
            return None

    with trainer(NoLoader) as run:
        with pytest.raises(ConfigurationError, match="no train loader"):
            run.verify()
        with pytest.raises(ConfigurationError, match="num_steps"):
            run.verify(num_steps=0)
    with pytest.raises(TrainerClosedError):
        run.verify()


def test_a_model_that_every_setup_shares_is_refused_and_untouched():
    shared = linear()

    class Sharing(Small):
        def setup(self, config):
            self.model, self.optimizer, self.criterion = self.register(
                models=shared, optimizers=sgd(shared), criterion=nn.MSELoss()
            )
            self.register_data(train_loader=self.data())

    with trainer(Sharing) as run:
        run.train(num_steps=1)
        before = weights(shared)
        with pytest.raises(ConfigurationError):
            run.verify()
        assert torch.equal(before, weights(shared))
        run.train()


def test_a_step_that_depends_on_the_copy_is_found():
    """SGD's weights follow their gradients; what else changes them is found beside them."""

    class Drifts(Small):
        lives = 0

        def setup(self, config):
            super().setup(config)
            type(self).lives += 1
            self.factor = 1 + 1e-6 * type(self).lives

        def train_batch(self, batch, batch_info):
            result = super().train_batch(batch, batch_info)
            with torch.no_grad():
                self.model.bias.mul_(self.factor)
            return result

    with trainer(Drifts) as run:
        report = run.verify()
    assert [row.parameter for row in report.rows if not row.ok] == ["bias"]
    assert "the gradients agree, the weights after the step do not" in str(report)
