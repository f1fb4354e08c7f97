# SPDX-License-Identifier: Apache-2.0
"""Calls a LightningModule's hooks around the actions of the default loop, in Lightning's order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep.integrations.lightning.step_closure import StepClosure
from lockstep.integrations.lightning.unsupported import overrides
from lockstep.operator.step_actions import StepActions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.integrations.lightning.logging_capture import LoggingCapture
    from lockstep.operator.mixed_precision import Precision
    from lockstep.operator.operator_state import OperatorState
    from lockstep.operator.training_parts import TrainingParts


def call_data_hook(hook_targets: Sequence[Any], hook: str, *arguments: Any) -> Any:
    """Call the datamodule's `hook` if a user's class defines it, else the module's."""
    target = next((one for one in hook_targets if overrides(one, hook)), hook_targets[-1])
    return getattr(target, hook)(*arguments)


class OptimizationHooks(StepActions):
    """The default loop's actions of a step, with calls of the module's hooks around them.

    Args:
        module: the module.
        logging: counts what the hooks log.
        state: of the operator.

    Attributes:
        shard_samples: samples of the shard whose loss was computed last; 0 if they do not count.
    """

    def __init__(self, module: Any, logging: LoggingCapture, state: OperatorState) -> None:
        self._module, self._logging, self._state = module, logging, state
        self.shard_samples = 0.0
        self._index = 0
        self._has_batches = True
        self._to_clear: torch.optim.Optimizer | None = None
        self._losses: list[tuple[torch.Tensor, float]] = []  # of the window, with their weights

    def begin(self, index: int, *, has_batches: bool) -> None:
        """Begin a step on batch `index` of the epoch.

        Args:
            index: the batch's number in the epoch.
            has_batches: whether this worker computes a loss in the step.
        """
        self._index, self._has_batches = index, has_batches

    def set_training(self, run: TrainingParts) -> None:
        """Leave each layer in the mode that the module chose: a frozen backbone evaluates."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        # As in Lightning, `clear_once` clears the gradients after training_step. A worker without
        # samples calls no training_step, and clears them now.
        self._to_clear, self._losses = optimizer, []
        if not self._has_batches:
            self.clear_once()

    def clear_once(self) -> None:
        """Clear the gradients of the previous step, if they have not been cleared yet."""
        optimizer, self._to_clear = self._to_clear, None
        if optimizer is not None:
            self._module.on_before_zero_grad(optimizer)
            self._module.optimizer_zero_grad(self._epoch, self._index, optimizer)

    @contextmanager
    def beside_step(self) -> Iterator[None]:
        # The hook on clearing gradients may update an average of the weights, which nobody would
        # put back: it has to wait for the loss of the step itself.
        to_clear, self._to_clear = self._to_clear, None
        losses, logged = list(self._losses), self._logging.mark()
        try:
            yield
        finally:
            self._to_clear, self._losses = to_clear, losses
            self._logging.restore(logged)

    @contextmanager
    def around_backward(self, loss: torch.Tensor, weight: float) -> Iterator[None]:
        self.clear_once()  # a compute_loss of the user's own need not call `training_step`
        if weight:  # the loss of a batch of another worker may be NaN
            self._losses.append((loss.detach(), weight))
        with self._logging.counting_for(self.shard_samples, first_time=False):
            self._module.on_before_backward(loss)
            yield
            self._module.on_after_backward()

    def step(
        self,
        precision: Precision,
        run: TrainingParts,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None,
    ) -> None:
        module = self._module
        precision.unscale(optimizer)
        module.on_before_optimizer_step(optimizer)
        module.configure_gradient_clipping(
            optimizer, module.trainer.gradient_clip_val, module.trainer.gradient_clip_algorithm
        )
        if overrides(module, "optimizer_step"):
            loss = self._loss_of_step(averages=run.sync_options.averages)
            closure = StepClosure(loss, run.parameters(), optimizer, type(module).__name__)
            module.optimizer_step(self._epoch, self._index, optimizer, closure)
        else:
            precision.step_or_skip(optimizer)

    def _loss_of_step(self, *, averages: bool) -> torch.Tensor:
        """The loss whose gradients the optimizer steps with: one number on all workers.

        Of its own samples' loss each worker would let the optimizer make another step.

        Args:
            averages: whether the losses are averaged by their weights, or added.

        Returns:
            A scalar of float64.

        Gradient:
            None.

        Collective:
            Every rank: one all-reduce of two numbers.
        """
        context = self._state.context
        sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        for loss, weight in self._losses:
            sums[0] += loss.double().reshape(()) * (weight if averages else 1)
            sums[1] += weight
        context.group.all_reduce(sums).wait()
        context.group.confirm()
        return sums[0] / sums[1] if averages else sums[0]

    @property
    def _epoch(self) -> int:
        epoch: int = self._module.trainer.current_epoch
        return epoch
