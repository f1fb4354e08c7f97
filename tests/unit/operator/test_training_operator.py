# SPDX-License-Identifier: Apache-2.0
"""What a user may override, and what the methods are given and give back."""

import collections
import dataclasses

import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    Regression,
    by_hand,
    linear,
    loader,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError
from lockstep.keys import NUM_STEPS, SCHEDULER_STEP, USE_FP16

# ----------------------------------------------------------------- what register gives back


@pytest.mark.parametrize("kind", [list, tuple])
def test_register_returns_the_very_objects_in_the_shape_given(kind):
    class Several(TrainingOperator):
        def setup(self, config):
            models = kind([linear(1), linear(2)])
            optimizers = kind([sgd(models[0]), sgd(models[1])])
            schedulers = kind([torch.optim.lr_scheduler.StepLR(optimizers[0], 1)])
            criterion = nn.MSELoss()
            self.given = (models, optimizers, criterion, schedulers)
            self.back = self.register(
                models=models, optimizers=optimizers, criterion=criterion, schedulers=schedulers
            )

    with trainer(Several, scheduler_step_freq="manual") as one:
        operator = one.get_local_operator()
        assert all(a is b for a, b in zip(operator.back, operator.given, strict=True))
        models = one.get_model()
        assert isinstance(models, list)
        assert [type(model) for model in models] == [nn.Linear, nn.Linear]


@pytest.mark.parametrize(
    ("further", "count"), [({}, 2), ({"criterion": nn.functional.mse_loss}, 3)]
)
def test_register_returns_only_what_was_given(further, count):
    class Alone(TrainingOperator):
        def setup(self, config):
            model = linear()
            self.back = self.register(models=model, optimizers=sgd(model), **further)

    with trainer(Alone) as one:
        back = one.get_local_operator().back
        assert len(back) == count
        assert isinstance(back[0], nn.Linear)
        assert isinstance(one.get_model(), nn.Linear)


def test_the_only_registered_need_not_be_kept_in_attributes():
    class Forgetful(TrainingOperator):
        def setup(self, config):
            model = linear()
            self.register(models=[model], optimizers=[sgd(model)], criterion=nn.MSELoss())
            self.register_data(train_loader=loader())

    with trainer(Forgetful) as one:
        one.train()
        (model,) = one.get_model()
    assert same(weights(model), by_hand(4))


def test_several_models_need_a_loss_of_ones_own_and_the_message_says_which():
    class Two(TrainingOperator):
        def setup(self, config):
            models = [linear(1), linear(2)]
            self.register(
                models=models,
                optimizers=sgd(nn.ModuleList(models)),
                criterion=nn.MSELoss(),
            )
            self.register_data(train_loader=loader())

    class Own(Two):
        def compute_loss(self, batch, batch_info):
            features, target = batch
            first, second = self._lockstep.registered.models
            return self._lockstep.registered.criterion(first(features) + second(features), target)

    with (
        trainer(Two) as one,
        pytest.raises(ConfigurationError, match="override compute_loss") as caught,
    ):
        one.train()
    assert "self.model" in str(caught.value)
    with trainer(Own) as one:
        losses = [one.train()["train_loss"] for _ in range(3)]
    assert losses[2] < losses[0]


# --------------------------------------------------------------------------------- info


class Noting(Regression):
    def setup(self, config):
        super().setup(config)
        self.seen = collections.defaultdict(list)

    def train_epoch(self, iterator, info):
        self.seen["train_epoch"].append(dict(info))
        return super().train_epoch(iterator, info)

    def train_batch(self, batch, batch_info):
        self.seen["train_batch"].append(dict(batch_info))
        return super().train_batch(batch, batch_info)

    def validate(self, val_iterator, info):
        self.seen["validate"].append(dict(info))
        return super().validate(val_iterator, info)

    def validate_batch(self, batch, batch_info):
        self.seen["validate_batch"].append(dict(batch_info))
        return super().validate_batch(batch, batch_info)


def test_what_info_and_batch_info_hold():
    given = {"mine": 1, "epoch_idx": "overwritten"}
    with trainer(Noting, scheduler_step_freq="manual") as one:
        one.train(num_steps=5, info=given)
        one.validate(num_steps=1, info={"mine": 2})
        seen = one.get_local_operator().seen
    assert given == {"mine": 1, "epoch_idx": "overwritten"}
    expected = {"mine": 1, NUM_STEPS: 5, USE_FP16: False, SCHEDULER_STEP: "manual"}
    assert seen["train_epoch"] == [{**expected, "epoch_idx": epoch} for epoch in (0, 1)]
    assert seen["train_batch"] == [
        {**expected, "epoch_idx": epoch, "batch_idx": batch, "global_step": step}
        for step, (epoch, batch) in enumerate([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)])
    ]
    assert seen["validate"] == [{"mine": 2}]
    assert seen["validate_batch"] == [{"mine": 2, "batch_idx": 0}]


# ----------------------------------------------------------------------------- overriding


class OwnBatch(Regression):
    def train_batch(self, batch, batch_info):
        features, target = batch
        loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(features)}


