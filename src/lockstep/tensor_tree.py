# SPDX-License-Identifier: Apache-2.0
"""Functions on trees of tensors (batches, outputs of models, states), as in torch's pytree.

A container is a mapping, a list, a tuple (named ones too) or a dataclass; everything else is a
leaf. A list or tuple of nothing but plain values is a leaf, too: rows of a batch, as torch's
``default_collate`` leaves them; a named tuple is none. The functions have the names that they have
in torch's pytree.

Rejected: torch's pytree and optree themselves. Both take a dataclass, and a mapping that is no dict
(`BatchEncoding`), for one leaf unless its class is registered for the whole process; both lose
the `_metadata` that a module's ``state_dict()`` carries, and optree sorts the keys of a dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PLAIN_TYPES: Final = (str, bytes, int, float, complex, bool, np.generic, type(None))
"""The types of a batch's rows that are no tensors."""


class Key(NamedTuple):
    """The key of a container's child: a mapping's key, a sequence's index, a dataclass's field."""

    form: str
    value: Any

    def __str__(self) -> str:
        return self.form.format(self.value)


KeyPath = tuple[Key, ...]
"""The keys from the root of a tree to a leaf."""

Rebuild = Callable[[Any, list[Any]], Any]
"""A function from a container and new children to a container around those."""


def keystr(path: KeyPath) -> str:
    """The path as one writes it in Python: ``['image'][0].mask``."""
    return "".join(map(str, path))


def children_of(tree: Any) -> list[tuple[Key, Any]] | None:
    """The children of a container, by their keys; None for a leaf."""
    if isinstance(tree, PackedSequence):
        return None  # a tuple of tensors whose rows are interleaved
    if isinstance(tree, Mapping):
        return [(Key("[{!r}]", key), child) for key, child in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(Key(".{}", f.name), getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    if isinstance(tree, list | tuple) and not is_rows(tree):
        return [(Key("[{}]", number), child) for number, child in enumerate(tree)]
    return None


def is_rows(tree: Any) -> bool:
    """Whether the tree is a sequence of plain values, one for each row of a batch."""
    is_sequence = isinstance(tree, list | tuple) and not hasattr(tree, "_fields")
    return is_sequence and all(isinstance(row, PLAIN_TYPES) for row in tree)


def rebuild_container(like: Any, values: list[Any]) -> Any:
    """A container of the kind of `like` around other children, in the order of `children_of`."""
    if isinstance(like, Mapping):
        named: Any = dict(zip(like, values, strict=True))
        if type(like) is dict:
            return named
        twin: Any = _copy_of_mapping(like)
        for key, value in named.items():
            twin[key] = value
        return twin
    if dataclasses.is_dataclass(like):
        twin = copy.copy(like)
        for field, value in zip(dataclasses.fields(like), values, strict=True):
            object.__setattr__(twin, field.name, value)  # frozen ones as well
        return twin
    if hasattr(like, "_fields"):
        return type(like)(*values)
    return type(like)(values)


def _copy_of_mapping(like: Mapping[Any, Any]) -> Any:
    """A copy that can be written to without `like`; the values are the same objects."""
    if isinstance(like, dict) or hasattr(type(like), "__copy__"):
        return copy.copy(like)
    # The copy of any other class shares its attributes, of which one may be the dict itself.
    return copy.deepcopy(like, {id(value): value for value in like.values()})


def tree_map(
    function: Callable[[Any], Any], tree: Any, rebuild: Rebuild = rebuild_container
) -> Any:
    """The same structure around ``function(leaf)`` of every leaf."""
    return tree_map_with_path(lambda _, leaf: function(leaf), tree, rebuild)


def tree_map_with_path(
    function: Callable[[KeyPath, Any], Any],
    tree: Any,
    rebuild: Rebuild = rebuild_container,
    path: KeyPath = (),
) -> Any:
    """The same structure around ``function(path, leaf)`` of every leaf."""
    children = children_of(tree)
    if children is None:
        return function(path, tree)
    values = [tree_map_with_path(function, child, rebuild, (*path, key)) for key, child in children]
    return rebuild(tree, values)


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves, in the order of `children_of`."""
    return (leaf for _, leaf in leaves_with_path(tree))


def leaves_with_path(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves with their paths, in the order of `children_of`."""
    children = children_of(tree)
    if children is None:
        yield path, tree
    for key, child in children or []:
        yield from leaves_with_path(child, (*path, key))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The leaves that are tensors."""
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))
