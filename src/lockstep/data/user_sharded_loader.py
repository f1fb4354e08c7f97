# SPDX-License-Identifier: Apache-2.0
"""A loader that the user has sharded already (``add_dist_sampler=False``), read as it is.

The user's sampler shares the data out, or each worker reads other files. The workers need not have
equally many batches, but every step needs all workers: a worker whose loader has ended repeats its
last batch with weight 0, so that it takes part in the collectives.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.batch_rows import (
    count_one,
    count_samples,
    leading_length,
    rows_error,
    rows_of,
)
from lockstep.data.global_batches import (
    announce_epoch,
    check_reiterable,
    is_exactly,
    length_or_none,
)
from lockstep.data.isolated_randomness import IsolatedRandomness, find_generators
from lockstep.data.sharded_loader import LoadedPart, Step
from lockstep.errors import DataOrderError, NotShardableError
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from lockstep.data.epoch_order import FirstItems
    from lockstep.data.shard_assignment import ShardAssignment
    from lockstep.group import Group


_END: Final = object()
"""What stands for the next batch of a loader that has ended."""


class UserShardedLoader:
    """One worker's own loader as steps of one part each; a `StepSource`.

    The worker with the most batches decides how many steps an epoch has. The workers know by their
    lengths how many each has; a length that a stream claims may be too large (the total over the
    workers, often). So where a loader's length is such a claim, the workers ask each other in each
    step whether one of them has a batch left, if their loop lets them.

    While the loader reads, the global random numbers are functions of (seed, epoch, first shard);
    generators that the loader holds start every epoch from (their first seed, seed, epoch), the
    same on every worker that gave the same generator.

    Args:
        loader: a ``DataLoader``, or a re-iterable of ready batches. The loader itself is iterated,
            not a copy.
        assignment: the worker's shards.
        borrows: a worker whose loader has ended repeats its last batch. False: it has steps without
            parts.
        may_ask_peers: all workers read at the same points of their loops, so that they may
            communicate there.

    Raises:
        NotShardableError: `loader` is an iterator, which cannot start again at the next epoch.
        WrongTypeError: `loader` is no loader.
    """

    joint = True
    has_exact_length = False
    global_batch_size: int | None = None
    first_items: FirstItems | None = None

    def __init__(
        self,
        loader: Any,
        assignment: ShardAssignment,
        *,
        borrows: bool = True,
        may_ask_peers: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            check_reiterable(loader, allow_already_sharded=True)
        self.assignment = assignment
        self._borrows = borrows
        self._may_ask_peers = may_ask_peers
        # The steps of an epoch with peers, and those that are asked whether they have a batch left;
        # None where the lengths tell.
        self._steps_with_peers = 0
        self._asked: Group | None = None
        self._loader = loader
        self._agreed_steps: int | None = None
        self._has_other_layout = False
        self._shards = tuple(assignment.shards)
        self._holders = [loader]
        if isinstance(loader, DataLoader):
            self._holders = [loader.generator, loader.sampler, loader.batch_sampler]

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps on which the workers agreed; before `agree`, the length of the own loader."""
        return length_or_none(self._loader) if self._agreed_steps is None else self._agreed_steps

    def agree(self, group: Group, epoch: int) -> None:
        """Agree with the other workers on how many steps an epoch has.

        Gradient:
            None: metadata only.

        Collective:
            Every rank of `group`. Blocks. One small exchange.

        Raises:
            NotShardableError: a rank's loader has no length, and there are other ranks.
            DataOrderError: a rank's loader is empty, and another rank's is not.
        """
        said = group.exchange((length_or_none(self._loader), _has_claimed_length(self._loader)))
        lengths = [length for length, _ in said]
        if group.size > 1 and None in lengths:
            raise NotShardableError(
                "with add_dist_sampler=False the workers must know how many batches they have",
                where=f"rank {lengths.index(None)}",
                got="a loader without a length",
                fix="give the loader (or its dataset) a __len__",
            )
        if 0 in lengths and any(lengths):
            raise DataOrderError(
                "a worker's own loader is empty, so that it has no batch to keep step with",
                where=f"rank {lengths.index(0)}",
                got=f"batches by rank: {lengths}",
                fix="give every worker at least one batch, or leave add_dist_sampler at True",
            )
        self._agreed_steps = max(lengths)
        self._steps_with_peers = 0 if group.size == 1 else max(lengths)
        asks = self._may_ask_peers and any(is_claim for _, is_claim in said)
        self._asked = group if asks and group.size > 1 else None

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """None: only the user's loader knows what its batches hold."""
        return None

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        """Empty; see `samples_of`."""
        return []

    def batches(
        self, epoch: int, start_step: int = 0, num_steps: int | None = None
    ) -> Generator[Step, None, None]:
        """The worker's batches of an epoch.

        Args:
            epoch: from 0.
            start_step: the first step. Batches before it are read and dropped: only the user's
                loader knows what they hold.
            num_steps: steps of the whole epoch. If None: the steps on which several workers agreed,
                or those up to the end of the last worker's loader. A worker with fewer batches
                repeats its last one, with weight 0, or has steps without parts. A worker with more
                batches has more steps, which `lockstep.worker.data_cursor` refuses.

        Collective:
            Every rank of the group that agreed, for every step: one small exchange, where a length
            is a claim.
        """
        asked = self._asked if num_steps is None else None
        num_steps = self._steps_with_peers if num_steps is None else num_steps
        read = self._read(epoch)
        borrowed: tuple[Any, ...] = ()
        for step in count():
            parts = [LoadedPart(each, 0, self._shards, is_borrowed=True) for each in borrowed]
            batch = next(read, _END)
            has_batch = batch is not _END
            if has_batch:
                parts = [self._part(batch, step)]
                borrowed = (batch,) if self._borrows else ()
            if step < start_step:
                continue
            is_left = step < num_steps if asked is None else any(asked.exchange(has_batch))
            if not has_batch and not is_left:
                return
            yield Step(step, parts, None)

    def close(self) -> None:
        """Do nothing: the loader and its worker processes are the user's."""

    def _part(self, batch: Any, step: int) -> LoadedPart:
        """`batch` with its samples; called for each batch of an epoch, in order."""
        num_asked = _num_asked(self._loader, step)
        num_samples = self._count(batch, num_asked)
        miscount = None if num_samples == num_asked else rows_error(batch)
        return LoadedPart(batch, num_samples, self._shards, (), miscount)

    def _count(self, batch: Any, num_asked: int | None) -> int:
        if num_asked is None:
            return leading_length(batch)
        # A dimension of one is common. It shows nothing, unless earlier batches have shown it.
        if num_asked < 2 and not self._has_other_layout:
            return count_one(batch)
        counted = count_samples(batch, num_asked)
        self._has_other_layout |= counted != rows_of(batch)
        return counted

    def _read(self, epoch: int) -> Iterator[Any]:
        holders = (self._loader, *self._holders)
        announce_epoch(epoch, (h.sampler if type(h) is BatchSampler else h for h in holders))
        first = self._shards[0] if self._shards else -1
        isolation = IsolatedRandomness(
            derive_seed(self.assignment.seed, "unsharded", epoch, first),
            find_generators(*self._holders),
        )
        iterator = isolation.open(self._loader)
        while drawn := isolation.draw(iterator, 1):
            yield drawn[0]


def _has_claimed_length(loader: Any) -> bool:
    """Whether a stream, or an iterable of the user's, says itself how many batches it has."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return not isinstance(loader, (list, tuple))


def _num_asked(loader: Any, step: int) -> int | None:
    """The samples of which the loader makes a batch; None where it does not say so certainly."""
    if not isinstance(loader, DataLoader):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_stream = isinstance(loader.dataset, IterableDataset)
    # Each process of a loader reads its own part of a stream, and ends with a short batch.
    if not is_exactly(sampler, BatchSampler) or (is_stream and loader.num_workers):
        return None
    length = length_or_none(loader.dataset if is_stream else sampler.sampler)
    return None if length is None else min(sampler.batch_size, length - step * sampler.batch_size)
