# SPDX-License-Identifier: Apache-2.0
"""`LoopBehaviour`: what a training loop does with its optimizers, as its steps have shown so far.

A loop of the user's own may step several optimizers, communicate in between, and leave gradients to
the next step. `Rollback` copies before a step what this loop may need, and nothing else: copies of
weights and of an optimizer's state cost time and memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from lockstep._torch_compat import version_of
from lockstep.operator import TrainingOperator
from lockstep.sync.optimizer_inspection import optimizer_parameters, share_parameters

if TYPE_CHECKING:
    import torch

    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser
    from lockstep.worker.open_step import OpenStep

_STEPS_TO_LEARN: Final = 3


class LoopBehaviour:
    """What the loop of `operator` does in a step.

    Args:
        operator: after its `setup`.
        run: the models and optimizers that it registered.

    Attributes:
        is_own: the loop, or what it calls after an optimizer, is the user's.
        usual_steps: how many steps of optimizers a committed step has at most.
        reuses_gradients: the loop adds to gradients that an optimizer has used.
    """

    def __init__(self, operator: TrainingOperator, run: TrainingParts) -> None:
        self._state = operator._lockstep
        self._device = operator.device
        self._run = run
        self._has_own_steps = operator._lockstep_overrides_loop()
        # A user's `after_step` may communicate, and may fail, like a loop of the user's own.
        self.is_own = self._has_own_steps or operator._lockstep_overrides(
            TrainingOperator.after_step
        )
        self.usual_steps = 0 if self._has_own_steps else 1
        self.reuses_gradients = False
        self._steps_to_learn = _STEPS_TO_LEARN if self._has_own_steps else 0
        self._communicates_after_optimizer: bool | None = None  # None: unknown
        self._stepped_once: set[int] = set()
        self._earlier: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def _sync(self) -> Synchroniser | None:
        return self._state.sync

    @property
    def num_rounds(self) -> int:
        """How many reductions of gradients this rank has completed."""
        return 0 if self._sync is None else self._sync.rounds

    @property
    def may_communicate_after_optimizer(self) -> bool:
        """Whether ranks communicate after an optimizer of the same step has stepped.

        True until each optimizer has stepped once, for one may step in few batches only.
        """
        return self.is_own and self._communicates_after_optimizer is not False

    @property
    def may_reuse_gradients(self) -> bool:
        """Whether the loop adds to gradients that an optimizer has used, as far as is known."""
        return self.reuses_gradients or self._steps_to_learn > 0

    def begin_step(self) -> None:
        """Note which gradients there are before the first batch of a step."""
        self._earlier = []
        if self._is_alone:
            grads = [p.grad for p in self._run.parameters() if p.grad is not None]
            self._earlier = [(weakref.ref(grad), version_of(grad)) for grad in grads]

    @property
    def _is_alone(self) -> bool:
        # Among peers reductions are counted, which show what an optimizer uses.
        return self._steps_to_learn > 0 and self._sync is not None and not self._sync.needs_guard

    def before_step(self, opened: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        """Note before an optimizer steps how much has been communicated until then."""
        if opened.stepped_at is None:
            self.reuses_gradients = self.reuses_gradients or self._uses_earlier(optimizer)
            opened.stepped_at = self.num_rounds
            opened.collectives_before_optimizer = self._num_collectives()

    def _uses_earlier(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no backward of this step has added to, or replaced, some of its gradients."""
        if not self._earlier:
            return False
        grads = [p.grad for p in optimizer_parameters(optimizer) if p.grad is not None]
        held = {id(grad): version_of(grad) for grad in grads}
        alive = [(grad, version) for ref, version in self._earlier if (grad := ref()) is not None]
        return any(held.get(id(grad)) == version for grad, version in alive)

    def note_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which registered optimizers have stepped, if one within them did it."""
        if len(self._stepped_once) == len(self._run.optimizers):
            return
        is_registered = any(optimizer is each for each in self._run.optimizers)
        for each in self._run.optimizers:
            if each is optimizer or (not is_registered and share_parameters(each, optimizer)):
                self._stepped_once.add(id(each))

    def learn_from(self, opened: OpenStep, num_stepped: int) -> None:
        """Learn from a committed step, in which optimizers have stepped `num_stepped` times."""
        if self.has_communicated_after_optimizer(opened):
            self._communicates_after_optimizer = True
        elif opened.stepped_at is not None and len(self._stepped_once) == len(self._run.optimizers):
            self._communicates_after_optimizer = bool(self._communicates_after_optimizer)
        self.reuses_gradients = self.reuses_gradients or self.has_reused_gradients(opened)
        self._steps_to_learn = max(0, self._steps_to_learn - 1)
        self.usual_steps = max(self.usual_steps, num_stepped)

    def expect_communication_after_optimizer(self) -> None:
        """Let the next steps be copied, as one was interrupted between its optimizers."""
        self._communicates_after_optimizer = True

    def has_communicated_after_optimizer(self, opened: OpenStep) -> bool:
        """Whether this rank has communicated since the first optimizer of the step stepped.

        Also by a gather or a broadcast of the loop's own, where a peer's death interrupts it.
        """
        if opened.stepped_at is None:
            return False
        return (
            self.num_rounds > opened.stepped_at
            or self._num_collectives() > opened.collectives_before_optimizer
        )

    def _num_collectives(self) -> int:
        # The default loop communicates by the gradients' reductions alone.
        return self._state.context.group.started.on_any_of({self._device}) if self.is_own else 0

    def has_reused_gradients(self, opened: OpenStep) -> bool:
        """Whether an optimizer has used gradients of earlier steps in this step."""
        sync = self._sync
        if not self.is_own or sync is None:
            return False
        # An optimizer that steps before any reduction of this step uses gradients of earlier ones.
        stepped_on_old = sync.needs_guard and opened.stepped_at == opened.rounds
        return sync.has_added or stepped_on_old

    def holds_unused_gradients(self, opened: OpenStep) -> bool:
        """Whether reduced gradients wait for an optimizer's step in a loop of the user's own."""
        if not self._has_own_steps or self._sync is None:
            return False  # the default loop's windows are the cursor's
        waits = opened.stepped_at is None and self.num_rounds > opened.rounds
        return waits or self._sync.has_open_window
