# SPDX-License-Identifier: Apache-2.0
"""Reads the user's dataset, one batch for each request, with seeded random generators.

The copied loader's dataset is a `SeededDataset`, which holds the user's dataset. torch calls its
``__getitems__`` with a whole `Request`, in the main process or in one of the loader's worker
processes; `SeededDataset` seeds the random generators by (seed, epoch, step, shard) before it reads
the samples of each shard. An augmentation then depends neither on which process reads a sample,
nor on how many such processes there are, nor on which rank computes the shard. docs/adr/0003 holds
the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from lockstep.data.batch_join import concatenate, join_batches
from lockstep.data.dataset_generators import DatasetGenerators
from lockstep.data.global_batches import ItemKind
from lockstep.data.tensor_dataset_fetch import select_batch
from lockstep.randomness import derive_seed, preserve_rng_state, seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """One shard's items of one step."""

    shard: int
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The items of one or several shards of a step, which become one batch."""

    epoch: int
    step: int
    segments: tuple[Segment, ...]

    @property
    def items(self) -> list[Any]:
        return [item for segment in self.segments for item in segment.items]


def identity_collate(value: Any) -> Any:
    """Return `value`: the collate function of a loader whose dataset has collated already."""
    return value


_DRAW_NOTHING: Final = (identity_collate, default_collate, default_convert)


def may_draw(dataset: Any) -> bool:
    """Whether reading `dataset` can draw random numbers, as far as its exact type tells.

    Seeding the generators and restoring their states costs about 0.1 ms a batch, more than reading
    a small tensor. So the generators of a dataset that draws nothing are not seeded: they keep the
    states that the last step left.
    """
    if type(dataset) is Subset:
        return may_draw(dataset.dataset)
    return type(dataset) is not TensorDataset


class SeededDataset(Dataset[Any]):
    """The user's dataset, read one request at a time, each shard with its own random seed.

    Args:
        dataset: the user's dataset; not read where the items are the data themselves.
        kind: what the items of a request are.
        collate: the user's collate function (or conversion, for ready batches).
        seed: the seed of the run.
        keeps_generators: whether the states of the global generators are restored after each
            request. A caller that seeds the generators before it draws from them can do without.
    """

    def __init__(
        self,
        dataset: Any,
        kind: ItemKind,
        collate: Callable[[Any], Any],
        seed: int,
        *,
        keeps_generators: bool = True,
    ) -> None:
        self.dataset = dataset
        self._kind = kind
        self._collate = collate
        self._seed = seed
        self._keeps_generators = keeps_generators
        self._may_select_rows = kind is ItemKind.SAMPLE_INDEX and collate is default_collate
        self._may_draw = may_draw(dataset) or not any(collate is one for one in _DRAW_NOTHING)
        self._generators: tuple[object, DatasetGenerators] = None, DatasetGenerators()
        self._has_read_first = False  # of those requests for which `_generators` were found

    def __getitems__(self, request: Request) -> Any:
        # In a loader's worker process no other code draws from the generators.
        if not self._may_draw or get_worker_info() is not None:
            return self._batch(request)
        with self._held_generators(request.epoch).preserve():
            if not self._keeps_generators:
                return self._batch(request)
            with preserve_rng_state():
                return self._batch(request)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # A loader's subclass may read the user's own attributes from its dataset. Unpickling looks
        # dunder names up before `dataset` is set.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {
            "_generators": (None, DatasetGenerators()),
            "_has_read_first": False,
        }
        return {**vars(self), **nothing}

    def _held_generators(self, epoch: int) -> DatasetGenerators:
        """Those of this process: a loader's worker has copies, or ones of its ``worker_init_fn``.

        Args:
            epoch: before each the program may have put others in their place.
        """
        info = get_worker_info()
        here = epoch, None if info is None else info.id
        if self._generators[0] != here:
            self._generators = here, DatasetGenerators(self.dataset, self._collate)
            self._has_read_first = False
        return self._generators[1]

    def _batch(self, request: Request) -> Any:
        # Not in a loader's worker process: there torch stacks rows straight into shared memory.
        if self._may_select_rows and get_worker_info() is None:
            rows = select_batch(self.dataset, request.items)
            if rows is not None:
                return rows
        batch = self._read_seeded(request)
        if self._may_draw and self._has_made_generators(request.epoch):
            # A process that has them already draws for these samples from seeded ones.
            return self._read_seeded(request)
        return batch

    def _has_made_generators(self, epoch: int) -> bool:
        """Whether the first request that a process has read in an epoch made generators.

        A dataset may make one as it is read first, so that it is not copied to other processes.
        The answer is not asked of later requests: a search takes some milliseconds.
        """
        before = self._held_generators(epoch)
        if self._has_read_first or self._kind.is_data:
            return False
        found = DatasetGenerators(self.dataset, self._collate)
        self._generators = self._generators[0], found
        self._has_read_first = True
        return not found.are_among(before)

    def _read_seeded(self, request: Request) -> Any:
        """Read and collate a request, each shard with its own seed."""
        pieces: list[Any] = []
        for segment in request.segments:
            if self._may_draw:
                place = request.epoch, request.step, segment.shard
                seed = derive_seed(self._seed, "data", *place)
                seed_all(seed)
                self._held_generators(request.epoch).seed(seed)
            pieces += self._read(segment)
        holds_samples = self._kind.is_sample or self._kind is ItemKind.BATCH_OF_INDICES
        if holds_samples and all(isinstance(piece, list) for piece in pieces):
            pieces = [list(chain.from_iterable(pieces))]
        # Several pieces: ready batches, or a user's __getitems__ that returns no list of samples.
        batches = [self._collate(piece) for piece in pieces]
        if len(batches) == 1 or self._collate is default_collate:
            return concatenate(batches)
        return join_batches(batches, self._num_asked(request))

    def _num_asked(self, request: Request) -> list[int | None]:
        """Of each of the pieces of a request the samples for which it asks."""
        if self._kind.is_sample:
            return [len(segment.items) for segment in request.segments]
        return [self._kind.num_asked([item]) for item in request.items]

    def _read(self, segment: Segment) -> list[Any]:
        """The segment's pieces: one list of samples, or its ready batches."""
        if self._kind is ItemKind.SAMPLE_INDEX:
            return [self._samples(segment.items)]
        if self._kind is ItemKind.BATCH_OF_INDICES:
            return [self._samples(indices) for indices in segment.items]
        if self._kind is ItemKind.READY_BATCH_INDEX:
            return [self.dataset[index] for index in segment.items]
        return [list(segment.items)] if self._kind is ItemKind.SAMPLE else list(segment.items)

    def _samples(self, indices: Any) -> Any:
        # The same condition as torch's own fetcher: an attribute set to None switches it off.
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]


class WorkerInitFn:
    """Calls the user's ``worker_init_fn`` after it has put the user's dataset into ``WorkerInfo``.

    ``get_worker_info().dataset`` is documented to be this worker's copy of the dataset;
    programs open files through it.
    """

    def __init__(self, user_function: Callable[[int], Any] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            # WorkerInfo forbids plain assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._user_function is not None:
            self._user_function(worker_id)
