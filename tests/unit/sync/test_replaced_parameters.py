# SPDX-License-Identifier: Apache-2.0
"""`lockstep.sync.replaced_parameters`: nothing computes with a parameter that was replaced."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from lockstep.errors import UnknownParameterError
from lockstep.sync.replaced_parameters import replace, successor_of


@pytest.fixture
def old():
    made = nn.Parameter(torch.ones(3, 2))
    made.grad = torch.ones(3, 2)
    replace(made, nn.Parameter(torch.zeros(3, 2)), "layer.weight")
    return made


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda old: old + 1, "add"),
        (lambda old: torch.stack([old, old]), "stack"),
        (lambda old: nn.functional.linear(torch.ones(1, 2), weight=old), "linear"),
        (lambda old: nn.utils.clip_grad_norm_([old], 1.0), "grad"),
        (lambda old: torch.optim.SGD([old], lr=0.1).step(), "grad"),
        (lambda old: old.data, "data"),
        (lambda old: old.detach(), "detach"),
        (lambda old: old.requires_grad_(False), "requires_grad_"),
        (lambda old: old.copy_(torch.ones(3, 2)), "copy_"),
        (copy.deepcopy, "data"),
        (pickle.dumps, "data"),
    ],
)
def test_its_values_are_refused_by_name(old, read, name):
    with pytest.raises(UnknownParameterError) as caught:
        read(old)
    assert caught.value.details["where"] == "`layer.weight`"
    assert caught.value.details["got"] == f"`{name}` of it"


def test_what_describes_it_is_as_before(old):
    assert isinstance(old, nn.Parameter)
    assert (old.shape, old.size(0), old.dim(), old.ndim, len(old)) == ((3, 2), 3, 2, 2, 3)
    assert (old.numel(), old.dtype, old.device.type) == (6, torch.float32, "cpu")
    assert old.requires_grad
    assert old.is_leaf
    assert f"{old}" == "`layer.weight` from before register(), shape (3, 2)"
    assert repr(old) == f"Parameter containing:\n{old}"
    assert {old: 1}[old] == 1


def test_its_memory_is_freed_and_views_of_before_stay():
    made = nn.Parameter(torch.ones(3, 2))
    view, storage = made.detach(), made.untyped_storage()
    replace(made, torch.zeros(3, 2), "weight")
    assert view.sum() == 6.0
    with torch._C.DisableTorchFunctionSubclass():
        assert made.untyped_storage().nbytes() == 4
    assert storage.nbytes() == 24
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_what_is_in_its_place(old):
    assert torch.equal(successor_of(old), torch.zeros(3, 2))
    assert successor_of(torch.zeros(1)) is None
