# SPDX-License-Identifier: Apache-2.0
"""Reads a worker's shards of every global batch, as a function of (seed, epoch, step, shard).

The items of the user's loader (sample indices, mostly) form one stream, the same on every worker.
Step k is a slice of that stream, cut into `num_shards` balanced shards; a worker reads its own
shards through a copy of the user's loader. Neither the worker that reads a shard nor the number of
workers changes a batch.

A rank without samples in a step computes on another rank's batch with weight 0, so that it takes
part in the collectives: that batch is *borrowed*.

The way of a batch: `global_batches_of` cuts the loader's stream, `ShardedLoader._plans` requests
the items of this worker's shards, `LoaderCopy.read` passes the requests through the copied loader,
and in there (maybe in a process of the loader) a `SeededDataset` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lockstep.data.batch_join import join_batches
from lockstep.data.batch_rows import count_one, count_samples, leading_length, rows_error
from lockstep.data.collated_rows import CollatedRows
from lockstep.data.data_order_check import check_same_plan, plan_fingerprint
from lockstep.data.epoch_order import EpochBeginning
from lockstep.data.global_batches import GlobalBatch, GlobalBatches, OrderSize, global_batches_of
from lockstep.data.loader_copy import LoaderCopy, StepPlan
from lockstep.data.sample_numbers import NUMBERS, numbers_of, warn_of_other_numbers
from lockstep.data.seeded_dataset import Request, SeededDataset, Segment
from lockstep.data.shard_assignment import shard_bounds
from lockstep.errors import DataOrderError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from lockstep.data.epoch_order import FirstItems
    from lockstep.data.shard_assignment import ShardAssignment
    from lockstep.errors import WeightError
    from lockstep.group import Group


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """One batch that a worker computes on.

    Args:
        batch: the batch, as the user's loader makes it.
        num_samples: the samples for which the batch counts; 0 if it is borrowed.
        shards: the shards to which the samples belong; for a borrowed batch, the worker's shards.
        indices: what the loader's sampler yielded, one for each sample (or for the whole batch, if
            the dataset holds ready batches); empty where there is no sampler.
        miscount: the error to raise where the batch counts for its samples; None if it may.
        num_asked: of a borrowed batch the samples for which the dataset was asked; None where
            nothing tells them, and for all other batches.
        is_borrowed: the batch is another worker's; one of the worker's own may be empty, too.
    """

    batch: Any
    num_samples: int
    shards: tuple[int, ...]
    indices: tuple[Any, ...] = ()
    miscount: WeightError | None = None
    num_asked: int | None = None
    is_borrowed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One global batch: the batches that one worker computes on.

    Args:
        index: the step's number within the epoch.
        parts: this worker's batches, in the order of their shards.
        num_samples: samples of all shards; None where only the ranks together can count them.
        has_empty_shards: a shard, and so maybe a worker, has no samples; the same on every worker.
    """

    index: int
    parts: list[LoadedPart]
    num_samples: int | None
    has_empty_shards: bool = False


class BatchParts(Enum):
    """The batches that hold a worker's samples of one step."""

    BY_SHARD = "one batch for each shard that has samples"
    JOINT = "one batch with all samples of the worker; none where it has no samples"
    JOINT_OR_BORROWED = "as JOINT; a worker without samples gets shard 0's, counted as 0 samples"
    """A worker borrows a batch to take part in the collectives that its peers call for theirs."""


