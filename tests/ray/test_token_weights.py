# SPDX-License-Identifier: Apache-2.0
"""Losses weighed by tokens: N workers end, and report, what one process does."""

import pytest
from tests.tokens import BATCH, LENGTHS, OwnEpoch, Tokens, by_hand, farthest

from lockstep import TorchTrainer
from lockstep.errors import MixedWeightsError
from lockstep.keys import BATCH_SIZE, NUM_SAMPLES, WEIGHT

CONFIG = {BATCH_SIZE: BATCH}


@pytest.mark.other_workers
# Shards without tokens are on different ranks; the last batch, of 4 samples, is uneven over 3.
@pytest.mark.parametrize(
    ("operator", "num_workers", "arguments"),
    [
        pytest.param(Tokens, 2, {"accumulate": 3}, marks=pytest.mark.slow),
        (Tokens, 3, {"num_shards": 4, "reproducible": True}),
        pytest.param(Tokens, 4, {}, marks=pytest.mark.slow),
        pytest.param(OwnEpoch, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_the_mean_over_the_tokens_of_the_global_batch(operator, num_workers, arguments):
    true = by_hand(arguments.get("accumulate", 1))
    with TorchTrainer(
        training_operator_cls=operator, num_workers=num_workers, config=CONFIG, **arguments
    ) as trainer:
        trainer.train()
        result = trainer.train()
        assert farthest(trainer.get_model(), true.model) < 1e-12
    assert result["train_loss"] == pytest.approx(true.loss, rel=1e-12)
    assert result[NUM_SAMPLES] == len(LENGTHS)
    assert WEIGHT not in result


class OnOneRank(Tokens):
    def compute_loss(self, batch, batch_info):
        loss, metrics = super().compute_loss(batch, batch_info)
        return loss.nan_to_num(), metrics if self.world_rank else {}


@pytest.mark.slow
def test_ranks_that_weigh_by_different_things_are_refused():
    with (
        TorchTrainer(training_operator_cls=OnOneRank, num_workers=2, config=CONFIG) as trainer,
        pytest.raises(MixedWeightsError, match="samples on rank 0"),
    ):
        trainer.train(num_steps=1)
