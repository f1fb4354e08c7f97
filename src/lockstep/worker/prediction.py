# SPDX-License-Identifier: Apache-2.0
"""One worker's share of `trainer.predict`: its shards of a loader that the driver sends.

The run does not change: the position in the data, the random numbers, the modules' modes, and what
forwards write (see `EvaluationWrites`) are restored. No rank waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data import BatchParts, ShardedLoader
from lockstep.operator.global_batch_context import GlobalBatchContext
from lockstep.operator.loop_protocols import rank_and_step
from lockstep.operator.mixed_tensors import explain_mixed_tensors
from lockstep.operator.shard_batch import ShardBatch
from lockstep.phases import Phase, in_phase
from lockstep.randomness import preserve_rng_state
from lockstep.reduction_context import ReductionContext
from lockstep.tensor_tree import tree_map
from lockstep.worker.remote_method import Communication, OnFailure, remote_method

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.data import LoadedPart, ShardAssignment, Step
    from lockstep.operator import TrainingOperator
    from lockstep.worker.worker import Worker

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prediction:
    """The output of `predict_batch` for one shard of one global batch.

    Attributes:
        step: the batch's number in the loader; (step, shard) is the order of the loader.
        indices: the samples' indices in the dataset, where the loader knows them.
        output: what `predict_batch` returned, its tensors on the CPU.
    """

    step: int
    shard: int
    indices: tuple[Any, ...]
    num_samples: int
    output: Any


@remote_method(Communication.SHARDED_STATE, OnFailure.REPEAT)
def predict(worker: Worker, loader: Any) -> list[Prediction]:
    """Run the operator's `predict_batch` on this worker's shards of `loader`.

    Collective:
        None; where the model is in shards, every rank gathers each unit for each batch.
    """
    operator, run = worker.operator, worker.run
    options, assignment = worker.spec.options, operator._lockstep.context.shard_assignment
    sync = operator._lockstep.sync
    parts = BatchParts.JOINT if options.sync == "data_parallel" else BatchParts.BY_SHARD
    if sync is not None and sync.communicates_in_forward:
        parts = BatchParts.JOINT_OR_BORROWED
    source = ShardedLoader(loader, assignment, parts=parts, keeps_last=True, keeps_generators=False)
    try:
        with (
            preserve_rng_state(),
            worker.arithmetic(),
            torch.no_grad(),
            run.in_evaluation(),
            operator._lockstep.evaluation_writes.taken_back(run, rank_and_step(operator)),
            operator._lockstep_predicting(),
            explain_mixed_tensors(operator),
        ):
            predicted = [
                _predict_part(operator, step.index, part, assignment)
                for step in _read(worker, source.batches(epoch=0))
                for part in step.parts
            ]
            # A rank without samples has computed on those of another one, for its collectives.
            return [part for part in predicted if part.num_samples]
    finally:
        source.close()


def _read(worker: Worker, steps: Iterator[Step]) -> Iterator[Step]:
    """Yield `steps`, unless the worker is to leave; reading each one is in phase READING."""
    while True:
        worker.leave_if_asked()
        with in_phase(Phase.READING):
            step = next(steps, None)
        if step is None:
            return
        yield step


def _predict_part(
    operator: TrainingOperator, step: int, part: LoadedPart, assignment: ShardAssignment
) -> Prediction:
    shard = ShardBatch.of(part, assignment.seed, "predict", epoch=0, step=step)
    state = operator._lockstep
    context = GlobalBatchContext(ReductionContext(state.context.group), "predict", (shard,))
    per_shard = assignment.num_shards > 1
    with state.precision.autocast(), context.activate_shard(shard, per_shard=per_shard):
        batch = operator.to_device(shard.batch)
        output = operator.predict_batch(batch, {"batch_idx": step})
    state.evaluation_writes.end_batch()
    output = tree_map(_to_sendable, output)
    return Prediction(step, shard.shard, part.indices, part.num_samples, output)


def _to_sendable(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    moved = leaf.detach().to(_CPU)
    # A view keeps the whole of its storage, also in another process and in the user's list.
    is_part = moved.layout == torch.strided and moved.untyped_storage().nbytes() > moved.nbytes
    return moved.clone() if is_part else moved
