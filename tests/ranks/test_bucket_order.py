# SPDX-License-Identifier: Apache-2.0
"""Buckets beside other collectives of the same ranks: the gradient of one process, or an error.

Wherever collectives could meet the wrong ones here they are equally long, so that gloo adds them up
without an error.
"""

import pytest
from torch import nn

from harness import outcomes, reset, rows
from lockstep.errors import GradientNotReducedError
from lockstep.sync import replicate
from lockstep.sync.ddp_sync import DDPSync

WIDTH = 8
ONE_WEIGHT_MB = WIDTH * WIDTH * 8 / 2**20
"""One weight to a bucket, which is then as long as the rows of a rank."""


def square():
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.main, self.extra = square(), square(), square()

    def forward(self, x):
        return self.main(self.encoder(x)) + self.extra(x)


def wrapped(model, *, group, bucket_cap_mb, **ddp_args):
    return DDPSync([model], group, ddp_args=ddp_args, bucket_cap_mb=bucket_cap_mb)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cap_mb", [25, ONE_WEIGHT_MB])
@pytest.mark.parametrize("attach", [replicate, wrapped])
def test_models_that_look_alike_in_another_order(attach, cap_mb, size):
    """Each rank begins with another one; at no rank may the mean of the others' look right."""
    replicas = [[reset(Net(), seed=3) for _ in range(size)] for _ in range(size)]

    def body(group):
        models = replicas[group.rank]
        syncs = [attach(each, group=group, bucket_cap_mb=cap_mb) for each in models]
        chosen = syncs[group.rank].models[0] if attach is wrapped else models[group.rank]
        try:
            chosen(rows(WIDTH, WIDTH, seed=1)).square().mean().backward()
        finally:
            for sync in syncs:
                sync.detach()

    for error in outcomes(size, body):
        assert isinstance(error, GradientNotReducedError)
        assert "different rounds together" in str(error)
