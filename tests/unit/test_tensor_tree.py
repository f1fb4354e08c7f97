# SPDX-License-Identifier: Apache-2.0
"""Containers of every kind keep their kind; a leaf is found by its path."""

import collections
import collections.abc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.batch_join import concatenate
from lockstep.data.batch_rows import slice_rows
from lockstep.tensor_tree import keystr, tensors_in, tree_map, tree_map_with_path
from lockstep.trainer.split_predictions import split_predictions


@dataclass(frozen=True)
class Pair:
    image: Any
    label: Any


Named = collections.namedtuple("Named", ["x", "y"])


class Encoding(collections.UserDict):
    """A mapping that is no dict."""


class Wrapped(collections.abc.MutableMapping):
    """A mapping that keeps its dict inside, and says nothing of how it is copied."""

    def __init__(self, **values):
        self.held = values

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class Attributes(Wrapped):
    """A mapping whose values are its attributes."""

    held = property(vars)

    def __init__(self, **values):
        vars(self).update(values)


class Slotted(Wrapped):
    __slots__ = ("held",)


ONE, TWO = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": ONE, 2: [TWO]}, ["['a']", "[2][0]"]),
        ((ONE, TWO), ["[0]", "[1]"]),
        (Named(ONE, TWO), ["[0]", "[1]"]),
        (Pair(ONE, TWO), [".image", ".label"]),
        (Encoding(a=ONE), ["['a']"]),
        (Wrapped(a=ONE), ["['a']"]),
        (collections.OrderedDict(b=ONE, a=TWO), ["['b']", "['a']"]),
        ([1, 2, "rows"], [""]),
        (pack_sequence([ONE]), [""]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tree_is_rebuilt_around_its_leaves(tree, paths):
    found = []

    def look(path, leaf):
        found.append(keystr(path))
        return leaf

    twin = tree_map_with_path(look, tree)
    assert type(twin) is type(tree)
    assert found == paths


def test_every_leaf_is_mapped_and_tensors_are_found_in_order():
    tree = {"a": [ONE, Pair(TWO, "label")], "b": None}
    assert [id(tensor) for tensor in tensors_in(tree)] == [id(ONE), id(TWO)]
    doubled = tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, tree)
    assert doubled["a"][0].tolist() == [2, 2]
    assert doubled["a"][1].label == "label"
    assert ONE.tolist() == [1, 1]


def test_a_module_s_versions_stay_with_its_state():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert tree_map(lambda leaf: leaf, state)._metadata == state._metadata


@pytest.mark.parametrize("kind", [Encoding, Wrapped, Attributes, Slotted])
def test_parts_of_a_mapping_that_is_no_dict_leave_the_whole_as_it_is(kind):
    made = torch.ones(3, requires_grad=True) * 2  # a tensor that `copy.deepcopy` refuses
    whole = kind(x=torch.arange(3), y=[made, {"z": torch.arange(3)}])
    parts = [slice_rows(whole, slice(start, start + 1)) for start in range(3)]
    assert [type(part) for part in parts] == [kind] * 3
    assert [part["x"].tolist() for part in parts] == [[0], [1], [2]]
    assert whole["x"].tolist() == [0, 1, 2]
    assert whole["y"][0] is made
    assert concatenate(parts)["y"][1]["z"].tolist() == [0, 1, 2]
    assert parts[0]["y"][1]["z"].tolist() == [0]
    predictions = split_predictions(kind(x=torch.arange(3), y="all"), 3)
    assert [dict(each) for each in predictions] == [{"x": n, "y": "all"} for n in range(3)]
