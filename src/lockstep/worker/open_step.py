# SPDX-License-Identifier: Apache-2.0
"""`OpenStep`: a step that is not committed, with the copies to undo it; see `rollback`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.operator.state_copy import StateCopy
    from lockstep.worker.saved_gradients import SavedGradients
    from lockstep.worker.settings_copy import LayersCopy, StepSettings


@dataclass(frozen=True)
class StepStart:
    """The position in the data, steps of the run and counts of the call at a step's beginning."""

    epoch: int
    step: int
    committed: int
    call_steps: int
    call_samples: int
    meters: Any
    further_counts: list[Any]


@dataclass
class OpenStep:
    """A step from its first batch on, until it is committed.

    Attributes:
        start: the counts and positions at the beginning.
        buffers: the modules' buffers, each behind its owner and its name; `Rollback` holds copies
            of their values. A later call, with which the step may go on, may find others.
        rounds: the number of reductions before the step.
        groups: the settings of optimizers, which a loss of the default loop may change.
        settings: which layers are frozen; in a loop of the user's own also learning rates and the
            like. None between two batches of the default loop.
        stepped_at: the number of reductions when the first optimizer of this step stepped; None: no
            optimizer has stepped.
        collectives_before_optimizer: the number of collectives that this rank had started when the
            first optimizer of this step stepped.
        num_stepped: steps of optimizers that have begun in this step.
        num_ended: steps of optimizers that have ended in this step, and did not raise.
        copies: copies from before the first optimizer's step, or from before the batch; None where
            none were needed.
        gradients: the gradients of earlier steps, where the loop adds to them.
    """

    start: StepStart
    buffers: list[tuple[nn.Module, str, torch.Tensor | None]]
    rounds: int
    groups: StepSettings
    settings: LayersCopy | None
    stepped_at: int | None = None
    collectives_before_optimizer: int = 0
    num_stepped: int = 0
    num_ended: int = 0
    copies: StateCopy | None = None
    gradients: SavedGradients | None = None

    @property
    def filled_buffers(self) -> list[torch.Tensor]:
        """The buffers that were not None."""
        return [buffer for _, _, buffer in self.buffers if buffer is not None]


class Undone(Enum):
    """What `Worker.undo` has undone."""

    CALL = auto()
    STEP = auto()

    NOTHING_AS_STEP_COUNTS = auto()
    """The step was cut short after its optimizers had stepped, and counts."""

    IMPOSSIBLE = auto()
    """The state from before the step is lost."""
