# SPDX-License-Identifier: Apache-2.0
"""Cuts a loader's stream of items into global batches.

Every loader is one stream of items, `per_step` of which make a global batch. Where a loader has a
batch size, an item is a sample, and a global batch is as many samples as the global batch size
says. Where somebody else makes the batches (a custom ``batch_sampler``, ``batch_size=None``, a list
of batches), an item is a batch, and a global batch has one for each shard. A loader that cannot be
shared out so that every sample is seen exactly once raises an error here, before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.batch_rows import leading_length
from lockstep.data.epoch_order import NUM_COMPARED
from lockstep.data.isolated_randomness import (
    IsolatedRandomness,
    find_generators,
    find_generators_of_data,
)
from lockstep.data.shard_batch_size import ShardBatchSize
from lockstep.data.shuffled_order import ShuffledOrder
from lockstep.errors import NotShardableError, WrongTypeError
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NUM_DRAWN_AT_ONCE = 256
_TORCHS_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
_OF_ALL_SAMPLES = (SequentialSampler, RandomSampler, DistributedSampler)
"""Those whose order follows from the number of samples and a seed alone."""

T = TypeVar("T")

Read = Callable[[int, int], list[Any]]
"""``read(start, stop)``: the items at these positions of a stream."""


class ItemKind(Enum):
    """What an item of a loader's stream is."""

    SAMPLE_INDEX = "sample indices"
    BATCH_OF_INDICES = "batches of indices"
    READY_BATCH_INDEX = "indices of ready batches"
    SAMPLE = "a stream of samples"
    STREAMED_BATCH = "a stream of ready batches"
    READY_BATCH = "ready batches"

    @property
    def is_sample(self) -> bool:
        """Whether one item is one sample, and not a batch."""
        return self in (ItemKind.SAMPLE_INDEX, ItemKind.SAMPLE)

    @property
    def is_data(self) -> bool:
        """Whether an item is the data itself, so that to draw it is to read it."""
        return self in (ItemKind.SAMPLE, ItemKind.STREAMED_BATCH, ItemKind.READY_BATCH)

    def indices(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """The dataset's indices in `items`; empty where items are the data itself."""
        if self is ItemKind.BATCH_OF_INDICES:
            return tuple(index for indices in items for index in indices)
        return () if self.is_data else tuple(items)

    def count(self, items: Sequence[Any]) -> int | None:
        """Number of samples in `items`; None where only the collated batch shows it."""
        if self is ItemKind.READY_BATCH:
            return sum(leading_length(item) for item in items)
        return None if self is ItemKind.READY_BATCH_INDEX else self.num_asked(items)

    def num_asked(self, items: Sequence[Any]) -> int | None:
        """Number of samples for which `items` ask the dataset; None where they do not show it."""
        if self.is_sample:
            return len(items)
        # A sampler of lists asks a dataset of ready batches for so many samples at once.
        kind = {ItemKind.BATCH_OF_INDICES: Sized, ItemKind.READY_BATCH_INDEX: list}.get(self)
        if kind is None or not all(isinstance(item, kind) for item in items):
            return None
        return sum(len(item) for item in items)


class OrderSize(NamedTuple):
    """What an order of torch's own follows from, beside the seed; see `GlobalBatches.order_size`.

    Attributes:
        population: samples in the dataset.
        length: indices in an epoch.
    """

    population: int
    length: int


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A global batch before it is read: positions `start` to `stop` of a stream."""

    read: Read
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def items(self, start: int, stop: int) -> list[Any]:
        """The items from number `start` of this batch on, up to number `stop`."""
        return self.read(self.start + start, self.start + stop)


@dataclass(frozen=True)
class GlobalBatches:
    """A loader's stream of items, and how many of them make a global batch.

    Args:
        kind: what an item is.
        source: the user's sampler, batch sampler, dataset or iterable, which yields the items.
        per_step: items in a full global batch, over all shards.
        drop_last: whether an incomplete global batch is left out.
        held: further objects that may hold a generator from which `source` draws.
    """

    kind: ItemKind
    source: Any
    per_step: int
    drop_last: bool = False
    held: tuple[Any, ...] = ()

    @property
    def length(self) -> int | None:
        """Items in an epoch; None where the user's `source` has no length."""
        return length_or_none(self.source)

    @property
    def has_exact_length(self) -> bool:
        """Whether the order is torch's own, so that `length` is not merely what the user says.

        Samplers are recognised by their exact types: a subclass may order differently.
        """
        sampler = self.source
        if self.kind not in (ItemKind.SAMPLE_INDEX, ItemKind.READY_BATCH_INDEX):
            return False
        is_shuffled = is_exactly(sampler, RandomSampler) and not sampler.replacement
        return type(sampler) is SequentialSampler or is_shuffled

    @property
    def can_be_drawn_early(self) -> bool:
        """Whether it makes no difference when, and how often, the order of an epoch is drawn.

        True of torch's orders of all samples. Any other sampler may look at what the program
        changes while it runs (weights, priorities, a buffer), or count how often it is iterated.
        """
        return not self.kind.is_data and _is_torchs(self.source, _OF_ALL_SAMPLES)

    @property
    def order_size(self) -> OrderSize | None:
        """That of an epoch that begins now; None where the order is not torch's own.

        A dataset may grow while an epoch is open. The epoch keeps the size with which it began.
        """
        sampler, length = self.source, self.length
        if length is None or not self.has_exact_length:
            return None
        is_in_order = type(sampler) is SequentialSampler
        return OrderSize(length if is_in_order else len(sampler.data_source), length)

    def num_steps(self, offset: int = 0, size: OrderSize | None = None) -> int | None:
        """Number of global batches that begin at or after item `offset`; None if it is unknown.

        Args:
            size: of the epoch; None for an epoch that begins now.
        """
        length = self.length if size is None else size.length
        if length is None:
            return None
        rest = max(0, length - offset)
        return rest // self.per_step if self.drop_last else -(-rest // self.per_step)

    def of_epoch(
        self,
        seed: int,
        epoch: int,
        offset: int = 0,
        note_first: Callable[[list[Any]], None] | None = None,
        size: OrderSize | None = None,
    ) -> Iterator[GlobalBatch]:
        """The global batches of an epoch, from item `offset` on.

        Args:
            size: with which the epoch began, where it is not the present `order_size`.
            note_first: called with the items of the epoch from its first one on, as they are
                drawn, wherever the reading begins. Not called where items are samples, and where
                the order can be read at any position, as it depends on (`seed`, `epoch`) alone.
        """
        announce_epoch(epoch, (self.source, getattr(self.source, "sampler", None)))
        size = size or self.order_size
        if size is None:
            return self._draw_batches(seed, epoch, offset, note_first)
        return self._cut(self._random_access_order(seed, epoch, size), offset, size.length)

    def _cut(self, read: Read, begin: int, end: int) -> Iterator[GlobalBatch]:
        for start in range(begin, end, self.per_step):
            stop = min(start + self.per_step, end)
            if stop - start == self.per_step or not self.drop_last:
                yield GlobalBatch(read, start, stop)

    def _random_access_order(self, seed: int, epoch: int, size: OrderSize) -> Read:
        """How to read any position of torch's own order without drawing the earlier ones."""
        sampler = self.source
        if type(sampler) is SequentialSampler:
            return lambda start, stop: list(range(start, stop))
        chosen = sampler.generator
        if type(sampler) is not RandomSampler:
            # torchdata's sampler, without a generator, makes one from a random seed.
            chosen = next(iter(self.held), None)
        origin = [] if chosen is None else [chosen.initial_seed()]
        return ShuffledOrder(*size, derive_seed(seed, "order", epoch, *origin)).read

    def _draw_batches(
        self,
        seed: int,
        epoch: int,
        offset: int,
        note_first: Callable[[list[Any]], None] | None,
    ) -> Iterator[GlobalBatch]:
        """Global batches of items that have to be drawn one after the other."""
        find = find_generators_of_data if self.kind.is_data else find_generators
        isolated = IsolatedRandomness(
            derive_seed(seed, "order", epoch), find(self.source, *self.held)
        )
        # One global batch at a time: samples are as large as the user makes them, and a sampler
        # may look at what the program has changed in the last step. Torch's own do not, so many of
        # their indices are drawn in one entry of the isolation.
        chunk = self.per_step
        if _is_torchs(self.source):
            chunk *= max(1, _NUM_DRAWN_AT_ONCE // self.per_step)
        iterator = isolated.open(self.source)

        def draw(count: int) -> list[Any]:
            drawn = isolated.draw(iterator, count)
            if note_first is not None and self.kind is not ItemKind.SAMPLE:
                note_first(drawn)
            return drawn

        if offset:  # one entry for all that is skipped, of which only the beginning is noted
            rest = offset - len(draw(min(offset, 1 if self.kind.is_data else NUM_COMPARED)))
            isolated.draw(islice(iterator, rest, rest), 1)
        while drawn := draw(chunk):
            yield from self._cut(_read_from(drawn), 0, len(drawn))


def _read_from(drawn: list[Any]) -> Read:
    return lambda start, stop: drawn[start:stop]


def length_or_none(sized: Any) -> int | None:
    """The length of `sized`, or None: an object with ``__len__`` may still not know its length.

    torch's own loop never asks for it, so that no error of a user's ``__len__`` may end a run. One
    that has another cause (a file that is gone) comes again where the data is read.
    """
    try:
        return len(sized)
    # Whatever it raises; `len` itself raises where it returns -1, 2.5 or 10**20.
    except Exception:
        return None


def announce_epoch(epoch: int, holders: Iterable[Any]) -> None:
    """Call ``set_epoch`` of those `holders` (samplers, loaders) that have this method."""
    for holder in holders:
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def global_batches_of(
    loader: Any, num_shards: int, global_batch_size: int | None = None
) -> GlobalBatches:
    """The global batches of `loader`, to be shared out over `num_shards` shards.

    Args:
        loader: a ``DataLoader``, or an iterable of ready batches that can be iterated again.
        num_shards: at least 1.
        global_batch_size: in samples; overrides what the loader says.

    Raises:
        NotShardableError: `loader` cannot be shared out so that every sample is seen exactly once.
        WrongTypeError: `loader` is no loader at all.
    """
    if not isinstance(loader, DataLoader):
        check_reiterable(loader)
        return GlobalBatches(ItemKind.READY_BATCH, loader, num_shards)
    _refuse_split(loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        return _batches_of_stream(loader, num_shards, global_batch_size)
    if getattr(loader, "next_iter_state", None) is not None:
        raise NotShardableError(
            "this loader was told to go on from a state of its own",
            got=f"a {type(loader).__name__} after load_state_dict(...)",
            cause="its position is counted in one process's batches",
            fix="leave loader.load_state_dict out: a trainer's checkpoint (or the state of"
            " shard_loader's loader) holds the position, for any number of workers",
        )
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        _refuse_distributed(sampler)
    if batch_sampler is None:
        kind = ItemKind.READY_BATCH_INDEX
        return GlobalBatches(kind, loader.sampler, num_shards, held=(loader.generator,))
    if not is_exactly(batch_sampler, BatchSampler):
        kind = ItemKind.BATCH_OF_INDICES
        return GlobalBatches(kind, batch_sampler, num_shards, held=(loader.generator,))
    per_step = global_batch_size or _global_batch_size(batch_sampler.batch_size, num_shards)
    return GlobalBatches(
        ItemKind.SAMPLE_INDEX,
        batch_sampler.sampler,
        per_step,
        drop_last=batch_sampler.drop_last,
        held=(loader.generator,),
    )


def is_exactly(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Whether `value` has exactly torch's class `kind`, or torchdata's class of the same name.

    torchdata's loader replaces torch's samplers by classes of its own, which give the same order
    and can save their position. lockstep needs no saved position, and treats both the same.
    """
    own = type(value)
    double = own.__module__ == "torchdata.stateful_dataloader.sampler"
    return own is kind or (double and own.__name__ == kind.__name__)


def _is_torchs(sampler: Any, kinds: tuple[type, ...] = _TORCHS_SAMPLERS) -> bool:
    if is_exactly(sampler, BatchSampler):
        return _is_torchs(sampler.sampler, kinds)
    return any(is_exactly(sampler, kind) for kind in kinds)


def _batches_of_stream(
    loader: DataLoader[Any], num_shards: int, global_batch_size: int | None
) -> GlobalBatches:
    dataset = loader.dataset
    if loader.num_workers > 0:
        raise NotShardableError(
            "an IterableDataset cannot be shared out exactly with loader workers",
            expected="num_workers=0",
            got=f"DataLoader({type(dataset).__name__}, num_workers={loader.num_workers})",
            cause="each loader worker reads the stream by rules of its own, so nobody knows "
            "which sample is the k-th of the global order",
            fix="DataLoader(..., num_workers=0), or a map-style dataset (__len__ and __getitem__)",
        )
    if loader.batch_size is None:
        return GlobalBatches(ItemKind.STREAMED_BATCH, dataset, num_shards, held=(loader.generator,))
    per_step = global_batch_size or _global_batch_size(loader.batch_size, num_shards)
    return GlobalBatches(
        ItemKind.SAMPLE, dataset, per_step, drop_last=loader.drop_last, held=(loader.generator,)
    )


def _global_batch_size(batch_size: int, num_shards: int) -> int:
    """The global batch size: a `ShardBatchSize` carries it; any other `batch_size` is per shard."""
    if isinstance(batch_size, ShardBatchSize):
        return batch_size.whole
    return int(batch_size) * num_shards


def _refuse_distributed(sampler: Any) -> None:
    replicas = getattr(sampler, "num_replicas", 1)
    if isinstance(replicas, int) and replicas > 1:
        raise NotShardableError(
            "the loader's sampler already shares the samples out over the workers",
            expected="a sampler over the whole dataset: lockstep gives each worker its part",
            got=f"{type(sampler).__name__}(num_replicas={replicas})",
            cause="sharing out twice leaves most samples out, and its padding repeats some",
            fix="remove the sampler (shuffle=True shuffles over all workers), "
            "or, in a TorchTrainer, pass add_dist_sampler=False",
        )


def _refuse_split(dataset: Any) -> None:
    """Refuse a stream of Hugging Face's `datasets` after ``split_dataset_by_node``."""
    split = getattr(dataset, "_distributed", None)
    ranks = getattr(split, "world_size", 1)
    if isinstance(ranks, int) and ranks > 1:
        raise NotShardableError(
            "the dataset is one node's part already",
            expected="the whole dataset: lockstep gives each worker its part",
            got=f"{type(dataset).__name__} split over {ranks}",
            fix="leave split_dataset_by_node out",
        )


def check_reiterable(loader: Any, *, allow_already_sharded: bool = False) -> None:
    """Refuse a `loader` that cannot be iterated at every epoch, or is one rank's part already.

    Raises:
        NotShardableError: `loader` is an iterator, or one rank's part already.
        WrongTypeError: `loader` is no loader.
    """
    if getattr(loader, "is_already_sharded", False) and not allow_already_sharded:
        raise NotShardableError(
            "this loader is one rank's part already",
            got=f"a {type(loader).__name__}",
            fix="pass the DataLoader itself, without shard_loader(...)",
        )
    name = type(loader).__name__
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_dataset or isinstance(loader, (str, bytes, dict)) or not hasattr(loader, "__iter__"):
        raise WrongTypeError(
            "this is not a loader",
            expected="a torch DataLoader, or an iterable of ready batches",
            got=f"a {name}",
            fix="DataLoader(dataset, batch_size=...)",
        )
    if hasattr(loader, "__next__"):
        raise NotShardableError(
            "an iterator can be read only once, and every epoch reads the data again",
            expected="something that starts again with each iter(...)",
            got=f"a {name}",
            fix="pass the DataLoader, a list, or an object whose __iter__ returns a new iterator;"
            f" where iter(...) does let this {name} begin anew (Lightning's CombinedLoader, DALI),"
            " a class around it: def __iter__(self): yield from self.loader",
        )
