# SPDX-License-Identifier: Apache-2.0
"""A worker dies in a validation that has swapped weights: those who are left have the step's."""

import os
import signal
from pathlib import Path

import pytest
from tests.ray.surviving import Classifier, digest, trainer_of

pytestmark = pytest.mark.timeout(240)


class SwapsInValidation(Classifier):
    """Other weights while it validates; rank 1 dies in the middle, once."""

    def validate(self, val_iterator, info):
        weights = list(self.model.parameters())
        for each in weights:
            each.data.mul_(0.5)
        result = super().validate(val_iterator, info)
        for each in weights:
            each.data.mul_(2.0)
        return result

    def validate_batch(self, batch, batch_info):
        if self.world_rank == 1:
            Path(batch_info["died"]).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        if (group := self._lockstep.context.group).size == 2:
            group.exchange("waits for rank 1")
        return super().validate_batch(batch, batch_info)


@pytest.mark.slow
def test_weights_that_a_validation_has_swapped_are_not_those_of_a_step(tmp_path):
    with trainer_of(SwapsInValidation) as trainer:
        trainer.train(num_steps=3)
        bits = digest(trainer)
        trainer.validate(info={"died": str(tmp_path / "died")})
        assert len(trainer.status()["recoveries"]) == 1
        assert digest(trainer) == bits
