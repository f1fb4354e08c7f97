# SPDX-License-Identifier: Apache-2.0
"""Containers of every kind keep their kind; a leaf is found by its path."""

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.tensor_tree import keystr, tensors_in, tree_map, tree_map_with_path


@dataclass(frozen=True)
class Pair:
    image: Any
    label: Any


Named = collections.namedtuple("Named", ["x", "y"])


class Encoding(collections.UserDict):
    """A mapping that is no dict."""


ONE, TWO = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": ONE, 2: [TWO]}, ["['a']", "[2][0]"]),
        ((ONE, TWO), ["[0]", "[1]"]),
        (Named(ONE, TWO), ["[0]", "[1]"]),
        (Pair(ONE, TWO), [".image", ".label"]),
        (Encoding(a=ONE), ["['a']"]),
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
