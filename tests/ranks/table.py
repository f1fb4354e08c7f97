# SPDX-License-Identifier: Apache-2.0
"""One cell of the table: real workers, as threads over real gloo, against plain autograd.

The truth is written here: whole batches, torch's backward, nothing of lockstep's loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist

from harness import TOLERANCE, assert_same, side_by_side
from lockstep.errors import LockstepError, PeerLostError
from lockstep.keys import BATCH_SIZE
from lockstep.operator import Options, RankContext, TrainingOperator
from lockstep.worker import LoopRequest, Rendezvous, Worker, WorkerSpec
from ranks.divergent import DIVERGENT, IN_THE_LOSS, IN_UNITS_ALONE, NOT_FINITE
from ranks.programs_in_shards import IN_SHARDS
from ranks.table_operators import COLUMNS, OPERATORS, Plain

EPOCHS = 2
SPLITS = {"even": (36, 12), "uneven": (33, 11), "empty_last": (25, 12)}
"""Rows, and rows of a global batch: three steps an epoch. One row is one rank's."""

BORROWED = {"two_last": (26, 12)}
"""Who has none of the last two rows borrows the first; it is not all of the batch."""

EVERY_SPLIT = SPLITS | BORROWED
EVERY_OPERATOR = OPERATORS | DIVERGENT | NOT_FINITE | IN_THE_LOSS | IN_UNITS_ALONE | IN_SHARDS


@dataclass
class Seen:
    """What happened each time that an optimizer stepped."""

    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    also: dict[str, torch.Tensor] = field(default_factory=dict)
    apart_since: float | None = None
    refused_at: float = 0.0


@dataclass
class Rows:
    """A rank's rows of a tensor in shards: to gather them would change what is being tested.

    Attributes:
        num_ranks: over how many a copy of the tensor is sharded; the next ones have the next copy.
    """

    tensor: torch.Tensor
    num_ranks: int


def held(tensor: torch.Tensor) -> Any:
    """A copy, on the CPU, of what this rank holds."""
    shard: Any = tensor
    if not hasattr(tensor, "to_local"):
        return tensor.cpu().clone()
    return Rows(shard.to_local().cpu().clone(), shard.device_mesh.size())


def put_together(results: Sequence[Any]) -> list[Any]:
    """The results of all ranks, with whole tensors in the place of each rank's rows."""
    seen = [result[0] for result in results if not isinstance(result, BaseException)]
    if len(seen) < len(results) or not any(map(_has_rows, seen)):
        return list(results)
    together = Seen(
        [_joined(each) for each in zip(*(one.gradients for one in seen), strict=False)],
        [_joined(each) for each in zip(*(one.weights for one in seen), strict=False)],
        _joined([one.also for one in seen]),
    )
    together.weights[-1] = _joined([one.weights[-1] for one in seen])
    return [(together, refusal) for _, refusal in results]


def _has_rows(seen: Seen) -> bool:
    return any(isinstance(value, Rows) for value in seen.weights[0].values())


def _joined(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def join(values: list[Any]) -> Any:
        if all(isinstance(value, Rows) for value in values):
            rows, num_ranks = [value.tensor for value in values], values[0].num_ranks
            for number, mine in enumerate(rows):
                assert torch.equal(mine, rows[number % num_ranks]), "the copies differ"
            return torch.cat(rows[:num_ranks])
        assert not any(isinstance(value, Rows) for value in values), "on some ranks only"
        return values[0]

    return {name: join([one[name] for one in of_ranks]) for name in of_ranks[0]}


class Watch:
    """Hooks on the optimizers that an operator registered."""

    def __init__(self, operator: Plain) -> None:
        run = operator._lockstep.registered
        self.named = {
            f"{place}.{name}": parameter
            for place, model in enumerate(run.plain_modules())
            for name, parameter in model.named_parameters()
        }
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.seen = Seen(weights=[self.weights()])
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: held(parameter.detach()) for name, parameter in self.named.items()}

    def _before(self, optimizer, args, kwargs) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen.gradients.append(
            {self.names[id(p)]: None if p.grad is None else held(p.grad) for p in params}
        )

    def _after(self, optimizer, args, kwargs) -> None:
        self.seen.weights.append(self.weights())


