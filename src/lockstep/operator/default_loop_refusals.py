# SPDX-License-Identifier: Apache-2.0
"""Refusals of optimizers that the default loop would not step, or not alike on all ranks."""

from __future__ import annotations

from lockstep.errors import ConfigurationError
from lockstep.operator.loop_protocols import Operator
from lockstep.operator.registration import registered_parts
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import needs_closure


def refuse_optimizers(operator: Operator) -> None:
    """Before the default loop trains: refuse optimizers that it cannot step.

    Raises:
        ConfigurationError: there are several, or one needs a closure, or an fp16 scale would let
            one rank alone skip a step.
    """
    run, context = registered_parts(operator), operator._lockstep.context
    if operator._lockstep_overrides_loop():
        return
    has_local = context.world_size > 1 and any(map(is_local, run.parameters()))
    if len(run.optimizers) > 1 and not operator._lockstep_overrides(Operator.after_step):
        what = f"the default loop steps one optimizer, and {len(run.optimizers)} were registered"
        cause = "the parameters of the others would never change"
        fix = "override train_batch, and step each of them there; or give one optimizer all groups"
    elif any(map(needs_closure, run.optimizers)):
        what = "the default loop gives an optimizer no closure, and this one needs one"
        cause = "it evaluates the loss itself, several times in a step"
        fix = "override train_batch, and call self.optimizer.step(closure) there"
    elif context.options.precision == "fp16" and has_local:
        what = 'precision="fp16" with parameters that are each worker\'s own (lockstep.local)'
        cause = "where a local gradient overflows, one worker would skip a step that others take"
        fix = 'precision="bf16"'
    else:
        return
    names = ", ".join(type(each).__name__ for each in run.optimizers)
    raise ConfigurationError(what, where=type(operator).__name__, got=names, cause=cause, fix=fix)
