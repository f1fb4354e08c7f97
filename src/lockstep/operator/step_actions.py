# SPDX-License-Identifier: Apache-2.0
"""What the default loop does to models and optimizers, as acts that a front door may extend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts


class StepActions:
    """Each is called once per optimizer step, but for `around_backward`: once per shard.

    An integration replaces them to call its framework's hooks at the moments that these have
    there; what a step computes stays the loop's.
    """

    def set_training(self, run: TrainingParts, training: bool) -> None:
        run.set_training(training)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def around_backward(self, loss: torch.Tensor) -> AbstractContextManager[Any]:
        """Around the backward of one shard's (scaled) loss."""
        return nullcontext()

    def step(
        self, operator: TrainingOperator, run: TrainingParts, optimizer: torch.optim.Optimizer
    ) -> None:
        """After the reduction: unscale, clip, step."""
        state = operator._lockstep
        state.precision.step(optimizer, run.parameters(), state.context.options.clip_grad_norm)
