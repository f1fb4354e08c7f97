# SPDX-License-Identifier: Apache-2.0
"""Random generators that a user's object holds, and the search for them.

``self.rng = numpy.random.default_rng(0)`` in a dataset is copied to every process that reads: all
copies draw the same numbers, for other samples.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@dataclass(frozen=True, slots=True)
class HeldGenerator:
    """A generator that a user's object holds: torch's, numpy's or Python's, behind one interface.

    Attributes:
        generator: the object itself.
        origin: the seed with which the user made the generator, or a digest of its first state.
        seed: seeds the generator anew.
        get, set: read the generator's whole state, and put it back.
    """

    generator: Any
    origin: Callable[[], int | str]
    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]


def as_held_generator(value: Any) -> HeldGenerator | None:
    """`value` as a `HeldGenerator`; None if `value` is no generator, or one without a state."""
    kind = type(value)  # not `isinstance`, which asks an object of any class for its `__class__`
    if issubclass(kind, torch.Generator):
        return HeldGenerator(
            value, value.initial_seed, value.manual_seed, value.get_state, value.set_state
        )
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        get = value.getstate
        return HeldGenerator(value, lambda: _digest(get()), value.seed, get, value.setstate)
    if issubclass(kind, np.random.Generator):
        return _from_numpy_generator(value)
    if issubclass(kind, np.random.RandomState):
        return _from_random_state(value)
    return None


def _from_numpy_generator(generator: np.random.Generator) -> HeldGenerator:
    bits = generator.bit_generator

    def put(state: Any) -> None:
        bits.state = state

    return HeldGenerator(
        generator,
        lambda: _digest(bits.state),
        lambda seed: put(_new_bit_generator(bits, seed).state),
        lambda: bits.state,
        put,
    )


def _from_random_state(generator: np.random.RandomState) -> HeldGenerator:
    # A RandomState keeps more than its bit generator's state: the second of the last two normal
    # numbers, which it draws in pairs.
    def get() -> Any:
        return generator.get_state(legacy=False)

    def start(seed: int) -> None:
        fresh = np.random.RandomState(_new_bit_generator(generator._bit_generator, seed))
        generator.set_state(fresh.get_state(legacy=False))

    return HeldGenerator(generator, lambda: _digest(get()), start, get, generator.set_state)


def _new_bit_generator(bits: np.random.BitGenerator, seed: int) -> Any:
    make: Any = type(bits)
    return make(seed)


def _digest(state: object) -> str:
    with np.printoptions(threshold=sys.maxsize):
        text = repr(state)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def generators_in(*holders: object) -> dict[str, HeldGenerator]:
    """The generators that `holders` hold, by a place that is the same in every process.

    Those of a module count that a dataset's or a transform's methods name. Not the global ones.
    """
    found: dict[str, HeldGenerator] = {}
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
            found[place] = generator
        else:
            waiting += ((f"{place}.{name}", inner) for name, inner in _inside(value))
    return found


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
