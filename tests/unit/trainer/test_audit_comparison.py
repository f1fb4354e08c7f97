# SPDX-License-Identifier: Apache-2.0
"""A forgotten zero_grad in a loop of one's own is a line in the log, and nothing else is."""

import inspect
import logging

import pytest
from torch import nn

from unit.trainer.programs import Regression, trainer


class OwnLoop(Regression):
    clears_every = 0

    def train_batch(self, batch, batch_info):
        features, target = batch
        if self.clears_every and self.global_step % self.clears_every == 0:
            self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(features), target)
        self.differentiate(loss, len(features))
        if self.steps():
            self.optimizer.step()
        return {"train_loss": loss.item()}

    def differentiate(self, loss, count):
        loss.backward()

    def steps(self):
        return True


class OwnBackward(OwnLoop):
    def differentiate(self, loss, count):
        self.backward(loss)


class OwnBackwardWeighted(OwnLoop):
    def differentiate(self, loss, count):
        self.backward(loss, weight=float(count))


class ClearsOwnBackward(OwnBackwardWeighted):
    clears_every = 1


class Clears(OwnLoop):
    clears_every = 1


class ClearsModel(OwnLoop):
    def train_batch(self, batch, batch_info):
        self.model.zero_grad(set_to_none=False)
        return super().train_batch(batch, batch_info)


class Gathers(OwnLoop):
    """Two batches make one step, and are cleared after it."""

    clears_every = 2

    def steps(self):
        return self.global_step % 2 == 1


class GathersOverSteps(OwnLoop):
    """A step after each batch, and gradients of two: odd, and meant."""

    clears_every = 2


def told(operator, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lockstep"), trainer(operator) as run:
        for _ in range(3):
            run.train()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("operator", [OwnLoop, OwnBackward, OwnBackwardWeighted])
def test_gradients_that_nobody_clears_are_told_once_with_the_line_of_the_step(operator, caplog):
    (said,) = told(operator, caplog)
    lines, first = inspect.getsourcelines(OwnLoop)
    line = first + next(n for n, text in enumerate(lines) if "optimizer.step()" in text)
    assert said.startswith("[LS116] ")
    assert "and grow" in said
    assert f"test_audit_comparison.py:{line}" in said
    assert "optimizer.zero_grad()" in said


@pytest.mark.parametrize(
    "operator",
    [Regression, Clears, ClearsModel, ClearsOwnBackward, Gathers, GathersOverSteps],
)
def test_gradients_that_are_cleared_or_gathered_on_purpose_are_not(operator, caplog):
    assert told(operator, caplog) == []
