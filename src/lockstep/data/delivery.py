# SPDX-License-Identifier: Apache-2.0
"""From plans to batches, through the user's own loader.

The loader is copied object for object and three of its fields are replaced: the dataset (by
one that reads requests), the batch sampler (by one that hands out requests) and the collate
function (the request was collated where it was read). Everything else, a subclass's methods
and fields of later torch versions included, is as the user made it; rebuilding a loader from a
list of known fields is how fields get lost.

A loader reads requests ahead of the batches it returns, and a step may hold none for this
worker or several. So both sides pull plans through one `_Run`, which keeps what the other side
has not come to yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep._torch_compat import forget_iterator, loader_like, shut_down
from lockstep.data.fetch import Request, RequestedDataset, WorkerStart, as_it_is
from lockstep.data.isolation import Isolation, held_generators
from lockstep.errors import ConfigurationError, NotShardableError
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

_END: Any = object()


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A batch to come; `num_samples` None means that only the batch can tell."""

    request: Request
    num_samples: int | None
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step to come, as far as this worker goes."""

    index: int
    parts: list[PartPlan]
    num_samples: int | None


class _Run:
    """One pass over an epoch's plans, pulled by the loader and by the consumer."""

    def __init__(self, plans: Iterator[StepPlan]) -> None:
        self._plans = plans
        self._steps: deque[StepPlan] = deque()
        self._requests: deque[Request] = deque()
        self.num_requested = 0

    def _advance(self) -> bool:
        plan = next(self._plans, None)
        if plan is None:
            return False
        self._steps.append(plan)
        self._requests += [part.request for part in plan.parts]
        return True

    def steps(self) -> Iterator[StepPlan]:
        while self._steps or self._advance():
            yield self._steps.popleft()

    def requests(self) -> Iterator[Request]:
        while True:
            while not self._requests:
                if not self._advance():
                    return
            self.num_requested += 1
            yield self._requests.popleft()

    def end(self) -> None:
        """Let go of the plans: a persistent loader holds on to the run it read last.

        Through the plans it would hold its own owner, and then only the cycle collector, in
        an order that torch's worker processes take seconds to get over, would end it.
        """
        self._plans = iter(())
        self._steps.clear()
        self._requests.clear()


class DirectDelivery:
    """Batches without a loader: the items are the batches."""

    def __init__(self, dataset: RequestedDataset) -> None:
        self._dataset = dataset

    def run(self, plans: Iterator[StepPlan], epoch: int) -> Iterator[tuple[StepPlan, list[Any]]]:
        for plan in plans:
            yield plan, [self._dataset.__getitems__(part.request) for part in plan.parts]

    def close(self) -> None:
        pass


class _RequestSampler:
    """The copy's batch sampler. One object for its life: persistent workers keep it."""

    def __init__(self) -> None:
        self.run = _Run(iter(()))

    def __iter__(self) -> Iterator[Request]:
        return self.run.requests()


class LoaderDelivery:
    """Batches through a copy of the user's loader.

    Args:
        loader: the user's; it is not changed.
        dataset: what reads a request.
        seed: the run's.
    """

    def __init__(self, loader: DataLoader[Any], dataset: RequestedDataset, seed: int) -> None:
        self._seed = seed
        self._sampler = _RequestSampler()
        self._held = held_generators(loader.generator)
        self._loader = _copy_with(loader, dataset, self._sampler)
        self._keeps_workers = loader.num_workers > 0 and loader.persistent_workers

    def run(self, plans: Iterator[StepPlan], epoch: int) -> Iterator[tuple[StepPlan, list[Any]]]:
        run = _Run(plans)
        iterator: Any = None
        num_delivered = 0
        try:
            for plan in run.steps():
                batches = []
                for _ in plan.parts:
                    # Opened at the first batch: a worker that never has samples must not let
                    # its loader search an endless stream for some.
                    if iterator is None:
                        iterator, batch = self._open(run, epoch)
                    else:
                        self._check_still_ours(run)
                        batch = next(iterator, _END)
                    num_delivered += 1
                    # A subclass that keeps an iterator of its own never asks for our requests.
                    if batch is _END or run.num_requested < num_delivered:
                        raise self._miscount()
                    batches.append(batch)
                yield plan, batches
            # Reaching the end is also what ends the loader's worker processes.
            if iterator is not None and next(iterator, _END) is not _END:
                raise self._miscount()
        finally:
            run.end()
            self._end(iterator)

    def close(self) -> None:
        shut_down(forget_iterator(self._loader))

    def _open(self, run: _Run, epoch: int) -> tuple[Iterator[Any], Any]:
        """Start the loader and take the first batch.

        torch draws the loader workers' base seed from the user's generator, or the global
        one: both must be left as they were, and the draw be the same after a resume.
        """
        self._sampler.run = run
        with Isolation(derive_seed(self._seed, "loader", epoch), self._held).entered():
            iterator = iter(self._loader)
            try:
                return iterator, next(iterator, _END)
            except BaseException:
                self._end(iterator)
                raise

    def _check_still_ours(self, run: _Run) -> None:
        if self._keeps_workers and self._sampler.run is not run:
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
    loader: DataLoader[Any], dataset: RequestedDataset, sampler: _RequestSampler
) -> DataLoader[Any]:
    # Step k has to be the same global batch on every rank: the copy's batches come in order.
    copy = loader_like(loader, dataset=dataset, batch_sampler=sampler, collate_fn=as_it_is)
    fields = vars(copy)
    # torchdata's loader, once asked for its state, takes the iterator it made for the answer.
    if "_initial_iter_for_state_dict" in fields:
        fields["_initial_iter_for_state_dict"] = False
    if loader.num_workers > 0:
        fields["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
    return copy
