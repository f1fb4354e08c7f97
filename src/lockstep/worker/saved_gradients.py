# SPDX-License-Identifier: Apache-2.0
"""`SavedGradients`: gradients of a window that is still open when a pass, or a call, ends.

A loop of the user's own may accumulate gradients over the batches of two passes. A repeated pass
cannot compute the batches of the pass before: only the loop knows how passes differ (the numbers of
its batches start anew). So the gradients themselves are copied. Reduced ones are equal on all
ranks, so that the copy of any survivor will do, and a checkpoint holds them; a dead rank's part of
unreduced ones is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.sync import is_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainingParts


@dataclass(frozen=True)
class SavedGradients:
    """Copies of gradients, by parameter.

    Attributes:
        is_unreduced: some gradients were not reduced: each rank held its own part, and the part of
            a dead rank is lost.
    """

    gradients: Sequence[torch.Tensor | None]
    is_unreduced: bool = False

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter], *, is_unreduced: bool) -> SavedGradients:
        """Copy the gradients that `parameters` hold now."""
        held = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        return cls(held, is_unreduced)

    @classmethod
    def from_state(cls, run: TrainingParts, state: Mapping[str, torch.Tensor]) -> SavedGradients:
        """Those that `by_name` gave, which another process may have saved."""
        names = {id(parameter): name for name, parameter in run.named_parameters().items()}
        return cls([state.get(names.get(id(each), "")) for each in run.parameters()])

    def by_name(self, run: TrainingParts) -> dict[str, torch.Tensor]:
        """The gradients by the names of their parameters, without those of local parameters."""
        names = {id(parameter): name for name, parameter in run.named_parameters().items()}
        return {
            names[id(parameter)]: gradient
            for parameter, gradient in zip(run.parameters(), self.gradients, strict=True)
            if gradient is not None and id(parameter) in names and not is_local(parameter)
        }

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the parameters' gradients to copies of the saved ones."""
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
