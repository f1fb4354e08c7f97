# SPDX-License-Identifier: Apache-2.0
"""Of `lockstep.operator.weight_averages`: which buffers are mixed, and which are the model's."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn


class Generates(Regression):
    """A layer whose largest singular value is 1, and one with running statistics."""

    def setup(self, config):
        normed = config["normalise"](linear())
        model = nn.Sequential(normed, nn.BatchNorm1d(2, dtype=torch.float64))
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss(), ema=0.8
        )
        self.register_data(train_loader=loader())


@pytest.mark.parametrize(
    "normalise", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_the_vectors_of_spectral_norm_are_the_models(normalise):
    """A mean of unit vectors is shorter than 1, and the singular value that it gives as well."""
    with trainer(Generates, config={"normalise": normalise}) as run:
        run.train(num_steps=6)
        average, model = run.get_averaged_model(), run.get_model()
    averaged, trained = dict(average.named_buffers()), dict(model.named_buffers())
    vectors = [name for name in trained if name.endswith(("_u", "_v"))]
    assert len(vectors) == 2
    for name in vectors:
        assert torch.equal(averaged[name], trained[name])
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(averaged[name], trained[name])
