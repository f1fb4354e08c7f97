# SPDX-License-Identifier: Apache-2.0
"""Rows that become a shard are those of this rank, among the ranks that there are now."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.errors import CheckpointError
from lockstep.local_rows import LocalRows
from lockstep.sync.parameter_shards import as_shard, shard_like


@pytest.fixture
def shard():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = torch.arange(10.0).view(5, 2)
    yield as_shard(whole.clone(), whole, DeviceMesh("cpu", [0]))
    dist.destroy_process_group()


def test_own_rows_become_a_shard(shard):
    rows = LocalRows(torch.ones(5, 2), torch.Size((5, 2)), 0)
    assert shard_like(rows, shard).full_tensor().equal(torch.ones(5, 2))


@pytest.mark.parametrize(("first", "count"), [(0, 3), (3, 2)])
def test_rows_that_this_rank_had_among_two_are_refused(shard, first, count):
    rows = LocalRows(torch.ones(count, 2), torch.Size((5, 2)), first)
    with pytest.raises(CheckpointError, match="rows of another rank") as refused:
        shard_like(rows, shard)
    assert refused.value.details["expected"] == "rows 0 to 5 of 5"
    assert refused.value.details["got"] == f"rows {first} to {first + count}"
