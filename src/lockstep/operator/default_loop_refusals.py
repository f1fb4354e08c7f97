# SPDX-License-Identifier: Apache-2.0
"""Refusals of optimizers that the default loop would not step, or not alike on all ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lockstep.errors import ConfigurationError
from lockstep.operator.default_forward import require_single
from lockstep.operator.loop_protocols import Operator
from lockstep.operator.registered_schedulers import ids_of_groups
from lockstep.operator.registration import registered_parts
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import needs_closure, optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from lockstep.operator.operator_state import OperatorState
    from lockstep.operator.training_parts import TrainingParts


_log = logging.getLogger("lockstep")


def stepped_optimizer(operator: Operator) -> Optimizer:
    """The one that the default loop steps: `self.optimizer`, else the only registered one.

    Raises:
        ConfigurationError: there is none, or it is not registered.
    """
    run = registered_parts(operator)
    optimizer: Optimizer = require_single(operator, "optimizer", run.optimizers)
    if any(optimizer is each for each in run.optimizers):
        return optimizer
    groups = getattr(optimizer, "param_groups", ())
    known = ids_of_groups(run)  # a wrapper of a registered one shares its groups
    if groups and not any(id(group) in known for group in groups):
        raise ConfigurationError(
            "self.optimizer is not registered, and the default loop would step it",
            where=type(operator).__name__,
            got=f"{type(optimizer).__name__}, where"
            f" {', '.join(type(each).__name__ for each in run.optimizers)} was registered",
            cause="no checkpoint would hold it: a run that resumes, and a worker that joins, would"
            " go on with the registered one",
            fix="change its settings in self.optimizer.param_groups; or register both in setup,"
            " override train_batch, and step there the one of the phase",
        )
    return optimizer


def refuse_optimizers(operator: Operator) -> None:
    """Before the default loop trains: refuse optimizers that it cannot step.

    Raises:
        ConfigurationError: others than the one that is stepped hold parameters that train, or it
            needs a closure, or an fp16 scale would let one rank alone skip a step.
    """
    run, state = registered_parts(operator), operator._lockstep
    if operator._lockstep_overrides_loop():
        return
    optimizer = stepped_optimizer(operator)
    left = _parameters_left([optimizer], run.optimizers) if len(run.optimizers) > 1 else 0
    if left and not operator._lockstep_overrides(Operator.after_step):
        what = f"the default loop steps one optimizer, and {len(run.optimizers)} were registered"
        cause = f"{left} parameters of the others would never change"
        fix = "override train_batch, and step each of them there; or give one optimizer all groups"
    elif needs_closure(optimizer):
        what = "the default loop gives an optimizer no closure, and this one needs one"
        cause = "it evaluates the loss itself, several times in a step"
        fix = "override train_batch, and call self.optimizer.step(closure) there"
    elif _may_skip_alone(run, state):
        what = 'precision="fp16" with parameters that are each worker\'s own (lockstep.local)'
        cause = "where a local gradient overflows, one worker would skip a step that others take"
        fix = 'precision="bf16"'
    else:
        return
    names = ", ".join(type(each).__name__ for each in run.optimizers)
    raise ConfigurationError(what, where=type(operator).__name__, got=names, cause=cause, fix=fix)


def warn_of_optimizers_left(operator: Operator) -> None:
    """After a pass of the default loop: warn of optimizers that the user's `after_step` was to step
    (see `refuse_optimizers`), and has not."""
    run, state = registered_parts(operator), operator._lockstep
    stepped = [each for each in run.optimizers if each in state.have_stepped]
    left = [each for each in run.optimizers if each not in state.have_stepped]
    if state.has_warned_of_optimizers_left or operator._lockstep_overrides_loop():
        return
    if not stepped or not _parameters_left(stepped, left):
        return
    state.has_warned_of_optimizers_left = True
    if state.context.world_rank == 0:
        _log.warning(
            "%s has stepped and %s has not: the default loop steps one optimizer, and what the"
            " others hold does not change. Step them in after_step, or override train_batch",
            *(", ".join(type(each).__name__ for each in these) for these in (stepped, left)),
        )


def _may_skip_alone(run: TrainingParts, state: OperatorState) -> bool:
    """Whether a scaler would look at gradients that are each rank's own."""
    if state.context.options.precision != "fp16" or state.context.world_size == 1:
        return False
    return any(is_local(each) and each.requires_grad for each in run.parameters())


def _parameters_left(stepped: Iterable[Optimizer], optimizers: Iterable[Optimizer]) -> int:
    """How many parameters train that `optimizers` hold, and none of `stepped`."""
    held = {id(p) for each in stepped for p in optimizer_parameters(each)}
    others = {id(p): p for each in optimizers for p in optimizer_parameters(each)}
    return sum(p.requires_grad for number, p in others.items() if number not in held)
