# SPDX-License-Identifier: Apache-2.0
"""The user's loader as it is, on every worker: ``add_dist_sampler=False``.

The user shares the data out: a sampler of their own, or other files on each worker. Then
the workers need not have equally many batches, but a step has to happen on all of them: a
worker that has run out borrows its own last batch, counted as no samples.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from lockstep.data.batch_structure import leading_length
from lockstep.data.global_batches import announce_epoch, check_reiterable, known_length
from lockstep.data.isolated_randomness import IsolatedRandomness, held_generators
from lockstep.data.sharded_loader import LoadedPart, Step
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from lockstep.data.shard_placement import ShardPlacement


class UserShardedLoader:
    """One worker's own loader, in steps of one part each.

    Its global random numbers are functions of (seed, epoch, first shard); generators that
    the loader holds start every epoch from (their first seed, seed, epoch), the same on
    every worker that gave the same generator.

    Args:
        loader: a ``DataLoader``, or a re-iterable of ready batches. Iterated itself.
        placement: the worker's shards.

    Raises:
        NotShardableError: an iterator, which cannot start again at the next epoch.
        WrongTypeError: `loader` is no loader.
    """

    def __init__(self, loader: Any, placement: ShardPlacement) -> None:
        if not isinstance(loader, DataLoader):
            check_reiterable(loader, allow_shared_out=True)
        self.placement = placement
        self._loader = loader
        self._shards = tuple(placement.shards)
        self._holders = [loader]
        if isinstance(loader, DataLoader):
            self._holders = [loader.generator, loader.sampler, loader.batch_sampler]

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in this worker's epoch, where the loader tells; others may have another."""
        return known_length(self._loader)

    def batches(
        self, epoch: int, start_step: int = 0, num_steps: int | None = None
    ) -> Generator[Step, None, None]:
        """The worker's batches of an epoch.

        Args:
            epoch: from 0.
            start_step: where to begin. Batches before it are read and thrown away: only the
                user's loader knows what they hold.
            num_steps: steps of the whole epoch, agreed by all workers. Fewer batches of its
                own are made up by the last one again, counted as 0 samples; a worker without
                any has steps without parts. None: as many as the loader has.
        """
        last: Any = None
        step = 0
        for batch in islice(self._read(epoch), num_steps):
            last = (batch,)
            if step >= start_step:
                yield Step(step, [LoadedPart(batch, leading_length(batch), self._shards)], None)
            step += 1
        for index in range(max(step, start_step), num_steps or 0):
            yield Step(index, [LoadedPart(last[0], 0, self._shards)] if last else [], None)

    def close(self) -> None:
        """Nothing to end: the loader, and its worker processes, are the user's."""

    def _read(self, epoch: int) -> Iterator[Any]:
        holders = (self._loader, *self._holders)
        announce_epoch(epoch, (h.sampler if type(h) is BatchSampler else h for h in holders))
        first = self._shards[0] if self._shards else -1
        isolation = IsolatedRandomness(
            derive_seed(self.placement.seed, "unsharded", epoch, first),
            held_generators(*self._holders),
        )
        iterator = isolation.open(self._loader)
        while drawn := isolation.draw(iterator, 1):
            yield drawn[0]
