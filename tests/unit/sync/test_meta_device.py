# SPDX-License-Identifier: Apache-2.0
"""Models without memory get values as their constructors would give them, as the same objects."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.sync.meta_device import initialise, is_on_meta

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def built(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def test_parameters_stay_the_objects_that_optimizers_hold_and_tied_ones_stay_tied():
    model = on_meta(Tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert is_on_meta(model)
    initialise(model, [], CPU)
    assert not is_on_meta(model)
    held = optimizer.param_groups[0]["params"]
    assert list(map(id, held)) == list(map(id, model.parameters()))
    assert model.head.weight is model.tokens.weight
    model.head(model.layers[0](model.tokens(torch.zeros(1, 3, dtype=torch.int64)))).sum().backward()
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def test_what_begins_as_ones_and_zeros_does():
    model = on_meta(Tied)
    torch.manual_seed(0)
    initialise(model, model.layers, CPU)
    expected = built(Tied)
    for (name, got), one in zip(model.named_parameters(), expected.parameters(), strict=True):
        if one.unique().numel() == 1:
            assert torch.equal(got, one), name
        else:
            assert 0.25 < got.std() / one.std() < 4.0, name
    for got, one in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(got, one)


def test_the_random_numbers_are_those_of_the_constructors():
    def network():
        return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    model = on_meta(network)
    torch.manual_seed(0)
    initialise(model, [], CPU)
    for got, one in zip(model.parameters(), built(network).parameters(), strict=True):
        assert torch.equal(got, one)


def test_frozen_and_marked_parameters_stay_so():
    model = on_meta(lambda: nn.Linear(2, 2))
    model.weight.requires_grad_(False)
    model.bias.mine = "mark"
    initialise(model, [], CPU)
    assert not model.weight.requires_grad
    assert model.bias.mine == "mark"


def test_what_has_values_keeps_them():
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    before = model[0].weight.clone()
    initialise(model, [], CPU)
    assert torch.equal(model[0].weight, before)


def test_a_module_that_does_not_say_how_it_begins_is_refused_before_anything_changes():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Told()))
    with pytest.raises(ConfigurationError, match=r"`1` \(Told\)"):
        initialise(model, [], CPU)
    assert all(param.is_meta for param in model.parameters())


class Masked(nn.Module):
    """Makes a buffer in its constructor alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class HalfWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))

    def reset_parameters(self):
        self.weight[:2].zero_()


def test_memory_that_nobody_has_written_to_is_refused():
    masked = on_meta(Masked)
    with pytest.raises(ConfigurationError, match="`mask` of Masked"):
        initialise(masked, [], CPU)
    with pytest.raises(ConfigurationError, match="`weight` of HalfWritten"):
        initialise(on_meta(HalfWritten), [], CPU)


def test_a_parameter_with_values_beside_one_without_keeps_them():
    model = on_meta(lambda: nn.Linear(2, 2))
    model.bias = nn.Parameter(torch.tensor([3.0, 4.0]))
    initialise(model, [], CPU)
    assert model.bias.tolist() == [3.0, 4.0]
    assert model.weight.isfinite().all()
