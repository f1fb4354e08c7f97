# SPDX-License-Identifier: Apache-2.0
"""A Ray dataset as the training data: each worker reads the rows that Ray streams to it.

Ray decides during a pass which worker gets which block. So lockstep promises neither an order nor
that another pass has the same rows in the same step. It promises that in one pass every row is
trained on once, and that each row of a global batch counts the same, however unevenly Ray
distributes the rows. A pass that ended in its middle (a checkpoint was loaded, a worker was
replaced) cannot go on from there: the workers read all rows again, from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from lockstep.data.batch_rows import count_samples, leading_length, rows_error
from lockstep.data.shard_assignment import shard_bounds
from lockstep.data.sharded_loader import LoadedPart, Step
from lockstep.errors import ConfigurationError, NotShardableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from lockstep.data.epoch_order import FirstItems
    from lockstep.data.shard_assignment import ShardAssignment
    from lockstep.group import Group


@dataclass(frozen=True)
class RayBatches:
    """A ``ray.data.Dataset`` and how its rows become batches, for ``train(dataset=...)``.

    Attributes:
        dataset: the dataset; ``train(dataset=ds)`` is ``train(dataset=RayBatches(ds))``.
        batch_size: rows of a global batch; ``config[BATCH_SIZE]`` if None.
        collate_fn: from a dict of numpy columns to a batch; a dict of tensors if None.
        dtypes: one torch dtype, or one by column; not with `collate_fn`.
        local_shuffle_buffer_size: rows that each worker mixes before it makes batches.
        prefetch_batches: batches that each worker fetches ahead.
    """

    dataset: Any
    batch_size: int | None = None
    collate_fn: Callable[[Any], Any] | None = None
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
    local_shuffle_buffer_size: int | None = None
    prefetch_batches: int = 1


class TorchBatches(Protocol):
    """The method of ``ray.data.DataIterator`` that `RayDatasetShard` calls."""

    def iter_torch_batches(self, **options: Any) -> Any: ...


class RayDatasetShard:
    """One worker's part of a streamed dataset, as global steps; a `StepSource`.

    In every step the workers first exchange their numbers of samples, and whether their streams
    have ended: a worker cannot know by itself whether its peers have rows left. A global batch that
    the `collate_fn` has emptied on all workers is no step, and not the end of the pass.

    Args:
        rows: this worker's iterator of ``Dataset.streaming_split``.
        batches: how rows become batches; its `dataset` is not used.
        assignment: the worker's shards, whose share of every global batch the worker reads.
        group: all workers.
        joint: the operator's loop takes plain batches. A worker without rows in a step then
            computes on its previous batch with weight 0 (it borrows that batch), so that it takes
            part in the collectives.
    """

    steps_per_epoch: int | None = None
    has_exact_length = False
    first_items: FirstItems | None = None

    def __init__(
        self,
        rows: TorchBatches,
        batches: RayBatches,
        assignment: ShardAssignment,
        group: Group,
        *,
        joint: bool,
    ) -> None:
        assert batches.batch_size is not None, "the driver fills it in"
        self.joint = joint
        self.global_batch_size: int | None = batches.batch_size
        self._rows = rows
        self._batches = batches
        self._assignment = assignment
        self._group = group
        self._borrowed: tuple[Any, ...] = ()

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """None: Ray decides during the pass which rows a worker gets."""
        return None

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        """Empty; see `samples_of`."""
        return []

    def agree(self, group: Group, epoch: int) -> None:
        """Do nothing: Ray distributes the rows, so no worker has a plan to compare."""

    def batches(self, epoch: int, start_step: int = 0) -> Generator[Step, None, None]:
        """The steps of a pass over all rows, numbered from `start_step`.

        Collective:
            Every rank of the group, for every step: one small all-gather. Ray begins a pass
            when all ranks have asked for their first row.

        Raises:
            NotShardableError: with `joint`, a rank has had no row yet, so no batch to borrow.
        """
        shards = tuple(self._assignment.shards)
        stream: Iterator[Any] = iter(self._rows.iter_torch_batches(**self._options(epoch)))
        index = start_step
        while True:
            batch = next(stream, _END)
            mine = _count(batch)
            counts, have_ended = self._exchange(mine, has_ended=batch is _END)
            if not any(count > 0 for count in counts):
                if have_ended:
                    return
                continue
            if mine:
                part = _part(batch, mine, shards)
                self._borrowed = (part.batch,) if self.joint else ()
                parts = [part]
            else:
                parts = [LoadedPart(each, 0, shards, is_borrowed=True) for each in self._borrowed]
            if self.joint and -1 in counts:
                raise _no_batch_to_borrow_error(counts)
            total = sum(max(count, 0) for count in counts)
            yield Step(index, parts, total, has_empty_shards=min(counts) <= 0)
            index += 1

    def close(self) -> None:
        self._borrowed = ()

    def _options(self, epoch: int) -> dict[str, Any]:
        given = self._batches
        options: dict[str, Any] = {
            "batch_size": _rows_per_step(given.batch_size or 0, self._assignment),
            "prefetch_batches": given.prefetch_batches,
            # The training loop moves each batch to the device itself, as with any loader.
            "device": "cpu",
        }
        if given.collate_fn is not None:
            options["collate_fn"] = _count_before(given.collate_fn)
        if given.dtypes is not None:
            options["dtypes"] = given.dtypes
        if given.local_shuffle_buffer_size is not None:
            options["local_shuffle_buffer_size"] = given.local_shuffle_buffer_size
            options["local_shuffle_seed"] = self._assignment.seed + epoch
        return options

    def _exchange(self, mine: int, *, has_ended: bool) -> tuple[list[int], bool]:
        """Every rank's samples in this step, and whether all ranks' streams have ended.

        -1 stands for a rank with no samples and no batch to borrow.
        """
        if self._group.size == 1:
            return [mine], has_ended
        token = mine if mine or self._borrowed or not self.joint else -1
        own = torch.tensor([token, int(has_ended)], device=self._group.device)
        gathered = torch.stack(self._group.all_gather(own))
        return gathered[:, 0].tolist(), bool(gathered[:, 1].all())


_END: Final = object()
"""What stands for the next batch of a stream that has ended; a `collate_fn` may return None."""


@dataclass(frozen=True, slots=True)
class _Collated:
    """A batch as the user's `collate_fn` has made it of `num_rows` rows."""

    num_rows: int
    batch: Any


