# SPDX-License-Identifier: Apache-2.0
"""Random states of their own for a user's sampler, dataset or iterable.

A sampler may draw from torch's, numpy's or Python's global generators, or from generators that
it holds itself, when its iterator is made or at any later index. The draws have to be the same on
every worker and after a resume, and must not disturb what the training step draws in between. So
a sampler runs only inside an `IsolatedRandomness`: while the sampler runs, the global generators
and those that the sampler holds carry the sampler's own states, and their previous ones
otherwise. Entering copies a few kilobytes; that is why indices are drawn in chunks, not one by
one.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from lockstep.randomness import RandomState, derive_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


class _Held(Protocol):
    """A generator that a user's object holds, whatever library it comes from."""

    def origin(self) -> int | str: ...
    def seed(self, seed: int) -> None: ...
    def get(self) -> Any: ...
    def set(self, state: Any) -> None: ...


class _TorchHeld:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def origin(self) -> int | str:
        return self._generator.initial_seed()

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)


class _NumpyHeld:
    def __init__(self, generator: np.random.Generator) -> None:
        self._bits = generator.bit_generator

    def origin(self) -> int | str:
        return _digest(self._bits.state)

    def seed(self, seed: int) -> None:
        self._bits.state = _bits_like(self._bits, seed).state

    def get(self) -> Any:
        return self._bits.state

    def set(self, state: Any) -> None:
        self._bits.state = state


class _LegacyNumpyHeld:
    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def origin(self) -> int | str:
        return _digest(self.get())

    def seed(self, seed: int) -> None:
        fresh = np.random.RandomState(_bits_like(self._generator._bit_generator, seed))
        self.set(fresh.get_state(legacy=False))

    def get(self) -> Any:
        return self._generator.get_state(legacy=False)

    def set(self, state: Any) -> None:
        self._generator.set_state(state)


def _bits_like(bits: np.random.BitGenerator, seed: int) -> Any:
    make: Any = type(bits)
    return make(seed)


def _digest(state: object) -> str:
    with np.printoptions(threshold=sys.maxsize):
        text = repr(state)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _PythonHeld:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def origin(self) -> int | str:
        return _digest(self._generator.getstate())

    def seed(self, seed: int) -> None:
        self._generator.seed(seed)

    def get(self) -> Any:
        return self._generator.getstate()

    def set(self, state: Any) -> None:
        self._generator.setstate(state)


def held_generators(*holders: object) -> list[_Held]:
    """The generators among `holders` and in the attributes of the samplers among them."""
    found: dict[int, _Held] = {}
    _search(list(holders), found, set())
    return list(found.values())


def _search(values: list[Any], found: dict[int, _Held], seen: set[int]) -> None:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Generator):
            found[id(value)] = _TorchHeld(value)
        elif isinstance(value, np.random.Generator):
            found[id(value)] = _NumpyHeld(value)
        elif isinstance(value, np.random.RandomState):
            found[id(value)] = _LegacyNumpyHeld(value)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            found[id(value)] = _PythonHeld(value)
        elif isinstance(value, Sampler):
            _search(list(vars(value).values()), found, seen)
        elif hasattr(value, "__iter__") and hasattr(value, "__dict__"):
            # A sampler need not derive from torch's class. One level only: what it holds
            # besides generators and samplers (datasets, models) is not ours to walk through.
            inner = [v for v in vars(value).values() if _is_random_source(v)]
            _search(inner, found, seen)


def _is_random_source(value: object) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, Sampler)
    return isinstance(value, kinds)


class IsolatedRandomness:
    """The random state in which one pass over a user's object runs, and nothing else does.

    A generator that is held is seeded by (`seed`, its own first seed), so that the user's
    choice still tells runs apart, and gets its own state back whenever the isolation is left.

    Args:
        seed: what the global generators start from.
        held: generators from `held_generators`.
    """

    def __init__(self, seed: int, held: Iterable[_Held] = ()) -> None:
        self._seed = seed
        self._held = list(held)
        self._global: RandomState | None = None
        self._private: list[Any] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        outside, private_outside = RandomState.capture(), [one.get() for one in self._held]
        try:
            self._resume()
            yield
            self._global = RandomState.capture()
            self._private = [one.get() for one in self._held]
        finally:
            outside.restore()
            for one, state in zip(self._held, private_outside, strict=True):
                one.set(state)

    def _resume(self) -> None:
        if self._global is None:
            seed_all(self._seed)
            for number, one in enumerate(self._held):
                one.seed(derive_seed(self._seed, "held", number, one.origin()))
            return
        self._global.restore()
        for one, state in zip(self._held, self._private, strict=True):
            one.set(state)

    def open(self, items: Iterable[T]) -> Iterator[T]:
        """``iter(items)`` inside."""
        with self.entered():
            return iter(items)

    def draw(self, iterator: Iterator[T], count: int) -> list[T]:
        """The next `count` items, fewer at the end, drawn inside."""
        with self.entered():
            return list(islice(iterator, count))
