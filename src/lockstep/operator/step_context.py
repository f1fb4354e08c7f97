# SPDX-License-Identifier: Apache-2.0
"""One global batch on this worker, from its delivery to its commit: `StepContext`.

The worker's `BatchIterator` makes a `StepContext` where a global batch begins. Which shards this
worker computes, what each counts for, which seed each has, where the batch stands in its
accumulation window and over which ranks its gradients are reduced stands there, and nowhere else in
operator and worker. The default loops receive the context itself as their batch and pass it down;
the gradients' synchronisation and the collectives are told the weight by `BatchIterator`, once.

A loop of the user's own receives the plain batch, as the loader collated it. What such a loop calls
(`self.backward`, ``super().train_batch``, ``metric.update``) finds the context as
``operator._lockstep.step``. Between two batches a context without shards stands there, for a loop
may run a backward or step an optimizer after its last batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.data.batch_structure import leading_length
from lockstep.errors import WeightError
from lockstep.keys import NUM_SAMPLES
from lockstep.operator.shard_batch import ShardBatch
from lockstep.reduction_context import ReductionContext, activate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from lockstep.operator.prefetched_batches import PrefetchedBatches
    from lockstep.operator.running_statistics import BufferSnapshot


@dataclass(eq=False)
class StepContext:
    """One global batch on this worker, and what has happened with it so far.

    Attributes:
        reduction: over which ranks losses and gradients of this batch become one, and how.
        purpose: "train", "validation" or "predict".
        shards: this worker's shards of the batch, in shard order; one if `is_joint`.
        is_joint: the user's loop has received this worker's samples as one plain batch.
        weight: what a plain ``loss.backward()`` on a joint batch counts for; an error where that
            cannot be known; None if each shard's loss is weighed on its own.
        opens_window: this batch is the first of its accumulation window.
        closes_window: this batch is the last of its window: the optimizer steps after it.
        prefetched: what the user's own `train_epoch` has read; None in all other loops.
        num_computed: how often this batch went through the default `train_batch`.
        is_stepping: the default loop lets an optimizer step, with all that belongs to a step.
        has_scheduled: schedulers had their turn after this batch.
        stepped: the optimizers that stepped, one entry a step, since the batch before was over.
        partial_weights: weights of metrics that only some of `shards` reported; see
            `AverageMeterCollection.update`.
    """

    reduction: ReductionContext
    purpose: str
    shards: tuple[ShardBatch, ...] = ()
    is_joint: bool = False
    weight: float | WeightError | None = None
    opens_window: bool = True
    closes_window: bool = True
    prefetched: PrefetchedBatches | None = None
    num_computed: int = 0
    is_stepping: bool = False
    has_scheduled: bool = False
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    partial_weights: dict[str, float] = field(default_factory=dict)

    def between_batches(self) -> StepContext:
        """The context that stands after this batch until the next one is delivered."""
        return StepContext(
            self.reduction,
            self.purpose,
            opens_window=self.opens_window,
            closes_window=self.closes_window,
            prefetched=self.prefetched,
        )

    @property
    def delivered(self) -> ShardBatch | None:
        """The plain batch that the user's loop has received; None between batches."""
        return self.shards[0] if self.is_joint and self.shards else None

    @property
    def is_borrowed(self) -> bool:
        """The plain batch is another worker's, and is counted there."""
        return self.delivered is not None and self.delivered.is_borrowed

    def shards_in(self, batch: Any) -> tuple[ShardBatch, ...]:
        """The shards of what a loop was given as a batch; a batch that the user cut is one shard.

        Args:
            batch: this context, the plain batch that was delivered, or a batch that the user made
                from it (moved, augmented, cut).
        """
        if isinstance(batch, StepContext):
            return batch.shards
        delivered = self.delivered
        if delivered is None:
            return (ShardBatch(batch, leading_length(batch), seed=0),)
        if delivered.batch is batch:
            return (delivered,)
        # A copy of a borrowed batch is as little this worker's own as the batch.
        samples = 0 if delivered.is_borrowed else leading_length(batch)
        return (ShardBatch(batch, samples, delivered.seed),)

    def computing(
        self, shard: ShardBatch, *, per_shard: bool
    ) -> AbstractContextManager[ReductionContext]:
        """Seed the random numbers of `shard`; enter the result around its forward and backward.

        Args:
            shard: one of `shards_in` a batch.
            per_shard: a function that needs the whole global batch (a gather, a contrastive
                loss) has to refuse.
        """
        shard.seed_randomness()
        return activate(replace(self.reduction, weight=shard.num_samples, per_shard=per_shard))

    def num_samples_of(self, metrics: Mapping[str, Any]) -> int:
        """How many samples a batch's metrics stand for; those of a borrowed batch for none."""
        if self.is_borrowed:
            return 0
        delivered = self.delivered
        return int(metrics.get(NUM_SAMPLES, 1 if delivered is None else delivered.num_samples))

    def weight_of_backward(self, given: float | None, where: str) -> float | None:
        """What a backward of the user's counts for.

        Args:
            given: the weight that the user gave; None: that of the delivered batch.
            where: this rank and step, for an error.

        Returns:
            None between two batches: what was delivered last still holds.

        Raises:
            WeightError: the loop has read ahead, and which batch the backward is of is unknown.
        """
        delivered, ahead = self.delivered, self.prefetched
        weight = given
        if given is None:
            if isinstance(self.weight, WeightError):
                raise self.weight
            weight = None if delivered is None else delivered.num_samples
        # Whatever a borrowed batch holds is counted by its owner, and a loop that weighs by tokens
        # does not know that the batch is borrowed.
        elif ahead is not None:
            weight = ahead.counted(given, where)
        elif self.is_borrowed:
            weight = 0
        if ahead is not None:
            ahead.note_backward()
        return weight


@dataclass
class AccumulationWindow:
    """The global batches that one optimizer step consumes, while it gathers their gradients.

    Attributes:
        batches: the shards computed so far, each with its `batch_info`: those from which a
            gradient that is not finite may have come.
        buffers_before: the models' buffers before the window; None if it is of one batch.
    """

    batches: list[tuple[ShardBatch, Mapping[str, Any]]] = field(default_factory=list)
    buffers_before: BufferSnapshot | None = None
