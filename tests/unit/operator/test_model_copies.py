# SPDX-License-Identifier: Apache-2.0
"""A copy of a module in shards gets the attributes that the module has by now."""

import torch
from torch import nn

from lockstep.operator.model_copies import copy_attributes, copy_models


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
