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
from typing import TYPE_CHECKING, Any, Final

from lockstep.sync import is_local, note_reduced
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainingParts

GRADIENTS: Final = "gradients"
"""The key of gradients that wait, in a state and in its "local", if there are such gradients."""


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
    def from_state(cls, run: TrainingParts, state: Mapping[str, Any]) -> SavedGradients | None:
        """The gradients that a state holds, which another process may have saved; None if none."""
        shared, local = state.get(GRADIENTS, {}), (state.get("local") or {}).get(GRADIENTS, {})
        if not shared and not local:
            return None
        names = run.names_of_parameters()

        def saved(parameter: nn.Parameter) -> torch.Tensor | None:
            # The program that wrote the state may have marked others as each rank's own.
            of_kind: Mapping[str, torch.Tensor] = local if is_local(parameter) else shared
            return of_kind.get(names.get(id(parameter), ""))

        return cls(list(map(saved, run.parameters())))

    def by_name(self, run: TrainingParts, *, local: bool) -> dict[str, torch.Tensor]:
        """The gradients by the names of their parameters.

        Args:
            local: those of parameters that are each rank's own, or those of all others.
        """
        names = run.names_of_parameters()
        return {
            names[id(parameter)]: gradient
            for parameter, gradient in zip(run.parameters(), self.gradients, strict=True)
            if gradient is not None and id(parameter) in names and is_local(parameter) is local
        }

    def restore(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the parameters' gradients to copies of the saved ones."""
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = None if gradient is None else _placed_as(parameter, gradient)
        if not self.is_unreduced:
            note_reduced(parameters)


def _placed_as(parameter: nn.Parameter, gradient: Any) -> torch.Tensor:
    """A copy of a gradient, or of this rank's rows of it; a state may be of another dtype."""
    if is_shard(parameter) and not is_shard(gradient):
        from lockstep.sync.parameter_shards import shard_like

        shard: Any = parameter
        gradient = shard_like(gradient, shard)
    placed: torch.Tensor = gradient.to(parameter.device, parameter.dtype, copy=True)
    return placed
