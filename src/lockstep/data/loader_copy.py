# SPDX-License-Identifier: Apache-2.0
"""A copy of the user's loader that returns the batches of one rank's shards.

The loader is copied object for object and three of its fields are replaced: the dataset (by one
that reads requests), the batch sampler (by one that hands out requests) and the collate function
(the dataset has collated already). All other fields, those of a subclass and of later torch
versions included, stay as the user set them. Rejected: a new loader made from a list of known
fields, which loses all fields that the list does not know.

A loader asks for requests ahead of the batches that it returns, while a step may hold no request
for this rank, or several. So the loader and the reader of the steps pull the same plans through
`itertools.tee`, which keeps the plans that one of the two has not reached yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import tee
from typing import TYPE_CHECKING, Any

from lockstep._torch_compat import copy_loader
from lockstep._torch_compat.loader_iterators import forget_iterator, has_lost_process, shut_down
from lockstep.data.isolated_randomness import IsolatedRandomness, find_generators
from lockstep.data.seeded_dataset import Request, SeededDataset, WorkerInitFn, identity_collate
from lockstep.errors import ConfigurationError, NotShardableError
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.data import DataLoader

_END: Any = object()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batches that a rank reads in one step.

    Args:
        index: the step's number within the epoch.
        requests: one for each batch that the rank reads.
        num_samples: samples of the global batch; None where only the collated batches show it.
        has_empty_shards: it has fewer items than there are shards.
    """

    index: int
    requests: list[Request]
    num_samples: int | None
    has_empty_shards: bool


class _RequestStream:
    """The requests of one pass over an epoch, in the order in which a loader asks for them."""

    def __init__(self, plans: Iterable[StepPlan]) -> None:
        self._requests = (request for plan in plans for request in plan.requests)
        self.num_requested = 0

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        request = next(self._requests)
        self.num_requested += 1
        return request

    def close(self) -> None:
        """Drop the plans, which a loader with persistent workers would keep after its last read.

        The plans refer back to the object that owns the loader; this cycle would leave the shutdown
        to the garbage collector, which delays torch's worker processes by seconds.
        """
        self._requests.close()


class _RequestSampler:
    """The copy's batch sampler: one object for its life, because persistent workers keep it."""

    def __init__(self) -> None:
        self.requests = _RequestStream(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class LoaderCopy:
    """A copy of the user's loader that reads the requests of a rank's steps.

    Args:
        loader: the user's loader, which is not changed.
        dataset: reads the samples of a request.
        seed: the seed of the run.
    """

    def __init__(self, loader: DataLoader[Any], dataset: SeededDataset, seed: int) -> None:
        self._seed = seed
        self._sampler = _RequestSampler()
        self._generators = find_generators(loader.generator)
        self._loader = _copy_with(loader, dataset, self._sampler)
        self._keeps_workers = loader.num_workers > 0 and loader.persistent_workers

    def read(self, plans: Iterator[StepPlan], epoch: int) -> Iterator[tuple[StepPlan, list[Any]]]:
        """Each plan with its batches, in order."""
        plans, ahead = tee(plans)
        requests = _RequestStream(ahead)
        del ahead
        iterator: Any = None
        num_returned = 0
        try:
            for plan in plans:
                batches = []
                for _ in plan.requests:
                    # The loader starts at the rank's first batch: the loader of a rank that never
                    # has samples would search an endless stream for them.
                    if iterator is None:
                        iterator, batch = self._open(requests, epoch)
                    else:
                        self._check_not_superseded(requests)
                        batch = next(iterator, _END)
                    num_returned += 1
                    # A loader's subclass that keeps an iterator of its own asks for no requests.
                    if batch is _END or requests.num_requested < num_returned:
                        raise self._wrong_batches_error()
                    batches.append(batch)
                yield plan, batches
            # torch ends the loader's worker processes when its iterator reaches the end.
            if iterator is not None and next(iterator, _END) is not _END:
                raise self._wrong_batches_error()
        finally:
            requests.close()
            self._end(iterator)

    def close(self) -> None:
        """End the worker processes that a loader with ``persistent_workers`` keeps."""
        shut_down(forget_iterator(self._loader))

    def _open(self, requests: _RequestStream, epoch: int) -> tuple[Iterator[Any], Any]:
        """Start the loader and take the first batch.

        torch draws the loader workers' base seed from the user's generator, or from the global
        one. Both generators must keep their states, and a resumed run must draw the same seed.
        """
        self._sampler.requests = requests
        if self._keeps_workers and has_lost_process(self._loader):
            self.close()  # Ctrl-C in a terminal ends them, too; the next iteration starts others
        with IsolatedRandomness(
            derive_seed(self._seed, "loader", epoch), self._generators
        ).activate():
            iterator = iter(self._loader)
            try:
                return iterator, next(iterator, _END)
            except BaseException:
                self._end(iterator)
                raise

    def _check_not_superseded(self, requests: _RequestStream) -> None:
        if self._keeps_workers and self._sampler.requests is not requests:
            raise ConfigurationError(
                "this iteration was ended by a later one over the same loader",
                cause="persistent_workers=True gives a loader one set of worker processes, "
                "which serves one iteration at a time",
                fix="finish the first iteration, or DataLoader(..., persistent_workers=False)",
            )

    def _wrong_batches_error(self) -> NotShardableError:
        return NotShardableError(
            "the loader returned other batches than it was asked for",
            expected="one batch for each batch of indices, in order",
            got=f"{type(self._loader).__module__}.{type(self._loader).__qualname__}",
            cause="its __iter__ leaves out, splits or repeats batches, or keeps an iterator",
            fix="do that in the dataset, the collate_fn or the batch_sampler",
        )

    def _end(self, iterator: Any) -> None:
        if not self._keeps_workers:
            shut_down(iterator)


def _copy_with(
    loader: DataLoader[Any], dataset: SeededDataset, sampler: _RequestSampler
) -> DataLoader[Any]:
    # `copy_loader` makes the copy return its batches in order: step k has to be the same global
    # batch on every rank.
    copy = copy_loader(loader, dataset=dataset, batch_sampler=sampler, collate_fn=identity_collate)
    fields = vars(copy)
    # A loader of torchdata whose state was read goes on with the iterator made for that.
    if "_initial_iter_for_state_dict" in fields:
        fields["_initial_iter_for_state_dict"] = False
    if loader.num_workers > 0:
        fields["worker_init_fn"] = WorkerInitFn(loader.worker_init_fn)
    return copy
