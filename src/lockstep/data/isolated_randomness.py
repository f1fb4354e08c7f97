# SPDX-License-Identifier: Apache-2.0
"""Runs a user's sampler, dataset or iterable with random states of its own.

A sampler may draw from torch's, numpy's or Python's global generators, or from generators that
it holds itself, when its iterator is made or at any later index. The draws have to be the same on
every worker and after a resume, and must not disturb what the training step draws in between. So
a sampler runs only inside an `IsolatedRandomness`, which sets the states of the global generators
and of those that the sampler holds before the sampler runs, and puts the previous states back
afterwards. Each entry copies a few kilobytes; that is why indices are drawn in chunks, not one by
one.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from lockstep.randomness import RandomState, derive_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")


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


def find_generators(*holders: object) -> list[HeldGenerator]:
    """The generators among `holders` and in the attributes of the samplers among them."""
    found: dict[int, HeldGenerator] = {}
    _collect_generators(holders, found, set())
    return list(found.values())


def _collect_generators(
    values: Iterable[Any], found: dict[int, HeldGenerator], seen: set[int]
) -> None:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if (generator := as_held_generator(value)) is not None:
            found[id(value)] = generator
        elif isinstance(value, Sampler):
            _collect_generators(vars(value).values(), found, seen)
        elif hasattr(value, "__iter__") and hasattr(value, "__dict__"):
            # A sampler need not derive from torch's class. Of such an object only generators and
            # samplers among its attributes are visited: a dataset or a model may be huge.
            inner = vars(value).values()
            _collect_generators(
                [one for one in inner if as_held_generator(one) or isinstance(one, Sampler)],
                found,
                seen,
            )


class IsolatedRandomness:
    """The random states in which one pass over a user's object runs, and no other code runs.

    A held generator is seeded by (`seed`, its own first seed), so that runs with different seeds of
    the user's still differ, and gets its previous state back whenever the isolation is left.

    Args:
        seed: the first seed of the global generators.
        held: generators from `find_generators`.
    """

    def __init__(self, seed: int, held: Sequence[HeldGenerator] = ()) -> None:
        self._seed = seed
        self._generators = held
        self._inside: tuple[RandomState, list[Any]] | None = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        outside = self._capture()
        try:
            if self._inside is None:
                self._start()
            else:
                self._restore(self._inside)
            yield
            self._inside = self._capture()
        finally:
            self._restore(outside)

    def _start(self) -> None:
        seed_all(self._seed)
        for number, one in enumerate(self._generators):
            one.seed(derive_seed(self._seed, "held", number, one.origin()))

    def _capture(self) -> tuple[RandomState, list[Any]]:
        return RandomState.capture(), [one.get() for one in self._generators]

    def _restore(self, states: tuple[RandomState, list[Any]]) -> None:
        states[0].restore()
        for one, state in zip(self._generators, states[1], strict=True):
            one.set(state)

    def open(self, items: Iterable[T]) -> Iterator[T]:
        """``iter(items)``, made inside the isolation."""
        with self.activate():
            return iter(items)

    def draw(self, iterator: Iterator[T], count: int) -> list[T]:
        """The next `count` items, fewer at the end, drawn inside the isolation."""
        with self.activate():
            return list(islice(iterator, count))
