# SPDX-License-Identifier: Apache-2.0
"""Weights that a batch changes before an optimizer steps.

A momentum encoder follows in the forward; prototypes are normalised there. Which weights they are
is learned in the first steps, for which all are copied; from then on only those are. A loop that
updates its weights by hand, and lets no optimizer step, stays among the first ones.

A write that begins later is seen by torch's version counters, which costs nothing, and is copied
from then on; the step in which it came first cannot be undone. What raises no counter (`.data`,
fused kernels, kernels of the user's own) is seen in the first steps only, by its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import version_of
from lockstep.lazy_compiler import outside_graphs
from lockstep.sync import copy_over, overwrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

_STEPS: Final = 3
"""Not one: a momentum encoder that begins as a copy does not move in the first."""


class InPlaceWriteTracker:
    """Copies of these weights, from before the batch that comes.

    Args:
        optimizers: before the first of them steps, what has changed is looked for.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._found: dict[nn.Parameter, None] = {}
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._held: dict[nn.Parameter, None] = {}
        self._kept: list[torch.Tensor] = []
        self._is_ahead_of_step = False
        self._has_missed = False
        self._steps_left = _STEPS
        # Not traced: of a compiled step every counter would be a guard.
        hook = outside_graphs(lambda *_: self._look())
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(hook) for optimizer in optimizers
        ]

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy what may be written, as it is now.

        Args:
            parameters: all that there are.
        """
        self._parameters = list(parameters)
        self._versions = [version_of(parameter) for parameter in parameters]
        self._held = dict.fromkeys(parameters) if self._steps_left else dict(self._found)
        copy_over([held.detach() for held in self._held], self._kept)
        self._is_ahead_of_step, self._has_missed = True, False

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._found

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """From the next batch on, these are copied."""
        self._found.update(dict.fromkeys(parameters))

    def has_missed(self) -> bool:
        """Before an optimizer stepped, something was written of which there is no copy."""
        return self._misses(self._moved()) if self._is_ahead_of_step else self._has_missed

    def put_back(self) -> None:
        """Undo what the batches since `keep` wrote; what an optimizer did is not ours."""
        for held, value in zip(self._held, self._kept, strict=True):
            if self._is_ahead_of_step or held in self._found:
                overwrite([held.detach()], [value])

    def _misses(self, moved: Iterable[nn.Parameter]) -> bool:
        return any(parameter not in self._held for parameter in moved)

    def _moved(self) -> list[nn.Parameter]:
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if version_of(parameter) != version]

    def _look(self) -> None:
        if not self._is_ahead_of_step:
            return
        moved = self._moved()
        self._has_missed, self._is_ahead_of_step = self._misses(moved), False
        self.expect(moved)
        if self._steps_left:
            self._steps_left -= 1
            pairs = zip(self._held, self._kept, strict=True)
            self.expect([held for held, value in pairs if not torch.equal(held.detach(), value)])
