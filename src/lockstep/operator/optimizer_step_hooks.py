# SPDX-License-Identifier: Apache-2.0
"""Hooks on an operator's optimizers that record each step and call `after_step`.

The hooks sit on the optimizers themselves, so that they see the steps of every loop: the default
one, a user's own and Lightning's. A step that a GradScaler leaves out calls no hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.operator.custom_loop_refusals import refuse_own_step, requested_loop_options
from lockstep.operator.loop_protocols import Operator
from lockstep.randomness import derive_seed, preserve_rng_state

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.operator.training_parts import TrainingParts


def add_step_hooks(operator: Operator, run: TrainingParts) -> list[RemovableHandle]:
    """Add hooks that record each step of the optimizers of `run` and then call `after_step`."""
    state = operator._lockstep

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not state.global_batch.is_stepping:
            refuse_own_step(operator)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _was_taken(optimizer):
            _note_step(operator, optimizer)

    handles = [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]
    if operator._lockstep_overrides_loop() and requested_loop_options(state.context.options):
        handles += [optimizer.register_step_pre_hook(before) for optimizer in run.optimizers]
    return handles


def _was_taken(optimizer: torch.optim.Optimizer) -> bool:
    # The scaler tells a fused optimizer of infinities, and the optimizer skips the step itself.
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def _note_step(operator: Operator, optimizer: torch.optim.Optimizer) -> None:
    state = operator._lockstep
    number = len(state.global_batch.stepped_optimizers)
    # Before `after_step`, which may fail: the step was taken.
    state.global_batch.stepped_optimizers.append(optimizer)
    if state.step_log is not None:
        state.step_log.note_rates(group.get("lr") for group in optimizer.param_groups)
    if operator._lockstep_overrides(Operator.after_step):
        # The same numbers on every rank: what is drawn goes into weights that ranks share.
        seed = derive_seed(
            state.context.shard_assignment.seed, "after_step", operator.global_step, number
        )
        with torch.no_grad(), preserve_rng_state(seed):
            operator.after_step()
