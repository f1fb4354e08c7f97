# SPDX-License-Identifier: Apache-2.0
"""The loader that an operator's loop gets; with ranks: `tests/ranks/test_own_loops.py`."""

import pytest
import torch
from tests.unit.trainer.programs import Regression

from lockstep.errors import NotAvailableError
from lockstep.operator import Options, RankContext
from lockstep.sync.single_process import SingleProcess
from lockstep.worker.loader_sharding import make_sharded_loader


class InShards(SingleProcess):
    communicates_in_forward = True


class OwnValidation(Regression):
    def validate(self, val_iterator, info):
        return {"batches": len(list(val_iterator))}


class OwnValidationBatch(Regression):
    def validate_batch(self, batch, batch_info):
        return {}


@pytest.fixture
def in_shards():
    """Makes an operator whose model is in shards, as far as its loaders are concerned."""
    syncs = []

    def make(operator_cls, **options):
        operator = operator_cls({}, RankContext(options=Options(**options)))
        operator.setup(operator.config)
        registered = operator._lockstep.registered
        syncs.append(registered.sync)
        registered.sync = InShards(registered.modules(), averages=True)
        return operator

    yield make
    for each in syncs:
        each.detach()


@pytest.mark.parametrize("add_dist_sampler", [True, False])
def test_a_model_in_shards_is_not_evaluated_by_a_loop_of_ones_own(in_shards, add_dist_sampler):
    """A rank without batches runs the forwards of its peers, and the loop would count them."""
    batches = [torch.ones(2)]
    operator = in_shards(OwnValidation, add_dist_sampler=add_dist_sampler)
    make_sharded_loader(operator, batches, "train")
    with pytest.raises(NotAvailableError, match="override validate_batch instead"):
        make_sharded_loader(operator, batches, "validation")
    operator = in_shards(OwnValidationBatch, add_dist_sampler=add_dist_sampler)
    make_sharded_loader(operator, batches, "validation")
