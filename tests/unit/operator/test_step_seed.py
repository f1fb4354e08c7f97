# SPDX-License-Identifier: Apache-2.0
"""What an optimizer draws in its step depends on the run and the step, and on nobody's samples."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn

from lockstep import TrainingOperator

STEPS = 4


class Draws(torch.optim.SGD):
    def step(self, closure=None):
        self.drawn = [*getattr(self, "drawn", []), torch.rand(()).item()]
        return super().step(closure)


class Drops(Regression):
    """Each shard draws for its samples."""

    optimizer_cls = Draws

    def setup(self, config):
        self.model, self.drawn_behind = linear(), []
        self.register(
            models=self.model,
            optimizers=self.optimizer_cls(self.model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )
        self.register_data(train_loader=loader())

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        return nn.functional.mse_loss(self.model(nn.functional.dropout(features)), targets)


class DropsInItsOwnLoop(Drops):
    def train_batch(self, batch, batch_info):
        self._optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self._optimizer.step()
        self.drawn_behind.append(torch.rand(()).item())
        return {"train_loss": loss.item()}

    @property
    def _optimizer(self):
        return self._lockstep.registered.optimizers[0]


class OwnLoopThatDrawsAlone(DropsInItsOwnLoop):
    optimizer_cls = torch.optim.SGD


def drawn(operator_cls, **arguments):
    """In each of the first steps."""
    with trainer(operator_cls, **arguments) as one:
        one.train(num_steps=STEPS)
        numbers = one.get_local_operator()._lockstep.registered.optimizers[0].drawn
    assert len(set(numbers)) == STEPS
    return numbers


@pytest.mark.parametrize("other", [{"num_shards": 2}, {"operator_cls": DropsInItsOwnLoop}])
def test_steps_draw_the_same_whoever_has_drawn_before(other):
    assert drawn(**{"operator_cls": Drops, **other}) == drawn(Drops)


def test_another_run_draws_others():
    assert not set(drawn(Drops)) & set(drawn(Drops, seed=1))


def test_a_loop_goes_on_to_draw_as_if_the_step_had_not():
    behind = []
    for operator_cls in (DropsInItsOwnLoop, OwnLoopThatDrawsAlone):
        with trainer(operator_cls) as one:
            one.train()
            behind.append(one.get_local_operator().drawn_behind)
    assert behind[0] == behind[1]


class DrawsAroundItsClosure(torch.optim.SGD):
    """Langevin noise before and behind each evaluation of the loss."""

    num_draws = 1

    def step(self, closure=None):
        for _ in range(2):
            self.drawn = [*getattr(self, "drawn", []), *torch.rand(self.num_draws).tolist()]
            with torch.enable_grad():
                loss = closure()
            self.drawn += torch.rand(self.num_draws).tolist()
        super().step()
        return loss


class EvaluatesTwice(DrawsAroundItsClosure):
    num_draws = 0


class GivesArguments(EvaluatesTwice):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure(True, scale=0.5)
        torch.optim.SGD.step(self)
        return loss


class StepsWithAClosure(DropsInItsOwnLoop):
    optimizer_cls = DrawsAroundItsClosure

    def train_batch(self, batch, batch_info):
        def evaluate():
            self._optimizer.zero_grad()
            loss = self.compute_loss(batch, batch_info)
            loss.backward()
            self.drawn_behind.append(torch.rand(()).item())
            return loss

        loss = self._optimizer.step(evaluate)
        self.drawn_behind.append(torch.rand(()).item())
        return {"train_loss": loss.item()}


class ClosureDrawsLess(StepsWithAClosure):
    def compute_loss(self, batch, batch_info):
        features, targets = batch
        return nn.functional.mse_loss(self.model(features), targets)


class ClosureTakesArguments(StepsWithAClosure):
    optimizer_cls = GivesArguments

    def train_batch(self, batch, batch_info):
        def evaluate(backward, *, scale):
            self._optimizer.zero_grad()
            loss = scale * self.compute_loss(batch, batch_info)
            if backward:
                loss.backward()
            return loss

        return {"train_loss": self._optimizer.step(evaluate).item()}


class NobodyElseDraws(StepsWithAClosure):
    optimizer_cls = EvaluatesTwice


def test_a_step_draws_the_same_whatever_its_closure_has_drawn():
    found = []
    for operator_cls in (StepsWithAClosure, ClosureDrawsLess):
        with trainer(operator_cls) as one:
            one.train(num_steps=STEPS)
            found.append(one.get_local_operator()._optimizer.drawn)
    assert found[0] == found[1]
    # Behind the first evaluation and before the second one nothing is drawn in between.
    assert len(set(found[0])) == len(found[0]) == 4 * STEPS


def test_a_closure_goes_on_to_draw_as_if_the_step_had_not():
    behind = []
    for operator_cls in (StepsWithAClosure, NobodyElseDraws):
        with trainer(operator_cls) as one:
            one.train()
            behind.append(one.get_local_operator().drawn_behind)
    assert behind[0] == behind[1]
    assert len(set(behind[0])) == len(behind[0])


def test_a_closure_may_take_arguments():
    with trainer(ClosureTakesArguments) as one:
        assert one.train(num_steps=STEPS)["batch_count"] == STEPS


def test_between_two_calls_a_step_is_the_users_own():
    """A trainer that is not shut down has the same objects, and leaves other loops alone."""
    model = linear()
    mine = sgd(model)
    operator_cls = TrainingOperator.from_model(
        model, optimizer=mine, criterion=nn.MSELoss(), train_loader=loader()
    )
    with trainer(operator_cls) as one:
        one.train(num_steps=1)
        for optimizer in (mine, sgd(model)):
            torch.manual_seed(1)
            expected = torch.rand(3)
            torch.manual_seed(1)
            optimizer.step()
            assert torch.equal(torch.rand(3), expected)
        assert one.train()["batch_count"] == 3
