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

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Sampler

from lockstep.held_generators import HeldGenerator, as_held_generator, generators_in
from lockstep.randomness import RandomState, derive_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

T = TypeVar("T")


def find_generators(*holders: object) -> list[HeldGenerator]:
    """The generators among `holders` and in the attributes of the samplers among them."""
    found: dict[int, HeldGenerator] = {}
    _collect_generators(holders, found, set())
    return list(found.values())


def find_generators_of_data(*holders: object) -> list[HeldGenerator]:
    """As `find_generators`, and those that data (streams) among `holders` hold within: in a
    transform, in another stream, in their module. As in other datasets, those are seeded by where
    they are held: a training step may draw from them as well, and their state is then of no use."""
    found = find_generators(*holders)
    known = {id(one.generator) for one in found}
    # Behind the others, whose numbers go into their seeds: states of earlier versions go on.
    return found + [
        replace(one, origin=partial(str, place))
        for place, one in generators_in(*holders).items()
        if id(one.generator) not in known
    ]


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
