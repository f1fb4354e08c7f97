# SPDX-License-Identifier: Apache-2.0
"""A worker's part of every global batch, a function of (seed, epoch, step, shard).

The user's loader is kept. Its items (sample indices, mostly) form one stream, the same on
every worker; step k is a slice of it, cut into `num_shards` balanced parts; a worker reads
the parts of the shards it carries, through the user's own loader. Which worker that is, and
how many there are, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lockstep.data.batch_structure import leading_length
from lockstep.data.data_order_check import check_agreement, plan_fingerprint
from lockstep.data.global_batches import Window, describe
from lockstep.data.loader_copy import DirectDelivery, LoaderDelivery, PartPlan, StepPlan
from lockstep.data.seeded_dataset import ItemKind, Request, SeededDataset, Segment, as_it_is
from lockstep.data.shard_batch_size import share_bounds

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from lockstep.data.shard_placement import ShardPlacement
    from lockstep.group import Group


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """What a worker is given at once.

    Args:
        batch: as the user's loader makes it.
        num_samples: real samples; 0 if the batch is borrowed.
        shards: whose samples these are; of a borrowed batch, all that the worker carries.
        indices: what the loader's sampler gave for them, one for each sample (or for the whole
            batch, if the dataset holds ready batches); empty where there is no sampler.
    """

    batch: Any
    num_samples: int
    shards: tuple[int, ...]
    indices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One global batch, as one worker sees it.

    Args:
        index: within the epoch.
        parts: this worker's, in shard order.
        num_samples: over all shards, where that can be known without asking the others.
    """

    index: int
    parts: list[LoadedPart]
    num_samples: int | None


