# SPDX-License-Identifier: Apache-2.0
"""Weights that a batch changes before an optimizer steps.

A momentum encoder follows in the forward; prototypes are normalised there. Such a write often goes
through `.data`, and is seen by its value only. Which weights they are is learned in the first
steps, for which all are copied; from then on only those are. A loop that updates its weights by
hand, and lets no optimizer step, stays among the first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.sync import copy_over, overwrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_STEPS: Final = 3
"""Not one: a momentum encoder that begins as a copy does not move in the first."""


class Written:
    """Copies of these weights, from before the batch that comes.

    Args:
        optimizers: before the first of them steps, what has changed is looked for.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._found: dict[nn.Parameter, None] = {}
        self._held: list[nn.Parameter] = []
        self._kept: list[torch.Tensor] = []
        self._is_ahead_of_step = False
        self._steps_left = _STEPS
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self._look()) for optimizer in optimizers
        ]

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy what may be written, as it is now.

        Args:
            parameters: all that there are.
        """
        if not self._is_learning:
            self.close()  # not in a hook: an optimizer is going through them then
        self._held = list(parameters) if self._is_learning else list(self._found)
        copy_over([held.detach() for held in self._held], self._kept)
        self._is_ahead_of_step = True

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whatever the batch did to it, `put_back` undoes."""
        learning = self._is_learning and self._is_ahead_of_step
        return learning or parameter in self._found

    def put_back(self) -> None:
        """Undo what the batches since `keep` wrote; what an optimizer did is not ours."""
        for held, value in zip(self._held, self._kept, strict=True):
            if self.covers(held):
                overwrite([held.detach()], [value])

    @property
    def _is_learning(self) -> bool:
        return self._steps_left > 0

    def _look(self) -> None:
        if not self._is_ahead_of_step:
            return
        self._is_ahead_of_step = False
        if not self._is_learning:
            return
        for held, value in zip(self._held, self._kept, strict=True):
            if not torch.equal(held.detach(), value):
                self._found[held] = None
        self._steps_left -= 1
