# SPDX-License-Identifier: Apache-2.0
"""What `register` and `register_data` take, as users of RaySGD give it; and its decorator."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn
from torch.optim.lr_scheduler import SequentialLR, StepLR

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError, LockstepError, WrongTypeError
from lockstep.operator import override

MODEL = linear()
OF_ANOTHER = StepLR(sgd(MODEL), 1)
"""The scheduler of an optimizer that is not registered."""


def test_models_and_optimizers_in_a_dict_of_ones_own():
    class Named(TrainingOperator):
        def setup(self, config):
            self.named = {"one": linear(1), "other": linear(2)}
            self.back, _ = self.register(
                models=self.named.values(), optimizers=map(sgd, self.named.values())
            )

    with trainer(Named) as one:
        operator = one.get_local_operator()
        assert operator.back == list(operator.named.values())
        assert len(one.state_dict()["optimizers"]) == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"criterion": nn.MSELoss}, "call it first: pass an instance"),
        ({"criterion": "mse"}, "a module or a function of (output, target)"),
        ({"models": {"one": linear()}}, "models=list(the_dict.values())"),
        ({"optimizers": [sgd(MODEL)] * 2}, "was given one optimizer twice"),
        ({"schedulers": [OF_ANOTHER]}, "belongs to an optimizer that is not registered"),
        ({"schedulers": [SequentialLR(OF_ANOTHER.optimizer, [OF_ANOTHER], [])]}, "not registered"),
    ],
)
def test_what_would_change_nothing_or_fail_later_is_refused(given, named):
    class Given(Regression):
        def setup(self, config):
            held = {"models": MODEL, "optimizers": sgd(MODEL), "criterion": nn.MSELoss()}
            self.register(**{**held, **given})

    with pytest.raises(LockstepError) as caught, trainer(Given, scheduler_step_freq="epoch"):
        pass
    assert named in str(caught.value)


def test_a_criterion_on_meta_needs_no_unit_where_nothing_is_in_shards():
    class OnMeta(Regression):
        def setup(self, config):
            with torch.device("meta"):
                model, criterion = nn.Sequential(nn.Linear(4, 1)), nn.PReLU()
            self.register(
                models=model, optimizers=sgd(model), criterion=criterion, shard=[nn.Linear]
            )

    with trainer(OnMeta) as one:
        assert one.state_dict()["criterion"]["weight"].tolist() == [0.25]


def test_override_is_held_to_the_class():
    class Overrides(Regression):
        @override(TrainingOperator)
        def train_batch(self, batch, batch_info):
            return super().train_batch(batch, batch_info)

    with trainer(Overrides) as one:
        assert one.train()["batch_count"] == 4
    with pytest.raises(ConfigurationError, match="train_bach overrides nothing: TrainingOperator"):

        @override(TrainingOperator)
        def train_bach(self, batch, batch_info):
            pass


@pytest.mark.parametrize("several", [[loader(), loader()], (loader(),), {"a": loader()}])
def test_several_loaders_in_the_place_of_one(several):
    class Several(Regression):
        def data(self):
            return several

    with pytest.raises(WrongTypeError, match=r"train_loader=...\) takes one [^$]*Concat"):
        trainer(Several)