@cache
def one_process(name: str, split: str) -> Seen:
    """The truth."""
    operator_cls = EVERY_OPERATOR[name]
    num_rows, per_batch = EVERY_SPLIT[split]
    alone = RankContext(options=Options(wrap_ddp=False))
    operator = operator_cls({"rows": num_rows, BATCH_SIZE: per_batch}, alone)
    operator.setup(operator.config)
    watch = Watch(operator)
    starts = range(0, num_rows, per_batch)
    batches = [
        [column[:num_rows][start : start + per_batch] for column in COLUMNS] for start in starts
    ]
    for _ in range(EPOCHS):
        if operator._lockstep_overrides(TrainingOperator.train_epoch):
            operator.train_epoch(iter(batches), {})
        elif operator._lockstep_overrides(TrainingOperator.train_batch):
            for batch in batches:
                operator.train_batch(batch, {})
                operator.global_step += 1
        else:
            _epoch(operator, batches)
    watch.seen.also = operator.also()
    return watch.seen


def _epoch(operator: Plain, batches: Sequence[list[torch.Tensor]]) -> None:
    every = operator.arguments.get("accumulate", 1)
    clip = operator.arguments.get("clip_grad_norm")
    parameters = list(operator._lockstep.registered.parameters())
    for start in range(0, len(batches), every):
        window = batches[start : start + every]
        total = sum(len(batch[0]) for batch in window)
        operator.optimizer.zero_grad()
        for batch in window:
            share = len(batch[0]) / total
            loss = operator.loss_of(batch)
            (loss if share == 1 else loss * share).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        operator.optimizer.step()


def train(worker: Worker) -> tuple[Seen, LockstepError | None]:
    """All epochs, or up to what is refused; with the weights as they are then."""
    watch = Watch(worker.operator)
    refusal: LockstepError | None = None
    try:
        for _ in range(EPOCHS):
            worker.train(LoopRequest("train", None, False, {}))
    except LockstepError as error:
        refusal = error
        watch.seen.refused_at = time.monotonic()
        # Peers may be waiting for this rank.
        worker.leave()
    watch.seen.weights.append(watch.weights())
    watch.seen.apart_since = getattr(worker.operator, "apart_since", None)
    watch.seen.also = {name: held(value) for name, value in worker.operator.also().items()}
    return watch.seen, refusal


def as_threads(
    num_workers: int, body: Callable[[int, Any], Any], timeout_s: float = 20.0
) -> list[Any]:
    """``body(rank, make_group)`` for every rank; its result, or its exception."""
    store = dist.HashStore()
    results: list[Any] = [None] * num_workers

    def one(rank: int) -> None:
        def make_group() -> Any:
            if num_workers == 1:
                return None
            return dist.ProcessGroupGloo(store, rank, num_workers, timedelta(seconds=timeout_s))

        try:
            results[rank] = body(rank, make_group)
        except BaseException as error:
            results[rank] = error

    side_by_side(one, num_workers)
    return results


def worker_outcomes(spec: WorkerSpec, body: Callable[[Worker], Any]) -> list[Any]:
    """``body(worker)`` on each worker of `spec`, whose operator is built; or its exception."""

    def one_rank(rank: int, make_group: Callable[[], Any]) -> Any:
        worker = Worker(spec, rank, rank)
        worker._group = make_group()
        try:
            worker._build_operator(torch.device("cpu"))
            return body(worker)
        finally:
            worker.stop()

    return as_threads(spec.num_workers, one_rank)


def run_workers(spec: WorkerSpec, body: Callable[[Worker], Any]) -> list[Any]:
    """As `worker_outcomes`, but the first failure is raised."""
    results = worker_outcomes(spec, body)
    failures = [result for result in results if isinstance(result, BaseException)]
    # A rank that lost its peer says less than the peer.
    for failure in sorted(failures, key=lambda one: isinstance(one, PeerLostError)):
        raise failure
    return results


def in_units(operator_cls: type[Plain], dp_shard_size: int | None = None) -> type[Plain]:
    """The operator, with models of which no rank ever holds all layers."""

    def register(self, **arguments):
        return super(in_shards, self).register(
            shard="auto", dp_shard_size=dp_shard_size, **arguments
        )

    in_shards = type(operator_cls.__name__, (operator_cls,), {"register": register})
    return in_shards


def on_gpu(operator_cls: type[Plain]) -> type[Plain]:
    """The operator, which moves its batches itself where it has a loop of its own."""

    def moved(batch):
        return [column.to("cuda") for column in batch]

    def train_batch(self, batch, batch_info):
        return operator_cls.train_batch(self, moved(batch), batch_info)

    def train_epoch(self, iterator, info):
        return operator_cls.train_epoch(self, map(moved, iterator), info)

    own = {
        loop.__name__: loop
        for loop in (train_batch, train_epoch)
        if getattr(operator_cls, loop.__name__) is not getattr(TrainingOperator, loop.__name__)
    }
    return type(operator_cls.__name__, (operator_cls,), own)


