# SPDX-License-Identifier: Apache-2.0
"""A copy of the user's loader, which returns the batches of one rank's shards.

The loader is copied object for object and three of its fields are replaced: the dataset (by one
that reads requests), the batch sampler (by one that hands out requests) and the collate function
(the dataset has collated already). Everything else, a subclass's methods and fields of later torch
versions included, is as the user made it; to rebuild a loader from a list of known fields is how
fields get lost.

A loader asks for requests ahead of the batches it returns, while a step may hold no request for
this rank, or several. So the loader and the reader of the steps pull the same plans through
`itertools.tee`, which keeps what either of them has not come to yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import tee
from typing import TYPE_CHECKING, Any

from lockstep._torch_compat import copy_loader, forget_iterator, shut_down
from lockstep.data.isolated_randomness import IsolatedRandomness, held_generators
from lockstep.data.seeded_dataset import Request, SeededDataset, WorkerStart, as_it_is
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
        index: of the step within the epoch.
        requests: one for each batch.
        num_samples: of the global batch; None where the batches of other ranks would tell.
    """

    index: int
    requests: list[Request]
    num_samples: int | None


class _Requests:
    """The requests of one pass over an epoch, as a loader's iterator asks for them."""

    def __init__(self, plans: Iterable[StepPlan]) -> None:
        self._requests = (request for plan in plans for request in plan.requests)
        self.num_asked = 0

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        request = next(self._requests)
        self.num_asked += 1
        return request

    def close(self) -> None:
        """Let go of the plans: a persistent loader holds on to the requests it read last.

        Through the plans the loader would hold its own owner, and then only the cycle collector
        would end it, in an order that torch's worker processes take seconds to get over.
        """
        self._requests.close()


class _RequestSampler:
    """The copy's batch sampler. One object for its life: persistent workers keep it."""

    def __init__(self) -> None:
        self.requests = _Requests(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class LoaderCopy:
    """A copy of the user's loader, which reads the requests of a rank's steps.

    Args:
        loader: the user's; it is not changed.
        dataset: reads a request.
        seed: the run's.
    """

    def __init__(self, loader: DataLoader[Any], dataset: SeededDataset, seed: int) -> None:
        self._seed = seed
        self._sampler = _RequestSampler()
        self._held = held_generators(loader.generator)
        self._loader = _copy_with(loader, dataset, self._sampler)
        self._keeps_workers = loader.num_workers > 0 and loader.persistent_workers

    def read(self, plans: Iterator[StepPlan], epoch: int) -> Iterator[tuple[StepPlan, list[Any]]]:
        """Each plan with its batches, in order."""
        plans, ahead = tee(plans)
        requests = _Requests(ahead)
        del ahead
        iterator: Any = None
        num_returned = 0
        try:
            for plan in plans:
                batches = []
                for _ in plan.requests:
                    # Opened at the first batch: a rank that never has samples must not let its
                    # loader search an endless stream for some.
                    if iterator is None:
                        iterator, batch = self._open(requests, epoch)
                    else:
                        self._check_still_ours(requests)
                        batch = next(iterator, _END)
                    num_returned += 1
                    # A subclass that keeps an iterator of its own never asks for our requests.
                    if batch is _END or requests.num_asked < num_returned:
                        raise self._miscount()
                    batches.append(batch)
                yield plan, batches
            # Reaching the end is also what ends the loader's worker processes.
            if iterator is not None and next(iterator, _END) is not _END:
                raise self._miscount()
        finally:
            requests.close()
            self._end(iterator)

    def close(self) -> None:
        """End the worker processes that a loader with ``persistent_workers`` keeps."""
        shut_down(forget_iterator(self._loader))

    def _open(self, requests: _Requests, epoch: int) -> tuple[Iterator[Any], Any]:
        """Start the loader and take the first batch.

        torch draws the loader workers' base seed from the user's generator, or the global
        one: both must be left as they were, and the draw be the same after a resume.
        """
        self._sampler.requests = requests
        with IsolatedRandomness(derive_seed(self._seed, "loader", epoch), self._held).entered():
            iterator = iter(self._loader)
            try:
                return iterator, next(iterator, _END)
            except BaseException:
                self._end(iterator)
                raise

    def _check_still_ours(self, requests: _Requests) -> None:
        if self._keeps_workers and self._sampler.requests is not requests:
            raise ConfigurationError(
                "this iteration was ended by a later one over the same loader",
                cause="persistent_workers=True gives a loader one set of worker processes, "
                "which serves one iteration at a time",
                fix="finish the first iteration, or DataLoader(..., persistent_workers=False)",
            )

    def _miscount(self) -> NotShardableError:
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
    # Step k has to be the same global batch on every rank: the copy's batches come in order.
    copy = copy_loader(loader, dataset=dataset, batch_sampler=sampler, collate_fn=as_it_is)
    fields = vars(copy)
    # torchdata's loader, once asked for its state, takes the iterator it made for the answer.
    if "_initial_iter_for_state_dict" in fields:
        fields["_initial_iter_for_state_dict"] = False
    if loader.num_workers > 0:
        fields["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
    return copy
