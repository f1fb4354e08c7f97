# SPDX-License-Identifier: Apache-2.0
"""One global batch on this worker, from its delivery to its commit: `GlobalBatchContext`.

The worker's `BatchIterator` makes a `GlobalBatchContext` where a global batch begins. It is the
only place in operator and worker that holds this worker's shards, their weights and seeds, the
place in the accumulation window, and the ranks that reduce the gradients. The default loops receive
the context itself as their batch and pass it down; `BatchIterator` tells the weight to the
gradients' synchronisation and to the collectives, once.

The default loops compute a worker's shards one after the other, so that the arithmetic of a shard
does not depend on which worker carries it. A loop of the user's own receives the samples of all of
its worker's shards as one plain batch, as the loader collated it, which then counts as one shard.
The functions that such a loop calls (`self.backward`, ``super().train_batch``, ``metric.update``)
find the context as ``operator._lockstep.global_batch``. Between two batches a context without
shards stands there, for a loop may run a backward or step an optimizer after its last batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.data.batch_rows import count_kept_samples, leading_length, rows_of
from lockstep.errors import WeightError
from lockstep.keys import NUM_SAMPLES
from lockstep.operator.shard_batch import ShardBatch
from lockstep.reduction_context import ReductionContext, activate
from lockstep.tensor_tree import leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from lockstep.operator.criterion_targets import CriterionCall
    from lockstep.operator.read_ahead_batches import ReadAheadBatches
    from lockstep.sync import Synchroniser


@dataclass(eq=False)
class GlobalBatchContext:
    """One global batch on this worker, and how far the worker has come with it.

    Attributes:
        reduction: the ranks whose losses and gradients of this batch are reduced, and how.
        purpose: "train", "validation" or "predict".
        shards: this worker's shards of the batch, in shard order; one if `is_joint`.
        is_joint: the user's loop has received this worker's samples as one plain batch.
        weight: of a plain ``loss.backward()``. A number if the batch is joint; the error to raise
            where the weight cannot be known; None if each shard's loss has a weight of its own.
        opens_window: this batch is the first of its accumulation window.
        closes_window: this batch is the last of its window: the optimizer steps after it.
        has_empty_shards: a shard of the batch has no samples, and so maybe a worker none.
        read_ahead: the batches that the user's own `train_epoch` has read; None in all other loops,
            and without peers.
        may_be_earlier: without peers, a batch of the user's own `train_epoch` may be made from one
            that it has read before this one; of how many samples it is changes no peer's gradient.
        num_train_batch_calls: how often this batch went through the default `train_batch`.
        is_stepping: an optimizer's step of the default loop is running.
        has_scheduled: the schedulers have begun to step after this batch, if they step by batch.
        stepped_optimizers: one entry for each step taken since the batch before was over.
        counts_samples: whether the default loop weighs its losses by their samples, if it has
            computed any; None if no worker has delivered the batch.
        partial_weights: weights of metrics that only some of `shards` reported, and of a loss that
            is a mean over targets; see `AverageMeterCollection.update`.
        criterion_calls: what the default loss has called for the shard in hand, in order.
        num_computed: how many shards, and plain batches, were computed.
        counted_in_round: how many rounds there had been at the last backward without a weight.
    """

    reduction: ReductionContext
    purpose: str
    shards: tuple[ShardBatch, ...] = ()
    is_joint: bool = False
    weight: float | WeightError | None = None
    opens_window: bool = True
    closes_window: bool = True
    has_empty_shards: bool = False
    read_ahead: ReadAheadBatches | None = None
    may_be_earlier: bool = False
    counts_samples: Callable[[], bool] | None = None
    num_train_batch_calls: int = 0
    is_stepping: bool = False
    has_scheduled: bool = False
    stepped_optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    partial_weights: dict[str, float] = field(default_factory=dict)
    criterion_calls: list[CriterionCall] = field(default_factory=list)
    num_computed: int = 0
    counted_in_round: int | None = None

    def between_batches(self) -> GlobalBatchContext:
        """The context that stands after this batch until the next one is delivered."""
        return GlobalBatchContext(
            self.reduction,
            self.purpose,
            opens_window=self.opens_window,
            closes_window=self.closes_window,
            read_ahead=self.read_ahead,
            may_be_earlier=self.may_be_earlier,
        )

    @property
    def joint_batch(self) -> ShardBatch | None:
        """The plain batch that the user's loop has received; None between batches."""
        return self.shards[0] if self.is_joint and self.shards else None

    @property
    def is_borrowed(self) -> bool:
        """Whether the plain batch is borrowed: another worker owns its samples, and counts them."""
        if self.joint_batch is not None:
            return self.joint_batch.is_borrowed
        return self.read_ahead is not None and self.read_ahead.are_borrowed

    def _refuse_miscount(self) -> None:
        """Raise if the default loop counts samples that a `collate_fn` has left out.

        A loss that is a sum counts for the samples that are there.
        """
        if self.counts_samples is None or not self.counts_samples() or not self.reduction.averages:
            return
        for shard in self.shards:
            if shard.miscount is not None:
                raise shard.miscount

    def shards_in(self, batch: Any) -> tuple[ShardBatch, ...]:
        """The shards of a loop's batch; a batch that the user made from it is one shard.

        Only the first of the plain batches that are computed in a step has the seed of the batch
        that was delivered: further ones, and those between two batches, go on with the loop's own
        draws. With one seed they would all draw the same numbers, and so would the loop after each.

        Args:
            batch: this context, the plain batch that was delivered, or a batch that the user made
                from it (moved, augmented, cut).

        Raises:
            WeightError: the loop has made a batch of which neither all tensors nor a list show
                the samples; or it has read ahead, and from which batch it has made this one is
                unknown.
        """
        if isinstance(batch, GlobalBatchContext):
            return batch.shards
        shard = self._shard_of(batch)
        is_first = self.joint_batch is not None and not self.num_computed
        return (shard if is_first else replace(shard, seed=None),)

    def _shard_of(self, batch: Any) -> ShardBatch:
        """A plain batch, with the samples and the seed of the batch from which the loop made it."""
        joint_batch = self.joint_batch
        if self.read_ahead is not None:
            joint_batch = self.read_ahead.source_of(batch, joint_batch)
        if joint_batch is None:
            return ShardBatch(batch, leading_length(batch), seed=None)
        if joint_batch.batch is batch:
            return joint_batch
        # The samples of a copy of a borrowed batch belong to another worker, too.
        if joint_batch.is_borrowed:
            return replace(joint_batch, batch=batch)
        num_samples = count_kept_samples(batch, joint_batch.batch, joint_batch.num_samples)
        if num_samples is None and self.may_be_earlier:
            rows = {rows_of(leaf) for leaf in leaves_of(batch)} - {None}
            num_samples = rows.pop() if len(rows) == 1 else None
        if num_samples is None:
            raise _unknown_samples_error(batch, joint_batch)
        if num_samples == joint_batch.num_samples:  # moved or augmented: it holds the same samples
            return replace(joint_batch, batch=batch)
        return ShardBatch(batch, num_samples, joint_batch.seed)

    def activate_shard(
        self, shard: ShardBatch, *, per_shard: bool
    ) -> AbstractContextManager[ReductionContext]:
        """Seed the random numbers of `shard`; enter the result around its forward and backward.

        Args:
            shard: one of `shards_in` a batch.
            per_shard: whether the loss is computed shard by shard; functions that need the whole
                batch of this worker (a gather, a contrastive loss) then raise.
        """
        self.criterion_calls.clear()
        self.num_computed += 1
        shard.seed_randomness()
        whole = self.reduction
        return activate(
            ReductionContext(
                whole.group,
                shard.num_samples,
                per_shard=per_shard,
                purpose=self.purpose,
                is_borrowed=shard.is_borrowed,
                averages=whole.averages,
            )
        )

    def num_samples_of(self, metrics: Mapping[str, Any]) -> int:
        """The number of samples for which a batch's metrics count; 0 for a borrowed batch.

        Raises:
            WeightError: a `collate_fn` has left some of them out.
        """
        self._refuse_miscount()
        if self.is_borrowed:
            return 0
        joint_batch = self.joint_batch
        return int(metrics.get(NUM_SAMPLES, 1 if joint_batch is None else joint_batch.num_samples))

    def weight_of_backward(self, given: float | None) -> float | None:
        """The weight of a backward in a loop of the user's own.

        Args:
            given: the weight that the user gave; None: that of the delivered batch.

        Returns:
            None between two batches: the weight of the last batch delivered still holds.

        Raises:
            WeightError: the loop has read ahead, and which batch the backward is of is unknown; or
                a `collate_fn` has left samples out.
        """
        self._refuse_miscount()
        joint_batch, ahead = self.joint_batch, self.read_ahead
        weight = given
        if given is None:
            if isinstance(self.weight, WeightError):
                raise self.weight
            weight = None if joint_batch is None else joint_batch.num_samples
        # The worker that owns a borrowed batch counts it, and a loop that weighs by tokens does not
        # know that the batch is borrowed.
        elif ahead is not None:
            weight = ahead.resolve_weight(given)
        elif self.is_borrowed:
            weight = 0
        if ahead is not None:
            ahead.note_backward()
        return weight

    def refuse_recount(self, sync: Synchroniser, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Before a backward without a weight: refuse to count the batch twice in a window.

        Two losses of the batch would be halved; parts of it would be right where they are equally
        long, and wrong elsewhere. Nobody can tell which of them a loss is.

        Raises:
            WeightError: the window holds another such backward of this batch.
        """
        if self.joint_batch is None or not self.reduction.averages:
            return
        is_again = sync.has_open_window and self.counted_in_round == sync.rounds
        # A program may have zeroed the gradients: it gives the window up, and begins again.
        if is_again and any(p.grad is not None and p.grad.any() for p in parameters):
            raise WeightError(
                "this batch would count twice in a window of no_sync",
                expected="each batch counts once in the mean of its window",
                cause="a backward without a weight counts for all samples of the batch: the"
                " gradients of two losses would be halved",
                fix="self.backward(loss_a + loss_b); for parts of the batch (halves, too), each"
                " with its own number of samples: self.backward(loss, weight=len(part))",
            )
        self.counted_in_round = sync.rounds


def _unknown_samples_error(batch: Any, delivered: ShardBatch) -> WeightError:
    lengths, before = (
        [rows for leaf in leaves_of(each) if (rows := rows_of(leaf)) is not None]
        for each in (batch, delivered.batch)
    )
    return WeightError(
        "the number of samples in a batch that a loop has made is not known",
        expected=f"a tensor with a row for each of the {delivered.num_samples} samples that were"
        " delivered, or the same smaller leading length in all tensors",
        got=f"leading lengths {lengths[:8]}",
        cause=f"the leading lengths of the batch that was delivered are {before[:8]}; what the loop"
        " has made from it was cut, packed, or holds other samples as well",
        fix="self.backward(loss, weight=number_of_samples) instead of super().train_batch(); or"
        " cut it in the dataset",
    )