class OwnBackward(OwnBatch):
    def train_batch(self, batch, batch_info):
        features, target = self.to_device(batch)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer.step()
        return {"train_loss": loss.item()}


class OwnEpoch(Regression):
    def train_epoch(self, iterator, info):
        self.model.train()
        losses = []
        for features, target in iterator:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), target)
            loss.backward()
            self.optimizer.step()
            self.global_step += 1  # as RaySGD's own loop did
            losses.append(loss.item())
        return {"train_loss": sum(losses) / len(losses), "batches": len(losses)}


class AroundEpoch(Regression):
    def train_epoch(self, iterator, info):
        result = super().train_epoch(iterator, info)
        return {**result, "from_around": info["epoch_idx"]}


class AroundBatch(Regression):
    def train_batch(self, batch, batch_info):
        features, target = batch
        result = super().train_batch((features.clone(), target), batch_info)
        return {**result, "twice": 2 * result["train_loss"]}


class OwnLoss(Regression):
    def compute_loss(self, batch, batch_info):
        features, target = batch
        error = self.model(features) - target
        return error.square().mean(), {"mae": error.abs().mean(), "step": batch_info["global_step"]}


class AroundLoss(Regression):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {"one": 1.0}


EVERY_WAY = [
    Regression,
    OwnBatch,
    OwnBackward,
    OwnEpoch,
    AroundEpoch,
    AroundBatch,
    OwnLoss,
    AroundLoss,
]


@pytest.mark.parametrize("operator", EVERY_WAY)
def test_every_way_of_writing_the_step_takes_the_same_steps(operator):
    with trainer(operator) as one:
        results = [one.train(num_steps=6), one.train()]
        got = weights(one.get_model())
        assert one.get_local_operator().global_step == 8
    assert same(got, by_hand(8))
    assert [result["num_samples"] for result in results] == [
        SAMPLES + 2 * BATCH,
        SAMPLES - 2 * BATCH,
    ]
    assert [result["batch_count"] for result in results] == [6, 2]
    assert [result["epoch"] for result in results] == [2, 2]


@pytest.mark.parametrize("operator", [OwnBatch, OwnBackward, AroundEpoch, AroundBatch, OwnLoss])
def test_every_way_reports_the_same_means(operator):
    with trainer() as one:
        expected = [one.train(num_steps=6), one.train()]
    with trainer(operator) as one:
        results = [one.train(num_steps=6), one.train()]
    for result, plain in zip(results, expected, strict=True):
        assert {key: result[key] for key in plain} == pytest.approx(plain, rel=1e-12)


def test_metrics_of_ones_own_are_means_over_samples():
    with trainer(OwnLoss) as one:
        result = one.train()
    counts = [6, 6, 6, 4]
    assert result["step"] == pytest.approx(
        sum(step * count for step, count in enumerate(counts)) / SAMPLES
    )
    assert result["last_step"] == 3
    assert {"mae", "last_mae", "train_loss", "last_train_loss"} <= result.keys()


def test_what_an_own_epoch_returns_is_weighted_by_the_samples_of_each_pass():
    with trainer(OwnEpoch) as one:
        result = one.train(num_steps=6)
        assert result["batches"] == pytest.approx(
            (4 * SAMPLES + 2 * 2 * BATCH) / (SAMPLES + 2 * BATCH)
        )
    with trainer(AroundEpoch) as one:
        result = one.train(num_steps=6)
        assert result["from_around"] == pytest.approx(2 * BATCH / (SAMPLES + 2 * BATCH))


def test_what_an_own_epoch_leaves_out_or_changes_counts():
    class Choosy(Regression):
        def train_epoch(self, iterator, info):
            result = super().train_epoch(iterator, info)
            return {"train_loss": -result["train_loss"], "num_samples": result["num_samples"]}

    with trainer() as one:
        plain = one.train()
    with trainer(Choosy) as one:
        result = one.train()
    assert result == {
        "num_samples": SAMPLES,
        "batch_count": 4,
        "epoch": 1,
        "train_loss": pytest.approx(-plain["train_loss"]),
    }


def test_an_own_epoch_around_ours_keeps_the_epoch_schedule():
    class Around(AroundEpoch):
        def setup(self, config):
            super().setup(config)
            self._lockstep.registered.schedulers.append(
                torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
            )

    with trainer(Around, scheduler_step_freq="epoch") as one:
        one.train(num_steps=9)
        assert one.get_local_operator().optimizer.param_groups[0]["lr"] == 0.1 * 0.25


def test_an_own_epoch_may_stop_early_and_the_rest_comes_next():
    class TwoAtATime(Regression):
        def train_epoch(self, iterator, info):
            for count, batch in enumerate(iterator):
                if count == 2:
                    break
                self.train_batch(batch, info)
            return {}

    with trainer(TwoAtATime) as one:
        assert len([one.train() for _ in range(2)]) == 2


@pytest.mark.parametrize("method", ["train_batch", "validate_batch"])
@pytest.mark.parametrize("result", [None, 0.5])
def test_a_batch_method_that_returns_no_metrics_says_what_to_return(method, result):
    operator = type("Silent", (Regression,), {method: lambda self, batch, info: result})
    with trainer(operator) as one, pytest.raises(TypeError, match=f"end {method} with: return"):
        one.train() if method == "train_batch" else one.validate()


