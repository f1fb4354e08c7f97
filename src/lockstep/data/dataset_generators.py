# SPDX-License-Identifier: Apache-2.0
"""Finds the random generators that a dataset, its transforms or a collate function hold.

``self.rng = numpy.random.default_rng(0)`` in a dataset is copied to every process that reads: all
copies would draw the same numbers, for other samples, and which numbers a sample gets would depend
on how many processes there are. So lockstep seeds them as it seeds the global generators.

The generators of samplers have a narrower search (`find_generators`): it numbers them, and orders
of samples that states of earlier versions go on with follow from these numbers.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lockstep.data.isolated_randomness import HeldGenerator, as_held_generator
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_LENGTH: Final = 100
"""Longer lists hold samples, or names of files; transforms are few."""

_MAX_VISITED: Final = 10_000
"""Objects that are searched, nearest first: some milliseconds, once an epoch."""

_OPAQUE: Final = (str, bytes, int, float, complex, ModuleType, torch.Tensor, np.ndarray)

_METHODS_OF_GLOBAL: Final[tuple[Any, ...]] = (np.random.rand, random.random)

_GLOBAL: Final = (torch.default_generator, *(each.__self__ for each in _METHODS_OF_GLOBAL))
"""The global generators, which `seed_all` seeds; modules may have them among their names."""

_READING: Final = ("__getitem__", "__getitems__", "__call__", "forward", "__iter__")
"""Methods of a dataset or a transform that may draw from generators of their module."""


class DatasetGenerators:
    """The generators that some objects hold, by where; in this process.

    Args:
        holders: a dataset, a collate function.
    """

    def __init__(self, *holders: object) -> None:
        self._found: dict[str, HeldGenerator] = {}
        waiting = deque((str(number), holder) for number, holder in enumerate(holders))
        visited: list[Any] = []  # kept alive: the address of one that is gone may be another's
        seen = {id(one) for one in _GLOBAL}
        while waiting and len(visited) < _MAX_VISITED:
            place, value = waiting.popleft()
            if isinstance(value, _OPAQUE) or id(value) in seen:
                continue
            seen.add(id(value))
            visited.append(value)
            if (generator := as_held_generator(value)) is not None:
                self._found[place] = generator
            else:
                waiting += ((f"{place}.{name}", inner) for name, inner in _inside(value))

    def are_among(self, others: DatasetGenerators) -> bool:
        """Whether `others` hold each of these generators, at the same place."""
        known = {place: one.generator for place, one in others._found.items()}
        return all(known.get(place) is one.generator for place, one in self._found.items())

    def seed(self, seed: int) -> None:
        """Seed each anew, by `seed` and by where it is held."""
        for place, one in self._found.items():
            one.seed(derive_seed(seed, "held", place))

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Put their states back afterwards: a sampler may hold one of them, too."""
        before = [one.get() for one in self._found.values()]
        try:
            yield
        finally:
            for one, state in zip(self._found.values(), before, strict=True):
                one.set(state)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` refers to, by names that are the same in every process."""
    if isinstance(value, list | tuple | dict):
        if len(value) <= _MAX_LENGTH:
            members = value.values() if isinstance(value, dict) else value
            yield from ((str(number), inner) for number, inner in enumerate(members))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("arguments", value.args), ("named", value.keywords))
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _inside_function(value)
    elif isinstance(value, type):
        yield from _inside_class(value)
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).items())
        yield from ((each.__qualname__, each) for each in type(value).__mro__)


def _inside_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing was assigned yet
            yield name, cell.cell_contents
    yield "defaults", (function.__defaults__ or ())
    yield from _global_generators(function)


def _inside_class(one: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(one).items():
        if as_held_generator(value) is not None:
            yield name, value
        elif name in _READING and isinstance(value, FunctionType):
            yield from _global_generators(value)


def _global_generators(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, value in list(function.__globals__.items()):
        if as_held_generator(value) is not None:
            yield f"global {name}", value
