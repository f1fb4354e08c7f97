# SPDX-License-Identifier: Apache-2.0
"""Hooks on the steps of all optimizers that hold an operator's parameters, in every loop.

Who steps need not be registered: a loop of the user's own may call the step of an optimizer within
the registered one, as SAM's `second_step` does. So a global hook of torch's, as the guard's, looks
at each optimizer that is about to step. The hooks themselves it puts on the optimizer: there they
come behind the guard's and behind the user's own, and do not see a step that one of these refuses.

A wrapper's `step` may call the step of the optimizer within it (Lookahead), and a subclass's that
of its base, where torch calls the hooks once more: that is one step. A step that a GradScaler
leaves out calls no hook.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.compiler_disable import disable_dynamo
from lockstep.operator.custom_loop_refusals import refuse_own_step, requested_loop_options
from lockstep.operator.loop_protocols import Operator
from lockstep.operator.step_seed import StepSeed
from lockstep.operator.unsaved_attributes import unsaved_attribute_listeners
from lockstep.randomness import derive_seed, preserve_rng_state
from lockstep.sync.optimizer_inspection import (
    given_closure,
    inner_optimizers,
    is_step_running,
    optimizer_parameters,
    share_parameters,
    with_closure,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.operator.training_parts import TrainingParts

_log = logging.getLogger("lockstep")

StepListener: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Is called with the arguments of a hook on ``Optimizer.step``."""


class OptimizerStepHooks:
    """Calls listeners before and after each step, in the order in which they were added.

    Args:
        operator: after its `setup`.
        run: what it registered.

    Attributes:
        seed: seeds each step, when all have been called that are called before it; None where other
            hooks of the same run do so.
        is_at_work: False between two calls of a worker in the driver's process: a step is then none
            of the run's, but one of the user's program, which has the same objects.
    """

    seed: StepSeed | None = None
    is_at_work: bool = True

    def __init__(self, operator: Operator, run: TrainingParts) -> None:
        self._state = operator._lockstep
        self._run = run
        self._before: list[StepListener] = []
        self._after: list[StepListener] = []
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unregistered: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._begun: list[Optimizer] = []  # steps that have not ended; some of them may have raised
        for optimizer in run.optimizers:
            self._hook(optimizer)
        # Weakly: the process keeps a global hook, also of a trainer that nobody has shut down.
        found = weakref.WeakMethod(self._hook_if_ours)

        def look(optimizer: Optimizer, *_: Any) -> None:
            hook_if_ours = found()
            if hook_if_ours is not None:
                hook_if_ours(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(disable_dynamo(look)))

    def add(self, *, before: StepListener | None = None, after: StepListener | None = None) -> None:
        """Call `before` and `after` from now on; what `before` raises refuses the step."""
        self._before += [] if before is None else [before]
        self._after += [] if after is None else [after]

    def close(self) -> None:
        """Take the hooks off; an optimizer may be the user's own, and outlive the operator."""
        for handle in self._handles:
            handle.remove()

    def _hook_if_ours(self, optimizer: Optimizer) -> None:
        if not self.is_at_work or optimizer in self._hooked:
            return
        # Looked up anew: weights that are cut into shards are other parameters.
        own = set(map(id, self._run.parameters()))
        if any(id(parameter) in own for parameter in optimizer_parameters(optimizer)):
            self._hook(optimizer)
            registered = self._run.optimizers
            inner = [each for outer in registered for each in inner_optimizers(outer)]
            if not any(optimizer is each for each in (*registered, *inner)):
                self._unregistered.add(optimizer)

    def _hook(self, optimizer: Optimizer) -> None:
        # Not traced: a compiled step would guard on all that the listeners read.
        before = disable_dynamo(lambda *arguments: self._before_step(*arguments))
        after = disable_dynamo(lambda *arguments: self._after_step(*arguments))
        self._hooked.add(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.is_at_work:
            return None
        if self._begun and not is_step_running(self._begun):
            self._begun.clear()
        if self._is_within_another_step(optimizer):
            self._begun.append(optimizer)
            return None
        for listener in self._before:
            listener(optimizer, args, kwargs)
        self._begun.append(optimizer)
        if self.seed is None:
            return None
        closure = given_closure(args, kwargs)
        self.seed.begin(keeps_draws=closure is not None)
        return None if closure is None else with_closure(args, kwargs, self.seed.outside(closure))

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if optimizer in self._begun:
            self._begun.remove(optimizer)
        if not self.is_at_work or self._is_within_another_step(optimizer):
            return
        if self.seed is not None:
            self.seed.end(optimizer)
        for listener in self._after:
            listener(optimizer, args, kwargs)
        if optimizer in self._unregistered and optimizer.state:
            self._unregistered.discard(optimizer)
            self._warn_of_lost_state(optimizer)

    def _warn_of_lost_state(self, optimizer: Optimizer) -> None:
        if self._state.context.world_rank == 0 and not self._state.context.is_trial:
            _log.warning(
                "%s steps registered parameters and is not registered: no checkpoint holds its"
                " state, and a worker that joins after a death begins without it."
                " Register it: self.register(..., optimizers=[...]) in setup",
                type(optimizer).__name__,
            )

    def _is_within_another_step(self, optimizer: Optimizer) -> bool:
        """Whether a step is a part of one that has begun, of the same object or parameters."""
        return any(each is optimizer or share_parameters(each, optimizer) for each in self._begun)


def add_step_listeners(operator: Operator, hooks: OptimizerStepHooks) -> None:
    """Let each step be recorded, and then `after_step` be called."""
    state = operator._lockstep

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not state.global_batch.is_stepping:
            refuse_own_step(operator)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _was_taken(optimizer):
            _note_step(operator, optimizer)

    hooks.seed = StepSeed(operator)
    refuses = operator._lockstep_overrides_loop() and requested_loop_options(state.context.options)
    hooks.add(before=before if refuses else None, after=after)
    note, compare = unsaved_attribute_listeners(operator)
    hooks.add(before=note, after=compare)


def _was_taken(optimizer: Optimizer) -> bool:
    # The scaler tells a fused optimizer of infinities, and the optimizer skips the step itself.
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def _note_step(operator: Operator, optimizer: Optimizer) -> None:
    state = operator._lockstep
    number = len(state.global_batch.stepped_optimizers)
    # Before `after_step`, which may fail: the step was taken.
    state.global_batch.stepped_optimizers.append(optimizer)
    state.have_stepped.add(optimizer)
    if state.step_log is not None:
        state.step_log.note_rates(group.get("lr") for group in optimizer.param_groups)
    # An optimizer that `after_step` itself steps does not call it again.
    if operator._lockstep_overrides(Operator.after_step) and not state.runs_after_step:
        # The same numbers on every rank: what is drawn goes into weights that ranks share.
        seed = derive_seed(
            state.context.shard_assignment.seed, "after_step", operator.global_step, number
        )
        state.runs_after_step = True
        try:
            with torch.no_grad(), preserve_rng_state(seed):
                operator.after_step()
        finally:
            state.runs_after_step = False
