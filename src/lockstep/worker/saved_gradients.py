# SPDX-License-Identifier: Apache-2.0
"""Gradients that one pass over the data, or one call, leaves to the next.

A loop of the user's own may gather gradients over batches of two passes. What came before a pass
is not computed again in it: only the loop knows how passes differ (the numbers of its batches start
anew). So the gradients themselves are kept, which every rank holds alike once they are reduced.
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
        is_torn: some of it had not been reduced: each rank held its own part, and that of a rank
            that is gone is gone.
    """

    gradients: Sequence[torch.Tensor | None]
    is_torn: bool = False

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], *, is_torn: bool) -> SavedGradients:
        """What `parameters` hold now."""
        held = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        return cls(held, is_torn)

    def put_into(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make them the parameters' gradients again; they can be put back once more."""
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
