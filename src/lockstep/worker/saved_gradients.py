# SPDX-License-Identifier: Apache-2.0
"""Gradients that one pass over the data, or one call, leaves to the next.

A loop of the user's own may accumulate gradients over the batches of two passes. A pass that is
begun anew cannot compute the batches of the pass before again: only the loop knows how passes
differ (the numbers of its batches start anew). So the gradients themselves are copied. Once they
are reduced, every rank holds the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn


@dataclass(frozen=True)
class SavedGradients:
    """Copies of gradients, by parameter.

    Attributes:
        is_unreduced: some gradients had not been reduced: each rank held a part of its own, and the
            part of a rank that has died is lost.
    """

    gradients: Sequence[torch.Tensor | None]
    is_unreduced: bool = False

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter], *, is_unreduced: bool) -> SavedGradients:
        """Copies of the gradients that `parameters` hold now."""
        held = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        return cls(held, is_unreduced)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make copies of them the parameters' gradients again."""
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