class ShardedLoader:
    """Reads the shards of one worker through a copy of the user's loader.

    The loader's fields are read when a pass over the data begins, as torch reads them: a
    ``collate_fn``, a sampler or a ``drop_last`` that the program replaces counts from the next
    pass on. Worker processes that a loader keeps (``persistent_workers``) keep their fields, too.

    Attributes:
        joint: whether all of the worker's samples of a step are one batch.
        opened_size: of the epoch that is read; None where the order is not torch's own.

    Args:
        loader: a ``DataLoader``, or a re-iterable of ready batches. It is not changed.
        assignment: the worker's shards.
        parts: which batches the worker's samples of a step become.
        global_batch_size: in samples; overrides the loader's batch size.
        keeps_last: whether to read an incomplete last batch although the loader has ``drop_last``.
        keeps_generators: whether reading leaves the global random generators as they were. A caller
            that seeds the generators for every part, before it computes, can do without.

    Raises:
        NotShardableError: the data cannot be shared out so that each sample is seen once.
        WrongTypeError: `loader` is no loader.
    """

    def __init__(
        self,
        loader: Any,
        assignment: ShardAssignment,
        *,
        parts: BatchParts,
        global_batch_size: int | None = None,
        keeps_last: bool = False,
        keeps_generators: bool = True,
    ) -> None:
        self.assignment = assignment
        self.joint = parts is not BatchParts.BY_SHARD
        self.opened_size: OrderSize | None = None
        self._borrows = parts is BatchParts.JOINT_OR_BORROWED
        self._loader, self._asked_size = loader, global_batch_size
        self._keeps_last, self._keeps_generators = keeps_last, keeps_generators
        batches = global_batches_of(loader, assignment.num_shards, global_batch_size)
        self._kind, self._per_step = batches.kind, batches.per_step
        self._open: GlobalBatches | None = None  # of the newest pass, until it ends
        self._begun: tuple[int, Iterator[GlobalBatch]] | None = None
        self._beginning = EpochBeginning()
        self._has_compared_numbers = False
        self._dataset = loader.dataset if isinstance(loader, DataLoader) else None
        self._rows: CollatedRows | None = None
        self._kept_copy: LoaderCopy | None = None  # with processes that serve pass after pass

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a full step; None where the loader's items are ready batches."""
        return self._per_step if self._kind.is_sample else None

    @property
    def items_per_step(self) -> int:
        """Items of the stream (samples, or ready batches) in a full step."""
        return self._per_step

    @property
    def first_items(self) -> FirstItems | None:
        """How the epoch that is read begins, as far as it was drawn.

        None where items are samples, and where the order can be read at any position.
        """
        return self._beginning.first_items

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of global batches in an epoch; None where the user's objects have no length.

        Of the pass that is open; else of the next one, as the loader is now.
        """
        return self._batches.num_steps()

    @property
    def order_size(self) -> OrderSize | None:
        """Of an epoch that begins now; None where the order is not torch's own."""
        return self._batches.order_size

    @property
    def has_exact_length(self) -> bool:
        """Whether `steps_per_epoch` is certain, and not what a `__len__` of the user's says."""
        return self._batches.has_exact_length

    def steps_from(self, offset: int, size: OrderSize | None = None) -> int | None:
        """Number of global batches from item `offset` on; None if it is unknown.

        Args:
            size: with which the epoch began; None for one that begins now.
        """
        return self._batches.num_steps(offset, size)

    def step_after(self, offset: int, size: OrderSize | None = None) -> int | None:
        """The step that begins with item `offset`; None if the item lies within a step.

        Args:
            size: see `steps_from`.
        """
        length = self._batches.length if size is None else size.length
        if length is not None and offset >= length:
            return self.steps_from(0, size)  # behind the last step, which may be a shorter one
        step, rest = divmod(offset, self._per_step)
        return None if rest else step

    def batches(
        self,
        epoch: int,
        start_step: int = 0,
        *,
        offset: int | None = None,
        size: OrderSize | None = None,
    ) -> Generator[Step, None, None]:
        """The steps of an epoch, in order.

        Args:
            epoch: from 0; the order and the random numbers depend on it.
            start_step: where to begin. Samples before it are not read, except from streams.
            offset: the first item of `start_step`, if the earlier steps had another size.
            size: with which the epoch began, where the dataset has another one by now.

        Raises:
            NotShardableError: the samples of a batch cannot be counted, or its parts not joined.
            ConfigurationError: the loader's ``persistent_workers`` were taken over by a later
                iteration.
            DataOrderError: the loader's batch size has changed.
        """
        if offset is None:
            offset = start_step * self._per_step
        self._refuse_other_size()
        self._open = opened = self._batches_now()
        try:
            drawn = self._drawn(opened, epoch, offset, size)
            for plan, batches in self._read(self._plans(drawn, epoch, start_step), epoch):
                parts = map(self._loaded_part, plan.requests, batches)
                yield Step(plan.index, list(parts), plan.num_samples, plan.has_empty_shards)
        finally:
            if self._open is opened:
                self._open = None

    def _read(self, plans: Iterator[StepPlan], epoch: int) -> Iterator[tuple[StepPlan, list[Any]]]:
        copy = self._copy_of_loader()
        if copy is not None:
            return copy.read(plans, epoch)
        return ((plan, [_join_ready(each.items) for each in plan.requests]) for plan in plans)

    def _copy_of_loader(self) -> LoaderCopy | None:
        """A copy of the loader as it is now, for one pass; None where items are batches already."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return None
        keeps_workers = loader.num_workers > 0 and loader.persistent_workers
        if keeps_workers and self._kept_copy is not None:
            return self._kept_copy
        if self._rows is None or self._rows.collate_fn is not loader.collate_fn:
            self._rows = CollatedRows(loader.collate_fn)
        seed, keeps = self.assignment.seed, self._keeps_generators
        dataset = SeededDataset(
            loader.dataset, self._kind, loader.collate_fn, seed, keeps_generators=keeps
        )
        made = LoaderCopy(loader, dataset, seed)
        self._kept_copy = made if keeps_workers else None
        return made

    def fingerprint(self, epoch: int) -> dict[str, Any]:
        """The plan of `epoch`, equal on all workers, as plain JSON; see `check_same_plan`.

        Draws the first items of the epoch's stream; reads samples from streams and from tensors.
        A sampler may count how often it is iterated: the epoch goes on with what was drawn.
        """
        batches = self._batches
        drawn = self._draw(batches, epoch, 0, None)
        first = next(drawn, None)
        # An order of torch's costs little to draw, and its data may grow until it is read.
        if first is not None and batches.order_size is None:
            self._begun = epoch, chain([first], drawn)
        return plan_fingerprint(batches, first, self._dataset, self.assignment, epoch)

    def early_fingerprint(self, epoch: int) -> dict[str, Any]:
        """As `fingerprint`, before the program has said what `epoch` reads.

        Nothing is drawn from a sampler or a stream of the user's.
        """
        if self.can_be_drawn_early:
            found = self.fingerprint(epoch)
            self._begun = None  # the program may change what the epoch reads
            return found
        return plan_fingerprint(self._batches, None, self._dataset, self.assignment, epoch)

    @property
    def can_be_drawn_early(self) -> bool:
        """See `lockstep.data.global_batches.GlobalBatches`."""
        return self._batches.can_be_drawn_early

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """Samples of `shards` in `steps` steps from `first_step` on, into further epochs.

        None where only the collated batches show it.
        """
        length, in_epoch = self._batches.length, self.steps_per_epoch
        if not self._kind.is_sample or length is None or not in_epoch:
            return None
        total = 0
        for step in range(first_step, first_step + steps):
            start = (step % in_epoch) * self._per_step
            size = min(self._per_step, length - start)
            for shard in shards:
                begin, end = shard_bounds(size, self.assignment.num_shards, shard)
                total += end - begin
        return total

    def items_of(
        self, epoch: int, step: int, shards: Sequence[int], size: OrderSize | None = None
    ) -> list[Any]:
        """The items (indices, mostly) that `shards` hold in a step; no sample is read.

        An empty list where the items are the data itself.
        """
        if self._kind.is_data:
            return []
        offset = step * self._per_step
        seed = self.assignment.seed
        batch = next(self._batches.of_epoch(seed, epoch, offset, size=size), None)
        if batch is None:
            return []
        return [item for shard in shards for item in self._segment(batch, shard).items]

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
            self._compare(group, self.fingerprint(epoch))

    def agree_early(self, group: Group, epoch: int) -> None:
        """As `agree`, before the program has said what `epoch` reads.

        Gradient:
            None: metadata only.

        Collective:
            As `agree`.

        Raises:
            DataOrderError: as `agree`, by what `early_fingerprint` shows.
            PeerLostError: another rank went away.
        """
        if group.size > 1:
            self._compare(group, self.early_fingerprint(epoch))

    def _compare(self, group: Group, plan: dict[str, Any]) -> None:
        # The numbers once: a warning of them is none that each epoch repeats.
        is_first = not self._has_compared_numbers and not self._kind.is_data
        numbers = numbers_of(self._dataset) if is_first else []
        found = group.exchange({**plan, NUMBERS: numbers})
        self._has_compared_numbers = True
        check_same_plan(found)
        if group.rank == 0:  # all ranks have found the same
            warn_of_other_numbers(found)

    def close(self) -> None:
        """End the loader's persistent worker processes, if it has any."""
        self._begun = None
        if self._kept_copy is not None:
            self._kept_copy.close()

    @property
    def _batches(self) -> GlobalBatches:
        """Of the pass that is open; else of the next one, as the loader is now."""
        return self._batches_now() if self._open is None else self._open

    def _batches_now(self) -> GlobalBatches:
        now = global_batches_of(self._loader, self.assignment.num_shards, self._asked_size)
        # Places in an epoch are counted in steps of one size.
        now = replace(now, per_step=self._per_step)
        return replace(now, drop_last=False) if self._keeps_last else now

    def _drawn(
        self, batches: GlobalBatches, epoch: int, offset: int, size: OrderSize | None
    ) -> Iterator[GlobalBatch]:
        """The global batches of an epoch from item `offset` on."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == epoch and not offset:
            return begun[1]
        return self._draw(batches, epoch, offset, size)

    def _draw(
        self, batches: GlobalBatches, epoch: int, offset: int, size: OrderSize | None
    ) -> Iterator[GlobalBatch]:
        self._beginning = noted = EpochBeginning()
        note = noted.note_ready_batches if self._kind.is_data else noted.note_indices
        self.opened_size = size = size or batches.order_size
        return batches.of_epoch(self.assignment.seed, epoch, offset, note, size)

    def _refuse_other_size(self) -> None:
        """Raise if the loader's batch size has changed since this object was made."""
        now = global_batches_of(self._loader, self.assignment.num_shards, self._asked_size)
        if now.per_step != self._per_step:
            raise DataOrderError(
                "the loader's batch size has changed",
                expected=f"{self._per_step} items in a global batch, as when training began",
                got=f"{now.per_step}",
                cause="the place in an epoch is counted in global batches of one size",
                fix="trainer.save(path), then a new TorchTrainer with the new size and"
                " trainer.load(path); under torchrun lockstep.shard_loader(loader) once more",
            )

    def _plans(
        self, drawn: Iterator[GlobalBatch], epoch: int, start_step: int
    ) -> Iterator[StepPlan]:
        for step, batch in enumerate(drawn, start_step):
            shards = [self._segment(batch, shard) for shard in self.assignment.shards]
            requests = [
                Request(epoch, step, segments)
                for segments in self._segments_by_batch(shards, batch)
            ]
            is_short = len(batch) < self.assignment.num_shards
            yield StepPlan(step, requests, self._num_samples(batch), is_short)

    def _segments_by_batch(
        self, shards: list[Segment], batch: GlobalBatch
    ) -> list[tuple[Segment, ...]]:
        """For each batch that this worker reads in a step, its segments."""
        own_segments = tuple(segment for segment in shards if segment.items)
        if not self.joint:
            return [(segment,) for segment in own_segments]
        if own_segments:
            return [own_segments]
        # The first shards are the larger ones, so shard 0 has samples in every step.
        return [(self._segment(batch, 0),)] if self._borrows else []

    def _segment(self, batch: GlobalBatch, shard: int) -> Segment:
        start, stop = shard_bounds(len(batch), self.assignment.num_shards, shard)
        return Segment(shard, batch.items(start, stop) if start < stop else [])

    def _num_samples(self, batch: GlobalBatch) -> int | None:
        kind = self._kind
        return len(batch) if kind.is_sample else kind.count(batch.items(0, len(batch)))

    def _loaded_part(self, request: Request, batch: Any) -> LoadedPart:
        kind, items = self._kind, request.items
        indices, own = kind.indices(items), self.assignment.shards
        shards = tuple(segment.shard for segment in request.segments)
        if shards[0] not in own:  # borrowed
            num_asked = kind.num_asked(items)
            return LoadedPart(batch, 0, tuple(own), indices, num_asked=num_asked, is_borrowed=True)
        counted = kind.count(items)
        if counted is None:
            num_asked = kind.num_asked(items)
            counted = _count_rows(batch, num_asked)
            miscount = None if counted == num_asked else rows_error(batch)
        else:
            rows = self._rows  # None: the loader's items are ready batches
            miscount = rows_error(batch) if rows is None else rows.weight_error(batch, counted)
        return LoadedPart(batch, counted, shards, indices, miscount)


def _join_ready(batches: Sequence[Any]) -> Any:
    return join_batches(batches, [None] * len(batches))


def _count_rows(batch: Any, num_asked: int | None) -> int:
    if num_asked is None:
        return leading_length(batch)
    return count_one(batch) if num_asked == 1 else count_samples(batch, num_asked)
