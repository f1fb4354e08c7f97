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
    """A generator that a user's object holds, whatever library the generator comes from.

    Attributes:
        origin: what the user's choice of a seed shows in, before anything was drawn.
        seed: starts the generator anew.
        get, set: its whole state, to be put back later.
    """

    origin: Callable[[], int | str]
    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _held(value: object) -> HeldGenerator | None:
    """`value` as a held generator; None if it is no generator, or one that has no state."""
    if isinstance(value, torch.Generator):
        return HeldGenerator(
            value.initial_seed, value.manual_seed, value.get_state, value.set_state
        )
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        get = value.getstate
        return HeldGenerator(lambda: _digest(get()), value.seed, get, value.setstate)
    if isinstance(value, np.random.Generator):
        return _of_bits(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return _of_legacy(value)
    return None


def _of_bits(bits: np.random.BitGenerator) -> HeldGenerator:
    def put(state: Any) -> None:
        bits.state = state

    return HeldGenerator(
        lambda: _digest(bits.state),
        lambda seed: put(_like(bits, seed).state),
        lambda: bits.state,
        put,
    )


def _of_legacy(generator: np.random.RandomState) -> HeldGenerator:
    # Its state holds more than that of its bits: half of the last pair of normal numbers.
    def get() -> Any:
        return generator.get_state(legacy=False)

    def start(seed: int) -> None:
        fresh = np.random.RandomState(_like(generator._bit_generator, seed))
        generator.set_state(fresh.get_state(legacy=False))

    return HeldGenerator(lambda: _digest(get()), start, get, generator.set_state)


def _like(bits: np.random.BitGenerator, seed: int) -> Any:
    make: Any = type(bits)
    return make(seed)


def _digest(state: object) -> str:
    with np.printoptions(threshold=sys.maxsize):
        text = repr(state)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def held_generators(*holders: object) -> list[HeldGenerator]:
    """The generators among `holders` and in the attributes of the samplers among them."""
    found: dict[int, HeldGenerator] = {}
    _search(holders, found, set())
    return list(found.values())


def _search(values: Iterable[Any], found: dict[int, HeldGenerator], seen: set[int]) -> None:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if (generator := _held(value)) is not None:
            found[id(value)] = generator
        elif isinstance(value, Sampler):
            _search(vars(value).values(), found, seen)
        elif hasattr(value, "__iter__") and hasattr(value, "__dict__"):
            # A sampler need not derive from torch's class. One level only: what it holds
            # besides generators and samplers (datasets, models) is not ours to walk through.
            inner = vars(value).values()
            _search([one for one in inner if _held(one) or isinstance(one, Sampler)], found, seen)


class IsolatedRandomness:
    """The random states in which one pass over a user's object runs, and nothing else does.

    A held generator is seeded by (`seed`, its own first seed), so that the user's choice still
    tells runs apart, and gets its own state back whenever the isolation is left.

    Args:
        seed: what the global generators start from.
        held: generators from `held_generators`.
    """

    def __init__(self, seed: int, held: Sequence[HeldGenerator] = ()) -> None:
        self._seed = seed
        self._held = held
        self._inside: tuple[RandomState, list[Any]] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
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
        for number, one in enumerate(self._held):
            one.seed(derive_seed(self._seed, "held", number, one.origin()))

    def _capture(self) -> tuple[RandomState, list[Any]]:
        return RandomState.capture(), [one.get() for one in self._held]

    def _restore(self, states: tuple[RandomState, list[Any]]) -> None:
        states[0].restore()
        for one, state in zip(self._held, states[1], strict=True):
            one.set(state)

    def open(self, items: Iterable[T]) -> Iterator[T]:
        """``iter(items)`` inside."""
        with self.entered():
            return iter(items)

    def draw(self, iterator: Iterator[T], count: int) -> list[T]:
        """The next `count` items, fewer at the end, drawn inside."""
        with self.entered():
            return list(islice(iterator, count))