class ShardedLoader:
    """The user's loader, as far as the shards of one worker go.

    Attributes:
        joint: one part per step with all the worker's samples, instead of one per shard.

    Args:
        loader: a ``DataLoader``, or a re-iterable of ready batches. It is not changed.
        placement: the worker's shards.
        joint: as above.
        borrow: with `joint`, a worker without samples in a step gets shard 0's, to be counted
            as 0 samples, so that it takes part in what its peers compute.
        global_batch_size: in samples; overrides what the loader says.
        keeps_last: also an incomplete last batch that the loader would leave out.
        keeps_generators: reading leaves the global random generators as they were. A reader that
            seeds them for every part, before it computes, can do without.

    Raises:
        NotShardableError: the data cannot be shared out so that each sample is seen once.
        WrongTypeError: `loader` is no loader.
    """

    def __init__(
        self,
        loader: Any,
        placement: ShardPlacement,
        *,
        joint: bool,
        borrow: bool,
        global_batch_size: int | None = None,
        keeps_last: bool = False,
        keeps_generators: bool = True,
    ) -> None:
        self.placement = placement
        self.joint = joint
        self._borrow = borrow
        self._layout = describe(loader, placement.num_shards, global_batch_size)
        if keeps_last:
            self._layout = replace(self._layout, drop_last=False)
        kind, seed = self._layout.kind, placement.seed
        self._is_plain = not isinstance(loader, DataLoader)
        self._delivery: DirectDelivery | LoaderDelivery
        if isinstance(loader, DataLoader):
            dataset = SeededDataset(
                loader.dataset, kind, loader.collate_fn, seed, keeps_generators=keeps_generators
            )
            self._delivery = LoaderDelivery(loader, dataset, seed)
        else:
            batches = SeededDataset(None, kind, as_it_is, seed, keeps_generators=keeps_generators)
            self._delivery = DirectDelivery(batches)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a full step; None where batches are made elsewhere, one per shard."""
        return self._layout.per_step if self._layout.kind.counts_samples else None

    @property
    def items_per_step(self) -> int:
        """Items of the stream (samples, or batches made elsewhere) in a full step."""
        return self._layout.per_step

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch; None where the user's objects have no length."""
        return self._layout.num_steps()

    def steps_from(self, offset: int) -> int | None:
        """Global batches left from item `offset` on."""
        return self._layout.num_steps(offset)

    def batches(
        self, epoch: int, start_step: int = 0, *, offset: int | None = None
    ) -> Generator[Step, None, None]:
        """The steps of an epoch, in order.

        Args:
            epoch: from 0; the order and the random numbers depend on it.
            start_step: where to begin. Samples before it are not read, except from streams.
            offset: the item at which `start_step` begins, if steps had another size so far.

        Raises:
            NotShardableError: a batch turns out not to be one that can be counted or joined.
            ConfigurationError: the loader's ``persistent_workers`` were taken over by a later
                iteration.
        """
        if offset is None:
            offset = start_step * self._layout.per_step
        for plan, batches in self._delivery.run(self._plans(epoch, start_step, offset), epoch):
            parts = [
                self._part(part, batch) for part, batch in zip(plan.parts, batches, strict=True)
            ]
            yield Step(plan.index, parts, plan.num_samples)

    def fingerprint(self, epoch: int) -> dict[str, Any]:
        """What all workers must agree on, as plain JSON; see `check_agreement`.

        Draws the first items of the epoch's stream; reads samples only from streams.
        """
        return plan_fingerprint(self._layout, self.placement, epoch)

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """Samples of `shards` in `steps` steps from `first_step` on, into further epochs.

        None where only the batches themselves can tell.
        """
        length, in_epoch = self._layout.length, self.steps_per_epoch
        if not self._layout.kind.counts_samples or length is None or not in_epoch:
            return None
        total = 0
        for step in range(first_step, first_step + steps):
            start = (step % in_epoch) * self._layout.per_step
            size = min(self._layout.per_step, length - start)
            for shard in shards:
                begin, end = share_bounds(size, self.placement.num_shards, shard)
                total += end - begin
        return total

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        """The items (indices, mostly) that `shards` hold in a step; nothing is read.

        An empty list where items are the data itself.
        """
        if self._layout.kind in (ItemKind.SAMPLE, ItemKind.READY_BATCH):
            return []
        windows = self._layout.windows(self.placement.seed, epoch, step * self._layout.per_step)
        window = next(windows, None)
        if window is None:
            return []
        return [item for shard in shards for item in self._segment(window, shard).items]

    def agree(self, group: Group, epoch: int) -> None:
        """Make sure that all workers will read `epoch` by the same plan.

        Gradient:
            None: metadata only.

        Collective:
            Every rank of `group`. Blocks. One exchange; a rank alone communicates nothing.

        Raises:
            DataOrderError: the plans differ; on every rank.
            PeerLostError: another rank went away.
        """
        if group.size > 1:
            check_agreement(group.exchange(self.fingerprint(epoch)))

    def close(self) -> None:
        """End the loader's persistent worker processes, if it has any."""
        self._delivery.close()

    def _plans(self, epoch: int, start_step: int, offset: int) -> Iterator[StepPlan]:
        windows = self._layout.windows(self.placement.seed, epoch, offset)
        for step, window in enumerate(windows, start_step):
            yield StepPlan(step, self._part_plans(epoch, step, window), self._total(window))

    def _part_plans(self, epoch: int, step: int, window: Window) -> list[PartPlan]:
        own = [self._segment(window, shard) for shard in self.placement.shards]
        carried = [segment for segment in own if segment.items]
        if not self.joint:
            return [self._planned(epoch, step, [segment]) for segment in carried]
        if carried:
            return [self._planned(epoch, step, carried)]
        if not self._borrow:
            return []
        # The first parts are the larger ones, so shard 0 has samples in every step.
        borrowed = Request(epoch, step, (self._segment(window, 0),))
        return [PartPlan(borrowed, 0, tuple(self.placement.shards))]

    def _segment(self, window: Window, shard: int) -> Segment:
        bounds = share_bounds(len(window), self.placement.num_shards, shard)
        return Segment(shard, window.part(*bounds) if bounds[0] < bounds[1] else [])

    def _planned(self, epoch: int, step: int, segments: list[Segment]) -> PartPlan:
        items = [item for segment in segments for item in segment.items]
        shards = tuple(segment.shard for segment in segments)
        return PartPlan(Request(epoch, step, tuple(segments)), self._count(items), shards)

    def _total(self, window: Window) -> int | None:
        if self._layout.kind.counts_samples:
            return len(window)
        if self._layout.kind is ItemKind.BATCH_OF_INDICES or self._is_plain:
            # Batches that every worker has in hand: indices, or the iterable's own.
            return self._count(window.part(0, len(window)))
        return None

    def _count(self, items: list[Any]) -> int | None:
        """Samples that `items` stand for; None where only the batch itself can tell."""
        if self._layout.kind.counts_samples:
            return len(items)
        if self._layout.kind is ItemKind.BATCH_OF_INDICES:
            sized = all(isinstance(item, Sized) for item in items)
            return sum(len(item) for item in items) if sized else None
        return sum(leading_length(item) for item in items) if self._is_plain else None

    def _part(self, plan: PartPlan, batch: Any) -> LoadedPart:
        num_samples = leading_length(batch) if plan.num_samples is None else plan.num_samples
        return LoadedPart(batch, num_samples, plan.shards, self._indices(plan))

    def _indices(self, plan: PartPlan) -> tuple[Any, ...]:
        items = [item for segment in plan.request.segments for item in segment.items]
        if self._layout.kind in (ItemKind.SAMPLE_INDEX, ItemKind.READY_BATCH_INDEX):
            return tuple(items)
        if self._layout.kind is ItemKind.BATCH_OF_INDICES:
            return tuple(index for indices in items for index in indices)
        return ()
