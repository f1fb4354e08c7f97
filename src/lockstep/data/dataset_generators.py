# SPDX-License-Identifier: Apache-2.0
"""Seeds the random generators that a dataset, its transforms or a collate function hold.

``self.rng = numpy.random.default_rng(0)`` in a dataset is copied to every process that reads: all
copies would draw the same numbers, for other samples, and which numbers a sample gets would depend
on how many processes there are. So lockstep seeds them as it seeds the global generators.

The generators of samplers have a narrower search (`find_generators`): it numbers them, and orders
of samples that states of earlier versions go on with follow from these numbers. A stream, which is
order and data in one, has both searches (`find_generators_of_data`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.held_generators import generators_in
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


class DatasetGenerators:
    """The generators that some objects hold, by where; in this process.

    Args:
        holders: a dataset, a collate function.
    """

    def __init__(self, *holders: object) -> None:
        self._found = generators_in(*holders)

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
