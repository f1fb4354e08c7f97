# SPDX-License-Identifier: Apache-2.0
"""Parts of `ShardedSync` without ranks; with ranks: `tests/procs/test_units_table.py`."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.procs.odd_optimizers import RemembersNorms
from tests.torch_versions import needs_unit_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from lockstep._torch_compat.fully_shard import ShardedUnit, _hidden_tensors
from lockstep.errors import NotAvailableError
from lockstep.group import Group
from lockstep.sync.sharded_sync import ShardedSync
from lockstep.worker.state_dict import copy_own_rows, copy_to_cpu


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(dist.group.WORLD)
    yield group
    group.close()
    dist.destroy_process_group()


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


def test_tensors_are_found_where_torch_does_not_look():
    """Not those that torch finds, nor a module's weights, nor what has no graph."""
    weight = torch.ones(2, requires_grad=True)
    opened, hidden, deep, in_set = (weight * number for number in range(4))
    holder = SimpleNamespace(weight=weight, plain=torch.ones(1), module=torch.nn.Linear(1, 1))
    holder.tensors, holder.torch = [hidden, {"deep": SimpleNamespace(of=deep)}, opened], torch
    holder.itself = holder
    found = list(_hidden_tensors((holder, {in_set}, {"a": [opened]})))
    assert sorted(map(id, found)) == sorted(map(id, (hidden, deep, in_set)))


def train(model, optimizer, backward):
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.ones(3, 2, dtype=torch.float64)).square().mean())
        optimizer.step()


@needs_unit_hooks
@pytest.mark.parametrize("take", [copy_own_rows, copy_to_cpu])
def test_norms_and_lists_in_an_optimizers_state_come_back(one_rank, take):
    """A norm is a sum over ranks; what a list holds is in shards."""
    made = [torch.nn.Linear(2, 4, dtype=torch.float64) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    optimizers = [RemembersNorms(each.parameters()) for each in made]
    sync = ShardedSync(made[:1], one_rank, optimizers[:1])
    train(made[0], optimizers[0], sync.backward)
    optimizers[0].load_state_dict(take(optimizers[0].state_dict()))
    train(made[0], optimizers[0], sync.backward)
    for _ in range(2):
        train(made[1], optimizers[1], torch.Tensor.backward)
    norms = [each["norms"]["last"] for each in optimizers[0].state.values()]
    assert all(each.placements == (Replicate(),) for each in norms)  # no rank's part of a sum
    sync.detach()
    for ours, true in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert (ours.full_tensor() - true).abs().max() < 1e-12
