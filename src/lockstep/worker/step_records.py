# SPDX-License-Identifier: Apache-2.0
"""Opens a worker's log of steps, with what steps that are computed again are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep._torch_compat import buffers_of, parameters_of
from lockstep.metrics.step_log import StepLog
from lockstep.operator.registration import registered_parts
from lockstep.sync import named_local_tensors
from lockstep.tensor_copies import is_shard
from lockstep.weight_hashes import NUM_PARTS, TensorSlot, WeightHashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.weight_hashes import UnreadHash
    from lockstep.worker.spec import WorkerSpec

_ALL: Final = range(NUM_PARTS)


def open_step_log(operator: TrainingOperator, run: TrainingParts, spec: WorkerSpec) -> None:
    """Give the operator a `StepLog`, if the trainer wants metrics or records of single steps."""
    if not spec.log_every:
        return
    if not spec.records_steps:
        operator._lockstep.step_log = StepLog(spec.log_every)
        return
    hashes = WeightHashes(lambda: weight_slots(run))

    def hash_weights(step: int) -> Sequence[UnreadHash]:
        """One part; all of them where a checkpoint is due."""
        if operator.world_rank != 0:
            return ()  # all ranks have the same weights
        is_due = spec.checkpoint_every is not None and step % spec.checkpoint_every == 0
        return hashes.take(_ALL if is_due else (step % NUM_PARTS,))

    operator._lockstep.step_log = StepLog(spec.log_every, hash_weights)


def weight_names(operator: TrainingOperator) -> list[list[str]]:
    """For each part of the weights the names of the tensors of which something is in it."""
    hashes = WeightHashes(lambda: weight_slots(registered_parts(operator)))
    return [hashes.names_in(part) for part in _ALL]


def weight_slots(run: TrainingParts) -> list[TensorSlot]:
    """The places of the weights and buffers that all ranks share, each tensor once.

    Empty if a rank has rows of its own of any of them, as under ``register(shard=...)``: other
    numbers of ranks cut a tensor elsewhere.
    """
    slots: dict[int, TensorSlot] = {}
    for number, module in enumerate(run.plain_modules()):
        own = {id(tensor) for _, tensor in named_local_tensors(module)}
        for prefix, owner in module.named_modules(prefix=module_prefix(run, module, number)):
            for tensors in (parameters_of(owner), buffers_of(owner)):
                for key, tensor in tensors.items():
                    if is_shard(tensor):
                        return []
                    if tensor is not None and id(tensor) not in own:
                        name = f"{prefix}.{key}" if prefix else key
                        slots.setdefault(id(tensor), TensorSlot(name, tensors, key))
    return [*slots.values()]


def module_prefix(run: TrainingParts, module: nn.Module, number: int) -> str:
    """What stands before the names of a module's tensors; `number`: of the module in the run."""
    if module is run.plain_criterion():
        return "criterion"
    return f"models.{number}" if len(run.models) > 1 else ""