def num_processes(sync: str, num_workers: int) -> int:
    """Under `data_parallel` the workers are replicas in one process."""
    return 1 if sync == "data_parallel" else num_workers


def spec_of(
    sync: str, name: str, split: str, num_workers: int, use_gpu: bool = False
) -> WorkerSpec:
    operator_cls = EVERY_OPERATOR[name]
    if sync in ("units", "copies"):
        operator_cls = in_units(operator_cls, 2 if sync == "copies" else None)
        sync = "fsdp"
    if use_gpu:
        operator_cls = on_gpu(operator_cls)
    num_rows, per_batch = EVERY_SPLIT[split]
    # Small buckets: several are on their way while backward still runs.
    arguments = {"bucket_cap_mb": 1e-4, **operator_cls.arguments}
    arguments |= operator_cls.arguments_by_sync.get(sync, {})
    if sync == "data_parallel":
        arguments["replicas"] = num_workers
    return WorkerSpec(
        operator_cls,
        {"rows": num_rows, BATCH_SIZE: per_batch},
        num_processes(sync, num_workers),
        # One worker carries several shards; several carry one each.
        num_shards=3 if num_workers == 1 else num_workers,
        seed=0,
        use_gpu=use_gpu,
        options=Options(sync=sync, **arguments),
    )


@contextmanager
def server_for(sync: str, num_workers: int) -> Iterator[Any]:
    """Where a parameter server listens, if one is asked for."""
    if sync != "parameter_server":
        yield None
        return
    from ranks.served import server

    with server(num_workers) as address:
        yield address


def on_threads(sync: str, name: str, split: str, num_workers: int) -> list[Any]:
    """What each rank saw and what was refused there; or its exception."""
    spec = spec_of(sync, name, split, num_workers)
    with server_for(sync, num_workers) as address:

        def one_rank(rank: int, make_group: Callable[[], Any]) -> Any:
            worker = Worker(spec, rank, rank)
            worker._group = make_group()
            if address is not None:
                worker._rendezvous = Rendezvous(
                    "",
                    0,
                    0,
                    "gloo",
                    one_node=True,
                    timeout_s=20.0,
                    as_default=False,
                    server_address=address,
                )
            try:
                worker._build_operator(torch.device("cpu"))
                return train(worker)
            finally:
                worker.stop()

        return as_threads(num_processes(sync, num_workers), one_rank)


def check(results: Sequence[Any], name: str, split: str, refused_as: Any = None) -> None:
    """The cell is exact; or with `refused_as`, exact up to where every rank refuses to go on."""
    true, results = one_process(name, split), put_together(results)
    refusals = []
    for result in results:
        if isinstance(result, BaseException):
            if refused_as is None or not isinstance(result, refused_as):
                raise result
            refusals.append(result)  # in setup: nothing was trained
            continue
        seen, refusal = result
        refusals.append(refusal)
        if refusal is not None and refused_as is None:
            raise refusal
        if refusal is None:
            assert len(seen.gradients) == len(true.gradients)
            assert_close(seen.also, true.also)
        for got, expected in zip(seen.gradients, true.gradients, strict=False):
            assert_same(got, expected)
        steps = len(seen.gradients)
        for got, expected in zip(seen.weights[: steps + 1], true.weights, strict=False):
            assert_close(got, expected)
        # It ends with what the last step that was taken left.
        assert_close(seen.weights[-1], true.weights[steps])
    if refused_as is not None:
        assert all(refusals), "not every rank refused"
        assert any(isinstance(refusal, refused_as) for refusal in refusals)
        assert all(isinstance(refusal, (refused_as, PeerLostError)) for refusal in refusals)


def assert_close(got: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert got.keys() == true.keys()
    for name, expected in true.items():
        assert (got[name] - expected).abs().max() <= TOLERANCE, name


Cell = tuple[Any, ...]


def cells(*axes: Sequence[Any]) -> list[Cell]:
    return list(product(*axes))


def pairwise(*axes: Sequence[Any]) -> set[Cell]:
    """A small choice of cells that holds every pair of values of any two axes.

    Greedy: always the cell with the most pairs that are not held yet, the first one of those.
    """
    left = {pair for cell in product(*axes) for pair in _pairs(cell)}
    everything = cells(*axes)
    chosen: set[Cell] = set()
    while left:
        best = max(everything, key=lambda cell: len(left.intersection(_pairs(cell))))
        chosen.add(best)
        left.difference_update(_pairs(best))
    return chosen


def _pairs(cell: Cell) -> Iterator[tuple[Any, ...]]:
    return combinations(enumerate(cell), 2)
