# SPDX-License-Identifier: Apache-2.0
"""Hooks on an operator's optimizers: each step taken is noted, and `after_step` is called.

The hooks sit on the optimizers themselves, so that they see the steps of every loop: the default
one, a user's own and Lightning's. A step that a GradScaler leaves out calls no hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.operator.default_loop_options import of_default_loop, refuse_own_step
from lockstep.randomness import derive_seed, preserved

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.operator.operator_protocol import Operator
    from lockstep.operator.training_parts import TrainingParts


def follow_steps(operator: Operator, run: TrainingParts) -> list[RemovableHandle]:
    """Note each step of the optimizers of `run`, and call the operator's `after_step` after it."""
    state = operator._lockstep

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not state.step.is_stepping:
            refuse_own_step(operator)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _was_taken(optimizer):
            _note_step(operator, optimizer)

    handles = [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]
    if operator._overrides_loop() and of_default_loop(state.context.options):
        handles += [optimizer.register_step_pre_hook(before) for optimizer in run.optimizers]
    return handles


def _was_taken(optimizer: torch.optim.Optimizer) -> bool:
    # A fused optimizer is told of infinities by the scaler, and leaves the step out by itself.
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def _note_step(operator: Operator, optimizer: torch.optim.Optimizer) -> None:
    state = operator._lockstep
    number = len(state.step.stepped)
    state.step.stepped.append(optimizer)  # first: the step was taken, also if `after_step` fails
    if operator._overrides("after_step"):
        # The same numbers on every rank: what is drawn goes into weights that ranks share.
        seed = derive_seed(
            state.context.shard_assignment.seed, "after_step", operator.global_step, number
        )
        with torch.no_grad(), preserved(seed):
            operator.after_step()