def _count_before(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`collate_fn` with the number of rows that it was given beside its batch."""

    def collate(columns: Any) -> _Collated:
        is_dict = isinstance(columns, dict)
        num_rows = leading_length(columns) if is_dict else len(columns)
        return _Collated(num_rows, collate_fn(columns))

    # By one of these base classes Ray decides whether to call it with a dict or a table.
    classes = (each for each in type(collate_fn).__mro__ if each.__module__.startswith("ray."))
    base = next(classes, None)
    if base is None:
        return collate
    made: Any = type("Counted", (base,), {"__call__": lambda _, columns: collate(columns)})
    counted: Callable[[Any], Any] = made()
    return counted


def _part(read: Any, num_samples: int, shards: tuple[int, ...]) -> LoadedPart:
    if not isinstance(read, _Collated):
        return LoadedPart(read, num_samples, shards)
    miscount = None if num_samples == read.num_rows else rows_error(read.batch)
    return LoadedPart(read.batch, num_samples, shards, (), miscount)


def _count(read: Any) -> int:
    """The samples in what a stream has yielded; 0 at its end."""
    if not isinstance(read, _Collated):
        return 0 if read is _END else leading_length(read)
    return 0 if read.batch is None else count_samples(read.batch, read.num_rows)


def _rows_per_step(batch_size: int, assignment: ShardAssignment) -> int:
    bounds = [shard_bounds(batch_size, assignment.num_shards, shard) for shard in assignment.shards]
    rows = sum(stop - start for start, stop in bounds)
    if rows < 1:
        raise ConfigurationError(
            "a worker would never read its rows of the dataset, and the others would wait for it",
            expected=f"a global batch of at least {assignment.num_shards} rows, one for each shard",
            got=f"batch size {batch_size}",
            fix=f"config={{BATCH_SIZE: {assignment.num_shards}}} or more",
        )
    return rows


def _no_batch_to_borrow_error(counts: list[int]) -> NotShardableError:
    return NotShardableError(
        "a worker got no row of the dataset, so that it has no batch to keep step with",
        where=f"rank {counts.index(-1)}",
        got=f"rows by rank: {[max(count, 0) for count in counts]}",
        cause="Ray hands out whole blocks, and there are fewer blocks than workers",
        fix="dataset.repartition(4 * num_workers), or override compute_loss instead of the loop",
    )
