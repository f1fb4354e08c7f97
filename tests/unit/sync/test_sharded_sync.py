# SPDX-License-Identifier: Apache-2.0
"""Parts of `ShardedSync` without ranks; with ranks: `tests/procs/test_units_table.py`."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lockstep._torch_compat.fully_shard import ShardedUnit
from lockstep.errors import NotAvailableError
from lockstep.group import Group
from lockstep.sync.sharded_sync import ShardedSync


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(NotAvailableError, match=r"got +torch 2.*\n.*torch 2\.13 or newer"):
        ShardedSync([model], Group(None), [])


def test_what_counts_nothing_is_zero_where_one_rank_is_left_and_torch_reduces_nothing():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), torch.nan)
    held = SimpleNamespace(_unsharded_param=weight, unsharded_accumulated_grad=torch.ones(2))
    unit = object.__new__(ShardedUnit)
    unit._group = SimpleNamespace(fsdp_params=[held])
    unit.scale_gradients(0.0)
    assert weight.grad.tolist() == held.unsharded_accumulated_grad.tolist() == [0.0, 0.0]
