# SPDX-License-Identifier: Apache-2.0
"""A copy of a module in shards gets the attributes that the module has by now."""

import torch
from torch import nn

from lockstep.operator.model_copies import (
    copy_attributes,
    copy_models,
    grow_copies,
    places_of_modules,
)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frequencies = torch.outer(torch.ones(2), torch.arange(3.0))
        self.temperature = 2.0
        self.first = [self.layer]


def test_attributes_of_now():
    model = Rotary()
    (copied,) = copy_models([model], torch.device("meta"))
    model.temperature = 0.5
    model.late = torch.ones(1, requires_grad=True) * 2
    model.train(False)
    names = dict(copied.named_modules())
    copies = {part: names[path] for path, part in model.named_modules()}
    weight = model.layer.weight.detach().clone()
    copy_attributes(copies, {id(model.layer.weight): weight})
    assert copied.temperature == 0.5
    assert not copied.training
    assert not copied.layer.training
    assert torch.equal(copied.frequencies, model.frequencies)
    assert copied.frequencies is not model.frequencies
    assert torch.equal(copied.late, torch.full((1,), 2.0))
    assert copied.first[0] is copied.layer
    assert copied.layer.weight.is_meta, "tables are not touched"


def test_modules_of_now():
    """Added, wrapped, moved and taken out since the copy was made."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    places, copied = places_of_modules([model]), copy_models([model], torch.device("meta"))
    first, last = copied[0][0], copied[0][2]
    model[1] = nn.BatchNorm1d(2)
    model[1].register_buffer("passing", torch.ones(1), persistent=False)
    model.insert(0, nn.Sequential(model[2], nn.Tanh()))
    del model[3]
    model.register_module("nothing", None)
    copies = grow_copies([model], copied, places)
    assert copies[model] is copied[0]
    assert list(copied[0].children()) == [copies[child] for child in model.children()]
    assert copied[0][0][0] is last
    assert copied[0][1] is first
    assert copied[0].nothing is None
    assert [type(part) for part in copied[0].modules()] == [type(part) for part in model.modules()]
    norm = copied[0][2]
    assert norm.state_dict().keys() == set(), "no values yet"
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked", "passing"]
    assert "passing" in norm._non_persistent_buffers_set