@pytest.mark.parametrize("method", ["train_epoch", "validate"])
def test_a_loop_that_returns_no_metrics_says_what_to_return(method):
    operator = type("Silent", (Regression,), {method: lambda self, iterator, info: None})
    with trainer(operator) as one, pytest.raises(TypeError, match=f"end {method} with: return"):
        one.train() if method == "train_epoch" else one.validate()


@pytest.mark.parametrize("loss", [3.0, torch.ones(2), None])
def test_a_loss_that_is_none_says_what_to_return(loss):
    class Odd(Regression):
        def compute_loss(self, batch, batch_info):
            return loss

    with trainer(Odd) as one, pytest.raises(ConfigurationError, match=r"return loss.mean\(\)"):
        one.train()


def test_own_validation_loops_and_batches():
    class Own(Regression):
        def validate_batch(self, batch, batch_info):
            assert not self.model.training
            assert not torch.is_grad_enabled()
            features, target = batch
            error = (self.model(features) - target).abs().mean()
            return {"mae": error.item(), "num_samples": len(features)}

    class Around(Own):
        def validate(self, val_iterator, info):
            return {**super().validate(val_iterator, info), "about": "me"}

    features, target = problem()
    expected = (linear()(features) - target).abs().mean().item()
    for operator in (Own, Around):
        with trainer(operator) as one:
            result = one.validate()
            assert result["mae"] == pytest.approx(expected, rel=1e-12)
            assert result["num_samples"] == SAMPLES
            assert result.get("about") == ("me" if operator is Around else None)
            assert one.train()["batch_count"] == 4
            assert one.get_local_operator().model.training


# ---------------------------------------------------------------------------------- batches

Pair = collections.namedtuple("Pair", ["features", "target"])


@dataclasses.dataclass
class Example:
    features: torch.Tensor
    target: torch.Tensor
    names: list


class Encoding(collections.UserDict):
    """As Hugging Face's BatchEncoding: a mapping with a `.to` of its own."""

    moved = 0

    def to(self, device):
        Encoding.moved += 1
        return Encoding({key: value.to(device) for key, value in self.items()})


def as_nested(rows):
    features, target = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"inputs": [{"features": features}], "target": (target, "a name")}


MAKERS = {
    "dict": (
        lambda rows: dict(
            zip(("features", "target"), map(torch.stack, zip(*rows, strict=True)), strict=True)
        ),
        lambda batch: (batch["features"], batch["target"]),
    ),
    "namedtuple": (
        lambda rows: Pair(*map(torch.stack, zip(*rows, strict=True))),
        lambda batch: (batch.features, batch.target),
    ),
    "dataclass": (
        lambda rows: Example(*map(torch.stack, zip(*rows, strict=True)), names=["x"] * len(rows)),
        lambda batch: (batch.features, batch.target),
    ),
    "encoding": (
        lambda rows: Encoding(
            zip(("features", "target"), map(torch.stack, zip(*rows, strict=True)), strict=True)
        ),
        lambda batch: (batch["features"], batch["target"]),
    ),
    "nested": (
        as_nested,
        lambda batch: (batch["inputs"][0]["features"], batch["target"][0]),
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("own_loop", [False, True])
def test_batches_of_any_nesting(kind, own_loop):
    collate, take_apart = MAKERS[kind]

    class Nested(Regression):
        def data(self):
            rows = list(zip(*problem(), strict=True))
            return DataLoader(rows, BATCH, collate_fn=collate)

        def compute_loss(self, batch, batch_info):
            features, target = take_apart(batch)
            return self.criterion(self.model(features), target)

    class NestedOwn(Nested):
        def train_batch(self, batch, batch_info):
            self.optimizer.zero_grad()
            self.compute_loss(self.to_device(batch), batch_info).backward()
            self.optimizer.step()
            return {}

    with trainer(NestedOwn if own_loop else Nested) as one:
        result = one.train()
        got = weights(one.get_model())
    assert result["num_samples"] == SAMPLES
    assert same(got, by_hand(4))
    assert kind != "encoding" or Encoding.moved > 0


def test_a_batch_that_the_default_loss_does_not_understand_says_what_to_override():
    class Mapped(Regression):
        def data(self):
            return [{"text": ["a", "b"], "label": torch.zeros(2)}]

    with trainer(Mapped) as one, pytest.raises(ConfigurationError, match="override compute_loss"):
        one.train()


class Crowded(Regression):
    """Attributes named as one would name them, and as lockstep may have named its own."""

    def setup(self, config):
        super().setup(config)
        for name in ("_setting", "_sync", "_loaders", "_registered", "_precision", "_meters"):
            setattr(self, name, "the user's")
        self._delivered = self._latest = self._summary = self._committed = "the user's"


def test_a_users_attributes_do_not_meet_lockstep_s():
    with trainer(Crowded) as crowded, trainer() as plain:
        assert crowded.train() == plain.train()
        assert crowded.validate() == plain.validate()
        assert crowded.get_local_operator()._latest == "the user's"
