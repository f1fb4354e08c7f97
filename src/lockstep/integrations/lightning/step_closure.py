# SPDX-License-Identifier: Apache-2.0
"""`StepClosure`: the closure that a module's `optimizer_step` gets, which returns the step's loss.

Lightning's closure computes the loss and its gradients. Here both are there when `optimizer_step`
is called: the loop has computed them shard by shard, and the workers have reduced the gradients. So
the closure returns the loss of these gradients, and raises where it would have to compute another
one.

Rejected: to compute the shards again. An optimizer may call the closure on some workers and not on
others, whose reduction would wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep._torch_compat import version_of
from lockstep.errors import NotAvailableError
from lockstep.sync.optimizer_inspection import is_step_running

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

BY_MANUAL_OPTIMIZATION: Final = (
    "self.automatic_optimization = False in __init__, and in training_step"
    " self.optimizers(use_pl_optimizer=False).step(closure), with a closure that clears the"
    " gradients, computes the loss, calls self.manual_backward(loss) and returns the loss"
)
"""How a module trains with an optimizer that computes the loss itself."""


class StepClosure:
    """A function without arguments that returns the loss of the present gradients.

    Args:
        loss: of the step, over all samples of all workers.
        parameters: all of the run.
        optimizer: that is about to step.
        where: the module's class.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        parameters: Iterable[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        where: str,
    ) -> None:
        self._loss, self._optimizer, self._where = loss, optimizer, where
        self._parameters = list(parameters)
        self._gradients = [each.grad for each in self._parameters]
        self._versions = self._count_writes()
        self._was_called_in_step = False

    def __call__(self) -> torch.Tensor:
        """The loss.

        Raises:
            NotAvailableError: weights or gradients have changed, or the optimizer calls it a second
                time in one step, as it would after writes that torch does not count (`.data`).
        """
        is_in_step = is_step_running([self._optimizer])
        if self._has_changed():
            raise self._error("weights or gradients were changed before the closure was called")
        if is_in_step and self._was_called_in_step:
            raise self._error("the optimizer called the closure several times in a step")
        self._was_called_in_step |= is_in_step
        return self._loss

    def _has_changed(self) -> bool:
        now = (each.grad for each in self._parameters)
        is_same = all(one is other for one, other in zip(now, self._gradients, strict=True))
        return not is_same or self._count_writes() != self._versions

    def _count_writes(self) -> list[int]:
        tensors = (*self._parameters, *self._gradients)
        return [version_of(each) for each in tensors if each is not None]

    def _error(self, got: str) -> NotAvailableError:
        return NotAvailableError(
            "the closure of optimizer_step would have to compute the loss again",
            where=f"{self._where}.optimizer_step",
            expected="one call, for the loss of the gradients that are there",
            got=f"{type(self._optimizer).__name__}: {got}",
            cause="the workers have computed and reduced the gradients before optimizer_step",
            fix=BY_MANUAL_OPTIMIZATION,
        )
