# SPDX-License-Identifier: Apache-2.0
"""Under DDP a loss over the rows of all ranks has the gradient of one process."""

import pytest
import torch
from torch import nn

from harness import assert_same, gradients, reset, run_ranks
from lockstep.collectives import gather
from lockstep.sync.ddp_sync import DDPSync
from ranks.programs import X, mlp
from ranks.wrapped_programs import Scaled


def scores(own, everyone):
    return nn.functional.softplus(own @ everyone.T).mean()


@pytest.mark.parametrize("split", [(6, 6), (9, 3)])
@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_a_loss_over_gathered_rows(split, bucket_cap_mb):
    replicas = [[reset(mlp(), 3), reset(Scaled(), 4)] for _ in split]
    true = [reset(mlp(), 3), reset(Scaled(), 4)]
    rows = true[0](X)
    (scores(rows, rows) + true[1](rows, X[:, :3])).backward()

    def one_rank(group):
        modules = replicas[group.rank]
        sync = DDPSync(modules, group, ddp_args={}, bucket_cap_mb=bucket_cap_mb)
        part = slice(0, split[0]) if group.rank == 0 else slice(split[0], 12)
        own = sync.models[0](X[part])
        loss = scores(own, gather(own, group=group)) + sync.models[1](own, X[part, :3])
        sync.backward(loss, weight=split[group.rank])
        sync.detach()
        return gradients(*modules)

    for got in run_ranks(2, one_rank):
        assert_same(got, gradients(*true))
        assert torch.isfinite(got["1.scale"]).all()
