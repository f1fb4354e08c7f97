# SPDX-License-Identifier: Apache-2.0
"""`StepActions`: the default loop's calls on models and optimizers, for integrations to replace."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lockstep.operator.mixed_precision import Precision
    from lockstep.operator.training_parts import TrainingParts


class StepActions:
    """The default loop calls each method once per optimizer step, `around_backward` once per shard.

    `beside_step` alone is called by others: around losses that are computed to examine a step, and
    not to train.

    An integration replaces the actions to call its framework's hooks at the moments at which its
    own loop calls them; what a step computes stays the loop's. A loop of the user's own calls none
    of them.
    """

    def set_training(self, run: TrainingParts) -> None:
        run.set_training(True)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def beside_step(self) -> AbstractContextManager[Any]:
        """A context for losses that are computed beside the step's own.

        They must not clear gradients, and neither they nor their metrics are counted.
        """
        return nullcontext()

    def around_backward(self, loss: torch.Tensor, weight: float) -> AbstractContextManager[Any]:
        """A context in which the loop runs the backward of one shard's (scaled) loss.

        Args:
            weight: how much the loss counts in the step; 0 for samples of another worker.
        """
        return nullcontext()

    def step(
        self,
        precision: Precision,
        run: TrainingParts,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None,
    ) -> None:
        """Unscale, clip and step; the loop calls it after the reduction."""
        # A norm with local gradients in it differs between ranks, and so would the shared weights.
        precision.step(optimizer, run.shared_parameters(), clip_grad_norm)
