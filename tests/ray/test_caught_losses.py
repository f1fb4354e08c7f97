# SPDX-License-Identifier: Apache-2.0
"""A loop that goes on after a `RuntimeError` catches the loss of another worker as well."""

from functools import cache

import pytest
from tests.ray.surviving import Classifier, digest, trainer_of
from torch import nn

import lockstep
from lockstep.testing import Strike

pytestmark = pytest.mark.timeout(120)

STEPS = 8


class CatchesErrors(Classifier):
    """For a batch that does not fit in memory; its loss is computed of all workers' rows."""

    joint_loss = True

    def compute_loss(self, batch, batch_info):
        logits = self.model(batch[0])
        everyone = lockstep.gather(logits)
        return nn.functional.cross_entropy(logits, batch[1]) + everyone.square().mean()

    def train_batch(self, batch, batch_info):
        try:
            return super().train_batch(batch, batch_info)
        except RuntimeError:
            return {"train_loss": 0.0}


@cache
def undisturbed():
    with trainer_of(CatchesErrors) as trainer:
        return trainer.train(num_steps=STEPS)["num_samples"], digest(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_its_steps_are_computed_again(phase):
    expected = undisturbed()
    strikes = [Strike("kill", rank=1, step=3, phase=phase)]
    with trainer_of(CatchesErrors, strikes, spare_workers=1) as trainer:
        samples = trainer.train(num_steps=STEPS)["num_samples"]
        assert (samples, digest(trainer)) == expected
        (recovery,) = trainer.status()["recoveries"]
    assert (recovery["step"], recovery["replayed"]) == (3, 1)
